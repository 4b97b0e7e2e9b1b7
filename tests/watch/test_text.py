"""Runs in a terminal: a pure function from what is known to what is said, and an end when the run has finished."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from commands import Call
from meristem.report.page.data import run_data
from meristem.watch.runs import Watch, WatchedRun
from meristem.watch.text import FIRST_EVENTS, LAST_EVENTS, LiveText, new_lines, run_facts
from report.page.helpers import long_run
from watch.helpers import FINISHED, append, begun, birth, keep_lines, timed

BIRTH = "step 30: a head is born: layer 1 now has 2 heads (the demand is certain); demand 0.4 ± 0.05, above 0.03"


def test_a_view_tells_loss_structure_events_and_time_left(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", 40)
    append(run, "events", birth(30))
    append(run, "metrics", {"step": 40, "held_out_loss": 2.75})
    watched = WatchedRun(run, 100)
    watched.look()
    assert watched.data is not None
    written = (run / "metrics.jsonl").stat().st_mtime
    facts = run_facts(watched.data, watched.state(written), written + 65)
    assert facts == [
        ("loss", "2.6100 (smoothed), last 2.6000, held-out 2.7500"),
        ("rate", "0.001"),
        ("speed", "50 tokens/s"),
        ("time", "2:00 elapsed, 2:00 left, epoch 0.20, last line 1:05 ago"),
        ("structure", "heads 1x1 2x1"),
        ("events", "step 0: the run began (a CPU, meristem 0, torch 2)"),
        ("", BIRTH),
    ]


def test_only_the_last_of_many_events_are_in_view(tmp_path: Path) -> None:
    watched = WatchedRun(long_run(tmp_path / "run", 500, births=9, loops=0), 100)
    watched.look()
    assert watched.data is not None
    names = [name for name, _ in run_facts(watched.data, watched.state(), 0)]
    assert names[-LAST_EVENTS:] == [f"events ({LAST_EVENTS} of 11)", *[""] * (LAST_EVENTS - 1)]


def test_lines_tell_what_is_new(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", 20)
    first = run_data(run)
    assert new_lines(None, first) == [
        "step 0: the run began (a CPU, meristem 0, torch 2)",
        "heads 1x2",
        "step  20/100  loss 2.8000  50 tokens/s  epoch 0.10  1:00 elapsed  2:40 left",
    ]
    assert new_lines(first, run_data(run)) == []
    append(run, "metrics", timed(30))
    append(run, "events", birth(30))
    second = run_data(run)
    line = "step  30/100  loss 2.7000  50 tokens/s  epoch 0.15  1:30 elapsed  2:20 left"
    assert new_lines(first, second) == [BIRTH, "heads 1x1 2x1", line]
    keep_lines(run, "metrics", 10)
    keep_lines(run, "events", 1)
    append(run, "events", {"step": 10, "event": "rewind", "from_step": 30})
    back = new_lines(second, run_data(run))
    assert back[0] == "step 10: went back to this step from step 30: updates were not finite"
    assert back[1] == "heads 1x2"
    assert back[2].startswith("step  10/100  loss 2.9000")


def test_a_long_history_is_not_told_at_once(tmp_path: Path) -> None:
    lines = new_lines(None, run_data(long_run(tmp_path / "run")))
    assert lines[0] == "(92 earlier events are not shown)"
    assert len(lines) == 1 + FIRST_EVENTS + 2


def test_a_view_fits_the_terminal(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", 40)
    append(run, "events", birth(30))
    watched = Watch([run, tmp_path / "other"])
    watched.look()
    for width in (40, 80, 120):
        console = Console(width=width, force_terminal=True, file=io.StringIO(), _environ={})
        with LiveText(console) as view:
            view.show(watched.runs, 0)
        assert isinstance(console.file, io.StringIO)
        rows = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).splitlines()
        assert max(map(len, rows)) <= width
        text = " ".join(" ".join(rows).split())
        for part in ("At work: step 40 of 100.", "heads 1x1 2x1", "demand 0.4 ± 0.05, above 0.03", "is not there yet"):
            assert part in text.replace("- ", "-"), (width, part)


def test_lines_end_with_the_run(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is not there, begins, grows and ends while it is watched."""
    run = tmp_path / "run"
    happenings = iter(
        [
            lambda: begun(run),
            lambda: append(run, "metrics", timed(50)),
            lambda: append(run, "events", birth(50)),
            lambda: append(run, "metrics", timed(100), {"step": 100, "held_out_loss": 2.125}),
            lambda: append(run, "events", FINISHED),
        ]
    )
    monkeypatch.setattr("meristem.watch.text.time.sleep", lambda seconds: next(happenings)())
    monkeypatch.setattr("meristem.watch.runs.PAUSE", 0.0)
    monkeypatch.setattr("meristem.watch.runs.SHARE", 0)
    said = call("watch", run, "--text")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [
        f"{run} is not there yet. This goes on when the run begins.",
        "step 0: the run began (a CPU, meristem 0, torch 2)",
        "heads 1x2",
        "step  10/100  loss 2.9000  50 tokens/s  epoch 0.05  0:30 elapsed  3:00 left",
        "At work: step 10 of 100.",
        "step  50/100  loss 2.5000  50 tokens/s  epoch 0.25  2:30 elapsed  1:40 left",
        BIRTH.replace("step 30", "step 50"),
        "heads 1x1 2x1",
        "step 100/100  loss 2.0000  held-out 2.1250  50 tokens/s  epoch 0.50  5:00 elapsed  0:00 left",
        "step 100: the run ended",
        "Finished: 100 steps.",
        f"finished at step 100, held-out loss 2.1250: {run}",
    ]


def test_a_page_has_a_port_and_text_has_none(tmp_path: Path, call: Call) -> None:
    said = call("watch", tmp_path / "run", "--text", "--port", "1")
    assert said.code == 2
    assert "port = 1: is of the page, and --text shows none" in said.err


def test_what_is_no_run_is_refused(tmp_path: Path, call: Call) -> None:
    (tmp_path / "letter.txt").write_text("Dear")
    for more in ([], ["--text"]):
        said = call("watch", tmp_path, *more)
        assert said.code == 2
        assert "holds other things and no run (it has no config.toml)" in said.err


def test_an_interrupt_ends_the_text_with_its_status(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meristem.watch.text.time.sleep", interrupted)
    said = call("watch", tmp_path / "run", "--text")
    assert (said.code, said.err) == (130, "")
