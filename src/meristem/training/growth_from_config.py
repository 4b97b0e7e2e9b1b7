"""The growth section of a configuration, put to work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from meristem.config import Config, GrowthConfig, in_growth
from meristem.errors import InputError, RunError
from meristem.growth import BlockLoop, Grower, Incrt, Published, RandomBirths, Sgt
from meristem.growth.births import check_growable
from meristem.growth.policies.sgt import ENDLESS, SgtState
from meristem.model import Transformer
from meristem.plan import Loop, Plan
from meristem.runs.entries import sound_loop_growth, sound_observations
from meristem.runs.folder import RunFolder


def starting_plan(config: Config, plan: Plan) -> Plan:
    """The plan a run begins with: room for what will grow, and what is there from the start."""
    growth = config.growth
    if plan.context < 2 and (growth.observe or growth.policy != "none"):
        raise InputError("model.context", plan.context, "must be at least 2: one token has no entropy")
    if growth.policy == "incrt":
        _check_keys(config, plan)
        _check_growth(config, plan)
    if growth.policy != "sgt":
        return plan
    if plan.is_looped:
        raise InputError("model.plan", config.model.plan, "has loops already; leave growth.policy at none to train it")
    for layer in growth.layers:
        if not 0 <= layer < len(plan.layers):
            raise InputError("growth.layers", layer, f"must be in 0..{len(plan.layers) - 1}")
    try:
        if growth.like is not None:
            return _like(plan, growth, Path(growth.like))
        if growth.unit == "block":
            return BlockLoop(growth.layers, growth.passes).prepare(plan)
        if growth.layers:
            policy = growth.sgt()
            chosen = {layer: policy.chosen_heads(layer, [0.0] * plan.layers[layer].heads) for layer in growth.layers}
            return policy.looped(plan, {layer: Loop(heads, growth.passes) for layer, heads in chosen.items()})
        return growth.sgt(config.train.steps).prepare(plan)
    except InputError as error:
        raise in_growth(error) from None


def _check_keys(config: Config, plan: Plan) -> None:
    """Refuse layers that cannot be given heads, by the setting that made them so."""
    try:
        check_growable(plan)
    except InputError as error:
        if error.field != "kv_heads" or config.model.plan is not None:
            raise
        expected = f"must be 1 (or as many as there are heads, 2 at least) for heads to come and go: {error}"
        raise InputError("model.kv_group", config.model.kv_group, expected) from None


def _check_growth(config: Config, plan: Plan) -> None:
    """Refuse a run in which no head could be born or leave, or that is over before one could be born."""
    policy, *_ = config.incrt.policies(config.train.steps)
    assert isinstance(policy, Incrt | Published | RandomBirths)
    if 0 < policy.max_heads <= min(plan.heads) and (max(plan.heads) == 1 or not config.incrt.prune):
        expected = f"must be above the heads that every layer has at the start, {min(plan.heads)}, or 0 for no limit"
        raise InputError("incrt.max_heads", policy.max_heads, expected)
    if isinstance(policy, Incrt) and policy.first_birth > policy.last_birth:
        raise InputError(
            "incrt.last_birth", config.incrt.last_birth,
            f"leaves no time to grow: of {config.train.steps} updates births end after {policy.last_birth}, and the "
            f"first could come after {policy.first_birth}; take smaller incrt.warm_up, cool_down, feed_every, feeds, "
            "decide_every or hits",
        )  # fmt: skip


def _like(plan: Plan, growth: GrowthConfig, source: Path) -> Plan:
    """The plan with the loops of another run or of a plan file, or with repeats in the same layers."""
    policy = growth.sgt()
    try:
        if growth.unit == "block":
            return BlockLoop(_layers(source, *_structure(source), policy), growth.passes).prepare(plan)
        return policy.looped(plan, structure_of(source, policy))
    except InputError as error:
        expected = f"does not fit this model: {error.field} = {error.value!r} {error.expected}"
        raise InputError("like", str(source), expected) from None


def structure_of(source: Path, policy: Sgt) -> dict[int, Loop]:
    """The loops of a plan file or of a run that has ended; of an observed run, those its last entropies point to.

    Where `policy` asks for other heads than those of high entropy, these are chosen among the same layers.
    """
    plan, entropies = _structure(source)
    if plan.loops and policy.heads == "high":
        return plan.loops
    if entropies is None:
        raise RunError(f"{source}: has no loops of high-entropy heads and no recorded entropies to take after")
    passes = {layer: loop.passes for layer, loop in plan.loops.items()}
    return {
        layer: Loop(policy.chosen_heads(layer, entropies[layer]), passes.get(layer, policy.passes))
        for layer in _layers(source, plan, entropies, policy)
    }


def _layers(source: Path, plan: Plan, entropies: list[list[float]] | None, policy: Sgt) -> tuple[int, ...]:
    """The layers in which something is run again, or those that the last entropies point to."""
    layers = tuple(index for index, layer in enumerate(plan.layers) if layer.run_again)
    if not layers and entropies is not None:
        layers = steady_layers(entropies, policy)
    if not layers:
        raise RunError(f"{source}: has nothing to take after: no loops, and no entropies that point to a layer")
    return layers


def steady_layers(entropies: Sequence[Sequence[float]], rule: Sgt) -> tuple[int, ...]:
    """The layers that `rule` selects, in its order, when the entropies never change."""
    if not all(math.isfinite(value) for layer in entropies for value in layer):
        raise InputError("entropies", entropies, "must be finite")
    rule, state = replace(rule, total_steps=ENDLESS, start=1, window=1), SgtState()  # however short the run
    while (due := rule.next_decision(state)) is not None:
        state = rule.judge(state, due, entropies).state
    return tuple(grown.layer for grown in state.grown)


def _structure(source: Path) -> tuple[Plan, list[list[float]] | None]:
    """The plan of a plan file or of a run that has ended, and the run's newest entropies that were all finite."""
    if source.is_file():
        return Plan.load(source), None
    folder = RunFolder.open(source)
    if folder.newest_step < folder.config.train.steps:
        raise RunError(f"{source}: has not ended yet (step {folder.newest_step}); growth.like takes finished runs")
    plan, steps = folder.plan, folder.config.train.steps
    decisions = sound_loop_growth(folder.read(folder.events), plan, steps)
    observations = sound_observations(folder.read(folder.entropy), plan, steps)
    readings = [entry for entry in (*decisions, *observations) if "head_entropy" in entry]
    whole = [entry for entry in readings if all(v is not None for layer in entry["head_entropy"] for v in layer)]
    return folder.newest_plan, max(whole, key=lambda entry: entry["step"])["head_entropy"] if whole else None


def make_grower(config: Config, model: Transformer, optimizer: torch.optim.Optimizer) -> Grower | None:
    """The grower of a run; None if it neither grows nor observes."""
    return Grower(model, optimizer, config.policies) if config.policies else None
