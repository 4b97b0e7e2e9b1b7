"""The CUDA forms of the parts of Muon that are no matrix products: each reads and writes everything once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _momentum(gradients, momenta, directions, found_inf, grad_scale, beta, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    skipped = tl.load(found_inf) > 0
    gradient = tl.load(gradients + at, mask=inside) / tl.load(grad_scale)
    gradient = tl.where(skipped, 0.0, gradient)
    old = tl.load(momenta + at, mask=inside)
    new = tl.where(skipped, old, old + (1 - beta) * (gradient - old))
    tl.store(momenta + at, new, mask=inside)
    direction = gradient + beta * (new - gradient)
    tl.store(directions + at, direction.to(directions.dtype.element_ty), mask=inside)


@triton.jit
def _update(parameters, updates, rate, decay, scale, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    taken = tl.load(rate)
    update = tl.load(updates + at, mask=inside).to(tl.float32)
    old = tl.load(parameters + at, mask=inside)
    tl.store(parameters + at, old * (1 - taken * decay) - taken * scale * update, mask=inside)


def momentum_kernel_(
    directions: Tensor, gradients: Tensor, momenta: Tensor, found_inf: Tensor, grad_scale: Tensor, beta: float
) -> None:
    assert directions.is_contiguous()
    assert momenta.is_contiguous()
    size = gradients.numel()
    _momentum[(triton.cdiv(size, BLOCK),)](
        gradients.contiguous(), momenta, directions, found_inf, grad_scale, beta, size, BLOCK=BLOCK, num_warps=8
    )


def update_kernel_(parameters: Tensor, updates: Tensor, rate: Tensor, decay: float, scale: float) -> None:
    assert parameters.is_contiguous()
    assert updates.is_contiguous()
    size = parameters.numel()
    _update[(triton.cdiv(size, BLOCK),)](parameters, updates, rate, decay, scale, size, BLOCK=BLOCK, num_warps=8)
