"""INCRT as published (arXiv 2604.10703): heads are born while the energy of the heads themselves is large.

It is there to be compared with births by demand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from meristem.errors import InputError
from meristem.gauges.energy import Energy, EnergyReading
from meristem.gauges.gauge import Gauge
from meristem.gauges.redundancy import HeadStandIn
from meristem.gauges.training_progress import TrainingLoss
from meristem.growth.births import (
    FULL,
    EndingBirths,
    RelativeDemand,
    birth,
    check_limits,
    full_layers,
    head_facts,
    last_step,
)
from meristem.growth.edits import RemoveHead
from meristem.growth.head_surgery import fewest_heads
from meristem.growth.policy import ENDLESS, Change, Decision, Readings, check_types
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.records import finite

GROWS = "the energy is large and the trackers have settled"


@dataclass(frozen=True)
class QuietHead:
    """Updates done when a head was born, and for how many feeds in a row it has had next to no energy."""

    since: int = 0
    quiet: int = 0


@dataclass(frozen=True)
class PublishedState:
    """The heads of every layer that have been seen so far."""

    layers: tuple[tuple[QuietHead, ...], ...]


@dataclass(frozen=True)
class PublishedJudgement:
    """The next state; the layer that is given a head, or the layer and head that goes, if any; and why."""

    state: PublishedState
    layer: int | None
    rules: tuple[str, ...]
    relative: tuple[RelativeDemand, ...]
    removal: tuple[int, int] | None = None


@dataclass(frozen=True)
class Published(EndingBirths):
    """When heads are born and leave, as published. Times are updates.

    The published loop decides at every feed and layer by layer, with no cool-down: there, several layers may change
    at once. Here at most one thing changes at a decision, the birth in the layer that is furthest above its threshold
    before any removal; what has to wait is decided at the next feed.

    >>> Published(total_steps=5000, start_heads=1).prepare(plan).heads
    (1, 1)
    """

    name: ClassVar[str] = "published"

    numerics: Literal["author", "repaired"] = "author"
    total_steps: int = ENDLESS
    start_heads: int = 0  # heads of every layer at the start, those of the plan being the ceiling; 0 for the plan's
    feed_every: int = 5
    decide_every: int = 0  # if 0 at every feed, as published, or every tenth with repaired numerics
    last_birth: float = 0.7  # none after this, as there would be no time to learn: part of the run up to 1, or updates
    max_heads: int = 0  # of a layer; 0 for no limit
    share: float = 0.1  # threshold of the largest eigenvalue, of the energy at the start
    lower_share: float = 0.5  # of that threshold; the smallest eigenvalue must be below
    complexity: float = 2.0  # makes births wait longer
    accuracy: float = 0.05  # and so does a smaller value here
    prune: bool = True
    quiet_share: float = 0.01  # of that threshold; a head with less energy is quiet
    patience: int = 100  # feeds in a row after which a quiet head leaves
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        last_step(self.last_birth, self.total_steps)  # refuses bad values
        if not self.decide_every:
            object.__setattr__(self, "decide_every", self.feed_every * (1 if self.numerics == "author" else 10))
        check_limits(self)
        if self.decide_every % self.feed_every:
            raise InputError("decide_every", self.decide_every, f"must be a multiple of feed_every, {self.feed_every}")
        if self.patience < 1:
            raise InputError("patience", self.patience, "must be at least 1")
        for field in ("share", "lower_share", "quiet_share"):
            if not 0 < getattr(self, field) <= 1:
                raise InputError(field, getattr(self, field), "must be above 0 and at most 1")
        if not self.complexity > 0:
            raise InputError("complexity", self.complexity, "must be above 0")
        if not 0 < self.accuracy < 1:
            raise InputError("accuracy", self.accuracy, "must be above 0 and below 1")

    @property
    def gauge(self) -> Energy:
        """What the policy decides by."""
        return Energy(self.numerics, self.share, self.complexity, self.accuracy, self.seed)

    @property
    def remembers(self) -> tuple[Gauge, ...]:
        return self.gauge, TrainingLoss()

    def begin(self, plan: Plan) -> PublishedState:
        return PublishedState(((),) * len(plan.layers))

    def feeding(self, state: PublishedState, step: int, plan: Plan) -> tuple[Gauge, ...]:
        return self.remembers if step % self.feed_every == 0 else ()

    def needs(self, state: PublishedState, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return self.remembers if step % self.decide_every == 0 else None

    def decide(self, state: PublishedState, step: int, plan: Plan, readings: Readings) -> Decision:
        """At most one birth or removal in the whole network."""
        energy: Sequence[EnergyReading] = readings[self.gauge]
        bare = {index for index, layer in enumerate(plan.layers) if layer.heads <= fewest_heads(layer)}
        judged = self.judge(state, step, energy, full_layers(plan, self.max_heads), bare)
        predicted = [  # those there are, and the births to come
            {name: have + more for name, more in asdict(reading.predicted).items()}
            for reading, have in zip(energy, plan.heads, strict=True)
        ]
        heads = [[head.asymmetry for head in reading.heads] for reading in energy]
        facts = {
            "loss": finite(readings[TrainingLoss()]),
            **head_facts(plan, judged.relative, judged.rules, predicted),
            "asymmetry": [finite(sum(layer) / len(layer) if layer else math.nan) for layer in heads],  # before any feed
        }
        if judged.layer is not None:
            return Decision(judged.state, (birth(plan, step, judged.layer, self.seed, judged.rules, facts),))
        if judged.removal is None:
            return Decision(judged.state, measured=facts)
        layer, head = judged.removal
        stand_in = HeadStandIn(layer, head)
        if stand_in not in readings:
            return Decision(state, needs=(stand_in,))
        out = readings[stand_in]
        looped = plan.layers[layer].loop
        if out is None or (looped is not None and head in looped.heads):
            return Decision(judged.state, measured=facts)
        facts |= {"head": head, "heads": [count - (index == layer) for index, count in enumerate(plan.heads)]}
        removal = Change("removal", judged.rules[layer], (RemoveHead(layer, head, out),), layer, facts)
        return Decision(judged.state, (removal,))

    def moved(self, state: PublishedState, step: int, plan: Plan, moves: Moves) -> PublishedState:
        """What is born has not been quiet yet; layers of which nothing was seen yet stay unknown."""
        if moves.layers != tuple(range(len(moves.layers))):  # the gauge begins anew, and so does this
            return PublishedState(((),) * len(plan.layers))
        layers = list(state.layers)
        for layer, heads in moves.heads.items():
            known = layers[layer]
            if known and (None not in heads or len(known) < len(heads)):  # its own births it knows already
                layers[layer] = moves.of_heads(layer, known, lambda: QuietHead(step))
        return PublishedState(tuple(layers))

    def load(self, data: Mapping[str, Any]) -> PublishedState:
        return PublishedState(tuple(tuple(QuietHead(**head) for head in layer) for layer in data["layers"]))

    def fits(self, state: PublishedState, plan: Plan) -> bool:
        return len(state.layers) == len(plan.layers)

    def judge(
        self, state: PublishedState, done: int, readings: Sequence[EnergyReading], full: Set[int] = frozenset(),
        bare: Set[int] = frozenset(),
    ) -> PublishedJudgement:  # fmt: skip
        """Judge after `done` updates; `full` layers have as many heads as they may have, `bare` ones as few."""
        layers = [self._watched(*pair, done) for pair in zip(state.layers, readings, strict=True)]
        rules = [self._judge(reading, done, index in full) for index, reading in enumerate(readings)]
        relative = tuple(map(self._relative, readings))
        ready = [index for index, rule in enumerate(rules) if rule == GROWS]
        chosen = max(ready, key=lambda index: (readings[index].strength, index), default=None)
        removal = None
        if chosen is not None:
            layers[chosen] = (*layers[chosen], QuietHead(done))
        elif self.prune and (removal := self._quietest(layers, readings, bare)):
            rules[removal[0]] = f"head {removal[1]} has had next to no energy for long"
        return PublishedJudgement(PublishedState(tuple(layers)), chosen, tuple(rules), relative, removal)

    def _relative(self, reading: EnergyReading) -> RelativeDemand:
        """The energy as a share of that at the start, as the threshold is; the author's numerics know no noise."""
        scale = reading.start or math.nan
        noise = math.nan if self.numerics == "author" else reading.noise
        return RelativeDemand(reading.lambda_max / scale, noise / scale, reading.threshold / scale)

    def _judge(self, reading: EnergyReading, done: int, full: bool) -> str:
        """Why a layer is given a head, or not."""
        if math.isinf(reading.threshold):
            return "the start is still being measured"
        if not all(map(math.isfinite, (reading.lambda_max, reading.lambda_min, reading.threshold))):
            return "the energy is not finite"
        if done > self.last_birth_step:
            return "the run is near its end"
        if full:
            return FULL
        if reading.feeds < reading.dwell:
            return "the trackers have not settled since the last birth"
        if reading.lambda_max <= reading.threshold:
            return "the energy is small"
        # Always below if it were the smallest eigenvalue, which is never above zero; kept because it is published.
        if self.numerics == "author" and reading.lambda_min >= self.lower_share * reading.threshold:
            return "the smallest eigenvalue is large"
        return GROWS

    def _watched(self, heads: tuple[QuietHead, ...], reading: EnergyReading, done: int) -> tuple[QuietHead, ...]:
        """The heads of a layer with how long they have been quiet; at first, all that are there."""
        heads = heads or (QuietHead(),) * len(reading.heads)
        limit = self.quiet_share * reading.threshold if math.isfinite(reading.threshold) else 0.0
        watched = []
        for head, measured in zip(heads, reading.heads, strict=True):
            old = done - head.since >= reading.grace * self.feed_every
            quiet = head.quiet + self.decide_every // self.feed_every if old and measured.energy < limit else 0
            watched.append(replace(head, quiet=quiet))
        return tuple(watched)

    def _quietest(
        self, layers: Sequence[tuple[QuietHead, ...]], readings: Sequence[EnergyReading], bare: Set[int]
    ) -> tuple[int, int] | None:
        """The layer and head with the least energy, of those that have been quiet for long and need not stay."""
        quiet = [
            (readings[layer].heads[index].energy / readings[layer].threshold, layer, index)
            for layer, heads in enumerate(layers)
            for index, head in enumerate(heads)
            if layer not in bare and head.quiet >= self.patience
        ]
        return min(quiet)[1:] if quiet else None
