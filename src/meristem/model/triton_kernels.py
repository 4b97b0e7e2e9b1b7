"""The CUDA forms of the operators in `fused.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _cross_entropy(logits, targets, losses, scale, columns, BLOCK: tl.constexpr, IGNORE: tl.constexpr):  # type: ignore[no-untyped-def]
    # One program per row. The row is read twice, the second time from the L2 cache, and overwritten in place.
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    target = tl.load(targets + row)
    offsets = tl.arange(0, BLOCK)
    if target == IGNORE:
        for start in range(0, columns, BLOCK):
            at = start + offsets
            tl.store(logits + at, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=at < columns)
        tl.store(losses + row, 0.0)
    else:
        # Loaded before the first reduction, whose barrier keeps it ahead of the stores below.
        target_logit = tl.load(logits + target).to(tl.float32)
        top = -float("inf")
        total = 0.0
        for start in range(0, columns, BLOCK):
            at = start + offsets
            x = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(x))
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top))
            top = new_top
        log_sum = top + tl.log(total)
        factor = tl.load(scale)
        for start in range(0, columns, BLOCK):
            at = start + offsets
            x = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
            gradient = (tl.exp(x - log_sum) - (at == target).to(tl.float32)) * factor
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < columns)
        tl.store(losses + row, log_sum - target_logit)


def cross_entropy_kernel_(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    assert logits.is_contiguous()
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _cross_entropy[(logits.shape[0],)](
        logits, targets.contiguous(), losses, scale, logits.shape[1], BLOCK=4096, IGNORE=-100, num_warps=8
    )
    return losses


@triton.jit
def _swiglu_backward(gate_up, grad, gate_up_grad, hidden, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    active = gate * sigmoid
    kind = gate_up.dtype.element_ty
    tl.store(hidden + row * width + at, (active * up).to(kind), mask=inside)
    gate_grad = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(gate_up_grad + row * 2 * width + at, gate_grad.to(kind), mask=inside)
    tl.store(gate_up_grad + row * 2 * width + width + at, (dy * active).to(kind), mask=inside)


def swiglu_backward_kernel(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    gate_up_grad, hidden = torch.empty_like(gate_up), torch.empty_like(grad)
    rows, width = grad.shape
    block = min(1024, triton.next_power_of_2(width))
    _swiglu_backward[(rows, triton.cdiv(width, block))](
        gate_up, grad, gate_up_grad, hidden, width, BLOCK=block, num_warps=4
    )
    return gate_up_grad, hidden
