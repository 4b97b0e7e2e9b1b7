"""The growth section of a configuration, put to work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from meristem.errors import InputError, RunError
from meristem.gauges import EntropyGauge
from meristem.growth import BlockLoop, Grower, Sgt
from meristem.growth.block_loop import steady_layers
from meristem.model import Decoder
from meristem.plan import Plan
from meristem.training.config import Config, GrowthConfig
from meristem.training.run import RunFolder


def make_policy(growth: GrowthConfig, steps: int) -> Sgt:
    """The SGT policy that the section describes."""
    try:
        return Sgt(
            total_steps=steps, passes=growth.passes, heads=growth.heads, heads_per_layer=growth.heads_per_layer,
            max_layers=growth.max_layers, shortlist=growth.shortlist, excluded=growth.excluded, order=growth.order,
            start=growth.start, window=growth.window, beta=growth.beta, birth=growth.birth,
            train_gates=growth.train_gates, seed=growth.seed,
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"growth.{error.field}", error.value, error.expected) from None


def starting_plan(config: Config, plan: Plan) -> Plan:
    """The plan a run begins with: room for what will grow, and what is there from the start."""
    growth = config.growth
    if growth.policy == "none":
        return plan
    policy = make_policy(growth, config.train.steps)
    if growth.like is not None:
        loops = structure_of(Path(growth.like), policy)
    elif growth.layers:
        loops = {layer: policy.chosen_heads(layer, [0.0] * plan.layer(layer).heads) for layer in growth.layers}
    else:
        return policy.prepare(plan)
    if growth.unit == "block":
        return BlockLoop(tuple(loops), growth.passes).prepare(plan)
    return policy.looped(plan, loops)


def make_grower(config: Config, model: Decoder, optimizer: torch.optim.Optimizer, start: Plan) -> Grower | None:
    """The grower of a run that began with the plan `start`; None if it neither grows nor observes."""
    growth = config.growth
    static = start.loops or any(layer.repeats for layer in start.layers)
    policy = make_policy(growth, config.train.steps) if growth.policy == "sgt" and not static else None
    if policy is None and not growth.observe:
        return None
    try:
        gauge = EntropyGauge(growth.rows, growth.probe)
    except InputError as error:
        name = "probe" if error.field == "form" else error.field
        raise InputError(f"growth.{name}", error.value, error.expected) from None
    every = (growth.observe_every or max(1, config.train.steps // 100)) if growth.observe else 0
    return Grower(model, optimizer, policy, gauge=gauge, observe_every=every)


def structure_of(run: Path, policy: Sgt) -> Mapping[int, Sequence[int]]:
    """The looped heads of another run by layer, or what `policy` would loop, judged by its last entropies."""
    folder = RunFolder.open(run)
    plan = folder.newest_plan
    readings = [entry["head_entropy"] for log in (folder.events, folder.entropy) for entry in folder.read(log)
                if "head_entropy" in entry]  # fmt: skip
    if plan.loops and policy.heads == "high":
        return {layer: loop.heads for layer, loop in plan.loops.items()}
    if not readings:
        raise RunError(f"{run}: has no loops and no recorded entropies to take after (growth.like)")
    layers = tuple(plan.loops) or steady_layers(readings[-1], policy)
    return {layer: policy.chosen_heads(layer, readings[-1][layer]) for layer in layers}
