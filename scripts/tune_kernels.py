"""Times of our Triton kernels with other tile sizes, at the size of the 124M model. Needs a CUDA device.

    PYTHONPATH=src python scripts/tune_kernels.py [WORD ...]

The settings in model/triton_kernels.py and triton_loops.py were chosen from such a list on an H200. Each line is the
kernel, its settings, microseconds, and the memory traffic it stands for. With words, only kernels that have one of them
in their names are timed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton

from meristem.model import triton_kernels as kernels
from meristem.model import triton_loops as loops
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
        lambda warps: loops._add_unit[(ROWS,)](
            stream, narrow, copy, scale, WIDTH, 1e-5, BLOCK=1024, num_warps=warps
        ),
    )  # fmt: skip

    heads = [torch.randn(BATCH, LOOPED, LENGTH, DIM, device=device).bfloat16().transpose(1, 2) for _ in range(3)]
    strides = [s for head in heads for s in head.stride()[:3]]
    part = ROWS * LOOPED * DIM * 2 / 1e6  # megabytes of one of queries, keys, values
    tiles = list(itertools.product((4, 8, 16, 32, 64), (2, 4, 8)))
    packed, change, rotated = (torch.randn(ROWS, 4 * LOOPED, DIM, device=device).bfloat16() for _ in range(3))
    read, read_grad = (torch.randn(ROWS, LOOPED, DIM, device=device).bfloat16() for _ in range(2))
    followed, change_grad, scale_grad = packed[:, : 3 * LOOPED].clone(), rotated.clone(), scale.clone()
    shape = {"HEADS": LOOPED, "HALF": DIM // 2, "PART": PART}
    for four in (False, True):
        sweep(
            "unrotate" + " with more" * four, part * (3 + 3 + 3 + 6 * four), tiles,
            lambda m, warps, four=four: loops._unrotate[(triton.cdiv(ROWS, m),)](
                *heads, packed, scale, cos, sin, change, scale_grad, rotated, inner,
                ROWS, LENGTH, LENGTH, WIDTH, *strides, **shape, FOUR=four, BLOCK_M=m, num_warps=warps,
            ),
        )  # fmt: skip
    sweep(
        "follow", part * (4 + 4 + 1 + 3), tiles,
        lambda m, warps: loops._follow[(triton.cdiv(ROWS, m),)](
            packed, change, read, scale, cos, sin, followed, inner, ROWS, LENGTH, 1e-5, WIDTH,
            **shape, BLOCK_M=m, num_warps=warps,
        ),
    )  # fmt: skip
    sweep(
        "follow_backward", part * (3 + 3 + 4 + 1 + 1 + 4 + 4 + 1), tiles,
        lambda m, warps: loops._follow_backward[(triton.cdiv(ROWS, m),)](
            *heads, followed, inner, packed, change, read, scale, cos, sin, rotated, change_grad, read_grad, scale_grad,
            ROWS, LENGTH, LENGTH, WIDTH, *strides, **shape, BLOCK_M=m, num_warps=warps,
        ),
    )  # fmt: skip
    for count in (2 * LOOPED, 2 * HEADS):
        many = torch.randn(BATCH, LENGTH, count, DIM, device=device).bfloat16()
        pairs = triton.next_power_of_2(count * DIM // 2)
        sweep(
            f"rotate {count} heads", 2 * many.numel() * 2 / 1e6, itertools.product((1, 2, 4, 8, 16), (2, 4, 8)),
            lambda m, warps, many=many, count=count, pairs=pairs: kernels._rotate[(triton.cdiv(ROWS, m),)](
                many, many, cos, sin, ROWS, LENGTH, LENGTH, *many.stride()[:3], many.stride(1),
                HEADS=count, HALF=DIM // 2, SIGN=1, PART=pairs, BLOCK_M=m, num_warps=warps,
            ),
        )  # fmt: skip


if __name__ == "__main__":
    main()
