"""Tasks with a known answer: targets made by a teacher of so many heads, by even pooling, or by nothing at all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from meristem.choices import KnownTaskKind
from meristem.errors import InputError
from meristem.seeds import own_seed

TASKS: tuple[str, ...] = get_args(KnownTaskKind)
SHARPNESS = 2.5  # standard deviation of the teacher's scores


@dataclass(frozen=True)
class KnownTask:
    """Sequences of Gaussian tokens (B, length, width) and targets of the same shape, of unit size on average.

    Each of the teacher's heads looks along one direction, reads along another and writes along a third; all of them
    are orthogonal, so that no head can do the work of two. A `bag` needs one head, which looks everywhere alike, and
    `noise` cannot be learnt at all.
    """

    kind: str = "teacher"
    heads: int = 4
    width: int = 32
    length: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in TASKS:
            raise InputError("kind", self.kind, f"must be one of {', '.join(TASKS)}")
        if not 1 <= self.heads <= self.width // 4:
            limit = f"must be from 1 to {self.width // 4}: each head has four directions of {self.width}"
            raise InputError("heads", self.heads, limit)

    @property
    def answer(self) -> int:
        """The number of heads that the task needs."""
        return self.heads if self.kind == "teacher" else 1

    def batch(self, sequences: int, number: int) -> tuple[Tensor, Tensor]:
        """The tokens and targets of batch `number`; the same ones whenever it is asked for."""
        generator = self._generator(f"batch {number}")
        tokens = torch.randn(sequences, self.length, self.width, generator=generator)
        return tokens, self._targets(tokens, generator) / self._size

    def _targets(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        directions = self._directions
        if self.kind == "noise":
            return torch.randn(tokens.shape, generator=generator)
        if self.kind == "bag":
            return (tokens.mean(1, keepdim=True) @ directions[:, :1] * directions[:, 1]).expand_as(tokens)
        looking, seen, read, written = directions[:, : 4 * self.heads].unflatten(1, (self.heads, 4)).unbind(-1)
        scores = SHARPNESS * torch.einsum("bih,bjh->bhij", tokens @ looking, tokens @ seen)
        return torch.einsum("bhij,bjh,dh->bid", scores.softmax(-1), tokens @ read, written)

    def _generator(self, purpose: str) -> torch.Generator:
        # A generator of torch looks at 32 bits of its seed only: seeds that are put together bit by bit would be equal.
        return torch.Generator().manual_seed(own_seed(f"{self.seed}, {purpose}"))

    @cached_property
    def _directions(self) -> Tensor:
        """Orthonormal columns, (width, width)."""
        generator = self._generator("directions")
        return torch.linalg.qr(torch.randn(self.width, self.width, generator=generator))[0]

    @cached_property
    def _size(self) -> Tensor:
        generator = self._generator("size")
        tokens = torch.randn(2048, self.length, self.width, generator=generator)
        return self._targets(tokens, generator).square().sum(-1).mean().sqrt()
