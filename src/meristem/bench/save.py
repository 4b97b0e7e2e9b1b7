"""How long a save holds up training: written in the way of the updates, and beside them."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meristem.bench.step import TrainingStep, check_minimums, random_batches, wait
from meristem.devices import describe_device
from meristem.plan import Plan
from meristem.runs.checkpoint import snapshot, write_checkpoint
from meristem.runs.saver import Saver
from meristem.training.meter import PendingReadings

WARMUP, TIMED = 10, 60  # updates


@dataclass(frozen=True)
class SaveResult:
    """Milliseconds of one save: until the next update could begin, lost in all, and until it was on disk."""

    kind: str
    held_up: float
    lost: float
    written: float
    updates: int  # made while it was written


def compare_saves(plan: Plan, device: torch.device, *, batch: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure both kinds in turn, `rounds` times over; ready for JSON."""
    check_minimums(("batch", batch, 1), ("rounds", rounds, 1))
    step, batches = TrainingStep(plan, device), random_batches(plan, device, batch)
    _pace(step, batches, WARMUP, device)
    pace = _pace(step, batches, TIMED, device)
    results = []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="saves-", dir=folder) as place:
        for number in range(rounds):
            results.append(_in_the_way(step, Path(place), number, device))
            results.append(_beside(step, batches, Path(place), number, pace, device))
    return {
        "device": describe_device(device), "torch": torch.__version__, "parameters": plan.parameters,
        "settings": {"batch": batch, "context": plan.context},
        "update": 1e3 * pace, "results": [asdict(result) for result in results],
    }  # fmt: skip


def saves_text(report: dict[str, Any]) -> str:
    """Medians over the rounds, beside the time of an update."""
    lines = [
        f"{report['device']}, torch {report['torch']}, {report['parameters']:,} parameters, "
        f"{report['update']:.1f} ms an update",
        "save           held up ms   in updates   lost in all ms   on disk after ms",
    ]
    for kind in ("in the way", "beside"):
        mine = [result for result in report["results"] if result["kind"] == kind]
        held, lost, written = (statistics.median(one[key] for one in mine) for key in ("held_up", "lost", "written"))
        lines.append(f"{kind:<12}  {held:11.1f}  {held / report['update']:11.2f}  {lost:15.1f}  {written:17.1f}")
    return "\n".join(lines)


def _in_the_way(step: TrainingStep, folder: Path, number: int, device: torch.device) -> SaveResult:
    wait(device)
    begin = time.perf_counter()
    write_checkpoint(folder, snapshot(number, model=step.model, optimizer=step.optimizer, state={}))
    taken = 1e3 * (time.perf_counter() - begin)
    return SaveResult("in the way", taken, taken, taken, 0)


def _beside(
    step: TrainingStep, batches: Iterator[tuple[Tensor, Tensor]], folder: Path, number: int, pace: float,
    device: torch.device,
) -> SaveResult:  # fmt: skip
    with Saver(folder, keep=1) as saver:
        wait(device)
        begin = time.perf_counter()
        saver.save(snapshot(number, model=step.model, optimizer=step.optimizer, state={}))
        wait(device)  # training would not wait for the copies, which are on the device as its next update is
        held_up, readings = time.perf_counter() - begin, PendingReadings()
        for updates in itertools.count():
            if saver.finished():
                break
            readings.push(updates, step(*next(batches)).expand(4))
        wait(device)
        elapsed = time.perf_counter() - begin
    return SaveResult("beside", 1e3 * held_up, 1e3 * (elapsed - updates * pace), 1e3 * elapsed, updates)


def _pace(step: TrainingStep, batches: Iterator[tuple[Tensor, Tensor]], updates: int, device: torch.device) -> float:
    """Seconds of an update, the host being one ahead, as in training."""
    readings = PendingReadings()
    wait(device)
    begin = time.perf_counter()
    for number in range(updates):
        readings.push(number, step(*next(batches)).expand(4))
    wait(device)
    return (time.perf_counter() - begin) / updates
