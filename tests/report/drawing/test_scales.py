"""Scales place values and name round ones."""

from __future__ import annotations

import math

import pytest

from meristem.report.drawing.scales import CountScale, LogScale, Scale, log_ticks, nice_ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (2.9, 4.85, [3.0, 3.5, 4.0, 4.5]),
        (0, 0.5, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_nice_ticks(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high) == expected


def test_log_ticks() -> None:
    assert log_ticks(0.0004, 1.5) == [0.001, 0.01, 0.1, 1]
    assert log_ticks(0.08, 1.5) == [0.1, 0.2, 0.5, 1]


def test_an_even_scale() -> None:
    scale = Scale(2, 4)
    assert [scale.share(value) for value in (1, 2, 3.5, 4)] == [-0.5, 0, 0.75, 1]
    assert scale.ticks(4) == [(2, "2.0"), (2.5, "2.5"), (3, "3.0"), (3.5, "3.5"), (4, "4.0")]


def test_a_scale_that_runs_the_other_way() -> None:
    scale = Scale(10, 0)
    assert [scale.share(value) for value in (10, 7.5, 0)] == [0, 0.25, 1]
    assert scale.ticks(5) == Scale(0, 10).ticks(5)


def test_counts_are_whole_and_short() -> None:
    assert CountScale(0, 1).ticks(6) == [(0, "0"), (1, "1")]
    assert CountScale(0, 5000).ticks(5) == [(0, "0")] + [(1000 * i, f"{i}k") for i in range(1, 6)]


def test_a_logarithmic_scale() -> None:
    scale = LogScale(0.01, 1)
    assert [scale.share(value) for value in (0.01, 0.1, 1)] == pytest.approx([0, 0.5, 1])
    assert [scale.share(value) for value in (0.001, 0, -1, -math.inf)] == [0, 0, 0, 0]  # on the low end
    assert math.isnan(scale.share(math.nan))
    assert scale.ticks(5)[:2] == [(0.01, "0.01"), (0.02, "0.02")]
