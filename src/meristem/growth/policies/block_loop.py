"""The baseline that SGT is measured against: whole blocks run more than once, from the first step to the last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from meristem.errors import InputError
from meristem.growth.edits import RepeatBlock
from meristem.growth.policies.sgt import ENDLESS, Sgt, SgtState
from meristem.growth.policy import Policy
from meristem.plan import Plan


@dataclass(frozen=True)
class BlockLoop(Policy):
    """The chosen blocks are executed `times` more times, attention and feed-forward, with the same weights.

    `steady_layers` chooses them by the entropies of a run that was observed, with the rule that SGT grows by.
    """

    name: ClassVar[str] = "block_loop"
    exchanges: ClassVar[bool] = False

    layers: tuple[int, ...]
    times: int = 1

    def __post_init__(self) -> None:
        if len(set(self.layers)) < len(self.layers):
            raise InputError("layers", self.layers, "must be distinct")

    def prepare(self, plan: Plan) -> Plan:
        """The plan with the blocks repeated."""
        for layer in self.layers:
            plan = RepeatBlock(layer, self.times).apply(plan)
        return plan

    def check(self, plan: Plan) -> None:
        """Refuse a plan in which these blocks run once."""
        for layer in self.layers:
            if plan.layer(layer).repeats != self.times:
                raise InputError("model.plan", plan.digest[:12], "build the model from policy.prepare(plan)")

    def needs(self, state: Any, step: int, plan: Plan) -> None:
        return None  # all of it is there from the start


def steady_layers(entropies: Sequence[Sequence[float]], rule: Sgt) -> tuple[int, ...]:
    """The layers that `rule` selects, in its order, when the entropies never change."""
    if not all(math.isfinite(value) for layer in entropies for value in layer):
        raise InputError("entropies", entropies, "must be finite")
    rule, state = replace(rule, total_steps=ENDLESS, start=1, window=1), SgtState()  # however short the run
    while (due := rule.next_decision(state)) is not None:
        state = rule.judge(state, due, entropies).state
    return tuple(grown.layer for grown in state.grown)
