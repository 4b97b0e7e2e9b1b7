"""Probabilities that mean what they say: one temperature, by which all logits are divided, fitted on held-out rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn.functional import cross_entropy

from meristem.data import LabelledData, open_data
from meristem.errors import InputError, RunError
from meristem.runs.predictions import logits_by_batch
from meristem.runs.run_folder import LoadedRun
from meristem.training.classification import spread_rows
from meristem.wording import counted

COLDEST, HOTTEST = 0.05, 20.0  # a classifier without a mistake would be taken to be certain without end
FEWEST = 20  # rows from which a temperature is fitted
BINS = 15


@dataclass(frozen=True)
class Calibration:
    """A fitted temperature, the rows that it is from, and what it is worth.

    Loss and calibration error, each as (without, with), are of rows that the temperature was not fitted on: each half
    of the rows has the one of the other half.
    """

    temperature: float
    rows: int
    loss: tuple[float, float]
    error: tuple[float, float]

    def __str__(self) -> str:
        (loss, new_loss), (error, new_error) = self.loss, self.error
        return (
            f"temperature {self.temperature:.3g}, fitted on {self.rows:,} held-out rows: "
            f"loss {loss:.4f} -> {new_loss:.4f}, calibration error {error:.2%} -> {new_error:.2%}"
        )


def fitted_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature, from 0.05 to 20, at which logits (n, classes) give the labels (n,) the least cross entropy.

    >>> sure = torch.tensor([[4.0, 0.0]] * 4)  # right in three of four: softmax should say 0.75
    >>> round(fitted_temperature(sure, torch.tensor([0, 0, 0, 1])) * math.log(3), 3)
    4.0
    """

    def loss(log_temperature: float) -> float:
        return float(cross_entropy(logits.double() / math.exp(log_temperature), labels))

    # The loss is convex in 1 / temperature, so it has one minimum in its logarithm too.
    bounds = (math.log(COLDEST), math.log(HOTTEST))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return math.exp(float(found.x))


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """How far the certainty of predictions (n, classes) is from how often they are right, on average (ECE).

    Rows are put into 15 bins by the probability of their likeliest class.
    """
    certainty, predicted = probabilities.max(-1)
    right = (predicted == labels).double()
    bins = (certainty * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, certainty.double() - right)
    return float(gaps.abs().sum() / len(labels))


def calibrate(logits: Tensor, labels: Tensor) -> Calibration | str:
    """Fit a temperature to logits (n, classes) and labels (n,), and say what it is worth on rows it has not seen.

    Where no row is a mistake, the colder it is the better, and nothing can be fitted: then this says so.
    """
    if torch.equal(logits.argmax(-1), labels):
        return f"there is no mistake in {counted(len(labels), 'held-out row')}, so they do not tell how sure it may be"
    halves = torch.arange(len(labels)) % 2 == 0
    tempered = torch.empty_like(logits)
    for half in (halves, ~halves):
        tempered[half] = logits[half] / fitted_temperature(logits[~half], labels[~half])
    loss, error = (
        (measure(logits), measure(tempered))
        for measure in (
            lambda scores: float(cross_entropy(scores, labels)),
            lambda scores: calibration_error(scores.softmax(-1), labels),
        )
    )
    return Calibration(fitted_temperature(logits, labels), len(labels), loss, error)


def calibrate_run(run: LoadedRun, most: int = 2000) -> Calibration | str:
    """The calibration of a classifier on at most so many held-out rows of its own data; or why there is none."""
    try:
        data = open_data(run.config.data.path)
        run.folder.check_data(data)
    except (InputError, RunError) as error:
        return f"the run's own data cannot be used: {error}"
    assert isinstance(data, LabelledData)
    rows = data.split("held_out")
    if len(rows) < FEWEST:
        return f"{counted(len(rows), 'row')} of the run's own data are held out, and {FEWEST} are needed"
    batches = logits_by_batch(
        run.model, rows, batch=run.config.eval.batch, device=run.device, chosen=spread_rows(len(rows), most)
    )
    parts = [(logits.double().cpu(), torch.from_numpy(rows.labels[numbers])) for numbers, logits in batches]
    logits, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return calibrate(logits, labels)
