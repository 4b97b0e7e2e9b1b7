"""INCRT as published: heads are born while the energy of the heads themselves is large; and births at random times.

Both are there to be compared with births by demand, and are the same kind of pure state machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from meristem.errors import InputError
from meristem.gauges.energy import EnergyGauge, EnergyReading, check_numerics
from meristem.growth.policies.incrt import FULL, RelativeDemand

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PublishedState:
        return cls(tuple(tuple(QuietHead(**head) for head in layer) for layer in data["layers"]))


@dataclass(frozen=True)
class PublishedDecision:
    """The next state; the layer that is given a head, or the layer and head that goes, if any; and why."""

    state: PublishedState
    layer: int | None
    rules: tuple[str, ...]
    relative: tuple[RelativeDemand, ...]
    removal: tuple[int, int] | None = None


@dataclass(frozen=True)
class Published:
    """When heads are born and leave, as published. Times are updates.

    The published loop decides at every feed and layer by layer, with no cool-down: there, several layers may change
    at once. Here at most one thing changes at a decision, the birth in the layer that is furthest above its threshold
    before any removal; what has to wait is decided at the next feed.
    """

    numerics: str = "author"
    feed_every: int = 5
    decide_every: int = 0  # if 0 at every feed, as published, or every tenth with repaired numerics
    last_birth: int = 10**12  # none after this
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
        check_numerics(self.numerics)
        if not self.decide_every:
            object.__setattr__(self, "decide_every", self.feed_every * (1 if self.numerics == "author" else 10))
        _check_times(self.feed_every, self.decide_every, self.max_heads)
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

    def start(self, layers: int) -> PublishedState:
        """Where the policy begins with a model of so many layers."""
        return PublishedState(((),) * layers)

    def gauge(
        self, layers: int, width: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> EnergyGauge:
        """The gauge whose readings this policy decides on."""
        return EnergyGauge(
            layers, width, numerics=self.numerics, share=self.share, complexity=self.complexity,
            accuracy=self.accuracy, seed=self.seed, device=device, dtype=dtype,
        )  # fmt: skip

    def decide(
        self, state: PublishedState, done: int, readings: Sequence[EnergyReading], full: Set[int] = frozenset(),
        bare: Set[int] = frozenset(),
    ) -> PublishedDecision:  # fmt: skip
        """After `done` updates; `full` layers have as many heads as they may have, `bare` ones as few."""
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
        return PublishedDecision(PublishedState(tuple(layers)), chosen, tuple(rules), relative, removal)

    def _relative(self, reading: EnergyReading) -> RelativeDemand:
        """Of what the threshold is a share of; the author's numerics know no noise."""
        scale = reading.start or math.nan
        noise = math.nan if self.numerics == "author" else reading.noise
        return RelativeDemand(reading.lambda_max / scale, noise / scale, reading.threshold / scale)

    def removed(
        self, state: PublishedState, done: int, layer: int, *, head: int, born_here: bool = False
    ) -> PublishedState:
        """After a head of a layer has been removed; that it was `born_here` makes no difference to this policy."""
        kept = (*state.layers[layer][:head], *state.layers[layer][head + 1 :])
        return PublishedState((*state.layers[:layer], kept, *state.layers[layer + 1 :]))

    def _judge(self, reading: EnergyReading, done: int, full: bool) -> str:
        """Why a layer is given a head, or not."""
        if math.isinf(reading.threshold):
            return "the start is still being measured"
        if not all(map(math.isfinite, (reading.lambda_max, reading.lambda_min, reading.threshold))):
            return "the energy is not finite"
        if done > self.last_birth:
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


@dataclass(frozen=True)
class RandomState:
    """The births to come, (updates done, layer), in a model of so many layers."""

    layers: int
    due: tuple[tuple[int, int], ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RandomState:
        return cls(data["layers"], tuple((done, layer) for done, layer in data["due"]))


@dataclass(frozen=True)
class RandomDecision:
    """The next state; the layer that is given a head, if any; and why. Nothing is measured and no head leaves."""

    state: RandomState
    layer: int | None
    rules: tuple[str, ...]
    relative: tuple[RelativeDemand, ...] = ()
    removal: None = None


@dataclass(frozen=True)
class RandomBirths:
    """Gives `births` heads to random layers at random decisions, from `warm_up` to `last_birth`, drawn once by seed."""

    births: int
    last_birth: int
    warm_up: int = 300
    feed_every: int = 5
    decide_every: int = 50
    max_heads: int = 0  # of a layer; 0 for no limit
    seed: int = 0

    def __post_init__(self) -> None:
        _check_times(self.feed_every, self.decide_every, self.max_heads)
        for field in ("births", "warm_up"):
            if getattr(self, field) < 0:
                raise InputError(field, getattr(self, field), "must be 0 or above")
        if self.births > len(self._times):
            span = f"from {self.warm_up} to {self.last_birth}, {self.decide_every} updates apart"
            raise InputError("births", self.births, f"must be at most {len(self._times)}, the decisions {span}")

    @property
    def _times(self) -> range:
        """The decisions at which a head can be born."""
        first = -(-max(self.warm_up, 1) // self.decide_every) * self.decide_every
        return range(first, self.last_birth + 1, self.decide_every)

    def start(self, layers: int) -> RandomState:
        """The births that a model of so many layers will have."""
        drawn = random.Random(self.seed)
        times = sorted(drawn.sample(self._times, self.births))
        return RandomState(layers, tuple((time, drawn.randrange(layers)) for time in times))

    def decide(self, state: RandomState, done: int, full: Set[int] = frozenset()) -> RandomDecision:
        """After `done` updates; nothing that was measured matters.

        A birth in a `full` layer, with as many heads as it may have, goes to the next one that is not.
        """
        rules = ["no birth was drawn for now"] * state.layers
        if not state.due or done < state.due[0][0]:
            return RandomDecision(state, None, tuple(rules))
        (_, drawn), *due = state.due
        order = [(drawn + step) % state.layers for step in range(state.layers)]
        chosen = next((layer for layer in order if layer not in full), None)
        rules[drawn if chosen is None else chosen] = "all layers are full" if chosen is None else "drawn at random"
        return RandomDecision(replace(state, due=tuple(due)), chosen, tuple(rules))

    def removed(self, state: RandomState, done: int, layer: int, *, head: int, born_here: bool = False) -> RandomState:
        """After a head has been removed, which makes no difference."""
        return state


def _check_times(feed_every: int, decide_every: int, max_heads: int) -> None:
    for field, value in (("feed_every", feed_every), ("decide_every", decide_every)):
        if value < 1:
            raise InputError(field, value, "must be at least 1")
    if max_heads < 0:
        raise InputError("max_heads", max_heads, "must be 0, for no limit, or above")
