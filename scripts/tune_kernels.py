"""Times of our Triton kernels with other tile sizes, at the size of the 124M model. Needs a CUDA device.

    PYTHONPATH=src python scripts/tune_kernels.py

The settings in model/triton_kernels.py were chosen from such a list on an H200. Each line is the kernel, its settings,
microseconds, and the memory traffic it stands for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton

from meristem.model import triton_kernels as kernels
from meristem.model.rotary import rotary_table

BATCH, LENGTH, WIDTH, HEADS, LOOPED, DIM = 32, 1024, 768, 12, 2, 64
ROWS, PART, INNER = BATCH * LENGTH, LOOPED * DIM // 2, 3 * LOOPED * DIM


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
    for chosen in settings:
        try:
            time = microseconds(lambda chosen=chosen: launch(*chosen))  # type: ignore[misc]
            print(f"{name:<18} {chosen!s:<28} {time:7.1f} us  {megabytes / time:5.2f} TB/s", flush=True)
        except Exception as error:  # a setting that does not fit this device
            print(f"{name:<18} {chosen!s:<28} {str(error)[:60]}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda"
    cos, sin = (table.cuda() for table in rotary_table(DIM, LENGTH))
    stream, grad = (torch.randn(ROWS, WIDTH, device=device) for _ in range(2))
    narrow, copy = (torch.randn(ROWS, WIDTH, device=device).bfloat16() for _ in range(2))
    gain, scale = torch.rand(WIDTH, device=device) + 0.5, torch.rand(ROWS, device=device) + 0.5
    result, inner = torch.empty_like(stream), torch.empty_like(scale)
    megabyte = ROWS * WIDTH / 1e6

    partial = torch.empty(64 * 132, WIDTH, device=device)
    sweep(
        "add_norm_backward", megabyte * (4 + 4 + 2 + 4 + 2), itertools.product((8, 16, 32, 64), (1, 2, 4)),
        lambda times, warps: kernels._add_norm_backward[(times * 132,)](
            stream, scale, gain, grad, narrow, result, copy, partial, ROWS, WIDTH,
            COPY=True, BLOCK=1024, num_warps=warps,
        ),
    )  # fmt: skip
    sweep(
        "add_norm", megabyte * (4 + 2 + 4 + 2), [(1,), (2,), (4,), (8,)],
        lambda warps: kernels._add_norm[(ROWS,)](
            stream, narrow, gain, result, copy, scale, WIDTH, 1e-5, BLOCK=1024, num_warps=warps
        ),
    )  # fmt: skip
    dqkv, weight = (torch.randn(n, m, device=device).bfloat16() for n, m in ((ROWS, INNER), (INNER, WIDTH)))
    sweep(
        "narrow_backward", megabyte * (4 + 2 + 4 + 2) + ROWS * INNER * 2 / 1e6,
        [
            (64, 64, 64, 4, 3), (64, 64, 64, 4, 2), (64, 64, 64, 4, 4), (64, 64, 128, 4, 2), (64, 64, 128, 4, 3),
            (64, 128, 64, 4, 3), (64, 128, 64, 8, 3), (128, 64, 64, 4, 3), (128, 64, 64, 8, 3), (32, 64, 64, 4, 3),
            (32, 128, 64, 4, 3), (64, 32, 64, 4, 3), (64, 64, 64, 8, 3), (128, 128, 64, 8, 3), (16, 128, 64, 4, 3),
            (32, 64, 128, 4, 3), (32, 64, 64, 2, 3), (64, 256, 64, 8, 2),
        ],
        lambda m, n, k, warps, stages: kernels._narrow_backward[(triton.cdiv(ROWS, m) * triton.cdiv(WIDTH, n),)](
            grad, narrow, scale, inner, dqkv, weight, result, copy, ROWS, WIDTH, INNER,
            COPY=True, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages,
        ),
    )  # fmt: skip
    heads = [torch.randn(BATCH, LOOPED, LENGTH, DIM, device=device).bfloat16().transpose(1, 2) for _ in range(3)]
    packed = torch.randn(ROWS, 3 * LOOPED, DIM, device=device).bfloat16()
    turned = torch.empty_like(packed)
    strides = [s for head in heads for s in head.stride()[:3]]
    sweep(
        "unturn", 3 * ROWS * INNER * 2 / 1e6, itertools.product((4, 8, 16, 32, 64), (2, 4, 8)),
        lambda m, warps: kernels._unturn[(triton.cdiv(ROWS, m),)](
            *heads, packed, scale, cos, sin, turned, inner, ROWS, LENGTH, LENGTH, WIDTH, *strides,
            HEADS=LOOPED, HALF=DIM // 2, PART=PART, BLOCK_M=m, num_warps=warps,
        ),
    )  # fmt: skip
    for count in (2 * LOOPED, 2 * HEADS):
        many = torch.randn(BATCH, LENGTH, count, DIM, device=device).bfloat16()
        part = triton.next_power_of_2(count * DIM // 2)
        sweep(
            f"turn {count} heads", 2 * many.numel() * 2 / 1e6, itertools.product((1, 2, 4, 8, 16), (2, 4, 8)),
            lambda m, warps, many=many, count=count, part=part: kernels._turn[(triton.cdiv(ROWS, m),)](
                many, many, cos, sin, ROWS, LENGTH, LENGTH, *many.stride()[:3], many.stride(1),
                HEADS=count, HALF=DIM // 2, SIGN=1, PART=part, BLOCK_M=m, num_warps=warps,
            ),
        )  # fmt: skip


if __name__ == "__main__":
    main()
