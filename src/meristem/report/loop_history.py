"""How the loops of a run grew, told by its files: which passes were born when, how strong they are, what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any

from meristem.growth import LoopHeads, Sgt, SgtState
from meristem.growth.events import GrowthEvent
from meristem.growth.policies.sgt import Grown
from meristem.plan import Plan

Entry = Mapping[str, Any]  # a line of entropy.jsonl


@dataclass(frozen=True)
class PassHistory:
    """An extra pass over some heads of a layer, and its strength over the steps."""

    layer: int
    number: int  # from 1
    birth: int
    strength: list[tuple[int, float]]


@dataclass(frozen=True)
class LoopHistory:
    """A plan without what has grown, what was decided about its loops, and what was observed, up to `last_step`.

    `observations` are the lines of entropy.jsonl. How births go on is known of `policy`; without it loops are as strong
    at their birth as they will be.
    """

    plan: Plan
    last_step: int
    decisions: Sequence[GrowthEvent] = ()
    observations: Sequence[Entry] = ()
    policy: Sgt | None = None

    @property
    def fixed(self) -> int | None:
        """The step at which growth ended."""
        return next((decision.step for decision in self.decisions if decision.action == "fix"), None)

    @property
    def entropies(self) -> list[tuple[int, list[float]]]:
        """Mean entropy of the heads of each layer: as observed, or else as it was at the decisions."""
        read = [(step, facts.get("head_entropy")) for step, facts in self._observed or self._decided]
        return [(step, [_mean(heads) for heads in entropy]) for step, entropy in read if entropy]

    @property
    def _observed(self) -> list[tuple[int, Entry]]:
        return [(entry["step"], entry) for entry in self.observations]

    @property
    def _decided(self) -> list[tuple[int, Entry]]:
        return [(decision.step, decision.facts) for decision in self.decisions]

    def state(self, step: int) -> SgtState:
        """Which layers had grown after `step` updates."""
        grown: dict[int, Grown] = {}
        for decision in self.decisions:
            layer = decision.layer
            if layer is not None and decision.action in ("add", "deepen") and decision.step <= step:
                births = grown[layer].births if layer in grown else ()
                born = decision.facts["passes"] - len(births)
                heads, count = tuple(decision.facts["heads"]), self.plan.heads[layer]
                if max(heads) >= count:  # others have left since; what a loop costs depends on their number alone
                    heads = tuple(range(min(len(heads), count)))
                grown[layer] = Grown(layer, heads, (*births, *(decision.step,) * born), self._others(layer, heads))
        return SgtState(grown=tuple(grown.values()))

    def _others(self, layer: int, heads: Sequence[int]) -> tuple[int, ...]:
        """The heads that fade after a birth of the published kind: those that are not chosen and have gates."""
        if self.policy is None or self.policy.birth != "paper":
            return ()
        others = [head for head in range(self.plan.heads[layer]) if head not in heads]
        return tuple(others[: None if self.plan.gates is None else self.plan.gates.heads - len(heads)])

    def structure(self, step: int) -> Plan:
        """The plan after `step` updates."""
        plan, state = self.plan, self.state(step)
        whole = [LoopHeads(grown.layer, grown.heads, len(grown.births)) for grown in state.grown]
        for edit in whole if self.policy is None else self.policy.edits(plan, state, step):
            plan = edit.apply(plan)
        return plan

    @cached_property
    def cost(self) -> list[tuple[int, float]]:
        """Extra FLOPs per token, as a share of those without loops and repeats: from each step that changes them."""
        steps, window = {0}, 0 if self.policy is None else self.policy.window_steps
        for grown in self.state(self.last_step).grown:
            steps |= {*grown.births, grown.births[0] + window}  # when heads that fade are dropped
        flops = self.plan.bare.cost.training.causal
        return [(s, self.structure(s).cost.training.causal / flops - 1) for s in sorted(steps) if s <= self.last_step]

    @property
    def mean_cost(self) -> float:
        """Extra FLOPs averaged over the run."""
        spans = pairwise([*self.cost, (self.last_step, 0.0)])
        return sum(extra * (end - start) for (start, extra), (end, _) in spans) / max(1, self.last_step)

    @cached_property
    def passes(self) -> list[PassHistory]:
        """All extra passes over heads, deep layers first."""
        born = {layer: (loop.heads, (0,) * loop.passes) for layer, loop in self.plan.loops.items()}
        born |= {grown.layer: (grown.heads, grown.births) for grown in self.state(self.last_step).grown}
        return [
            PassHistory(layer, number, birth, self._strength(layer, number, heads, birth))
            for layer, (heads, births) in sorted(born.items(), reverse=True)
            for number, birth in enumerate(births, 1)
        ]

    def _strength(self, layer: int, number: int, heads: Sequence[int], birth: int) -> list[tuple[int, float]]:
        """Mean over the chosen heads of what the birth gives, and of what training was seen to have added to it."""
        window = self.policy.window_steps if self.policy is not None and self.policy.birth == "gate" else 0

        def given(step: int) -> float:
            return min(1.0, (step - birth) / window) if window else 1.0

        added = {birth: 0.0}
        for step, facts in sorted((*self._decided, *self._observed), key=itemgetter(0)):
            for loop in facts.get("loops", ()):
                if loop["layer"] == layer and loop["passes"] >= number and loop["gates"] is not None:
                    gates = dict(zip(loop["heads"], loop["gates"][number - 1], strict=True))
                    seen = _mean([gates.get(head) for head in heads])
                    if math.isfinite(seen):
                        added[step] = seen - given(step)
        corners = {step for step in (birth + window, self.last_step) if birth <= step <= self.last_step}
        added |= {step: _between(added, step) for step in corners - added.keys()}
        return [(step, given(step) + value) for step, value in sorted(added.items())]


def _mean(values: Sequence[float | None]) -> float:
    """The mean; NaN if one was not finite when it was recorded, or if there is none."""
    if not values or any(value is None for value in values):
        return math.nan
    return sum(value or 0.0 for value in values) / len(values)


def _between(values: Mapping[int, float], step: int) -> float:
    """The value at a step, on straight lines between those that are known; the last one holds on."""
    before = max(known for known in values if known <= step)
    after = min((known for known in values if known >= step), default=before)
    if before == after:
        return values[before]
    share = (step - before) / (after - before)
    return values[before] + share * (values[after] - values[before])
