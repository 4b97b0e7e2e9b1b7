"""What the task still asks of attention: the steepest descent of the loss over all heads that could be added.

A new head that begins with no output changes the loss at first order along every pair of a score form M (which token
looks at which) and an output map W. The gauge follows the best such pair of low rank while the model trains. It sees a
layer's normed input x and the gradient of the loss by what its attention adds to the stream: with too few heads a
further one can follow that gradient, and where the present heads suffice none can.

All layers are followed together, in tensors whose first dimension is the layer. The work is matrix products, and
Cholesky factors as small as a head; nothing is read back from the device between decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meristem.ranks import sum_over_ranks

MEMORY = 0.9  # of the followed matrices, per sweep
TEST_MEMORY = 0.95  # of the sums that a decision reads, per feed
COVARIANCE_MEMORY = 0.95
SWEEPS = 2  # of alternating between score form and output map, per feed
# Of the covariance's mean eigenvalue, added to all of them. Making rare directions as strong as common ones lets a few
# rare tokens drown the demand: on text its certainty rises from 3 to 20 as this goes from 1e-4 of the largest to 4.
FLOOR = 4.0
STAY = 1e-2  # of the old basis in a new one, for directions in which nothing is asked for; others do not notice
FIRST_WHITENING, WHITENING = 20, 2  # steps towards a whitening matrix: from nothing, and from the last one


@dataclass(frozen=True)
class DemandReading:
    """Of one layer: how sure the demand is (mean over standard error), and the fall of the loss along a unit head."""

    certainty: float
    slope: float


class DemandGauge:
    """Follows the demand of `layers` layers of `width` for heads of `head_dim`.

    Under torch.distributed every process feeds its own sequences, as many as each other one, and all follow the same
    demand: what is summed over sequences is summed over processes too.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        head_dim: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layers, self.width, self.head_dim = layers, width, head_dim
        self.place: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        self.seed, self.resets = seed, -1
        self.covariance: Tensor | None = None  # (layers, d, d)
        self.mean = self.whitener = torch.empty(0)  # (layers, 1, 1, d) and (layers, d, d)
        self.reset()

    def reset(self) -> None:
        """Forget what was demanded, as after a birth; what is known of the inputs stays."""
        self.resets += 1
        generator = torch.Generator().manual_seed(self.seed + self.resets)
        self.scores = _LowRank(self.layers, self.width, self.head_dim, generator, self.place)
        self.outputs = _LowRank(self.layers, self.width, self.head_dim, generator, self.place)
        self.sums = torch.zeros(4, self.layers, **self.place)  # of gains, their variance, responses, sequences
        self.feeds = 0

    @torch.no_grad()
    def feed(self, inputs: Tensor, gradients: Tensor, allowed: Tensor) -> None:
        """Take in a batch: normed inputs and gradients by the attention's output, each (layers, B, T, d).

        Gradients are those of the mean loss times the number of its tokens. `allowed` (T, T) or (B, T, T) says which
        tokens (columns) each token (row) may look at; rows of padding are empty.
        """
        inputs, gradients, allowed = (part.to(**self.place) for part in (inputs, gradients, allowed))
        real = allowed.sum(-1) > 0  # (T,) or (B, T)
        x = self._whitened(inputs, real.expand(inputs.shape[1], -1))
        if self.feeds:
            self._test(x, gradients, allowed)
        count = sum_over_ranks(torch.tensor(float(inputs.shape[1]), **self.place))
        for _ in range(SWEEPS):
            with _coarse_products():
                responses = self._responses(x, allowed)
                outputs = -gradients.flatten(1, 2).mT @ responses.flatten(1, 2)
            self.outputs.add(sum_over_ranks(outputs) / count)
            with _coarse_products():
                wanted = -(gradients @ self.outputs.left_core[:, None]) @ (x @ self.outputs.right[:, None]).mT
                scores = (x.mT @ (_centred(wanted, allowed) @ x)).sum(1)
            self.scores.add(sum_over_ranks(scores) / count)
        self.feeds += 1

    def readings(self) -> list[DemandReading]:
        """The demand of every layer, from the feeds since the last reset, the recent ones most."""
        if self.feeds < 2:
            return [DemandReading(0.0, 0.0)] * self.layers
        gain, variance, size, count = self.sums.double().cpu()
        mean = gain / count
        certainty = mean / (variance / count / count).clamp(min=1e-300).sqrt()
        slope = mean / (size / count).clamp(min=1e-300).sqrt()
        return [DemandReading(z, g) for z, g in zip(certainty.tolist(), slope.tolist(), strict=True)]

    def directions(self, layer: int) -> tuple[Tensor, Tensor]:
        """Query and key projections (e, d) of the head that is asked for, each of Frobenius norm sqrt(e)."""
        assert self.covariance is not None
        left, values, right = torch.linalg.svd(self.scores.core[layer])
        root = values.sqrt()
        query = self.whitener[layer] @ (self.scores.left[layer] @ left * root)
        key = self.whitener[layer] @ (self.scores.right[layer] @ right.mT * root)
        size = math.sqrt(self.head_dim)
        return (query * size / query.norm()).T, (key * size / key.norm()).T

    def spectra(self, earlier: Tensor, feeds: int) -> list[list[float]]:
        """Of every layer, the singular values of the score form that is asked for, the largest first.

        `earlier` is `scores.total` as it was when `feeds` feeds fewer had been seen. What was asked for then says which
        directions there are, and what came since how strong they are, so that noise has no strength on average.
        """
        later = self.scores.total - MEMORY ** (SWEEPS * feeds) * earlier
        left, _, right = torch.linalg.svd(earlier.double())
        strengths = torch.linalg.vecdot(left.mT, right @ later.double().mT)
        return strengths.sort(dim=-1, descending=True).values.tolist()

    def tensors(self) -> dict[str, Tensor]:
        """The large part of the state."""
        tensors = {"sums": self.sums}
        if self.covariance is not None:
            tensors |= {"covariance": self.covariance, "mean": self.mean, "whitener": self.whitener}
        for name, part in (("scores", self.scores), ("outputs", self.outputs)):
            tensors |= {f"{name}.{key}": value for key, value in vars(part).items()}
        return tensors

    def values(self) -> dict[str, int]:
        """The rest of the state, for JSON; `load` goes on from both exactly."""
        return {"resets": self.resets, "feeds": self.feeds}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from a state."""
        placed = {name: tensor.to(**self.place) for name, tensor in tensors.items()}
        self.sums, self.resets, self.feeds = placed["sums"], values["resets"], values["feeds"]
        if "covariance" in placed:
            self.covariance, self.mean, self.whitener = (placed[name] for name in ("covariance", "mean", "whitener"))
        for name, part in (("scores", self.scores), ("outputs", self.outputs)):
            vars(part).update({key: placed[f"{name}.{key}"] for key in vars(part)})

    def _test(self, x: Tensor, gradients: Tensor, allowed: Tensor) -> None:
        """How much the head followed so far would gain on this batch, which it has not seen yet."""
        with _coarse_products():
            responses = self._responses(x, allowed)
            written = (responses @ self.outputs.right[:, None]) @ self.outputs.left_core.mT[:, None]
        gains = -(gradients * written).sum((2, 3))
        count = torch.full_like(gains[:, 0], gains.shape[1])
        gain, count = sum_over_ranks(torch.stack((gains.sum(1), count)))
        spread = (gains - (gain / count)[:, None]).square().sum(1)
        spread, size = sum_over_ranks(torch.stack((spread, written.square().sum((1, 2, 3)))))
        self.sums = TEST_MEMORY * self.sums + torch.stack((gain, spread, size, count))

    def _responses(self, x: Tensor, allowed: Tensor) -> Tensor:
        """What a head with these scores would bring together, to first order around even attention."""
        scores = (x @ self.scores.left_core[:, None]) @ (x @ self.scores.right[:, None]).mT
        return _centred(scores, allowed) @ x

    def _whitened(self, inputs: Tensor, real: Tensor) -> Tensor:
        """Inputs with their mean taken away and strong directions weakened, 0 where there is no token."""
        weight = real.to(inputs)[None, :, :, None]
        count = sum_over_ranks(weight.sum())
        mean = sum_over_ranks((inputs * weight).sum((1, 2), keepdim=True)) / count
        flat = ((inputs - mean) * weight).flatten(1, 2)
        covariance = sum_over_ranks(flat.mT @ flat) / count
        steps = WHITENING
        if self.covariance is None:
            self.covariance, self.mean, steps = covariance, mean, FIRST_WHITENING
            trace = covariance.diagonal(dim1=1, dim2=2).sum(-1)
            # Starts below the inverse root of every eigenvalue, from where the iteration converges.
            self.whitener = torch.eye(self.width, **self.place) / ((1 + FLOOR) * trace).sqrt()[:, None, None]
        else:
            self.covariance = COVARIANCE_MEMORY * self.covariance + (1 - COVARIANCE_MEMORY) * covariance
            self.mean = COVARIANCE_MEMORY * self.mean + (1 - COVARIANCE_MEMORY) * mean
        eye = torch.eye(self.width, **self.place)
        floor = FLOOR * self.covariance.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
        for _ in range(steps):
            # Polar iteration of covariance^(1/2) @ whitener, which ends where that is orthogonal. It converges where
            # the product's eigenvalues are below 3, so a whitener that is too large by now is made smaller first.
            product = self.whitener.mT @ (self.covariance + floor * eye) @ self.whitener
            largest = _largest_eigenvalue(product)
            shrink = torch.where(largest > 1.5, 0.8 / largest, torch.ones_like(largest))
            self.whitener = 0.5 * shrink.sqrt() * self.whitener @ (3 * eye - shrink * product)
        return ((inputs - self.mean) * weight) @ self.whitener[:, None]


class _LowRank:
    """The best low-rank part, of unit size, of slowly changing matrices (layers, d, d): left @ core @ right.T.

    Followed by subspace iteration that goes on from where it was.
    """

    def __init__(self, layers: int, width: int, rank: int, generator: torch.Generator, place: dict[str, Any]) -> None:
        self.total = torch.zeros(layers, width, width, **place)
        start = torch.randn(2, layers, width, rank, generator=generator).to(**place)
        self.left, self.right = _orthonormal(start[0]), _orthonormal(start[1])
        self.core = torch.eye(rank, **place).repeat(layers, 1, 1) / math.sqrt(rank)

    @property
    def left_core(self) -> Tensor:
        return self.left @ self.core

    def add(self, new: Tensor) -> None:
        self.total = MEMORY * self.total + (1 - MEMORY) * new
        self.left = _orthonormal(_unit(self.total @ self.right) + STAY * self.left)
        self.right = _orthonormal(_unit(self.total.mT @ self.left) + STAY * self.right)
        core = self.left.mT @ self.total @ self.right
        self.core = _unit(core)


@contextmanager
def _coarse_products() -> Iterator[None]:
    """Products over all tokens, which on a GPU may round their factors: noise is far larger than that."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _unit(matrices: Tensor) -> Tensor:
    return matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns, (layers, d, k): two rounds of Cholesky's factors of their inner products."""
    for _ in range(2):
        inner = columns.mT @ columns
        eye = torch.eye(inner.shape[-1], device=columns.device, dtype=columns.dtype)
        slack = 1e-7 * inner.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] + 1e-30
        factor, _ = torch.linalg.cholesky_ex(inner + slack * eye)
        columns = torch.linalg.solve_triangular(factor, columns.mT, upper=False).mT
    return columns


def _largest_eigenvalue(matrices: Tensor, rounds: int = 8) -> Tensor:
    """Of positive matrices (layers, d, d), nearly: (layers, 1, 1)."""
    vector = torch.ones_like(matrices[:, :, :1])
    for _ in range(rounds):
        product = matrices @ vector
        vector = product / product.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return vector.mT @ matrices @ vector


def _centred(scores: Tensor, allowed: Tensor) -> Tensor:
    """The change of a softmax around even attention: scores minus their row's mean, over the number of tokens seen."""
    count = allowed.sum(-1, keepdim=True).clamp(min=1)
    mean = (scores * allowed).sum(-1, keepdim=True) / count
    return (scores - mean) * allowed / count
