"""Verdicts against simulations whose truth is known, and against the definitions."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from meristem.comparison.paired import PairedDifference, paired_difference
from meristem.comparison.verdicts import MOST_SEEDS, detectable_difference, holm, power, seeds_needed, verdicts

ROUNDS = 1500


def bound(chance: float, rounds: int = ROUNDS) -> float:
    """Four standard errors of a share of so many rounds."""
    return 4 * math.sqrt(chance * (1 - chance) / rounds)


def simulated(drawn: np.random.Generator, means: list[float], pairs: int) -> list[PairedDifference]:
    """Contrasts of arms with one baseline, whose noise they share, as arms of a comparison do."""
    baseline = drawn.normal(3.0, 0.2, pairs)
    arms = [3.0 + mean + drawn.normal(0.0, 0.1, pairs) for mean in means]
    return [paired_difference(arm.tolist(), baseline.tolist()) for arm in arms]


def test_a_primary_contrast_without_a_difference_is_called_one_in_one_of_twenty() -> None:
    drawn = np.random.default_rng(0)
    called = [verdicts(simulated(drawn, [0.0], 5))[0].word for _ in range(ROUNDS)]
    assert abs(sum(word in ("better", "worse") for word in called) / ROUNDS - 0.05) < bound(0.05)
    assert "shown to be equal within the margin" not in called


def test_of_several_contrasts_hardly_ever_one_is_wrong() -> None:
    """Family-wise: at most one in twenty comparisons has any wrong verdict, be other differences real or not."""
    drawn = np.random.default_rng(1)
    for means in ([0.0] * 4, [0.0, 0.0, -2.0, 2.0]):
        wrong = 0
        for _ in range(ROUNDS):
            found = verdicts(simulated(drawn, means, 4))
            wrong += any(v.word in ("better", "worse") for v, m in zip(found, means, strict=True) if m == 0)
        assert wrong / ROUNDS < 0.05 + bound(0.05)


def test_equality_at_the_margin_is_called_in_one_of_twenty() -> None:
    drawn = np.random.default_rng(2)
    called = [simulated(drawn, [0.3], 8)[0].p_equal(0.3) < 0.05 for _ in range(ROUNDS)]
    assert abs(sum(called) / ROUNDS - 0.05) < bound(0.05)


@pytest.mark.parametrize(("difference", "pairs"), [(0.3, 5), (0.5, 4), (0.1, 12)])
def test_power_is_what_simulations_find(difference: float, pairs: int) -> None:
    drawn, deviation = np.random.default_rng(3), math.hypot(0.2, 0.1)
    shown = sum(verdicts(simulated(drawn, [difference], pairs))[0].word == "worse" for _ in range(ROUNDS))
    expected = power(difference, deviation, pairs)
    assert abs(shown / ROUNDS - expected) < bound(expected)


@pytest.mark.parametrize(("difference", "pairs"), [(0.1, 2), (1.0, 2), (3.0, 3), (0.5, 30), (0.1, 500)])
def test_power_equals_the_noncentral_t_of_scipy(difference: float, pairs: int) -> None:
    freedom, shift = pairs - 1, difference * math.sqrt(pairs)
    beyond = stats.t.ppf(0.975, freedom)
    expected = stats.nct.sf(beyond, freedom, shift) + stats.nct.cdf(-beyond, freedom, shift)
    assert power(difference, 1.0, pairs) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("pairs", [2, 3, 5, 20])
def test_what_could_have_been_shown_has_the_power_that_is_named(pairs: int) -> None:
    smallest = detectable_difference(0.02, pairs)
    assert power(smallest, 0.02, pairs) == pytest.approx(0.8, abs=1e-6)


def test_power_equals_published_tables() -> None:
    """Cohen 1988: a paired effect of d = 0.5 needs 34 pairs, 0.8 needs 15, 0.2 needs 199 (80 %, two-sided 5 %)."""
    assert [seeds_needed(effect, 1.0) for effect in (0.2, 0.5, 0.8)] == [199, 34, 15]
    assert seeds_needed(1e-6, 1.0) is None
    assert seeds_needed(0.1, 0.0) == 2


@given(st.floats(0.05, 3), st.floats(0.1, 2))
@settings(deadline=None, max_examples=30)
def test_so_many_seeds_and_not_one_fewer_are_needed(difference: float, deviation: float) -> None:
    needed = seeds_needed(difference, deviation)
    if needed is None:
        assert power(difference, deviation, MOST_SEEDS) < 0.8
        return
    assert power(difference, deviation, needed) >= 0.8
    assert needed == 2 or power(difference, deviation, needed - 1) < 0.8


def closed_testing(ps: list[float]) -> list[float]:
    """Holm by its definition: a contrast is rejected where every set with it is by Bonferroni."""
    indices = range(len(ps))
    sets = [s for size in range(1, len(ps) + 1) for s in itertools.combinations(indices, size)]
    return [max(min(1.0, len(s) * min(ps[i] for i in s)) for s in sets if index in s) for index in indices]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_the_closed_test_of_bonferroni(ps: list[float]) -> None:
    assert holm(ps) == pytest.approx(closed_testing(ps))


def test_four_results() -> None:
    """Better, worse, nothing shown and equality; of an accuracy more is better."""
    sure, unsure = 0.001, 0.5
    differences = [PairedDifference(m, s, 0.0, 0.0, 5) for m, s in ((-1, sure), (1, sure), (0.1, unsure), (0, sure))]
    words = [v.word for v in verdicts(differences, 0.05)]
    assert words == ["better", "worse", "no difference shown", "shown to be equal within the margin"]
    assert [v.word for v in verdicts(differences[:2], lower_is_better=False)] == ["worse", "better"]
    assert [v.word for v in verdicts(differences)][-1] == "no difference shown"


def test_without_a_spread_there_is_no_test() -> None:
    for mean in (-1.0, 0.0, 1.0):
        (found,) = verdicts([PairedDifference(mean, 0.0, mean, mean, 5)], 0.05)
        assert (found.word, found.p, found.p_equal, found.is_small) == ("cannot be tested", 1, 1, False)


def test_a_difference_can_be_certain_and_small() -> None:
    (found,) = verdicts([PairedDifference(-0.01, 0.0001, 0.0, 0.0, 5)], 0.05)
    assert (found.word, found.is_small) == ("better", True)


def test_the_order_of_contrasts_does_not_matter() -> None:
    drawn = random.Random(0)
    ps = [drawn.random() for _ in range(6)]
    order = drawn.sample(range(6), 6)
    assert [holm(ps)[i] for i in order] == holm([ps[i] for i in order])
