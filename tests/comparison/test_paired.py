"""Paired differences against formulas that are not scipy's."""

import math
import random
import statistics
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meristem.comparison.paired import paired_difference
from meristem.errors import InputError

numbers = st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=2, max_size=9)


def t_distribution(x: float, freedom: int) -> float:
    """P(T <= x) for whole degrees of freedom: the finite series in the angle atan(x / sqrt(freedom))."""
    if x < 0:
        return 1 - t_distribution(-x, freedom)
    angle = math.atan2(x, math.sqrt(freedom))
    cos_squared = math.cos(angle) ** 2
    odd = freedom % 2
    term, total = 1.0, 0.0
    for k in range(freedom // 2):
        total += term
        term *= cos_squared * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    if odd:
        return 0.5 + (angle + math.sin(angle) * math.cos(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t stays below with this probability (above one half), by bisection."""
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_distribution(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


@pytest.mark.parametrize("pairs", [2, 3, 4, 5, 6, 10, 31])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_intervals_and_p_values_equal_the_series(pairs: int, confidence: float) -> None:
    drawn = random.Random(pairs)
    arm, baseline = [[drawn.gauss(3, 1) for _ in range(pairs)] for _ in range(2)]
    result = paired_difference(arm, baseline, confidence)
    differences = [a - b for a, b in zip(arm, baseline, strict=True)]
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(pairs)
    half = t_quantile((1 + confidence) / 2, pairs - 1) * error
    assert (result.low, result.high) == pytest.approx((mean - half, mean + half), rel=1e-9)
    assert result.p == pytest.approx(2 * (1 - t_distribution(abs(mean) / error, pairs - 1)), rel=1e-6)
    for margin in (0.1, 2.0):
        sides = [1 - t_distribution((margin + sign * mean) / error, pairs - 1) for sign in (1, -1)]
        assert result.p_equal(margin) == pytest.approx(max(sides), rel=1e-6)


def test_a_known_table() -> None:
    """Student's sleep data of 1908: differences 1.2 2.4 1.3 1.3 0.0 1.0 1.8 0.8 4.6 1.4, t = 4.06, p = 0.00283."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = paired_difference(second, first)
    assert result.mean / result.error == pytest.approx(4.0621, abs=1e-4)
    assert result.p == pytest.approx(0.002833, abs=1e-6)
    assert (result.low, result.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)


@given(numbers)
@settings(deadline=None)
def test_an_interval_excludes_zero_exactly_where_p_is_below_its_level(pairs: list[tuple[float, float]]) -> None:
    result = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
    excludes_zero = result.has_spread and (result.low > 0 or result.high < 0)
    assert excludes_zero == (result.p < 0.05) or result.p == pytest.approx(0.05)
    assert 0 <= result.p <= 1
    turned = paired_difference([b for _, b in pairs], [a for a, _ in pairs])
    assert (turned.mean, turned.p) == pytest.approx((-result.mean, result.p))


@given(numbers, st.floats(0.01, 5))
@settings(deadline=None)
def test_equality_is_a_90_percent_interval_within_the_margin(pairs: list[tuple[float, float]], margin: float) -> None:
    narrow = paired_difference([a for a, _ in pairs], [b for _, b in pairs], 0.9)
    assume(narrow.has_spread)
    p = narrow.p_equal(margin)
    assert (-margin < narrow.low and narrow.high < margin) == (p < 0.05) or p == pytest.approx(0.05)
    assert narrow.p_equal(2 * margin) <= p


def test_the_interval_of_a_consistent_difference_excludes_zero() -> None:
    result = paired_difference([1.0, 2.0, 3.0], [1.5, 2.51, 3.49])
    assert result.low < result.high < 0
    assert result.mean == pytest.approx(-0.5)


@pytest.mark.parametrize("offset", [0.0, 0.1, -0.7])
def test_without_a_spread_nothing_is_shown(offset: float) -> None:
    baseline = [3.3, 2.7, 3.1]
    result = paired_difference([value + offset for value in baseline], baseline)
    assert result.mean == pytest.approx(offset)
    assert (result.deviation, result.has_spread) == (0, False)
    assert (result.p, result.p_equal(1.0)) == (1, 1)


def test_one_pair_is_refused() -> None:
    with pytest.raises(InputError, match="pairs"):
        paired_difference([1.0], [2.0])
