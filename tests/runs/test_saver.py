"""Saving beside the training: same guarantees, one save at a time, errors that reach the run."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meristem.runs import saver
from meristem.runs.checkpoint import (
    Snapshot,
    list_checkpoints,
    load_checkpoint,
    snapshot,
    step_of,
    write_checkpoint,
)
from meristem.runs.run_folder import RunFolder
from meristem.runs.saver import Saver
from meristem.training.train import resume, train
from training.helpers import assert_equal_runs, saves, tiny_config


def taken(step: int, value: float = 1.0) -> Snapshot:
    model = nn.Linear(3, 4)
    nn.init.constant_(model.weight, value)
    return snapshot(step, model=model, optimizer=torch.optim.AdamW(model.parameters()), state={})


class Gate:
    """Lets writes through when it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.writes = threading.Event(), 0
        monkeypatch.setattr(saver, "write_checkpoint", self.write)

    def write(self, folder: Path, what: Snapshot) -> Path:
        self.writes += 1
        assert self.open.wait(60)
        return write_checkpoint(folder, what)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with Saver(tmp_path, keep=2) as saves:
        before = model.weight.detach().clone()
        saves.save(snapshot(4, model=model, optimizer=optimizer, state={}))
        assert list(saves.finished()) == []
        nn.init.constant_(model.weight, 7.0)  # what is trained on meanwhile is not what is written
        gate.open.set()
        (saved,) = saves.finished(wait=True)
    assert saved.path == tmp_path / "step-00000004"
    assert torch.equal(load_checkpoint(saved.path).model["weight"], before)


def test_leaving_waits_for_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    threading.Timer(0.05, gate.open.set).start()
    with Saver(tmp_path, keep=2) as saves:
        saves.save(taken(4))
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [4]


def test_a_save_pushes_out_older_ones_when_it_is_proven(tmp_path: Path) -> None:
    with Saver(tmp_path, keep=1) as saves:
        for step in (4, 8):
            saves.save(taken(step))
            saves.finished(wait=True)
            saves.proven(step)  # the update that led to it says nothing about it
            saves.finished(wait=True)
            assert step_of(list_checkpoints(tmp_path)[-1]) == step
            assert len(list_checkpoints(tmp_path)) == (1 if step == 4 else 2)
            saves.proven(step + 1)
            saves.finished(wait=True)
            assert [step_of(path) for path in list_checkpoints(tmp_path)] == [step]


def test_an_error_of_the_thread_ends_the_run_which_can_be_resumed(
    data: Path, whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, what: Snapshot) -> Path:
        if what.step == 8:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "x"))
        return write_checkpoint(folder, what)

    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_checkpoint", full)
        with pytest.raises(OSError, match="No space left"):
            train(tiny_config(data), tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    assert [step_of(path) for path in list_checkpoints(run.checkpoints)] == [4]
    resume(run.path)
    assert_equal_runs(run, whole)
    assert saves(run) == saves(whole)


def test_a_second_save_waits_for_the_first(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    busy = threading.Lock()

    def alone(folder: Path, what: Snapshot) -> Path:
        assert busy.acquire(blocking=False)
        try:
            at_once.append(what.step)
            return write_checkpoint(folder, what)
        finally:
            busy.release()

    monkeypatch.setattr(saver, "write_checkpoint", alone)
    changes: dict[str, Any] = {"checkpoint__every": 1, "checkpoint__keep": 100}
    train(tiny_config(data, **changes), tmp_path / "run")
    assert at_once == list(range(1, 13))
    run = RunFolder.open(tmp_path / "run")
    assert [entry["step"] for entry in saves(run)] == [*range(1, 13), 12]
