"""Where a run's numbers go: its files, trackers and the display."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from meristem.plan import Plan
from meristem.training.config import Config, flatten
from meristem.training.devices import peak_flops
from meristem.training.display import Display
from meristem.training.distributed import Processes
from meristem.training.meter import Clock, Reading
from meristem.training.optimizer import learning_rate
from meristem.training.run import RunFolder
from meristem.training.trackers import make_trackers


@dataclass
class Progress:
    """What changes from step to step besides weights and moments."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    held_out: float | None = None

    def count(self, reading: Reading) -> None:
        self.skipped += reading.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if reading.skipped else 0


class Recorder:
    """Writes metrics and events. Only the first process does; calls on the others do nothing."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        plan: Plan,
        peers: Processes,
        display: Display,
        first_step: int = 0,
    ) -> None:
        self.folder, self.config, self.peers, self.display = folder, config, peers, display
        self.tokens_per_step = config.train.batch_size * plan.context
        peak = peak_flops(peers.device)
        self.flops_share = None if peak is None else plan.cost.training.full / (peak * peers.world)
        names = config.log.trackers if peers.first else ()
        self.trackers = make_trackers(names, folder.path, flatten(config), first_step)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: Any) -> None:
        for tracker in self.trackers:
            tracker.close()

    def step(self, reading: Reading, state: Progress, clock: Clock) -> None:
        if not self.peers.first:
            return
        if reading.skipped:
            self.event("skipped", reading.step, loss=str(reading.loss), gradient_norm=str(reading.gradient_norm))
        steps = self.config.train.steps
        if not due(reading.step, steps, self.config.log.every):
            return
        pace = clock.seconds_per_step
        rate = None if pace is None else self.tokens_per_step / pace
        entry = {
            "step": reading.step,
            "loss": _finite(reading.loss),
            "gradient_norm": _finite(reading.gradient_norm),
            "lr": learning_rate(reading.step - 1, steps, self.config.optimizer),
            "tokens": reading.step * self.tokens_per_step,
            "tokens_per_second": rate,
            "mfu": None if rate is None or self.flops_share is None else rate * self.flops_share,
            "skipped": state.skipped,
        }
        self._write(entry)
        left = None if pace is None else (steps - reading.step) * pace
        self.display.update({**entry, "held_out": state.held_out, "left": left})

    def held_out(self, step: int, loss: float) -> None:
        perplexity = math.exp(min(loss, 700.0)) if math.isfinite(loss) else None
        self._write({"step": step, "held_out_loss": _finite(loss), "perplexity": perplexity})
        self.display.note(f"step {step}: held-out loss {loss:.4f}")

    def event(self, kind: str, step: int, **facts: Any) -> None:
        if self.peers.first:
            self.folder.append(self.folder.events, {"step": step, "event": kind, **facts})

    def _write(self, entry: dict[str, Any]) -> None:
        self.folder.append(self.folder.metrics, entry)
        numbers = {k: float(v) for k, v in entry.items() if k != "step" and v is not None}
        for tracker in self.trackers:
            tracker.log(entry["step"], numbers)


def due(step: int, steps: int, every: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now; 0 is at the end only."""
    return step == steps or (every > 0 and step % every == 0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
