"""Time and memory of one training step, ours beside others, measured in one run."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._inductor.utils import fresh_cache

from meristem.bench.peers import nanogpt_model
from meristem.config import OptimizerConfig
from meristem.devices import autocast, compute_dtype, describe_device, peak_flops
from meristem.limits import check_integer
from meristem.model import Classifier, Decoder
from meristem.model.transformer import Regions
from meristem.plan import Plan
from meristem.training.averaging import update_average
from meristem.training.gradients import Gradients
from meristem.training.optimizer import guarded_update, make_optimizer

Step = Callable[[Tensor, Tensor], Tensor]  # tokens (B, T) and targets in, loss out; includes the optimizer's update


@dataclass(frozen=True)
class StepResult:
    """Medians over the timed steps of one arm."""

    name: str
    milliseconds: float
    spread: float  # distance between the quartiles, in milliseconds
    tokens_per_second: float
    peak_gib: float | None  # memory held by the allocator, recorded graphs included
    mfu: float | None
    attention: list[str] | None
    steps: int
    compile_seconds: float
    last_loss: float


class TrainingStep:
    """A model of the plan with the step that `meristem train` runs, without its bookkeeping."""

    def __init__(
        self, plan: Plan, device: torch.device, *, attention: str = "auto", compile: bool, recompute: bool = False,
        average: float = 0.0,
    ) -> None:  # fmt: skip
        self.average = average
        self.model = (Decoder(plan) if plan.classes is None else Classifier(plan)).to(device)
        self.kernels = self.model.use_attention(device, compute_dtype(device), attention)
        self.config = OptimizerConfig()
        self.optimizer = make_optimizer(self.model, self.config)
        self.gradients = Gradients(self.model, compile=compile, device=device, recompute=recompute)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.gradients(tokens[None], targets[None])
        _, skipped = guarded_update(self.optimizer, self.config.rate, loss, self.config.clip)
        if self.average:
            update_average(self.optimizer, self.average, skipped)
        return loss

    def changed(self, model: nn.Module | None = None) -> None:
        """Take up a change of the model; if one is given its parameters are new too, as after a cool-down in a run."""
        if self.gradients.graph is not None:
            self.gradients.graph.stood = self.gradients.graph.REST
        self.gradients.restructured(model)


def meristem_step(plan: Plan, device: torch.device, *, attention: str, compile: bool) -> tuple[Step, list[str]]:
    """Our step, and the attention kernel of each layer."""
    step = TrainingStep(plan, device, attention=attention, compile=compile)
    return step, step.kernels


def nanogpt_step(folder: Path, plan: Plan, device: torch.device, *, compile: bool) -> Step:
    """nanoGPT's model and optimizer step, as its train.py does them, from a checkout of karpathy/nanoGPT."""
    model = nanogpt_model(folder, plan).to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    forward = torch.compile(model) if compile else model

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with autocast(device):
            _, loss = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(
    name: str, step: Step, plan: Plan, device: torch.device, *, batch: int, steps: int, warmup: int,
    attention: list[str] | None = None,
) -> StepResult:  # fmt: skip
    """Time `steps` steps on fresh random tokens after `warmup` untimed ones (CUDA events on a GPU)."""
    batches = random_batches(plan, device, batch)
    begin = time.perf_counter()
    step(*next(batches))
    wait(device)
    compile_seconds = time.perf_counter() - begin
    for _ in range(warmup):
        step(*next(batches))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what compilation left behind is not part of a step
        torch.cuda.reset_peak_memory_stats(device)
    times, loss = step_times(step, batches, steps, device)
    low, median, high = statistics.quantiles(times, n=4)
    rate = batch * plan.context / median * 1e3
    peak = peak_flops(device)
    return StepResult(
        name=name,
        milliseconds=median,
        spread=high - low,
        tokens_per_second=rate,
        peak_gib=torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
        mfu=None if peak is None else rate * plan.cost.training.full / peak,
        attention=attention,
        steps=steps,
        compile_seconds=compile_seconds,
        last_loss=float(loss),
    )


def step_times(
    step: Step, batches: Iterator[tuple[Tensor, Tensor]], steps: int, device: torch.device
) -> tuple[list[float], Tensor]:
    """Milliseconds of each of `steps` steps, and the last loss."""
    return (_cuda_times if device.type == "cuda" else _cpu_times)(step, batches, steps)


def _cuda_times(step: Step, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> tuple[list[float], Tensor]:
    """Milliseconds between consecutive steps. The host is not stopped in between, just as in training."""
    prepared = [next(batches) for _ in range(steps)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark, (tokens, targets) in zip(marks[1:], prepared, strict=True):
        loss = step(tokens, targets)
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)], loss


