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
            x = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(x))
            parts = parts * tl.exp(top - new_top) + tl.exp(x - new_top)
            top = new_top
        log_sum = top + tl.log(tl.sum(parts))
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


@triton.jit
def _turn_heads(packed, cos, sin, result, total, positions, TURNED, PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # One element per pair of coordinates (i, i + HALF) of a head; PAIRS of them per token.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    token, pair = at // PAIRS, at % PAIRS
    head, i = pair // HALF, pair % HALF
    first = token * (2 * PAIRS) + head * (2 * HALF) + i
    x = tl.load(packed + first, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(packed + first + HALF, mask=inside, other=0.0).to(tl.float32)
    row = (token % positions) * (2 * HALF) + i
    turn = inside & (head < TURNED)
    c = tl.load(cos + row, mask=turn, other=1.0)
    s = tl.load(sin + row + HALF, mask=turn, other=0.0)
    kind = result.dtype.element_ty
    tl.store(result + first, (x * c - y * s).to(kind), mask=inside)
    tl.store(result + first + HALF, (y * c + x * s).to(kind), mask=inside)


def turn_heads_kernel(packed: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    packed = packed.contiguous()
    result = torch.empty_like(packed)
    _, _, heads, dim = packed.shape
    total = packed.numel() // 2
    _turn_heads[(triton.cdiv(total, 1024),)](
        packed, cos.contiguous(), sin.contiguous(), result, total, cos.numel() // dim, turned,
        PAIRS=heads * dim // 2, HALF=dim // 2, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return result


@triton.jit
def _turn_heads_backward(  # type: ignore[no-untyped-def]
    dq, dk, dv, cos, sin, result, total, length, positions,
    qb, qt, qh, kb, kt, kh, vb, vt, vh,
    HEADS, KV_HEADS, PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    token, pair = at // PAIRS, at % PAIRS
    head, i = pair // HALF, pair % HALF
    b, t = token // length, token % length
    is_q = inside & (head < HEADS)
    is_k = inside & (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = inside & (head >= HEADS + KV_HEADS)
    q = dq + b * qb + t * qt + head * qh + i
    k = dk + b * kb + t * kt + (head - HEADS) * kh + i
    v = dv + b * vb + t * vt + (head - HEADS - KV_HEADS) * vh + i
    x = tl.load(q, mask=is_q, other=0.0) + tl.load(k, mask=is_k, other=0.0) + tl.load(v, mask=is_v, other=0.0)
    y = (
        tl.load(q + HALF, mask=is_q, other=0.0)
        + tl.load(k + HALF, mask=is_k, other=0.0)
        + tl.load(v + HALF, mask=is_v, other=0.0)
    )
    x, y = x.to(tl.float32), y.to(tl.float32)
    row = (token % positions) * (2 * HALF) + i
    c = tl.load(cos + row, mask=is_q | is_k, other=1.0)
    s = tl.load(sin + row + HALF, mask=is_q | is_k, other=0.0)
    first = token * (2 * PAIRS) + head * (2 * HALF) + i
    kind = result.dtype.element_ty
    tl.store(result + first, (x * c + y * s).to(kind), mask=inside)
    tl.store(result + first + HALF, (y * c - x * s).to(kind), mask=inside)


def turn_heads_backward_kernel(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    batch, length, heads, dim = dq.shape
    kv_heads = dk.shape[2]
    packed_heads = heads + 2 * kv_heads
    result = dq.new_empty((batch, length, packed_heads, dim))
    total = result.numel() // 2
    _turn_heads_backward[(triton.cdiv(total, 1024),)](
        dq, dk, dv, cos.contiguous(), sin.contiguous(), result, total, length, cos.numel() // dim,
        *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        heads, kv_heads, PAIRS=packed_heads * dim // 2, HALF=dim // 2, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return result
