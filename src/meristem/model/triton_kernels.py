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
def _embed_backward(grad, tokens, result, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # Rows of equal tokens meet in any order; their sums differ in the last bits from call to call.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(grad + row * width + at, mask=inside, other=0.0).to(result.dtype.element_ty)
    token = tl.load(tokens + row).to(tl.int64)
    tl.atomic_add(result + token * width + at, value, mask=inside, sem="relaxed")


def embed_backward_kernel(grad: Tensor, tokens: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    result = torch.zeros(vocabulary, grad.shape[1], dtype=torch.float32, device=grad.device)
    block = triton.next_power_of_2(grad.shape[1])
    _embed_backward[(grad.shape[0],)](
        grad.contiguous(), tokens.contiguous(), result, grad.shape[1], BLOCK=block, num_warps=warps_of(block)
    )
    return result.to(dtype)


@triton.jit
def _swiglu(gate_up, hidden, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(hidden + row * width + at, (gate * tl.sigmoid(gate) * up).to(hidden.dtype.element_ty), mask=inside)


def swiglu_kernel(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    hidden = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _swiglu[(rows, triton.cdiv(width, block))](gate_up.contiguous(), hidden, width, BLOCK=block, num_warps=4)
    return hidden


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
def tile_of(rows, heads, HALF: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    # Tokens m by pairs j of coordinates (i, i + HALF) of all heads, and which of them there are.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, PART)
    return m, j, (m < rows)[:, None] & (j < heads * HALF)[None, :]


@triton.jit
def strided(start, m, j, length, by_batch, by_token, by_head, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    # Where the first coordinates of a tile are in (batch, token, head, dim).
    token = (m // length)[:, None] * by_batch + (m % length)[:, None] * by_token
    return start + token + (j // HALF)[None, :] * by_head + (j % HALF)[None, :]


@triton.jit
def side_by_side(m, j, by_token, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    # The same for heads that lie side by side, as an offset.
    return m[:, None] * by_token + ((j // HALF) * (2 * HALF) + j % HALF)[None, :]


@triton.jit
def load_rope(cos, sin, m, j, positions, inside, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    at = (m % positions)[:, None] * (2 * HALF) + (j % HALF)[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at + HALF, mask=inside, other=0.0)


@triton.jit
def load_pair(at, inside, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return x, tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_pair(at, x, y, inside, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    kind = at.dtype.element_ty
    tl.store(at, x.to(kind), mask=inside)
    tl.store(at + HALF, y.to(kind), mask=inside)


# The number of heads is no constant of the kernel, so that a birth needs no new one.
@triton.jit(do_not_specialize=["heads"])
def _rotate(  # type: ignore[no-untyped-def]
    source, result, cos, sin, rows, length, positions, source_batch, source_token, source_head, result_token, heads,
    HALF: tl.constexpr, SIGN: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    m, j, inside = tile_of(rows, heads, HALF, PART, BLOCK_M)
    x, y = load_pair(strided(source, m, j, length, source_batch, source_token, source_head, HALF), inside, HALF)
    if SIGN != 0:
        c, s = load_rope(cos, sin, m, j, positions, inside, HALF)
        s = s * SIGN
        x, y = x * c - y * s, y * c + x * s
    store_pair(result + side_by_side(m, j, result_token, HALF), x, y, inside, HALF)


def rotate_into(result: Tensor, source: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
    """Write source (B, T, heads, dim), rotated by `sign` times its angles, into the first heads of a packed result.

    The two may be the same memory: every program reads its elements before it writes them.
    """
    if source.stride(-1) != 1:
        source = source.contiguous()
    batch, length, heads, dim = source.shape
    assert result.stride(0) == length * result.stride(1)
    assert result.stride(2) == dim
    part, block = tile_shape(heads * dim // 2)
    _rotate[(triton.cdiv(batch * length, block),)](
        source, result, cos.contiguous(), sin.contiguous(), batch * length, length, cos.numel() // dim,
        *source.stride()[:3], result.stride(1), heads,
        HALF=dim // 2, SIGN=sign, PART=part, BLOCK_M=block, num_warps=4,
    )  # fmt: skip


# Norm and rotation of a head. A program has some tokens of one head, so the kernel is the same for any number of heads.
@triton.jit(do_not_specialize=["factor_token"])
def _norm_rotate(  # type: ignore[no-untyped-def]
    source, result, factors, cos, sin, rows, length, positions, source_batch, source_token, source_head, result_token,
    factor_token, eps, HALF: tl.constexpr, ROTATE: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    m, j, inside = tile_of(rows, 1, HALF, PART, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    source += head * source_head
    x, y = load_pair(strided(source, m, j, length, source_batch, source_token, source_head, HALF), inside, HALF)
    factor = tl.rsqrt(tl.sum(x * x + y * y, 1) / (2 * HALF) + eps)
    tl.store(factors + m * factor_token + head, factor, mask=m < rows)
    x, y = x * factor[:, None], y * factor[:, None]
    if ROTATE:
        c, s = load_rope(cos, sin, m, j, positions, inside, HALF)
        x, y = x * c - y * s, y * c + x * s
    store_pair(result + head * (2 * HALF) + side_by_side(m, j, result_token, HALF), x, y, inside, HALF)


@triton.jit(do_not_specialize=["factor_token", "first_factor"])
def _norm_rotate_backward(  # type: ignore[no-untyped-def]
    grad, normed, factors, result, cos, sin, rows, length, positions, grad_batch, grad_token, grad_head, normed_token,
    result_token, factor_token, first_factor,
    HALF: tl.constexpr, ROTATE: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    m, j, inside = tile_of(rows, 1, HALF, PART, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    grad += head * grad_head
    x, y = load_pair(strided(grad, m, j, length, grad_batch, grad_token, grad_head, HALF), inside, HALF)
    first, second = load_pair(normed + head * (2 * HALF) + side_by_side(m, j, normed_token, HALF), inside, HALF)
    along = (tl.sum(x * first + y * second, 1) / (2 * HALF))[:, None]
    factor = tl.load(factors + m * factor_token + first_factor + head, mask=m < rows, other=0.0)[:, None]
    x, y = (x - first * along) * factor, (y - second * along) * factor
    if ROTATE:
        c, s = load_rope(cos, sin, m, j, positions, inside, HALF)
        x, y = x * c + y * s, y * c - x * s
    store_pair(result + head * (2 * HALF) + side_by_side(m, j, result_token, HALF), x, y, inside, HALF)


def norm_rotate_into(result: Tensor, source: Tensor, rope: tuple[Tensor, Tensor] | None, eps: float) -> Tensor:
    """Write source (B, T, heads, dim), each head normed, and rotated if there are angles, as `rotate_into` does.

    The factors of the heads are returned, (B, T, heads).
    """
    if source.stride(-1) != 1:
        source = source.contiguous()
    batch, length, heads, dim = source.shape
    _check_packed(result, source)
    factors = torch.empty(batch, length, heads, dtype=torch.float32, device=source.device)
    cos, sin, positions = _angles(rope, factors, dim)
    part, block = tile_shape(dim // 2)
    _norm_rotate[(triton.cdiv(batch * length, block), heads)](
        source, result, factors, cos, sin, batch * length, length, positions, *source.stride()[:3], result.stride(1),
        heads, eps, HALF=dim // 2, ROTATE=rope is not None, PART=part, BLOCK_M=block, num_warps=4,
    )  # fmt: skip
    return factors


def norm_rotate_backward_into(
    result: Tensor, grad: Tensor, normed: Tensor, factors: Tensor, first: int, rope: tuple[Tensor, Tensor] | None
) -> None:
    """Write into the first heads of a packed result the gradient of what `norm_rotate_into` made `normed` of.

    `grad` and `normed` are (B, T, heads, dim); their factors are those from `first` on of `factors` (B, T, ...). A
    slice of these would be aligned or not by the number of heads, and need a kernel for each.
    """
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    batch, length, heads, dim = grad.shape
    _check_packed(result, grad)
    _check_packed(normed, grad)
    assert factors.is_contiguous()
    cos, sin, positions = _angles(rope, factors, dim)
    part, block = tile_shape(dim // 2)
    _norm_rotate_backward[(triton.cdiv(batch * length, block), heads)](
        grad, normed, factors, result, cos, sin, batch * length, length, positions, *grad.stride()[:3],
        normed.stride(1), result.stride(1), factors.shape[2], first,
        HALF=dim // 2, ROTATE=rope is not None, PART=part, BLOCK_M=block, num_warps=4,
    )  # fmt: skip


def _check_packed(packed: Tensor, heads: Tensor) -> None:
    """The tokens of a packed tensor follow each other at one distance, and the heads of a token lie side by side."""
    assert packed.stride(0) == heads.shape[1] * packed.stride(1)
    assert packed.stride(2) == heads.shape[3]
    assert packed.stride(3) == 1


def _angles(rope: tuple[Tensor, Tensor] | None, unused: Tensor, dim: int) -> tuple[Tensor, Tensor, int]:
    """Cosines, sines and how many positions they have; without them something that is not read."""
    if rope is None:
        return unused, unused, 1
    cos, sin = rope
    return cos.contiguous(), sin.contiguous(), cos.numel() // dim


def tile_shape(pairs: int, size: int = 1024) -> tuple[int, int]:
    """Columns and rows of a tile that holds the pairs of some tokens, about `size` in all."""
    part = triton.next_power_of_2(pairs)
    return part, max(1, size // part)


@triton.jit
def _fold_gain(weight, gain, result, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    place = row[:, None] * width + at[None, :]
    factor = tl.load(gain + at, mask=at < width, other=0.0).to(tl.float32)
    value = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32) * factor[None, :]
    tl.store(result + place, value.to(result.dtype.element_ty), mask=inside)


def fold_gain_kernel(weight: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    weight = weight.contiguous()
    result = torch.empty_like(weight, dtype=dtype)
    rows, width = weight.shape
    block, held = min(256, triton.next_power_of_2(width)), 8
    _fold_gain[(triton.cdiv(rows, held), triton.cdiv(width, block))](
        weight, gain, result, rows, width, ROWS=held, BLOCK=block, num_warps=4
    )
    return result


@triton.jit
def _fold_gain_backward(  # type: ignore[no-untyped-def]
    grad, weight, gain, weight_grad, sums, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr
):
    # A program has ROWS x BLOCK elements TURNS times over, and adds up its rows.
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    factor = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS * TURNS
    for turn in range(TURNS):
        row = first + turn * ROWS + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & inside[None, :]
        place = row[:, None] * width + at[None, :]
        flow = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
        total += flow * tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
        tl.store(weight_grad + place, (flow * factor).to(weight_grad.dtype.element_ty), mask=there)
    tl.store(sums + tl.program_id(0) * width + at, tl.sum(total, 0), mask=inside)


def fold_gain_backward_kernel(grad: Tensor, weight: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    grad, weight = grad.contiguous(), weight.contiguous()
    rows, width = weight.shape
    block, held, turns = min(256, triton.next_power_of_2(width)), 8, 8
    programs = triton.cdiv(rows, held * turns)
    weight_grad = torch.empty_like(weight)
    sums = torch.empty(programs, width, dtype=torch.float32, device=weight.device)
    _fold_gain_backward[(programs, triton.cdiv(width, block))](
        grad, weight, gain, weight_grad, sums, rows, width, ROWS=held, BLOCK=block, TURNS=turns, num_warps=4
    )
    return weight_grad, sums.sum(0).to(gain.dtype)


@triton.jit
def _add_norm(x, branch, second, total, normed, scale, width, eps, SECOND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
    tl.store(normed + row * width + at, (value * inverse).to(normed.dtype.element_ty), mask=inside)


def add_norm_kernel(
    x: Tensor, branch: Tensor, second: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, branch = x.contiguous(), branch.contiguous()
    rows, width = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x, branch, branch if second is None else second.contiguous(), total, normed, scale, width, eps,
        SECOND=second is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return total, normed, scale


@triton.jit
def _add_norm_backward(  # type: ignore[no-untyped-def]
    normed, scale, total_grad, normed_grad, grad, copy, width, COPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    base = row * width + at
    unit = tl.load(normed + base, mask=inside, other=0.0).to(tl.float32)
    flow = tl.load(normed_grad + base, mask=inside, other=0.0).to(tl.float32)
    result = tl.load(total_grad + base, mask=inside, other=0.0).to(tl.float32)
    result += (flow - unit * (tl.sum(unit * flow) / width)) * tl.load(scale + row)
    tl.store(grad + base, result.to(grad.dtype.element_ty), mask=inside)
    if COPY:
        tl.store(copy + base, result.to(copy.dtype.element_ty), mask=inside)


def add_norm_backward_kernel(
    normed: Tensor, scale: Tensor, total_grad: Tensor, normed_grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    normed, total_grad, normed_grad = normed.contiguous(), total_grad.contiguous(), normed_grad.contiguous()
    rows, width = total_grad.shape
    grad = torch.empty_like(total_grad)
    copies = dtype != grad.dtype
    copy = torch.empty_like(grad, dtype=dtype) if copies else grad.new_empty(0)
    block = triton.next_power_of_2(width)
    _add_norm_backward[(rows,)](
        normed, scale, total_grad, normed_grad, grad, copy, width,
        COPY=copies, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return grad, copy


def warps_of(block: int) -> int:
    return min(16, max(1, block // 256))
