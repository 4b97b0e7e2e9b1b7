"""SGT: loops over a few high-entropy heads, born one at a time, deep layers first.

The policy is a pure state machine. `decide` takes a state and the entropies, and gives the next state with the rule
that led there; which loops exist, and how strong they are, follows from a state and the number of updates done.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meristem.errors import InputError
from meristem.growth.edits import LoopHeads
from meristem.plan import Gates, Loop, Plan

ENDLESS = 10**12  # updates of a run: for policies that are asked what to loop, not when
FORGOTTEN = 2.0**-16  # weight of a reading that an average of entropies need not remember
SHORTEST_WINDOW = 50  # updates, for windows given as a part of the run
ORDERS = ("deep_first", "shallow_first")
CHOICES = ("high", "low", "random", "all")
BIRTHS = ("gate", "paper")


@dataclass(frozen=True)
class Grown:
    """A layer that has grown: its looped heads, and the number of updates done when each of its passes was born."""

    layer: int
    heads: tuple[int, ...]
    births: tuple[int, ...]


@dataclass(frozen=True)
class SgtState:
    """Where the policy stands. `phase` is vanilla, grow or fixed; `grown` is in order of selection."""

    phase: str = "vanilla"
    window_end: int = 0
    grown: tuple[Grown, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SgtState:
        grown = tuple(Grown(g["layer"], tuple(g["heads"]), tuple(g["births"])) for g in data["grown"])
        return cls(data["phase"], data["window_end"], grown)


@dataclass(frozen=True)
class Decision:
    """The next state, and why: what was done (add, deepen, fix or wait), to which layer, from which shortlist."""

    state: SgtState
    action: str
    rule: str
    layer: int | None = None
    shortlist: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sgt:
    """When, where and how much extra depth grows.

    `start` and `window` are parts of the run below 1, and updates from 1 on. With birth "gate" a new pass begins with
    strength 0, so that nothing changes at its birth, and reaches 1 within a window; trained gates are added to that.
    With birth "paper" all heads of the layer begin at full strength and those not chosen fade within a window.
    """

    total_steps: int
    passes: int = 1  # extra passes of a layer at most (K)
    heads_per_layer: int = 2  # looped heads of a layer (h)
    max_layers: int = 3  # grown layers at most
    shortlist: int = 3  # layers of highest entropy that may grow
    excluded: tuple[int, ...] = (0,)  # layers that never grow
    start: float = 0.05  # first decision
    window: float = 0.05  # between two decisions, and the time in which a new pass becomes strong
    beta: float = 0.5  # memory of the entropies' average
    order: str = "deep_first"
    heads: str = "high"  # which heads of a layer are looped: those of high or low entropy, random ones, or all
    birth: str = "gate"
    train_gates: bool = True  # with birth "gate"; the published operator has none
    seed: int = 0  # of random heads

    def __post_init__(self) -> None:
        for field in ("total_steps", "passes", "heads_per_layer", "max_layers", "shortlist"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise InputError(field, value, "must be an integer of at least 1")
        for field, allowed in (("order", ORDERS), ("heads", CHOICES), ("birth", BIRTHS)):
            if getattr(self, field) not in allowed:
                raise InputError(field, getattr(self, field), f"must be one of {', '.join(allowed)}")
        for field in ("start", "window", "beta"):
            value = getattr(self, field)
            if type(value) not in (int, float):
                raise InputError(field, value, "must be a number")
        for field in ("start", "window"):
            value = getattr(self, field)
            if not 0 < value < math.inf or (value > 1 and value != round(value)):
                raise InputError(field, value, "must be a part of the run above 0 and below 1, or whole updates")
        if not 0 <= self.beta < 1:
            raise InputError("beta", self.beta, "must be from 0 to below 1")
        if self.birth == "paper" and self.heads == "all":
            raise InputError("birth", "paper", "fades the heads that are not chosen, but heads = 'all' leaves none")
        if self.first_decision + self.window_steps > self.total_steps:
            raise InputError(
                "start", self.start,
                f"leaves no time to grow: the first decision comes after {self.first_decision} updates, a new pass "
                f"needs {self.window_steps} to settle, and the run has {self.total_steps}",
            )  # fmt: skip

    @property
    def first_decision(self) -> int:
        """Updates done at the first decision."""
        return max(1, round(self.start * self.total_steps if self.start < 1 else self.start))

    @property
    def window_steps(self) -> int:
        """Updates between two decisions."""
        return max(SHORTEST_WINDOW, round(self.window * self.total_steps)) if self.window < 1 else round(self.window)

    # --- structure --------------------------------------------------------------------------------------------------

    def prepare(self, plan: Plan) -> Plan:
        """The plan with the gates that growth will need; the model is built from this one."""
        for layer in self.excluded:
            if not 0 <= layer < len(plan.layers):
                raise InputError("excluded", layer, f"must be in 0..{len(plan.layers) - 1}")
        candidates = [layer.heads for index, layer in enumerate(plan.layers) if index not in self.excluded]
        if not candidates:
            raise InputError("excluded", self.excluded, "leaves no layer to grow")
        if not any(self.has_enough(heads) for heads in candidates):
            limit = f"must be at most {max(candidates)}, the heads of the layer that has most"
            raise InputError("heads_per_layer", self.heads_per_layer, limit)
        most = max(plan.heads) if self.heads == "all" or self.birth == "paper" else self.heads_per_layer
        return replace(plan, gates=Gates(self.passes, most, self.train_gates and self.birth == "gate"))

    def looped(self, plan: Plan, loops: Mapping[int, Loop]) -> Plan:
        """The plan with the given loops by layer, and gates for them: a static structure from the start."""
        if not loops:
            raise InputError("loops", loops, "must have at least one layer")
        passes = max(loop.passes for loop in loops.values())
        heads = max(len(loop.heads) for loop in loops.values())
        plan = replace(plan, gates=Gates(passes, heads, self.train_gates and self.birth == "gate"))
        for layer, loop in loops.items():
            plan = LoopHeads(layer, loop.heads, loop.passes).apply(plan)
        return plan

    def has_enough(self, heads: int) -> bool:
        """Whether a layer with this many heads can have a loop; others never grow."""
        return self.heads == "all" or heads >= self.heads_per_layer

    def edits(self, plan: Plan, state: SgtState, done: int) -> list[LoopHeads]:
        """What has to change in `plan` to be the structure after `done` updates."""
        edits = []
        for grown in state.grown:
            heads = self._running_heads(plan, grown, done)
            if plan.layer(grown.layer).loop != Loop(heads, len(grown.births)):
                edits.append(LoopHeads(grown.layer, heads, len(grown.births)))
        return edits

    def ramps(self, plan: Plan, state: SgtState, done: int) -> dict[int, list[list[float]]]:
        """Strengths after `done` updates without the trained part: by layer, (passes, looped heads)."""
        ramps = {}
        for grown in state.grown:
            heads = self._running_heads(plan, grown, done)
            ages = [min(1.0, (done - birth) / self.window_steps) for birth in grown.births]
            if self.birth == "gate":
                ramps[grown.layer] = [[age] * len(heads) for age in ages]
            else:
                ramps[grown.layer] = [[1.0 if head in grown.heads else 1 - age for head in heads] for age in ages]
        return ramps

    def is_ramping(self, state: SgtState, done: int) -> bool:
        """Whether strengths still change."""
        return any(done <= grown.births[-1] + self.window_steps for grown in state.grown)

    def _running_heads(self, plan: Plan, grown: Grown, done: int) -> tuple[int, ...]:
        fading = self.birth == "paper" and done < grown.births[0] + self.window_steps
        return tuple(range(plan.layer(grown.layer).heads)) if fading else grown.heads

    # --- decisions --------------------------------------------------------------------------------------------------

    def next_decision(self, state: SgtState) -> int | None:
        """Updates done at the next decision; None when the structure is fixed, or the run ends before it."""
        decision = {"vanilla": self.first_decision, "grow": state.window_end}.get(state.phase)
        return decision if decision is not None and decision < self.total_steps else None

    def probes(self, state: SgtState, done: int) -> bool:
        """Whether entropy has to be measured after `done` updates: near enough to a decision to be remembered."""
        decision = self.next_decision(state)
        return decision is not None and decision - self.probed_steps < done

    @property
    def probed_steps(self) -> int:
        """Updates before a decision in which entropy is measured; 16 with the published memory of 0.5."""
        return 1 if self.beta == 0 else math.ceil(math.log(FORGOTTEN) / math.log(self.beta))

    def decides(self, state: SgtState, done: int) -> bool:
        """Whether a decision is due after `done` updates."""
        decision = self.next_decision(state)
        return decision is not None and done >= decision

    def decide(self, state: SgtState, done: int, entropies: Sequence[Sequence[float]]) -> Decision:
        """Take the decision that is due, from the entropies of all heads of all layers."""
        window_end = done + self.window_steps
        if not all(math.isfinite(value) for layer in entropies for value in layer):
            return Decision(
                replace(state, phase="grow", window_end=window_end), "wait",
                "an entropy is not finite: no decision in this window",
            )  # fmt: skip
        if window_end > self.total_steps:
            rule = "a new pass would not have settled before the end of the run"
            return Decision(replace(state, phase="fixed"), "fix", rule)
        means = [sum(layer) / len(layer) for layer in entropies]
        eligible = [i for i, layer in enumerate(entropies) if i not in self.excluded and self.has_enough(len(layer))]
        ranked = sorted(eligible, key=lambda i: (-means[i], -i))
        listed = tuple(ranked[: self.shortlist])
        for index, grown in enumerate(state.grown):
            if grown.layer in listed and len(grown.births) < self.passes:
                deeper = replace(grown, births=(*grown.births, done))
                entries = (*state.grown[:index], deeper, *state.grown[index + 1 :])
                rule = "first grown layer that is on the shortlist and has fewer passes than allowed"
                return Decision(SgtState("grow", window_end, entries), "deepen", rule, grown.layer, listed)
        selected = [grown.layer for grown in state.grown]
        deep = self.order == "deep_first"
        if len(selected) < self.max_layers:
            bound = (min if deep else max)(selected, default=None)
            new = [i for i in listed if bound is None or (i < bound if deep else i > bound)]
            if new:
                layer = max(new) if deep else min(new)
                born = Grown(layer, self.chosen_heads(layer, entropies[layer]), (done,))
                rule = f"{'deepest' if deep else 'shallowest'} layer of the shortlist"
                if bound is not None:
                    rule += f" that is {'shallower' if deep else 'deeper'} than all grown ones"
                return Decision(SgtState("grow", window_end, (*state.grown, born)), "add", rule, layer, listed)
            rule = f"no layer of the shortlist is {'shallower' if deep else 'deeper'} than all grown ones"
        else:
            rule = f"{self.max_layers} layer{'s have' if self.max_layers > 1 else ' has'} grown"
        if state.grown:
            rule += f", and none of these that is on the shortlist has fewer than {self.passes} passes"
        return Decision(replace(state, phase="fixed"), "fix", rule, shortlist=listed)

    def chosen_heads(self, layer: int, entropies: Sequence[float]) -> tuple[int, ...]:
        """The heads of a layer that are looped, given the entropies of them all."""
        if not self.has_enough(len(entropies)):
            limit = f"must be at most {len(entropies)}, the heads of layer {layer}"
            raise InputError("heads_per_layer", self.heads_per_layer, limit)
        heads = range(len(entropies))
        if self.heads == "all":
            return tuple(heads)
        if self.heads == "random":
            return tuple(sorted(random.Random(f"{self.seed}-{layer}").sample(heads, self.heads_per_layer)))
        sign = 1 if self.heads == "high" else -1
        return tuple(sorted(sorted(heads, key=lambda i: (-sign * entropies[i], -i))[: self.heads_per_layer]))
