"""What a page knows of a run, against logs made by hand."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import Call
from meristem.errors import InputError
from meristem.growth import AddBlock, LoopHeads, RemoveBlock, RemoveHead, prepared
from meristem.growth.policies.stack import Stack
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.report.page.curves import axes, loss_curves, short, with_extremes
from meristem.report.page.data import page_data, run_data, uniform_plan
from meristem.report.page.repeat import repeat_command
from meristem.report.pictures import run_text
from meristem.report.structure_history import snapshots
from meristem.runs.entries import growth_events
from meristem.runs.layer_numbers import LayerNumbers
from meristem.runs.run_folder import RunFolder
from report.page.helpers import START, born, demands, growth, hand_made, metric
from training.helpers import EAGER_BIRTHS, EAGER_PRUNING, copy_run, metrics, trained

PLAN = Plan.from_heads([1, 1], width=32, head_dim=8, vocabulary=50, context=16)
SIX = {"train.steps": 6}
OLD = Path(__file__).parents[2] / "fixtures" / "runs-2026-11-16"

# --- curves ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.floats(-1e3, 1e3), st.just(math.nan)), max_size=400), st.integers(8, 60))
def test_thinned_curves_keep_ends_and_extremes(values: list[float], most: int) -> None:
    curve = list(enumerate(values))
    kept = with_extremes(curve, most)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {step for step, _ in kept} <= {step for step, _ in curve}
    known = [value for value in values if math.isfinite(value)]
    if known:
        left = [value for _, value in kept if math.isfinite(value)]
        assert (min(left), max(left)) == (min(known), max(known))
    assert [kept[:1], kept[-1:]] == [curve[:1], curve[-1:]] or any(map(math.isnan, values))
    assert any(math.isnan(value) for _, value in kept) == any(map(math.isnan, values))  # a gap stays one
    assert len(kept) <= max(len(curve) if len(curve) <= most else 0, 2.5 * most)


def test_numbers_are_short() -> None:
    assert [short(x) for x in (1 / 3, 12, 2.0, math.nan, None, 123456.789)] == [0.33333, 12, 2, None, None, 123460]


def test_seconds_are_what_the_speeds_add_up_to() -> None:
    lines = [
        metric(1, 3.0, tokens_per_second=None), metric(2, 3.0, tokens_per_second=50.0),
        {"step": 2, "held_out_loss": 2.0}, metric(4, 3.0, tokens_per_second=200.0),
    ]  # fmt: skip
    # 100 tokens a step: two seconds a step at 50 tokens a second, of the first step too, then half a second.
    assert axes(lines) == {
        "steps": [0, 1, 2, 4], "tokens": [0, 100, 200, 400], "flops": [0, 1000, 2000, 4000], "seconds": [0, 2, 4, 5]
    }  # fmt: skip
    assert axes([]) == {"steps": [0], "tokens": None, "flops": None, "seconds": None}
    assert axes([metric(1, 3.0, tokens_per_second=None)])["seconds"] is None


def test_the_smoothed_loss_lies_beside_the_raw_one() -> None:
    zigzag = [metric(step, 2.0 + (-1) ** step) for step in range(1, 201)]
    curves = loss_curves(zigzag)
    assert curves["raw"]["values"][:4] == [1, 3, 1, 3]
    assert all(1.7 < value < 2.3 for value in curves["smooth"]["values"][3:-3])
    assert loss_curves([])["range"] is None
    assert loss_curves([metric(1, None)])["raw"] == {"steps": [1], "values": [None]}


# --- structure ------------------------------------------------------------------------------------------------------


def history_of(start: Plan, lines: list[Any], steps: int = 100) -> Any:
    return snapshots(start, LayerNumbers(len(start.layers), growth_events(lines, steps)), start)


def test_structures_follow_births_removals_and_loops() -> None:
    first, moves = born(PLAN, 1)
    second, more = born(first, 1)
    looped = LoopHeads(1, (1,), 2).apply(second)
    less = RemoveHead(1, 0).apply(looped)
    lines = [
        growth(10, "incrt", "birth", 1, "asked for", first, heads=[1, 2], moves=moves),
        growth(20, "incrt", "birth", 1, "asked for", second, heads=[1, 3], moves=more),
        growth(30, "sgt", "add", 1, "deepest", looped, heads=[1], passes=2),
        growth(40, "prune", "removal", 1, "not needed", less, head=0, moves={"heads": {"1": [1, 2]}}),
        growth(50, "sgt", "fix", None, "all is done", less, heads=None, passes=None),
    ]
    found = history_of(PLAN, lines)
    assert [one.plan for one in found] == [PLAN, first, second, looped, less]
    assert [one.step for one in found] == [0, 10, 20, 30, 40]
    assert all(one.checked for one in found)
    assert [one.heads[1] for one in found] == [(1,), (1, 2), (1, 2, 3), (1, 2, 3), (2, 3)]  # names stay theirs
    assert [set(one.born) for one in found] == [set(), {2}, {3}, set(), set()]
    assert found[-1].plan.layers[1].loop.heads == (0,)  # head 1 is head 0 now


@pytest.mark.parametrize("order", ["stack", "interleave"])
def test_structures_follow_stacks(order: Any) -> None:
    policy = Stack(total_steps=10, start_layers=2, at=(0.5,), order=order)
    target = Plan.from_heads([2, 2, 4, 4], width=32, vocabulary=50, context=16)
    start = prepared(target, [policy])
    (change,) = policy.decide(None, 5, start, {}).changes
    after, moves = start, Moves.none(2)
    for edit in change.edits:
        assert isinstance(edit, AddBlock)
        moves, after = moves.then(edit.moves(after)), edit.apply(after)
    line = growth(5, "stack", "stack", None, change.rule, after, **change.facts, moves=moves.to_dict())
    found = history_of(start, [line])
    assert [one.plan for one in found] == [start, after]
    assert found[0].numbers == ((0, 1) if order == "stack" else (0, 2))  # as they are called at the end


def test_what_cannot_be_checked_says_so() -> None:
    other = born(PLAN, 0)[0]
    found = history_of(PLAN, [growth(3, "incrt", "birth", 1, "x", other, moves={"heads": {"1": [0, None]}})])
    assert [one.checked for one in found] == [True, False]


def test_the_structures_of_a_real_run_are_those_that_it_had(data: Path, tmp_path: Path) -> None:
    """Every digest that training recorded is that of the plan that is put together from the log."""
    policies = ["stack", "incrt", "prune", "sgt"]
    run = trained(
        data, tmp_path / "run", train__steps=30, growth__policies=policies, growth__stack__at=[3],
        growth__sgt__start=12.0, growth__sgt__window=5.0, growth__sgt__passes=2, growth__sgt__excluded=[],
        growth__sgt__heads_per_layer=1, growth__sgt__birth="paper", **EAGER_BIRTHS, **EAGER_PRUNING,
    )  # fmt: skip
    events = growth_events(run.read(run.events), 30)
    numbers = LayerNumbers(len(run.plan.layers), events)
    found = snapshots(run.plan, numbers, run.plan)  # nothing known of the end
    actions = {getattr(event, "action", None) for event in events}
    assert {"stack", "birth", "add"} <= actions
    assert all(one.checked for one in found)
    assert found[-1].plan == run.newest_plan
    told = run_data(run.path)
    assert [one["checked"] for one in told["structure"]["snapshots"]] == [True] * len(found)


# --- events ---------------------------------------------------------------------------------------------------------


def grown_run(folder: Path) -> Path:
    """A run in which a head is born after two measurements, another is tried and kept, and a layer is looped."""
    after, moves = born(PLAN, 1)
    looped = LoopHeads(1, (1,), 1).apply(after)
    high = demands(after, 0.4, rule="the demand is certain, large and steady")
    return hand_made(
        folder, PLAN, {"train.steps": 100, "growth.policies": ["observe", "incrt", "prune", "sgt"],
                       "growth.incrt.warm_up": 1, "growth.incrt.cool_down": 1, "growth.incrt.feed_every": 1,
                       "growth.incrt.decide_every": 10},
        metrics=[metric(step, 3 - step / 100) for step in range(10, 101, 10)] + [{"step": 100, "held_out_loss": 2.1}],
        events=[
            START,
            {"step": 20, "event": "measured", "policy": "incrt", **demands(PLAN, 0.01), "plan": PLAN.digest},
            growth(30, "incrt", "birth", 1, "the demand is certain, large and steady", after, **high, moves=moves),
            growth(40, "prune", "spare", 1, "the loss rises without it", after, head=0, loss_with=2.0,
                   loss_without=2.5, heads=[1, 2], own_share=[[1.0], [0.0005, 0.9]]),
            growth(50, "sgt", "add", 1, "deepest layer of the shortlist", looped, heads=[1], passes=1, shortlist=[1],
                   layer_entropy=[0.2, 0.7], head_entropy=[[0.2], [0.6, 0.8]]),
            growth(60, "sgt", "fix", None, "3 layers have grown", looped, heads=None, passes=None, shortlist=[1],
                   layer_entropy=[0.2, 0.8]),
            {"step": 100, "event": "finished"},
        ],
        entropy=[{"step": 10, "head_entropy": [[0.9], [0.8]]}, {"step": 90, "head_entropy": [[0.5], [0.25, 0.75]]}],
    )  # fmt: skip


def test_events_say_why_in_words(tmp_path: Path) -> None:
    told = run_data(grown_run(tmp_path / "run"))
    birth, spare, add, fix = told["events"]
    assert (birth["step"], birth["policy"], birth["layer"], birth["head"]) == (30, "incrt", 1, "1")
    assert (birth["reading"], birth["threshold"]) == ("demand 0.4 ± 0.05", "above 0.03")
    assert birth["rule"] == "the demand is certain, large and steady"
    assert (spare["what"], spare["head"]) == ("head kept after a trial", "0")
    assert (spare["reading"], spare["threshold"]) == ("loss 2 with it, 2.5 without (+0.5)", "may rise by 0.10%")
    assert (add["layer"], add["head"], add["reading"]) == (1, "1", "entropy 0.7")
    assert add["threshold"] == "at least 0.7, the lowest on the shortlist"
    assert (fix["what"], fix["layer"], fix["reading"]) == ("growth of loops ended", None, "")
    assert [one["row"] for one in told["structure"]["snapshots"]] == [None, 0, 2]


def test_small_changes_of_the_loss_are_told_with_their_digits(tmp_path: Path) -> None:
    """Of heads that left and of refits, as far as the losses are known."""
    two = Plan.from_heads([2, 1], width=32, head_dim=8, vocabulary=50, context=16)
    after, moves = RemoveHead(0, 1).apply(two), {"heads": {"0": [0]}}
    left = growth(10, "prune", "removal", 0, "missed least", after, head=1, heads=[1, 1], loss_with=2.50612,
                  loss_without=2.50633, moves=moves)  # fmt: skip
    refits = [
        growth(10, "prune", "refit", None, "taken over", after, loss_before=before, loss_after=2.5063)
        for before in (2.50633, None)
    ]
    run = hand_made(tmp_path / "run", two, {"train.steps": 10}, events=[START, left, *refits])
    readings = [row["reading"] for row in run_data(run)["events"]]
    assert readings == [
        "loss 2.506 with it, 2.506 without (+0.00021)",
        "loss 2.506 before, 2.506 after (-3e-05)",
        "loss not finite before, 2.506 after",
    ]
    assert [line.partition("); ")[2] for line in run_text(run).splitlines()[1:4]] == readings


def test_layers_that_left_are_called_what_they_were(tmp_path: Path) -> None:
    after = RemoveBlock(0).apply(PLAN)
    gone = growth(20, "mine", "narrow", 0, "one less", after, moves={"layers": [1]})
    more = growth(30, "mine", "birth", 0, "one more", born(after, 0)[0], moves={"heads": {"0": [0, None]}})
    values = {"train.steps": 100, "growth.policies": ["somewhere:Mine"]}
    told = run_data(hand_made(tmp_path / "run", PLAN, values, events=[START, gone, more]))
    assert [row["layer_name"] for row in told["events"]] == ["0 (until step 20)", "0"]
    assert told["stories"] == [{"policy": "somewhere:Mine", "text": "Made 2 decisions."}]
    assert [one["checked"] for one in told["structure"]["snapshots"]] == [True, True, True]
    assert told["structure"]["left"] == {"1": 20}


def test_gauges_stand_against_their_thresholds(tmp_path: Path) -> None:
    told = run_data(grown_run(tmp_path / "run"))
    demand, entropy, share, strength = told["gauges"]
    assert demand["layers"][1] == {
        "layer": 1, "steps": [20, 30], "values": [0.01, 0.4], "noise": [0.00125, 0.05], "thresholds": [0.03, 0.03]
    }  # fmt: skip
    assert entropy["layers"][1]["values"] == [0.8, 0.5]  # means of its heads
    assert entropy["threshold"]["values"] == [0.7, 0.8]
    assert share["layers"][0]["values"] == [0.0005]  # of the layer that has heads to spare
    assert share["threshold"]["values"] == [0.001, 0.001]
    assert [one["layer"] for one in strength["layers"]] == [1]
    assert told["readings"]["entropy"] == [
        {"step": 10, "at": 0, "values": [[0.9], [0.8]]}, {"step": 90, "at": 2, "values": [[0.5], [0.25, 0.75]]}
    ]  # fmt: skip


def test_a_run_without_growth_says_why(tmp_path: Path) -> None:
    lines = [{"step": s, "event": "measured", "policy": "incrt", **demands(PLAN, s / 1000)} for s in (10, 20)]
    values = {"train.steps": 1000, "growth.policies": ["incrt", "prune", "sgt"]}
    told = run_data(hand_made(tmp_path / "run", PLAN, values, events=[START, *lines]))
    births, prune, sgt = (story["text"] for story in told["stories"])
    assert births.startswith("No head was born. The demand came nearest to its threshold in layer 0 at step 20: 0.02 ±")
    assert "of 0.03." in births
    assert "“the demand is small” 4 times" in births
    assert prune == "No head was removed. No head was old enough to be looked at."
    assert sgt == "No layer was looped. The first decision comes after 50 updates."
    assert told["gauges"][0]["layers"][0]["values"] == [0.01, 0.02]  # to be looked at although nothing was born
    still = run_data(hand_made(tmp_path / "still", PLAN))
    assert still["stories"] == [{"policy": "", "text": "growth.policies is empty: the structure was to stay as it is."}]


CHOSEN = "Begins with 2 blocks, as many as are best for train.flops; "
GIVEN = "Begins with 2 blocks, as growth.depth.start_layers says; there may be 4 at most (model.layers). "
NONE = "Of 2 decisions none added blocks. At the last one, at step 800, twice the blocks promised "


@pytest.mark.parametrize(
    ("start", "most", "outlooks", "story"),
    [
        (2, 4, [(0.01, 0.02), (0.00004, 0.00032)], f"{GIVEN}{NONE}4e-05 nats and cost 0.00032."),
        (2, 4, [(0.2, 0.1), (0.2, 0.1)],
         f"{GIVEN}{NONE}0.2 nats and cost 0.1, but nothing is copied in the last 30% of the FLOPs."),
        (2, 4, [], f"{GIVEN}Nothing was decided: the loss was not known for long enough."),
        (2, 4, [(None, 0.1), (0.2, 10**400)], f"{GIVEN}Nothing was decided: the loss was not known for long enough."),
        (None, 4, [(0.01, 0.02), (0.1, 0.2)],
         f"{CHOSEN}there may be 4 at most (model.layers). {NONE}0.1 nats and cost 0.2."),
        (None, 2, [], f"{CHOSEN}these are all that there may be (model.layers), so nothing is left to decide."),
    ],
)  # fmt: skip
def test_a_run_that_chooses_its_depth_tells_how(
    start: int | None, most: int, outlooks: list[tuple[Any, Any]], story: str, tmp_path: Path
) -> None:
    plan = replace(PLAN, target=PLAN.layers * (most // 2) if most > 2 else ())
    values = {"growth.policies": ["depth"], "model.layers": most, "train.flops": 1e9, "train.steps": 1000}
    settings = values if start is None else {**values, "growth.depth.start_layers": start}
    measured = [
        {"step": 700 + 100 * number, "event": "measured", "policy": "depth", "promise": promise, "price": price}
        for number, (promise, price) in enumerate(outlooks)
    ]
    run = hand_made(tmp_path / "run", plan, settings, events=[START, *measured])
    assert run_data(run)["stories"] == [{"policy": "depth", "text": story}]
    assert f"depth: {story}" in run_text(run).splitlines()


@pytest.mark.parametrize("name", ["heads", "loops", "classifier"])
def test_runs_of_older_versions_have_a_page(name: str) -> None:
    run = RunFolder.open(OLD / name)
    told = run_data(run.path)
    assert told["status"]["word"] == "not finished"
    assert told["events"]
    assert told["structure"]["snapshots"][-1]["step"] == told["events"][-1]["step"]
    assert told["costs"]["parameters"][-1] == run.newest_plan.parameters
    json.dumps(told, allow_nan=False)


# --- states of a run ------------------------------------------------------------------------------------------------

LIVES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "not begun": ([], "nothing in its logs"),
    "not finished": ([START], "Not finished: step 3 of 6"),
    "stopped": ([START, {"step": 3, "event": "stopped", "signal": 15}], "Stopped at step 3 of 6"),
    "finished": (
        [START, {"step": 3, "event": "stopped", "signal": 15}, {"step": 3, "event": "resume"},
         {"step": 2, "event": "rewind", "from_step": 5, "batches": [1, 2]}, {"step": 6, "event": "finished"}],
        "Finished: 6 steps, resumed 1 time, went back 1 time.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("word", LIVES)
def test_the_state_of_a_run(word: str, tmp_path: Path) -> None:
    events, text = LIVES[word]
    metrics = [metric(step, 3.0) for step in (1, 2, 3)] if events else []
    told = run_data(hand_made(tmp_path / "run", PLAN, SIX, metrics=metrics, events=events))
    assert told["status"]["word"] == word
    assert text in told["status"]["text"]
    json.dumps(told, allow_nan=False)


def test_a_classifier_has_no_cache_and_scores_by_class(tmp_path: Path) -> None:
    plan = Plan.uniform(layers=1, width=32, heads=2, vocabulary=50, context=16, classes=2)
    measured = {"step": 6, "held_out_loss": 0.5, "accuracy": 0.75, "macro_f1": 0.7}
    run = hand_made(tmp_path / "run", plan, SIX, metrics=[metric(6, 0.4), measured], events=[START])
    classes = [{"label": name, "support": 3, "precision": 1.0, "recall": None, "f1": 0.5} for name in ("a", "<b>")]
    result = {"step": 6, "plan": plan.to_dict(), "accuracy": 0.75, "classes": classes}
    (run / "eval.json").write_text(json.dumps(result), encoding="utf-8")
    told = run_data(run)
    assert told["title"] == "Classifier of 2 classes with 1 layer and width 32"  # not "1 layers"
    assert told["curves"]["accuracy"]["values"] == [0.75]
    assert told["costs"]["kv_bytes"] == [0]
    assert [one["label"] for one in told["evaluation"]["classes"]] == ["a", "<b>"]


def test_the_distance_of_every_layer_is_that_of_the_evaluation(tmp_path: Path) -> None:
    run = hand_made(tmp_path / "run", PLAN, SIX, events=[START])
    assert run_data(run)["evaluation"] is None
    result = {"step": 6, "plan": PLAN.to_dict(), "loss": 1.5, "attention_distance": [2.5, None]}
    (run / "eval.json").write_text(json.dumps(result), encoding="utf-8")
    # Queries 8 to 15 see 0 to themselves: on average half of 11.5 tokens back.
    assert run_data(run)["evaluation"]["distance"] == {"layers": [0, 1], "values": [2.5, None], "even": 5.75}
    (run / "eval.json").write_text("{", encoding="utf-8")
    assert run_data(run)["evaluation"] is None


ODD: tuple[Any, ...] = (None, True, -1, 10**400, math.nan, math.inf, "x", [], {}, [None], [[1]], [{"label": None}])


@pytest.mark.parametrize("name", ["step", "plan", "loss", "attention_distance", "classes", "tokens"])
def test_an_odd_evaluation_does_no_harm(name: str, tmp_path: Path) -> None:
    run = hand_made(tmp_path / "run", PLAN, SIX, events=[START])
    for value in ODD:
        result = {"step": 6, "plan": PLAN.to_dict(), "loss": 1.5, "attention_distance": [2.5, 1.0], name: value}
        (run / "eval.json").write_text(json.dumps(result), encoding="utf-8")
        json.dumps(run_data(run), allow_nan=False)


def test_a_line_that_is_being_written_is_passed_over(tmp_path: Path) -> None:
    run = hand_made(tmp_path / "run", PLAN, SIX, metrics=[metric(1, 3.0), metric(2, 2.0)], events=[START])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.')
    told = run_data(run)
    assert told["loss"]["raw"] == {"steps": [1, 2], "values": [3, 2]}
    assert told["warnings"] == []


def test_costs_are_those_of_the_plan_beside_the_uniform_model(tmp_path: Path) -> None:
    told = run_data(grown_run(tmp_path / "run"))
    after = born(PLAN, 1)[0]
    looped = LoopHeads(1, (1,), 1).apply(after)
    assert told["costs"]["steps"] == [0, 30, 50]
    assert told["costs"]["parameters"] == [PLAN.parameters, after.parameters, looped.parameters]
    assert told["costs"]["flops"][-1] == looped.cost.forward.causal
    config = RunFolder.open(tmp_path / "run").config
    assert uniform_plan(config, replace(PLAN, width=36)) == Plan.uniform(
        layers=2, width=36, heads=6, vocabulary=50, context=16, feed_forward=PLAN.feed_forward
    )  # 12 heads would be of dim 3, and 4 of 8 do not fill 36: 6 are as many as fit
    assert told["uniform"]["parameters"] == uniform_plan(config, PLAN).parameters  # type: ignore[union-attr]


# --- settings, and several runs -------------------------------------------------------------------------------------


def test_settings_tell_what_differs_and_how_to_repeat(tmp_path: Path) -> None:
    values = {**SIX, "growth.policies": ["observe"], "growth.observe.every": 2, "data.path": "my </script> data"}
    told = run_data(hand_made(tmp_path / "a run", PLAN, values, events=[{**START, "processes": 4}]))
    differs = {row["key"]: (row["value"], row["default"]) for row in told["settings"] if row["differs"]}
    assert differs == {
        "train.steps": ("6", "1000"), "growth.policies": ('["observe"]', "[]"), "growth.observe.every": ("2", "0"),
        "data.path": ('"my </script> data"', '"data"'),
    }  # fmt: skip
    run = tmp_path / "a run"
    expected = f"torchrun --nproc-per-node=4 -m meristem train '{run}/config.toml' --out '{run}-again'"
    assert told["origin"]["command"] == expected
    assert repeat_command(Path("runs/x"), 1) == "meristem train runs/x/config.toml --out runs/x-again"


def test_the_command_repeats_the_run(whole: RunFolder, tmp_path: Path, call: Call) -> None:
    run = copy_run(whole, tmp_path / "a run")
    program, *arguments = shlex.split(run_data(run.path)["origin"]["command"])
    assert program == "meristem"
    assert call(*arguments).code == 0
    again = RunFolder.open(tmp_path / "a run-again")
    assert metrics(again) == metrics(run)  # but for the speed


def test_several_runs_are_told_apart_and_compared(tmp_path: Path) -> None:
    first = hand_made(tmp_path / "a" / "run", PLAN, SIX, metrics=[metric(6, 3.0), {"step": 6, "held_out_loss": 2.0}])
    values = {"train.steps": 8, "growth.policies": ["observe"]}
    lines = [metric(6, 3.5), {"step": 6, "held_out_loss": 2.5}]
    second = hand_made(tmp_path / "b" / "run", born(PLAN, 0)[0], values, metrics=lines, digest="d2")
    page = page_data([first, second])
    assert [run["name"] for run in page["runs"]] == ["a/run", "b/run"]
    assert page["title"] == "2 runs side by side"
    assert page["differences"] == [
        {"key": "train.steps", "values": ["6", "8"]}, {"key": "growth.policies", "values": ["[]", '["observe"]']}
    ]  # fmt: skip
    table = {row["label"]: row["values"] for row in page["table"]}
    assert table["held-out loss"] == ["2", "2.5 (+0.5)"]
    assert table["tokens seen"] == ["600", "600"]
    assert table["structure at the end"] == ["heads 1x2", "heads 2x1 1x1"]
    assert "different data" in page["warning"]
    assert not page_data([first, first])["warning"]
    assert [run["name"] for run in page_data([first, second, first])["runs"]] == ["a/run", "b/run", "a/run (2)"]
    with pytest.raises(InputError, match="runs"):
        page_data([])
