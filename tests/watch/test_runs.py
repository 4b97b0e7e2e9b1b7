"""What is known of a run while it goes on, stops, goes back and disappears."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from meristem.errors import InputError
from meristem.report.page.data import run_data
from meristem.report.page.progress import progress
from meristem.runs.lock import LOCK_FILE, is_held, run_lock
from meristem.training.display import describe_numbers
from meristem.watch.runs import QUIET, SHARE, Watch
from report.page.helpers import START, hand_made, metric
from watch.helpers import FINISHED, PLAN, append, begun, birth, dead_process, keep_lines, timed, watch


def test_a_run_is_read_again_only_when_its_files_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path / "run")
    read = []

    def counted(path: Path, points: int) -> dict[str, Any]:
        read.append(path)
        return run_data(path, points)

    monkeypatch.setattr("meristem.watch.runs.run_data", counted)
    watched = watch(run)
    assert [watched.look() for _ in range(3)] == [True, False, False]
    (run / "growth.svg").write_text("a picture tells nothing new")
    assert not watched.look()
    append(run, "metrics", timed(11))
    assert [watched.look() for _ in range(2)] == [True, False]
    assert read == [run, run]
    assert watched.told[0]["last_step"] == 11


def test_what_is_told_is_what_a_report_tells(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    watched = watch(run)
    watched.look()
    append(run, "metrics", *map(timed, range(11, 40)))
    append(run, "events", birth(30))
    watched.look()
    assert watched.told == [run_data(run)]
    assert [row["step"] for row in watched.told[0]["events"]] == [30]


def test_half_a_line_is_no_line_yet(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    watched = watch(run)
    line = '{"step": 11, "loss": 1.5, "tokens": 1100}\n'
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        watched.look()
        assert watched.told[0]["last_step"] == 10
        assert watched.told[0]["warnings"] == []
        file.write(line[20:])
    watched.look()
    assert watched.told[0]["last_step"] == 11
    assert watched.told[0]["now"]["loss"] == 1.5


def test_logs_that_get_shorter_are_followed(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", 40)
    append(run, "events", birth(30))
    watched = watch(run)
    watched.look()
    assert len(watched.told[0]["structure"]["snapshots"]) == 2
    keep_lines(run, "metrics", 20)
    keep_lines(run, "events", 1)
    append(run, "events", {"step": 20, "event": "rewind", "from_step": 40})
    watched.look()
    told = watched.told[0]
    assert told["last_step"] == 20
    assert len(told["structure"]["snapshots"]) == 1
    assert told["lifetime"][-1]["text"].startswith("went back to this step from step 40")


def test_a_run_may_come_go_and_come_again(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    watched = watch(run)

    def word() -> str:
        watched.look()
        return watched.states[0].word

    assert word() == "waiting"
    assert watched.page(watched.states)["title"] == "No run yet"
    run.mkdir(parents=True)
    assert word() == "waiting"
    run.rmdir()
    begun(run)
    assert word() == "at work"
    shutil.rmtree(run)
    assert word() == "gone"
    assert watched.told[0]["last_step"] == 10  # is still shown
    begun(run, 3)
    assert word() == "at work"
    assert watched.told[0]["last_step"] == 3
    (run / "plan.json").write_text("{")
    assert word() == "unreadable"
    assert "plan.json" in watched.states[0].text


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path / "run")
    watched = watch(run)
    watched.look()

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("meristem.watch.runs.file_marks", denied)
        assert [watched.look() for _ in range(2)] == [True, False]
        assert watched.states[0].word == "unreadable"
        assert watched.states[0].text == f"It cannot be read: {run}: Permission denied."
    watched.look()
    assert watched.states[0].word == "at work"


def test_states_are_told_by_the_logs(tmp_path: Path) -> None:
    run = hand_made(tmp_path / "run", PLAN, {"train.steps": 100})
    watched = watch(run)

    def word() -> str:
        watched.look()
        return watched.states[0].word

    assert word() == "not begun"
    append(run, "events", START)
    append(run, "metrics", timed(1))
    assert word() == "at work"
    append(run, "events", {"step": 1, "event": "stopped", "signal": 2})
    assert word() == "stopped"
    append(run, "events", {**START, "step": 1, "event": "resume"})
    assert word() == "at work"
    assert not watched.runs[0].finished
    append(run, "events", FINISHED)
    assert word() == "finished"
    assert watched.runs[0].finished


def test_a_silent_run_is_cut_off_unless_its_process_lives(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    watched = watch(run)
    watched.look()
    written = (run / "metrics.jsonl").stat().st_mtime

    def word(age: float) -> str:
        return watched.runs[0].state(written + age).word

    assert [word(age) for age in (1, QUIET - 1, QUIET + 1)] == ["at work", "at work", "cut off"]
    with run_lock(run):
        assert word(10 * QUIET) == "at work"
    (run / LOCK_FILE).write_text(f"{dead_process()}\n")
    assert word(10 * QUIET) == "cut off"
    append(run, "metrics", timed(11, training_seconds=11 * 100.0))  # about 100 seconds between lines
    watched.look()
    assert [word(age) for age in (4 * 100, 6 * 100)] == ["at work", "cut off"]


@pytest.mark.parametrize("content", ["", "x\n", "-1\n", "0\n", "9" * 30])
def test_who_holds_a_run_is_asked_without_taking_it(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_held(tmp_path)
    with run_lock(tmp_path):
        assert is_held(tmp_path)
        (tmp_path / LOCK_FILE).write_text(content)
        assert not is_held(tmp_path)
    (tmp_path / LOCK_FILE).write_text(f"{os.getpid()}\n")  # alive, as a process with the pid of a dead one may be
    assert not is_held(tmp_path)
    monkeypatch.setattr("meristem.runs.lock.KNOWN_LOCKS", tmp_path / "none")  # where the system does not tell
    assert is_held(tmp_path)
    with run_lock(tmp_path):  # it is free to be taken
        pass


def test_a_slow_reading_is_followed_by_a_long_pause(tmp_path: Path) -> None:
    run, now, looks = begun(tmp_path / "run"), 0.0, []
    watched = Watch([run], clock=lambda: now)

    def slow() -> bool:
        nonlocal now
        looks.append(now)
        now += 2.0
        return True

    watched.runs[0].look = slow  # type: ignore[method-assign]
    while now < 100:
        watched.look()
        now += 0.5
    assert looks == [0.0 + k * 2 * (1 + SHARE) for k in range(5)]


def test_places_that_will_not_become_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("Dear")
    with pytest.raises(InputError, match=r"run = '.*other': holds other things and no run"):
        Watch([tmp_path / "other"])
    with pytest.raises(InputError, match=r"is a file; name the folder of a run"):
        Watch([tmp_path / "other" / "letter.txt"])


def test_how_far_a_run_has_come() -> None:
    lines = [timed(step) for step in range(1, 11)] + [{"step": 10, "held_out_loss": 2.5, "accuracy": 0.75}]
    now = progress(lines, 100)
    assert now["step"] == 10
    assert (now["elapsed"], now["epoch"], now["held_out"], now["accuracy"]) == (30, 0.05, 2.5, 0.75)
    assert now["left"] == 90 * 100 / 50  # steps of 100 tokens at 50 a second
    assert now["between"] == 3
    assert now["loss"] == pytest.approx(2.9)
    old = progress([metric(1, None, tokens_per_second=None)], 100)  # of before there were such columns
    assert {old[name] for name in ("loss", "smooth", "elapsed", "left", "epoch", "held_out", "between")} == {None}
    assert progress([], 100)["step"] == 0


@pytest.mark.parametrize("loss", [number / 1000 + 0.00004996 for number in range(1000, 4000, 97)])
def test_losses_are_told_as_the_run_itself_tells_them(loss: float) -> None:
    """Rounded to 6 digits first, some of these would go up."""
    assert describe_numbers(progress([metric(1, loss)], 1))["loss"] == describe_numbers({"loss": loss})["loss"]
