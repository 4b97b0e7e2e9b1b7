"""Policies of somebody's own, whose events have other facts than those that come with Meristem, and other actions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meristem.growth import AddBlock, AddHead, Change, Decision, LoopHeads, Policy, RemoveBlock
from meristem.growth.head_surgery import newborn_head
from meristem.plan import Plan

# Names that mean something in the events of other policies.
ODD: dict[str, Any] = {
    "heads": "one more", "demand": 3, "noise": None, "threshold": [], "rules": {}, "predicted_heads": 7,
    "own_share": "mine", "loss_with": "?", "loops": {"all": 1}, "head_entropy": "high", "shortlist": 0, "copies": 2,
}  # fmt: skip


def birth(plan: Plan, step: int, rule: str, facts: dict[str, Any]) -> Change:
    head = newborn_head(plan.layers[0], plan.width, None, seed=step)
    return Change("birth", rule, (AddHead(0, head),), 0, facts)


@dataclass(frozen=True)
class Odd(Policy):
    """A birth after 2 updates, something without a name here after 4, and a loop after 6 and 8."""

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Any, ...] | None:
        return () if step in (2, 4, 6, 8) else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Any) -> Decision:
        loop = {"heads": [0], "passes": step // 2 - 2}
        changes = {
            2: birth(plan, step, "it is time", ODD),
            4: Change("reshape", "why not", layer=1, facts=ODD),
            6: Change("add", "look again", (LoopHeads(1, (0,), 1),), 1, loop),
            8: Change("deepen", "and again", (LoopHeads(1, (0,), 2),), 1, loop),
        }
        return Decision(state, (changes[step],), measured=ODD)


@dataclass(frozen=True)
class MeToo(Policy):
    """A birth after 2 updates in the same layer, or as soon as there can be one."""

    def begin(self, plan: Plan) -> bool:
        return False

    def needs(self, state: bool, step: int, plan: Plan) -> tuple[Any, ...] | None:
        return () if step >= 2 and not state else None

    def decide(self, state: bool, step: int, plan: Plan, readings: Any) -> Decision:
        return Decision(True, (birth(plan, step, "me too", {}),))


@dataclass(frozen=True)
class Twins(Policy):
    """Two heads at once after 2 updates, another after 4 by a name that nobody knows, and one with a loop after 6.

    How many there are it never says.
    """

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Any, ...] | None:
        return () if step in (2, 4, 6) else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Any) -> Decision:
        heads = [AddHead(0, newborn_head(plan.layers[0], plan.width, None, seed=seed)) for seed in range(2)]
        looped, facts = LoopHeads(0, (5,), 1), {"heads": [5], "passes": 1}
        changes = {
            2: Change("birth", "it is time", tuple(heads), 0),
            4: Change("sprout", "it is time", (heads[0],), 0),
            6: Change("add", "it is time", (heads[0], looped), 0, facts),
        }
        return Decision(state, (changes[step],))


@dataclass(frozen=True)
class Blocks(Policy):
    """Puts a copy of the first block, or a new one of its own shape, behind it, and takes a block out later."""

    add: int = 4
    remove: tuple[int, ...] = (8,)
    heads: int = 0  # of the new one; a copy if 0

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Any, ...] | None:
        return () if step in (self.add, *self.remove) else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Any) -> Decision:
        if step != self.add:
            return Decision(state, (Change("narrow", "one less", (RemoveBlock(1),), 1),))
        first = plan.layers[0]
        shape = replace(first, heads=self.heads, kv_heads=self.heads, ceiling=None) if self.heads else first
        return Decision(state, (Change("widen", "one more", (AddBlock(1, None if self.heads else 0, shape),), 1),))
