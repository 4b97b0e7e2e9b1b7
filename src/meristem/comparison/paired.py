"""Paired differences between two arms that share their seeds, or their test sequences."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from meristem.errors import InputError

ROUNDING = 4 * sys.float_info.epsilon  # of differences, as a part of the numbers that were subtracted


@dataclass(frozen=True)
class PairedDifference:
    """Mean of (arm - baseline) over pairs, with a t interval, of 95 % unless another was asked for.

    Where all pairs differ alike there is no spread that chance could be judged by: nothing is shown of it, be the
    difference as large as it may, and the interval has no width.
    """

    mean: float
    deviation: float  # sample standard deviation of the differences; 0 if they are equal but for rounding
    low: float
    high: float
    pairs: int

    @property
    def has_spread(self) -> bool:
        """Whether the pairs differ from one another, without which there is no test."""
        return self.deviation > 0

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.deviation / math.sqrt(self.pairs)

    @property
    def p(self) -> float:
        """How often a mean at least as far from zero comes by chance where there is no difference (two-sided t)."""
        return min(1.0, 2 * self._beyond(abs(self.mean)))

    def p_equal(self, margin: float) -> float:
        """How often a mean so well within the margin comes by chance where the difference is not (two one-sided t)."""
        return max(self._beyond(margin - self.mean), self._beyond(margin + self.mean))

    def _beyond(self, distance: float) -> float:
        """The chance of an error of the mean of this size or more; without a spread it cannot be told, and is 1."""
        if not self.has_spread:
            return 1.0
        return float(stats.t.sf(distance / self.error, self.pairs - 1))


def paired_difference(arm: Sequence[float], baseline: Sequence[float], confidence: float = 0.95) -> PairedDifference:
    """Compare two arms, pair by pair. Needs at least two pairs."""
    if len(arm) != len(baseline) or len(arm) < 2:
        raise InputError("pairs", (len(arm), len(baseline)), "must be two equally long lists of at least 2 values")
    differences = [a - b for a, b in zip(arm, baseline, strict=True)]
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation <= ROUNDING * max(map(abs, (*arm, *baseline))):
        deviation = 0.0
    margin = float(stats.t.ppf((1 + confidence) / 2, len(differences) - 1)) * deviation / math.sqrt(len(differences))
    return PairedDifference(mean, deviation, mean - margin, mean + margin, len(differences))
