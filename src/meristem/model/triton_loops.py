"""The CUDA forms of the operators in `fused_loops.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meristem.model.triton_kernels import (
    load_pair,
    load_rope,
    side_by_side,
    store_pair,
    strided,
    tile_of,
    tile_shape,
    warps_of,
)


@triton.jit
def _add_unit(x, branch, unit, scale, width, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # As `_add_norm`, but the sum is not kept and there is no gain.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(branch + row * width + at, mask=inside, other=0.0).to(tl.float32)
    value = value.to(x.dtype.element_ty).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value) / width + eps)
    tl.store(scale + row, inverse)
    tl.store(unit + row * width + at, (value * inverse).to(unit.dtype.element_ty), mask=inside)


def add_unit_kernel(x: Tensor, branch: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, branch = x.contiguous(), branch.contiguous()
    rows, width = x.shape
    unit = torch.empty_like(x, dtype=dtype)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _add_unit[(rows,)](x, branch, unit, scale, width, eps, BLOCK=block, num_warps=warps_of(block))
    return unit, scale


@triton.jit
def _unrotate(  # type: ignore[no-untyped-def]
    dq, dk, dv, packed, scale, cos, sin, packed_grad, scale_grad, result, inner, rows, length, positions, width,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, FOUR: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # With FOUR there is a fourth part, and a gradient of all.
    m, j, inside = tile_of(rows, HEADS, HALF, PART, BLOCK_M)
    c, s = load_rope(cos, sin, m, j, positions, inside, HALF)
    part: tl.constexpr = HEADS * 2 * HALF
    at = side_by_side(m, j, (4 if FOUR else 3) * part, HALF)
    x, y = load_pair(strided(dq, m, j, length, q_batch, q_token, q_head, HALF), inside, HALF)
    total = _unrotate_part(x, y, packed + at, packed_grad + at, result + at, c, s, inside, HALF, FOUR)
    x, y = load_pair(strided(dk, m, j, length, k_batch, k_token, k_head, HALF), inside, HALF)
    at += part
    total += _unrotate_part(x, y, packed + at, packed_grad + at, result + at, c, s, inside, HALF, FOUR)
    x, y = load_pair(strided(dv, m, j, length, v_batch, v_token, v_head, HALF), inside, HALF)
    at += part
    total += _unrotate_part(x, y, packed + at, packed_grad + at, result + at, 1.0, 0.0, inside, HALF, FOUR)
    if FOUR:
        at += part
        total += _unrotate_part(0.0, 0.0, packed + at, packed_grad + at, result + at, 1.0, 0.0, inside, HALF, FOUR)
    inverse = tl.load(scale + m, mask=m < rows, other=0.0)
    sums = tl.sum(total, 1)
    if FOUR:
        sums += tl.load(scale_grad + m, mask=m < rows, other=0.0) * inverse
    tl.store(inner + m, sums * inverse / width, mask=m < rows)


@triton.jit
def _unrotate_part(  # type: ignore[no-untyped-def]
    x, y, forward, more, result, c, s, inside, HALF: tl.constexpr, MORE: tl.constexpr
):
    if MORE:
        more_x, more_y = load_pair(more, inside, HALF)
        x, y = x + more_x, y + more_y
    store_pair(result, x * c + y * s, y * c - x * s, inside, HALF)
    first, second = load_pair(forward, inside, HALF)
    return x * first + y * second


def unrotate_kernel(
    dq: Tensor, dk: Tensor, dv: Tensor, packed: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, width: int,
    packed_grad: Tensor | None, scale_grad: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk, dv))
    batch, length, heads, dim = dq.shape
    rows, four = batch * length, packed_grad is not None
    assert packed.is_contiguous()
    assert packed.shape[1] == (4 if four else 3) * heads
    result, inner = torch.empty_like(packed), torch.empty_like(scale)
    part, block = tile_shape(heads * dim // 2, 512 if four else 1024)
    _unrotate[(triton.cdiv(rows, block),)](
        dq, dk, dv, packed, scale, cos.contiguous(), sin.contiguous(),
        packed if packed_grad is None else packed_grad.contiguous(),
        scale if scale_grad is None else scale_grad.contiguous(), result, inner,
        rows, length, cos.numel() // dim, width, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        HEADS=heads, HALF=dim // 2, FOUR=four, PART=part, BLOCK_M=block, num_warps=4,
    )  # fmt: skip
    return result, inner


@triton.jit
def _through_norm(total_grad, product, unit, scale, inner, result, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    base = row * width + at
    grad = tl.load(total_grad + base, mask=inside, other=0.0).to(tl.float32)
    grad += tl.load(product + base, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + row)
    grad -= tl.load(unit + base, mask=inside, other=0.0).to(tl.float32) * tl.load(inner + row)
    tl.store(result + base, grad.to(result.dtype.element_ty), mask=inside)


def through_norm_kernel(total_grad: Tensor, product: Tensor, unit: Tensor, scale: Tensor, inner: Tensor) -> Tensor:
    total_grad, product, unit = total_grad.contiguous(), product.contiguous(), unit.contiguous()
    result = torch.empty_like(total_grad)
    rows, width = total_grad.shape
    block = triton.next_power_of_2(width)
    _through_norm[(rows,)](
        total_grad, product, unit, scale, inner, result, width, BLOCK=block, num_warps=warps_of(block)
    )
    return result


@triton.jit
def _follow(  # type: ignore[no-untyped-def]
    packed, change, read, scale, cos, sin, result, inverse, rows, positions, eps, width,
    HEADS: tl.constexpr, HALF: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    m, j, inside = tile_of(rows, HEADS, HALF, PART, BLOCK_M)
    c, s = load_rope(cos, sin, m, j, positions, inside, HALF)
    factor = tl.load(scale + m, mask=m < rows, other=1.0)
    part: tl.constexpr = HEADS * 2 * HALF
    at, out = side_by_side(m, j, 4 * part, HALF), side_by_side(m, j, 3 * part, HALF)
    x, y = load_pair(read + side_by_side(m, j, part, HALF), inside, HALF)
    seen_x, seen_y = _sight(packed + at + 3 * part, change + at + 3 * part, factor, inside, HALF)
    square = 1 + factor * tl.sum(x * seen_x + y * seen_y, 1) / width
    ratio = tl.rsqrt(tl.maximum(square, eps * factor * factor))
    tl.store(inverse + m, ratio, mask=m < rows)
    _follow_part(packed + at, change + at, result + out, factor, ratio, c, s, inside, HALF)
    _follow_part(packed + at + part, change + at + part, result + out + part, factor, ratio, c, s, inside, HALF)
    at += 2 * part
    _follow_part(packed + at, change + at, result + out + 2 * part, factor, ratio, 1.0, 0.0, inside, HALF)


@triton.jit
def _sight(packed, change, factor, inside, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    # What the output projection sees of the stream before and after, together.
    x, y = load_pair(packed, inside, HALF)
    a, b = load_pair(change, inside, HALF)
    return 2 * x + a * factor[:, None], 2 * y + b * factor[:, None]


@triton.jit
def _follow_part(packed, change, result, factor, ratio, c, s, inside, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    x, y = load_pair(packed, inside, HALF)
    a, b = load_pair(change, inside, HALF)
    x += (a * c - b * s) * factor[:, None]
    y += (b * c + a * s) * factor[:, None]
    store_pair(result, x * ratio[:, None], y * ratio[:, None], inside, HALF)


def follow_kernel(
    packed: Tensor, change: Tensor, read: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    packed, change, read, scale = (t.contiguous() for t in (packed, change, read, scale))
    batch, length, heads, dim = read.shape
    result, inverse = packed.new_empty((batch, length, 3 * heads, dim)), torch.empty_like(scale)
    part, block = tile_shape(heads * dim // 2, 512)
    _follow[(triton.cdiv(batch * length, block),)](
        packed, change, read, scale, cos.contiguous(), sin.contiguous(), result, inverse,
        batch * length, cos.numel() // dim, eps, width,
        HEADS=heads, HALF=dim // 2, PART=part, BLOCK_M=block, num_warps=4,
    )  # fmt: skip
    return result, inverse


@triton.jit
def _follow_backward(  # type: ignore[no-untyped-def]
    dq, dk, dv, result, inverse, packed, change, read, scale, cos, sin,
    packed_grad, change_grad, read_grad, scale_grad, rows, length, positions, width,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    m, j, inside = tile_of(rows, HEADS, HALF, PART, BLOCK_M)
    c, s = load_rope(cos, sin, m, j, positions, inside, HALF)
    factor, ratio = tl.load(scale + m, mask=m < rows, other=0.0), tl.load(inverse + m, mask=m < rows, other=0.0)
    part: tl.constexpr = HEADS * 2 * HALF
    at, out = side_by_side(m, j, 4 * part, HALF), side_by_side(m, j, 3 * part, HALF)
    q_at = strided(dq, m, j, length, q_batch, q_token, q_head, HALF)
    k_at = strided(dk, m, j, length, k_batch, k_token, k_head, HALF)
    v_at = strided(dv, m, j, length, v_batch, v_token, v_head, HALF)
    inner, along = _follow_part_backward(
        q_at, result + out, change + at, packed_grad + at, change_grad + at, factor, ratio, c, s, inside, HALF
    )
    at += part
    more_inner, more_along = _follow_part_backward(
        k_at, result + out + part, change + at, packed_grad + at, change_grad + at, factor, ratio, c, s, inside, HALF
    )
    inner, along = inner + more_inner, along + more_along
    at += part
    more_inner, more_along = _follow_part_backward(
        v_at, result + out + 2 * part, change + at, packed_grad + at, change_grad + at, factor, ratio, 1.0, 0.0,
        inside, HALF,
    )  # fmt: skip
    inner, along = inner + more_inner, along + more_along
    at += part
    square_grad = tl.sum(inner, 1) * ratio * ratio * (-0.5 / width)
    slope = (square_grad * factor)[:, None]
    x, y = load_pair(read + side_by_side(m, j, part, HALF), inside, HALF)
    a, b = load_pair(change + at, inside, HALF)
    seen_x, seen_y = _sight(packed + at, change + at, factor, inside, HALF)
    store_pair(packed_grad + at, 2 * slope * x, 2 * slope * y, inside, HALF)
    store_pair(change_grad + at, slope * x * factor[:, None], slope * y * factor[:, None], inside, HALF)
    store_pair(read_grad + side_by_side(m, j, part, HALF), slope * seen_x, slope * seen_y, inside, HALF)
    along += slope * (x * a + y * b) + square_grad[:, None] * (x * seen_x + y * seen_y)
    tl.store(scale_grad + m, tl.sum(along, 1), mask=m < rows)


@triton.jit
def _follow_part_backward(  # type: ignore[no-untyped-def]
    grad, result, change, packed_grad, change_grad, factor, ratio, c, s, inside, HALF: tl.constexpr
):
    x, y = load_pair(grad, inside, HALF)
    first, second = load_pair(result, inside, HALF)
    inner = x * first + y * second
    x, y = x * ratio[:, None], y * ratio[:, None]
    store_pair(packed_grad, x, y, inside, HALF)
    x, y = x * c + y * s, y * c - x * s
    store_pair(change_grad, x * factor[:, None], y * factor[:, None], inside, HALF)
    a, b = load_pair(change, inside, HALF)
    return inner, x * a + y * b


def follow_backward_kernel(
    dq: Tensor, dk: Tensor, dv: Tensor, result: Tensor, inverse: Tensor, packed: Tensor, change: Tensor, read: Tensor,
    scale: Tensor, cos: Tensor, sin: Tensor, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk, dv))
    packed, change, read, scale = (t.contiguous() for t in (packed, change, read, scale))
    batch, length, heads, dim = read.shape
    packed_grad, change_grad, read_grad, scale_grad = (torch.empty_like(t) for t in (packed, change, read, scale))
    part, block = tile_shape(heads * dim // 2, 512)
    _follow_backward[(triton.cdiv(batch * length, block),)](
        dq, dk, dv, result, inverse, packed, change, read, scale, cos.contiguous(), sin.contiguous(),
        packed_grad, change_grad, read_grad, scale_grad, batch * length, length, cos.numel() // dim, width,
        *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        HEADS=heads, HALF=dim // 2, PART=part, BLOCK_M=block, num_warps=4,
    )  # fmt: skip
    return packed_grad, change_grad, read_grad, scale_grad
