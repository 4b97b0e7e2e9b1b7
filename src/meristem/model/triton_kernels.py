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
    source, result, cos, sin, length, positions, source_batch, source_token, source_head, result_token,
    HEADS: tl.constexpr, HALF: tl.constexpr, SIGN: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    # One program per token: a tile of heads by pairs of coordinates (i, i + HALF), the angles loaded once.
    token = tl.program_id(0)
    head, i = tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < HEADS) & (i < HALF)
    batch, t = (token // length).to(tl.int64), token % length
    x_at = source + batch * source_batch + t * source_token + head * source_head + i
    x = tl.load(x_at, mask=inside, other=0.0)
    y = tl.load(x_at + HALF, mask=inside, other=0.0)
    if SIGN != 0:
        row = (token % positions) * (2 * HALF) + i
        c = tl.load(cos + row, mask=i < HALF, other=0.0)
        s = tl.load(sin + row + HALF, mask=i < HALF, other=0.0) * SIGN
        x, y = x.to(tl.float32), y.to(tl.float32)
        x, y = x * c - y * s, y * c + x * s
    out = result + token.to(tl.int64) * result_token + head * (2 * HALF) + i
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
    _turn[(batch * length,)](
        source, result, cos.contiguous(), sin.contiguous(), length, cos.numel() // dim,
        *source.stride()[:3], result.stride(1),
        HEADS=heads, HALF=dim // 2, SIGN=sign,
        HEADS_BLOCK=triton.next_power_of_2(heads), HALF_BLOCK=triton.next_power_of_2(dim // 2), num_warps=4,
    )  # fmt: skip


@triton.jit
def _add_norm(x, branch, weight, total, normed, scale, width, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(branch + row * width + at, mask=inside, other=0.0).to(tl.float32)
    value = value.to(total.dtype.element_ty)
    tl.store(total + row * width + at, value, mask=inside)
    value = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value) / width + eps)
    tl.store(scale + row, inverse)
    gain = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(normed + row * width + at, (value * inverse * gain).to(normed.dtype.element_ty), mask=inside)


def add_norm_kernel(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, branch = x.contiguous(), branch.contiguous()
    rows, width = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](x, branch, weight, total, normed, scale, width, eps, BLOCK=block, num_warps=_warps(block))
    return total, normed, scale


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
    programs = min(rows, 8 * torch.cuda.get_device_properties(total.device).multi_processor_count)
    grad = torch.empty_like(total)
    copies = dtype != total.dtype
    copy = torch.empty_like(total, dtype=dtype) if copies else total.new_empty(0)
    weight_grads = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    _add_norm_backward[(programs,)](
        total, scale, weight, total_grad, normed_grad, grad, copy, weight_grads, rows, width,
        COPY=copies, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return grad, copy, weight_grads.sum(0).to(weight.dtype)


def _warps(block: int) -> int:
    return min(16, max(1, block // 256))
