"""Blocks of a second budget that are born as identity instead of copied: a policy for the list `screen-small.txt`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meristem.growth.edits import AddBlock
from meristem.growth.policies.stack import Stack
from meristem.growth.policy import Change, Decision, Readings
from meristem.plan import Plan
from meristem.seeds import own_seed


@dataclass(frozen=True)
class Born(Stack):
    """As `Stack`, but its blocks write nothing at first. They stand on top of the others or, if `below`, under them."""

    name: ClassVar[str] = "born"

    below: bool = False

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        now = len(plan.layers)
        added = range(now, self._size(step, plan))
        edits = [AddBlock(0 if self.below else new, None, plan.target[new], own_seed(f"stack-{new}")) for new in added]
        facts = {"layers": now + len(edits), "before": now, "order": "stack", "heads": [x.heads for x in plan.target]}
        facts["copies"] = [[edit.at, edit.at] for edit in edits]
        return Decision(state, (Change("stack", "born as identity", tuple(edits), facts=facts),))
