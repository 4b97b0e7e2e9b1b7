"""What growth costs: step time with loops beside the step without, pauses at births, and the entropy probe."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meristem.bench.step import (
    TrainingStep,
    check_minimums,
    cold_kernels,
    pause_seconds,
    random_batches,
    step_seconds,
    step_times,
)
from meristem.devices import autocast, describe_device
from meristem.errors import InputError
from meristem.gauges import EntropyGauge
from meristem.gauges.probe import Probe
from meristem.growth import BlockLoop, LoopHeads, Sgt
from meristem.growth.apply import apply_edit
from meristem.growth.looping import looped
from meristem.growth.policy import ENDLESS
from meristem.plan import Loop, Plan


def grown_plans(plan: Plan, layers: tuple[int, ...], heads: tuple[int, ...], passes: int) -> dict[str, Plan]:
    """The plan itself, after growth with 1 to `passes` passes, and with the same layers' blocks run twice."""
    plans = {"vanilla": plan}
    for k in range(1, passes + 1):
        plans[f"SGT K={k}"] = looped(plan, dict.fromkeys(layers, Loop(heads, k)), trained=True)
    plans[f"{len(layers)} block{'s' if len(layers) > 1 else ''} looped"] = BlockLoop(layers).prepare(plan)
    return plans


def compare_growth(
    plan: Plan, device: torch.device, *, layers: tuple[int, ...], heads: tuple[int, ...], passes: int, batch: int,
    steps: int, rounds: int, say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Everything that growth costs, measured in one run; ready for JSON.

    Births come first, before any kernel is compiled. Then all models are held at once and timed in turn, `rounds` times
    `steps` steps each, so that each round gives a ratio between arms that were measured within seconds of each other.
    One more round comes before these and does not count: a chip is faster until it is warm.
    """
    check_minimums(("batch", batch, 1), ("steps", steps, 2), ("rounds", rounds, 2), ("passes", passes, 1))
    if plan.classes is not None:
        raise InputError("classes", plan.classes, "loops grow by the entropy of causal attention, which a decoder has")
    plans = grown_plans(plan, layers, heads, passes)
    births = measure_births(plan, device, layers, heads, passes, batch=batch)
    gc.collect()  # the model that grew is held by its own recording, whose memory may not go while another is made
    say(f"{len(births['pauses'])} births: {births['total_seconds']:.1f} s of pauses")
    arms = {name: TrainingStep(arm_plan, device) for name, arm_plan in plans.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    batches = random_batches(plan, device, batch)
    for name, step in arms.items():
        say(f"{name}: first step {step_seconds(step, batches, device):.1f} s")
    order = list(arms)
    for number in range(1 + rounds):
        for name in order:
            for _ in range(2):
                arms[name](*next(batches))
            times[name].append(statistics.median(step_times(arms[name], batches, steps, device)[0]))
        say(f"round {number}: " + ", ".join(f"{name} {times[name][-1]:.2f} ms" for name in arms))
        order = [*order[1:], order[0]]  # each arm comes first in turn
    times = {name: rest for name, (_, *rest) in times.items()}
    probe = measure_probe(arms["vanilla"], batches, device, passes=passes, steps=steps, rounds=rounds)
    arms.clear()
    return {
        "device": describe_device(device),
        "torch": torch.__version__,
        "settings": {
            "batch": batch, "context": plan.context, "layers": list(layers), "heads": list(heads), "steps": steps,
            "rounds": rounds,
        },
        "arms": _overheads(plans, times),
        "births": births,
        "probe": probe,
    }  # fmt: skip


def _overheads(plans: Mapping[str, Plan], rounds: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    base = plans["vanilla"].cost.training.causal
    results = []
    for name, times in rounds.items():
        ratios = [mine / theirs - 1 for mine, theirs in zip(times, rounds["vanilla"], strict=True)]
        results.append(
            {
                "name": name, "milliseconds": statistics.median(times), "rounds": times,
                "overhead": statistics.median(ratios), "overhead_low": min(ratios), "overhead_high": max(ratios),
                "extra_flops": plans[name].cost.training.causal / base - 1,
            }
        )  # fmt: skip
    return results


@cold_kernels()
def measure_births(
    plan: Plan, device: torch.device, layers: tuple[int, ...], heads: tuple[int, ...], passes: int, *, batch: int
) -> dict[str, Any]:  # fmt: skip
    """A scripted growth, birth by birth: how long each holds up training."""
    policy = Sgt(ENDLESS, passes=passes, heads_per_layer=len(heads))
    step = TrainingStep(policy.prepare(plan), device)
    batches = random_batches(plan, device, batch)
    first = step_seconds(step, batches, device)
    pauses = []
    for layer in layers:
        for number in range(1, passes + 1):
            begin = time.perf_counter()
            apply_edit(step.model, step.optimizer, LoopHeads(layer, heads, number))
            step.changed()
            seconds = time.perf_counter() - begin + pause_seconds(step, batches, device)
            pauses.append({"layer": layer, "passes": number, "seconds": seconds})
    return {
        "first_step_seconds": first, "pauses": pauses, "total_seconds": sum(p["seconds"] for p in pauses),
    }  # fmt: skip


def measure_probe(
    step: TrainingStep, batches: Iterator[tuple[Tensor, Tensor]], device: torch.device, *, passes: int, steps: int,
    rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """What an entropy measurement adds to a step, and its share of a run with the default schedule."""

    instrument = EntropyGauge().instrument(step.model)

    def probed(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = step(tokens, targets)
        with autocast(device):
            instrument.read(Probe(step.model, tokens))
        return loss

    times: dict[str, list[float]] = {"plain": [], "probed": []}
    for _ in range(rounds):
        for name, one in (("plain", step), ("probed", probed)):
            one(*next(batches))
            times[name].append(statistics.median(step_times(one, batches, steps, device)[0]))
    plain, with_probe = (statistics.median(times[name]) for name in ("plain", "probed"))
    shares = {}
    for most in sorted({1, passes}):
        policy = Sgt(total_steps=5000, passes=most)
        decisions = policy.max_layers * most + 1
        probes = policy.probed_steps * decisions
        shares[f"K={most}"] = probes * (with_probe - plain) / (policy.total_steps * plain)
    return {"milliseconds": with_probe - plain, "share_of_5000_steps": shares}


def growth_text(report: dict[str, Any]) -> str:
    """The results as a table."""
    lines = [
        f"{report['device']}, torch {report['torch']}",
        "arm                   ms/step   extra FLOPs   extra time (rounds)",
    ]
    for arm in report["arms"]:
        lines.append(
            f"{arm['name']:<20}  {arm['milliseconds']:7.2f}   {arm['extra_flops']:10.2%}   {arm['overhead']:+9.2%} "
            f"({arm['overhead_low']:+.2%} to {arm['overhead_high']:+.2%})"
        )
    births, probe = report["births"], report["probe"]
    shares = ", ".join(f"{share:.2%} with {name}" for name, share in probe["share_of_5000_steps"].items())
    lines += [
        f"{len(births['pauses'])} births: {births['total_seconds']:.1f} s of pauses in all; first step "
        f"{births['first_step_seconds']:.1f} s",
        f"entropy probe: {probe['milliseconds']:.1f} ms; of a run of 5000 steps {shares}",
    ]
    return "\n".join(lines)
