"""Scores against hand-counted cases and plain formulas."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from meristem.data import LabelledRows
from meristem.model import Classifier
from meristem.plan import Plan
from meristem.training.classification import Scores, classify, spread_rows

CPU = torch.device("cpu")


def test_a_case_counted_by_hand() -> None:
    """Ten rows: a a a a b b b c c c, taken for a a a b b b c a a c."""
    confusion = np.array([[3, 1, 0], [0, 2, 1], [2, 0, 1]])
    scores = Scores(0.5, confusion)
    assert scores.rows == 10
    assert scores.accuracy == pytest.approx(0.6)
    assert scores.support.tolist() == [4, 3, 3]
    assert scores.predicted.tolist() == [5, 3, 2]
    assert scores.precision.tolist() == pytest.approx([3 / 5, 2 / 3, 1 / 2])
    assert scores.recall.tolist() == pytest.approx([3 / 4, 2 / 3, 1 / 3])
    assert scores.f1.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 5])
    assert scores.macro_f1 == pytest.approx((2 / 3 + 2 / 3 + 2 / 5) / 3)


def test_classes_without_rows() -> None:
    """Absent and never predicted: not in the mean. Predicted though absent, or never found: 0."""
    scores = Scores(0.0, np.array([[2, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]))
    assert np.isnan(scores.recall[1])
    assert scores.precision[1] == 0
    assert np.isnan(scores.precision[2])
    assert np.isnan(scores.f1[2])
    assert scores.f1[[1, 3]].tolist() == [0, 0]
    assert scores.macro_f1 == pytest.approx((2 / 3 + 0 + 0) / 3)
    empty = Scores(0.0, np.zeros((2, 2), np.int64))
    assert math.isnan(empty.accuracy)
    assert math.isnan(empty.macro_f1)


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.integers(2, 5).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), min_size=1))
    )
)
def test_scores_are_those_of_the_formulas(pairs: tuple[int, list[tuple[int, int]]]) -> None:
    """F1 as the harmonic mean of precision and recall, in exact fractions."""
    classes, rows = pairs
    confusion = np.zeros((classes, classes), np.int64)
    for true, taken in rows:
        confusion[true, taken] += 1
    scores = Scores(0.0, confusion)
    assert scores.accuracy == pytest.approx(sum(t == p for t, p in rows) / len(rows))
    found = []
    for label in range(classes):
        hits = sum(t == p == label for t, p in rows)
        support, taken = sum(t == label for t, _ in rows), sum(p == label for _, p in rows)
        if not support and not taken:
            continue
        precision, recall = Fraction(hits, max(1, taken)), Fraction(hits, max(1, support))
        total = precision + recall
        found.append(2 * precision * recall / total if total else Fraction(0))
    assert scores.macro_f1 == pytest.approx(float(sum(found) / len(found)))


def model_and_rows() -> tuple[Classifier, LabelledRows]:
    plan = Plan.uniform(layers=2, width=32, heads=4, vocabulary=50, context=24, classes=3)
    model = Classifier(plan)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)
    draw = np.random.default_rng(0)
    rows = [draw.integers(1, 50, draw.integers(1, 30)) for _ in range(40)]
    return model, LabelledRows.of(rows, draw.integers(0, 3, 40).tolist())


def test_rows_are_scored_one_by_one_whatever_the_batch() -> None:
    model, rows = model_and_rows()
    confusion, total = np.zeros((3, 3), np.int64), 0.0
    for number in range(len(rows)):
        tokens = rows.padded(np.array([number]), min(24, int(rows.lengths[number])))
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits
        label = int(rows.labels[number])
        confusion[label, int(logits.argmax())] += 1
        total += float(cross_entropy(logits, torch.tensor([label])))
    assert len(np.unique(confusion.sum(0))) > 1, "not all rows are taken for one class"
    for batch in (1, 7, 100):
        scores = classify(model, rows, batch=batch, device=CPU)
        assert scores.confusion.tolist() == confusion.tolist()
        assert scores.loss == pytest.approx(total / len(rows), rel=1e-5)


def test_some_rows_only() -> None:
    model, rows = model_and_rows()
    chosen = np.array([3, 5, 8])
    scores = classify(model, rows, batch=2, device=CPU, chosen=chosen)
    assert scores.rows == 3
    assert scores.support.tolist() == np.bincount(rows.labels[chosen], minlength=3).tolist()


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 200), limit=st.integers(0, 50))
def test_spread_rows_are_different_and_evenly_apart(count: int, limit: int) -> None:
    chosen = spread_rows(count, limit)
    assert len(chosen) == (min(count, limit) if limit else count)
    assert len(set(chosen.tolist())) == len(chosen)
    assert chosen.min() == 0
    assert chosen.max() < count
    if len(chosen) > 1:
        gaps = np.diff(chosen)
        assert gaps.max() - gaps.min() <= 1
