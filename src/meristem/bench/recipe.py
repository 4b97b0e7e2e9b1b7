"""Time to a loss: whole trainings of peers and ours side by side, on the same tokens in the same order."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meristem.bench.contenders import Baseline, Contender, NanoGPT, Ours
from meristem.bench.peers import NANOGPT_RATE, uniform_twin
from meristem.bench.step import check_minimums, wait
from meristem.config import OptimizerConfig
from meristem.data import Sampler, TokenData, batch
from meristem.devices import describe_device
from meristem.errors import InputError
from meristem.plan import Plan
from meristem.training.held_out import held_out_windows

Build = Callable[[float, int], Contender]  # from the rate and the number of updates


@dataclass(frozen=True)
class Point:
    """A look at held-out data: after so many updates, that took so many seconds."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Training:
    """One training of an arm at one rate."""

    arm: str
    rate: float
    curve: list[Point]

    @property
    def final(self) -> Point:
        return self.curve[-1]


@dataclass(frozen=True)
class Conditions:
    """What all arms have in common: the tokens and their order, how many updates, and the looks at held-out data."""

    data: TokenData
    context: int
    device: torch.device
    steps: int
    batch_size: int
    looks: int
    windows: int  # held-out ones, of which whole batches are looked at
    seed: int

    def __post_init__(self) -> None:
        steps, size, windows = self.steps, self.batch_size, self.windows
        check_minimums(("steps", steps, 1), ("batch", size, 1), ("looks", self.looks, 1), ("windows", windows, 1))
        if windows < size:
            raise InputError("windows", windows, f"must be at least one batch, {size}")
        if (there := len(self.held_out)) < size:
            raise InputError("batch", size, f"must be at most the held-out windows, of which there are {there}")

    @property
    def held_out(self) -> Tensor:
        """Held-out windows (n, T + 1)."""
        return held_out_windows(self.data.split("held_out"), self.context, self.windows)


def trained(arm: str, rate: float, build: Build, alike: Conditions, say: Callable[[str], None]) -> Training:
    """Train an arm, and look at held-out data from time to time.

    The seconds are those of updates, but for the first, which compiles.
    """
    steps, batch_size, looks, device = alike.steps, alike.batch_size, alike.looks, alike.device
    torch.manual_seed(alike.seed)
    contender = build(rate, steps)
    stream = alike.data.split("train")
    sampler = Sampler(len(stream), alike.context, batch_size, alike.seed)
    held_out = alike.held_out
    marks = {round(steps * (look + 1) / looks) for look in range(looks)}
    curve, seconds, since = [], 0.0, time.perf_counter()
    for step in range(steps):
        tokens, targets = (_on_its_way(array, device) for array in batch(stream, sampler, step))
        contender.update(step, tokens, targets)
        if step == 0:
            wait(device)
            since = time.perf_counter()
        if step + 1 in marks:
            wait(device)
            seconds += time.perf_counter() - since
            curve.append(Point(step + 1, seconds, _held_out(contender, held_out, batch_size, device)))
            since = time.perf_counter()
    result = Training(arm, rate, curve)
    say(f"{arm}, rate {rate:g}: {result.final.loss:.4f} after {result.final.seconds:.1f} s")
    return result


def _on_its_way(array: NDArray[np.int64], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array).contiguous()
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _held_out(contender: Contender, windows: Tensor, batch_size: int, device: torch.device) -> float:
    """The mean loss of windows (n, T + 1), as many whole batches of them as there are."""
    whole = [part.to(device) for part in windows.split(batch_size) if len(part) == batch_size]
    return math.fsum(
        float(contender.loss(part[:, :-1].contiguous(), part[:, 1:].contiguous())) for part in whole
    ) / len(whole)


def seconds_to(curve: Sequence[Point], loss: float) -> float | None:
    """When a curve first reaches a loss, between two looks by a straight line; None if it does not."""
    before: Point | None = None
    for point in curve:
        if point.loss <= loss:
            if before is None:
                return point.seconds
            share = (before.loss - loss) / (before.loss - point.loss)
            return before.seconds + share * (point.seconds - before.seconds)
        before = point
    return None


@dataclass(frozen=True)
class Arm:
    """One way to train, and the rates that are tried."""

    name: str
    rates: tuple[float, ...]
    build: Build


