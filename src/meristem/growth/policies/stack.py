"""Depth by stacking: a run begins with few blocks and copies them, with their moments, at chosen parts of the run.

The loss jumps at a copy and recovers; that measured better than blocks born as identity.
"""

from __future__ import annotations

import math
from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self

from meristem.errors import InputError
from meristem.gauges.gauge import Gauge
from meristem.growth.edits import AddBlock
from meristem.growth.policy import ENDLESS, Ahead, Decision, Policy, Readings, check_types
from meristem.growth.stacking import copied_block, deepened, refuse_loops, stacked, stacking
from meristem.limits import MOST_LAYERS, check_integer
from meristem.plan import Plan
from meristem.wording import counted


@dataclass(frozen=True)
class Stack(Policy):
    """Begins with `start_layers` blocks and reaches those of the plan in as many steps as there are times in `at`.

    Times are parts of the run below 1, and updates from 1 on. By "stack" the blocks are put on top of themselves, by
    "interleave" every block is followed by its copies. The plan that the policy prepares is the target: before growth
    block i of n has the shape of target layer i (stack) or i N / n (interleave); a copy has the shape of its own target
    layer, into which the packed projections of its source go as they are, cut or filled up where that is less or more
    wide. Where heads come and go, a copy has as many as its source's projections fill.

    >>> len(Stack(total_steps=5000, start_layers=1).prepare(plan).layers)
    1
    """

    name: ClassVar[str] = "stack"

    total_steps: int
    start_layers: int | None = None  # half of those at the end if not given
    at: tuple[float, ...] = (0.3,)
    order: Literal["stack", "interleave"] = "stack"
    layers: int | None = None  # at the end, if the plan has those that it begins with; else the plan's own

    def __post_init__(self) -> None:
        check_types(self)
        check_integer("total_steps", self.total_steps, 1)
        if self.start_layers is not None:
            check_integer("start_layers", self.start_layers, 1)
        if self.layers is not None:
            check_integer("layers", self.layers, 2, MOST_LAYERS)
        if not self.at:
            raise InputError("at", self.at, "must be one or more times")
        for time in self.at:
            if not 0 < time < math.inf or (time >= 1 and time != round(time)):
                raise InputError("at", time, "must be a part of the run above 0 and below 1, or whole updates")
        mixed = len({time < 1 for time in self.at}) > 1  # parts and updates: which comes first, the length tells
        if list(self.times) != sorted(set(self.times)) and not (mixed and self.total_steps == ENDLESS):
            raise InputError("at", self.at, "must be times that follow one another")
        if self.times[-1] >= self.total_steps:
            raise InputError("at", self.at[-1], f"must be before the end of the run, {self.total_steps} updates")

    @property
    def times(self) -> tuple[int, ...]:
        """Updates done at each growth."""
        return tuple(max(1, round(time * self.total_steps if time < 1 else time)) for time in self.at)

    def sizes(self, layers: int) -> tuple[int, ...]:
        """The numbers of blocks from the start on, of which the last are `layers`, by about the same factor each."""
        first = self._first(layers)
        factor = (layers / first) ** (1 / len(self.at))
        return (*(round(first * factor**number) for number in range(len(self.at))), layers)

    def _first(self, layers: int) -> int:
        """The number of blocks at the start of a run that ends with so many."""
        return layers // 2 if self.start_layers is None else self.start_layers

    def lasting(self, ahead: Ahead) -> Self:
        """Times that are given in updates stay, whether the run comes to them or not."""
        acting = copy(self)  # not checked again: parts and updates may change places
        object.__setattr__(acting, "at", tuple(time if time >= 1 else float(ahead.step_of(time)) for time in self.at))
        object.__setattr__(acting, "total_steps", ahead.end)
        return acting

    def prepare(self, plan: Plan) -> Plan:
        """The plan with its first layers, or every so many, and all of them as its target.

        Where it has the layers to begin with, as that of a run that starts from another, the target is made of these.
        """
        own = len(plan.layers)
        if plan.target and self.layers in (None, len(plan.target)):
            if own not in self.sizes(goal := len(plan.target)):
                expected = f"must be {own}, the blocks that are there, of which {goal} are to be made"
                raise InputError("start_layers", self.start_layers, expected)
            return plan
        if self.layers is not None:
            plan = replace(plan, target=())  # of a run that never came to it
            if self._first(self.layers) != own:
                expected = f"must be {own}, the blocks that are there, of which layers = {self.layers} are to be made"
                raise InputError("start_layers", self.start_layers, expected)
            plan = deepened(plan, self.layers, self.order)
        count = len(plan.layers)
        if count == 1:
            raise InputError("layers", count, "must be at least 2, for a run to begin with fewer")
        sizes = self.sizes(count) if 0 < self._first(count) < count else ()
        if list(sizes) != sorted(set(sizes)) or not sizes:
            most = f"must be from 1 to {count - 1}, with a number of blocks of its own for each time in `at`"
            raise InputError("start_layers", self.start_layers, most)
        if self.order == "interleave" and any(new % old for old, new in pairwise(sizes)):
            text = f"must divide the {count} layers for blocks to be interleaved ({' to '.join(map(str, sizes))})"
            raise InputError("start_layers", sizes[0], text)
        refuse_loops(plan)
        first = sizes[0]
        chosen = range(first) if self.order == "stack" else range(0, count, count // first)
        return replace(plan, layers=tuple(plan.layers[layer] for layer in chosen), target=plan.layers)

    def check(self, plan: Plan) -> None:
        """Refuse a plan that is neither on the way to its target nor there."""
        if not plan.target and len(plan.layers) <= (self.start_layers or 1):
            raise InputError("model.plan", plan.digest[:12], "build the model from policy.prepare(plan)")

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return () if plan.target and self._size(step, plan) > len(plan.layers) else None

    def _size(self, step: int, plan: Plan) -> int:
        """The number of blocks after so many updates."""
        return self.sizes(len(plan.target))[sum(time <= step for time in self.times)]

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        size = self._size(step, plan)
        edits = stacked(plan, size) if self.order == "stack" else self._interleaved(plan, size)
        rule = f"after {counted(step, 'update')}"
        return Decision(state, (stacking(plan, edits, rule, self.order),))

    def _interleaved(self, plan: Plan, size: int) -> list[AddBlock]:
        """Copies behind their sources, from the last block to the first, whose places do not change meanwhile."""
        now, final = len(plan.layers), len(plan.target)
        edits = []
        counts = Counter(new * now // size for new in range(size))
        for source in reversed(range(now)):
            begin = source * size // now
            for new in reversed(range(begin + 1, begin + counts[source])):
                own, target = source * final // now, new * final // size
                edits.append(copied_block(plan, source + 1, source, own, target))
        return edits
