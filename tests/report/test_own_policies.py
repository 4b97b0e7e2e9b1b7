"""Reports go by what was done, whichever policy did it: somebody's own, or one that is alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from meristem.growth import LoopHeads
from meristem.report.pictures import draw_growth, read_head_history, read_history, run_text
from report.helpers import parsed, texts
from test_examples import EXAMPLES, OWN
from training.helpers import EAGER_PRUNING, prepared, trained


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
    history = read_head_history(run)
    assert [event.step for event in history.changes] == [3, 6, 9]
    assert history.heads == run.newest_plan.heads
    assert "12 steps; 2 heads at the start, 5 at the end; 3 births" in drawn(run.path)
    lines = run_text(run.path).splitlines()
    assert lines[1].startswith("step 3: a head is born: layer")
    assert lines[1].endswith("now has 2 heads (its heads look around most widely)")
    assert lines[-2:] == [f"layer {i}: {heads} heads (1 at the start)" for i, heads in enumerate(history.heads)]


def test_removals_are_shown_where_nothing_gives_birth(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", growth__policies=["prune"], **EAGER_PRUNING)
    history = read_head_history(run)
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
    loops = read_history(run)
    assert [(one.layer, one.number, one.birth) for one in loops.passes] == [(1, 1, 6), (1, 2, 8)]
    assert loops.structure(12) == LoopHeads(1, (0,), 2).apply(run.newest_plan.bare)
