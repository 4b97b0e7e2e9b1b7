"""What a finished run is worth to a comparison, read from its folder."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meristem.errors import InputError, RunError
from meristem.files import write_atomically
from meristem.growth.descriptions import describe_structure
from meristem.growth.events import GrowthEvent
from meristem.runs.entries import growth_events, sound_metrics
from meristem.runs.run_folder import RunFolder
from meristem.seeds import own_seed
from meristem.training.meter import TimeSpent

POINTS = 120  # of a curve, about
CARRIED, PLAN = "taken-after", "last-plan.json"  # where plans lie of runs of which there are lines alone

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Result:
    """The numbers of one finished run. Times are seconds; `training_seconds` are those of steps, gauges and edits."""

    arm: str
    seed: int
    rate: float
    folder: str
    scores: dict[str, float]  # held_out_loss and what else was measured at the end; none of a run that diverged
    steps: int
    tokens: int
    flops: int
    parameters: int
    structure: str
    heads: list[int]
    heads_at_start: list[int]
    training_seconds: float
    compilation_seconds: float
    evaluation_seconds: float
    saving_seconds: float
    peak_memory: int | None
    device: str
    births: list[tuple[int, int]]  # (updates done, layer)
    plan: dict[str, Any]
    loss: Curve  # of training, by step
    held_out: Curve
    seconds: Curve  # of training until a step, where it was logged

    @property
    def diverged(self) -> bool:
        return not self.scores

    @property
    def lost(self) -> bool:
        """Whether it was never run, as what it was to take after had diverged."""
        return not self.folder

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.training_seconds if self.training_seconds else 0.0

    @property
    def all_seconds(self) -> float:
        """From the first update on, with compilation, evaluation and saving."""
        return self.training_seconds + self.compilation_seconds + self.evaluation_seconds + self.saving_seconds

    def seconds_to(self, loss: float) -> float | None:
        """Training seconds until the first evaluation at or below a held-out loss; None if there was none."""
        reached = next((step for step, value in self.held_out if value <= loss), None)
        known = [seconds for step, seconds in self.seconds if reached is not None and step <= reached]
        return known[-1] if known else None

    def reference(self, what: str) -> Any:
        """What another arm takes after: one of the words of `file.REFERENCES`."""
        if what == "run":
            return self.folder
        if what == "plan":
            path = Path(self.folder) / PLAN
            write_atomically(path, json.dumps(self.plan, indent=1) + "\n")
            return str(path)
        if what == "births":
            return sum(self.heads) - sum(self.heads_at_start)
        if what == "birth_times":
            return [step for step, _ in self.births]
        layers = [layer for _, layer in self.births]
        return layers if what == "birth_layers" else other_layers(layers, len(self.heads), self.seed)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CarriedResult(Result):
    """The result of a run whose folder is elsewhere: others can take after its structure, for which it has a place.

    They cannot start from its weights.
    """

    def reference(self, what: str) -> Any:
        if what not in ("run", "plan"):
            return super().reference(what)
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        return super().reference("plan")


def is_carried(path: str | None) -> bool:
    """Whether a path that a run takes after names the plan of a run whose folder is elsewhere."""
    return path is not None and Path(path).name == PLAN and CARRIED in Path(path).parts


def lost_result(arm: str, seed: int) -> Result:
    """What stands for a run that cannot be made; it counts like one that diverged."""
    return Result(
        arm=arm, seed=seed, rate=0.0, folder="", scores={}, steps=0, tokens=0, flops=0, parameters=0, structure="",
        heads=[], heads_at_start=[], training_seconds=0.0, compilation_seconds=0.0, evaluation_seconds=0.0,
        saving_seconds=0.0, peak_memory=None, device="", births=[], plan={}, loss=[], held_out=[], seconds=[],
    )  # fmt: skip


def other_layers(layers: list[int], count: int, seed: int) -> list[int]:
    """For each layer another one of `count`, drawn by the seed."""
    if count < 2:
        raise InputError("other_layers", count, "must be two or more: there is no other layer to be born in")
    drawn = random.Random(own_seed(f"other-layers-{seed}"))
    return [(layer + drawn.randrange(1, count)) % count for layer in layers]


def is_finished(folder: RunFolder) -> bool:
    """Whether a run has come to its end."""
    train = folder.config.train
    ends = [entry["step"] for entry in folder.read(folder.events) if entry.get("event") == "finished"]
    return bool(ends) and (train.flops is not None or train.steps in ends)


BESIDES = ("growth", "measured", "demand", "checkpoint", "not_saved")  # may come between updates that are skipped


def has_diverged(folder: RunFolder) -> bool:
    """Whether a run was given up. One of an older version does not say so: updates in a row were skipped at its end."""
    told = [(entry.get("event"), entry["step"]) for entry in folder.read(folder.events)]
    told = [(event, step) for event, step in told if event not in BESIDES]
    if not told:
        return False
    (last, step), most = told[-1], folder.config.train.max_skipped
    return last == "diverged" or told[-most:] == [("skipped", step - most + 1 + number) for number in range(most)]


def read_result(arm: str, seed: int, folder: RunFolder) -> Result:
    """The result of a run that has come to its end, or has diverged."""
    config = folder.config
    entries = sound_metrics(folder.read(folder.metrics), config.train.steps)
    steps = [entry for entry in entries if entry.get("loss") is not None]
    measured = [entry for entry in entries if entry.get("held_out_loss") is not None]
    diverged = has_diverged(folder)
    end = steps[-1]["step"] if steps and config.train.flops is not None else config.train.steps
    if not diverged and (not steps or not measured or measured[-1]["step"] != end):
        raise RunError(f"{folder.path}: has no held-out loss of its end, so there is nothing to compare it by")
    state = folder.newest_state or {}
    plan = folder.newest_plan
    events = growth_events(folder.read(folder.events), config.train.steps)
    births = [event for event in events if isinstance(event, GrowthEvent) and event.action == "birth"]
    started = [entry for entry in folder.read(folder.events) if entry.get("event") in ("start", "resume")]
    spent = TimeSpent(state.get("seconds")).columns
    last = steps[-1] if steps else {"step": 0, "tokens": 0, "flops": 0}
    thin = max(1, len(steps) // POINTS)
    return Result(
        arm=arm, seed=seed, rate=config.optimizer.rate, folder=str(folder.path.resolve()),
        scores={} if diverged else {k: value for k, value in measured[-1].items() if k != "step" and value is not None},
        steps=last["step"], tokens=last["tokens"], flops=last["flops"], parameters=plan.parameters,
        structure=describe_structure(plan), heads=list(plan.heads), heads_at_start=list(folder.plan.heads), **spent,
        peak_memory=last.get("peak_memory"), device=started[-1].get("device", "") if started else "",
        births=[(event.step, event.layer or 0) for event in births], plan=plan.to_dict(),
        loss=[(entry["step"], entry["loss"]) for entry in [*steps[:-1:thin], *steps[-1:]]],
        held_out=[(entry["step"], entry["held_out_loss"]) for entry in measured],
        seconds=[(e["step"], e["training_seconds"]) for e in steps if e.get("training_seconds") is not None],
    )  # fmt: skip
