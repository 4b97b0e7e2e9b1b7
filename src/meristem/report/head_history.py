"""How the heads of a run came and went, told by its events: counts, the demand that was left, and predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meristem.growth.descriptions import MEASURES
from meristem.growth.events import HEAD_CHANGES, Event, GrowthEvent, expected_heads
from meristem.report.curves import Curve
from meristem.wording import counted

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

    `decisions` are the events about heads, whether anything changed or not. Those that changed something say how many
    heads every layer had from then on.
    """

    start: tuple[int, ...]
    last_step: int
    decisions: Sequence[Event]
    losses: Curve = ()
    criterion: str = "demand"

    @property
    def layers(self) -> range:
        return range(len(self.start))

    @property
    def changes(self) -> list[GrowthEvent]:
        """Births and removals."""
        return self._of(*HEAD_CHANGES)

    @property
    def spared(self) -> list[GrowthEvent]:
        """Trials that showed a head to be needed."""
        return self._of("spare")

    @property
    def stacks(self) -> list[GrowthEvent]:
        """Growth in depth, in which layers are born with heads."""
        return self._of("stack")

    def _of(self, *actions: str) -> list[GrowthEvent]:
        return [event for event in self.decisions if isinstance(event, GrowthEvent) and event.action in actions]

    @property
    def growth(self) -> list[GrowthEvent]:
        """Everything that changed the number of heads, in its order."""
        return sorted((*self.changes, *self.stacks), key=lambda event: event.step)

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads of every layer at the end."""
        return tuple(self.counts[layer][-1][1] for layer in self.layers)

    @cached_property
    def counts(self) -> list[list[tuple[int, int]]]:
        """The number of heads of every layer, at the start and from each step on that changed it."""
        counts = [[(0, heads)] for heads in self.start]
        for event in self.growth:
            heads = event.facts["heads"]
            born = [layer for layer in self.layers if heads[layer] and not counts[layer][-1][1]]
            for layer in born if event.layer is None or event.action == "stack" else [event.layer]:
                counts[layer].append((event.step, heads[layer]))
        return counts

    @cached_property
    def readings(self) -> list[list[DemandPoint]]:
        """What was measured of every layer at each decision; nothing where births are at random times."""
        names = ("demand", "noise", "threshold")
        measured = [event for event in self.decisions if event.facts.get("demand")]
        return [
            [DemandPoint(event.step, *(_number(event.facts[name][layer]) for name in names)) for event in measured]
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
        """What grew, when and why, in plain words, and what came of it."""
        return [*(change_text(event, self.criterion) for event in self.growth), *self.summary()]

    def summary(self) -> list[str]:
        """Trials, and the heads of every layer, in plain words."""
        trials = len(self.spared)
        kept = [f"{counted(trials, 'trial')} without a head showed it to be needed"] if trials else []
        hint = [HINT] if any(self.predicted) and self.criterion == "demand" else []
        return [*kept, *map(self.layer_text, self.layers), *hint]

    def layer_text(self, layer: int) -> str:
        """Heads at the start, at the end and as predicted, and why there are no more."""
        predicted = self.predicted[layer]
        facts = [f"{self.start[layer]} at the start", *([] if predicted is None else [f"{predicted} predicted"])]
        text = f"layer {layer}: {counted(self.heads[layer], 'head')} ({', '.join(facts)})"
        last = next((event for event in reversed(self.decisions) if event.facts.get("demand")), None)
        if last is None:
            return text
        why = f": {last.facts['rules'][layer]}" if "rules" in last.facts else ""
        return f"{text}; at the end {measured_text(last, layer, self.criterion)}{why}"


def change_text(event: GrowthEvent, criterion: str) -> str:
    """A birth, a removal or a trial in one line, with what it was decided on."""
    text, facts = f"step {event.step:,}: {event}", event.facts
    if event.action == "birth" and event.layer is not None and facts.get("demand"):
        return f"{text}; {measured_text(event, event.layer, criterion)}"
    if "loss_with" in facts:
        return f"{text}; loss {_loss_text(facts['loss_with'])} with it, {_loss_text(facts['loss_without'])} without"
    return text


def measured_text(event: Event, layer: int, criterion: str) -> str:
    """What was left of a layer's demand, and where births begin."""
    name = MEASURES[criterion]
    demand, noise, threshold = (event.facts[key][layer] for key in ("demand", "noise", "threshold"))
    if demand is None or threshold is None:
        return f"no certain {name} so far"
    spread = f" ± {noise:.2g}" if criterion == "demand" and noise is not None else ""  # its standard error
    return f"{name} {demand:.2g}{spread}, births begin at {threshold:.2g}"


def _loss_text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4g}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value
