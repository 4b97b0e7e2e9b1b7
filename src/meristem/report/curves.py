"""Curves of losses over the steps, made ready to be drawn: known points, thinned, smoothed, and the scale they need."""

from __future__ import annotations

import math
from collections.abc import Sequence

Curve = Sequence[tuple[int, float]]

SHOWN_POINTS = 1000
OPENING = 0.1  # share of the steps whose losses do not set the scale


def finite_points(curve: Curve) -> list[tuple[int, float]]:
    """The points whose loss is a finite number."""
    return [(step, loss) for step, loss in curve if math.isfinite(loss)]


def thinned(curve: Curve) -> list[tuple[int, float]]:
    """At most `SHOWN_POINTS` points: where there are more, each is the mean of a stretch of the curve."""
    stretch = max(1, math.ceil(len(curve) / SHOWN_POINTS))
    thinned: list[tuple[int, float]] = []
    for start in range(0, len(curve), stretch):
        points = curve[start : start + stretch]
        losses = [loss for _, loss in finite_points(points)]
        thinned.append((points[-1][0], sum(losses) / len(losses) if losses else math.nan))
    return thinned


def smoothed(curve: Curve) -> list[tuple[int, float]]:
    """Means over a centred window, so that the line does not lag; gaps remain.

    The window has a fortieth of the points, or five where these are few.
    """
    reach = max(len(curve) // 80, min(2, len(curve) // 10))
    sums, counts = [0.0], [0]
    for _, loss in curve:
        finite = math.isfinite(loss)
        sums.append(sums[-1] + (loss if finite else 0.0))
        counts.append(counts[-1] + finite)
    smooth: list[tuple[int, float]] = []
    for i, (step, loss) in enumerate(curve):
        first, end = max(0, i - reach), min(len(curve), i + reach + 1)
        known = counts[end] - counts[first]
        smooth.append((step, (sums[end] - sums[first]) / known if math.isfinite(loss) else math.nan))
    return smooth


def loss_range(raw: Curve, trend: Curve) -> tuple[float, float]:
    """A scale for the losses after the opening steps, or for all where those need little more room.

    It holds the trend, and the raw losses but for a few outliers.
    """
    points = [*finite_points(raw), *finite_points(trend)]
    opening = OPENING * max(step for step, _ in points)
    outliers = len(raw) // 200
    late, trend_late = (
        sorted(loss for step, loss in finite_points(curve) if step >= opening) for curve in (raw, trend)
    )
    losses = late[outliers : len(late) - outliers] + trend_late
    low, high, highest = min(losses), max(losses), max(loss for _, loss in points)
    if highest - low < 1.6 * (high - low):
        high = highest
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin
