"""Reading a step's numbers without stopping the device, and the clock that counts training time only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepReading:
    """The numbers of a finished step."""

    step: int
    loss: float
    gradient_norm: float
    skipped: bool
    stop: bool


class PendingReadings:
    """Numbers are copied from the device as they arise and read one step later, when the copy has long arrived."""

    def __init__(self) -> None:
        self._pending: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def push(self, step: int, values: Tensor) -> StepReading | None:
        """Hand in the four numbers of a step, (4,); get back the reading of the step before."""
        finished = self.flush()
        event = None
        if values.is_cuda:
            values = values.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending = (step, values, event)
        return finished

    def flush(self) -> StepReading | None:
        """The reading of the last step, once it is there."""
        if self._pending is None:
            return None
        step, values, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        loss, norm, skipped, stop = values.tolist()
        return StepReading(step, loss, norm, skipped > 0, stop > 0)


class Clock:
    """Time spent on the last training steps. Compilation, evaluation and saving happen while it is paused.

    Between two pauses the first reading comes with the second step, and its tick only starts the clock. So there is no
    speed while there is a pause after every step or every other one: how much of such a short time was a step's own
    cannot be told, as a device may still be busy with the step after the one that was read.
    """

    WINDOW = 50  # steps; what was slow before that is forgotten

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds: deque[float] = deque(maxlen=self.WINDOW)

    def tick(self) -> None:
        """A step has ended. The first one after a pause only starts the clock."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        self._last = None

    @property
    def seconds_per_step(self) -> float | None:
        return sum(self._seconds) / len(self._seconds) if self._seconds else None


class TimeSpent:
    """Where the seconds of a run went: to training (steps, gauges, edits), compilation, evaluation and saving.

    Kernels are compiled and graphs recorded in the first updates of a model, and in those after a change of its
    structure. These are added up apart, and what they took longer than as many other updates is called compilation.
    """

    FIRST = 2  # updates: one that compiles, and one that is recorded

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.parts = {"update": 0.0, "updates": 0.0, "first": 0.0, "first_updates": 0.0, "growth": 0.0}
        self.parts |= {"evaluation": 0.0, "saving": 0.0, **(before or {})}
        self._last, self._fresh = time.perf_counter(), self.FIRST

    def restructured(self) -> None:
        """The next updates are the first of another structure."""
        self._fresh = self.FIRST

    def lap(self, part: str) -> None:
        """All since the last call was spent on `part`: update, growth, evaluation or saving."""
        now = time.perf_counter()
        if part == "update":
            part = "first" if self._fresh > 0 else "update"
            self._fresh -= 1
            self.parts["first_updates" if part == "first" else "updates"] += 1
        self.parts[part] += now - self._last
        self._last = now

    def wait(self) -> None:
        """What was still on its way of the last updates has been waited for."""
        now = time.perf_counter()
        self.parts["update" if self.parts["updates"] else "first"] += now - self._last
        self._last = now

    @property
    def columns(self) -> dict[str, float]:
        """Seconds by their names in metrics.jsonl."""
        parts = self.parts
        usual = parts["update"] / parts["updates"] if parts["updates"] else parts["first"]
        compiled = max(0.0, parts["first"] - parts["first_updates"] * usual) if parts["updates"] else 0.0
        return {
            "training_seconds": parts["update"] + parts["first"] + parts["growth"] - compiled,
            "compilation_seconds": compiled,
            "evaluation_seconds": parts["evaluation"],
            "saving_seconds": parts["saving"],
        }
