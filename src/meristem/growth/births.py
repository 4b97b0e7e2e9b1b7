"""What policies that give birth to heads share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from meristem.amounts import read_amount
from meristem.errors import InputError
from meristem.growth.edits import AddHead
from meristem.growth.head_surgery import newborn_head, with_head
from meristem.growth.policy import Ahead, Change, Policy
from meristem.limits import MOST_SEED, check_integer
from meristem.plan import LayerPlan, Plan
from meristem.records import finite
from meristem.seeds import own_seed

FULL = "the layer has as many heads as it may have"
SPENT = "the budget is spent"
BUDGETS = ("heads", "parameters", "time")


@dataclass(frozen=True)
class RelativeDemand:
    """The demand of a layer that is left, of the largest there was; its standard error; and where births begin."""

    demand: float
    noise: float
    threshold: float


@dataclass(frozen=True)
class BirthBudget:
    """How far a model may grow: in heads, in parameters, or in the time of an update.

    With a point and no exponent the value is in units of what the model has at the start, otherwise it is an amount. A
    time is always in units of that at the start.

    >>> BirthBudget.read("heads=24")
    BirthBudget(kind='heads', value=24.0, relative=False)
    """

    kind: str
    value: float
    relative: bool

    @classmethod
    def read(cls, text: str) -> BirthBudget:
        kind, _, value = text.partition("=")
        amount = read_amount(value)
        if kind not in BUDGETS or amount is None:
            expected = "must be such as heads=24, parameters=1.2 or time=1.1: with a point, of what there is at first"
            raise InputError("budget", text, expected)
        budget = cls(kind, amount.value, kind == "time" or amount.relative)
        if budget.relative and budget.value <= 1:
            raise InputError("budget", text, "must be above 1.0: that is what the model has at the start")
        return budget

    def used(self, plan: Plan, seconds: float) -> float:
        """What a model has of it; `seconds` are those of an update."""
        return {"heads": float(sum(plan.heads)), "parameters": float(plan.parameters), "time": seconds}[self.kind]

    def most(self, start: float) -> float:
        """The most that it may have, if it had `start` at the start."""
        return self.value * start if self.relative else self.value


class Births(Policy):
    """What the policies that give birth to heads have in common; their settings are fields of their own."""

    start_heads: int

    def prepare(self, plan: Plan) -> Plan:
        """The plan with `start_heads` in every layer, and what it had as ceilings."""
        return prepared_heads(plan, self.start_heads)

    def check(self, plan: Plan) -> None:
        check_growable(plan)


class EndingBirths(Births):
    """Births that end after a part of the run, or so many updates."""

    last_birth: float
    total_steps: int

    @property
    def last_birth_step(self) -> int:
        """Updates after which no head is born."""
        return last_step(self.last_birth, self.total_steps)

    def lasting(self, ahead: Ahead) -> Self:
        if self.last_birth > 1:  # in updates
            return self
        return replace(self, last_birth=float(max(2, ahead.step_of(self.last_birth))))  # type: ignore[type-var]


def birth(
    plan: Plan, step: int, layer: int, seed: int, rules: Sequence[str], facts: Mapping[str, Any],
    directions: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Change:  # fmt: skip
    """A head that looks for what is asked for, and writes nothing yet."""
    head = newborn_head(plan.layers[layer], plan.width, directions, own_seed(f"{seed}-{step}-{layer}"))
    heads = [count + (index == layer) for index, count in enumerate(plan.heads)]
    return Change("birth", rules[layer], (AddHead(layer, head),), layer, {**facts, "heads": heads})


def head_facts(
    plan: Plan, relative: Sequence[RelativeDemand], rules: Sequence[str], predicted: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """What was measured of every layer: the demand left, of what there was, its noise, and where births begin."""
    return {
        "heads": list(plan.heads),
        "demand": [finite(reading.demand) for reading in relative],
        "noise": [finite(reading.noise) for reading in relative],
        "threshold": [finite(reading.threshold) for reading in relative],
        "rules": list(rules),
        "predicted_heads": [dict(layer) for layer in predicted],
    }


def full_layers(plan: Plan, most: int) -> frozenset[int]:
    """The layers that have as many heads as they may have: their ceiling, or `most`, of which 0 is no limit."""
    return frozenset(
        index
        for index, layer in enumerate(plan.layers)
        if layer.heads == layer.ceiling or (most > 0 and layer.heads >= most)
    )


def prepared_heads(plan: Plan, start: int) -> Plan:
    """The plan with `start` heads in every layer, what it had being the ceilings; 0 leaves it as it is."""
    if start == 0:
        return plan

    def begun(layer: LayerPlan) -> LayerPlan:
        if layer.ceiling is not None:
            return layer
        shared = layer.kv_heads == 1 < layer.heads
        if not shared and layer.kv_heads != layer.heads:
            with_head(layer)  # refuses it by name
        least = max(start, 2) if shared else start
        heads = min(layer.heads, least)
        return LayerPlan(heads, layer.head_dim, 1 if shared else heads, layer.loop, layer.repeats, ceiling=layer.heads)

    return replace(plan, layers=tuple(map(begun, plan.layers)), target=tuple(map(begun, plan.target)))


def last_step(part: float, total_steps: int) -> int:
    """The updates done at a part of the run, or so many if it is above 1."""
    if not 0 < part < math.inf:
        raise InputError("last_birth", part, "must be above 0 and finite")
    return round(part * total_steps if part <= 1 else part)


def check_growable(plan: Plan) -> None:
    """Refuse, by name, a plan whose layers cannot be given heads."""
    for layer in plan.layers:
        with_head(replace(layer, ceiling=None))


def check_limits(policy: Policy) -> None:
    """Refuse times, numbers of heads and seeds that there cannot be, of a policy that has these fields."""
    settings = policy.settings
    for field in (field for field in ("feed_every", "decide_every") if field in settings):
        if settings[field] < 1:
            raise InputError(field, settings[field], "must be at least 1")
    if settings["max_heads"] < 0:
        raise InputError("max_heads", settings["max_heads"], "must be 0, for no limit, or above")
    if settings["start_heads"] < 0:
        raise InputError("start_heads", settings["start_heads"], "must be 0, for those of the plan, or above")
    check_integer("seed", settings["seed"], 0, MOST_SEED)
