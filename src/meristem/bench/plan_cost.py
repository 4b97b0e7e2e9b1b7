"""What a plan costs on the device at hand: its training step and its decoding, beside what the formulas say."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meristem.bench.decode import our_rate
from meristem.bench.step import Timing, TrainingStep, measure
from meristem.choices import OptimizerKind
from meristem.config import OptimizerConfig
from meristem.devices import describe_device, memory_of
from meristem.plan import Plan
from meristem.plan.costs import GIB, TrainingOptions, check_memory

CPU_TOKENS = 2048  # of a step at most: there, more are no faster
AVERAGE = 0.999  # any other costs as much
PROMPT, WRITTEN = 128, 128  # tokens, or half of the context each if that is less


@dataclass(frozen=True)
class PlanCost:
    """Measured numbers of a plan. Memory is not known of a CPU, and a classifier does not write."""

    device: str
    batch: int
    milliseconds: float
    tokens_per_second: float
    mfu: float | None
    peak_bytes: int | None
    decoding: float | None  # tokens per second, one text at a time
    limit_share: float | None  # of the rate at which weights and cache could be read


def measure_plan(
    plan: Plan, device: torch.device, batch_tokens: int, *, optimizer: OptimizerKind, average: bool, recompute: bool,
    steps: int = 10,
) -> PlanCost:  # fmt: skip
    """Train a model of the plan for some steps of about `batch_tokens` random tokens, and let it write.

    On a CPU the steps are smaller.
    """
    batch = max(1, (batch_tokens if device.type == "cuda" else min(batch_tokens, CPU_TOKENS)) // plan.context)
    tokens = batch * plan.context
    options: TrainingOptions = {"optimizer": optimizer, "average": average, "recompute": recompute}
    check_memory(plan, tokens, batch, memory_of(device), **options)
    step = TrainingStep(
        plan, device, recompute=recompute, average=AVERAGE if average else 0.0,
        optimizer=OptimizerConfig(kind=optimizer),
    )  # fmt: skip
    found = measure("", step, plan, device, Timing(batch, steps, warmup=3))
    del step
    rate = share = None
    if plan.classes is None and plan.context > 1:
        prompt = min(PROMPT, plan.context // 2)
        rate, share = our_rate(plan, device, prompt=prompt, tokens=min(WRITTEN, plan.context - prompt))
    return PlanCost(
        device=describe_device(device), batch=batch, milliseconds=found.milliseconds,
        tokens_per_second=found.tokens_per_second, mfu=found.mfu,
        peak_bytes=None if found.peak_gib is None else round(found.peak_gib * GIB), decoding=rate, limit_share=share,
    )  # fmt: skip


def plan_cost_text(plan: Plan, cost: PlanCost, estimate: int) -> str:
    """Measured numbers in words, beside an estimate of memory in bytes."""
    mfu = "" if cost.mfu is None else f", MFU {cost.mfu:.2f}"
    lines = [
        f"measured on {cost.device}: {cost.milliseconds:.1f} ms a step of {cost.batch} x {plan.context} tokens, "
        f"{cost.tokens_per_second:,.0f} tokens/s{mfu}"
    ]
    if cost.peak_bytes is not None:
        lines.append(f"  memory {cost.peak_bytes / GIB:.1f} GiB, estimated {estimate / GIB:.1f}")
    if cost.decoding is not None:
        share = "" if cost.limit_share is None else f", {cost.limit_share:.0%} of what reading memory allows"
        lines.append(f"  writes {cost.decoding:,.0f} tokens/s, one text at a time{share}")
    return "\n".join(lines)
