"""What the loop promises: seeds apart, fixed windows, bad updates skipped, early refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meristem.data import TokenData, batch
from meristem.errors import InputError, RunError
from meristem.model import Decoder
from meristem.runs.checkpoint import list_checkpoints, load_checkpoint, step_of
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training import loop, tasks
from meristem.training.distributed import Processes
from meristem.training.gradients import Gradients
from meristem.training.held_out import held_out_windows
from meristem.training.optimizer import guarded_update, learning_rate
from meristem.training.train import resume, train

from .helpers import CPU, STEPS, assert_equal_runs, events, final_tensors, metrics, tiny_config, trained


class Watch:
    """Records the initial weights and the batches of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: list[Tensor] = []
        self.batches: list[np.ndarray[Any, Any]] = []

        def decoder(*arguments: Any, **options: Any) -> Decoder:
            model = Decoder(*arguments, **options)
            self.weights = [p.detach().clone() for p in model.parameters()]
            return model

        def watched_batch(*arguments: Any) -> Any:
            arrays = batch(*arguments)
            self.batches.append(arrays[0].copy())
            return arrays

        monkeypatch.setattr(tasks, "Decoder", decoder)
        monkeypatch.setattr(tasks, "batch", watched_batch)


def watched(data: Path, out: Path, **changes: Any) -> tuple[list[Tensor], np.ndarray[Any, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        trained(data, out, train__steps=3, **changes)
    return watch.weights, np.stack(watch.batches)


def test_arms_with_equal_seeds_start_from_equal_weights_and_see_equal_batches(data: Path, tmp_path: Path) -> None:
    prism_weights, prism_batches = watched(data, tmp_path / "prism", model__schedule="prism")
    for schedule in ("uniform", "reverse"):
        weights, batches = watched(data, tmp_path / schedule, model__schedule=schedule)
        torch.testing.assert_close(weights, prism_weights, rtol=0, atol=0)
        assert np.array_equal(batches, prism_batches)
    heads = {name: RunFolder.open(tmp_path / name).plan.heads for name in ("prism", "uniform", "reverse")}
    assert heads == {"prism": (2, 4), "uniform": (4, 4), "reverse": (4, 2)}


def test_the_seeds_of_weights_and_data_are_apart(data: Path, tmp_path: Path) -> None:
    weights, batches = watched(data, tmp_path / "base")
    other_weights, same_batches = watched(data, tmp_path / "weights", train__seed=1)
    same_weights, other_batches = watched(data, tmp_path / "data", data__seed=1)
    assert np.array_equal(batches, same_batches)
    assert not torch.equal(weights[0], other_weights[0])
    torch.testing.assert_close(weights, same_weights, rtol=0, atol=0)
    assert not np.array_equal(batches, other_batches)


def test_the_same_configuration_gives_the_same_run(data: Path, whole: RunFolder, tmp_path: Path) -> None:
    assert_equal_runs(trained(data, tmp_path / "run"), whole)


def test_held_out_losses_are_those_of_fixed_windows(data: Path, whole: RunFolder) -> None:
    """At every evaluation, the mean over the first windows of the held-out stream, by plain cross entropy."""
    context, count = whole.plan.context, whole.config.eval.windows
    stream = TokenData.open(data).split("held_out")
    rows = torch.from_numpy(stream.window(0, context * count + 1))
    windows = held_out_windows(stream, context, count)
    assert torch.equal(windows, torch.stack([rows[i * context : (i + 1) * context + 1] for i in range(count)]))
    logged = {e["step"]: e for e in whole.read(whole.metrics) if "held_out_loss" in e}
    assert set(logged) == {4, 8, 12}
    for step, entry in logged.items():
        model = load_run(whole.path, step=step, device="cpu").model
        with torch.no_grad():
            logits = model(windows[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        assert entry["held_out_loss"] == pytest.approx(float(expected), abs=1e-5)
        assert entry["perplexity"] == pytest.approx(math.exp(entry["held_out_loss"]))


def test_logged_learning_rates_are_those_of_the_steps(whole: RunFolder) -> None:
    rates = [entry["lr"] for entry in metrics(whole) if "lr" in entry]
    assert rates == [learning_rate(step, STEPS, whole.config.optimizer) for step in range(STEPS)]


# --- updates that are not finite ------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, updates: Collection[int], where: str) -> None:
    """Make loss or gradients of the given updates (1-based) not finite."""

    class Poisoned(Gradients):
        calls = 0

        def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
            loss = super().__call__(tokens, targets)
            self.calls += 1
            if self.calls in updates:
                if where == "loss":
                    return loss * math.nan
                assert self.parameters[-1].grad is not None
                self.parameters[-1].grad[0] = math.inf
            return loss

    monkeypatch.setattr(loop, "Gradients", Poisoned)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_updates_that_are_not_finite_are_skipped_and_counted(
    where: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, (1, 5, 6), where)
    states: list[list[Tensor]] = []

    def watched_update(optimizer: torch.optim.AdamW, *rest: Any) -> tuple[Tensor, Tensor]:
        result = guarded_update(optimizer, *rest)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = [optimizer.state[p][name] for p in parameters for name in ("step", "exp_avg", "exp_avg_sq")]
        states.append([tensor.detach().clone() for tensor in (*parameters, *moments)])
        return result

    monkeypatch.setattr(loop, "guarded_update", watched_update)
    run = trained(data, tmp_path / "run", checkpoint__every=1)
    tensors = {step_of(path): load_checkpoint(path) for path in list_checkpoints(run.checkpoints)}
    assert set(tensors) == {2, 3, 4, *range(7, STEPS + 1)}  # nothing is saved while updates are skipped
    start = Decoder(run.plan, seed=run.config.train.seed)
    assert torch.equal(states[0][0], next(p for p in start.parameters() if p.dim() == 2))
    for after in (5, 6):
        torch.testing.assert_close(states[after - 1], states[3], rtol=0, atol=0)
    assert not torch.equal(states[6][0], states[5][0])
    entries = [entry for entry in metrics(run) if "loss" in entry]
    assert [entry["skipped"] for entry in entries] == [1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert [e["step"] for e in run.read(run.events) if e["event"] == "skipped"] == [1, 5, 6]
    missing = "loss" if where == "loss" else "gradient_norm"
    assert [entry["step"] for entry in entries if entry[missing] is None] == [1, 5, 6]
    assert tensors[STEPS].state["skipped"] == 3
    assert events(run)[-1] == "finished"


def test_a_resumed_run_goes_on_counting_skipped_updates(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        poison(patch, (3, 4, 5, 6), "gradient")
        with pytest.raises(RunError, match="3 updates in a row"):
            train(tiny_config(data, train__max_skipped=3), tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    assert list_checkpoints(run.checkpoints) == []  # a save was due in the middle of the streak
    with monkeypatch.context() as patch:
        poison(patch, (3, 4), "gradient")
        resume(run.path)
    assert load_checkpoint(list_checkpoints(run.checkpoints)[-1]).state["skipped"] == 2


@pytest.mark.parametrize(("first", "last_good"), [(9, "step-00000008"), (1, "no checkpoint")])
def test_too_many_skipped_updates_stop_the_run_and_name_the_last_good_checkpoint(
    first: int, last_good: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(first, STEPS + 1), "loss")
    with pytest.raises(RunError, match=rf"not finite in 3 updates in a row.*{last_good}"):
        train(tiny_config(data, train__max_skipped=3), tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    last = {"step": first + 2, "event": "diverged", "first": first, "not_finite": "updates"}
    assert list(run.read(run.events))[-1] == last
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Gradients", Gradients)
        resume(tmp_path / "run")
    assert final_tensors(run)["step"] == STEPS
    assert "diverged" not in events(run)


def test_an_end_whose_weights_are_not_finite_is_told_as_it_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last update was finite; what it left behind is not, and is not saved."""
    calls = itertools.count(1)

    def poisoned(optimizer: torch.optim.Optimizer, *arguments: Any) -> tuple[Tensor, Tensor]:
        found = guarded_update(optimizer, *arguments)
        if next(calls) == STEPS:
            optimizer.param_groups[0]["params"][0].data.fill_(torch.nan)
        return found

    monkeypatch.setattr(loop, "guarded_update", poisoned)
    with pytest.raises(
        RunError, match=rf"stopped at step {STEPS}: weights, .* not finite.*the last good checkpoint is"
    ):
        train(tiny_config(data), tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    last = {"step": STEPS, "event": "diverged", "first": STEPS, "not_finite": "weights"}
    assert list(run.read(run.events))[-1] == last


def test_skipped_updates_that_are_not_in_a_row_do_not_stop_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, (1, 2, 4, 5, 7, 8, 10, 11), "loss")
    run = trained(data, tmp_path / "run", train__max_skipped=3)
    assert events(run)[-1] == "finished"


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        (3, {"train__micro_batch": 1}, r"train\.batch_size = 4: must be a multiple of 3 processes"),
        (2, {"train__batch_size": 6, "train__micro_batch": 2}, r"train\.batch_size = 6: .* 2 processes .*-batch 2"),
    ],
)
def test_a_batch_that_does_not_divide_among_processes_is_refused(
    world: int, changes: dict[str, Any], message: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def pretended(device: str) -> Iterator[Processes]:
        yield Processes(0, world, CPU)

    monkeypatch.setattr("meristem.training.train.processes", pretended)
    with pytest.raises(InputError, match=message):
        train(tiny_config(data, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere/index\.json: cannot be read, so this is no prepared data"):
        train(tiny_config(tmp_path / "nowhere"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_step_without_checkpoint_is_refused_with_those_there_are(whole: RunFolder) -> None:
    with pytest.raises(InputError, match=r"step = 5: has no checkpoint; there are \[4, 8, 12\]"):
        load_run(whole.path, step=5, device="cpu")
    assert load_run(whole.path, step=8, device="cpu").step == 8
    assert load_run(whole.path, device="cpu").step == STEPS


def test_fresh_batches_begin_with_the_next_one(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head is tried without on batches that it has not been trained on: not on the present one."""
    seen: list[tuple[Tensor, Tensor]] = []
    plain = loop.Trainer.grow

    def watched_grow(trainer: loop.Trainer, record: Any) -> bool:
        parts = len(trainer.tokens)
        fresh = torch.stack([tokens for tokens, _ in itertools.islice(trainer.fresh(), 2 * parts)])
        seen.append((trainer.tokens, fresh))
        return plain(trainer, record)

    monkeypatch.setattr(loop.Trainer, "grow", watched_grow)
    trained(data, tmp_path / "run", train__steps=5)
    assert len(seen) == 5
    batches = [tokens for tokens, _ in seen]
    for number, (_, fresh) in enumerate(seen[:-2]):
        torch.testing.assert_close(fresh, torch.cat(batches[number + 1 : number + 3]), rtol=0, atol=0)
        assert not torch.equal(fresh[0], batches[number][0])
