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
        parts = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            at = start + offsets
            # Kept in the L2 cache for the second reading below.
            x = tl.load(logits + at, mask=at < columns, other=-float("inf"), eviction_policy="evict_last").to(
                tl.float32
            )
            new_top = tl.maximum(top, tl.max(x))
            parts = parts * tl.exp(top - new_top) + tl.exp(x - new_top)
            top = new_top
        log_sum = top + tl.log(tl.sum(parts))
        factor = tl.load(scale)
        for start in range(0, columns, BLOCK):
            at = start + offsets
            x = tl.load(logits + at, mask=at < columns, other=-float("inf"), eviction_policy="evict_first").to(
                tl.float32
            )
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


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    source, result, cos, sin, total, length, positions,
    source_batch, source_token, source_head, result_token,
    PAIRS: tl.constexpr, HALF: tl.constexpr, SIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One element per pair of coordinates (i, i + HALF) of a head, PAIRS of them per token of the source. Indices
    # within a program are 32-bit: 64-bit divisions would cost more than the memory traffic.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    token, pair = at // PAIRS, at % PAIRS
    head, i = pair // HALF, pair % HALF
    batch, t = token // length, token % length
    x_at = source + batch.to(tl.int64) * source_batch + t * source_token + head * source_head + i
    x = tl.load(x_at, mask=inside, other=0.0)
    y = tl.load(x_at + HALF, mask=inside, other=0.0)
    if SIGN != 0:
        row = (token % positions) * (2 * HALF) + i
        c = tl.load(cos + row, mask=inside, other=0.0)
        s = tl.load(sin + row + HALF, mask=inside, other=0.0) * SIGN
        x, y = x.to(tl.float32), y.to(tl.float32)
        x, y = x * c - y * s, y * c + x * s
    out = result + token.to(tl.int64) * result_token + head * (2 * HALF) + i
    kind = result.dtype.element_ty
    tl.store(out, x.to(kind), mask=inside)
    tl.store(out + HALF, y.to(kind), mask=inside)


def _turn_into(result: Tensor, source: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
    """Write source (B, T, heads, dim), turned by `sign` times its angles, into some heads of a packed result."""
    if source.stride(-1) != 1:
        source = source.contiguous()
    _, length, heads, dim = source.shape
    total = source.numel() // 2
    assert total < 2**31
    _turn[(triton.cdiv(total, 1024),)](
        source, result, cos, sin, total, length, cos.numel() // dim, *source.stride()[:3], result.stride(1),
        PAIRS=heads * dim // 2, HALF=dim // 2, SIGN=sign, BLOCK=1024, num_warps=4,
    )  # fmt: skip


def turn_heads_kernel(packed: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    packed, cos, sin = packed.contiguous(), cos.contiguous(), sin.contiguous()
    result = torch.empty_like(packed)
    _turn_into(result, packed[:, :, :turned], cos, sin, 1)
    _turn_into(result[:, :, turned:], packed[:, :, turned:], cos, sin, 0)
    return result


def turn_heads_backward_kernel(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, heads, dim = dq.shape
    kv_heads = dk.shape[2]
    cos, sin = cos.contiguous(), sin.contiguous()
    result = dq.new_empty((batch, length, heads + 2 * kv_heads, dim))
    _turn_into(result, dq, cos, sin, -1)
    _turn_into(result[:, :, heads:], dk, cos, sin, -1)
    _turn_into(result[:, :, heads + kv_heads :], dv, cos, sin, 0)
    return result
