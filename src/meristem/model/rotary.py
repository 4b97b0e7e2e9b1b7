"""Rotary positions, with one table per distinct head dim however many layers use it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meristem.plan import Rotary

RotaryPair = tuple[Tensor, Tensor]  # cosines and signed sines, each (T, 1, dim) or (B, T, 1, dim), float32


def frequencies_of(rotary: Rotary, dim: int) -> Tensor:
    """The angle by which each pair of a head of `dim` turns in a token, (dim / 2,)."""
    frequencies = rotary.base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    slowed = frequencies / rotary.factor
    if rotary.band is None or rotary.context is None:
        return slowed
    low, high = rotary.band
    turns = rotary.context * frequencies / (2 * math.pi)
    return slowed.lerp(frequencies, ((turns - low) / (high - low)).clamp(0, 1))


def rotary_table(dim: int, length: int, rotary: Rotary = Rotary()) -> RotaryPair:  # noqa: B008  (immutable)
    """Cosines and sines of the angles of `length` positions, each of shape (length, 1, dim).

    Coordinate i is paired with i + dim / 2; the sines of the first half carry the minus of the rotation.
    """
    frequencies = frequencies_of(rotary, dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class RotaryTables(nn.Module):
    """The tables of a model: a buffer pair for each distinct head dim, shared by all layers of that dim."""

    def __init__(self, dims: Iterable[int], length: int, rotary: Rotary = Rotary()) -> None:  # noqa: B008  (immutable)
        super().__init__()
        self.length, self.rotary = length, rotary
        self.add(dims)

    def add(self, dims: Iterable[int]) -> None:
        """Tables for head dims that have none yet, where the others are."""
        device = next((table.device for table in self.buffers()), None)
        for dim in sorted(set(dims)):
            if not hasattr(self, f"cos_{dim}"):
                cos, sin = rotary_table(dim, self.length, self.rotary)
                self.register_buffer(f"cos_{dim}", cos.to(device), persistent=False)
                self.register_buffer(f"sin_{dim}", sin.to(device), persistent=False)

    def pair(self, dim: int, positions: slice | Tensor) -> RotaryPair:
        """Rows of the table of one head dim: a range shared by the batch, or positions (B, T) of their own."""
        cos, sin = getattr(self, f"cos_{dim}"), getattr(self, f"sin_{dim}")
        return cos[positions], sin[positions]
