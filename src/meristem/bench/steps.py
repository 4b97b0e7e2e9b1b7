"""Training steps of several arms side by side: peers, our schedules, and the whole of `meristem train`."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meristem.bench.peers import NanoGPTStep, uniform_twin
from meristem.bench.step import StepResult, Timing, TrainingStep, check_minimums, measure
from meristem.bench.train_speed import measure_train
from meristem.devices import describe_device
from meristem.plan import Plan


class Size(NamedTuple):
    """A model of the Prism paper, and how many sequences a step of it has here."""

    layers: int
    width: int
    heads: int
    batch: int


SIZES = {"124m": Size(12, 768, 12, 32), "354m": Size(24, 1024, 16, 16), "757m": Size(24, 1536, 16, 8)}


def compare_steps(
    plans: Mapping[str, Plan],
    device: torch.device,
    *,
    attention: Sequence[str],
    nanogpt: Path | None,
    train: bool,
    timing: Timing,
    rounds: int,
    compile: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure every plan with every attention choice, and nanoGPT first if it is there; ready for JSON.

    With `train` the whole of `meristem train` is measured too, for each plan. Arms are measured in turn, `rounds` times
    over, so that a slow drift of the machine falls on all of them.
    """
    check_minimums(("rounds", rounds, 1))
    first = next(iter(plans.values()))
    arms: list[Callable[[], StepResult]] = []
    if nanogpt is not None:
        arms.append(partial(_nanogpt, nanogpt, uniform_twin(first), device, timing))
    for name, plan in plans.items():
        for wanted in attention:
            label = name if len(attention) == 1 else f"{name}, {wanted}"
            arms.append(partial(_ours, label, plan, device, wanted, compile, timing))
            if train:
                whole = partial(measure_train, attention=wanted, compile=compile)
                arms.append(partial(whole, f"train, {label}", plan, device, timing))
    results = []
    for _ in range(rounds):
        for arm in arms:
            torch._dynamo.reset()
            results.append(arm())
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            say(_line(results[-1]))
    return {
        "device": describe_device(device),
        "torch": torch.__version__,
        "settings": {**asdict(timing), "context": first.context, "compile": compile, "parameters": first.parameters},
        "plans": {name: list(plan.heads) for name, plan in plans.items()},
        "results": [asdict(result) for result in results],
    }


def _nanogpt(folder: Path, plan: Plan, device: torch.device, timing: Timing) -> StepResult:
    return measure("nanoGPT", NanoGPTStep(folder, plan, device), plan, device, timing)


def _ours(name: str, plan: Plan, device: torch.device, attention: str, compile: bool, timing: Timing) -> StepResult:
    step = TrainingStep(plan, device, attention=attention, compile=compile)
    return measure(name, step, plan, device, timing, step.kernels)


def results_text(report: dict[str, Any]) -> str:
    """A table of the medians over rounds, with ratios to the first arm."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for result in report["results"]:
        arms.setdefault(result["name"], []).append(result)
    settings = report["settings"]
    lines = [
        f"{report['device']}, torch {report['torch']}, {settings['parameters'] / 1e6:.0f}M parameters, "
        f"{settings['batch']} x {settings['context']} tokens",
        "arm                   ms/step   tokens/s   ratio   peak GiB  ratio",
    ]
    base: tuple[float, float | None] | None = None
    for name, rounds in arms.items():
        ms = statistics.median(r["milliseconds"] for r in rounds)
        rate = statistics.median(r["tokens_per_second"] for r in rounds)
        memory = None if rounds[0]["peak_gib"] is None else statistics.median(r["peak_gib"] for r in rounds)
        base = base or (rate, memory)
        held = "       -      -" if memory is None or base[1] is None else f"{memory:8.2f}  {memory / base[1]:5.3f}"
        lines.append(f"{name:<20}  {ms:7.2f}  {rate:9,.0f}   {rate / base[0]:5.3f}   {held}")
    return "\n".join(lines)


def _line(result: StepResult) -> str:
    return (
        f"{result.name}: {result.milliseconds:.2f} ms (quartiles {result.spread:.2f} apart), "
        f"{result.tokens_per_second:,.0f} tokens/s, first step {result.compile_seconds:.1f} s"
    )
