"""What growth in depth costs: the step before and after a stack, and how long the stack holds up training."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from meristem.bench.step import (
    TrainingStep,
    check_minimums,
    cold_kernels,
    pause_seconds,
    random_batches,
    step_times,
    wait,
)
from meristem.devices import describe_device
from meristem.growth import Grower, Stack, prepared
from meristem.plan import Plan


@cold_kernels()
def measure_stack(plan: Plan, device: torch.device, *, start_layers: int, batch: int, steps: int) -> dict[str, Any]:
    """A model grows from `start_layers` to all layers of the plan at once; ready for JSON.

    The pause is the time of the stack, and what the updates after it take more than usual ones of the grown model.
    """
    check_minimums(("batch", batch, 1), ("steps", steps, 2))
    policy = Stack(total_steps=4 * steps, start_layers=start_layers, at=(float(steps),))
    step = TrainingStep(prepared(plan, [policy]), device)
    grower = Grower(step.model, step.optimizer, [policy])
    batches = random_batches(plan, device, batch)
    step(*next(batches))  # compiles kernels, and is recorded
    few = statistics.median(step_times(step, batches, steps, device)[0])
    tokens, targets = next(batches)
    for _ in range(steps - 1):
        grower.step(tokens, targets)
    wait(device)
    begin = time.perf_counter()
    grower.step(tokens, targets)
    step.changed(step.model)
    wait(device)
    stacked = time.perf_counter() - begin
    pause = stacked + pause_seconds(step, batches, device)
    all_layers = statistics.median(step_times(step, batches, steps, device)[0])
    return {
        "device": describe_device(device), "torch": torch.__version__, "batch": batch,
        "layers": [start_layers, len(step.model.plan.layers)], "milliseconds": [few, all_layers],
        "stack_seconds": stacked, "pause_seconds": pause,
    }  # fmt: skip


def stack_text(report: dict[str, Any]) -> str:
    """The results in three lines."""
    few, many = report["layers"]
    before, after = report["milliseconds"]
    return (
        f"{report['device']}, torch {report['torch']}\n"
        f"{few} blocks {before:.2f} ms a step, {many} blocks {after:.2f} ms ({before / after:.2f} of the time before)\n"
        f"the stack holds up training for {report['pause_seconds']:.2f} s, of which copies take "
        f"{report['stack_seconds']:.3f} s"
    )
