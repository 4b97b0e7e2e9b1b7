"""Which head the others could stand in for.

What the heads of a layer read, side by side, has second moments G. A head whose reading is nearly a linear function of
the others' can leave: the part of its output that they cannot make is given by a Schur complement of G, and the rest
is carried over to their output projections by the same regression.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.gauges.gauge import Instrument
from meristem.gauges.probe import HeadsRead, Probe
from meristem.model.growable import Growable
from meristem.ranks import from_first_rank, sum_over_ranks, world

RIDGE = 1e-6  # of the mean diagonal entry of the moments


@dataclass(frozen=True)
class HeadMoments:
    """Second moments of what a layer's heads read: (heads e, heads e), heads of dim e side by side."""

    gram: Tensor
    head_dim: int

    def shares(self, out: Tensor) -> Tensor:
        """The part, for every head, of the layer's output that no combination of the others could make, (heads,).

        `out` (d, heads e) writes what the heads read to the stream.
        """
        out, factor = out.double(), self._factor()
        eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, eye, upper=False).unflatten(1, (-1, self.head_dim))
        # Diagonal blocks of the inverse of the moments, (heads, e, e): each is the inverse of a Schur complement.
        blocks = inverse.permute(1, 2, 0) @ inverse.transpose(0, 1)
        written = out.unflatten(1, (-1, self.head_dim)).permute(1, 2, 0)  # (heads, e, d)
        unique = torch.linalg.solve_triangular(_cholesky(blocks), written, upper=False).square().sum((1, 2))
        return unique / (out @ self.gram * out).sum().clamp(min=torch.finfo(torch.float64).tiny)

    def folded(self, out: Tensor, head: int, count: int = 1) -> Tensor:
        """The output projection (d, heads e) of the others with what they can make of a head's part, its own zero.

        With `count` that is the part of so many heads from this one on, which leave together.
        """
        inverse, own = self.inverse(), self.place(head, count)
        # Columns of the inverse give the regression of this head's reading on the others'.
        regression = -torch.linalg.solve(inverse[own, own], inverse[:, own], left=False)
        regression[own] = 0
        result = out.double() + out.double()[:, own] @ regression.mT
        result[:, own] = 0
        return result.to(out)

    def without(self, head: int, count: int = 1) -> HeadMoments:
        """The moments of the others, where `count` heads from this one on have left."""
        stays = torch.ones(len(self.gram), dtype=torch.bool, device=self.gram.device)
        stays[self.place(head, count)] = False
        return HeadMoments(self.gram[stays][:, stays], self.head_dim)

    def inverse(self) -> Tensor:
        """The inverse of the moments with a ridge."""
        return torch.cholesky_inverse(self._factor())

    def place(self, head: int, count: int = 1) -> slice:
        """The rows and columns of `count` heads from this one on."""
        return slice(head * self.head_dim, (head + count) * self.head_dim)

    def _factor(self) -> Tensor:
        """The Cholesky factor of the moments with a ridge."""
        diagonal = self.gram.diagonal()
        floor = RIDGE * diagonal.mean() + torch.finfo(torch.float64).tiny
        return _cholesky(self.gram.diagonal_scatter(diagonal + floor))


def _cholesky(matrix: Tensor) -> Tensor:
    """The Cholesky factor, all NaN where there is none: nobody waits for the device to find out."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return factor.where(failed[..., None, None] == 0, torch.nan)


def second_moments(head_outputs: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The second moments of head_outputs (B, heads, T, e), summed over `real` (B, T) tokens, and their number."""
    flat = head_outputs.transpose(1, 2).flatten(2)
    flat = flat.where(real[..., None], flat.new_zeros(())).flatten(0, 1).double()
    return flat.mT @ flat, real.sum().double()


@torch.no_grad()
def head_moments(batches: Iterable[HeadsRead]) -> list[HeadMoments]:
    """The moments of every layer's heads, over all processes."""
    grams: list[Tensor] = []
    count: Tensor | float = 0.0
    for read in batches:
        sums = [second_moments(head_outputs, read.real) for head_outputs in read.head_outputs]
        grams = [old + new for old, (new, _) in zip(grams, sums, strict=True)] if grams else [new for new, _ in sums]
        count = count + sums[0][1]
        dims = [head_outputs.shape[-1] for head_outputs in read.head_outputs]
    assert isinstance(count, Tensor)
    tokens_seen = sum_over_ranks(count)
    return [HeadMoments(sum_over_ranks(gram) / tokens_seen, dim) for gram, dim in zip(grams, dims, strict=True)]


