"""Reports go by what was done, whichever policy did it: somebody's own, or one that is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meristem.growth import LoopHeads
from meristem.growth.events import GrowthEvent
from meristem.report.pictures import draw_growth, run_text
from meristem.report.run_growth import RunGrowth
from meristem.runs.entries import growth_events
from report.helpers import parsed, texts
from test_examples import EXAMPLES, OWN
from training.helpers import EAGER_BIRTHS, EAGER_PRUNING, prepared, trained


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("own"))


def drawn(run: Path) -> list[str]:
    """What is written in the picture of a run's growth."""
    picture = draw_growth(run)
    assert picture is not None
    return texts(parsed(picture.read_text(encoding="utf-8")))


def test_heads_are_counted_where_a_policy_does_not_say_how_many_there_are(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    run = trained(data, tmp_path / "run", **OWN)
    history = RunGrowth(run).heads
    assert [event.step for event in history.changes] == [3, 6, 9]
    assert history.heads == run.newest_plan.heads
    assert "12 steps; 2 heads at the start, 5 at the end; 3 births" in drawn(run.path)
    lines = run_text(run.path).splitlines()
    assert lines[1].startswith("step 3: a head is born: layer")
    assert lines[1].endswith("now has 2 heads (its heads look around most widely)")
    assert lines[-2:] == [f"layer {i}: {heads} heads (1 at the start)" for i, heads in enumerate(history.heads)]


def test_removals_are_shown_where_nothing_gives_birth(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", growth__policies=["prune"], **EAGER_PRUNING)
    history = RunGrowth(run).heads
    assert history.changes
    assert history.heads == run.newest_plan.heads
    assert "a head leaves" in drawn(run.path)
    assert f"a head has left: layer 1 now has {run.plan.heads[1] - 1} heads" in run_text(run.path)


def test_whatever_facts_and_actions_there_are_a_run_goes_on_and_is_told(data: Path, tmp_path: Path) -> None:
    policies = ["report.own_policies:Odd", "report.own_policies:MeToo"]
    run = trained(data, tmp_path / "run", growth__policies=policies)
    begin, *lines = run_text(run.path).splitlines()
    assert begin.startswith("run: step 12 of 12")
    assert lines == [
        "step 2: a head is born: layer 0 now has 3 heads (it is time)",
        "step 2: postponed in layer 0 (odd has just changed layer 0: to be decided again (me too))",
        "step 3: a head is born: layer 0 now has 4 heads (me too)",
        "step 4: reshape in layer 1 (why not)",
        "step 6: layer 1 now loops heads 0 (look again)",
        "step 8: layer 1 now loops heads 0 in 2 passes (and again)",
        "layer 0: 4 heads (2 at the start)",
        "layer 1: 4 heads (4 at the start)",
        "heads 4x2, looped L1:h0 x2",
    ]
    found = drawn(run.path)
    assert {"a head is born", "births of extra passes (no entropy was measured)"} <= set(found)
    loops = RunGrowth(run).loops
    assert [(one.layer, one.number, one.birth) for one in loops.passes] == [(1, 1, 6), (1, 2, 8)]
    assert loops.structure(12) == LoopHeads(1, (0,), 2).apply(run.newest_plan.bare)


def test_heads_are_counted_by_what_moved_whatever_it_is_called(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", growth__policies=["report.own_policies:Twins"])
    history = RunGrowth(run).heads
    assert history.counts[0] == [(0, 2), (2, 4), (4, 5), (6, 6)]
    assert history.heads == run.newest_plan.heads
    lines = run_text(run.path).splitlines()[1:]
    assert lines == [
        "step 2: a head is born: layer 0 now has 4 heads (it is time)",
        "step 4: sprout in layer 0 (it is time)",
        "step 6: layer 0 now loops heads 5 (it is time)",
        "layer 0: 6 heads (2 at the start)",
        "layer 1: 4 heads (4 at the start)",
        "heads 6x1 4x1, looped L0:h5 x1",
    ]
    found = drawn(run.path)
    assert any("6 heads at the start, 10 at the end; 1 birth, 1 sprout, 1 add; " in text for text in found)
    assert "a head is born" in found


BLOCKS = "report.own_policies:Blocks"
FOUR: dict[str, Any] = {
    "model__layers": 4, "model__head_list": [2, 2, 4, 4], "model__context": 16, "model__feed_forward": 16,
    "train__steps": 24, "train__batch_size": 8, "train__micro_batch": 8, "growth__observe__every": 2,
}  # fmt: skip
LOOPS: dict[str, Any] = {
    "growth__sgt__start": 3, "growth__sgt__window": 4, "growth__sgt__beta": 0.0, "growth__sgt__heads_per_layer": 1,
    "growth__sgt__passes": 2, "growth__sgt__shortlist": 5, "growth__sgt__excluded": [],
}  # fmt: skip
DEPTHS: dict[str, dict[str, Any]] = {
    "heads": {"growth__policies": [BLOCKS, "incrt", "observe"], **EAGER_BIRTHS},
    "heads, taken out before": {"growth__policies": ["incrt", BLOCKS], "growth__blocks__remove": [10], **EAGER_BIRTHS},
    "heads and a shape of its own": {
        "growth__policies": [BLOCKS], "growth__blocks__heads": 3, "growth__blocks__remove": [],
    },
    "loops": {
        "growth__policies": [BLOCKS, "sgt", "observe"], "growth__blocks__add": 14, "growth__blocks__remove": [21],
        **LOOPS,
    },
    "copied loops": {
        "growth__policies": ["sgt", BLOCKS, "observe"], "growth__blocks__add": 9, "growth__blocks__remove": [],
        "growth__sgt__order": "shallow_first", **LOOPS,
    },
    "copied loops, taken out": {
        "growth__policies": ["observe", "sgt", BLOCKS], "growth__blocks__add": 9, "growth__blocks__remove": [21],
        "growth__sgt__order": "shallow_first", **LOOPS,
    },
    "stack": {
        "growth__policies": ["stack", BLOCKS, "incrt"], "growth__stack__at": [3], "growth__blocks__add": 0,
        **EAGER_BIRTHS,
    },
    "interleave": {
        "growth__policies": ["stack", BLOCKS, "incrt"], "growth__stack__at": [3], "growth__stack__order": "interleave",
        "growth__blocks__add": 0, "growth__blocks__remove": [8, 12], **EAGER_BIRTHS,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DEPTHS)
def test_blocks_of_ones_own_come_and_go(kind: str, data: Path, tmp_path: Path) -> None:
    """Heads and loops are those of the model at the end, and nothing that was said is lost."""
    run = trained(data, tmp_path / "run", **{**FOUR, **DEPTHS[kind]})
    growth, plan = RunGrowth(run), run.newest_plan
    assert growth.heads.heads == plan.heads
    assert growth.loops.structure(24).loops == plan.loops
    lines = run_text(run.path).splitlines()[1:]
    begins = [line.partition(":")[0] for line in lines if "it is a copy" not in line]
    told = [event for event in growth_events(run.read(run.events), 24) if isinstance(event, GrowthEvent)]
    assert [begin for begin in begins if begin.startswith("step")] == [f"step {event.step}" for event in told]
    layers = range(len(plan.layers))
    assert [begin for begin in begins if begin.startswith("layer")] == [f"layer {layer}" for layer in layers]
    assert any(f"{sum(plan.heads)} in {len(plan.layers)} blocks at the end" in text for text in drawn(run.path))


def test_a_layer_that_was_taken_out_is_told_as_such(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", **{**FOUR, **DEPTHS["copied loops, taken out"]})
    lines = run_text(run.path).splitlines()
    assert "step 9: widen in layer 1 (taken out at step 21) (one more)" in lines
    copied = "now loops heads 0 in 2 passes (it is a copy of a layer that does)"
    assert f"step 9: layer 1 (taken out at step 21) {copied}" in lines
    assert "step 21: narrow in layer 1 (one less)" in lines
    facts = "12 in 4 blocks at the end; 2 changes of depth; 1 layer taken out, not shown"
    assert any(facts in text for text in drawn(run.path))
    observed = RunGrowth(run).loops.observations
    assert [entry["step"] for entry in observed] == [*range(2, 25, 2)]  # none is lost, whatever its layers were
