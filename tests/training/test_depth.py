"""A run that decides how deep it is: resumed bit for bit, alike on two processes, told of on its page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meristem.errors import InputError
from meristem.report.page.data import run_data
from meristem.report.pictures import draw_growth, run_text
from meristem.runs.run_folder import RunFolder
from meristem.training.growth_from_config import starting_plan, uneven_depth
from meristem.training.train import resume, train
from report.helpers import assert_labels_are_inside_and_apart, parsed, texts

from .helpers import assert_equal_runs, copy_run, final_state, metrics, run_jobs, tiny_config, trained

# Four blocks at most; a promise that is hard to refuse, so that it grows as soon as the loss is known for long enough.
SETTINGS: dict[str, Any] = {
    "model__layers": 4, "model__schedule": "uniform", "model__width": 16, "model__context": 16, "model__heads": 2,
    "train__flops": 2.1e9, "growth__policies": ["depth"], "growth__depth__promise": 0.9, "eval__every": 0,
    "growth__depth__start_layers": 1, "checkpoint__every": 50, "log__every": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def grown(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(data, tmp_path_factory.mktemp("grown") / "run", **SETTINGS)


def growth(run: RunFolder) -> list[tuple[int, int, int]]:
    """When blocks were copied, from how many to how many."""
    stacks = [e for e in run.read(run.events) if e.get("action") == "stack"]
    return [(e["step"], e["before"], e["layers"]) for e in stacks]


def test_without_a_number_it_begins_with_what_is_best_for_its_flops(data: Path, tmp_path: Path) -> None:
    """By a power of the updates that one block would have, and of the tokens of each."""
    given = {**SETTINGS, "growth__depth__start_layers": None}
    run = trained(data, tmp_path / "run", **{**given, "train__steps": 1})
    assert len(run.plan.layers) == 1
    rows, one = run.config.train.batch_size, replace(run.plan, target=())
    cost = one.cost.training_of(rows, one.context).causal
    for blocks in (1, 2, 3, 4):
        updates = 18_000 * blocks**2.5 / math.sqrt(rows * one.context)
        config = tiny_config(data, **{**given, "train__flops": updates * cost})
        plan = starting_plan(config, replace(one, layers=run.plan.target))
        assert len(plan.layers) == blocks
        assert (plan.target == ()) == (blocks == 4)  # all that there can be


def test_it_grows_in_an_ordinary_run(grown: RunFolder) -> None:
    (first, *_), (second, *_) = growth(grown)
    assert growth(grown) == [(first, 1, 2), (second, 2, 4)]
    assert 150 <= first <= second / 1.5
    assert len(grown.newest_plan.layers) == 4
    assert metrics(grown)[-2]["flops"] <= 2.1e9
    measured = [e for e in grown.read(grown.events) if "price" in e]
    assert all(e["promise"] > e["price"] >= 0 for e in measured if e.get("action") == "stack")


@pytest.mark.parametrize("last", [100, 200, 350])
def test_a_resumed_run_is_the_run(
    grown: RunFolder, last: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From before, between and after its growth. With how many blocks it began is said when it begins."""
    copy = copy_run(grown, tmp_path / "copy", last=last)
    capsys.readouterr()
    resume(copy.path)
    assert "Begins with" not in capsys.readouterr().out
    assert_equal_runs(copy, grown)
    assert growth(copy) == growth(grown)
    assert final_state(copy) == final_state(grown)


def test_two_processes_decide_alike(data: Path, grown: RunFolder, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(data, **{**SETTINGS, "train__micro_batch": None}).to_toml(), encoding="utf-8")
    run_jobs((2, "train", config, tmp_path / "run"))
    assert growth(RunFolder.open(tmp_path / "run")) == growth(grown)


