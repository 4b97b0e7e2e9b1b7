"""Time and memory of one training step, ours beside others, measured in one run."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meristem.config import OptimizerConfig
from meristem.devices import autocast, compute_dtype, keep_freed_memory, peak_flops
from meristem.limits import check_integer
from meristem.model import Classifier, Decoder
from meristem.plan import Plan
from meristem.training.averaging import update_average
from meristem.training.gradients import Gradients
from meristem.training.optimizer import guarded_update, make_optimizer

Step = Callable[[Tensor, Tensor], Tensor]  # tokens (B, T) and targets in, loss out; includes the optimizer's update


@dataclass(frozen=True)
class Timing:
    """How steps are timed: sequences of each, how many of them, and untimed ones before."""

    batch: int
    steps: int
    warmup: int

    def __post_init__(self) -> None:
        check_minimums(("batch", self.batch, 1), ("steps", self.steps, 2), ("warmup", self.warmup, 0))


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
    """A model of the plan with the step that `meristem train` runs, without its bookkeeping.

    The learning rate is the peak of the configuration, unless another `rate` is set before a step.
    """

    def __init__(
        self, plan: Plan, device: torch.device, *, attention: str = "auto", compile: bool = False,
        recompute: bool = False, average: float = 0.0, optimizer: OptimizerConfig | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.device, self.average, self.config = device, average, optimizer or OptimizerConfig()
        self.rate = self.config.rate
        keep_freed_memory(device)
        self.model = (Decoder(plan, seed) if plan.classes is None else Classifier(plan, seed)).to(device)
        self.kernels = self.model.use_attention(device, compute_dtype(device), attention)
        self.optimizer = make_optimizer(self.model, self.config)
        self.gradients = Gradients(self.model, device=device, compile=compile, recompute=recompute)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.gradients(tokens[None], targets[None])
        _, skipped = guarded_update(self.optimizer, self.rate, loss, self.config.clip)
        if self.average:
            update_average(self.optimizer, self.average, skipped)
        return loss

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of tokens (B, T)."""
        with autocast(self.device):
            loss = self.model(tokens, targets).loss
        assert loss is not None
        return loss

    def changed(self, model: nn.Module | None = None) -> None:
        """Take up a change of the model; if one is given its parameters are new too, as after a cool-down in a run."""
        if self.gradients.graph is not None:
            self.gradients.graph.stood = self.gradients.graph.REST
        self.gradients.restructured(model)


def measure(
    name: str, step: Step, plan: Plan, device: torch.device, timing: Timing, attention: list[str] | None = None
) -> StepResult:
    """Time steps on fresh random tokens, after the first one and the untimed ones (CUDA events on a GPU)."""
    batches = random_batches(plan, device, timing.batch)
    begin = time.perf_counter()
    step(*next(batches))
    wait(device)
    compile_seconds = time.perf_counter() - begin
    for _ in range(timing.warmup):
        step(*next(batches))
    forget_peak(device)
    times, loss = step_times(step, batches, timing.steps, device)
    low, median, high = statistics.quantiles(times, n=4)
    rate = timing.batch * plan.context / median * 1e3
    peak = peak_flops(device)
    return StepResult(
        name=name,
        milliseconds=median,
        spread=high - low,
        tokens_per_second=rate,
        peak_gib=peak_gib(device),
        mfu=None if peak is None else rate * plan.cost.training.full / peak,
        attention=attention,
        steps=timing.steps,
        compile_seconds=compile_seconds,
        last_loss=float(loss),
    )


def forget_peak(device: torch.device) -> None:
    """Let the memory at the most be counted from here on, without what first steps left behind."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """The most memory held by the allocator since then; not known of a CPU."""
    return torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None


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


def step_seconds(step: Step, batches: Iterator[tuple[Tensor, Tensor]], device: torch.device, count: int = 1) -> float:
    """How long some steps hold up the host, until the device is done."""
    begin = time.perf_counter()
    for _ in range(count):
        step(*next(batches))
    wait(device)
    return time.perf_counter() - begin


def pause_seconds(step: Step, batches: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> float:
    """What a change of the model costs: how much longer its next two updates take than the two after them.

    The first of them compiles what kernels are new, and the second is recorded.
    """
    with_change, without = (step_seconds(step, batches, device, 2) for _ in range(2))
    return with_change - without


@contextmanager
def cold_kernels() -> Iterator[None]:
    """No Triton kernel is on disk yet, as in the first run on a machine; what this process has used is in its memory.

    That is all that a plain training step compiles.
    """
    from torch._inductor.utils import fresh_cache  # it takes two seconds

    with fresh_cache():
        yield


def check_minimums(*limits: tuple[str, int, int]) -> None:
    """Refuse the first (field, value, minimum) whose value is too small, or larger than anything can be."""
    for field, value, minimum in limits:
        check_integer(field, value, minimum)


def random_batches(plan: Plan, device: torch.device, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    least = min(1, plan.vocabulary - 1)  # 0 is padding to a classifier
    while True:
        window = torch.randint(least, plan.vocabulary, (batch, plan.context + 1), device=device, generator=generator)
        if plan.classes is None:
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
        else:
            yield window[:, :-1].contiguous(), window[:, -1] % plan.classes


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
