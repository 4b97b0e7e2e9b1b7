"""Where a run's numbers go: its files, trackers and the display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meristem.config import Config, flatten
from meristem.devices import peak_flops, peak_memory
from meristem.growth.descriptions import describe_change, describe_demand
from meristem.growth.events import Event, GrowthEvent
from meristem.plan import Plan
from meristem.records import finite
from meristem.runs.best import Best
from meristem.runs.entries import loops_of
from meristem.runs.log import Log
from meristem.runs.run_folder import RunFolder
from meristem.training.display import Display
from meristem.training.distributed import Processes
from meristem.training.length import Length
from meristem.training.meter import Clock, StepReading, TimeSpent
from meristem.training.tasks import Task
from meristem.training.trackers import make_trackers

STRONG_GATE = 1.05  # strength of a loop that is warned of; trained gates end about 1


@dataclass
class Progress:
    """What changes from step to step besides weights and moments."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    measured: Mapping[str, float | None] = field(default_factory=dict)  # last on held-out data
    flops: int = 0  # counted until `step` when the run was begun or resumed
    settled: int = 0  # the last step whose numbers are known
    seconds: Mapping[str, float] = field(default_factory=dict)  # spent until then, by their parts
    best: Best = field(default_factory=lambda: Best("held_out_loss"))  # of the evaluations
    ended_early: bool = False  # by eval.patience

    @property
    def streak(self) -> int:
        """The first of the updates that were skipped in a row until now, counted from 1."""
        return self.settled - self.skipped_in_a_row + 1

    @property
    def held_out(self) -> float | None:
        """The last held-out loss."""
        return self.measured.get("held_out_loss")

    def count(self, reading: StepReading) -> None:
        self.settled = reading.step
        self.skipped += reading.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if reading.skipped else 0


class Recorder:
    """Writes metrics and events. Only the first process does; calls on the others do nothing."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        task: Task,
        plan: Plan,
        peers: Processes,
        display: Display,
        progress: Progress,
        length: Length,
    ) -> None:
        self.folder, self.config, self.peers, self.display = folder, config, peers, display
        self._task, self._plan, self._length = task, plan, length
        self._warned: set[int] = set()  # layers
        self.logs = {log.path: log for log in map(Log, folder.logs if peers.first else ())}
        names = config.log.trackers if peers.first else ()
        self.trackers = make_trackers(names, folder.path, flatten(config), progress.step)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: Any) -> None:
        for tracker in self.trackers:
            tracker.close()

    def restructured(self, step: int, plan: Plan) -> None:
        """The model has another structure from `step` on."""
        self._length.restructured(step, plan)
        self._plan = plan
        self.display.restructured(plan, self._length.end(step))

    def growth(self, event: Event) -> None:
        """A decision about the structure, or what was measured where there was nothing to decide."""
        if self.peers.first:
            self.logs[self.folder.events].append(event.to_dict())
        if isinstance(event, GrowthEvent):
            self.display.note(f"step {event.step}: {describe_change(event, self.config.tolerance)}")
        if status := describe_demand(event):
            self.display.status(status)
        self._warn(event.step, event.facts)

    def observation(self, step: int, facts: Mapping[str, Any]) -> None:
        if self.peers.first:
            self.logs[self.folder.entropy].append({"step": step, **facts})
            self._warn(step, facts)

    def _warn(self, step: int, facts: Mapping[str, Any]) -> None:
        """Warn of loops that add more to the stream than it holds, or run above full strength, once for each layer."""
        for loop in loops_of(facts, self._plan):
            layer, gates = loop["layer"], [gate or 0.0 for number in loop["gates"] or () for gate in number]
            said = ""
            if any(size is None or size > 1 for size in loop["update"]):
                said = "adds more than the stream itself holds"
            elif max(gates, default=0.0) > STRONG_GATE:
                said = f"runs at {max(gates):.2f} of a full pass: training has opened its gate above 1"
            if said and layer not in self._warned:
                self._warned.add(layer)
                self.display.note(f"warning, step {step}: the loop of layer {layer} {said}")

    def positions(self) -> dict[str, Any]:
        """How far each log has come, for a checkpoint to vouch for."""
        return {path.name: log.position.to_dict() for path, log in self.logs.items()}

    def step(self, reading: StepReading, state: Progress, clock: Clock, spent: TimeSpent) -> None:
        if not self.peers.first:
            return
        self.display.step(reading.step)
        if reading.skipped:
            self.event("skipped", reading.step, loss=str(reading.loss), gradient_norm=str(reading.gradient_norm))
        steps = self._length.end(reading.step)
        if not due(reading.step, steps, self.config.log.every):
            return
        pace = clock.seconds_per_step
        tokens = self._task.tokens_per_step
        entry = {
            "step": reading.step,
            "loss": finite(reading.loss),
            "gradient_norm": finite(reading.gradient_norm),
            "lr": self._length.rate(reading.step - 1),
            "tokens": reading.step * tokens,
            "epoch": round(reading.step / self._task.steps_per_epoch, 6),
            "flops": self._length.flops(reading.step),
            "tokens_per_second": None if pace is None else tokens / pace,
            "mfu": self._mfu(pace),
            "skipped": state.skipped,
            **spent.columns,
            "peak_memory": peak_memory(self.peers.device),
        }
        self._write(entry)
        left = None if pace is None else (steps - reading.step) * pace
        measured = {"held_out": state.held_out, "accuracy": state.measured.get("accuracy")}
        elapsed = sum(spent.columns.values())
        self.display.update({**entry, **measured, "elapsed": elapsed, "left": left})

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """What was measured on held-out data."""
        self._write({"step": step, **{name: finite(value) for name, value in values.items()}})
        said = f"step {step}: held-out loss {values['held_out_loss']:.4f}"
        said += f", accuracy {values['accuracy']:.4f}" if "accuracy" in values else ""
        if "held_out_loss_average" in values:
            said += f"; of the average {values['held_out_loss_average']:.4f}"
            said += f", {values['accuracy_average']:.4f}" if "accuracy" in values else ""
        self.display.note(said)

    def event(self, kind: str, step: int, **facts: Any) -> None:
        if self.peers.first:
            self.logs[self.folder.events].append({"step": step, "event": kind, **facts})

    def _mfu(self, pace: float | None) -> float | None:
        peak = peak_flops(self.peers.device)
        if pace is None or peak is None:
            return None
        return self._length.step_flops.full / (pace * peak * self.peers.world)

    def _write(self, entry: dict[str, Any]) -> None:
        self.logs[self.folder.metrics].append(entry)
        numbers = {k: float(v) for k, v in entry.items() if k != "step" and v is not None}
        for tracker in self.trackers:
            tracker.log(entry["step"], numbers)


def due(step: int, steps: int, every: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now; 0 is at the end only."""
    return step == steps or (every > 0 and step % every == 0)
