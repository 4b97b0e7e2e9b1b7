"""What the file of a comparison may say, and what it is told of mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comparison.helpers import base_file, comparison, tables
from meristem.comparison.file import Budget, Contrast, load_comparison, read_comparison
from meristem.errors import InputError

SEARCH = {"trials": 3, "seeds": [9], "space": {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}}}
ROOT = Path(__file__).resolve().parents[2]


def test_every_arm_is_compared_with_the_baseline_of_the_primary_contrast(tmp_path: Path) -> None:
    arms = {**tables()["arms"], "reverse": {"model.schedule": "reverse"}}
    found = comparison(tmp_path, arms=arms)
    assert found.primary == (Contrast("prism", "uniform"),)
    assert found.secondary == (Contrast("reverse", "uniform"),)
    assert found.arms["uniform"].changes == {"model.schedule": "uniform"}
    assert (found.name, found.budget) == ("question", Budget())


RATES: dict[str, Any] = {"rates": [1e-3, 2e-3], "rate_seeds": [9]}


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"seed": [0, 1]}, "seed", "did you mean seeds?"),
        ({"config": None}, "config", "must name a configuration"),
        ({"seeds": [0]}, "seeds", "at least 2"),
        ({"seeds": [0, 0]}, "seeds", "different integers"),
        ({"seeds": [0, -1]}, "seeds", "from 0 to 999,999,999"),
        ({"arms": {}}, "arms", "tables"),
        ({"arms": {"a/b": {}}}, "arms", "a name of letters"),
        ({"arms": {"a b": {}, "a-b": {}}, "primary": ["a b", "a-b"]}, "arms", "must differ from 'a b'"),
        ({"primary": ["prism"]}, "primary", "two different arms"),
        ({"primary": ["prism", "prism"]}, "primary", "two different arms"),
        ({"primary": ["prism", "unifrm"]}, "primary", "one of the arms uniform, prism"),
        ({"contrasts": [["prism", "x"]]}, "contrasts", "one of the arms"),
        ({"rates": [1e-3]}, "rates", "two or more"),
        ({"rates": [1e-3, 2e-3]}, "rate_seeds", "seeds of their own"),
        ({"rate_seeds": [9]}, "rate_seeds", "together with rates"),
        ({"rates": [1e-3, 2e-3], "rate_seeds": [1, 9]}, "rate_seeds", "share no seed with seeds (1)"),
        ({"rate_length": 0.5}, "rate_length", "rates, which are not given"),
        ({**RATES, "rate_length": 1.5}, "rate_length", "above 0 and at most 1"),
        ({"arms": {"a": {}, "b": {"rate_of": "a"}}, "primary": ["a", "b"]}, "arms.b.rate_of", "there are no rates"),
        ({**RATES, "arms": {"a": {}, "b": {"rate_of": "c"}}, "primary": ["a", "b"]}, "arms.b.rate_of", "of its own: a"),
        ({**RATES, "arms": {"a": {"rate_of": "b"}, "b": {"rate_of": "a"}}, "primary": ["a", "b"]}, "arms.a.rate_of",
         "none, as every arm has that of another"),
        ({"train": {"steps": 20}}, "train", "belongs in an arm, a preset"),
        ({"sweep": {"model.widht": [32, 64]}}, "sweep.model.widht", "did you mean model.width?"),
        ({"sweep": {"optimizer.decay": [0.5, 7.0]}}, "sweep.optimizer.decay", "must be"),
        ({"sweep": {"eval.windows": [4, 8]}}, "sweep.eval.windows", "measured on the same held-out data"),
        ({"search": {**SEARCH, "space": {"eval.windows": [4, 8]}}}, "search.space", "cannot be searched"),
        ({"arms": {"a": {"model.schedule": "uniform"}, "b": {"model.start_from": "@a", "growth.depth.layers": 4}},
          "primary": ["a", "b"]}, "arms.b.growth.depth.layers", "does nothing: the policies of b are none"),
        ({"arms": {"a": {}, "b": {"model.start_from": "@a", "growth.policies": ["dept"]}}, "primary": ["a", "b"]},
         "arms.b.growth.policies", "did you mean depth?"),
        ({"arms": {"a": {}, "b": {"model.plan": "@a.plan", "optimizer.kind": "adma"}}, "primary": ["a", "b"]},
         "arms.b.optimizer.kind", "must be one of"),
        ({"arms": {"a": {}, "b": {"model.start_from": "@a", "model.layers": 4}}, "primary": ["a", "b"]},
         "arms.b.model.layers", "does nothing: model.start_from of b brings a whole plan along"),
        ({"arms": {"a": {}, "b": {"model.start_from": "@a", "model.plan": "@a.plan"}}, "primary": ["a", "b"]},
         "arms.b.model.start_from", "has a plan, so model.plan cannot be given besides"),
        ({"arms": {"a": {}, "b": {"model.start_from": "@a", "growth.policies": ["depth"],
                                  "growth.depth.start_layers": 1}}, "primary": ["a", "b"]},
         "budget.kind", "must be flops for b"),
        ({"arms": {"a": {}, "b": {"model.start_from": "@a", "growth.policies": ["depth"],
                                  "growth.depth.start_layers": 1}}, "primary": ["a", "b"],
          "budget": {"kind": "flops", "flops": 1e9}},
         "arms.b.growth.depth.start_layers", "cannot be given with model.start_from"),
        ({**RATES, "arms": {"a": {}, "b": {"rate_of": "a"}, "c": {"model.plan": "@b.plan"}}, "primary": ["a", "b"]},
         "arms.b.rate_of", "c takes after it, also while rates are tried"),
        ({"margin": -1}, "margin", "above 0"),
        ({"measure": "loss"}, "measure", "must be one of held_out_loss"),
        ({"budget": {"kind": "flop"}}, "budget.kind", "must be one of tokens, flops"),
        ({"budget": {"kind": "flops"}}, "budget", "either flops or of"),
        ({"budget": {"kind": "flops", "tokens": 3}}, "budget.tokens", "unknown key"),
        ({"budget": {"kind": "flops", "of": "other"}}, "arms.uniform.budget.of", "one of the arms"),
        ({"budget": {"of": "prism"}}, "budget.of", "is for other kinds"),
        ({"arms": {"a": {"growth.policies": ["depth"]}, "b": {}}, "primary": ["a", "b"]}, "budget.kind",
         "must be flops for a, named or of another arm"),
        ({"arms": {"a": {"growth.policies": ["depth"], "budget": {"kind": "seconds", "seconds": 3}}, "b": {}},
          "primary": ["a", "b"]}, "arms.a.budget.kind", "must be flops for a"),
        ({"arms": {"a": {"growth.policies": ["depth"]}, "b": {}}, "primary": ["a", "b"],
          "budget": {"kind": "flops", "of": "a"}}, "budget.of",
         "leaves open what a itself may spend; give it an amount, arms.a.budget.flops"),
        ({"sweep": {"model.width": []}}, "sweep.model.width", "one value or more"),
        ({"sweep": {"model.schedule": ["bump"]}}, "arms.uniform.model.schedule", "is what sweep says"),
        ({"search": {"trials": 9}}, "search.seeds", "one at least"),
        ({"search": {**SEARCH, "seeds": [9, 1]}}, "search.seeds", "share no seed with seeds (1)"),
        ({"search": {**SEARCH, "trials": 1}}, "search.trials", "at least 2"),
        ({"search": {**SEARCH, "trails": 5}}, "search.trails", "unknown key"),
        ({"search": {**SEARCH, "arms": ["prsm"]}}, "search.arms", "some of the arms uniform, prism"),
        ({"search": {**SEARCH, "space": {}}}, "search.space", "must be a table"),
        ({"search": {**SEARCH, "space": {"optimizer.rl": [1, 2]}}}, "optimizer.rl", "did you mean optimizer.lr?"),
        ({"search": {**SEARCH, "space": {"optimizer.lr": {"low": 1}}}}, "search.space.optimizer.lr", "high = .."),
        ({"search": {**SEARCH, "space": {"optimizer.lr": {"low": 2, "high": 1}}}}, "search.space.optimizer.lr",
         "from a lower to a higher"),
        ({"search": {**SEARCH, "space": {"train.steps": [8, 9]}}}, "search.space", "cannot be searched"),
        ({"search": {**SEARCH, "space": {"model.schedule": ["bump", "prism"]}}}, "arms.uniform.model.schedule",
         "is what search.space says"),
        ({"search": SEARCH, "rates": [1e-3, 2e-3], "rate_seeds": [9]}, "rates", "put optimizer.lr in its space"),
        ({"search": {**SEARCH, "space": {"model.width": [32, 64]}}, "budget": {"kind": "seconds", "seconds": 9}},
         "search.space", "would change the seconds of an update of uniform"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, changes: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        comparison(tmp_path, **changes)
    assert error.value.field == field
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("arm", "field", "said"),
    [
        ({"model.shedule": "prism"}, "arms.prism.model.shedule", "did you mean model.schedule?"),
        ({"width": 40}, "arms.prism.width", "did you mean model.width?"),
        ({"model.width.x": 40}, "arms.prism.model.width.x", "did you mean model.width?"),
        ({"growth.stak.at": [0.6]}, "arms.prism.growth.stak.at", "did you mean growth.stack.at?"),
        ({"growth.sgt.pases": 3}, "arms.prism.growth.sgt.pases", "did you mean growth.sgt.passes?"),
        ({"optimizer.decay": 7.0}, "arms.prism.optimizer.decay", "must be"),
        ({"train.seed": 3}, "arms.prism.train.seed", "is what the seeds of the file say"),
        ({"train.steps": 3}, "arms.prism.train.steps", "is what the budget says"),
        ({"eval.patience": 3}, "arms.prism.eval.patience", "does not spend its budget"),
        ({"eval.windows": 4}, "arms.prism.eval.windows", "measured on the same held-out data"),
        ({"growth.policies": "stack"}, "arms.prism.growth.policies", "must be a list of policies"),
        ({"growth.sgt.passes": 3}, "arms.prism.growth.sgt.passes", "does nothing: the policies of prism are none"),
        ({"model.plan": "@other.plan"}, "arms.prism.model.plan", "one of the arms"),
        ({"model.plan": "@uniform.shape"}, "arms.prism.model.plan", "must end in one of .run, .plan"),
        ({"model.plan": "@prism.plan"}, "arms", "goes in a circle"),
    ],
)  # fmt: skip
def test_mistakes_of_an_arm_are_named(tmp_path: Path, arm: dict[str, Any], field: str, said: str) -> None:
    arms = {"uniform": {"model.schedule": "uniform"}, "prism": arm}
    with pytest.raises(InputError, match=said.replace(".", r"\.").replace("?", r"\?")) as error:
        comparison(tmp_path, arms=arms)
    assert error.value.field == field


def test_a_configuration_is_told_from_a_comparison(tmp_path: Path) -> None:
    base_file(tmp_path)
    with pytest.raises(InputError) as error:
        load_comparison(tmp_path / "base.toml")
    assert str(error.value) == (
        "arms = None: must be tables [arms.NAME]: base.toml is a configuration; a comparison is a file of its own, "
        "with config = 'base.toml' and arms"
    )


def test_a_preset_changes_the_file_and_the_configuration(tmp_path: Path) -> None:
    preset = {"tiny": {"seeds": [5, 6, 7], "model": {"width": 64}, "train.batch_size": 2,
                       "arms": {"prism": {"model.schedule": "bump"}}}}  # fmt: skip
    found = read_comparison(tables(preset=preset), base_file(tmp_path), "tiny")
    assert found.seeds == (5, 6, 7)
    assert (found.values["model.width"], found.values["train.batch_size"]) == (64, 2)
    assert found.arms["prism"].changes == {"model.schedule": "bump"}
    with pytest.raises(InputError, match="must be one of tiny"):
        read_comparison(tables(preset=preset), base_file(tmp_path), "large")


def test_the_command_line_comes_last(tmp_path: Path) -> None:
    path = base_file(tmp_path)
    preset = {"tiny": {"model.width": 64}}
    found = read_comparison(tables(preset=preset), path, "tiny", ["--model.width", "128", "--data.path", "elsewhere"])
    assert (found.values["model.width"], found.values["data.path"]) == (128, "elsewhere")


def test_a_grid_lays_out_every_arm_at_every_point(tmp_path: Path) -> None:
    arms = {**tables()["arms"], "same": {"model.plan": "@prism.plan"}}
    found = comparison(tmp_path, arms=arms, sweep={"model.width": [32, 64], "train.batch_size": [4, 8]})
    assert len(found.arms) == 12
    assert found.arms["prism @ width=64, batch_size=4"].changes == {
        "model.width": 64, "train.batch_size": 4, "model.schedule": "prism",
    }  # fmt: skip
    assert found.references("same @ width=32, batch_size=8") == {"prism @ width=32, batch_size=8"}
    assert len(found.primary) == len(found.secondary) == 4
    assert all(c.arm.partition(" @ ")[2] == c.baseline.partition(" @ ")[2] for c in found.primary)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/compare").glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("preset", [None, "tiny"])
def test_ready_comparisons_can_be_read(path: Path, preset: str | None) -> None:
    found = load_comparison(path, preset)
    assert len(found.seeds) >= 2
    assert found.margin
    assert bool(found.rates) or preset == "tiny"  # a fair one has each arm at its own best rate
