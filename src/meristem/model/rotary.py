"""Rotary positions, with one table per distinct head dim however many layers use it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

THETA = 10_000.0

RotaryPair = tuple[Tensor, Tensor]  # cosines and signed sines, each (T, 1, dim) or (B, T, 1, dim), float32


def rotary_table(dim: int, length: int, theta: float = THETA) -> RotaryPair:
    """Cosines and sines of the angles t * theta^(-2 i / dim), each of shape (length, 1, dim).

    Coordinate i is paired with i + dim / 2; the sines of the first half carry the minus of the rotation.
    """
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x (B, T, heads, dim) by the angle of each position; computed in float32, or float64 for float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    swapped = wide.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (wide * cos + swapped * sin).to(x.dtype)


class _SplitHeads(torch.autograd.Function):
    """Written out because automatic backward pads and adds four large tensors where one pass will do."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        turned = heads + kv_heads
        # Values are copied along so that the packed projection need not be kept beside the result.
        result = torch.cat((rotate(packed[:, :, :turned], cos, sin), packed[:, :, turned:]), dim=2)
        return result[:, :, :heads], result[:, :, heads:turned], result[:, :, turned:]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return torch.cat((rotate(dq, cos, -sin), rotate(dk, cos, -sin), dv), dim=2), None, None, None, None


def split_heads(packed: Tensor, pair: RotaryPair, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned to their positions, and values, from packed (B, T, heads + 2 kv heads, dim)."""
    parts: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(packed, *pair, heads, kv_heads)  # type: ignore[no-untyped-call]
    return parts


class RotaryTables(nn.Module):
    """The tables of a model: a buffer pair for each distinct head dim, shared by all layers of that dim."""

    def __init__(self, dims: Iterable[int], length: int) -> None:
        super().__init__()
        for dim in sorted(set(dims)):
            cos, sin = rotary_table(dim, length)
            self.register_buffer(f"cos_{dim}", cos, persistent=False)
            self.register_buffer(f"sin_{dim}", sin, persistent=False)

    def pair(self, dim: int, positions: slice | Tensor) -> RotaryPair:
        """Rows of the table of one head dim: a range shared by the batch, or positions (B, T) of their own."""
        cos, sin = getattr(self, f"cos_{dim}"), getattr(self, f"sin_{dim}")
        return cos[positions], sin[positions]
