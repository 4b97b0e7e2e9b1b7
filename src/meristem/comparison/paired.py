"""Paired differences between two arms that share their seeds, or their test sequences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from meristem.errors import InputError


@dataclass(frozen=True)
class PairedDifference:
    """Mean of (arm - baseline) over pairs, with a t interval, of 95 % unless another was asked for."""

    mean: float
    deviation: float  # sample standard deviation of the differences
    low: float
    high: float
    pairs: int

    @property
    def is_effect(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def paired_difference(arm: Sequence[float], baseline: Sequence[float], confidence: float = 0.95) -> PairedDifference:
    """Compare two arms, pair by pair. Needs at least two pairs."""
    if len(arm) != len(baseline) or len(arm) < 2:
        raise InputError("pairs", (len(arm), len(baseline)), "must be two equally long lists of at least 2 values")
    differences = [a - b for a, b in zip(arm, baseline, strict=True)]
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    margin = t_quantile((1 + confidence) / 2, len(differences) - 1) * deviation / math.sqrt(len(differences))
    return PairedDifference(mean, deviation, mean - margin, mean + margin, len(differences))


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t stays below with this probability (above one half), by bisection."""
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_distribution(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_distribution(x: float, freedom: int) -> float:
    """P(T <= x) for x >= 0 and whole degrees of freedom: the finite series in the angle atan(x / sqrt(freedom))."""
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
