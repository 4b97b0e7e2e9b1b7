"""How the heads of a run came and went, told by its events: counts, the demand that was left, and predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meristem.growth.descriptions import MEASURES, describe_change
from meristem.growth.events import Event, GrowthEvent
from meristem.report.curves import Curve
from meristem.runs.entries import predicted_heads
from meristem.wording import counted

HINT = (
    "predicted: directions that the first demand asked for, a head for each at most; one can write as many as its dim"
)


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
    heads every layer had from then on. The last layers have been `taken_out`, and are counted but not shown.
    """

    start: tuple[int, ...]
    last_step: int
    decisions: Sequence[Event]
    losses: Curve = ()
    criterion: str = "demand"
    taken_out: int = 0

    @property
    def layers(self) -> range:
        """The layers that there are at the end."""
        return range(len(self.start) - self.taken_out)

    @property
    def growth(self) -> list[GrowthEvent]:
        """Everything that changed the number of heads, in its order."""
        return [event for event in self._decided if event.action != "spare"]

    @property
    def changes(self) -> list[GrowthEvent]:
        """Births and removals."""
        return [event for event in self.growth if not _moves_blocks(event)]

    @property
    def blocks(self) -> list[GrowthEvent]:
        """Growth in depth, in which layers are born with heads, and its contrary."""
        return [event for event in self.growth if _moves_blocks(event)]

    @property
    def spared(self) -> list[GrowthEvent]:
        """Trials that showed a head to be needed."""
        return [event for event in self._decided if event.action == "spare"]

    @property
    def _decided(self) -> list[GrowthEvent]:
        return [event for event in self.decisions if isinstance(event, GrowthEvent)]

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads of every layer at the end."""
        return tuple(counts[-1][1] for counts in self.counts)

    @cached_property
    def counts(self) -> list[list[tuple[int, int]]]:
        """The number of heads of every layer, at the start and from each step on that changed it."""
        counts = [[(0, self.start[layer])] for layer in self.layers]
        for event in self.growth:
            for layer, known in enumerate(counts):
                if event.facts["heads"][layer] != known[-1][1]:
                    known.append((event.step, event.facts["heads"][layer]))
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
        expected = predicted_heads(self.decisions, len(self.layers))
        return [
            int(heads["count"]) if heads is not None and any(math.isfinite(one.demand) for one in readings) else None
            for heads, readings in zip(expected, self.readings, strict=True)
        ]

    def lines(self) -> list[str]:
        """What grew, when and why, in plain words, and what came of it."""
        return [*(f"step {event.step:,}: {describe_change(event)}" for event in self.growth), *self.summary()]

    def summary(self) -> list[str]:
        """Trials, and the heads of every layer, in plain words."""
        trials = len(self.spared)
        kept = [f"{counted(trials, 'trial')} without a head showed it to be needed"] if trials else []
        hint = [HINT] if any(self.predicted) and self.criterion == "demand" else []
        return [*kept, *map(self.layer_text, self.layers), *hint]

    def layer_text(self, layer: int) -> str:
        """Heads at the start, at the end and as predicted, and why there are no more."""
        predicted = self.predicted[layer]
        start = f"{self.start[layer]} at the start" if self.start[layer] else "not there at the start"
        facts = [start, *([] if predicted is None else [f"{predicted} predicted"])]
        text = f"layer {layer}: {counted(self.heads[layer], 'head')} ({', '.join(facts)})"
        last = next((event for event in reversed(self.decisions) if event.facts.get("demand")), None)
        if last is None:
            return text
        why = f": {last.facts['rules'][layer]}" if "rules" in last.facts else ""
        return f"{text}; at step {last.step:,} {measured_text(last, layer, self.criterion)}{why}"


def _moves_blocks(event: GrowthEvent) -> bool:
    return event.action == "stack" or not event.moves.keys().isdisjoint({"born", "left"})


def measured_text(event: Event, layer: int, criterion: str) -> str:
    """What was left of a layer's demand, and where births begin."""
    name = MEASURES[criterion]
    demand, noise, threshold = (event.facts[key][layer] for key in ("demand", "noise", "threshold"))
    if demand is None or threshold is None:
        return f"no certain {name} so far"
    spread = f" ± {noise:.2g}" if criterion == "demand" and noise is not None else ""  # its standard error
    return f"{name} {demand:.2g}{spread}, births begin at {threshold:.2g}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value
