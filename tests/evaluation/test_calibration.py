"""Temperatures against what they have to satisfy, and calibration errors against counts by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from meristem.evaluation.calibration import COLDEST, Calibration, calibrate, calibration_error, fitted_temperature


def drawn(seed: int, rows: int, classes: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels drawn from what they say at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, classes, dtype=torch.float64, generator=generator)
    labels = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
    return logits, labels


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 3, 10]), st.floats(0.4, 4.0))
def test_at_the_fitted_temperature_the_expected_logit_is_the_mean_one(seed: int, classes: int, true: float) -> None:
    """The derivative of the loss is zero where logits of the labels are, on average, those that softmax expects."""
    logits, labels = drawn(seed, 400, classes, true)
    temperature = fitted_temperature(logits, labels)
    expected = ((logits / temperature).softmax(-1) * logits).sum(-1).mean()
    assert float(logits.gather(1, labels[:, None]).mean()) == pytest.approx(float(expected), abs=2e-4)


def test_the_temperature_that_labels_were_drawn_at_is_found() -> None:
    for true in (0.5, 1.0, 2.5):
        assert fitted_temperature(*drawn(0, 20_000, 4, true)) == pytest.approx(true, rel=0.05)


def test_a_classifier_without_a_mistake_is_not_certain_without_end() -> None:
    logits = torch.tensor([[5.0, 0.0], [0.0, 5.0]] * 20)
    assert COLDEST <= fitted_temperature(logits, logits.argmax(-1)) < 0.2  # where its loss is 0 to the last bit
    found = calibrate(logits, logits.argmax(-1))  # and no such temperature is taken for what the rows have told
    assert found == "there is no mistake in 40 held-out rows, so they do not tell how sure it may be"


def test_the_error_is_the_distance_of_certainty_and_share_of_right_ones() -> None:
    probabilities = torch.tensor([[0.9, 0.1]] * 10 + [[0.4, 0.6]] * 10)
    labels = torch.tensor([0] * 7 + [1] * 3 + [1] * 6 + [0] * 4)  # 0.7 right where 0.9 is said, 0.6 where 0.6 is
    assert calibration_error(probabilities, labels) == pytest.approx(0.5 * 0.2, abs=1e-6)
    assert calibration_error(torch.eye(3)[[0, 1, 2]], torch.tensor([0, 1, 2])) == 0


def test_what_a_calibration_is_worth_is_measured_on_other_rows() -> None:
    logits, labels = drawn(3, 4000, 3, 3.0)
    found = calibrate(logits, labels)
    assert isinstance(found, Calibration)
    assert found.rows == 4000
    assert found.temperature == pytest.approx(3.0, rel=0.1)
    assert found.loss[0] == pytest.approx(float(cross_entropy(logits, labels)))
    assert found.loss[1] < found.loss[0]
    assert found.error[1] < 0.05 < found.error[0]
    # On rows that it was fitted on the loss could not be larger; on others it may.
    best = float(cross_entropy(logits / found.temperature, labels))
    assert found.loss[1] >= best - 1e-9
    assert math.isclose(found.loss[1], best, abs_tol=5e-3)
    assert f"temperature {found.temperature:.3g}, fitted on 4,000 held-out rows" in str(found)
