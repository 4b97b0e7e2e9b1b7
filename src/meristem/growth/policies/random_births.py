"""Births at random times in random layers: the control for births that something was measured for."""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from meristem.errors import InputError
from meristem.gauges.gauge import Gauge
from meristem.growth.births import (
    EndingBirths,
    birth,
    check_limits,
    full_layers,
    head_facts,
)
from meristem.growth.policy import ENDLESS, Ahead, Decision, Readings, check_types
from meristem.limits import check_integer
from meristem.moves import Moves
from meristem.plan import Plan


@dataclass(frozen=True)
class RandomState:
    """The births to come, (updates done, layer), in a model that has, or will have, so many layers."""

    layers: int
    due: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RandomJudgement:
    """The next state; the layer that is given a head, if any; and why. Nothing is measured."""

    state: RandomState
    layer: int | None
    rules: tuple[str, ...]


@dataclass(frozen=True)
class RandomBirths(EndingBirths):
    """Gives `births` heads to random layers at random decisions, from `warm_up` to `last_birth`, drawn once by seed.

    >>> RandomBirths(births=2, total_steps=5000, start_heads=1).prepare(plan).heads
    (1, 1)
    """

    name: ClassVar[str] = "random_births"

    births: int
    total_steps: int = ENDLESS
    last_birth: float = 0.7  # none after this: part of the run up to 1, or updates
    start_heads: int = 0  # heads of every layer at the start, those of the plan being the ceiling; 0 for the plan's
    warm_up: int = 300
    decide_every: int = 50
    max_heads: int = 0  # of a layer; 0 for no limit
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_limits(self)
        check_integer("births", self.births, 1)
        check_integer("warm_up", self.warm_up, 0)
        if not self._times:
            expected = f"leaves no time for births: they end after {self.last_birth_step} updates"
            raise InputError("warm_up", self.warm_up, expected)
        if self.births > len(self._times):
            span = f"from {self.warm_up} to {self.last_birth_step}, {self.decide_every} updates apart"
            raise InputError("births", self.births, f"must be at most {len(self._times)}, the decisions {span}")

    @property
    def _times(self) -> range:
        """The decisions at which a head can be born."""
        first = -(-max(self.warm_up, 1) // self.decide_every) * self.decide_every
        return range(first, self.last_birth_step + 1, self.decide_every)

    def lasting(self, ahead: Ahead) -> Self:
        """Its births were drawn at the start."""
        return self

    def begin(self, plan: Plan) -> RandomState:
        """The births that a model of this plan will have."""
        drawn, layers = random.Random(self.seed), len(plan.target or plan.layers)
        times = sorted(drawn.sample(self._times, self.births))
        return RandomState(layers, tuple((time, drawn.randrange(layers)) for time in times))

    def needs(self, state: RandomState, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return () if step % self.decide_every == 0 else None

    def decide(self, state: RandomState, step: int, plan: Plan, readings: Readings) -> Decision:
        """At most one birth in the whole network; nothing is measured."""
        judged = self.judge(state, step, len(plan.layers), full_layers(plan, self.max_heads))
        facts = head_facts(plan, (), judged.rules, ())
        if judged.layer is None:
            return Decision(judged.state, measured=facts)
        return Decision(judged.state, (birth(plan, step, judged.layer, self.seed, judged.rules, facts),))

    def moved(self, state: RandomState, step: int, plan: Plan, moves: Moves) -> RandomState:
        """Births to come follow their layers; those of a layer that has left go to the first."""
        if len(plan.target or plan.layers) == state.layers:  # on the way to the target, for which they were drawn
            return state
        return RandomState(len(plan.layers), tuple((time, moves.layer(layer) or 0) for time, layer in state.due))

    def load(self, data: Mapping[str, Any]) -> RandomState:
        return RandomState(data["layers"], tuple((step, layer) for step, layer in data["due"]))

    def fits(self, state: RandomState, plan: Plan) -> bool:
        layers = range(len(plan.target or plan.layers))
        return state.layers == len(layers) and all(layer in layers for _, layer in state.due)

    def judge(self, state: RandomState, done: int, layers: int, full: Set[int] = frozenset()) -> RandomJudgement:
        """The next state and the birth after `done` updates; nothing that was measured matters.

        A birth in a `full` layer, with as many heads as it may have, goes to the next one that is not; one in a layer
        that is still to come, to one of the `layers` there are.
        """
        rules = ["no birth was drawn for now"] * layers
        if not state.due or done < state.due[0][0]:
            return RandomJudgement(state, None, tuple(rules))
        (_, drawn), *due = state.due
        order = [(drawn + step) % layers for step in range(layers)]
        chosen = next((layer for layer in order if layer not in full), None)
        rules[order[0] if chosen is None else chosen] = "all layers are full" if chosen is None else "drawn at random"
        return RandomJudgement(replace(state, due=tuple(due)), chosen, tuple(rules))