def _cpu_times(step: Step, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> tuple[list[float], Tensor]:
    times = []
    for tokens, targets in itertools.islice(batches, steps):
        start = time.perf_counter()
        loss = step(tokens, targets)
        times.append(1e3 * (time.perf_counter() - start))
    return times, loss


def step_seconds(step: Step, batches: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> float:
    """How long one step holds up the host, until the device is done."""
    begin = time.perf_counter()
    step(*next(batches))
    wait(device)
    return time.perf_counter() - begin


@contextmanager
def cold_compiler() -> Iterator[None]:
    """Nothing is compiled yet, neither in memory nor on disk, as in the first run on a machine."""
    torch._dynamo.reset()
    try:
        with fresh_cache():
            yield
    finally:
        torch._dynamo.reset()  # what was compiled lay in the folder that is gone now


def block_graphs(compile: bool) -> int:
    """How many graphs of blocks there are."""
    return len(_debug_get_cache_entry_list(Regions().block.__code__)) if compile else 0


def check_minimums(*limits: tuple[str, int, int]) -> None:
    """Refuse the first (field, value, minimum) whose value is too small, or larger than anything can be."""
    for field, value, minimum in limits:
        check_integer(field, value, minimum)


def compare_steps(
    plans: Mapping[str, Plan],
    device: torch.device,
    *,
    attention: Sequence[str],
    nanogpt: Path | None,
    batch: int,
    steps: int,
    warmup: int,
    rounds: int,
    compile: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure every plan with every attention choice, and nanoGPT first if it is there; ready for JSON.

    Arms are measured in turn, `rounds` times over, so that a slow drift of the machine falls on all of them.
    """
    check_minimums(("batch", batch, 1), ("steps", steps, 2), ("warmup", warmup, 0), ("rounds", rounds, 1))
    arms: list[tuple[str, Plan, Callable[[], tuple[Step, list[str] | None]]]] = []
    first = next(iter(plans.values()))
    if nanogpt is not None:
        folder, base = (
            nanogpt,
            Plan.from_heads(
                [max(first.heads)] * len(first.layers),
                width=first.width,
                vocabulary=first.vocabulary,
                context=first.context,
            ),
        )
        arms.append(("nanoGPT", base, lambda: (nanogpt_step(folder, base, device, compile=compile), None)))
    for name, plan in plans.items():
        for wanted in attention:
            label = name if len(attention) == 1 else f"{name}, {wanted}"
            arms.append((label, plan, partial(meristem_step, plan, device, attention=wanted, compile=compile)))
    results = []
    for _ in range(rounds):
        for name, plan, build in arms:
            torch._dynamo.reset()
            step, kernels = build()
            result = measure(name, step, plan, device, batch=batch, steps=steps, warmup=warmup, attention=kernels)
            del step
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            say(_line(result))
            results.append(result)
    return {
        "device": describe_device(device),
        "torch": torch.__version__,
        "settings": {"batch": batch, "context": first.context, "steps": steps, "warmup": warmup, "compile": compile},
        "plans": {name: list(plan.heads) for name, plan in plans.items()},
        "results": [asdict(result) for result in results],
    }


def results_text(report: dict[str, Any]) -> str:
    """A table of the medians over rounds, with ratios to the first arm."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for result in report["results"]:
        arms.setdefault(result["name"], []).append(result)
    lines = [
        f"{report['device']}, torch {report['torch']}",
        "arm                   ms/step   tokens/s   ratio   peak GiB  ratio",
    ]
    base: tuple[float, float | None] | None = None
    for name, rounds in arms.items():
        ms = statistics.median(r["milliseconds"] for r in rounds)
        rate = statistics.median(r["tokens_per_second"] for r in rounds)
        memory = rounds[0]["peak_gib"]
        base = base or (rate, memory)
        held = "       -      -" if memory is None or base[1] is None else f"{memory:8.2f}  {memory / base[1]:5.3f}"
        lines.append(f"{name:<20}  {ms:7.2f}  {rate:9,.0f}   {rate / base[0]:5.3f}   {held}")
    return "\n".join(lines)


def _line(result: StepResult) -> str:
    return (
        f"{result.name}: {result.milliseconds:.2f} ms (quartiles {result.spread:.2f} apart), "
        f"{result.tokens_per_second:,.0f} tokens/s, first step {result.compile_seconds:.1f} s"
    )


def random_batches(plan: Plan, device: torch.device, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    while True:
        window = torch.randint(1, plan.vocabulary, (batch, plan.context + 1), device=device, generator=generator)
        if plan.classes is None:
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
        else:
            yield window[:, :-1].contiguous(), window[:, -1] % plan.classes


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