def arms_of(
    plan: Plan, config: OptimizerConfig, device: torch.device, *, nanogpt: Path | None, baseline: Path | None,
    factors: Sequence[float],
) -> list[Arm]:  # fmt: skip
    """nanoGPT and the public baseline where there are checkouts of them, and ours, each around its own usual rate."""
    arms = []
    if nanogpt is not None:
        build = partial(NanoGPT, nanogpt, uniform_twin(plan), device=device)
        arms.append(Arm("nanoGPT", tuple(NANOGPT_RATE * factor for factor in factors), build))
    if baseline is not None:
        theirs = partial(Baseline, baseline, uniform_twin(plan), device=device)
        arms.append(Arm("baseline", tuple(factors), theirs))
    own = partial(_ours, plan, config, device=device)
    return [*arms, Arm("meristem", tuple(config.rate * factor for factor in factors), own)]


def _ours(plan: Plan, config: OptimizerConfig, rate: float, steps: int, *, device: torch.device) -> Contender:
    return Ours(plan, replace(config, lr=rate), steps, device)


def compare_recipes(
    arms: Sequence[Arm], plan: Plan, alike: Conditions, *, shares: Sequence[float], say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:  # fmt: skip
    """Train every arm at each of its rates with one seed, then at the best of them with the next seed; ready for JSON.

    Only the latter is compared. Ours is also trained for `shares` of the updates, each with a curve of that length, and
    the baseline for as many as it makes in the time of ours. What there is so far is given to `keep` after every one.
    """
    steps, device = alike.steps, alike.device
    check_minimums(("steps", steps, 2))
    for share in shares:
        if not 1 <= round(share * steps) <= steps:
            raise InputError("shares", share, f"must be at most 1, and leave at least one update of {steps}")
    report: dict[str, Any] = {
        "device": describe_device(device), "torch": torch.__version__,
        "settings": {
            "steps": steps, "batch_size": alike.batch_size, "context": alike.context, "seed": alike.seed,
            "windows": len(alike.held_out) // alike.batch_size * alike.batch_size,
            "parameters": plan.parameters, "heads": list(plan.heads),
        },
        "tried": [], "compared": [],
    }  # fmt: skip

    def run(part: str, arm: Arm, rate: float, count: int, name: str | None = None) -> Training:
        torch._dynamo.reset()
        seed = alike.seed if part == "tried" else alike.seed + 1
        result = trained(name or arm.name, rate, arm.build, replace(alike, steps=count, seed=seed), say)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        report[part].append(asdict(result))
        keep(report)
        return result

    best = [min((run("tried", arm, rate, steps) for rate in arm.rates), key=_end).rate for arm in arms]
    whole = [run("compared", arm, rate, steps) for arm, rate in zip(arms, best, strict=True)]
    for share in shares:
        run("compared", arms[-1], best[-1], round(share * steps), f"meristem, {share:g} of the updates")
    for arm, rate, training in zip(arms, best, whole, strict=True):
        if arm.name == "baseline":
            count = max(1, min(steps, round(steps * whole[-1].final.seconds / training.final.seconds)))
            run("compared", arm, rate, count, "baseline, in the time of ours")
    return report


def _end(training: Training) -> float:
    """The loss at the end, for comparisons; one that is not a number is worse than all others."""
    return math.inf if math.isnan(training.final.loss) else training.final.loss


def recipes_text(report: dict[str, Any]) -> str:
    """Loss and seconds of every arm, and the seconds to the loss that the first one ends with."""
    settings = report["settings"]
    tokens = settings["steps"] * settings["batch_size"] * settings["context"]
    lines = [
        f"{report['device']}, torch {report['torch']}, {settings['parameters'] / 1e6:.0f}M parameters, "
        f"{tokens / 1e6:.1f}M tokens",
        "arm                                rate   updates   seconds    loss   to the first arm's loss",
    ]
    first = report["compared"][0]["curve"][-1]
    for training in report["compared"]:
        curve = [Point(**point) for point in training["curve"]]
        reached = seconds_to(curve, first["loss"])
        said = "not reached" if reached is None else f"{reached:7.1f} s, {reached / first['seconds']:.2f}"
        last = curve[-1]
        numbers = f"{training['rate']:7.2g}  {last.step:7,}  {last.seconds:8.1f}  {last.loss:6.3f}"
        lines.append(f"{training['arm']:<32} {numbers}   {said}")
    return "\n".join(lines)
