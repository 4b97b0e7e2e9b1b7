"""Updates that are not finite: what is saved, what is called good, and going back."""

from __future__ import annotations

import errno
import itertools
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meristem.data import batch
from meristem.errors import RunError
from meristem.runs import saver
from meristem.runs.checkpoint import list_checkpoints, load_checkpoint, snapshot, step_of
from meristem.runs.divergence import Rewind, batch_number, load_rewinds
from meristem.runs.run_folder import RunFolder
from meristem.training import going_on, loop, tasks
from meristem.training.gradients import Gradients
from meristem.training.optimizer import guarded_update
from meristem.training.train import resume, train
from training.helpers import (
    EAGER_HEADS,
    STEPS,
    assert_equal_runs,
    events,
    final_tensors,
    metrics,
    saves,
    tiny_config,
    trained,
)

Batch = np.ndarray[Any, Any]


def bad_batches(monkeypatch: pytest.MonkeyPatch, data: Path, numbers: range, **changes: Any) -> list[Batch]:
    """Make the loss of these batches of the tiny run not finite; the list of the batches that are trained on."""
    with monkeypatch.context() as patch:
        seen: list[Batch] = []
        patch.setattr(tasks, "batch", lambda *arguments: _kept(seen, batch(*arguments)))
        trained(data, data.parent / f"seen-{len(list(data.parent.iterdir()))}", **{**changes, "growth__policy": "none"})
    bad = [tuple(seen[number].ravel()) for number in numbers]
    used: list[Batch] = []

    class Poisoned(Gradients):
        def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
            rows = tokens.flatten(0, 1).numpy().copy()
            used.append(rows)
            loss = super().__call__(tokens, targets)
            return loss * math.nan if tuple(rows.ravel()) in bad else loss

    monkeypatch.setattr(loop, "Gradients", Poisoned)
    return used


def _kept(seen: list[Batch], arrays: tuple[Batch, Batch]) -> tuple[Batch, Batch]:
    seen.append(arrays[0].copy())
    return arrays


# --- what is saved ----------------------------------------------------------------------------------------------------


