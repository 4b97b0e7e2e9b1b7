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
    def of(cls, mixed: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the tokens of mixed (B, heads, T, e) where `real` (B, T), and their number."""
        flat = mixed.transpose(1, 2).flatten(2)[real].double()
        return flat.mT @ flat, torch.tensor(float(len(flat)), dtype=torch.float64, device=flat.device)

    def shares(self, out: Tensor) -> Tensor:
        """For every head, the part of the layer's output that no combination of the others could make, (heads,).

        `out` (d, heads e) writes what the heads read to the stream.
        """
        blocks = self._blocks(self._inverse())  # of the inverse; each is the inverse of a Schur complement
        written = out.double().unflatten(1, (-1, self.head_dim)).transpose(0, 1)  # (heads, d, e)
        unique = torch.linalg.solve(blocks, written.mT)
        total = (out.double() @ self.gram * out.double()).sum()
        return (written.mT * unique).sum((1, 2)) / total.clamp(min=torch.finfo(torch.float64).tiny)

    def folded(self, out: Tensor, head: int) -> Tensor:
        """The output projection (d, heads e) of the others with what they can make of a head's part, its own zero."""
        inverse, own = self._inverse(), slice(head * self.head_dim, (head + 1) * self.head_dim)
        # Columns of the inverse give the regression of this head's reading on the others'.
        regression = -torch.linalg.solve(inverse[own, own], inverse[:, own], left=False)
        regression[own] = 0
        result = out.double() + out.double()[:, own] @ regression.mT
        result[:, own] = 0
        return result.to(out)

    def _inverse(self) -> Tensor:
        eye = torch.eye(len(self.gram), dtype=self.gram.dtype, device=self.gram.device)
        floor = RIDGE * self.gram.diagonal().mean() + torch.finfo(torch.float64).tiny
        return torch.cholesky_inverse(torch.linalg.cholesky(self.gram + floor * eye))

    def _blocks(self, matrix: Tensor) -> Tensor:
        """The diagonal blocks of a matrix, (heads, e, e)."""
        e = self.head_dim
        return torch.stack([matrix[i : i + e, i : i + e] for i in range(0, len(matrix), e)])
