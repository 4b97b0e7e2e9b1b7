"""Edits: maps from a plan to a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meristem.growth.heads import Head, check_head, with_head, without_head
from meristem.plan import Loop, Plan


@dataclass(frozen=True)
class LoopHeads:
    """Run the attention of some heads of a layer again, `passes` times, each time on the stream as it is by then."""

    layer: int
    heads: tuple[int, ...]
    passes: int

    def apply(self, plan: Plan) -> Plan:
        """The plan with this loop; heads or passes that cannot be are refused by name."""
        old = plan.layer(self.layer)
        return plan.with_layer(self.layer, replace(old, loop=Loop(self.heads, self.passes)))


@dataclass(frozen=True)
class RepeatBlock:
    """Run a whole block again, `times` times."""

    layer: int
    times: int = 1

    def apply(self, plan: Plan) -> Plan:
        return plan.with_layer(self.layer, replace(plan.layer(self.layer), repeats=self.times))


@dataclass(frozen=True, eq=False)
class AddHead:
    """Give a layer another head with these weights, as its last one."""

    layer: int
    head: Head

    def apply(self, plan: Plan) -> Plan:
        """The plan with this head; weights that do not fit are refused by name."""
        old = plan.layer(self.layer)
        new = with_head(old)
        check_head(old, plan.width, self.head)
        return plan.with_layer(self.layer, new)


@dataclass(frozen=True)
class RemoveHead:
    """Take a head out of a layer."""

    layer: int
    head: int

    def apply(self, plan: Plan) -> Plan:
        return plan.with_layer(self.layer, without_head(plan.layer(self.layer), self.head))


Edit = LoopHeads | RepeatBlock | AddHead | RemoveHead