def weights_that_overflow(monkeypatch: pytest.MonkeyPatch, update: int) -> None:
    """One update (1-based) leaves weights that are finite, and a loss from them that is not."""
    calls, large = 0, 1e30

    class Overflowing(Gradients):
        def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
            loss = super().__call__(tokens, targets)
            return loss * math.nan if float(self.parameters[0].detach().abs().max()) >= large else loss

    def exploding(optimizer: torch.optim.AdamW, *rest: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        result = guarded_update(optimizer, *rest)
        if calls == update:
            with torch.no_grad():
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.fill_(large)
        return result

    monkeypatch.setattr(loop, "guarded_update", exploding)
    monkeypatch.setattr(loop, "Gradients", Overflowing)


def test_a_streak_does_not_push_out_the_good_checkpoints(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was found: a save every 4 steps, 2 kept, 10 updates in a row before the run stops."""
    weights_that_overflow(monkeypatch, 9)
    sizes = {"train__steps": 40, "checkpoint__keep": 2, "train__max_skipped": 10, "eval__every": 0}
    with pytest.raises(RunError, match=r"10 updates in a row.*the last good checkpoint is .*step-00000008"):
        train(tiny_config(data, **sizes), tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    assert [step_of(path) for path in list_checkpoints(run.checkpoints)] == [4, 8]
    for path in list_checkpoints(run.checkpoints):
        assert all(tensor.isfinite().all() for tensor in load_checkpoint(path).model.values())


@pytest.mark.parametrize("evaluated", [False, True])
def test_what_is_called_good_has_been_seen_to_be_finite(
    evaluated: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 8 is of weights from which no update was finite; only held-out data can show that it is
    good. With a single checkpoint kept, it has not pushed out the one before."""
    weights_that_overflow(monkeypatch, 8) if not evaluated else bad_batches(monkeypatch, data, range(8, 12))
    changes = {"checkpoint__keep": 1, "train__max_skipped": 3, "eval__every": 4 if evaluated else 0}
    good = 8 if evaluated else 4
    with pytest.raises(RunError, match=rf"the last good checkpoint is .*step-0000000{good}"):
        train(tiny_config(data, **changes), tmp_path / "run")
    kept = [step_of(path) for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == ([8] if evaluated else [4, 8])


def test_weights_that_are_not_finite_are_not_saved(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def broken(step: int, **options: Any) -> Any:
        taken = snapshot(step, **options)
        if step == 8:
            taken.tensors["model.safetensors"]["embedding.weight"][0, 0] = math.inf
        return taken

    monkeypatch.setattr(loop, "snapshot", broken)
    run = trained(data, tmp_path / "run")
    assert [step_of(path) for path in list_checkpoints(run.checkpoints)] == [4, 12]
    (entry,) = [entry for entry in run.read(run.events) if entry["event"] == "not_saved"]
    assert (entry["step"], entry["tensor"]) == (8, "embedding.weight")


def test_a_save_that_was_due_comes_after_the_streak(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_batches(monkeypatch, data, range(3, 5))  # updates 4 and 5
    run = trained(data, tmp_path / "run", eval__every=0)
    assert [step_of(path) for path in list_checkpoints(run.checkpoints)] == [6, 8, 12]


@pytest.mark.parametrize("held_out", [False, True])
def test_a_run_that_ends_in_a_streak_has_an_end(
    held_out: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are finite. Without held-out data nothing shows that they are good, and an older one stays."""
    bad_batches(monkeypatch, data, range(STEPS - 2, STEPS))
    if not held_out:
        without_held_out(monkeypatch)
    run = trained(data, tmp_path / "run", checkpoint__keep=1)
    assert events(run)[-1] == "finished"
    assert [step_of(path) for path in list_checkpoints(run.checkpoints)] == ([12] if held_out else [8, 12])
    assert resume(run.path).step == STEPS


def without_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tasks.LanguageTask.__init__

    def unmeasured(task: tasks.LanguageTask, *arguments: Any) -> None:
        plain(task, *arguments)
        task.unmeasured = "no held-out data"

    monkeypatch.setattr(tasks.LanguageTask, "__init__", unmeasured)


# --- going back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "heads"])
def test_a_run_goes_back_and_passes_over_the_batches_of_the_streak(
    kind: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"train__max_skipped": 3}
    if kind == "heads":
        changes |= {**EAGER_HEADS, "incrt__last_birth": 1.0}
    used = bad_batches(monkeypatch, data, range(6, 9), **changes)  # updates 7 to 9
    run = trained(data, tmp_path / "run", train__on_divergence="rewind", **changes)
    assert run.rewinds == (Rewind(9, 4, 6, 9),)
    assert [entry for entry in run.read(run.events) if entry["event"] == "rewind"] == [
        {"step": 4, "event": "rewind", "from_step": 9, "batches": [6, 9]}
    ]
    assert saves(run)[-1] == {"step": STEPS, "event": "finished"}
    assert [entry["step"] for entry in metrics(run) if "loss" in entry] == list(range(1, STEPS + 1))
    assert all(entry["loss"] is not None for entry in metrics(run) if "loss" in entry)
    firsts = [rows[0].tolist() for rows in used]
    again = firsts[-(STEPS - 4) :]  # from step 4 on, the second time
    assert again[:2] == firsts[4:6]
    assert not any(rows in firsts[6:9] for rows in again)
    assert final_tensors(run)["step"] == STEPS


@pytest.mark.parametrize("ends_before", ["write_rewinds", "restore_logs", "load_newest"])
def test_a_kill_while_going_back_changes_nothing(
    ends_before: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_batches(monkeypatch, data, range(6, 9))
    changes: dict[str, Any] = {"train__max_skipped": 3, "train__on_divergence": "rewind"}
    expected = trained(data, tmp_path / "whole", **changes)

    class Killed(BaseException):
        pass

    def kill(*arguments: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(going_on, ends_before, kill)
        with pytest.raises(Killed):
            train(tiny_config(data, **changes), tmp_path / "run")
    resume(tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    assert_equal_runs(run, expected)
    assert run.rewinds == expected.rewinds
    assert saves(run) == saves(expected)
    assert events(run).count("rewind") == 1


def test_a_stop_that_is_asked_for_in_the_streak_is_not_forgotten(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"train__max_skipped": 3, "train__on_divergence": "rewind"}
    bad_batches(monkeypatch, data, range(6, 9))
    expected = trained(data, tmp_path / "whole", **changes)
    calls = itertools.count(1)

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 9:  # the last of the streak
            signal.raise_signal(signal.SIGTERM)
        return guarded_update(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "guarded_update", interrupted)
        outcome = train(tiny_config(data, **changes), tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    assert (outcome.signal, outcome.step) == (signal.SIGTERM, 4)
    assert events(run)[-2:] == ["rewind", "stopped"]
    resume(run.path)
    assert_equal_runs(run, expected)


def test_a_full_disk_is_not_hidden_by_a_divergence(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, taken: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    bad_batches(monkeypatch, data, range(4, 7))
    monkeypatch.setattr(saver, "write_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        train(tiny_config(data, train__max_skipped=3, train__on_divergence="rewind"), tmp_path / "run")


def test_going_back_has_an_end(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad_batches(monkeypatch, data, range(5, STEPS), train__steps=3 * STEPS)

    class AlwaysBad(Gradients):
        def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return super().__call__(tokens, targets) * math.nan

    monkeypatch.setattr(loop, "Gradients", AlwaysBad)
    changes = {"train__max_skipped": 2, "train__on_divergence": "rewind", "train__max_rewinds": 2}
    with pytest.raises(RunError, match="after 2 rewinds; no checkpoint had been written yet"):
        train(tiny_config(data, **changes), tmp_path / "run")
    assert [(one.first, one.end) for one in load_rewinds(tmp_path / "run")] == [(0, 2), (2, 4)]


def test_rewinds_that_a_checkpoint_knows_must_be_there(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_batches(monkeypatch, data, range(6, 9))
    run = trained(data, tmp_path / "run", train__max_skipped=3, train__on_divergence="rewind")
    for content in (None, "{}", '{"rewinds": [{"from_step": -1}]}', "[" * 100_000):
        (run.path / "rewinds.json").unlink(missing_ok=True)
        if content is not None:
            (run.path / "rewinds.json").write_text(content)
        with pytest.raises(RunError, match=r"rewinds\.json"):
            resume(run.path)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=5))
def test_batches_are_those_that_are_not_passed_over_in_order(ranges: list[tuple[int, int]]) -> None:
    rewinds = [Rewind(0, 0, first, first + count) for first, count in ranges]
    left = [n for n in range(100) if not any(rewind.first <= n < rewind.end for rewind in rewinds)]
    assert [batch_number(step, rewinds) for step in range(len(left))] == left
