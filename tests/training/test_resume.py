"""A run that was stopped and resumed is the run that was not (bit by bit on a CPU)."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meristem.config import override
from meristem.errors import InputError, Remedy, RunError
from meristem.runs.best import Best
from meristem.runs.checkpoint import MANIFEST, list_checkpoints
from meristem.runs.run_folder import RunFolder
from meristem.training import loop
from meristem.training.optimizer import guarded_update
from meristem.training.train import resume, train

from .helpers import STEPS, assert_equal_runs, copy_run, events, prepared, saves, tiny_config, trained


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Let the signal arrive in the middle of update `step` (0-based)."""
    calls = itertools.count()

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == step:
            signal.raise_signal(number)
        return guarded_update(*arguments)

    monkeypatch.setattr(loop, "guarded_update", interrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", range(STEPS))
def test_a_signal_at_any_step_stops_cleanly_and_resumes_to_the_same_run(
    step: int, number: int, data: Path, whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        signal_at(patch, step, number)
        outcome = train(tiny_config(data), tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    assert signal.getsignal(number) is before
    if outcome.signal is None:  # it came too late to stop anything
        assert step >= STEPS - 3
        assert events(run)[-1] == "finished"
    else:
        assert outcome.signal == number
        assert step < outcome.step < step + 4  # within a few steps
        assert list_checkpoints(run.checkpoints)[-1].name == f"step-{outcome.step:08d}"
        assert events(run)[-2:] == ["checkpoint", "stopped"]
        assert resume(run.path).step == STEPS
        assert events(run)[-1] == "finished"
    assert_equal_runs(run, whole)
    assert {p.name for p in list_checkpoints(whole.checkpoints)} <= {p.name for p in list_checkpoints(run.checkpoints)}


@pytest.mark.parametrize("every", [1, 2])
def test_a_signal_stops_a_run_that_saves_or_evaluates_at_every_step(
    every: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_at(monkeypatch, 3, signal.SIGTERM)
    outcome = train(tiny_config(data, checkpoint__every=every, eval__every=1), tmp_path / "run")
    assert outcome.signal == signal.SIGTERM
    assert outcome.step <= 6


@pytest.mark.parametrize("step", [4, 8])
def test_resuming_from_any_checkpoint_gives_the_same_run(step: int, whole: RunFolder, tmp_path: Path) -> None:
    run = copy_run(whole, tmp_path / "run", last=step)
    assert resume(run.path).step == STEPS
    assert_equal_runs(run, whole)
    assert saves(run) == saves(whole)


def contents(run: RunFolder) -> dict[str, bytes]:
    """All files of a run, but for the lock."""
    files = [path for path in sorted(run.path.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(run.path)): path.read_bytes() for path in files}


def test_a_run_killed_before_its_first_checkpoint_starts_from_the_beginning(whole: RunFolder, tmp_path: Path) -> None:
    run = copy_run(whole, tmp_path / "run", last=0)
    resume(run.path)
    assert_equal_runs(run, whole)
    assert saves(run) == saves(whole)


@pytest.mark.parametrize("damage", ["deleted", "damaged", "unreadable"])
def test_checkpoints_that_cannot_be_read_are_no_reason_to_start_over(
    damage: str, whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is touched, what was found is named; starting over is done on purpose, and keeps the old."""
    run = copy_run(whole, tmp_path / "run", last=8)
    for path in list_checkpoints(run.checkpoints):
        if damage == "deleted":
            shutil.rmtree(path)
        elif damage == "damaged":
            (path / "model.safetensors").write_bytes(b"")
    before = contents(run)
    with monkeypatch.context() as patch:
        if damage == "unreadable":  # a single error of the disk, while manifests are read
            plain = Path.read_bytes
            refuse = OSError(errno.EIO, "Input/output error")
            patch.setattr(Path, "read_bytes", lambda path: _raise(refuse) if path.name == MANIFEST else plain(path))
        with pytest.raises(RunError) as refused:
            resume(run.path)
    said = str(refused.value)
    assert contents(run) == before
    if damage == "deleted":
        assert "holds no checkpoint, though one of step 8 was written" in said
        assert refused.value.remedy == Remedy(("from_start",), "resume", str(run.path))
    else:
        assert all(f"{name}/" in said for name in ("step-00000004", "step-00000008"))
        assert ("Input/output error" if damage == "unreadable" else "model.safetensors: has 0 bytes") in said
    resume(run.path, from_start=True)
    assert_equal_runs(run, whole)
    aside = run.path / "before.aside-1"
    assert (aside / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]
    kept = [path.name for path in list_checkpoints(aside / "checkpoints")]
    assert kept == ([] if damage == "deleted" else ["step-00000004", "step-00000008"])


def test_what_is_tidied_up_at_an_early_end_leaves_the_whole_checkpoint(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one that is damaged, and was passed over, does not push it out."""
    run = copy_run(whole, tmp_path / "run")
    names = [path.name for path in list_checkpoints(run.checkpoints)]
    (run.checkpoints / names[-1] / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(Best, "exhausted", lambda best, patience: True)
    outcome = resume(run.path, override(run.config, ["--checkpoint.keep", "1"]))
    assert names[-2] in [path.name for path in list_checkpoints(run.checkpoints)]
    assert outcome.step == int(names[-2].removeprefix("step-"))


def _raise(error: Exception) -> Any:
    raise error


def test_a_line_cut_off_in_the_log_is_dropped_on_resume(whole: RunFolder, tmp_path: Path) -> None:
    run = copy_run(whole, tmp_path / "run", last=8)
    text = run.metrics.read_text(encoding="utf-8")
    run.metrics.write_text(text[:-20], encoding="utf-8")
    with pytest.raises(json.JSONDecodeError):
        json.loads(run.metrics.read_text(encoding="utf-8").splitlines()[-1])
    resume(run.path)
    assert_equal_runs(run, whole)


def test_what_does_not_change_the_result_may_change_on_resume(data: Path, whole: RunFolder, tmp_path: Path) -> None:
    run = copy_run(whole, tmp_path / "run", last=4)
    moved = tmp_path / "moved"
    shutil.copytree(data, moved)
    changes = ["--data.path", str(moved), "--checkpoint.every=0", "--eval.batch=4", "--train.steps=12"]
    resume(run.path, override(run.config, changes))
    assert run.config.data.path == str(moved)
    assert_equal_runs(run, whole)
    assert [p.name for p in list_checkpoints(run.checkpoints)] == ["step-00000004", "step-00000012"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("--train.steps=20", r"train\.steps = 20: the run began with 12"),
        ("--model.heads=8", r"model\.heads = 8"),
        ("--optimizer.lr=1.0", r"optimizer\.lr = 1\.0"),
        ("--data.seed=3", r"data\.seed = 3"),
        ("--eval.windows=3", r"eval\.windows = 3"),
        ("--train.stps=20", r"train\.stps = 20: unknown key; did you mean train\.steps\?"),
    ],
)
def test_what_changes_the_result_may_not_change_on_resume(change: str, field: str, whole: RunFolder) -> None:
    with pytest.raises(InputError, match=field):
        resume(whole.path, override(whole.config, [change]))


def test_other_data_is_refused_on_resume(whole: RunFolder, tmp_path: Path) -> None:
    other = prepared(tmp_path / "other", count=81)
    with pytest.raises(InputError, match=r"data\.path = .*other.*not the data this run began with"):
        resume(whole.path, override(whole.config, ["--data.path", str(other)]))


def test_a_finished_run_stays_as_it_is(whole: RunFolder, tmp_path: Path) -> None:
    run = copy_run(whole, tmp_path / "run")
    outcome = resume(run.path)
    assert (outcome.step, outcome.signal) == (STEPS, None)
    assert outcome.held_out == pytest.approx([e["held_out_loss"] for e in run.read(run.metrics) if len(e) == 3][-1])
    assert_equal_runs(run, whole)


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run"):
        resume(tmp_path)


def test_what_the_folder_holds_is_not_overwritten(data: Path, tmp_path: Path) -> None:
    note = tmp_path / "run" / "note.txt"
    note.parent.mkdir()
    note.write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"out = .*run.*already holds something; take another folder$"):
        train(tiny_config(data), note.parent)
    with pytest.raises(InputError, match=r"out = .*note.txt.* is a file; name a folder"):
        train(tiny_config(data), note)
    assert [p.name for p in note.parent.iterdir()] == ["note.txt"]


def test_an_empty_folder_is_taken(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with subprocess.Popen(["true"]) as dead:
        pass
    (tmp_path / f".run.{dead.pid}-00000000@{socket.gethostname()}.partial").mkdir()  # a start that was killed
    run = trained(data, tmp_path / "run", train__steps=1)
    assert len(list_checkpoints(run.checkpoints)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
