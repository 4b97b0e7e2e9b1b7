"""How the heads of a run came and went, told by its events: counts, the demand that was left, and predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meristem.growth.descriptions import MEASURES, describe_growth
from meristem.growth.events import expected_heads
from meristem.report.curves import Curve
from meristem.wording import counted

Entry = Mapping[str, Any]  # a line of events.jsonl


CHANGES = ("birth", "removal")  # actions

HINT = "predicted: one head for each direction that the first demand asked for; real heads write several"


@dataclass(frozen=True)
class DemandPoint:
    """What was left of a layer's demand, its noise, and where births begin; NaN if it was not finite."""

    step: int
    demand: float
    noise: float
    threshold: float


@dataclass(frozen=True)
class HeadHistory:
    """The heads of every layer at the `start`, the decisions about them, and the training losses, up to `last_step`.

    `decisions` are the lines of events.jsonl about heads, whether anything changed or not.
    """

    start: tuple[int, ...]
    last_step: int
    decisions: Sequence[Entry]
    losses: Curve = ()
    criterion: str = "demand"

    @property
    def layers(self) -> range:
        return range(len(self.start))

    @property
    def changes(self) -> list[Entry]:
        """Births and removals."""
        return [entry for entry in self.decisions if entry.get("action") in CHANGES]

    @property
    def spared(self) -> list[Entry]:
        """Trials that showed a head to be needed."""
        return [entry for entry in self.decisions if entry.get("action") == "spare"]

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads of every layer at the end."""
        return tuple(self.counts[layer][-1][1] for layer in self.layers)

    @property
    def stacks(self) -> list[Entry]:
        """Growth in depth, in which layers are born with heads."""
        return [entry for entry in self.decisions if entry.get("action") == "stack"]

    @cached_property
    def counts(self) -> list[list[tuple[int, int]]]:
        """The number of heads of every layer, at the start and from each step on that changed it."""
        counts = [[(0, heads)] for heads in self.start]
        for entry in sorted((*self.changes, *self.stacks), key=lambda entry: int(entry["step"])):
            born = [layer for layer in self.layers if entry["heads"][layer] and not counts[layer][-1][1]]
            for layer in born if entry["action"] == "stack" else [entry["layer"]]:
                counts[layer].append((entry["step"], entry["heads"][layer]))
        return counts

    @cached_property
    def readings(self) -> list[list[DemandPoint]]:
        """What was measured of every layer at each decision; nothing where births are at random times."""
        names = ("demand", "noise", "threshold")
        measured = [entry for entry in self.decisions if len(entry.get("demand", ())) == len(self.start)]
        return [
            [DemandPoint(entry["step"], *(_number(entry[name][layer]) for name in names)) for entry in measured]
            for layer in self.layers
        ]

    @property
    def predicted(self) -> list[int | None]:
        """The number of heads that the first measurement let one expect, of every layer.

        None where there is nothing to expect heads of, because no demand was ever certain.
        """
        expected = expected_heads(self.decisions)
        known = [any(math.isfinite(reading.demand) for reading in readings) for readings in self.readings]
        return [int(expected[layer]["count"]) if expected and known[layer] else None for layer in self.layers]

    def lines(self) -> list[str]:
        """What grew, when and why, in plain words."""
        trials = len(self.spared)
        kept = [f"{counted(trials, 'trial')} without a head showed it to be needed"] if trials else []
        hint = [HINT] if any(self.predicted) and self.criterion == "demand" else []
        told = sorted((*self.changes, *self.stacks), key=lambda entry: int(entry["step"]))
        return [*(self.change_text(entry) for entry in told), *kept, *map(self.layer_text, self.layers), *hint]

    def layer_text(self, layer: int) -> str:
        """Heads at the start, at the end and as predicted, and why there are no more."""
        predicted = self.predicted[layer]
        facts = [f"{self.start[layer]} at the start", *([] if predicted is None else [f"{predicted} predicted"])]
        text = f"layer {layer}: {counted(self.heads[layer], 'head')} ({', '.join(facts)})"
        if not self.readings[layer]:
            return text
        last = next(entry for entry in reversed(self.decisions) if "demand" in entry)
        return f"{text}; at the end {measured_text(last, layer, self.criterion)}: {last['rules'][layer]}"

    def change_text(self, entry: Entry) -> str:
        return change_text(entry, self.criterion)


def change_text(entry: Entry, criterion: str) -> str:
    """A birth, a removal or a trial in one line, with what it was decided on."""
    text = f"step {entry['step']:,}: {describe_growth(dict(entry))}"
    if entry["action"] == "birth" and entry.get("demand"):
        return f"{text}; {measured_text(entry, entry['layer'], criterion)}"
    if "loss_with" in entry:
        return f"{text}; loss {_loss_text(entry['loss_with'])} with it, {_loss_text(entry['loss_without'])} without"
    return text


def measured_text(entry: Entry, layer: int, criterion: str) -> str:
    """What was left of a layer's demand, and where births begin."""
    name = MEASURES[criterion]
    demand, noise, threshold = (entry[key][layer] for key in ("demand", "noise", "threshold"))
    if demand is None or threshold is None:
        return f"no certain {name} so far"
    spread = f" ± {noise:.2g}" if criterion == "demand" and noise is not None else ""  # its standard error
    return f"{name} {demand:.2g}{spread}, births begin at {threshold:.2g}"


def _loss_text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4g}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value
