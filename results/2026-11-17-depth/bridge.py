"""Loops as a bridge to depth: every block runs twice with the same weights for a while, then there are two of it.

    PYTHONPATH=results/2026-11-17-depth meristem train ... --growth.policies bridge:Bridge --growth.bridge.at 0.35

A block that becomes two computes what it did before, bit for bit; the loss jumps when it begins to run twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meristem.gauges.gauge import Gauge
from meristem.growth.edits import AddBlock, RepeatBlock
from meristem.growth.policies.stack import Stack
from meristem.growth.policy import Change, Decision, Readings
from meristem.plan import Plan


@dataclass(frozen=True)
class Bridge(Stack):
    """Half of the plan's blocks; from the time in `at` on each runs twice, `shared` of the run later there are two."""

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
        copies = [AddBlock(layer + 1, layer) for layer in reversed(layers)]
        facts = {"layers": 2 * len(layers), "before": len(layers), "order": "interleave"}
        facts |= {
            "copies": [[edit.at, edit.copy_of] for edit in copies],
            "heads": [layer.heads for layer in plan.target],
        }
        rule = "its second run becomes a block of its own, which changes nothing"
        return Decision(state, (Change("stack", rule, (*once, *copies), facts=facts),))
