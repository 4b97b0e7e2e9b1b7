"""Edits: maps from a plan to a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


Edit = LoopHeads | RepeatBlock