@dataclass(frozen=True)
class HeadShares:
    """The part, for every head, of its layer's output that no combination of the others could make, by layer.

    A reading has a number from 0 to 1 for every head of every layer.

    >>> shares = HeadShares().instrument(model).read(probe)
    >>> [len(layer) for layer in shares]
    [4, 4]
    """

    def instrument(self, model: Growable) -> SharesInstrument:
        """What measures it on the batch at hand."""
        return SharesInstrument(model)


class SharesInstrument(Instrument):
    """Reads shares, (heads,) of every layer, as numbers."""

    def __init__(self, model: Growable) -> None:
        self.model = model

    @torch.no_grad()
    def read(self, probe: Probe) -> tuple[tuple[float, ...], ...]:
        blocks = zip(head_moments([probe.heads]), self.model.stack, strict=True)
        shares = [moments.shares(block.attention.out.weight) for moments, block in blocks]
        return from_first_rank(tuple(tuple(layer.tolist()) for layer in shares))


@dataclass(frozen=True)
class HeadStandIn:
    """The output projection of a layer with which the others stand in for a head, by the batch at hand."""

    layer: int
    head: int

    def instrument(self, model: Growable) -> StandInInstrument:
        """What computes it."""
        return StandInInstrument(self, model)


class StandInInstrument(Instrument):
    """Reads the projection (d, heads e), or None where the batch is not finite and the next one will do."""

    def __init__(self, gauge: HeadStandIn, model: Growable) -> None:
        self.gauge, self.model = gauge, model

    @torch.no_grad()
    def read(self, probe: Probe) -> Tensor | None:
        layer, head = self.gauge.layer, self.gauge.head
        out = self.model.stack[layer].attention.out.weight
        folded = head_moments([probe.heads])[layer].folded(out, head)
        return folded if bool(folded.isfinite().all()) else None


@dataclass(frozen=True)
class HeadTrial:
    """The loss with a head, and with the others in its place, on at least so many sequences not trained on yet.

    `out` (d, heads e) is the layer's output projection with what the others make of the head's part.

    >>> found = HeadTrial(layer=0, head=1, sequences=2).instrument(model).read(probe)
    >>> round(found.loss_with, 1), round(found.loss_without, 1), found.out.shape
    (4.6, 4.6, torch.Size([32, 32]))
    """

    layer: int
    head: int
    sequences: int

    def instrument(self, model: Growable) -> TrialInstrument:
        """What tries it."""
        return TrialInstrument(self, model)


@dataclass(frozen=True)
class TrialReading:
    """Both losses, and the output projection (d, heads e) with which the others stand in for the head."""

    loss_with: float
    loss_without: float
    out: Tensor


class TrialInstrument(Instrument):
    """Tries what a model does without a head, and leaves it as it was."""

    def __init__(self, gauge: HeadTrial, model: Growable) -> None:
        self.gauge, self.model = gauge, model

    @torch.no_grad()
    def read(self, probe: Probe) -> TrialReading:
        layer, head = self.gauge.layer, self.gauge.head
        weight = self.model.stack[layer].attention.out.weight
        old, new = weight.clone(), head_moments([probe.heads])[layer].folded(weight, head)
        enough = min(self.gauge.sequences, probe.rows or self.gauge.sequences)
        sums = torch.zeros(3, device=weight.device, dtype=torch.float64)
        try:
            for tokens, targets in probe.fresh():
                weight.copy_(old)
                with_head = self.model.loss(tokens, targets).double()
                weight.copy_(new)
                without = self.model.loss(tokens, targets).double()
                sums += len(tokens) * torch.stack((with_head, without, torch.ones_like(without)))
                if sums[2] * world() >= enough:
                    break
        finally:
            weight.copy_(old)
        before, after, count = sum_over_ranks(sums).tolist()
        if not count:
            raise InputError("fresh", "no batch", "must give batches to try a head on")
        return TrialReading(before / count, after / count, new)
