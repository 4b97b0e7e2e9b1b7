"""What policies that copy blocks share: the copies, and the change that they make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from meristem.errors import InputError
from meristem.growth.edits import AddBlock
from meristem.growth.head_surgery import packed_layer
from meristem.growth.policy import Change
from meristem.plan import Plan
from meristem.seeds import own_seed


def deepened(plan: Plan, size: int, order: str = "stack") -> Plan:
    """The plan with `size` layers, each of the shape of the one that it will be a copy of."""
    own, count = plan.layers, len(plan.layers)
    sources = (new % count if order == "stack" else new * count // size for new in range(size))
    return replace(plan, layers=tuple(own[source] for source in sources))


def refuse_loops(plan: Plan) -> None:
    """Refuse a plan whose loops or repeats would not follow copies of blocks."""
    if plan.is_looped:
        raise InputError("plan", plan.digest[:12], "has loops or repeats, which would not follow copies of blocks")


def stacked(plan: Plan, size: int) -> list[AddBlock]:
    """The edits that put the blocks of a plan on top of themselves until there are `size` of them."""
    now = len(plan.layers)
    return [copied_block(plan, new, (new - now) % now, (new - now) % now, new) for new in range(now, size)]


def copied_block(plan: Plan, at: int, source: int, own: int, target: int) -> AddBlock:
    """A copy of block `source`, whose shape at first was that of target layer `own`, for target layer `target`.

    It has the target's heads, unless heads come and go: then those that the source's projections fill.
    """
    shape = plan.target[target]
    if shape.ceiling is not None or plan.layers[source].query_width != plan.target[own].query_width:
        shape = packed_layer(plan.layers[source], shape)
    return AddBlock(at, source, shape, seed=own_seed(f"stack-{target}"))


def stacking(
    plan: Plan, edits: Sequence[AddBlock], rule: str, order: str = "stack", facts: Mapping[str, Any] | None = None
) -> Change:
    """The change of a plan by copies of its blocks, as events tell of it."""
    grown = reduce(lambda had, edit: edit.apply(had), edits, plan)
    own = {"layers": len(grown.layers), "before": len(plan.layers), "order": order, "heads": list(grown.heads)}
    copies = [[edit.at, edit.copy_of] for edit in edits]
    rule = f"{rule}; copies change the function, and the loss jumps"
    return Change("stack", rule, tuple(edits), facts={**own, "copies": copies, **(facts or {})})
