"""The growth section of a configuration, put to work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from meristem.config import Config
from meristem.config.growth import HEADS, LOOPS
from meristem.errors import InputError, RunError
from meristem.growth import BlockLoop, Grower, Policy, Sgt, SgtState, StaticLoops
from meristem.growth.births import BirthBudget, check_growable, full_layers
from meristem.growth.looping import looped
from meristem.growth.policies.depth import Depth, best_depth
from meristem.growth.policy import ENDLESS
from meristem.growth.stacking import refuse_loops
from meristem.limits import MOST_LAYERS
from meristem.model import Transformer
from meristem.plan import Loop, Plan
from meristem.runs.entries import growth_events, sound_loop_growth, sound_observations
from meristem.runs.run_folder import RunFolder
from meristem.training.length import updates_left
from meristem.wording import counted

ENTROPIES = ("sgt", "observe")  # policies that measure them


def starting_plan(config: Config, plan: Plan) -> Plan:
    """The plan a run begins with: room for what will grow, and what is there from the start."""
    growth = config.growth
    if growth.has("depth") and config.train.flops is None:
        expected = "must be given, as depth of growth.policies decides what FLOPs are best spent on"
        raise InputError("train.flops", None, expected)
    others = [name for name in growth.policies if name not in ("sgt", "observe")]
    if growth.has("sgt") and others and config.train.flops is not None:
        told = f"sgt and {others[0]} of growth.policies"
        expected = f"cannot be given with {told}: the times of sgt are parts of the updates; give train.steps"
        raise InputError("train.flops", config.train.flops, expected)
    for name in (name for name in ENTROPIES if growth.has(name) and plan.context < 2):
        expected = f"must be at least 2: one token has no entropy, which {name} of growth.policies needs"
        raise InputError("model.context", plan.context, expected)
    for name in (name for name in LOOPS if growth.has(name) and plan.is_looped):
        expected = f"has loops already, which {name} of growth.policies would have to change"
        field = config.model.whole or "model.plan"
        raise InputError(field, config[field], expected)
    for name in (name for name in HEADS if growth.has(name)):
        _check_keys(config, plan)
        _check_growth(config, name, plan)
    for policy in config.build_policies():
        try:
            plan = _with_best_depth(policy, config, plan) if isinstance(policy, Depth) else _prepared(policy, plan)
        except InputError as error:
            if "." in error.field:  # a key of another table
                raise
            if error.field == "plan" and (whole := config.model.whole) is not None:
                raise InputError(whole, config[whole], error.expected) from None
            raise InputError(f"growth.{policy.title}.{error.field}", error.value, error.expected) from None
    _check_last_copies(config, plan)
    return plan


def _with_best_depth(policy: Depth, config: Config, plan: Plan) -> Plan:
    """The plan with as many blocks as the policy says, or as are best for the FLOPs of the run, up to all it has."""
    refuse_loops(plan)
    if config.model.start_from is not None:
        return _deepened(policy, config, replace(plan, target=()))  # blocks that the other run never came to have
    if policy.layers is not None:
        expected = "is for a run with model.start_from; a new one begins with start_layers and has model.layers at most"
        raise InputError("growth.depth.layers", policy.layers, expected)
    if plan.target and policy.start_layers not in (None, own := len(plan.layers)):
        expected = f"must be {own}, the blocks of the plan, which has those to come as well"
        raise InputError("growth.depth.start_layers", policy.start_layers, expected)
    if policy.start_layers is not None or plan.target:
        return policy.prepare(plan)
    blocks = _best_for(config, plan)
    return plan if blocks >= len(plan.layers) else replace(policy, start_layers=blocks).prepare(plan)


def _deepened(policy: Depth, config: Config, plan: Plan) -> Plan:
    """The plan of another run, whose blocks all stay and become as many as the policy says, or as are best."""
    if policy.layers is None:
        blocks = _best_for(config, plan)
        if blocks > MOST_LAYERS:
            expected = f"is best spent on {blocks:,} blocks, of which there can be {MOST_LAYERS:,} at most"
            raise InputError("train.flops", config.train.flops, expected)
        if blocks <= len(plan.layers):
            return plan
        policy = replace(policy, layers=blocks)
    return policy.prepare(plan)


def _check_last_copies(config: Config, plan: Plan) -> None:
    """Refuse a run that is too short for an update before its last blocks are copied and one after."""
    flops, growth = config.train.flops, config.growth
    deepens = growth.has("depth") and config.model.start_from is not None  # else `depth` sees to it on the way
    if flops is None or not plan.target or not (deepens or growth.has("stack")):
        return
    needed = _update_flops(config, plan) + _update_flops(config, replace(plan, layers=plan.target, target=()))
    if flops < needed:
        expected = f"must be at least {needed:.3g}, for an update after there are {len(plan.target)} blocks"
        raise InputError("train.flops", flops, expected)


def _best_for(config: Config, plan: Plan) -> int:
    """How many blocks like the first one of a plan are best for the FLOPs of a run."""
    assert config.train.flops is not None
    updates = config.train.flops / _update_flops(config, replace(plan, layers=plan.layers[:1], target=()))
    return best_depth(updates, config.train.batch_size * plan.context)


def _update_flops(config: Config, plan: Plan) -> int:
    """FLOPs of an update of a plan, with rows of full length."""
    return plan.cost.training_of(config.train.batch_size, plan.context).causal


def make_grower(config: Config, model: Transformer, optimizer: torch.optim.Optimizer) -> Grower | None:
    """The grower of a run; None if it neither grows nor observes."""
    policies = [_with_goal(policy, config, model.plan) for policy in config.build_policies() if not policy.static]
    return Grower(model, optimizer, policies) if policies else None


def idle_depth(config: Config, plan: Plan) -> list[str]:
    """Says so where `depth` has nothing to do in a run that begins with this plan."""
    if not config.growth.has("depth") or plan.target:
        return []
    most = "all that there may be" if config.model.start_from is None else "enough for train.flops"
    blocks = counted(len(plan.layers), "block")
    return [f"growth.depth: of no use, as the run begins with {blocks}, {most}"]


def uneven_depth(config: Config, plan: Plan) -> list[str]:
    """Says so where `depth` copies blocks that are not like those which the plan has further up."""
    if not config.growth.has("depth") or config.model.start_from is not None or len({*plan.target}) < 2:
        return []
    first, later = (" ".join(map(str, heads)) for heads in (plan.heads, [one.heads for one in plan.target]))
    advice = "; with model.schedule = uniform all are alike" if config.model.scheduled else ""
    return [
        f"growth.depth: not all blocks of the plan are alike (heads {later}), of which it begins with {first}{advice}"
    ]


def _with_goal(policy: Policy, config: Config, plan: Plan) -> Policy:
    """The policy `depth` of a run that starts from another is told how many blocks there will be: the plan says it."""
    if isinstance(policy, Depth) and config.model.start_from is not None and plan.target:
        return replace(policy, layers=len(plan.target))
    return policy


def _check_keys(config: Config, plan: Plan) -> None:
    """Refuse layers that cannot be given heads, by the setting that made them so."""
    try:
        check_growable(plan)
    except InputError as error:
        if error.field != "kv_heads" or config.model.whole:
            raise
        expected = f"must be 1 (or as many as there are heads, 2 at least) for heads to come and go: {error}"
        raise InputError("model.kv_group", config.model.kv_group, expected) from None


def _check_growth(config: Config, name: str, plan: Plan) -> None:
    """Refuse a run in which no head could be born or leave."""
    policy = config.policy(name)
    given, plan = plan, policy.prepare(plan)
    prunes = config.growth.has("prune") or getattr(policy, "prune", False)
    if 0 < policy.max_heads <= min(plan.heads) and (max(plan.heads) == 1 or not prunes):
        expected = f"must be above the heads that every layer has at the start, {min(plan.heads)}, or 0 for no limit"
        raise InputError(f"growth.{name}.max_heads", policy.max_heads, expected)
    if len(full_layers(plan, 0)) == len(plan.layers) and not prunes:
        if len(full_layers(given, 0)) == len(given.layers):
            field = config.model.whole or "model.plan"
            raise InputError(field, config[field], "has as many heads in every layer as it may have: none can be born")
        expected = f"must be below {max(plan.heads)}, the most that a layer can have, for a head to be born"
        raise InputError(f"growth.{name}.start_heads", policy.start_heads, expected)
    if budget := getattr(policy, "budget", None):
        limit = BirthBudget.read(budget)
        if not limit.relative and limit.value <= (used := limit.used(plan, math.nan)):
            expected = f"must be above what the model has at the start, {limit.kind}={used:.0f}, for a head to be born"
            raise InputError(f"growth.{name}.budget", budget, expected)


# --- what another run has grown --------------------------------------------------------------------------------------


def _prepared(policy: Policy, plan: Plan) -> Plan:
    """The plan that a policy prepares, with the structure of another run where it names one."""
    if not isinstance(policy, StaticLoops | BlockLoop) or policy.like is None:
        return policy.prepare(plan)
    source, rule = Path(policy.like), _rule(policy)
    try:
        if isinstance(policy, BlockLoop):
            return BlockLoop(_layers(source, *_structure(source), rule), policy.times).prepare(plan)
        return looped(plan, structure_of(source, rule), trained=policy.train_gates)
    except InputError as error:
        expected = f"does not fit this model: {error.field} = {error.value!r} {error.expected}"
        raise InputError("like", str(source), expected) from None


def _rule(policy: StaticLoops | BlockLoop) -> Sgt:
    """SGT's rule with a policy's settings: what it would have grown is taken over."""
    names = ("heads_per_layer", "max_layers", "shortlist", "excluded", "order", "passes", "heads", "seed")
    settings: dict[str, Any] = {name: getattr(policy, name) for name in names if hasattr(policy, name)}
    return Sgt(total_steps=ENDLESS, **settings)


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
    if updates_left(folder.newest_state or {}, folder.newest_step, folder.config) > 0:
        raise RunError(f"{source}: has not ended yet (step {folder.newest_step}); `like` takes finished runs")
    plan, steps = folder.newest_plan, folder.config.train.steps  # of the last structure, whatever came before
    decisions = sound_loop_growth(growth_events(folder.read(folder.events), steps), plan)
    observations = sound_observations(folder.read(folder.entropy), plan, steps)
    readings = [(event.step, event.facts.get("head_entropy")) for event in decisions]
    readings += [(entry["step"], entry["head_entropy"]) for entry in observations]
    whole = [(s, found) for s, found in readings if found and all(v is not None for layer in found for v in layer)]
    return plan, max(whole, key=itemgetter(0))[1] if whole else None
