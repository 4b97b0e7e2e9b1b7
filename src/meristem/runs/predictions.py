"""What a classifier says of texts: a label, and how probable it takes each class to be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meristem.data import LabelledRows, Recipe, padded_length
from meristem.devices import autocast
from meristem.errors import InputError
from meristem.model import Transformer


@dataclass(frozen=True)
class Prediction:
    """The likeliest class of a text, and the probability of each class by its name, in the order of the classes."""

    label: str
    probabilities: dict[str, float]


@torch.no_grad()
def logits_by_batch(
    model: Transformer, rows: LabelledRows, *, batch: int, device: torch.device,
    chosen: NDArray[np.int64] | None = None,
) -> Iterator[tuple[NDArray[np.int64], Tensor]]:  # fmt: skip
    """Numbers of rows (b,) and their logits (b, classes), for all rows, or those `chosen` (n,) by number.

    Rows of about the same length share a batch, so they come by length.
    """
    order = np.arange(len(rows)) if chosen is None else chosen
    order = order[np.argsort(rows.lengths[order], kind="stable")]
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        tokens = torch.from_numpy(rows.padded(part, padded_length(rows.lengths[part], model.plan.context)))
        with autocast(device):
            logits = model(tokens.to(device)).logits
        yield part, logits.float()


def class_logits(model: Transformer, rows: LabelledRows, *, batch: int, device: torch.device) -> Tensor:
    """The logits (rows, classes) of all rows in their order, in float64 on the CPU."""
    assert model.plan.classes is not None
    result = torch.zeros(len(rows), model.plan.classes, dtype=torch.float64)
    for part, logits in logits_by_batch(model, rows, batch=batch, device=device):
        result[torch.from_numpy(part)] = logits.double().cpu()
    return result


def encoded_rows(recipe: Recipe, texts: Sequence[str]) -> LabelledRows:
    """Texts as rows of ids, cut to the length of the recipe. Their labels are not known, and stand as 0."""
    for number, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"texts[{number}]", text, "must be a text that is not empty")
    return LabelledRows.of([recipe.encode(text.strip()) for text in texts], [0] * len(texts))


def predictions(logits: Tensor, classes: Sequence[str], temperature: float = 1.0) -> list[Prediction]:
    """The predictions of logits (n, classes), which are divided by the temperature first: above 1 is less certain."""
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0):
        raise InputError("temperature", temperature, "must be above 0, and finite")
    shares = torch.softmax(logits.double() / temperature, -1).tolist()
    best = logits.argmax(-1).tolist()
    return [
        Prediction(classes[number], dict(zip(classes, row, strict=True)))
        for number, row in zip(best, shares, strict=True)
    ]
