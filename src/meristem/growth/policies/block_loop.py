"""The baseline for loops that grow: whole blocks run more than once, from the first step to the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meristem.errors import InputError
from meristem.growth.edits import RepeatBlock
from meristem.growth.policy import Policy
from meristem.plan import Plan


@dataclass(frozen=True)
class BlockLoop(Policy):
    """The chosen blocks are executed `times` more times, attention and feed-forward, with the same weights."""

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
