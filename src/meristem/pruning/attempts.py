"""Runs with more or fewer of the heads that have left, until one is within the tolerance."""

from __future__ import annotations

import gc
import math
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from meristem.errors import RunError
from meristem.model import Transformer
from meristem.plan import Plan
from meristem.pruning.search import Search
from meristem.pruning.settings import PruneSettings
from meristem.pruning.source import Source
from meristem.pruning.writing import pruned_checkpoint, write_run
from meristem.records import finite
from meristem.runs.run_folder import load_run
from meristem.training.tasks import make_task
from meristem.training.train import resume

MOST_REPAIRS = 4  # of the bisection, where a repair after all removals ends above the tolerance


class Stopped(RunError):
    """A signal came while a pruned model was being repaired."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}: nothing was kept; prune again to begin anew")
        self.signal = number


@dataclass(frozen=True)
class Attempt:
    """A run without the first `kept` groups that left, and its losses: on rows set aside, and held out."""

    path: Path
    plan: Plan
    kept: int
    loss: float
    held_out: float | None
    repaired: bool


@dataclass
class Attempts:
    """Makes runs in a folder, of a source and what a search took out of it."""

    source: Source
    search: Search
    settings: PruneSettings
    work: Path
    device: torch.device

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.made = 0

    def best(self) -> Attempt:
        """The run with the most removals whose loss is within the tolerance.

        Without a repair the search has seen to that. With a repair, all removals are tried first. If the loss is then
        above the tolerance, the number is found by bisection, between the most removals that need no repair and all of
        them, in at most `MOST_REPAIRS` tries. If none of these is within the tolerance, the model keeps to the most
        removals that need no repair, and is repaired if the loss then stays within it.
        """
        most = len(self.search.points) - 1
        first = self.make(most, repair=self.settings.repair > 0)
        if not first.repaired or not most or self._is_within(first.loss):
            return first
        self.notes.append(
            f"With {self.search.points[most].sizes.heads} heads the loss is {first.loss - self.search.start:+.4f} "
            f"after the repair, above the tolerance of {self.settings.tolerance:g}: fewer have left."
        )
        low = max(number for number, point in enumerate(self.search.points) if self._is_within(point.loss))
        high, best = most, None
        for _ in range(MOST_REPAIRS):
            middle = (low + high) // 2
            if middle == low:
                break
            tried = self.make(middle, repair=True)
            low, high, best = (middle, high, tried) if self._is_within(tried.loss) else (low, middle, best)
        if best is not None:
            return best
        last = self.make(low, repair=True)
        if self._is_within(last.loss):
            return last
        self.notes.append("A repair takes the loss above the tolerance, and was left out.")
        return self.make(low, repair=False)

    def make(self, kept: int, *, repair: bool) -> Attempt:
        """A run without the first `kept` groups, repaired or not."""
        self.made += 1
        path, changes = self.work / str(self.made), self.search.changes[: self.search.points[kept].changes]
        settings = self.settings if repair else self.settings.without_repair()
        checkpoint = pruned_checkpoint(self.source, changes)
        model = self.source.model(self.device, checkpoint)
        loss, measured = self.search.loss(model), held_out_numbers(self.source, model, self.device)
        held_out = measured.get("held_out_loss")
        write_run(path, self.source, settings, checkpoint, changes, measured)
        if repair:
            model.cpu()
            self._make_room()
            outcome = resume(path)
            if outcome.signal is not None:
                raise Stopped(outcome.signal)
            loss, held_out = self.search.loss(load_run(path, device=str(self.device)).model), outcome.held_out
        return Attempt(path, checkpoint.plan, kept, loss, None if held_out is None else finite(held_out), repair)

    def _is_within(self, loss: float) -> bool:
        return loss - self.search.start <= self.settings.tolerance

    def _make_room(self) -> None:
        """Give back what the search no longer needs, for the time of a repair."""
        self.search.put(torch.device("cpu"))
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def held_out_numbers(source: Source, model: Transformer, device: torch.device) -> dict[str, float]:
    """What held-out data say of a model, by names of metrics.jsonl; nothing where none are held out."""
    task = make_task(source.config, model.plan, source.data, fixed=False)
    found = task.measure(model, device) if task.unmeasured is None else {}
    return {name: value for name, value in found.items() if math.isfinite(value)}
