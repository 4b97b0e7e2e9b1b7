"""The pictures of a comparison's page: small pure functions that write SVG. Colours are the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from meristem.comparison.analysis import Analysis
from meristem.comparison.numbers import interval
from meristem.comparison.results import Result
from meristem.comparison.tables import name, word

WIDTH = 860
LETTER, LONGEST = 7.6, 48  # the width of a letter, in the mean and bold, and how many a label has at most
COLOURS = 8  # of series, --series-0 to --series-7

Points = Sequence[tuple[float, float]]


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers from low to high."""
    span = high - low or abs(high) or 1.0
    raw = span / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def forest(analysis: Analysis, margin: float | None) -> str:
    """Paired differences with their intervals, a row for each contrast, and a dot a seed; the margin is shaded."""
    lines = analysis.contrasts
    if not lines:
        return ""
    labels = [_shortened(name(line.contrast)) for line in lines]
    left, right, row, top = 24 + round(LETTER * max(map(len, labels))), 250, 34, 12
    ends = [e for line in lines for e in (line.difference.low, line.difference.high, *line.by_seed.values())] + [0.0]
    ends += [] if margin is None else [-margin, margin]
    low, high = min(ends), max(ends)
    space = 0.05 * (high - low or 1.0)
    low, high = low - space, high + space
    plot, height = WIDTH - left - right, top + row * len(lines) + 34

    def x(value: float) -> float:
        return left + plot * (value - low) / (high - low)

    bottom = top + row * len(lines)
    parts = []
    if margin is not None:
        parts.append(
            f'<rect class="margin" x="{x(-margin):.1f}" y="{top}" width="{x(margin) - x(-margin):.1f}" '
            f'height="{bottom - top}"><title>margin: {margin:g}</title></rect>'
        )
    for tick in ticks(low, high, 5):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="muted" x="{x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{top}" y2="{bottom}"/>')
    for number, line in enumerate(lines):
        y, difference = top + row * (number + 0.5), line.difference
        kind = {"better": "better", "worse": "worse"}.get(line.verdict.word, "open")
        weight = ' font-weight="600"' if line.primary else ""
        parts.append(
            f'<text x="{left - 14}" y="{y + 4:.1f}" text-anchor="end"{weight}>{escape(labels[number])}</text>'
            f'<g class="{kind}"><title>{escape(name(line.contrast))}: {interval(difference)}</title>'
            f'<line class="interval" x1="{x(difference.low):.1f}" x2="{x(difference.high):.1f}" y1="{y}" y2="{y}"/>'
            f"{_dots(line.by_seed, x, y)}"
            f'<circle class="mean" cx="{x(difference.mean):.1f}" cy="{y}" r="{6 if line.primary else 5}"/></g>'
            f'<text class="{kind}-text" x="{WIDTH - right + 14}" y="{y + 4:.1f}">{escape(word(line.verdict))}</text>'
        )
    return _svg(height, parts, "Paired differences with 95 % intervals")


def _shortened(text: str) -> str:
    """A label that leaves room for the picture; the whole one is shown where the pointer rests."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _dots(by_seed: Mapping[int, float], x: Callable[[float], float], y: float) -> str:
    """A small dot for the difference of every seed."""
    return "".join(
        f'<circle class="seed" cx="{x(value):.1f}" cy="{y + 9:.1f}" r="2">'
        f"<title>seed {seed}: {value:+.4f}</title></circle>"
        for seed, value in by_seed.items()
    )


def curves(runs: Mapping[str, Mapping[int, Result]]) -> str:
    """Training loss by step, smoothed: the mean over seeds of each arm, and every seed faintly."""
    series = {arm: [smoothed(run.loss) for run in by_seed.values()] for arm, by_seed in runs.items() if by_seed}
    points = [point for lines in series.values() for line in lines for point in line]
    if not points:
        return ""
    left, right, top, height = 60, 20, 12, 380
    bottom = height - 40
    last = max(step for step, _ in points)
    late = sorted(loss for step, loss in points if step >= 0.05 * last)  # the first steps would take all the room
    low, high = late[0], late[-1]
    low, high = low - 0.04 * (high - low or 1), high + 0.04 * (high - low or 1)

    def at(point: tuple[float, float]) -> str:
        x = left + (WIDTH - left - right) * point[0] / last
        y = bottom - (bottom - top) * (min(point[1], high) - low) / (high - low)
        return f"{x:.1f} {y:.1f}"

    parts = []
    for tick in ticks(low, high):
        y = at((0, tick)).split()[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="muted" x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(0, last):
        x = at((tick, low)).split()[0]
        parts.append(f'<text class="muted" x="{x}" y="{bottom + 18}" text-anchor="middle">{tick:,.0f}</text>')
    parts.append(f'<text class="muted" x="{WIDTH - right}" y="{bottom + 34}" text-anchor="end">updates</text>')
    for number, (arm, lines) in enumerate(series.items()):
        colour = f"var(--series-{number % COLOURS})"
        for line in lines:
            path = "M" + "L".join(map(at, line))
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1" opacity="0.25"/>')
        shared = mean_curve(lines)
        path = "M" + "L".join(map(at, shared or lines[0]))
        parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"><title>{escape(arm)}</title></path>'
        )
    legend = "".join(
        f'<span><i style="background: var(--series-{number % COLOURS})"></i>{escape(arm)}</span>'
        for number, arm in enumerate(series)
    )
    return f'<p class="legend">{legend}</p>' + _svg(height, parts, "Training loss by update")


def smoothed(points: Points, width: int = 2) -> list[tuple[float, float]]:
    """The mean of each value and those around it; at the ends of fewer."""
    values = [value for _, value in points]
    found = []
    for index, (step, _) in enumerate(points):
        window = values[max(0, index - width) : index + width + 1]
        found.append((step, sum(window) / len(window)))
    return found


def mean_curve(lines: Sequence[Points]) -> list[tuple[float, float]]:
    """The mean over lines, at the steps that all of them have."""
    shared = set.intersection(*({step for step, _ in line} for line in lines))
    by_step: dict[float, list[float]] = {step: [] for step in sorted(shared)}
    for line in lines:
        for step, value in line:
            if step in shared:
                by_step[step].append(value)
    return [(step, sum(values) / len(values)) for step, values in by_step.items()]


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
