"""Runs and their lengths against formulas written out here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from comparison.helpers import comparison, result, results, tables, trained
from meristem.comparison.analysis import analyse
from meristem.comparison.file import MEASURING_SEED
from meristem.comparison.planning import (
    Lost,
    RunKey,
    Waiting,
    best_rate,
    configuration,
    count_of_runs,
    known_keys,
    measuring_keys,
    possible_keys,
    seed_key,
    updates_of,
)
from meristem.comparison.results import Result
from meristem.errors import InputError, RunError
from meristem.plan import Plan
from training.helpers import prepared

GROWN = {"growth": {"policies": ["sgt"], "sgt": {"start": 2, "window": 3}}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("planning"), 30)


def grown_arms(**budget: Any) -> dict[str, Any]:
    return {
        "plain": {"model.schedule": "uniform", **({"budget": budget} if budget else {})},
        "sgt": {"model.schedule": "uniform", **GROWN},
    }  # fmt: skip


def test_arms_share_seeds_and_nothing_else_changes(tmp_path: Path, data: Path) -> None:
    found = comparison(tmp_path, data)
    configs = [configuration(found, RunKey(arm, 7), {}) for arm in ("uniform", "prism")]
    assert [(c.train.seed, c.data.seed, c.model.schedule) for c in configs] == [(7, 7, "uniform"), (7, 7, "prism")]
    differing = {key for key in ("train.steps", "optimizer.lr", "data.path") if configs[0][key] != configs[1][key]}
    assert differing == set()


def test_policies_and_shuffled_schedules_are_drawn_by_the_seed(tmp_path: Path, data: Path) -> None:
    arms = {**grown_arms(), "shuffle": {"model.schedule": "shuffle"}}
    found = comparison(tmp_path, data, arms=arms, primary=["sgt", "plain"])
    assert configuration(found, RunKey("sgt", 7), {})["growth.sgt.seed"] == 7
    assert configuration(found, RunKey("shuffle", 7), {}).model.shuffle_seed == 7


@pytest.mark.parametrize("tokens", [128, 1000, 1281])
def test_tokens_become_updates(tmp_path: Path, data: Path, tokens: int) -> None:
    found = comparison(tmp_path, data, budget={"kind": "tokens", "tokens": tokens})
    assert configuration(found, RunKey("prism", 0), {}).train.steps == -(-tokens // (4 * 32))


def step_flops(feed_forward: int, layers: int) -> int:
    """Of one update of the tiny model, by hand: 3 x 2 FLOPs for every weight and token, and causal attention."""
    d, v, t, batch = 32, 320, 32, 4
    weights = layers * (4 * d * d + 3 * d * feed_forward) + v * d
    return 3 * (2 * weights + layers * 2 * (t + 1) * d) * batch * t


def test_flops_become_updates_of_each_arm(tmp_path: Path, data: Path) -> None:
    arms = {"uniform": {"model.schedule": "uniform"}, "prism": {"model": {"schedule": "uniform", "layers": 3}}}
    budget = 10**9
    found = comparison(tmp_path, data, arms=arms, budget={"kind": "flops", "flops": budget})
    steps = [configuration(found, RunKey(arm, 0), {}).train.steps for arm in ("uniform", "prism")]
    assert steps == [-(-budget // step_flops(48, layers)) for layers in (2, 3)]


def test_an_arm_that_grows_is_measured_first_and_then_as_long_as_its_flops_allow(tmp_path: Path, data: Path) -> None:
    found = comparison(
        tmp_path, data, arms=grown_arms(), primary=["sgt", "plain"], budget={"kind": "flops", "flops": 4e8}
    )
    assert measuring_keys(found, {}) == [RunKey("sgt", MEASURING_SEED, measuring=1)]
    with pytest.raises(Waiting):
        configuration(found, RunKey("sgt", 0), {})
    (key,) = measuring_keys(found, {})
    assert configuration(found, key, {}).train.steps == 12
    known = {key: result("sgt", 2, 3.0, steps=12, flops=10**8)}
    second = RunKey("sgt", MEASURING_SEED, measuring=2)
    assert measuring_keys(found, known) == [key, second]
    assert configuration(found, second, known).train.steps == 48
    with pytest.raises(Waiting):  # a longer run may grow otherwise: its length is not known yet
        configuration(found, RunKey("sgt", 0), known)
    known[second] = result("sgt", 2, 3.0, steps=48, flops=399_000_000)
    assert measuring_keys(found, known) == [key, second]
    assert configuration(found, RunKey("sgt", 0), known).train.steps == 49


@pytest.mark.parametrize("grown_at", [0.0, 30.0, 80.0])
def test_lengths_of_arms_that_grow_at_a_fixed_time_are_found_in_few_rounds(
    tmp_path: Path, data: Path, grown_at: float
) -> None:
    """An update costs twice as much after so many; the length at which that comes to the budget is solved by hand."""
    budget = 5e8
    found = comparison(
        tmp_path, data, arms=grown_arms(), primary=["sgt", "plain"], budget={"kind": "flops", "flops": budget}
    )

    def spent(steps: int) -> float:
        return 1e6 * (steps + max(0.0, steps - grown_at))

    exact = (budget / 1e6 + grown_at) / 2
    known: dict[RunKey, Result] = {}
    while new := [key for key in measuring_keys(found, known) if key not in known]:
        (key,) = new
        steps = configuration(found, key, known).train.steps
        known[key] = result("sgt", key.seed, 3.0, steps=steps, flops=round(spent(steps)))
    assert len(known) <= 3
    assert configuration(found, RunKey("sgt", 0), known).train.steps == pytest.approx(exact, rel=0.01)


def test_arms_that_grow_end_at_their_budget(tmp_path: Path, data: Path) -> None:
    """Real runs: loops are born after a fixed number of updates, so that cost is not in proportion to length."""
    budget = 3 * 12 * step_flops(48, 2)
    found = comparison(
        tmp_path, data, arms=grown_arms(), primary=["sgt", "plain"], budget={"kind": "flops", "flops": budget}
    )
    known = trained(found, tmp_path / "out")
    assert count_of_runs(found, known) == len(known)
    for seed in found.seeds:
        plain, sgt = known[RunKey("plain", seed)], known[RunKey("sgt", seed)]
        assert plain.flops == budget
        assert sgt.steps < plain.steps
        assert abs(sgt.flops - budget) < 1.1 * step_flops(48, 2)  # an update, with its loops
    assert all(abs(off) < 0.03 for row in analyse(found, known).arms for off in row.off_budget)


def test_an_arm_that_finds_its_depth_is_given_its_flops_and_not_measured(tmp_path: Path, data: Path) -> None:
    budget = 30.5 * step_flops(48, 1)
    arms = {"depth": {"model.schedule": "uniform", "growth.policies": ["depth"]}, "all": {"model.schedule": "uniform"}}
    found = comparison(tmp_path, data, arms=arms, primary=["depth", "all"], budget={"kind": "flops", "flops": budget})
    assert measuring_keys(found, {}) == []
    config = configuration(found, RunKey("depth", 0), {})
    assert config.train.flops == budget
    assert updates_of(config) == 30
    known = trained(found, tmp_path / "out")
    assert {known[RunKey("depth", seed)].steps for seed in found.seeds} == {30}
    assert {known[RunKey("all", seed)].steps for seed in found.seeds} == {-(-budget // step_flops(48, 2))}


def test_updates_that_flops_replace_do_not_limit_growth(tmp_path: Path, data: Path) -> None:
    """The 12 updates of the file would be too few for a birth; those that the FLOPs suffice for are not."""
    births = {"start_heads": 1, "feed_every": 1, "feeds": 1, "decide_every": 2, "calibration": 10}
    arms = {
        "both": {"model.schedule": "uniform", "growth": {"policies": ["depth", "incrt"], "incrt": births}},
        "after": {"model.schedule": "uniform", "growth": {"policies": ["depth", "incrt"], "incrt": births},
                  "budget": {"kind": "flops", "of": "both"}},
    }  # fmt: skip
    budget = 300 * step_flops(48, 1)
    found = comparison(tmp_path, data, arms=arms, primary=["both", "after"], budget={"kind": "flops", "flops": budget})
    known = {RunKey("both", 0): result("both", 0, 3.0, flops=budget)}
    for arm in arms:
        config = configuration(found, RunKey(arm, 0), known)
        assert (config.train.flops, config.growth.policies) == (budget, ("depth", "incrt"))


def test_an_arm_that_diverges_while_it_is_measured_is_named(tmp_path: Path, data: Path) -> None:
    found = comparison(
        tmp_path, data, arms=grown_arms(), primary=["sgt", "plain"], budget={"kind": "flops", "flops": 4e8}
    )
    known = {RunKey("sgt", MEASURING_SEED, measuring=1): result("sgt", 2, 3.0, scores={})}
    with pytest.raises(RunError, match="diverged, so that the length of sgt cannot be found"):
        measuring_keys(found, known)


def test_a_seed_more_leaves_what_was_measured_as_it_is(tmp_path: Path, data: Path) -> None:
    keys = [
        measuring_keys(comparison(tmp_path, data, seeds=seeds, budget={"kind": "seconds", "seconds": 3}), {})
        for seeds in ([0, 1], [0, 1, 7])
    ]
    assert keys[0] == keys[1]


def test_arms_with_other_batches_see_as_many_tokens(tmp_path: Path, data: Path) -> None:
    """The base has 12 updates of 4 windows of 32 tokens."""
    arms = {"uniform": {}, "prism": {"train.batch_size": 6, "model.context": 16}}
    found = comparison(tmp_path, data, arms=arms)
    assert [configuration(found, RunKey(arm, 0), {}).train.steps for arm in arms] == [12, 12 * 4 * 32 // (6 * 16)]


def test_flops_of_another_arm_are_those_it_counted_with_the_same_seed(tmp_path: Path, data: Path) -> None:
    found = comparison(tmp_path, data, arms=grown_arms(kind="flops", of="sgt"), primary=["sgt", "plain"])
    with pytest.raises(Waiting):
        configuration(found, RunKey("plain", 1), {})
    known = {RunKey("sgt", seed): result("sgt", seed, 3.0, flops=flops) for seed, flops in ((0, 3e8), (1, 5e8))}
    steps = [configuration(found, RunKey("plain", seed), known).train.steps for seed in (0, 1)]
    assert steps == [-(-flops // step_flops(48, 2)) for flops in (300_000_000, 500_000_000)]


@pytest.mark.parametrize("kind", ["tokens", "flops", "seconds"])
def test_less_than_one_update_is_no_budget(tmp_path: Path, data: Path, kind: str) -> None:
    least = {"tokens": 4 * 32, "flops": step_flops(48, 2), "seconds": 0.1}[kind]
    found = comparison(tmp_path, data, budget={"kind": kind, kind: 0.01})
    known = {key: result(key.arm, 2, 3.0, steps=60, training_seconds=6.0) for key in measuring_keys(found, {})}
    with pytest.raises(InputError) as error:
        configuration(found, RunKey("prism", 0), known)
    assert str(error.value) == f"budget.{kind} = 0.01: is less than prism needs for one update, {least:.3g}"


@pytest.mark.parametrize(("kind", "policies"), [("tokens", []), ("flops", []), ("seconds", []), ("flops", ["depth"])])
def test_less_than_one_update_to_try_rates_in_is_too_short(
    tmp_path: Path, data: Path, kind: str, policies: list[str]
) -> None:
    """The budget has 60 updates, of which a thousandth is left; depth begins with one block."""
    amount = {"tokens": 60 * 4 * 32, "flops": 60 * step_flops(48, 1 if policies else 2), "seconds": 6.0}[kind]
    arms = {"uniform": {"model.schedule": "uniform", "growth.policies": policies}, "other": {}}
    found = comparison(
        tmp_path, data, arms=arms, primary=["other", "uniform"], budget={"kind": kind, kind: amount},
        rates=[1e-3, 2e-3], rate_seeds=[9], rate_length=0.001,
    )  # fmt: skip
    known = {key: result(key.arm, 2, 3.0, steps=60, training_seconds=6.0) for key in measuring_keys(found, {})}
    with pytest.raises(InputError) as error:
        configuration(found, RunKey("uniform", 9, 1e-3), known)
    assert str(error.value) == ("rate_length = 0.001: leaves uniform 0.06 of an update; must be about 0.0167 or more")


def test_less_than_one_update_is_refused_by_what_is_written(tmp_path: Path, data: Path) -> None:
    """A budget of its own, that of another arm, or the updates of the configuration."""
    arms: dict[str, Any] = {"a": {"model.schedule": "uniform"}, "b": {"budget": {"kind": "flops", "flops": 5}}}
    arms |= {"c": {"model.schedule": "uniform", "budget": {"kind": "flops", "of": "a"}}, "d": {"train.batch_size": 50}}
    found = comparison(tmp_path, data, arms=arms, primary=["a", "b"])
    known, least = {RunKey("a", 0): result("a", 0, 3.0, flops=7)}, f"{step_flops(48, 2):.3g}"
    for arm, said in (
        ("b", r"arms\.b\.budget\.flops = 5: is less than b needs for one update, "),
        ("c", rf"arms\.c\.budget\.of = 'a': spent 7 flops, less than c needs for one update, {re.escape(least)}"),
        ("d", r"train\.steps = 12: are fewer tokens than one update of d has"),
    ):
        with pytest.raises(InputError, match=said):
            configuration(found, RunKey(arm, 0), known)


def test_seconds_are_measured_alone_and_become_updates(tmp_path: Path, data: Path) -> None:
    found = comparison(tmp_path, data, budget={"kind": "seconds", "seconds": 30})
    assert [key.arm for key in measuring_keys(found, {})] == ["uniform", "prism"]
    known = {
        key: result(key.arm, 2, 3.0, steps=60, training_seconds=seconds)
        for key, seconds in zip(measuring_keys(found, {}), (6.0, 12.0), strict=True)
    }
    assert [configuration(found, RunKey(arm, 0), known).train.steps for arm in found.arms] == [300, 150]


def test_seconds_of_another_arm_go_by_both_paces_alone(tmp_path: Path, data: Path) -> None:
    """What was measured side by side does not count: 12 updates of 2 seconds are 24 of 1 second."""
    found = comparison(tmp_path, data, arms=grown_arms(kind="seconds", of="sgt"), primary=["sgt", "plain"])
    assert {key.arm for key in measuring_keys(found, {})} == {"plain", "sgt"}
    known = {
        RunKey("sgt", 0): result("sgt", 0, 3.0, steps=12, training_seconds=99.0),
        RunKey("sgt", MEASURING_SEED, measuring=1): result("sgt", 2, 3.0, steps=12, training_seconds=24.0),
        RunKey("plain", MEASURING_SEED, measuring=1): result("plain", 2, 3.0, steps=60, training_seconds=60.0),
    }
    assert configuration(found, RunKey("plain", 0), known).train.steps == 24


def test_parameters_are_matched_by_the_feed_forward_size(tmp_path: Path, data: Path) -> None:
    arms = {"uniform": {"model.schedule": "uniform"}, "prism": {"model": {"schedule": "uniform", "layers": 3}}}
    found = comparison(tmp_path, data, arms=arms, budget={"kind": "parameters", "parameters": 200_000})
    for arm in found.arms:
        built = configuration(found, RunKey(arm, 0), {}).model.build(320)
        assert built.parameters == pytest.approx(200_000, rel=0.01)
    small = comparison(tmp_path, data, arms=arms, budget={"kind": "parameters", "parameters": 1000})
    with pytest.raises(InputError, match="the nearest is"):
        configuration(small, RunKey("prism", 0), {})


def test_the_best_rate_is_chosen_on_its_own_seeds_alone(tmp_path: Path, data: Path) -> None:
    found = comparison(tmp_path, data, rates=[1e-3, 2e-3], rate_seeds=[8, 9])
    assert count_of_runs(found, {}) == 2 * 2 * 2 + 2 * 2
    losses = {(8, 1e-3): 3.0, (9, 1e-3): 3.4, (8, 2e-3): 3.3, (9, 2e-3): 3.2}
    known = {RunKey("prism", seed, rate): result("prism", seed, loss) for (seed, rate), loss in losses.items()}
    assert best_rate(found, "prism", known) == 1e-3
    misleading = {RunKey("prism", seed, 2e-3): result("prism", seed, 0.1) for seed in (0, 1)}
    assert seed_key(found, "prism", 0, known | misleading) == RunKey("prism", 0, 1e-3)
    assert configuration(found, RunKey("prism", 0, 1e-3), known).optimizer.lr == 1e-3
    with pytest.raises(Waiting):
        best_rate(found, "uniform", known)
    assert {key for key in known_keys(found, known) if key.seed < 8} == {RunKey("prism", s, 1e-3) for s in (0, 1)}


def test_rates_can_be_tried_in_shorter_runs(tmp_path: Path, data: Path) -> None:
    """Whatever the budget; one that is matched to another arm's is as short as that one's run."""
    tried = {"rates": [1e-3, 2e-3], "rate_seeds": [9], "rate_length": 0.25}

    def lengths(arm: str, known: dict[RunKey, Result], **budget: Any) -> tuple[int, int]:
        arms = {"uniform": {"model.schedule": "uniform"}, "prism": {"model.schedule": "uniform"}}
        found = comparison(tmp_path, data, arms=arms, budget=budget, **tried)
        keys = (RunKey(arm, 9, 1e-3), RunKey(arm, 0, 1e-3))
        long, short = (configuration(found, key, known).train.steps for key in reversed(keys))
        return long, short

    flops = step_flops(48, 2)
    assert lengths("prism", {}, tokens=16 * 128) == (16, 4)
    assert lengths("prism", {}, kind="flops", flops=40 * flops) == (40, 10)
    assert lengths("prism", {}, kind="parameters", parameters=200_000) == (12, 3)
    paces = {RunKey("prism", MEASURING_SEED, measuring=1): result("prism", 2, 3.0, steps=60, training_seconds=60.0)}
    assert lengths("prism", paces, kind="seconds", seconds=100) == (100, 25)
    others = {
        RunKey("uniform", seed, 1e-3): result("uniform", seed, 3.0, flops=n * flops) for seed, n in ((9, 3), (0, 12))
    }
    others |= {RunKey("uniform", 9, 2e-3): result("uniform", 9, 4.0)}
    assert lengths("prism", others, kind="flops", of="uniform") == (12, 3)


def test_growth_is_judged_by_the_length_that_a_budget_gives(tmp_path: Path, data: Path) -> None:
    """Not by the updates of the configuration, which are 12 here."""
    arms = {"uniform": {}, "prism": {"growth.policies": ["stack"], "growth.stack.at": [14]}}
    common = {"model.schedule": "uniform"}
    arms = {name: common | changes for name, changes in arms.items()}
    found = comparison(tmp_path, data, arms=arms, budget={"tokens": 16 * 128})
    assert configuration(found, RunKey("prism", 0), {}).train.steps == 16
    with pytest.raises(InputError, match=r"growth.stack.at = 14.*12 updates"):
        comparison(tmp_path, data, arms=arms)
    short = comparison(tmp_path, data, arms=arms, budget={"tokens": 13 * 128})
    with pytest.raises(InputError, match=r"growth.stack.at = 14.*13 updates"):
        configuration(short, RunKey("prism", 0), {})


def test_an_arm_can_have_the_rate_of_another(tmp_path: Path, data: Path) -> None:
    arms = {**tables()["arms"], "more": {"rate_of": "prism", "budget": {"tokens": 2000}}}
    found = comparison(tmp_path, data, arms=arms, rates=[1e-3, 2e-3], rate_seeds=[9])
    assert found.arms["more"].changes == {}
    assert count_of_runs(found, {}) == 2 * 2 + 3 * 2
    known = {RunKey("prism", 9, rate): result("prism", 9, 3.0 + rate) for rate in (1e-3, 2e-3)}
    assert seed_key(found, "more", 0, known) == RunKey("more", 0, 1e-3)
    said = " ".join(analyse(found, known).notes)
    assert "more has the rate of prism: none was tried with it." in said
    assert "may lie beyond: prism (0.001)." in said


def test_a_rate_at_which_a_run_diverged_is_not_chosen(tmp_path: Path, data: Path) -> None:
    found = comparison(tmp_path, data, rates=[1e-3, 2e-3], rate_seeds=[8, 9])
    known = {RunKey("prism", s, r): result("prism", s, 3.0 - 100 * r) for r in found.rates for s in (8, 9)}
    assert best_rate(found, "prism", known) == 2e-3
    known[RunKey("prism", 9, 2e-3)] = result("prism", 9, 0.0, scores={})
    assert best_rate(found, "prism", known) == 1e-3
    known[RunKey("prism", 8, 1e-3)] = result("prism", 8, 0.0, scores={})
    with pytest.raises(RunError, match="prism: diverged at every rate of the list"):
        best_rate(found, "prism", known)


def test_nothing_takes_after_a_run_that_diverged(tmp_path: Path, data: Path) -> None:
    arms = {**grown_arms(kind="flops", of="sgt"), "static": {"growth": {"policies": ["static_loops"],
            "static_loops": {"like": "@sgt"}}}}  # fmt: skip
    found = comparison(tmp_path, data, arms=arms, primary=["sgt", "plain"])
    known = {RunKey("sgt", 0): result("sgt", 0, 3.0, scores={})}
    for arm in ("plain", "static"):
        with pytest.raises(Lost, match=f"{arm}, seed 0: cannot be run, as sgt diverged, which it takes after"):
            configuration(found, RunKey(arm, 0), known)


def test_of_accuracies_the_highest_is_best(tmp_path: Path, data: Path) -> None:
    found = comparison(tmp_path, data, rates=[1e-3, 2e-3], rate_seeds=[8], measure="accuracy")
    known = {RunKey("prism", 8, r): result("prism", 8, 3.0, scores={"accuracy": r}) for r in found.rates}
    assert best_rate(found, "prism", known) == 2e-3


def test_references_are_to_the_run_with_the_same_seed_and_rate(tmp_path: Path, data: Path) -> None:
    arms = {**grown_arms(), "static": {"growth": {"policies": ["static_loops"], "static_loops": {"like": "@sgt"}}}}
    found = comparison(tmp_path, data, arms=arms, primary=["sgt", "plain"])
    config = configuration(found, RunKey("static", 1), results({"sgt": [3.0, 3.1]}))
    assert config["growth.static_loops.like"] == "/runs/sgt/1"
    rated = comparison(tmp_path, data, arms=arms, primary=["sgt", "plain"], rates=[1e-3, 2e-3], rate_seeds=[9])
    known = {RunKey("sgt", 9, 2e-3): result("sgt", 9, 3.0)}
    assert configuration(rated, RunKey("static", 9, 2e-3), known)["growth.static_loops.like"] == "/runs/sgt/9"
    with pytest.raises(Waiting):
        configuration(rated, RunKey("static", 9, 1e-3), known)


def test_what_another_run_has_grown_can_be_taken_after(tmp_path: Path, data: Path) -> None:
    control = {"growth": {"policies": ["meristem.comparison.controls:BirthsAt"],
                          "birthsat": {"times": "@sgt.birth_times", "layers": "@sgt.other_layers"}}}  # fmt: skip
    arms = {**grown_arms(), "elsewhere": control, "same": {"model.plan": "@sgt.plan", "growth.policies": []}}
    found = comparison(tmp_path, data, arms=arms, primary=["sgt", "plain"])
    plan = Plan.uniform(layers=3, width=32, heads=2, vocabulary=320, context=32)
    known = {
        RunKey("sgt", 0): result(
            "sgt", 0, 3.0, births=[(3, 0), (6, 2), (9, 1)], heads=[2, 2, 2], plan=plan.to_dict(), folder=str(tmp_path)
        )
    }
    settings = configuration(found, RunKey("elsewhere", 0), known).growth.tables["birthsat"]
    assert settings["times"] == (3, 6, 9)
    assert all(a != b and b in range(3) for a, b in zip((0, 2, 1), settings["layers"], strict=True))
    config = configuration(found, RunKey("same", 0), known)
    assert Plan.load(str(config.model.plan)) == plan


def test_folders_are_of_one_run_each(tmp_path: Path, data: Path) -> None:
    arms = {**tables()["arms"], "two words": {"model.heads": 2}}
    found = comparison(
        tmp_path, data, arms=arms, rates=[1e-3, 2e-3], rate_seeds=[8], sweep={"train.batch_size": [2, 4]},
        budget={"kind": "seconds", "seconds": 3.0},
    )  # fmt: skip
    keys = [*known_keys(found, {}), *(RunKey(arm, seed, 1e-3) for arm in found.arms for seed in found.seeds)]
    assert len({key.path for key in keys}) == len(keys)
    assert {*keys} < {*possible_keys(found)}
