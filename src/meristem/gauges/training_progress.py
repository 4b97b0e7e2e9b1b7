"""How training goes: the loss, smoothed, and the time of an update."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meristem.gauges.gauge import Instrument, gauge_place
from meristem.gauges.probe import Probe
from meristem.model.growable import Growable
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.ranks import mean_over_ranks

LOSS_MEMORY = 0.9  # per feed
UPDATES = 32  # of whose times the median is taken


@dataclass(frozen=True)
class TrainingLoss:
    """The loss on the batches that it is fed with, as an exponential moving average; not a number before any.

    >>> instrument = TrainingLoss().instrument(model)
    >>> instrument.feed(probe)
    >>> round(instrument.read(probe), 1)
    4.6
    """

    def instrument(self, model: Growable) -> LossInstrument:
        """What follows the loss of a model."""
        return LossInstrument(model)


class LossInstrument(Instrument):
    """Follows the loss on the device, which nobody waits for until it is read."""

    memory = LOSS_MEMORY

    def __init__(self, model: Growable) -> None:
        self.sums = torch.zeros(2, **gauge_place(model))  # of the loss, and of what it was weighted with

    def loss(self, probe: Probe) -> Tensor:
        """The loss that is taken in, of this process's share."""
        return probe.look().loss

    @torch.no_grad()
    def feed(self, probe: Probe) -> None:
        loss = mean_over_ranks(self.loss(probe)).to(self.sums)
        new = torch.lerp(torch.stack((loss, torch.ones_like(loss))), self.sums, self.memory)
        # A loss that is not finite, as of an update that was skipped, would stay for good.
        self.sums = torch.where(loss.isfinite(), new, self.sums)

    def read(self, probe: Probe) -> float:
        loss, weight = self.sums.tolist()
        return loss / weight if weight else float("nan")

    def state(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load(self, state: dict[str, Any]) -> None:
        self.sums = state["sums"].to(self.sums, copy=True)


@dataclass(frozen=True)
class UpdateLoss:
    """The loss of the updates themselves, the mean over about as many as named, since blocks were last added.

    >>> instrument = UpdateLoss(updates=10).instrument(model)
    >>> instrument.feed(probe)
    >>> round(instrument.read(probe), 1)
    4.6
    """

    updates: int

    def instrument(self, model: Growable) -> UpdateLossInstrument:
        """What follows the loss of a model."""
        return UpdateLossInstrument(model, 1 - 1 / self.updates)


class UpdateLossInstrument(LossInstrument):
    """Takes the loss that training has computed anyway."""

    looks = False

    def __init__(self, model: Growable, memory: float) -> None:
        super().__init__(model)
        self.memory = memory

    def loss(self, probe: Probe) -> Tensor:
        return probe.look().loss if probe.loss is None else probe.loss.detach()

    def follow(self, moves: Moves, plan: Plan) -> None:
        if None in moves.layers:
            self.sums = torch.zeros_like(self.sums)


@dataclass(frozen=True)
class StepTime:
    """Seconds from one update to the next: the median of the last ones since the structure changed, the mean of ranks.

    >>> instrument = StepTime().instrument(model)
    >>> for _ in range(2):
    ...     instrument.feed(probe)
    >>> instrument.read(probe) > 0
    True
    """

    def instrument(self, model: Growable) -> TimeInstrument:
        """What keeps the time."""
        return TimeInstrument()


class TimeInstrument(Instrument):
    """Keeps the time between feeds; not a number before the second. A pause, as for a recording, moves no median."""

    looks = False

    def __init__(self) -> None:
        self.last: float | None = None
        self.recent: deque[float] = deque(maxlen=UPDATES)

    def feed(self, probe: Probe) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.recent.append(now - self.last)
        self.last = now

    def read(self, probe: Probe) -> float:
        median = statistics.median(self.recent) if self.recent else float("nan")
        return float(mean_over_ranks(torch.tensor(median, dtype=torch.float64, device=probe.tokens.device)))

    def follow(self, moves: Moves, plan: Plan) -> None:
        self.recent.clear()
        self.last = None

    def state(self) -> dict[str, Any]:
        return {"recent": list(self.recent)}

    def load(self, state: dict[str, Any]) -> None:
        self.recent = deque(state.get("recent", ()), maxlen=UPDATES)  # older versions kept a sum
        self.last = None
