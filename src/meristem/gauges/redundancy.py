"""Which head the others could stand in for.

What the heads of a layer read, side by side, has second moments G. A head whose reading is nearly a linear function of
the others' can leave: the part of its output that they cannot make is given by a Schur complement of G, and the rest
is carried over to their output projections by the same regression.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-6  # of the mean diagonal entry of the moments


@dataclass(frozen=True)
class HeadMoments:
    """Second moments of what a layer's heads read: (heads e, heads e), heads of dim e side by side."""

    gram: Tensor
    head_dim: int

    @classmethod
    def of(cls, head_outputs: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """The second moments of head_outputs (B, heads, T, e), summed over `real` (B, T) tokens, and their number."""
        flat = head_outputs.transpose(1, 2).flatten(2)
        flat = flat.where(real[..., None], flat.new_zeros(())).flatten(0, 1).double()
        return flat.mT @ flat, real.sum().double()

    def shares(self, out: Tensor) -> Tensor:
        """For every head, the part of the layer's output that no combination of the others could make, (heads,).

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

    def folded(self, out: Tensor, head: int) -> Tensor:
        """The output projection (d, heads e) of the others with what they can make of a head's part, its own zero."""
        inverse, own = torch.cholesky_inverse(self._factor()), slice(head * self.head_dim, (head + 1) * self.head_dim)
        # Columns of the inverse give the regression of this head's reading on the others'.
        regression = -torch.linalg.solve(inverse[own, own], inverse[:, own], left=False)
        regression[own] = 0
        result = out.double() + out.double()[:, own] @ regression.mT
        result[:, own] = 0
        return result.to(out)

    def _factor(self) -> Tensor:
        """The Cholesky factor of the moments with a ridge."""
        diagonal = self.gram.diagonal()
        floor = RIDGE * diagonal.mean() + torch.finfo(torch.float64).tiny
        return _cholesky(self.gram.diagonal_scatter(diagonal + floor))


def _cholesky(matrix: Tensor) -> Tensor:
    """The Cholesky factor, all NaN where there is none: nobody waits for the device to find out."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return factor.where(failed[..., None, None] == 0, torch.nan)
