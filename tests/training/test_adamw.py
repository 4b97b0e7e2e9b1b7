"""AdamW in one kernel, against torch's own."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from meristem.training.adamw import AdamW
from model.helpers import needs_gpu
from training.helpers import CPU

SHAPES = [(7,), (33, 65), (1024, 3), (1, 1), (130, 1030)]
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters(device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]


def give_gradients(weights: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight)


def groups(weights: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": weights[1:], "weight_decay": 0.1}, {"params": weights[:1], "weight_decay": 0.0}]


def check_alike(device: torch.device, limit: float) -> None:
    """Ten updates, one of them skipped, with gradients to be divided, a new parameter and a state from elsewhere."""
    mine, theirs = parameters(device), parameters(device)
    ours = AdamW(groups(mine), **OPTIONS)  # type: ignore[arg-type]
    other = torch.optim.AdamW(groups(theirs), **OPTIONS, fused=True)  # type: ignore[arg-type]
    for step in range(10):
        for optimizer, weights in ((ours, mine), (other, theirs)):
            give_gradients(weights, step)
            if step < 3:
                weights[2].grad = None  # its count of updates is behind the others' from now on
            optimizer.found_inf = torch.tensor(float(step == 4), device=device)  # type: ignore[attr-defined]
            optimizer.grad_scale = torch.tensor(1.0 + step, device=device)  # type: ignore[attr-defined]
            optimizer.step()
        if step == 6:
            ours.load_state_dict(deepcopy(other.state_dict()))
    for weight, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(weight, expected, rtol=limit, atol=limit)
        state: dict[str, Tensor] = ours.state[weight]
        for key, value in other.state[expected].items():
            torch.testing.assert_close(state[key], value, rtol=limit, atol=limit)


def test_on_a_cpu_it_is_torchs() -> None:
    check_alike(CPU, 0.0)


def check_closures_and_copies(device: torch.device) -> None:
    """A closure makes the first gradients; a copy goes on by itself; without gradients nothing is done."""
    weights = parameters(device)
    optimizer = AdamW(groups(weights), **OPTIONS)  # type: ignore[arg-type]
    optimizer.step()
    assert not optimizer.state

    def closure() -> float:
        give_gradients(weights, 0)
        return 2.5

    before = weights[0].detach().clone()
    assert optimizer.step(closure) == 2.5
    assert not torch.equal(weights[0], before)
    own, twin = deepcopy((weights, optimizer))
    for copied, trained in ((weights, optimizer), (own, twin)):
        give_gradients(copied, 1)
        trained.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, own, strict=True))


def check_hooks(device: torch.device) -> None:
    """Hooks of a step run once for each, also where torch has put them around its own class before."""
    torch.optim.AdamW(parameters(device), **OPTIONS, fused=True)  # type: ignore[arg-type]
    weights, ran = parameters(device), []
    optimizer = AdamW(groups(weights), **OPTIONS)  # type: ignore[arg-type]
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    for step in range(2):
        give_gradients(weights, step)
        optimizer.step()
    assert ran == ["before", "after"] * 2


def test_hooks_run_once() -> None:
    check_hooks(CPU)


@needs_gpu
@pytest.mark.gpu
def test_hooks_run_once_on_the_gpu() -> None:
    check_hooks(torch.device("cuda"))


def test_closures_and_copies() -> None:
    check_closures_and_copies(CPU)


@needs_gpu
@pytest.mark.gpu
def test_closures_and_copies_on_the_gpu() -> None:
    check_closures_and_copies(torch.device("cuda"))


@needs_gpu
@pytest.mark.gpu
def test_the_kernel_updates_as_torch_does() -> None:
    check_alike(torch.device("cuda"), 1e-5)


@needs_gpu
@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    weights = parameters(torch.device("cuda"))
    optimizer = AdamW(groups(weights), **OPTIONS)  # type: ignore[arg-type]
    optimizer.found_inf = optimizer.grad_scale = torch.ones((), device="cuda")  # type: ignore[attr-defined]
    give_gradients(weights, 0)
    optimizer.step()  # compiles, and looks up where everything lies
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.gpu
def test_parameters_that_are_no_plain_float32_are_torchs() -> None:
    weights = [nn.Parameter(torch.randn(4, 4, dtype=torch.float64, device="cuda"))]
    optimizer = AdamW([{"params": weights}], **OPTIONS)  # type: ignore[arg-type]
    give_gradients(weights, 0)
    before = weights[0].detach().clone()
    optimizer.step()
    assert not torch.equal(weights[0], before)
