"""How a model is pruned, and how large it may be afterwards."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import get_type_hints

from meristem.amounts import read_amount
from meristem.choices import PruneOrder
from meristem.errors import InputError
from meristem.limits import MOST_SEED, check_integer
from meristem.plan import Plan
from meristem.settings import of_type

WORDS = {"heads": "heads", "kv": "kv_bytes", "attention": "attention", "parameters": "parameters"}  # of a budget
REPAIR_RATE = 0.2  # times the run's peak


@dataclass(frozen=True)
class Sizes:
    """What of a model pruning makes smaller: heads, bytes of the cache per token, parameters of attention, and all."""

    heads: int
    kv_bytes: int
    attention: int
    parameters: int

    @classmethod
    def of(cls, plan: Plan) -> Sizes:
        rows = plan.width + plan.qkv_bias  # of a query, key or value, with its bias
        attention = sum(
            rows * (layer.query_width + 2 * layer.kv_width) + plan.width * layer.query_width for layer in plan.layers
        )
        return cls(sum(plan.heads), plan.cost.kv_bytes_per_token, attention, plan.parameters)


@dataclass(frozen=True)
class Budget:
    """The most that one of a model's sizes may be."""

    size: str  # a field of `Sizes`
    most: float

    @classmethod
    def read(cls, text: str, plan: Plan) -> Budget:
        """A budget such as `kv=0.7`, a share of what the model of this plan has, or `heads=100`, an amount."""
        word, _, value = text.partition("=")
        amount = read_amount(value)
        if word not in WORDS or amount is None:
            raise InputError(
                "budget", text,
                f"must be one of {', '.join(WORDS)}, and a share such as kv=0.7 or an amount such as heads=100",
            )  # fmt: skip
        has = getattr(Sizes.of(plan), WORDS[word])
        if amount.relative and not 0 < amount.value <= 1:
            raise InputError("budget", text, "is a share, as it has a point, and must be above 0 and at most 1.0")
        if has == 0:
            raise InputError("budget", text, "means nothing here: a classifier keeps no keys and values")
        budget = cls(WORDS[word], has * amount.value if amount.relative else amount.value)
        least = budget.of(smallest(plan))
        if budget.most < least:
            shared = " and where all heads share one pair of keys and values that stays" if word == "kv" else ""
            looped = ", and heads that run again stay" if any(layer.loop for layer in plan.layers) else ""
            expected = f"cannot be reached: every layer keeps a head{shared}{looped}, which is {word}={least}"
            raise InputError("budget", text, expected)
        return budget

    def of(self, plan: Plan) -> int:
        """How large a model of a plan is, in what the budget is about."""
        size: int = getattr(Sizes.of(plan), self.size)
        return size

    def is_met(self, plan: Plan) -> bool:
        return self.of(plan) <= self.most + 1e-9


@dataclass(frozen=True)
class PruneSettings:
    """How far to go, and which heads go first.

    `keep` is a share of the heads; `budget` the most of something else, such as `kv=0.7` (a share of what there is, as
    it has a point) or `heads=100` (an amount). With neither, heads leave as long as the loss allows. It may rise by
    `tolerance` nats on training rows that are set aside, at most `sequences` of them. `repair` is a number of updates
    after the pruning, whose rate falls to 0 from `repair_rate` times the peak of the run's.

    >>> PruneSettings(budget="kv=0.7", repair=50).tolerance
    0.01
    """

    keep: float | None = None
    budget: str | None = None
    tolerance: float = 0.01
    repair: int = 0
    repair_rate: float = REPAIR_RATE
    order: PruneOrder = "measured"
    fold: bool = True  # whether the other heads of a layer take over what they can of one that leaves
    sequences: int = 256
    seed: int = 0  # of the random order

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            object.__setattr__(self, name, of_type(name, getattr(self, name), kind))  # integers become floats
        if self.keep is not None and self.budget is not None:
            raise InputError("keep", self.keep, "and budget both say how far to go: give one of them")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise InputError("keep", self.keep, "must be a share of the heads, above 0 and at most 1")
        if math.isnan(self.tolerance) or self.tolerance < 0:
            raise InputError("tolerance", self.tolerance, "must be 0 nats or above; inf is no limit")
        if not 0 < self.repair_rate <= 1:
            raise InputError("repair_rate", self.repair_rate, "must be a share of the run's rate, above 0, at most 1")
        check_integer("repair", self.repair, 0)
        check_integer("sequences", self.sequences, 2)
        check_integer("seed", self.seed, 0, MOST_SEED)
        if self.repair_rate != REPAIR_RATE and not self.repair:
            raise InputError("repair_rate", self.repair_rate, "is that of a repair: say with repair how many updates")
        if self.seed and self.order != "random":
            raise InputError("seed", self.seed, f"is of the order random, and the order is {self.order}")

    def target(self, plan: Plan) -> Budget | None:
        """The budget for a model of this plan; None where only the loss limits."""
        if self.budget is not None:
            return Budget.read(self.budget, plan)
        if self.keep is None:
            return None
        budget = Budget("heads", math.floor(self.keep * sum(plan.heads) + 1e-9))
        least = budget.of(smallest(plan))
        if budget.most < least:
            raise InputError("keep", self.keep, f"leaves {budget.most} heads, and {least} have to stay")
        return budget

    def without_repair(self) -> PruneSettings:
        return replace(self, repair=0, repair_rate=REPAIR_RATE)

    def check_change(self, target: Budget | None, plan: Plan) -> None:
        """Refuse a target that a model of this plan is within already: without a repair it would only be copied."""
        if target is None or self.repair or not target.is_met(plan):
            return
        field, word = "keep" if self.budget is None else "budget", {size: word for word, size in WORDS.items()}
        expected = f"takes nothing out: the model is within it already ({word[target.size]}={target.of(plan)})"
        raise InputError(field, getattr(self, field), f"{expected}; ask for less, or for a repair")

    @property
    def changed(self) -> dict[str, object]:
        """The settings that are not as usual, as plain values for JSON; infinity is a text."""
        changed = {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) != entry.default}
        return {name: "inf" if value == math.inf else value for name, value in changed.items()}

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON, which has no infinity: None stands for no limit."""
        return {**asdict(self), "tolerance": self.tolerance if math.isfinite(self.tolerance) else None}


def group_size(plan: Plan, layer: int) -> int:
    """How many heads of a layer leave together: all that share keys and values, unless all of the layer do."""
    own = plan.layers[layer]
    return own.heads // own.kv_heads if own.kv_heads > 1 else 1


def fewest_groups(plan: Plan, layer: int) -> int:
    """How many of these have to stay: one, or two single heads that share keys and values; and those that are looped.

    A head that is alone would not say that it shares its keys and values.
    """
    own, size = plan.layers[layer], group_size(plan, layer)
    looped = 0 if own.loop is None else len({head // size for head in own.loop.heads})
    return max(looped, 2 if own.kv_heads == 1 < own.heads else 1)


def smallest(plan: Plan) -> Plan:
    """The plan after everything has left that can."""
    for layer in range(len(plan.layers)):
        own, size, groups = plan.layers[layer], group_size(plan, layer), fewest_groups(plan, layer)
        kv_heads = groups if own.kv_heads > 1 else own.kv_heads
        loop = own.loop and replace(own.loop, heads=tuple(range(len(own.loop.heads))), fading=())
        plan = plan.with_layer(layer, replace(own, heads=groups * size, kv_heads=kv_heads, loop=loop))
    return plan
