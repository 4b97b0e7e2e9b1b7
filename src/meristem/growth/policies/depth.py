"""Depth that a run finds by itself: it begins with few blocks, and doubles them when that pays in what is left of it.

A deeper model has fewer updates for the same FLOPs. What the others would have brought is the price: it is read off the
loss of the run itself, as it falls with the root of the updates. What a doubling brings at the same number of updates
is not seen before it is there. Measured in other runs, models of n and of 2n blocks are alike in the first hundred
updates, and then the deeper one is ahead by a share of the loss that grows with the logarithm of the updates.

A copied block earns only a part of that. So a run does not begin with one block, but with the number that was best in
other runs of its length, and doubles them only where its own loss says that it pays.

A run that starts from a finished one keeps all of its blocks, which are trained. If it should have more, they are
copied after the first update, and nothing is decided later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from statistics import linear_regression
from typing import Any, ClassVar

from meristem.errors import InputError
from meristem.gauges.gauge import Gauge
from meristem.gauges.training_progress import UpdateLoss
from meristem.growth.policy import Decision, Policy, Readings, check_types
from meristem.growth.stacking import deepened, refuse_loops, stacked, stacking
from meristem.limits import MOST_LAYERS, check_integer
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.records import finite

DECISIONS = 50  # in a run that stays as it begins
FIRST = 100  # updates in which all depths are alike, and the loss falls by no law that would last
WINDOW = 4.0  # the fall of the loss is measured since there were so many times fewer updates, or the last growth
LEAST = 1.5  # which must be this many times fewer at least
POINTS = 4  # readings that it is measured from, at least
POWER = -0.5  # of the updates, by which the loss is taken to fall
LAST = 0.3  # part of the FLOPs that has to be left, or a copy would not recover
EARNED = 0.5  # part of the promise that copies earned (0 to 0.7) in measured runs
# One block is best for so many updates times the root of their tokens; the best depth grows with this power of them.
ONE_BLOCK, GROWTH = 18_000, 0.4


@dataclass(frozen=True)
class DepthState:
    """What the run may spend, in FLOPs per token of a batch, and what is spent after so many updates.

    An update takes `each` of them, as the structure is now. `losses` are readings (updates, loss) of late, none from
    before the last growth.
    """

    budget: int
    each: int
    spent: int = 0
    counted: int = 0
    losses: tuple[tuple[int, float], ...] = ()

    @property
    def left(self) -> int:
        return self.budget - self.spent

    def at(self, step: int) -> DepthState:
        """The state after so many updates, all since the last count with the present structure."""
        if not self.each:  # written by an older version, which did not know it: counted at the next decision
            return self
        return replace(self, spent=self.spent + (step - self.counted) * self.each, counted=step)


@dataclass(frozen=True)
class Outlook:
    """What a doubling promises and costs at the end of the run, in nats, and how far the loss fell in the last half."""

    fall: float
    promise: float
    price: float


@dataclass(frozen=True)
class Depth(Policy):
    """Begins with `start_layers` blocks and doubles them whenever that pays, up to those of the plan.

    Of `total_steps`, the run has as many if it stays as it begins; a deeper one has the same FLOPs and fewer updates.
    `best_depth` says how many blocks were best to begin with; `meristem train` asks it where `start_layers` are not
    given. The copies are those of `Stack`, put on top.

    With `layers`, a run begins with all blocks of the plan, as one does that starts from a finished run. After the
    first update they are copied until there are so many, and the depth no longer changes.

    >>> len(Depth(total_steps=200, start_layers=1).prepare(plan).layers)
    1
    """

    name: ClassVar[str] = "depth"

    total_steps: int
    start_layers: int | None = None
    promise: float = 0.016  # share of the loss by which two blocks are ahead of one, per e-fold of the updates
    layers: int | None = None  # after the first update; before it, the run has those of the plan

    def __post_init__(self) -> None:
        check_types(self)
        check_integer("total_steps", self.total_steps, 1)
        if self.start_layers is not None:
            check_integer("start_layers", self.start_layers, 1)
        if self.layers is not None:
            check_integer("layers", self.layers, 2, MOST_LAYERS)
            if self.start_layers is not None:
                expected = "cannot be given with start_layers, which says with how few to begin"
                raise InputError("layers", self.layers, expected)
        if not 0 < self.promise < 1:
            raise InputError("promise", self.promise, "must be above 0 and below 1: a share of the loss")

    @property
    def every(self) -> int:
        """Updates between two decisions."""
        return max(1, self.total_steps // DECISIONS)

    @property
    def gauge(self) -> UpdateLoss:
        """What the policy decides by."""
        return UpdateLoss(self.every)

    @property
    def remembers(self) -> tuple[Gauge, ...]:
        return (self.gauge,)

    @property
    def warnings(self) -> list[str]:
        unused = self.layers is not None and self.promise != type(self).promise
        return ["promise: of no use, as nothing is decided after the copies of the first update"] if unused else []

    def prepare(self, plan: Plan) -> Plan:
        """The plan that a run begins with, and its target.

        It has the first layers of `plan`, all of which are the target. With `layers` it has all of them, and the target
        that many.
        """
        refuse_loops(plan)
        if self.layers is not None:
            if len(plan.target) == self.layers:
                return plan
            if self.layers <= len(plan.layers):
                raise InputError("layers", self.layers, f"must be above the {len(plan.layers)} blocks that are there")
            return replace(plan, target=deepened(plan, self.layers).layers)
        if plan.target:
            return plan
        if self.start_layers is None:
            raise InputError(
                "start_layers", None, "must be given; meristem.growth.best_depth(updates, tokens) says what was best"
            )
        if self.start_layers >= len(plan.layers):
            most = f"must be below the {len(plan.layers)} layers of the plan, which are the most there can be"
            raise InputError("start_layers", self.start_layers, most)
        return replace(plan, layers=plan.layers[: self.start_layers], target=plan.layers)

    def check(self, plan: Plan) -> None:
        """Refuse a plan that is neither on the way to its target nor there."""
        if self.layers is not None:
            prepared = len(plan.target or plan.layers) == self.layers
        else:
            prepared = bool(plan.target) or len(plan.layers) > (self.start_layers or 0)
        if not prepared:
            raise InputError("model.plan", plan.digest[:12], "build the model from policy.prepare(plan)")

    def begin(self, plan: Plan) -> DepthState:
        return DepthState(self.total_steps * _cost(plan), _cost(plan))

    def feeding(self, state: DepthState, step: int, plan: Plan) -> tuple[Gauge, ...]:
        return (self.gauge,) if plan.target and self.layers is None else ()

    def needs(self, state: DepthState, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        if self.layers is not None:
            return () if plan.target else None
        return (self.gauge,) if plan.target and step % self.every == 0 else None

    def decide(self, state: DepthState, step: int, plan: Plan, readings: Readings) -> Decision:
        if self.layers is not None:
            rule = f"the run has {self.layers} blocks from its first update on"
            return Decision(state, (stacking(plan, stacked(plan, self.layers), rule),))
        loss = readings[self.gauge]
        losses = (*state.losses, (step, loss)) if math.isfinite(loss) else state.losses
        losses = tuple(entry for entry in losses if entry[0] >= max(FIRST, step / WINDOW))
        state = replace(state, each=state.each or _cost(plan))
        state = replace(state.at(step), losses=losses)
        edits = stacked(plan, min(2 * len(plan.layers), len(plan.target)))
        outlook = self.outlook(state, plan, reduce(lambda had, edit: edit.apply(had), edits, plan))
        if outlook is None:
            return Decision(state)
        facts = {"loss": finite(loss), "fall": outlook.fall, "promise": outlook.promise, "price": outlook.price}
        if outlook.promise <= outlook.price or state.left < LAST * state.budget:
            return Decision(state, measured=facts)
        rule = f"twice the blocks promise {outlook.promise:.3f} nats and cost {outlook.price:.3f} by fewer updates"
        return Decision(state, (stacking(plan, edits, rule, facts=facts),))

    def outlook(self, state: DepthState, plan: Plan, deeper: Plan) -> Outlook | None:
        """What a deeper plan promises and costs; None while too little of the loss is known."""
        step, losses = state.counted, state.losses
        if len(losses) < POINTS or losses[0][0] * LEAST > step:
            return None
        line = linear_regression([done**POWER for done, _ in losses], [loss for _, loss in losses])

        def fallen(early: float, late: float) -> float:
            return max(0.0, line.slope) * (early**POWER - late**POWER)

        stays, fewer = (step + state.left / _cost(each) for each in (plan, deeper))  # updates of the whole run
        now, then = len(plan.layers), len(deeper.layers)
        ahead = self.promise * losses[-1][1] * math.log2(then / now) / math.sqrt(now) * math.log(fewer / FIRST)
        return Outlook(fallen(step / 2, step), EARNED * ahead * (fewer - step) / fewer, fallen(fewer, stays))

    def moved(self, state: DepthState, step: int, plan: Plan, moves: Moves) -> DepthState:
        """The loss jumps where blocks are copied: what it was before says nothing of how it falls now."""
        state = replace(state.at(step), each=_cost(plan))
        return replace(state, losses=()) if None in moves.layers else state

    def load(self, data: Mapping[str, Any]) -> DepthState:
        losses = tuple((done, loss) for done, loss in data["losses"])
        return DepthState(data["budget"], data.get("each", 0), data["spent"], data["counted"], losses)


def best_depth(updates: float, tokens: int) -> int:
    """The blocks that were best in measured runs for what so many updates, of so many tokens each, cost with one block.

    >>> [best_depth(updates, tokens=32_768) for updates in (700, 1500, 5000, 30_000)]
    [2, 3, 5, 10]
    """
    if not 0 < updates < math.inf:
        raise InputError("updates", updates, "must be above 0, and finite")
    check_integer("tokens", tokens, 1)
    return max(1, round((updates * math.sqrt(tokens) / ONE_BLOCK) ** GROWTH))


def _cost(plan: Plan) -> int:
    """FLOPs per token of an update."""
    return plan.cost.training.causal
