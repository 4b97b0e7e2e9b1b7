"""Which head is put on trial: an old one that the others could stand in for, at several decisions in a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meristem.errors import InputError


@dataclass(frozen=True)
class HeadAge:
    """Updates done when a head was born, or last spared; and whether the policy gave birth to it."""

    since: int = 0
    grown: bool = False


@dataclass(frozen=True)
class PruningState:
    """The ages of all heads, by layer; and the head that was least needed at the last `times` decisions in a row."""

    heads: tuple[tuple[HeadAge, ...], ...]
    suspect: tuple[int, int] | None = None
    times: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PruningState:
        heads = tuple(tuple(HeadAge(**age) for age in layer) for layer in data["heads"])
        suspect = data["suspect"]
        return cls(heads, None if suspect is None else (suspect[0], suspect[1]), data["times"])


@dataclass(frozen=True)
class Pruning:
    """When a head is tried without. Times are updates."""

    grace: int = 800  # after a birth or a trial
    redundant: float = 1e-3  # a head whose own share of the layer's output is below this may leave
    patience: int = 3  # decisions in a row
    tolerance: float = 1e-3  # a removal may raise the loss by this share, of a loss of at least `SMALL_LOSS`
    sequences: int = 512  # on which the loss with and without is compared

    SMALL_LOSS = 0.01

    def __post_init__(self) -> None:
        for field, least in (("grace", 0), ("patience", 1), ("sequences", 1)):
            if getattr(self, field) < least:
                raise InputError(field, getattr(self, field), f"must be at least {least}")
        for field in ("redundant", "tolerance"):
            if not 0 <= getattr(self, field) <= 1:
                raise InputError(field, getattr(self, field), "must be from 0 to 1")

    def start(self, heads: Sequence[int]) -> PruningState:
        """For layers with these many heads."""
        return PruningState(tuple((HeadAge(),) * count for count in heads))

    def watches(self, state: PruningState, done: int) -> bool:
        """Whether any head is old enough to be looked at."""
        return any(self._eligible(layer, head, done) for layer in state.heads for head in range(len(layer)))

    def suspect(self, state: PruningState, done: int, shares: Sequence[Sequence[float]]) -> PruningState:
        """After a decision at which every head's own share of its layer's output was measured."""
        old = [
            (share, layer, head)
            for layer, ages in enumerate(state.heads)
            for head, share in enumerate(shares[layer])
            if self._eligible(ages, head, done) and math.isfinite(share)
        ]
        if not old or min(old)[0] >= self.redundant:
            return replace(state, suspect=None, times=0)
        _, *place = min(old)
        suspect = (place[0], place[1])
        return replace(state, suspect=suspect, times=state.times + 1 if suspect == state.suspect else 1)

    def tries(self, state: PruningState) -> tuple[int, int] | None:
        """The layer and head to be tried without now."""
        return state.suspect if state.times >= self.patience else None

    def passes(self, before: float, after: float) -> bool:
        """Whether the loss is nearly the same without the head as it was with it."""
        return after - before <= self.tolerance * max(before, self.SMALL_LOSS)

    def born(self, state: PruningState, done: int, layer: int) -> PruningState:
        return self._with(state, layer, (*state.heads[layer], HeadAge(done, grown=True)))

    def removed(self, state: PruningState, layer: int, head: int) -> PruningState:
        return self._with(state, layer, (*state.heads[layer][:head], *state.heads[layer][head + 1 :]))

    def spared(self, state: PruningState, done: int, layer: int, head: int) -> PruningState:
        """After a trial that showed the head is needed: it is left alone for a while."""
        ages = list(state.heads[layer])
        ages[head] = replace(ages[head], since=done)
        return self._with(state, layer, tuple(ages))

    def _eligible(self, layer: Sequence[HeadAge], head: int, done: int) -> bool:
        return len(layer) > 1 and done - layer[head].since >= self.grace

    def _with(self, state: PruningState, layer: int, ages: tuple[HeadAge, ...]) -> PruningState:
        return PruningState((*state.heads[:layer], ages, *state.heads[layer + 1 :]))
