"""Pruning: a head leaves that the others can stand in for.

An old head that they could stand in for at several decisions in a row is put on trial: it leaves if the loss on the
batches to come is nearly the same without it. On data that repeat these are no news to the model, unless `incrt` beside
it holds rows back, on which trials are then made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from meristem.errors import InputError
from meristem.gauges.gauge import Gauge
from meristem.gauges.redundancy import HeadShares, HeadTrial, TrialReading
from meristem.growth.edits import RemoveHead
from meristem.growth.head_surgery import fewest_heads
from meristem.growth.policy import Change, Decision, Policy, Readings, check_types
from meristem.limits import check_integer
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.records import finite


@dataclass(frozen=True)
class PruneState:
    """`since`: the updates done when every head, by layer, was born or last spared; and the last change of any heads.

    `suspect` is the head that was least needed at the last `times` decisions in a row.
    """

    since: tuple[tuple[int, ...], ...]
    suspect: tuple[int, int] | None = None
    times: int = 0
    last_change: int = 0


@dataclass(frozen=True)
class Prune(Policy):
    """When a head is tried without, and leaves if the others of its layer can stand in for it. Times are updates.

    `docs/configuration.md` says what each field means, under `[growth.prune]`.

    >>> list(Grower(model, optimizer, [Incrt(), Prune(decide_every=100)]).policies)
    ['incrt', 'prune']
    """

    name: ClassVar[str] = "prune"

    decide_every: int = 50
    cool_down: int = 200  # after any change of heads, whoever has made it
    grace: int | None = None  # after a birth or a trial; four times the cool-down if not given
    redundant: float = 1e-3  # a head whose own share of the layer's output is below this may leave
    patience: int = 3  # decisions in a row
    tolerance: float = 1e-3  # a removal may raise the loss by this share, of a loss of at least `SMALL_LOSS`
    sequences: int = 512  # on which the loss with and without is compared

    SMALL_LOSS = 0.01

    def __post_init__(self) -> None:
        check_types(self)
        times = (("decide_every", 1), ("cool_down", 0), ("patience", 1), ("sequences", 1))
        for field, least in times:
            if getattr(self, field) < least:
                raise InputError(field, getattr(self, field), f"must be at least {least}")
        if self.grace is not None:
            check_integer("grace", self.grace, 0)
        for field in ("redundant", "tolerance"):
            if not 0 <= getattr(self, field) <= 1:
                raise InputError(field, getattr(self, field), "must be from 0 to 1")

    @property
    def grace_steps(self) -> int:
        """Updates after a birth or a trial in which a head is left alone."""
        return 4 * self.cool_down if self.grace is None else self.grace

    def begin(self, plan: Plan) -> PruneState:
        return PruneState(tuple((0,) * heads for heads in plan.heads))

    def needs(self, state: PruneState, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        cooled = step - state.last_change >= self.cool_down
        return (HeadShares(),) if step % self.decide_every == 0 and cooled and self.watches(state, step) else None

    def decide(self, state: PruneState, step: int, plan: Plan, readings: Readings) -> Decision:
        """Look for a head that the others can stand in for, and try it."""
        shares: Sequence[Sequence[float]] = readings[HeadShares()]
        facts: dict[str, Any] = {"own_share": [[finite(share) for share in layer] for layer in shares]}
        judged = self.judge(state, step, [_judged(plan, layer, share) for layer, share in enumerate(shares)])
        suspect = self.tries(judged)
        if suspect is None:
            return Decision(judged, measured=facts)
        layer, head = suspect
        trial = HeadTrial(layer, head, self.sequences)
        if trial not in readings:
            return Decision(state, needs=(trial,))
        tried: TrialReading = readings[trial]
        losses = {"loss_with": finite(tried.loss_with), "loss_without": finite(tried.loss_without)}
        facts |= {"head": head, **losses, "heads": list(plan.heads)}
        if not self.passes(tried.loss_with, tried.loss_without):
            change = Change("spare", "the loss rises without it", layer=layer, facts=facts)
            return Decision(self.spared(judged, step, layer, head), (change,))
        facts["heads"] = [count - (index == layer) for index, count in enumerate(plan.heads)]
        edit = RemoveHead(layer, head, tried.out)
        return Decision(judged, (Change("removal", "the other heads can stand in for it", (edit,), layer, facts),))

    def moved(self, state: PruneState, step: int, plan: Plan, moves: Moves) -> PruneState:
        """What is born is new; a change of heads begins a cool-down."""
        if moves.stays:
            return state
        since = moves.of_layers(state.since, lambda new: (step,) * plan.heads[new])
        since = tuple(moves.of_heads(layer, ages, lambda: step) for layer, ages in enumerate(since))
        return PruneState(since, last_change=step if moves.heads else state.last_change)

    def load(self, data: Mapping[str, Any]) -> PruneState:
        suspect = None if data["suspect"] is None else (data["suspect"][0], data["suspect"][1])
        since = tuple(tuple(layer) for layer in data["since"])
        return PruneState(since, suspect, data["times"], data["last_change"])

    def fits(self, state: PruneState, plan: Plan) -> bool:
        known = state.suspect is None or (state.suspect[0] in range(len(plan.layers)) and state.suspect[1] >= 0)
        return tuple(map(len, state.since)) == plan.heads and known

    def watches(self, state: PruneState, step: int) -> bool:
        """Whether any head is old enough to be looked at."""
        return any(self._eligible(layer, head, step) for layer in state.since for head in range(len(layer)))

    def judge(self, state: PruneState, step: int, shares: Sequence[Sequence[float]]) -> PruneState:
        """The state after a decision at which every head's own share of its layer's output was measured."""
        old = [
            (share, layer, head)
            for layer, ages in enumerate(state.since)
            for head, share in enumerate(shares[layer])
            if self._eligible(ages, head, step) and math.isfinite(share)
        ]
        if not old or min(old)[0] >= self.redundant:
            return replace(state, suspect=None, times=0)
        _, *place = min(old)
        suspect = (place[0], place[1])
        return replace(state, suspect=suspect, times=state.times + 1 if suspect == state.suspect else 1)

    def tries(self, state: PruneState) -> tuple[int, int] | None:
        """The layer and head to be tried without now."""
        return state.suspect if state.times >= self.patience else None

    def passes(self, before: float, after: float) -> bool:
        """Whether the loss is nearly the same without the head as it was with it."""
        return after - before <= self.tolerance * max(before, self.SMALL_LOSS)

    def spared(self, state: PruneState, step: int, layer: int, head: int) -> PruneState:
        """The state after a trial that showed the head is needed: it is left alone for a while."""
        ages = list(state.since[layer])
        ages[head] = step
        since = (*state.since[:layer], tuple(ages), *state.since[layer + 1 :])
        return PruneState(since, last_change=state.last_change)

    def _eligible(self, layer: Sequence[int], head: int, step: int) -> bool:
        return len(layer) > 1 and step - layer[head] >= self.grace_steps


def _judged(plan: Plan, layer: int, shares: Sequence[float]) -> list[float]:
    """The shares of the heads of a layer that may leave: not where no more can, and not looped ones."""
    own = plan.layers[layer]
    looped = () if own.loop is None else own.loop.heads
    stays = own.heads <= fewest_heads(own)
    return [math.nan if stays or head in looped else share for head, share in enumerate(shares)]
