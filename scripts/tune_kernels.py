"""Times of our Triton kernels with other tile sizes, at the size of the 124M model. Needs a CUDA device.

    PYTHONPATH=src python scripts/tune_kernels.py [WORD ...]

The settings in model/triton_kernels.py were chosen from such a list on an H200. Each line is the kernel, its settings,
microseconds, and the memory traffic it stands for. "narrow backward" is the whole of `narrow_backward_kernels`, in each
way it can be done (PRODUCT_APART, WEIGHTS_ASIDE); `_narrow_rows` here is a candidate for its product. With words, only
kernels that have one of them in their names are timed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meristem.model import triton_kernels as kernels
from meristem.model.rotary import rotary_table

BATCH, LENGTH, WIDTH, HEADS, LOOPED, DIM = 32, 1024, 768, 12, 2, 64
ROWS, PART = BATCH * LENGTH, LOOPED * DIM // 2


def microseconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Time of one call, from a recorded graph: small kernels are over before the host has launched the next."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / (3 * repeats)


def sweep(name: str, megabytes: float, settings: Iterable[Any], launch: Callable[..., Any]) -> None:
    words = sys.argv[1:]
    if words and not any(word in name for word in words):
        return
    for chosen in settings:
        try:
            time = microseconds(lambda chosen=chosen: launch(*chosen))  # type: ignore[misc]
            print(f"{name:<34} {chosen!s:<22} {time:7.1f} us  {megabytes / time:5.2f} TB/s", flush=True)
        except Exception as error:  # a setting that does not fit this device
            print(f"{name:<34} {chosen!s:<22} {str(error)[:60]}", flush=True)


@triton.jit
def _narrow_rows(  # type: ignore[no-untyped-def]
    total_grad, unit, scale, inner, heads_grad, weight, grad, copy, rows, width,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # `_narrow_product` with rows that stay: a program reads its heads once and goes over all columns of the stream.
    depth: tl.constexpr = FIRST + SECOND
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (m < rows)[:, None]
    k = tl.arange(0, FIRST)
    a = tl.load(heads_grad + m[:, None] * depth + k[None, :], mask=row, other=0.0)
    if SECOND > 0:
        more_k = FIRST + tl.arange(0, SECOND)
        more_a = tl.load(heads_grad + m[:, None] * depth + more_k[None, :], mask=row, other=0.0)
    factor = tl.load(scale + m, mask=m < rows, other=0.0)[:, None]
    back = tl.load(inner + m, mask=m < rows, other=0.0)[:, None]
    for start in range(0, width, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at = m[:, None] * width + n[None, :]
        inside = row & (n < width)[None, :]
        arriving = tl.load(total_grad + at, mask=inside, other=0.0)
        normed = tl.load(unit + at, mask=inside, other=0.0)
        b = tl.load(weight + k[:, None] * width + n[None, :], mask=(n < width)[None, :], other=0.0)
        sums = tl.dot(a, b)
        if SECOND > 0:
            more_b = tl.load(weight + more_k[:, None] * width + n[None, :], mask=(n < width)[None, :], other=0.0)
            sums = tl.dot(more_a, more_b, sums)
        sums = sums * factor + arriving.to(tl.float32) - normed.to(tl.float32) * back
        tl.store(grad + at, sums.to(grad.dtype.element_ty), mask=inside)
        tl.store(copy + at, sums.to(copy.dtype.element_ty), mask=inside)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda"
    cos, sin = (table.cuda() for table in rotary_table(DIM, LENGTH))
    stream, grad = (torch.randn(ROWS, WIDTH, device=device) for _ in range(2))
    narrow, copy, second = (torch.randn(ROWS, WIDTH, device=device).bfloat16() for _ in range(3))
    gain, scale = torch.rand(WIDTH, device=device) + 0.5, torch.rand(ROWS, device=device) + 0.5
    result, inner = torch.empty_like(stream), torch.empty_like(scale)
    megabyte = ROWS * WIDTH / 1e6

    shares = torch.empty(64 * 132, WIDTH, device=device)
    sweep(
        "add_norm_backward", megabyte * (4 + 4 + 2 + 4 + 2), itertools.product((8, 16, 32, 64), (1, 2, 4)),
        lambda times, warps: kernels._add_norm_backward[(times * 132,)](
            stream, scale, gain, grad, narrow, result, copy, shares, ROWS, WIDTH,
            COPY=True, BLOCK=1024, num_warps=warps,
        ),
    )  # fmt: skip
    for two in (False, True):
        sweep(
            "add_norm" + " of two" * two, megabyte * (4 + 2 + 2 * two + 4 + 2), [(1,), (2,), (4,), (8,)],
            lambda warps, two=two: kernels._add_norm[(ROWS,)](
                stream, narrow, second, gain, result, copy, scale, WIDTH, 1e-5,
                SECOND=two, BLOCK=1024, num_warps=warps,
            ),
        )  # fmt: skip
    sweep(
        "add_unit", megabyte * (4 + 2 + 2), [(1,), (2,), (4,), (8,)],
        lambda warps: kernels._add_unit[(ROWS,)](
            stream, narrow, copy, scale, WIDTH, 1e-5, BLOCK=1024, num_warps=warps
        ),
    )  # fmt: skip
    for parts in (3, 4):  # a single pass, or the first of several
        narrow_backward(parts * LOOPED * DIM, stream, grad, narrow, copy, scale, inner, result)

    heads = [torch.randn(BATCH, LOOPED, LENGTH, DIM, device=device).bfloat16().transpose(1, 2) for _ in range(3)]
    strides = [s for head in heads for s in head.stride()[:3]]
    part = ROWS * LOOPED * DIM * 2 / 1e6  # megabytes of one of queries, keys, values
    tiles = list(itertools.product((4, 8, 16, 32, 64), (2, 4, 8)))
    packed, change, turned = (torch.randn(ROWS, 4 * LOOPED, DIM, device=device).bfloat16() for _ in range(3))
    read, read_grad = (torch.randn(ROWS, LOOPED, DIM, device=device).bfloat16() for _ in range(2))
    followed, change_grad, scale_grad = packed[:, : 3 * LOOPED].clone(), turned.clone(), scale.clone()
    shape = {"HEADS": LOOPED, "HALF": DIM // 2, "PART": PART}
    for four in (False, True):
        sweep(
            "unturn" + " with more" * four, part * (3 + 3 + 3 + 6 * four), tiles,
            lambda m, warps, four=four: kernels._unturn[(triton.cdiv(ROWS, m),)](
                *heads, packed, scale, cos, sin, change, scale_grad, turned, inner,
                ROWS, LENGTH, LENGTH, WIDTH, *strides, **shape, FOUR=four, BLOCK_M=m, num_warps=warps,
            ),
        )  # fmt: skip
    sweep(
        "follow", part * (4 + 4 + 1 + 3), tiles,
        lambda m, warps: kernels._follow[(triton.cdiv(ROWS, m),)](
            packed, change, read, scale, cos, sin, followed, inner, ROWS, LENGTH, 1e-5, WIDTH,
            **shape, BLOCK_M=m, num_warps=warps,
        ),
    )  # fmt: skip
    sweep(
        "follow_backward", part * (3 + 3 + 4 + 1 + 1 + 4 + 4 + 1), tiles,
        lambda m, warps: kernels._follow_backward[(triton.cdiv(ROWS, m),)](
            *heads, followed, inner, packed, change, read, scale, cos, sin, turned, change_grad, read_grad, scale_grad,
            ROWS, LENGTH, LENGTH, WIDTH, *strides, **shape, BLOCK_M=m, num_warps=warps,
        ),
    )  # fmt: skip
    for count in (2 * LOOPED, 2 * HEADS):
        many = torch.randn(BATCH, LENGTH, count, DIM, device=device).bfloat16()
        pairs = triton.next_power_of_2(count * DIM // 2)
        sweep(
            f"turn {count} heads", 2 * many.numel() * 2 / 1e6, itertools.product((1, 2, 4, 8, 16), (2, 4, 8)),
            lambda m, warps, many=many, count=count, pairs=pairs: kernels._turn[(triton.cdiv(ROWS, m),)](
                many, many, cos, sin, ROWS, LENGTH, LENGTH, *many.stride()[:3], many.stride(1),
                HEADS=count, HALF=DIM // 2, SIGN=1, PART=pairs, BLOCK_M=m, num_warps=warps,
            ),
        )  # fmt: skip


def narrow_backward(
    depth: int, stream: Tensor, grad: Tensor, unit: Tensor, copy: Tensor, scale: Tensor, inner: Tensor, result: Tensor
) -> None:
    """All ways to the gradients of the stream and of the weight of `depth` rows."""
    heads_grad, weight, product = (
        torch.randn(n, m, device=stream.device).bfloat16() for n, m in ((ROWS, depth), (depth, WIDTH), (ROWS, WIDTH))
    )
    megabyte, narrow = ROWS * WIDTH / 1e6, ROWS * depth * 2 / 1e6
    sweep(
        f"product {depth}", megabyte * (4 + 2 + 4 + 2) + narrow,
        [
            (64, 64, 64, 4, 3), (64, 64, 64, 4, 4), (64, 64, 128, 4, 2), (64, 64, 128, 4, 3), (64, 128, 64, 4, 3),
            (128, 64, 64, 4, 3), (64, 32, 64, 4, 3), (64, 32, 128, 4, 3), (64, 64, 64, 8, 3), (128, 128, 64, 8, 3),
        ],
        lambda m, n, k, warps, stages: kernels._narrow_product[(triton.cdiv(ROWS, m) * triton.cdiv(WIDTH, n),)](
            grad, unit, scale, inner, heads_grad, weight, result, copy, ROWS, WIDTH, depth,
            COPY=True, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages,
        ),
    )  # fmt: skip
    first = 1 << (depth.bit_length() - 1)  # two powers of two
    sweep(
        f"product {depth}, rows", megabyte * (4 + 2 + 4 + 2) + narrow,
        [
            (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (128, 32, 8, 2),
            (128, 32, 8, 3), (128, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2),
        ],
        lambda m, n, warps, stages: _narrow_rows[(triton.cdiv(ROWS, m),)](
            grad, unit, scale, inner, heads_grad, weight, result, copy, ROWS, WIDTH,
            FIRST=first, SECOND=depth - first, BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages,
        ),
    )  # fmt: skip
    sweep(
        f"sum after product {depth}", megabyte * (4 + 2 + 2 + 4 + 2), [(1,), (2,), (4,), (8,)],
        lambda warps: kernels._narrow_sum[(ROWS,)](
            grad, unit, scale, inner, product, result, copy, WIDTH, COPY=True, BLOCK=1024, num_warps=warps
        ),
    )  # fmt: skip
    sweep(f"its product {depth}", megabyte * 2 + narrow, [()], lambda: torch.mm(heads_grad, weight, out=product))
    ways = [{"PRODUCT_APART": apart, "WEIGHTS_ASIDE": aside} for apart in (False, True) for aside in (False, True)]
    before = {name: getattr(kernels, name) for name in ways[0]}
    for way in ways:
        vars(kernels).update(way)
        name = f"narrow backward {depth}" + ", apart" * way["PRODUCT_APART"] + ", aside" * way["WEIGHTS_ASIDE"]
        moved = megabyte * (4 + 2 + 4 + 2 + 2 + 4 * way["PRODUCT_APART"]) + narrow * 2
        call = partial(kernels.narrow_backward_kernels, grad, unit, scale, inner, heads_grad, weight, torch.bfloat16)
        sweep(name, moved, [()], call)
    vars(kernels).update(before)


if __name__ == "__main__":
    main()
