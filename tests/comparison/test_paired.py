"""Paired differences against scipy."""

import pytest
from scipy import stats

from meristem.comparison.paired import paired_difference, t_quantile
from meristem.errors import InputError


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30])
def test_t_quantile_equals_scipy(freedom: int) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_interval_equals_scipy() -> None:
    arm, baseline = [3.1, 3.05, 3.2, 3.0], [3.12, 3.09, 3.19, 3.06]
    result = paired_difference(arm, baseline)
    reference = stats.ttest_rel(arm, baseline).confidence_interval(0.95)
    assert (result.low, result.high) == pytest.approx((reference.low, reference.high), rel=1e-9)
    assert not result.is_effect


def test_a_consistent_difference_is_an_effect() -> None:
    result = paired_difference([1.0, 2.0, 3.0], [1.5, 2.51, 3.49])
    assert result.is_effect
    assert result.mean == pytest.approx(-0.5)


def test_one_pair_is_refused() -> None:
    with pytest.raises(InputError, match="pairs"):
        paired_difference([1.0], [2.0])