def test_a_usual_promise_leaves_a_short_run_as_it_is(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", **{**SETTINGS, "growth__depth__promise": 0.001})
    assert growth(run) == []
    assert len(run.newest_plan.layers) == 1
    assert any("price" in e for e in run.read(run.events))


def test_the_page_tells_of_it(grown: RunFolder) -> None:
    shown = run_data(grown.path)
    assert json.dumps(shown)
    assert "2 layers" not in shown["title"]
    assert "added blocks, of which there are 4 now. At the last one, at step " in shown["stories"][0]["text"]
    stacks = [e for e in grown.read(grown.events) if e.get("action") == "stack"]
    told = [(row["reading"], row["threshold"]) for row in shown["events"]]
    assert told == [(f"promise {e['promise']:.3g} nats", f"above the price, {e['price']:.3g} nats") for e in stacks]


def test_lines_and_picture_tell_of_blocks(grown: RunFolder, tmp_path: Path) -> None:
    first, second = (f"step {step}: " for step, *_ in growth(grown))
    lines = run_text(grown.path).splitlines()
    assert lines[1].startswith("depth: Begins with 1 block, as growth.depth.start_layers says")
    assert any(line.startswith(f"{first}1 block becomes 2: stack") for line in lines)
    assert any(line.startswith(f"{second}2 blocks become 4: stack") for line in lines)
    picture = draw_growth(grown.path, tmp_path)
    assert picture is not None
    root = parsed(picture.read_text(encoding="utf-8"))
    assert_labels_are_inside_and_apart(root)
    (facts,) = (text for text in texts(root) if "at the end;" in text)
    assert facts.endswith("2 heads in 1 block at the start, 8 in 4 blocks at the end; 2 changes of depth")
    assert "blocks are copied" in texts(root)


# --- beginning with the blocks of another run ------------------------------------------------------------------------

SECOND: dict[str, Any] = {**SETTINGS, "growth__depth__promise": 0.016, "growth__depth__start_layers": None}


def flops_for(blocks: int, run: RunFolder) -> float:
    """FLOPs for which so many blocks are best."""
    rows, one = run.config.train.batch_size, replace(run.plan, layers=run.plan.layers[:1], target=())
    updates = 18_000 * blocks**2.5 / math.sqrt(rows * one.context)
    return updates * one.cost.training_of(rows, one.context).causal


@pytest.fixture(scope="module")
def shallow(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of two blocks that has ended."""
    plain = {name: value for name, value in SETTINGS.items() if not name.startswith(("growth", "train__flops"))}
    return trained(data, tmp_path_factory.mktemp("shallow") / "run", **{**plain, "model__layers": 2})


def second(data: Path, shallow: RunFolder, out: Path, **changes: Any) -> RunFolder:
    start = {"model__start_from": str(shallow.path), "train__flops": flops_for(3, shallow)}
    # The rule wants thousands of updates; with a shorter one the run is as long as a test may be.
    return trained(data, out, **{**SECOND, **start, **changes})


def test_a_second_budget_makes_the_blocks_as_many_as_are_best(
    data: Path, shallow: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `stack` does it where it is told how many: to the last bit."""
    monkeypatch.setattr("meristem.growth.policies.depth.ONE_BLOCK", 300)
    few = flops_for(3, shallow) / 60
    run = second(data, shallow, tmp_path / "run", train__flops=few)
    assert growth(run) == [(1, 2, 3)]
    assert [len(run.plan.layers), len(run.plan.target)] == [2, 3]
    assert run.config["growth.depth.layers"] is None  # what was found is not taken for what was given
    stack = {"growth__policies": ["stack"], "growth__stack__layers": 3, "growth__stack__start_layers": 2}
    given = {name: value for name, value in SECOND.items() if not name.startswith("growth")}
    start = {"model__start_from": str(shallow.path), "train__flops": few, "growth__stack__at": [1]}
    same = trained(data, tmp_path / "same", **{**given, **stack, **start})
    assert [e["loss"] for e in metrics(run) if "loss" in e] == [e["loss"] for e in metrics(same) if "loss" in e]
    for last in (0, 50):
        copy = copy_run(run, tmp_path / f"copy-{last}", last=last)
        resume(copy.path, tiny_config(data, **{**SECOND, "model__start_from": str(shallow.path), "train__flops": few}))
        assert_equal_runs(copy, run)
        assert final_state(copy) == final_state(run)
    lines = run_text(run.path).splitlines()
    told = "those of the run that it started from; they become 3 by copies after the first update, as many as are best"
    assert lines[1].startswith(f"depth: Begins with 2 blocks, {told}")
    assert json.dumps(run_data(run.path))


def test_a_run_that_is_deep_enough_says_that_nothing_is_added(
    data: Path, shallow: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = second(data, shallow, tmp_path / "run", train__flops=flops_for(1, shallow) / 200)
    assert growth(run) == []
    assert "growth.depth: of no use, as the run begins with 2 blocks, enough for train.flops" in capsys.readouterr().out
    told = "Begins with 2 blocks, those of the run that it started from; more would not be better for train.flops"
    assert told in run_text(run.path)


def test_blocks_that_are_named_are_told_as_such(
    data: Path, shallow: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the run begins, and in its report."""
    run = second(data, shallow, tmp_path / "run", train__flops=flops_for(1, shallow) / 200, growth__depth__layers=3)
    assert growth(run) == [(1, 2, 3)]
    told = "they become 3 by copies after the first update, as growth.depth.layers says"
    assert f"depth: Begins with 2 blocks, those of the run that it started from; {told}" in capsys.readouterr().out
    assert told in run_text(run.path)


def test_blocks_at_the_end_are_not_named_for_a_new_run(data: Path, tmp_path: Path) -> None:
    """Its most are `model.layers`; that it has more than it can come to have would be told nobody."""
    with pytest.raises(InputError, match=r"growth\.depth\.layers = 2: is for a run with model\.start_from"):
        train(tiny_config(data, **SECOND, growth__depth__layers=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_blocks_that_are_not_alike_are_told(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With Prism the first ones, which are copied, have few heads; where none are copied, nothing is said."""
    run = trained(data, tmp_path / "run", **{**SETTINGS, "model__schedule": "prism", "train__flops": 3e8})
    heads = " ".join(str(layer.heads) for layer in run.plan.target)
    told = f"growth.depth: not all blocks of the plan are alike (heads {heads}), of which it begins with 1"
    assert f"{told}; with model.schedule = uniform all are alike" in capsys.readouterr().out
    assert uneven_depth(run.config, replace(run.plan, layers=run.plan.target, target=())) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"growth__depth__start_layers": 1},
            r"growth\.depth\.start_layers = 1: cannot be given with model\.start_from",
        ),
        ({"growth__depth__layers": 2}, r"growth\.depth\.layers = 2: must be above the 2 blocks that are there"),
        ({"train__flops": 1e30}, r"train\.flops = 1e\+30: is best spent on .* blocks, of which there can be"),
        (
            {"train__flops": 4e7, "growth__depth__layers": 40},
            r"train\.flops = .*must be at least .*, for an update after there are 40 blocks",
        ),
        (
            {"train__flops": 4e7, "growth__policies": ["stack"], "growth__stack__layers": 40},
            r"growth\.stack\.start_layers = None: must be 2, the blocks that are there, of which layers = 40",
        ),
    ],
)
def test_a_second_budget_that_cannot_be_is_refused_by_its_key(
    data: Path, shallow: RunFolder, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    settings = {name: value for name, value in SECOND.items() if not name.startswith("growth")}
    growth = {"growth__policies": ["depth"]} | changes
    start = {"model__start_from": str(shallow.path), "train__flops": 1e9}
    with pytest.raises(InputError, match=words):
        train(tiny_config(data, **{**settings, **start, **growth}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_copies_that_stack_makes_leave_an_update_too(data: Path, tmp_path: Path) -> None:
    settings = {name: value for name, value in SETTINGS.items() if not name.startswith("growth")}
    stack = {"growth__policies": ["stack"], "growth__stack__start_layers": 1, "growth__stack__at": [1]}
    with pytest.raises(InputError, match=r"train\.flops = .*for an update after there are 40 blocks"):
        train(tiny_config(data, **{**settings, **stack, "model__layers": 40, "train__flops": 3e7}), tmp_path / "run")


def test_blocks_that_the_other_run_never_came_to_have_do_not_come(data: Path, tmp_path: Path) -> None:
    """It was to have four, and ended with one; what it is given now decides."""
    few = trained(data, tmp_path / "few", **{**SETTINGS, "growth__depth__promise": 0.001, "train__flops": 3e8})
    assert len(few.newest_plan.layers) == 1
    run = second(data, few, tmp_path / "run", train__flops=3e8, growth__depth__layers=2)
    assert [len(run.plan.target), len(run.newest_plan.layers)] == [2, 2]
    plain = {name: value for name, value in SECOND.items() if not name.startswith(("growth", "train__flops"))}
    stack = {"growth__policies": ["stack"], "growth__stack__layers": 2, "growth__stack__start_layers": 1}
    start = {"model__start_from": str(few.path), "growth__stack__at": [1]}
    run = trained(data, tmp_path / "stacked", **{**plain, **stack, **start})
    assert [len(run.plan.target), len(run.newest_plan.layers)] == [2, 2]


def test_a_source_with_loops_is_refused_whatever_the_budget(data: Path, tmp_path: Path) -> None:
    loops = {"growth__policies": ["static_loops"], "growth__static_loops__layers": [1]}
    plain = {name: value for name, value in SETTINGS.items() if not name.startswith(("growth", "train__flops"))}
    looped = trained(data, tmp_path / "looped", **{**plain, **loops, "growth__static_loops__heads": "all"})
    for flops in (1e8, 1e12):
        with pytest.raises(InputError, match=r"model\.start_from = .*has loops or repeats"):
            second(data, looped, tmp_path / "run", train__flops=flops)


def test_it_needs_flops(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train.flops = None: must be given, as depth"):
        train(tiny_config(data, **{**SETTINGS, "train__flops": None}), tmp_path / "run")
