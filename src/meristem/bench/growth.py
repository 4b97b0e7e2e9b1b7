"""What growth costs: step time with loops beside the step without, pauses at births, and the entropy probe."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from meristem.bench.step import Step, event_times, random_batches, wait
from meristem.errors import InputError
from meristem.gauges import EntropyGauge, read_heads
from meristem.growth import BlockLoop, LoopHeads, Sgt
from meristem.growth.grower import SEQUENCES
from meristem.growth.sgt import PROBED
from meristem.model import Decoder
from meristem.model.decoder import Regions
from meristem.plan import Plan
from meristem.training.devices import autocast, compute_dtype, describe_device
from meristem.training.gradients import Gradients
from meristem.training.optimizer import OptimizerConfig, guarded_update, make_optimizer


@dataclass
class Arm:
    """A model with its optimizer, ready to train, and the times of its steps in milliseconds, round by round."""

    name: str
    model: Decoder
    gradients: Gradients
    step: Step
    rounds: list[float]


def build_arm(name: str, plan: Plan, device: torch.device, *, compile: bool) -> Arm:
    """A model of the plan with the step that `meristem train` runs."""
    model = Decoder(plan).to(device)
    model.use_attention(device, compute_dtype(device))
    config = OptimizerConfig()
    optimizer = make_optimizer(model, config)
    gradients = Gradients(model, compile=compile, device=device)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = gradients(tokens[None], labels[None])
        guarded_update(optimizer, config.lr, loss, config.clip)
        return loss

    return Arm(name, model, gradients, step, [])


def grown_plans(plan: Plan, layers: tuple[int, ...], heads: tuple[int, ...], passes: int) -> dict[str, Plan]:
    """The plan itself, after growth with 1 to `passes` passes, and with the same layers' blocks run twice."""
    plans = {"vanilla": plan}
    for k in range(1, passes + 1):
        policy = Sgt(total_steps=1000, passes=k, heads_per_layer=len(heads))
        plans[f"SGT K={k}"] = policy.looped(plan, dict.fromkeys(layers, heads))
    plans[f"{len(layers)} blocks looped"] = BlockLoop(layers).prepare(plan)
    return plans


def compare_growth(
    plan: Plan, device: torch.device, *, layers: tuple[int, ...], heads: tuple[int, ...], passes: int, batch: int,
    steps: int, rounds: int, compile: bool, say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Everything that growth costs, measured in one run; ready for JSON.

    All models are held at once and timed in turn, `rounds` times `steps` steps each, so that each round gives a ratio
    between arms that were measured within seconds of each other.
    """
    for field, value, minimum in (
        ("batch", batch, 1),
        ("steps", steps, 2),
        ("rounds", rounds, 2),
        ("passes", passes, 1),
    ):
        if value < minimum:
            raise InputError(field, value, f"must be at least {minimum}")
    plans = grown_plans(plan, layers, heads, passes)
    arms = {name: build_arm(name, arm_plan, device, compile=compile) for name, arm_plan in plans.items()}
    batches = random_batches(plan, device, batch)
    for arm in arms.values():
        begin = time.perf_counter()
        arm.step(*next(batches))
        wait(device)
        say(f"{arm.name}: first step {time.perf_counter() - begin:.1f} s")
    for number in range(rounds):
        turn = number % len(arms)  # each arm comes first in turn
        for arm in (*[*arms.values()][turn:], *[*arms.values()][:turn]):
            for _ in range(2):
                arm.step(*next(batches))
            times, _ = event_times(arm.step, batches, steps, device)
            arm.rounds.append(statistics.median(times))
        say(f"round {number + 1}: " + ", ".join(f"{arm.name} {arm.rounds[-1]:.2f} ms" for arm in arms.values()))
    results = _overheads(plans, {name: arm.rounds for name, arm in arms.items()})
    step_ms = statistics.median(arms["vanilla"].rounds)
    arms.clear()
    return {
        "device": describe_device(device),
        "torch": torch.__version__,
        "settings": {
            "batch": batch, "context": plan.context, "layers": list(layers), "heads": list(heads), "steps": steps,
            "rounds": rounds, "compile": compile,
        },
        "arms": results,
        "births": measure_births(plan, device, layers, heads, passes, batch=batch, compile=compile),
        "probe": measure_probe(plan, device, batch=batch, step_ms=step_ms),
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


def measure_births(
    plan: Plan, device: torch.device, layers: tuple[int, ...], heads: tuple[int, ...], passes: int, *, batch: int,
    compile: bool,
) -> dict[str, Any]:  # fmt: skip
    """A scripted growth, birth by birth: how long each holds up training, and how many block graphs there are."""
    torch._dynamo.reset()
    policy = Sgt(total_steps=1000, passes=passes, heads_per_layer=len(heads))
    arm = build_arm("growing", policy.prepare(plan), device, compile=compile)
    batches = random_batches(plan, device, batch)

    def timed() -> float:
        begin = time.perf_counter()
        arm.step(*next(batches))
        wait(device)
        return time.perf_counter() - begin

    first = timed()
    timed()
    pauses = []
    for layer in layers:
        for number in range(1, passes + 1):
            arm.model.restructure(LoopHeads(layer, heads, number).apply(arm.model.plan))
            arm.gradients.restructured()
            pause = timed()
            pauses.append({"layer": layer, "passes": number, "seconds": pause - timed()})
    graphs = len(_debug_get_cache_entry_list(Regions().block.__code__)) if compile else 0
    return {
        "first_step_seconds": first, "pauses": pauses, "total_seconds": sum(p["seconds"] for p in pauses),
        "block_graphs": graphs, "allowed_block_graphs": passes + 2,
    }  # fmt: skip


def measure_probe(plan: Plan, device: torch.device, *, batch: int, step_ms: float, repeats: int = 10) -> dict[str, Any]:
    """Time of one entropy measurement, and its share of a run with the default schedule of K = 1 and K = 3."""
    model = Decoder(plan).to(device)
    model.use_attention(device, compute_dtype(device))
    tokens = next(random_batches(plan, device, min(batch, SEQUENCES)))[0]
    times = []
    for _ in range(repeats + 2):
        wait(device)
        begin = time.perf_counter()
        with autocast(device):
            read_heads(model, tokens, EntropyGauge())
        wait(device)
        times.append(1e3 * (time.perf_counter() - begin))
    milliseconds = statistics.median(times[2:])
    shares = {}
    for passes in (1, 3):
        policy = Sgt(total_steps=5000, passes=passes)
        decisions = policy.max_layers * passes + 1
        shares[f"K={passes}"] = PROBED * decisions * milliseconds / (policy.total_steps * step_ms)
    return {"milliseconds": milliseconds, "share_of_5000_steps": shares}


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
        f"{births['first_step_seconds']:.1f} s; {births['block_graphs']} block graphs "
        f"(at most {births['allowed_block_graphs']})",
        f"entropy probe: {probe['milliseconds']:.1f} ms; of a run of 5000 steps {shares}",
    ]
    return "\n".join(lines)
