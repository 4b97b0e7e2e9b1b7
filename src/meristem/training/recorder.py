"""Where a run's numbers go: its files, trackers and the display."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from meristem.plan import Plan
from meristem.records import finite
from meristem.training.config import Config, flatten
from meristem.training.devices import peak_flops
from meristem.training.display import Display, describe_demand, describe_growth
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
    flops: int = 0  # counted until `step` when the run was begun or resumed

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
        progress: Progress,
    ) -> None:
        self.folder, self.config, self.peers, self.display = folder, config, peers, display
        self.tokens_per_step = config.train.batch_size * plan.context
        self._counted = progress.step, progress.flops
        self._plan = plan
        self._warned: set[int] = set()  # layers
        names = config.log.trackers if peers.first else ()
        self.trackers = make_trackers(names, folder.path, flatten(config), progress.step)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: Any) -> None:
        for tracker in self.trackers:
            tracker.close()

    def flops(self, step: int) -> int:
        """Training FLOPs counted until a step, with what the structure of the time needed (causal attention)."""
        since, flops = self._counted
        return flops + (step - since) * step_flops(self.config, self._plan)

    def restructured(self, step: int, plan: Plan) -> None:
        """The model has another structure from `step` on."""
        self._counted = step, self.flops(step)
        self._plan = plan
        self.display.restructured(plan)

    def growth(self, step: int, event: dict[str, Any]) -> None:
        """A decision about the structure, or what was measured where there was nothing to decide."""
        facts = {key: value for key, value in event.items() if key != "event"}
        self.event(event["event"], step, **facts, plan=self._plan.digest)
        if event["event"] == "growth":
            self.display.note(f"step {step}: {describe_growth(event)}")
        if "demand" in event:
            self.display.status(describe_demand(event))
        self._warn(step, event)

    def observation(self, step: int, facts: dict[str, Any]) -> None:
        if self.peers.first:
            self.folder.append(self.folder.entropy, {"step": step, **facts})
            self._warn(step, facts)

    def _warn(self, step: int, facts: dict[str, Any]) -> None:
        """Of loops that add more to the stream than it holds, once for each layer."""
        for loop in facts.get("loops", ()):
            large = any(size is None or size > 1 for size in loop["update"])
            if large and loop["layer"] not in self._warned:
                self._warned.add(loop["layer"])
                self.display.note(
                    f"warning, step {step}: the loop of layer {loop['layer']} adds more than the stream itself holds"
                )

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
            "loss": finite(reading.loss),
            "gradient_norm": finite(reading.gradient_norm),
            "lr": learning_rate(reading.step - 1, steps, self.config.optimizer),
            "tokens": reading.step * self.tokens_per_step,
            "flops": self.flops(reading.step),
            "tokens_per_second": rate,
            "mfu": self._mfu(rate),
            "skipped": state.skipped,
        }
        self._write(entry)
        left = None if pace is None else (steps - reading.step) * pace
        self.display.update({**entry, "held_out": state.held_out, "left": left})

    def held_out(self, step: int, loss: float) -> None:
        perplexity = math.exp(min(loss, 700.0)) if math.isfinite(loss) else None
        self._write({"step": step, "held_out_loss": finite(loss), "perplexity": perplexity})
        self.display.note(f"step {step}: held-out loss {loss:.4f}")

    def event(self, kind: str, step: int, **facts: Any) -> None:
        if self.peers.first:
            self.folder.append(self.folder.events, {"step": step, "event": kind, **facts})

    def _mfu(self, rate: float | None) -> float | None:
        peak = peak_flops(self.peers.device)
        if rate is None or peak is None:
            return None
        return rate * self._plan.cost.training.full / (peak * self.peers.world)

    def _write(self, entry: dict[str, Any]) -> None:
        self.folder.append(self.folder.metrics, entry)
        numbers = {k: float(v) for k, v in entry.items() if k != "step" and v is not None}
        for tracker in self.trackers:
            tracker.log(entry["step"], numbers)


def step_flops(config: Config, plan: Plan) -> int:
    """Training FLOPs of one update, as counted by the plan's formulas for causal attention."""
    return config.train.batch_size * plan.context * plan.cost.training.causal


def due(step: int, steps: int, every: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now; 0 is at the end only."""
    return step == steps or (every > 0 and step % every == 0)
