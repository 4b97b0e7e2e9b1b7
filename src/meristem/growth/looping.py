"""What policies that loop heads share: which heads are looped, and a plan with loops from the start."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meristem.errors import InputError
from meristem.growth.edits import LoopHeads
from meristem.limits import check_integer
from meristem.plan import Gates, Loop, Plan


def chosen_heads(choice: str, count: int, entropies: Sequence[float], layer: int, seed: int) -> tuple[int, ...]:
    """The heads of a layer that are looped, given the entropies of them all: `count` of high or low entropy, or random
    ones; or all."""
    heads = range(len(entropies))
    if choice == "all":
        return tuple(heads)
    if len(entropies) < count:
        limit = f"must be at most {len(entropies)}, the heads of layer {layer}"
        raise InputError("heads_per_layer", count, limit)
    if choice == "random":
        return tuple(sorted(random.Random(f"{seed}-{layer}").sample(heads, count)))
    sign = 1 if choice == "high" else -1
    return tuple(sorted(sorted(heads, key=lambda i: (-sign * entropies[i], -i))[:count]))


def looped(plan: Plan, loops: Mapping[int, Loop], *, trained: bool) -> Plan:
    """The plan with the given loops by layer, and gates for them: a static structure from the start."""
    check_depth(plan)
    if not loops:
        raise InputError("loops", loops, "must have at least one layer")
    passes = max(loop.passes for loop in loops.values())
    heads = max(len(loop.heads) for loop in loops.values())
    plan = replace(plan, gates=Gates(passes, heads, trained))
    for layer, loop in loops.items():
        plan = LoopHeads(layer, loop.heads, loop.passes).apply(plan)
    return plan


def check_source(layers: tuple[int, ...], like: str | None) -> None:
    """Refuse layers that are named twice, or that are named beside another run, or neither."""
    if len(set(layers)) < len(layers):
        raise InputError("layers", layers, "must be distinct")
    if layers and like is not None:
        raise InputError("like", like, "cannot be given together with `layers`")
    if not layers and like is None:
        raise InputError("layers", layers, "must be named, or else a run in `like`")


def check_depth(plan: Plan) -> None:
    """Refuse a plan to which blocks are still to be added: what is there from the start would not follow."""
    if plan.target:
        expected = (
            f"must be those that the model begins with: {len(plan.target)} are to come, and loops would not follow"
        )
        raise InputError("plan.layers", len(plan.layers), expected)


def check_layers(layers: tuple[int, ...], plan: Plan) -> None:
    """Refuse layers that the plan has not got."""
    for layer in layers:
        if not 0 <= layer < len(plan.layers):
            raise InputError("layers", layer, f"must be in 0..{len(plan.layers) - 1}")


def check_rule(policy: object) -> None:
    """Refuse counts that there cannot be, of those that the policy has."""
    for name in ("passes", "times", "heads_per_layer", "max_layers", "shortlist"):
        if hasattr(policy, name):
            check_integer(name, getattr(policy, name), 1)


def refuse_idle(policy: object, names: tuple[str, ...]) -> None:
    """Refuse settings that named layers leave nothing to do."""
    for name in names:
        if getattr(policy, name) != getattr(type(policy), name):
            raise InputError(name, getattr(policy, name), "does nothing with `layers`, which are chosen already")
