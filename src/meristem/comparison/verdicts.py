"""What paired differences show: verdicts with an error rate that holds for all of them, and what they could have shown.

The primary contrast is tested as it is, the others with Holm's correction for their number. A difference that is not
shown is no equality: that is shown only where two one-sided tests put it within a margin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import integrate, optimize, special, stats

from meristem.comparison.paired import PairedDifference

LEVEL = 0.05  # of wrong verdicts
POWER = 0.8
MOST_SEEDS = 10_000

Word = Literal["better", "worse", "no difference shown", "shown to be equal within the margin", "cannot be tested"]


@dataclass(frozen=True)
class Verdict:
    """What a contrast shows; p values are corrected for the number of contrasts they are among."""

    word: Word
    p: float
    p_equal: float | None  # None without a margin

    @property
    def is_small(self) -> bool:
        """Whether the difference is shown to be within the margin, be there one or not."""
        return self.p_equal is not None and self.p_equal < LEVEL


def verdicts(
    differences: Sequence[PairedDifference],
    margin: float | None = None,
    *,
    among: int = 0,
    lower_is_better: bool = True,
) -> list[Verdict]:
    """The verdicts on contrasts that are tested together, each corrected for the number of all.

    There may be more of them (`among`) than differences are known of yet.
    """
    ps = holm([difference.p for difference in differences], among)
    equal: Sequence[float | None] = [None] * len(differences)
    if margin is not None:
        equal = holm([difference.p_equal(margin) for difference in differences], among)
    return [
        Verdict(_word(difference, p, p_equal, lower_is_better), p, p_equal)
        for difference, p, p_equal in zip(differences, ps, equal, strict=True)
    ]


def _word(difference: PairedDifference, p: float, p_equal: float | None, lower_is_better: bool) -> Word:
    if not difference.has_spread:
        return "cannot be tested"
    if p < LEVEL:
        return "better" if (difference.mean < 0) == lower_is_better else "worse"
    return "no difference shown" if p_equal is None or p_equal >= LEVEL else "shown to be equal within the margin"


def holm(ps: Sequence[float], among: int = 0) -> list[float]:
    """Holm's step-down correction: below a level with at most that chance of any wrong one among them.

    Tests that are among them but not known yet count as well.
    """
    corrected, largest, count = [0.0] * len(ps), 0.0, max(among, len(ps))
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        largest = max(largest, min(1.0, (count - rank) * ps[index]))
        corrected[index] = largest
    return corrected


def power(difference: float, deviation: float, pairs: int, level: float = LEVEL) -> float:
    """The chance that a true difference is shown (two-sided t test), given the spread of single differences."""
    if deviation == 0:
        return 1.0 if difference else level
    freedom, shift = pairs - 1, abs(difference) / deviation * math.sqrt(pairs)
    beyond = float(stats.t.ppf(1 - level / 2, freedom))

    scale = math.log(2) * (1 - freedom / 2) - special.gammaln(freedom / 2)  # of the density of chi

    def shown(spread: float) -> float:
        """The chance for a measured spread, as a part of the true one, times how likely that is."""
        chance = special.ndtr(shift - beyond * spread) + special.ndtr(-shift - beyond * spread)
        chi = spread * math.sqrt(freedom)
        density = math.exp(scale + special.xlogy(freedom - 1, chi) - chi**2 / 2)
        return float(chance * density * math.sqrt(freedom))

    likely = 1 + 9 / math.sqrt(freedom)  # what is beyond has a chance of less than 1e-9
    middle = min(shift / beyond, 0.999 * likely)  # where the chance falls
    return float(integrate.quad(shown, 0, likely, points=[middle])[0])  # scipy's nct has no value for some


def detectable_difference(deviation: float, pairs: int, level: float = LEVEL) -> float:
    """The smallest true difference that so many pairs show with 80 % chance."""
    if deviation == 0:
        return 0.0

    def lacking(ratio: float) -> float:
        return power(ratio, 1.0, pairs, level) - POWER

    highest = 1.0
    while lacking(highest) < 0:
        highest *= 2
    return deviation * float(optimize.brentq(lacking, 0.0, highest, xtol=1e-9))


def seeds_needed(difference: float, deviation: float, level: float = LEVEL) -> int | None:
    """The fewest pairs that show a true difference with 80 % chance; None if more than ten thousand."""
    if deviation == 0:
        return 2
    low, high = 2, 2
    while power(difference, deviation, high, level) < POWER:
        if high == MOST_SEEDS:
            return None
        low, high = high + 1, min(high * 2, MOST_SEEDS)
    while low < high:
        middle = (low + high) // 2
        enough = power(difference, deviation, middle, level) >= POWER
        low, high = (low, middle) if enough else (middle + 1, high)
    return high
