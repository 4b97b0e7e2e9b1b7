"""Tasks with a known answer: targets made by a teacher of so many heads, by even pooling, or by nothing at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

    Variants: heads that read and write along `rank` directions each; `strengths` of what they write, all 1 if not
    given; a common `mean` in every coordinate of the tokens, or `heavy_tails` (Student's t with 3 degrees of freedom,
    of variance 1); and `rows` sequences in all, which come again and again, instead of new ones all the time.

        KnownTask("teacher", heads=2, rank=4)
        KnownTask("noise", mean=1.0, rows=512)
    """

    kind: str = "teacher"
    heads: int = 4
    width: int = 32
    length: int = 16
    seed: int = 0
    rank: int = 1
    strengths: tuple[float, ...] = ()
    mean: float = 0.0
    heavy_tails: bool = False
    rows: int = 0

    def __post_init__(self) -> None:
        if self.kind not in TASKS:
            raise InputError("kind", self.kind, f"must be one of {', '.join(TASKS)}")
        if self.rank < 1:
            raise InputError("rank", self.rank, "must be at least 1")
        most = self.width // self._per_head
        if not 1 <= self.heads <= most:
            several = {4: "four"}.get(self._per_head, self._per_head)
            limit = f"must be from 1 to {most}: each head has {several} directions of {self.width}"
            raise InputError("heads", self.heads, limit)
        if len(self.strengths) not in (0, self.heads):
            raise InputError("strengths", self.strengths, f"must be {self.heads}, one for each head, or none")
        if self.rows < 0:
            raise InputError("rows", self.rows, "must be at least 1, or 0 for new ones all the time")

    @property
    def answer(self) -> int:
        """The number of heads that the task needs."""
        return self.heads if self.kind == "teacher" else 1

    @property
    def without_end(self) -> KnownTask:
        """The same task with rows that are new all the time."""
        return replace(self, rows=0)

    def batch(self, sequences: int, number: int, among: range | None = None) -> tuple[Tensor, Tensor]:
        """The tokens and targets of batch `number`; the same ones whenever it is asked for.

        Where rows repeat they are those of an epoch in their order, in another one each time; `among` are the rows that
        are meant, all if not given.
        """
        if not self.rows:
            return self._drawn(sequences, f"batch {number}")
        among = range(self.rows) if among is None else among
        places = range(number * sequences, (number + 1) * sequences)
        orders = {epoch: self._order(len(among), epoch) for epoch in {place // len(among) for place in places}}
        chosen = torch.stack([among.start + orders[place // len(among)][place % len(among)] for place in places])
        tokens, targets = self._all_rows
        return tokens[chosen], targets[chosen]

    def _drawn(self, sequences: int, purpose: str) -> tuple[Tensor, Tensor]:
        generator = self._generator(purpose)
        tokens = self._tokens(sequences, generator)
        return tokens, self._targets(tokens, generator) / self._size

    def _tokens(self, sequences: int, generator: torch.Generator) -> Tensor:
        shape = (sequences, self.length, self.width)
        tokens = torch.randn(shape, generator=generator)
        if self.heavy_tails:  # a normal number by the root of the sum of three squares, whose mean inverse is 1
            tokens = tokens / torch.randn(3, *shape, generator=generator).norm(dim=0)
        return tokens + self.mean

    def _targets(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        directions = self._directions
        if self.kind == "noise":
            return torch.randn(tokens.shape, generator=generator)
        if self.kind == "bag":
            return (tokens.mean(1, keepdim=True) @ directions[:, :1] * directions[:, 1]).expand_as(tokens)
        own = directions[:, : self._per_head * self.heads].unflatten(1, (self.heads, self._per_head))
        looking, seen, read, written = own.split((1, 1, self.rank, self.rank), 2)
        scores = SHARPNESS * torch.einsum("bih,bjh->bhij", tokens @ looking[..., 0], tokens @ seen[..., 0])
        values = torch.einsum("bjd,dhk->bhjk", tokens, read)
        strengths = tokens.new_tensor(self.strengths or (1.0,) * self.heads)
        return torch.einsum("bhij,bhjk,dhk,h->bid", scores.softmax(-1), values, written, strengths)

    @property
    def _per_head(self) -> int:
        return 2 + 2 * self.rank

    def _order(self, count: int, epoch: int) -> Tensor:
        return torch.randperm(count, generator=self._generator(f"epoch {epoch}"))

    @cached_property
    def _all_rows(self) -> tuple[Tensor, Tensor]:
        return self._drawn(self.rows, "rows")

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
        tokens = self._tokens(2048, generator)
        return self._targets(tokens, generator).square().sum(-1).mean().sqrt()
