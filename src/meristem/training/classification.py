"""How well a classifier tells classes apart: confusion matrix, accuracy, precision, recall, F1, loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from meristem.data import LabelledRows
from meristem.model import Transformer
from meristem.runs.predictions import logits_by_batch

Counts = NDArray[np.int64]
Shares = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Scores:
    """`confusion` (classes, classes) counts rows by their class and by the class they were taken for.

    `loss` is the mean cross entropy, in nats, every row counting alike. Where a share is of nothing, it is nan.
    """

    loss: float
    confusion: Counts

    @property
    def rows(self) -> int:
        return int(self.confusion.sum())

    @property
    def support(self) -> Counts:
        """Rows of each class."""
        return self.confusion.sum(1)

    @property
    def predicted(self) -> Counts:
        """Rows taken for each class."""
        return self.confusion.sum(0)

    @property
    def accuracy(self) -> float:
        return float(_share(self.confusion.trace(), self.confusion.sum()))

    @property
    def precision(self) -> Shares:
        """The share of the rows taken for a class that are of it."""
        return _share(self.confusion.diagonal(), self.predicted)

    @property
    def recall(self) -> Shares:
        """The share of the rows of a class that are taken for it."""
        return _share(self.confusion.diagonal(), self.support)

    @property
    def f1(self) -> Shares:
        """The harmonic mean of both; 0 for a class of which nothing was found."""
        return _share(2 * self.confusion.diagonal(), self.support + self.predicted)

    @property
    def macro_f1(self) -> float:
        """The mean over all classes that have rows or were predicted."""
        occurring = self.f1[self.support + self.predicted > 0]
        return float(occurring.mean()) if len(occurring) else float("nan")


def _share(part: object, whole: object) -> Shares:
    with np.errstate(invalid="ignore"):
        return np.asarray(part, np.float64) / np.asarray(whole, np.float64)


@torch.no_grad()
def classify(
    model: Transformer, rows: LabelledRows, *, batch: int, device: torch.device, chosen: Counts | None = None
) -> Scores:
    """Score the rows, or those that are `chosen` (n,) by number."""
    classes = model.plan.classes
    assert classes is not None
    confusion = np.zeros((classes, classes), np.int64)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part, logits in logits_by_batch(model, rows, batch=batch, device=device, chosen=chosen):
        targets = torch.from_numpy(rows.labels[part]).to(device)
        total += cross_entropy(logits, targets, reduction="sum").double()
        np.add.at(confusion, (rows.labels[part], logits.argmax(-1).cpu().numpy()), 1)
    return Scores(float(total) / max(1, int(confusion.sum())), confusion)


def spread_rows(count: int, limit: int) -> Counts:
    """The numbers of at most `limit` of `count` rows, evenly spread, as files are often sorted by class; 0 is all."""
    if limit == 0 or count <= limit:
        return np.arange(count)
    return np.arange(limit) * count // limit
