"""The CUDA forms of the operations in `decode_ops.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# --- products of a few rows -----------------------------------------------------------------------------------------
#
# With one text at a time a product is a matter of reading its weight once. The norm before it is small enough for every
# program to make it anew, and its factor can wait until the end, so that the weight is on its way from the start.


@triton.jit
def _inputs(x, branch, total, k, inside, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    # A piece of a row, with a norm that of the sum of stream and branch.
    value = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        value += tl.load(branch + k, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _matvec(  # type: ignore[no-untyped-def]
    x, branch, weight, total, result, outputs, width, eps,
    NORM: tl.constexpr, GLU: tl.constexpr, PIECES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n < outputs
    x += row * width
    branch += row * width
    total += row * width
    rows = weight + n.to(tl.int64)[:, None] * width
    square = tl.zeros((BLOCK_K,), tl.float32)
    parts = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for piece in tl.static_range(PIECES):  # unrolled, so that all loads are under way at once
        k = piece * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = k < width
        tile = there[:, None] & inside[None, :]
        w = tl.load(rows + k[None, :], mask=tile, other=0.0).to(tl.float32)
        value = _inputs(x, branch, total, k, inside, NORM)
        parts += w * value[None, :]
        if GLU:
            up = tl.load(rows + outputs * width + k[None, :], mask=tile, other=0.0).to(tl.float32)
            ups += up * value[None, :]
        if NORM:
            square += value * value
            tl.store(total + k, value.to(total.dtype.element_ty), mask=inside & (tl.program_id(0) == 0))
    y = tl.sum(parts, 1)
    if NORM:
        factor = tl.rsqrt(tl.sum(square, 0) / width + eps)
        y = y * factor
        if GLU:
            y = y * tl.sigmoid(y) * (tl.sum(ups, 1) * factor)
    tl.store(result + row * outputs + n, y.to(result.dtype.element_ty), mask=there)


def _launch_matvec(x: Tensor, branch: Tensor | None, weight: Tensor, outputs: int, eps: float) -> tuple[Tensor, Tensor]:
    x, rows = x.contiguous(), x.shape[0]
    width = x.shape[1]
    norm = branch is not None
    total = torch.empty_like(x) if norm else x
    result = torch.empty(rows, outputs, dtype=weight.dtype, device=x.device)
    block_k = max(256, triton.next_power_of_2(triton.cdiv(width, 8)))  # at most 8 pieces
    block_n = max(1, (4 if outputs <= 8192 else 16) * 256 // block_k)
    _matvec[(triton.cdiv(outputs, block_n), rows)](
        x, x if branch is None else branch.contiguous(), weight, total, result,
        outputs, width, eps,
        NORM=norm, GLU=weight.shape[0] != outputs, PIECES=triton.cdiv(width, block_k), BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=4,
    )  # fmt: skip
    return total, result


def norm_matvec(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _launch_matvec(x, branch, weight, weight.shape[0], eps)


def norm_swiglu_matvec(x: Tensor, branch: Tensor, gate_up: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _launch_matvec(x, branch, gate_up, gate_up.shape[0] // 2, eps)


def matvec(x: Tensor, weight: Tensor) -> Tensor:
    return _launch_matvec(x, None, weight, weight.shape[0], 0.0)[1]


# --- attention of the newest token ----------------------------------------------------------------------------------
#
# One program for each text and head, which turns the query and the new key by itself. Where these are too few to fill
# the device and texts may be long, several share the tokens of a head; a second kernel puts together what they read.

LONG = 1024  # tokens from which on a head is shared
SHARE = 256  # tokens of a share at least


@triton.jit
def _turned(heads, rope, d, swapped, inside, eps, DIM: tl.constexpr, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    # A head, rotated (and normed) and rounded as the cache holds it.
    x = tl.load(heads + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(heads + swapped, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(rope + d, mask=inside, other=0.0)
    sin = tl.load(rope + DIM + d, mask=inside, other=0.0)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
        x, y = x * factor, y * factor
    return (x * cos + y * sin).to(heads.dtype.element_ty)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    packed, cache, rope, position, padding, result, parts, peaks, sums, heads, kv_heads, capacity, scale, eps,
    DIM: tl.constexpr, NORM: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    program, share = tl.program_id(0), tl.program_id(1)
    row, head = (program // heads).to(tl.int64), program % heads
    group = heads // kv_heads
    shared = head // group  # its key/value head
    d = tl.arange(0, PART)
    inside = d < DIM
    swapped = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    packed += row * ((heads + 2 * kv_heads) * DIM)
    rope += row * (2 * DIM)
    keys = cache + (row * (2 * kv_heads) + shared) * capacity * DIM
    values = keys + kv_heads * capacity * DIM
    at = tl.load(position).to(tl.int32)
    first = at * 0
    if PADDED:
        first = tl.load(padding + row).to(tl.int32)

    query = _turned(packed + head * DIM, rope, d, swapped, inside, eps, DIM, NORM).to(tl.float32) * scale
    new_key = _turned(packed + (heads + shared) * DIM, rope, d, swapped, inside, eps, DIM, NORM)
    new_value = tl.load(packed + (heads + kv_heads + shared) * DIM + d, mask=inside, other=0.0)
    # The new token is read from here by all; one program of those that share its head writes it for later ones.
    writes = inside & (share == 0) & (head % group == 0)
    tl.store(keys + at * DIM + d, new_key, mask=writes)
    tl.store(values + at * DIM + d, new_value, mask=writes)

    # The first share counts the new token; the tokens before it are divided among all.
    peak = tl.where(share == 0, tl.sum(query * new_key.to(tl.float32), 0), -float("inf"))
    total = tl.where(share == 0, 1.0, 0.0)
    read = new_value.to(tl.float32) * total
    each = (at - first + SHARES - 1) // SHARES
    start = first + share * each
    stop = tl.minimum(start + each, at)
    for begin in range(start, stop, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        there = n < stop
        tile = there[:, None] & inside[None, :]
        key = tl.load(keys + n[:, None] * DIM + d[None, :], mask=tile, other=0.0)
        value = tl.load(values + n[:, None] * DIM + d[None, :], mask=tile, other=0.0)
        scores = tl.where(there, tl.sum(key.to(tl.float32) * query[None, :], 1), -float("inf"))
        top = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.exp(scores - top)
        faded = tl.exp(peak - top)
        read = read * faded + tl.sum(weights[:, None] * value.to(tl.float32), 0)
        total = total * faded + tl.sum(weights, 0)
        peak = top
    if SHARES == 1:
        tl.store(result + program.to(tl.int64) * DIM + d, (read / total).to(result.dtype.element_ty), mask=inside)
    else:
        place = program.to(tl.int64) * SHARES + share
        tl.store(parts + place * DIM + d, read, mask=inside)
        tl.store(peaks + place, peak)
        tl.store(sums + place, total)


@triton.jit
def _together(  # type: ignore[no-untyped-def]
    parts, peaks, sums, result, DIM: tl.constexpr, PART: tl.constexpr, SHARES: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PART)
    inside = d < DIM
    places = program * SHARES + tl.arange(0, SHARES)
    peak = tl.load(peaks + places)
    weights = tl.exp(peak - tl.max(peak, 0))  # a share without tokens has the peak -inf, and no weight
    total = tl.sum(tl.load(sums + places) * weights, 0)
    part = tl.load(parts + places[:, None] * DIM + d[None, :], mask=inside[None, :], other=0.0)
    read = tl.sum(part * weights[:, None], 0) / total
    tl.store(result + program * DIM + d, read.to(result.dtype.element_ty), mask=inside)


def shares_of(programs: int, capacity: int, processors: int) -> int:
    """How many programs share the tokens of a head: a power of two, 1 where all are busy anyway or texts are short."""
    most = min(16, capacity // SHARE, 2 * processors // programs)
    return 1 << most.bit_length() - 1 if capacity >= LONG and most > 1 else 1


def attend_kernel_(
    packed: Tensor, cache: Tensor, rope: Tensor, position: Tensor, padding: Tensor | None, heads: int,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    packed, rope = packed.contiguous(), rope.contiguous()
    batch, twice, capacity, dim = cache.shape
    assert cache.is_contiguous()
    programs = batch * heads
    shares = shares_of(programs, capacity, torch.cuda.get_device_properties(packed.device).multi_processor_count)
    result = torch.empty(batch, heads * dim, dtype=packed.dtype, device=packed.device)
    parts, peaks, sums = result, result, result
    if shares > 1:
        parts = torch.empty(programs * shares, dim, dtype=torch.float32, device=packed.device)
        peaks, sums = torch.empty(2, programs * shares, dtype=torch.float32, device=packed.device)
    part = triton.next_power_of_2(dim)
    _attend[(programs, shares)](
        packed, cache, rope, position, position if padding is None else padding, result, parts, peaks, sums,
        heads, twice // 2, capacity, dim**-0.5, 0.0 if eps is None else eps,
        DIM=dim, NORM=eps is not None, PADDED=padding is not None, PART=part, BLOCK=min(256, max(1, 8192 // part)),
        SHARES=shares, num_warps=8,
    )  # fmt: skip
    if shares > 1:
        _together[(programs,)](parts, peaks, sums, result, DIM=dim, PART=part, SHARES=shares, num_warps=4)
    return result
