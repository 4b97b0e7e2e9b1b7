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
    return Sgt(
        total_steps=steps, passes=growth.passes, heads=growth.heads, heads_per_layer=growth.heads_per_layer,
        max_layers=growth.max_layers, shortlist=growth.shortlist, excluded=growth.excluded, order=growth.order,
        start=growth.start, window=growth.window, beta=growth.beta, birth=growth.birth,
        train_gates=growth.train_gates, seed=growth.seed,
    )  # fmt: skip


def starting_plan(config: Config, plan: Plan) -> Plan:
    """The plan a run begins with: room for what will grow, and what is there from the start."""
    growth = config.growth
    if growth.policy == "none":
        return plan
    if _is_looped(plan):
        raise InputError("model.plan", config.model.plan, "has loops already; leave growth.policy at none to train it")
    for layer in growth.layers:
        if not 0 <= layer < len(plan.layers):
            raise InputError("growth.layers", layer, f"must be in 0..{len(plan.layers) - 1}")
    try:
        policy = make_policy(growth, config.train.steps)
        if growth.like is not None:
            loops = structure_of(Path(growth.like), policy)
        elif growth.layers:
            loops = {layer: policy.chosen_heads(layer, [0.0] * plan.layers[layer].heads) for layer in growth.layers}
        else:
            return policy.prepare(plan)
        if growth.unit == "block":
            return BlockLoop(tuple(loops), growth.passes).prepare(plan)
        return policy.looped(plan, loops)
    except InputError as error:
        raise InputError(f"growth.{error.field}", error.value, error.expected) from None


def make_grower(config: Config, model: Decoder, optimizer: torch.optim.Optimizer, start: Plan) -> Grower | None:
    """The grower of a run that began with the plan `start`; None if it neither grows nor observes."""
    growth = config.growth
    policy = make_policy(growth, config.train.steps) if growth.policy == "sgt" and not _is_looped(start) else None
    if policy is None and not growth.observe:
        return None
    every = (growth.observe_every or max(1, config.train.steps // 100)) if growth.observe else 0
    gauge = EntropyGauge(growth.rows, growth.probe)
    return Grower(model, optimizer, policy, gauge=gauge, observe_every=every)


def _is_looped(plan: Plan) -> bool:
    return any(layer.loop is not None or layer.repeats for layer in plan.layers)


def structure_of(run: Path, policy: Sgt) -> Mapping[int, Sequence[int]]:
    """The looped heads of another run by layer, or what `policy` would loop, judged by its last entropies."""
    folder = RunFolder.open(run)
    plan = folder.newest_plan
    if plan.loops and policy.heads == "high":
        return {layer: loop.heads for layer, loop in plan.loops.items()}
    logs = (folder.events, folder.entropy)
    readings = [entry for log in logs for entry in folder.read(log) if _is_whole(entry.get("head_entropy"))]
    if not readings:
        raise RunError(f"{run}: has no loops and no recorded entropies to take after (growth.like)")
    entropies = max(readings, key=lambda entry: entry["step"])["head_entropy"]
    again = tuple(index for index, layer in enumerate(plan.layers) if layer.loop is not None or layer.repeats)
    layers = again or steady_layers(entropies, policy)
    return {layer: policy.chosen_heads(layer, entropies[layer]) for layer in layers}


def _is_whole(entropies: list[list[float | None]] | None) -> bool:
    """Whether there is a reading, and every entropy in it was finite."""
    return entropies is not None and all(value is not None for layer in entropies for value in layer)
