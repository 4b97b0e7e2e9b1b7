"""Loops as a bridge to depth: every block runs twice with the same weights for a while, then its second run gets its own.

    PYTHONPATH=results/2026-11-17-depth meristem train ... --growth.policies bridge:Bridge --growth.bridge.at 0.35

A block that becomes two computes what it did before, bit for bit; the loss jumps when it begins to run twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meristem.gauges.gauge import Gauge
from meristem.growth.edits import AddBlock, RepeatBlock
from meristem.growth.policies.stack import Stack, stacking
from meristem.growth.policy import Change, Decision, Readings
from meristem.plan import Plan


@dataclass(frozen=True)
class Bridge(Stack):
    """Half of the plan's blocks; from the time in `at` on each runs twice, and `shared` of the run later there are two."""

    name: ClassVar[str] = "bridge"

    shared: float = 0.15

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        looped = any(layer.repeats for layer in plan.layers)
        due = self.times[0] + (round(self.shared * self.total_steps) if looped else 0)
        return () if plan.target and step >= due else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        layers = range(len(plan.layers))
        if not any(layer.repeats for layer in plan.layers):
            twice = tuple(RepeatBlock(layer, 1) for layer in layers)
            return Decision(state, (Change("loop", "every block runs twice from here on", twice),))
        once = [RepeatBlock(layer, 0) for layer in layers]
        bare = plan
        for edit in once:
            bare = edit.apply(bare)
        copies = [AddBlock(layer + 1, layer) for layer in reversed(layers)]
        change = stacking(bare, copies, "its second run becomes a block of its own", {"order": "interleave"})
        return Decision(state, (Change(change.action, change.rule, (*once, *copies), facts=change.facts),))
