"""Entropies by script, the published controller's test vectors (sgt.md 6), and the controller itself, written anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from meristem.gauges import entropy as entropy_module
from meristem.gauges.entropy import EntropyGauge, HeadReadings
from meristem.growth import Grower, Observe, Policy, Sgt, SgtState
from meristem.model import Decoder
from meristem.plan import Plan

FOUR = [4, 4, 4, 4]  # heads of a small model

Entropies = list[list[float]]  # of every head of every layer
Trace = Callable[[int], Entropies]  # the entropies after so many updates


class Action(NamedTuple):
    """A decision of the controller: when, what, and which layer."""

    done: int
    what: str
    layer: int | None = None


class Vector(NamedTuple):
    """Layer entropies by the number of updates, the most passes, and what must come out."""

    levels: Callable[[int], Mapping[int, float]]
    passes: int
    expected: list[Action]


def listed(*layers: int) -> dict[int, float]:
    """Entropies that make a shortlist of these layers, the first on top."""
    return {layer: 0.9 - 0.1 * place for place, layer in enumerate(layers)}


def before_400(early: Mapping[int, float], late: Mapping[int, float]) -> Callable[[int], Mapping[int, float]]:
    return lambda done: early if done < 400 else late


def adds(*layers: int) -> list[Action]:
    """One layer at each of the first decisions, then the end of growth."""
    grown = [Action(250 * (index + 1), "add", layer) for index, layer in enumerate(layers)]
    return [*grown, Action(250 * (len(layers) + 1), "fix")]


# 12 layers, layer 0 excluded, shortlist 3, at most 3 layers, first decision and window 250 updates.
VECTORS = {
    "A": Vector(lambda done: listed(10, 7, 4), 1, adds(10, 7, 4)),
    "B": Vector(
        lambda done: listed(10, 7, 4),
        3,
        [
            Action(250, "add", 10), Action(500, "deepen", 10), Action(750, "deepen", 10),
            Action(1000, "add", 7), Action(1250, "deepen", 7), Action(1500, "deepen", 7),
            Action(1750, "add", 4), Action(2000, "deepen", 4), Action(2250, "deepen", 4), Action(2500, "fix"),
        ],
    ),
    "C": Vector(lambda done: listed(11, 10, 9), 1, adds(11, 10, 9)),
    "D": Vector(before_400(listed(5, 3, 2), listed(5, 8, 9)), 1, adds(5)),
    "E": Vector(lambda done: {0: 0.99, 2: 0.9, 6: 0.8, 1: 0.7}, 1, adds(6, 2, 1)),
    "F": Vector(
        before_400(listed(10, 7, 4), listed(7, 4, 2)),
        2,
        [
            Action(250, "add", 10), Action(500, "add", 7), Action(750, "deepen", 7), Action(1000, "add", 4),
            Action(1250, "deepen", 4), Action(1500, "fix"),
        ],
    ),
}  # fmt: skip


def spread(levels: Mapping[int, float], heads: Sequence[int]) -> Entropies:
    """Head entropies whose mean in each layer is its level (0.1 if not named); later heads have a little more."""
    return [
        [levels.get(layer, 0.1) + 0.01 * (head - (count - 1) / 2) for head in range(count)]
        for layer, count in enumerate(heads)
    ]


def decisions(policy: Sgt, trace: Trace) -> list[tuple[Action, SgtState]]:
    """The policy asked after every update of the run, as a grower asks it."""
    state, taken = SgtState(), []
    for done in range(1, policy.total_steps + 1):
        if policy.decides(state, done):
            decision = policy.judge(state, done, trace(done))
            state = decision.state
            taken.append((Action(done, decision.action, decision.layer), state))
    return taken


@dataclass
class Controller:
    """The published controller (sgt.md 2.1), from its pseudo-code, asked after every update."""

    first: int
    window: int
    most_passes: int
    most_layers: int
    top: int
    excluded: Sequence[int]
    looped: int
    total: int  # ours: a pass that would not have settled by then is not born
    phase: str = "vanilla"
    selected: list[int] = field(default_factory=list)
    depth: dict[int, int] = field(default_factory=dict)
    heads: dict[int, list[int]] = field(default_factory=dict)
    window_end: int = 0

    def step(self, t: int, entropies: Entropies) -> Action | None:
        if self.phase == "fixed":
            return None
        if self.phase == "vanilla":
            if t != self.first:
                return None
            self.phase = "grow"
        elif t < self.window_end:
            return None
        if any(not math.isfinite(e) for layer in entropies for e in layer):
            self.window_end = t + self.window
            return Action(t, "wait")
        if t + self.window > self.total:
            self.phase = "fixed"
            return Action(t, "fix")
        order = sorted(((sum(e) / len(e), layer) for layer, e in enumerate(entropies)), reverse=True)
        enough = [layer for layer, e in enumerate(entropies) if len(e) >= self.looped]  # ours: others never grow
        candidates = [layer for _, layer in order if layer not in self.excluded and layer in enough][: self.top]
        for layer in self.selected:
            if layer in candidates and self.depth[layer] < self.most_passes:
                self.depth[layer] += 1
                self.window_end = t + self.window
                return Action(t, "deepen", layer)
        if len(self.selected) < self.most_layers:
            new = [c for c in candidates if c not in self.selected and (not self.selected or c < min(self.selected))]
            if new:
                layer = max(new)
                self.selected.append(layer)
                self.depth[layer] = 1
                ranked = sorted(((e, head) for head, e in enumerate(entropies[layer])), reverse=True)
                self.heads[layer] = sorted(head for _, head in ranked[: self.looped])
                self.window_end = t + self.window
                return Action(t, "add", layer)
        self.phase = "fixed"
        return Action(t, "fix")


@dataclass
class Script:
    """Stands in for the gauge: says what the script says, and notes after how many updates it was asked."""

    trace: Trace
    grower: Grower | None = None
    asked: list[int] = field(default_factory=list)

    def read(self, model: Decoder, tokens: Tensor, gauge: EntropyGauge) -> HeadReadings:
        assert self.grower is not None
        self.asked.append(self.grower.done)
        entropy = torch.tensor([e for layer in self.trace(self.grower.done) for e in layer])
        loops = model.plan.loops.items()
        updates = {(layer, n): torch.tensor(0.1 * n) for layer, loop in loops for n in range(1, loop.passes + 1)}
        return HeadReadings(entropy * len(tokens), updates)


def scripted(
    monkeypatch: pytest.MonkeyPatch, model: Decoder, policy: Sgt | None, trace: Trace, observe_every: int = 0
) -> tuple[Grower, Script]:
    """A grower that is told entropies instead of measuring them."""
    policies: list[Policy] = [Observe(observe_every)] if observe_every else []
    policies += [] if policy is None else [policy]
    script = Script(trace, made := Grower(model, None, policies))
    monkeypatch.setattr(entropy_module, "read_heads", script.read)
    return made, script


def tiny_plan(heads: Sequence[int], *, width: int = 16, context: int = 8) -> Plan:
    return Plan.from_heads(heads, width=width, vocabulary=23, context=context, feed_forward=16)


def tokens_of(plan: Plan, seed: int, batch: int = 2) -> Tensor:
    shape = (batch, plan.context)
    return torch.randint(plan.vocabulary, shape, generator=torch.Generator().manual_seed(seed))
