"""What heads that grow cost: the gauge beside training, pauses at births, and the step of a grown model."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
    wait,
)
from meristem.devices import autocast, describe_device
from meristem.growth import AddHead, Grower, Incrt, Prune
from meristem.growth.apply import apply_edit
from meristem.growth.head_surgery import newborn_head
from meristem.plan import LayerPlan, Plan

NEVER = Incrt(certainty=1e300)  # measures and decides, but nothing is ever born


def with_heads(plan: Plan, heads: int) -> Plan:
    """The plan with so many heads in every layer, of the dim it has."""
    dim = plan.head_dims[0]
    return replace(plan, layers=(LayerPlan(heads, dim, heads),) * len(plan.layers))


@cold_kernels()
def compare_heads(
    plan: Plan, device: torch.device, *, batch: int, steps: int, rounds: int, feed_every: int,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Everything that the growth of heads costs, measured in one run; ready for JSON."""
    check_minimums(("batch", batch, 1), ("steps", steps, 2), ("rounds", rounds, 2), ("feed_every", feed_every, 1))
    batches = random_batches(plan, device, batch)
    say("a model grows from one head to all of them in every layer")
    grown, births = grow_all(plan, device, batches, say=say)
    built = TrainingStep(plan, device)
    gate = measure_gate(built, batches, device, feed_every=feed_every, rounds=rounds)
    say(f"gauge: {gate['feed_milliseconds']:.1f} ms a feed, {gate['share']:.2%} of training")
    for step in (grown, built):  # the same weights in both: how fast a GPU is depends on what it multiplies
        step.model.initialise(0)
    times: dict[str, list[float]] = {"grown": [], "built": []}
    for number in range(rounds):
        for name, step in (("grown", grown), ("built", built))[:: 1 if number % 2 else -1]:
            times[name].append(statistics.median(step_times(step, batches, steps, device)[0]))
    ratios = [mine / theirs - 1 for mine, theirs in zip(times["grown"], times["built"], strict=True)]
    return {
        "device": describe_device(device),
        "torch": torch.__version__,
        "settings": {
            "batch": batch, "context": plan.context, "heads": list(plan.heads), "head_dim": plan.head_dims[0],
            "width": plan.width, "steps": steps, "rounds": rounds,
        },
        "births": births,
        "gate": gate,
        "step": {
            "grown_milliseconds": statistics.median(times["grown"]),
            "built_milliseconds": statistics.median(times["built"]),
            "difference": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
        },
    }  # fmt: skip


def grow_all(
    plan: Plan, device: torch.device, batches: Iterator[tuple[Tensor, Tensor]], *, say: Callable[[str], None]
) -> tuple[TrainingStep, dict[str, Any]]:
    """A scripted growth from one head to the plan's, in every layer, birth by birth, and how long each holds up.

    That is the time of the birth, and what the updates after it take more than usual ones.
    """
    step = TrainingStep(with_heads(plan, 1), device)
    first = step_seconds(step, batches, device)
    usual = min(step_seconds(step, batches, device) for _ in range(3))
    pauses: list[float] = []
    for heads in range(2, max(plan.heads) + 1):
        for layer in range(len(plan.layers)):
            begin = time.perf_counter()
            newborn = newborn_head(step.model.plan.layers[layer], plan.width, None, seed=len(pauses))
            apply_edit(step.model, step.optimizer, AddHead(layer, newborn))
            step.changed(step.model)
            edited = time.perf_counter() - begin
            pauses.append(edited + pause_seconds(step, batches, device))
        say(f"{heads} heads everywhere: {sum(pauses):.1f} s of pauses so far")
    return step, {
        "first_step_seconds": first, "first_step_with_one_head": usual, "births": len(pauses),
        "pauses": pauses, "longest_pause": max(pauses), "total_seconds": sum(pauses),
    }  # fmt: skip


def measure_gate(
    step: TrainingStep, batches: Iterator[tuple[Tensor, Tensor]], device: torch.device, *, feed_every: int, rounds: int
) -> dict[str, Any]:
    """What the gauge in all layers adds to training, in spans that each hold one decision and a look at old heads."""
    span = 10 * feed_every
    policy = replace(NEVER, feed_every=feed_every, decide_every=span)
    # All heads are looked at, none is tried without.
    grower = Grower(step.model, step.optimizer, [policy, Prune(decide_every=span, grace=0, redundant=0)])
    if device.type == "cuda":
        measured = _beside_training(step, grower, span, batches, device)
    else:
        measured = _within_training(step, grower, span, batches)
    for _ in range(policy.calibration):  # once at the start of a run, and not what is asked about
        with autocast(device):
            grower.step(*next(batches))
    next(measured)  # warm
    plain, added = zip(*itertools.islice(measured, rounds), strict=True)
    shares = [own / alone for alone, own in zip(plain, added, strict=True)]
    return {
        "feed_every": feed_every, "decide_every": policy.decide_every, "share": statistics.median(shares),
        "lowest": min(shares), "highest": max(shares),
        "feed_milliseconds": 1e3 * statistics.median(added) * feed_every / policy.decide_every,
        "statistics_megabytes": sum(t.numel() * t.element_size() for t in grower.tensors().values()) / 1e6,
    }  # fmt: skip


Measured = Iterator[tuple[float, float]]  # seconds of training in a span without the gauge, and what it adds


def _beside_training(
    step: TrainingStep, grower: Grower, span: int, batches: Iterator[tuple[Tensor, Tensor]], device: torch.device
) -> Measured:
    """Time spans with the gauge and without, in turn, as a GPU begins one thing before another has ended."""

    def seconds(gated: bool) -> float:
        wait(device)
        begin = time.perf_counter()
        for _ in range(span):
            tokens, targets = next(batches)
            step(tokens, targets)
            if gated:
                with autocast(device):
                    grower.step(tokens, targets)
        wait(device)
        return time.perf_counter() - begin

    for first in itertools.cycle((True, False)):
        times = {gated: seconds(gated) for gated in (first, not first)}
        yield times[False], times[True] - times[False]


def _within_training(
    step: TrainingStep, grower: Grower, span: int, batches: Iterator[tuple[Tensor, Tensor]]
) -> Measured:
    """Time the updates and the gauge of one span apart, on a CPU, in the time that this process had.

    Both are then slowed down alike by whatever else the machine does.
    """
    while True:
        plain = added = 0.0
        for _ in range(span):
            tokens, targets = next(batches)
            begin = time.process_time()
            step(tokens, targets)
            middle = time.process_time()
            grower.step(tokens, targets)
            plain, added = plain + middle - begin, added + time.process_time() - middle
        yield plain, added


def heads_text(report: dict[str, Any]) -> str:
    """The results in a few lines."""
    births, gate, step = report["births"], report["gate"], report["step"]
    return "\n".join(
        (
            f"{report['device']}, torch {report['torch']}",
            f"{births['births']} births: {births['total_seconds']:.1f} s of pauses in all (longest "
            f"{births['longest_pause']:.1f} s)",
            f"gauge in {len(report['settings']['heads'])} layers: {gate['feed_milliseconds']:.1f} ms a feed, "
            f"{gate['share']:+.2%} of training at one feed in {gate['feed_every']} steps "
            f"({gate['lowest']:+.2%} to {gate['highest']:+.2%}); {gate['statistics_megabytes']:.0f} MB of statistics",
            f"step of the grown model {step['grown_milliseconds']:.2f} ms, of one built with these heads "
            f"{step['built_milliseconds']:.2f} ms: {step['difference']:+.2%} "
            f"({step['lowest']:+.2%} to {step['highest']:+.2%})",
        )
    )
