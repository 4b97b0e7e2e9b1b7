"""The CUDA forms of the operators in `fused.py`."""

from __future__ import annotations

from functools import cache

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
        # A target that does not exist makes the loss and the gradient of its row NaN, which the training guard sees.
        exists = (target >= 0) & (target < columns)
        # Loaded before the first reduction, whose barrier keeps it ahead of the stores below.
        target_logit = tl.load(logits + target, mask=exists, other=float("nan")).to(tl.float32)
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
        factor = tl.where(exists, tl.load(scale), float("nan"))
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
    source, result, cos, sin, rows, length, positions, source_batch, source_token, source_head, result_token,
    HEADS: tl.constexpr, HALF: tl.constexpr, SIGN: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # A tile of tokens by pairs of coordinates (i, i + HALF) of all heads.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, PART)
    inside = (m < rows)[:, None] & (j < HEADS * HALF)[None, :]
    head, i = (j // HALF)[None, :], (j % HALF)[None, :]
    x_at = (
        source + (m // length)[:, None] * source_batch + (m % length)[:, None] * source_token + head * source_head + i
    )
    x = tl.load(x_at, mask=inside, other=0.0)
    y = tl.load(x_at + HALF, mask=inside, other=0.0)
    if SIGN != 0:
        angle = (m % positions)[:, None] * (2 * HALF) + i
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle + HALF, mask=inside, other=0.0) * SIGN
        x, y = x.to(tl.float32), y.to(tl.float32)
        x, y = x * c - y * s, y * c + x * s
    out = result + m[:, None] * result_token + head * (2 * HALF) + i
    kind = result.dtype.element_ty
    tl.store(out, x.to(kind), mask=inside)
    tl.store(out + HALF, y.to(kind), mask=inside)


def turn_into(result: Tensor, source: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
    """Write source (B, T, heads, dim), turned by `sign` times its angles, into the first heads of a packed result.

    The two may be the same memory: every program reads its elements before it writes them.
    """
    if source.stride(-1) != 1:
        source = source.contiguous()
    batch, length, heads, dim = source.shape
    assert result.stride(0) == length * result.stride(1)
    assert result.stride(2) == dim
    part, block = _tile(heads * dim // 2)
    _turn[(triton.cdiv(batch * length, block),)](
        source, result, cos.contiguous(), sin.contiguous(), batch * length, length, cos.numel() // dim,
        *source.stride()[:3], result.stride(1),
        HEADS=heads, HALF=dim // 2, SIGN=sign, PART=part, BLOCK_M=block, num_warps=4,
    )  # fmt: skip


def _tile(pairs: int) -> tuple[int, int]:
    """Columns and rows of a tile that holds the pairs of some tokens, about a thousand in all."""
    part = triton.next_power_of_2(pairs)
    return part, max(1, 1024 // part)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x, branch, second, weight, total, normed, scale, width, eps, SECOND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(branch + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if SECOND:
        value += tl.load(second + row * width + at, mask=inside, other=0.0).to(tl.float32)
    value = value.to(total.dtype.element_ty)
    tl.store(total + row * width + at, value, mask=inside)
    value = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value) / width + eps)
    tl.store(scale + row, inverse)
    gain = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(normed + row * width + at, (value * inverse * gain).to(normed.dtype.element_ty), mask=inside)


def add_norm_kernel(
    x: Tensor, branch: Tensor, second: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, branch = x.contiguous(), branch.contiguous()
    rows, width = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x, branch, branch if second is None else second.contiguous(), weight, total, normed, scale, width, eps,
        SECOND=second is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return total, normed, scale


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
    _add_unit[(rows,)](x, branch, unit, scale, width, eps, BLOCK=block, num_warps=_warps(block))
    return unit, scale


@triton.jit
def _add_norm_backward(  # type: ignore[no-untyped-def]
    total, scale, weight, total_grad, normed_grad, grad, copy, weight_grads, rows, width,
    COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Programs take rows in turn and keep their share of the weight's gradient in registers.
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    gain = tl.load(weight + at, mask=inside, other=0.0)
    gain_grad = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, programs):
        base = row * width + at
        inverse = tl.load(scale + row)
        unit = tl.load(total + base, mask=inside, other=0.0).to(tl.float32) * inverse
        arriving = tl.load(normed_grad + base, mask=inside, other=0.0).to(tl.float32)
        flow = arriving * gain
        result = tl.load(total_grad + base, mask=inside, other=0.0).to(tl.float32)
        result += (flow - unit * (tl.sum(unit * flow) / width)) * inverse
        tl.store(grad + base, result.to(grad.dtype.element_ty), mask=inside)
        if COPY:
            tl.store(copy + base, result.to(copy.dtype.element_ty), mask=inside)
        gain_grad += arriving * unit
    tl.store(weight_grads + program * width + at, gain_grad, mask=inside)


def add_norm_backward_kernel(
    total: Tensor, scale: Tensor, weight: Tensor, total_grad: Tensor, normed_grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    total_grad, normed_grad = total_grad.contiguous(), normed_grad.contiguous()
    rows, width = total.shape
    programs = min(rows, 16 * torch.cuda.get_device_properties(total.device).multi_processor_count)
    grad = torch.empty_like(total)
    copies = dtype != total.dtype
    copy = torch.empty_like(total, dtype=dtype) if copies else total.new_empty(0)
    weight_grads = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    _add_norm_backward[(programs,)](
        total, scale, weight, total_grad, normed_grad, grad, copy, weight_grads, rows, width,
        COPY=copies, BLOCK=block, num_warps=max(1, _warps(block) // 2),
    )  # fmt: skip
    return grad, copy, weight_grads.sum(0).to(weight.dtype)


def _warps(block: int) -> int:
    return min(16, max(1, block // 256))


@triton.jit
def _unturn(  # type: ignore[no-untyped-def]
    dq, dk, dv, packed, scale, cos, sin, packed_grad, scale_grad, result, inner, rows, length, positions, width,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, FOUR: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # A tile of tokens by pairs of coordinates of all heads. With FOUR there is a fourth part, and a gradient of all.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, PART)
    inside = (m < rows)[:, None] & (j < HEADS * HALF)[None, :]
    head, i = (j // HALF)[None, :], (j % HALF)[None, :]
    batch, t = (m // length)[:, None], (m % length)[:, None]
    angle = (m % positions)[:, None] * (2 * HALF) + i
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle + HALF, mask=inside, other=0.0)
    part: tl.constexpr = HEADS * 2 * HALF
    at = m[:, None] * ((4 if FOUR else 3) * part) + head * (2 * HALF) + i
    q_at = dq + batch * q_batch + t * q_token + head * q_head + i
    k_at = dk + batch * k_batch + t * k_token + head * k_head + i
    v_at = dv + batch * v_batch + t * v_token + head * v_head + i
    x, y = _pair(q_at, inside, HALF)
    total = _unturn_part(x, y, packed + at, packed_grad + at, result + at, c, s, inside, HALF, FOUR)
    x, y = _pair(k_at, inside, HALF)
    at += part
    total += _unturn_part(x, y, packed + at, packed_grad + at, result + at, c, s, inside, HALF, FOUR)
    x, y = _pair(v_at, inside, HALF)
    at += part
    total += _unturn_part(x, y, packed + at, packed_grad + at, result + at, 1.0, 0.0, inside, HALF, FOUR)
    if FOUR:
        at += part
        total += _unturn_part(0.0, 0.0, packed + at, packed_grad + at, result + at, 1.0, 0.0, inside, HALF, FOUR)
    inverse = tl.load(scale + m, mask=m < rows, other=0.0)
    sums = tl.sum(total, 1)
    if FOUR:
        sums += tl.load(scale_grad + m, mask=m < rows, other=0.0) * inverse
    tl.store(inner + m, sums * inverse / width, mask=m < rows)


@triton.jit
def _unturn_part(  # type: ignore[no-untyped-def]
    x, y, forward, more, result, c, s, inside, HALF: tl.constexpr, MORE: tl.constexpr
):
    if MORE:
        more_x, more_y = _pair(more, inside, HALF)
        x, y = x + more_x, y + more_y
    _store_pair(result, x * c + y * s, y * c - x * s, inside, HALF)
    first, second = _pair(forward, inside, HALF)
    return x * first + y * second


@triton.jit
def _pair(at, inside, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return x, tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_pair(at, x, y, inside, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    kind = at.dtype.element_ty
    tl.store(at, x.to(kind), mask=inside)
    tl.store(at + HALF, y.to(kind), mask=inside)


def unturn_kernel(
    dq: Tensor, dk: Tensor, dv: Tensor, packed: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, width: int,
    packed_grad: Tensor | None, scale_grad: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk, dv))
    batch, length, heads, dim = dq.shape
    rows, four = batch * length, packed_grad is not None
    assert packed.is_contiguous()
    assert packed.shape[1] == (4 if four else 3) * heads
    result, inner = torch.empty_like(packed), torch.empty_like(scale)
    part, block = _tile(heads * dim // 2)
    _unturn[(triton.cdiv(rows, block),)](
        dq, dk, dv, packed, scale, cos.contiguous(), sin.contiguous(),
        packed if packed_grad is None else packed_grad.contiguous(),
        scale if scale_grad is None else scale_grad.contiguous(), result, inner,
        rows, length, cos.numel() // dim, width, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        HEADS=heads, HALF=dim // 2, FOUR=four, PART=part, BLOCK_M=block, num_warps=4,
    )  # fmt: skip
    return result, inner


# How `narrow_backward_kernels` does its work; scripts/tune_kernels.py times all ways.
PRODUCT_APART = False  # the product by cuBLAS and its sum with the rest after it, instead of one kernel for both
WEIGHTS_ASIDE = False  # the weight's gradient beside that of the stream, on a second CUDA stream


def narrow_backward_kernels(
    total_grad: Tensor, unit: Tensor, scale: Tensor, inner: Tensor, heads_grad: Tensor, weight: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    product = heads_grad @ weight if PRODUCT_APART else None
    weight_grad = torch.empty_like(weight)
    here = torch.cuda.current_stream()
    aside = _second_stream(total_grad.device) if WEIGHTS_ASIDE else here
    if WEIGHTS_ASIDE:
        aside.wait_stream(here)
    with torch.cuda.stream(aside):
        torch.mm(heads_grad.T, unit, out=weight_grad)
    if product is not None:
        grad, copy = narrow_sum_kernel(total_grad, unit, scale, inner, product, dtype)
    else:
        grad, copy = narrow_product_kernel(total_grad, unit, scale, inner, heads_grad, weight, dtype)
    if WEIGHTS_ASIDE:
        here.wait_stream(aside)  # after which all memory that the other stream has used may be used again
    return grad, copy, weight_grad


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@triton.jit
def _narrow_product(  # type: ignore[no-untyped-def]
    total_grad, unit, scale, inner, heads_grad, weight, grad, copy, rows, width, depth,
    COPY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # A product whose result never leaves the registers: it is added to the stream's gradient where it arises. What it
    # is added to is asked for first and arrives while the product is made.
    columns = tl.cdiv(width, BLOCK_N)
    program = tl.program_id(0)
    m = (program // columns).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (program % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = m[:, None] * width + n[None, :]
    inside = (m < rows)[:, None] & (n < width)[None, :]
    arriving = tl.load(total_grad + at, mask=inside, other=0.0)
    normed = tl.load(unit + at, mask=inside, other=0.0)
    factor = tl.load(scale + m, mask=m < rows, other=0.0)
    back = tl.load(inner + m, mask=m < rows, other=0.0)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_inside, b_inside = (m < rows)[:, None] & (k < depth)[None, :], (k < depth)[:, None] & (n < width)[None, :]
        a = tl.load(heads_grad + m[:, None] * depth + k[None, :], mask=a_inside, other=0.0)
        b = tl.load(weight + k[:, None] * width + n[None, :], mask=b_inside, other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    sums = sums * factor[:, None] + arriving.to(tl.float32) - normed.to(tl.float32) * back[:, None]
    tl.store(grad + at, sums.to(grad.dtype.element_ty), mask=inside)
    if COPY:
        tl.store(copy + at, sums.to(copy.dtype.element_ty), mask=inside)


def narrow_product_kernel(
    total_grad: Tensor, unit: Tensor, scale: Tensor, inner: Tensor, heads_grad: Tensor, weight: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total_grad = total_grad.contiguous()
    rows, width = total_grad.shape
    grad = torch.empty_like(total_grad)
    copies = dtype != total_grad.dtype
    copy = torch.empty_like(total_grad, dtype=dtype) if copies else total_grad.new_empty(0)
    block_k = 128 if heads_grad.element_size() == 2 else 32
    _narrow_product[(triton.cdiv(rows, 64) * triton.cdiv(width, 64),)](
        total_grad, unit, scale, inner, heads_grad, weight.contiguous(), grad, copy, rows, width, heads_grad.shape[1],
        COPY=copies, BLOCK_M=64, BLOCK_N=64, BLOCK_K=block_k, num_warps=4, num_stages=2,
    )  # fmt: skip
    return grad, copy


@triton.jit
def _narrow_sum(  # type: ignore[no-untyped-def]
    total_grad, unit, scale, inner, product, grad, copy, width, COPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    at += row * width
    result = tl.load(total_grad + at, mask=inside, other=0.0).to(tl.float32)
    result += tl.load(product + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + row)
    result -= tl.load(unit + at, mask=inside, other=0.0).to(tl.float32) * tl.load(inner + row)
    tl.store(grad + at, result.to(grad.dtype.element_ty), mask=inside)
    if COPY:
        tl.store(copy + at, result.to(copy.dtype.element_ty), mask=inside)


def narrow_sum_kernel(
    total_grad: Tensor, unit: Tensor, scale: Tensor, inner: Tensor, product: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    total_grad = total_grad.contiguous()
    rows, width = total_grad.shape
    grad = torch.empty_like(total_grad)
    copies = dtype != total_grad.dtype
    copy = torch.empty_like(total_grad, dtype=dtype) if copies else total_grad.new_empty(0)
    block = triton.next_power_of_2(width)
    _narrow_sum[(rows,)](
        total_grad, unit, scale, inner, product, grad, copy, width, COPY=copies, BLOCK=block, num_warps=_warps(block)
    )
    return grad, copy


@triton.jit
def _follow(  # type: ignore[no-untyped-def]
    packed, change, read, scale, cos, sin, result, inverse, rows, positions, eps, width,
    HEADS: tl.constexpr, HALF: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, PART)
    inside = (m < rows)[:, None] & (j < HEADS * HALF)[None, :]
    i = (j % HALF)[None, :]
    angle = (m % positions)[:, None] * (2 * HALF) + i
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle + HALF, mask=inside, other=0.0)
    factor = tl.load(scale + m, mask=m < rows, other=1.0)
    column = (j // HALF)[None, :] * (2 * HALF) + i
    part: tl.constexpr = HEADS * 2 * HALF
    at, out = m[:, None] * (4 * part) + column, m[:, None] * (3 * part) + column
    x, y = _pair(read + m[:, None] * part + column, inside, HALF)
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
    x, y = _pair(packed, inside, HALF)
    a, b = _pair(change, inside, HALF)
    return 2 * x + a * factor[:, None], 2 * y + b * factor[:, None]


@triton.jit
def _follow_part(packed, change, result, factor, ratio, c, s, inside, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    x, y = _pair(packed, inside, HALF)
    a, b = _pair(change, inside, HALF)
    x += (a * c - b * s) * factor[:, None]
    y += (b * c + a * s) * factor[:, None]
    _store_pair(result, x * ratio[:, None], y * ratio[:, None], inside, HALF)


def follow_kernel(
    packed: Tensor, change: Tensor, read: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    packed, change, read, scale = (t.contiguous() for t in (packed, change, read, scale))
    batch, length, heads, dim = read.shape
    result, inverse = packed.new_empty((batch, length, 3 * heads, dim)), torch.empty_like(scale)
    part, block = _tile(heads * dim // 2)
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
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, PART)
    inside = (m < rows)[:, None] & (j < HEADS * HALF)[None, :]
    head, i = (j // HALF)[None, :], (j % HALF)[None, :]
    batch, t = (m // length)[:, None], (m % length)[:, None]
    angle = (m % positions)[:, None] * (2 * HALF) + i
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle + HALF, mask=inside, other=0.0)
    factor, ratio = tl.load(scale + m, mask=m < rows, other=0.0), tl.load(inverse + m, mask=m < rows, other=0.0)
    column = head * (2 * HALF) + i
    part: tl.constexpr = HEADS * 2 * HALF
    at, out = m[:, None] * (4 * part) + column, m[:, None] * (3 * part) + column
    q_at = dq + batch * q_batch + t * q_token + head * q_head + i
    k_at = dk + batch * k_batch + t * k_token + head * k_head + i
    v_at = dv + batch * v_batch + t * v_token + head * v_head + i
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
    x, y = _pair(read + m[:, None] * part + column, inside, HALF)
    a, b = _pair(change + at, inside, HALF)
    seen_x, seen_y = _sight(packed + at, change + at, factor, inside, HALF)
    _store_pair(packed_grad + at, 2 * slope * x, 2 * slope * y, inside, HALF)
    _store_pair(change_grad + at, slope * x * factor[:, None], slope * y * factor[:, None], inside, HALF)
    _store_pair(read_grad + m[:, None] * part + column, slope * seen_x, slope * seen_y, inside, HALF)
    along += slope * (x * a + y * b) + square_grad[:, None] * (x * seen_x + y * seen_y)
    tl.store(scale_grad + m, tl.sum(along, 1), mask=m < rows)


@triton.jit
def _follow_part_backward(  # type: ignore[no-untyped-def]
    grad, result, change, packed_grad, change_grad, factor, ratio, c, s, inside, HALF: tl.constexpr
):
    x, y = _pair(grad, inside, HALF)
    first, second = _pair(result, inside, HALF)
    inner = x * first + y * second
    x, y = x * ratio[:, None], y * ratio[:, None]
    _store_pair(packed_grad, x, y, inside, HALF)
    x, y = x * c + y * s, y * c - x * s
    _store_pair(change_grad, x * factor[:, None], y * factor[:, None], inside, HALF)
    a, b = _pair(change, inside, HALF)
    return inner, x * a + y * b


def follow_backward_kernel(
    dq: Tensor, dk: Tensor, dv: Tensor, result: Tensor, inverse: Tensor, packed: Tensor, change: Tensor, read: Tensor,
    scale: Tensor, cos: Tensor, sin: Tensor, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (g if g.stride(-1) == 1 else g.contiguous() for g in (dq, dk, dv))
    packed, change, read, scale = (t.contiguous() for t in (packed, change, read, scale))
    batch, length, heads, dim = read.shape
    packed_grad, change_grad, read_grad, scale_grad = (torch.empty_like(t) for t in (packed, change, read, scale))
    part, block = _tile(heads * dim // 2)
    _follow_backward[(triton.cdiv(batch * length, block),)](
        dq, dk, dv, result, inverse, packed, change, read, scale, cos.contiguous(), sin.contiguous(),
        packed_grad, change_grad, read_grad, scale_grad, batch * length, length, cos.numel() // dim, width,
        *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        HEADS=heads, HALF=dim // 2, PART=part, BLOCK_M=block, num_warps=4,
    )  # fmt: skip
    return packed_grad, change_grad, read_grad, scale_grad
