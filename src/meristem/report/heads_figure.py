"""The picture of a run whose heads came and went: their number, the demand that was left, and the loss."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from meristem.report.figures import (
    PLOT_LEFT,
    PLOT_WIDTH,
    Frame,
    finite_points,
    heading,
    loss_range,
    loss_text,
    smoothed,
    step_axis,
    thinned,
)
from meristem.report.head_history import CHANGES, DemandPoint, HeadHistory
from meristem.report.panels import GAP, TOP, badge, caption, shade
from meristem.report.svg import (
    BACKGROUND,
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    Box,
    Point,
    apart,
    area,
    band,
    boxes,
    circle,
    document,
    dot,
    line,
    log_ticks,
    nice_ticks,
    polyline,
    text,
    tick_labels,
    window,
)
from meristem.wording import counted

COLOURS = (BLUE, ORANGE, GREEN, PURPLE)  # of the layers; more layers than that are rows
LABELS, PREDICTED = 180, 100  # pixels beside the panels, and where the column of predictions begins there
HEADS_HEIGHT, DEMAND_HEIGHT, LOSS_HEIGHT = 130, 170, 110
GUIDE = "#c3cad2"  # lines at the changes
PALE = "#e3eff8"  # under the stairs of a single layer
SHOWN = 140  # decisions of a curve at most; of more, means are shown
DECADES = 4  # of the demand at most: what is less is next to nothing
ERRORS = 2  # standard errors of the band, up and down
RING = 8.0  # radius of a birth at most


def heads_svg(history: HeadHistory, title: str = "", loss_scale: tuple[float, float] | None = None) -> str:
    """Heads of every layer with births and removals, the demand with its noise and threshold, and the training loss.

    `loss_scale` are the ends of the axis of the losses, which otherwise follows them.
    """
    steps = max(1, history.last_step)
    panels: list[Frame] = []
    parts: list[str] = []

    def panel(height: float, low: float, high: float) -> Frame:
        top = panels[-1].bottom + GAP if panels else TOP
        panels.append(Frame(PLOT_LEFT, top, PLOT_WIDTH, height, steps, low, high))
        return panels[-1]

    if len(history.layers) > len(COLOURS):
        row = max(13.0, min(26.0, 330 / len(history.layers)))
        parts += _rows(history, panel(row * len(history.layers), 0, len(history.layers)))
    else:
        most = max(count for counts in history.counts for _, count in counts)
        parts += _stairs(history, panel(HEADS_HEIGHT, 0, most + 0.7))
    curves = _demand_curves(history)
    if curves:
        parts += _demand(history, curves, panel(DEMAND_HEIGHT, *_demand_range(curves)))
    if finite_points(history.losses):
        shown = thinned(history.losses)
        smooth = smoothed(shown)
        parts += _loss(history, shown, smooth, panel(LOSS_HEIGHT, *(loss_scale or loss_range(shown, smooth))))
    bottom = panels[-1].bottom
    legend = _legend(history, bottom + 66)
    parts += [*step_axis(panels[-1]), *legend]
    name, width, height = title or "Heads", PLOT_LEFT + PLOT_WIDTH + LABELS, bottom + (86 if legend else 58)
    return document(width, height, name, [*heading(name, _facts(history), width), *parts])


def _facts(history: HeadHistory) -> str:
    facts = f"{history.last_step:,} steps; {counted(sum(history.start), 'head')} at the start, {sum(history.heads):,}"
    actions = [entry["action"] for entry in history.changes]
    changes = [counted(actions.count(action), action) for action in CHANGES if action in actions]
    never = any(history.readings) and not _demand_curves(history)
    return f"{facts} at the end; {', '.join(changes) or 'no birth'}{'; no demand was ever certain' if never else ''}"


# --- heads ----------------------------------------------------------------------------------------------------------


def _stairs(history: HeadHistory, frame: Frame) -> list[str]:
    """A line for each layer, a little apart where they have equally many heads."""
    parts = [caption(frame, "heads" if len(history.layers) == 1 else "heads of each layer")]
    ticks = [tick for tick in nice_ticks(0, frame.high, 4) if tick.is_integer()]
    parts += _grid(frame, ticks, [f"{tick:.0f}" for tick in ticks])
    marks, ends = [], []
    for layer, counts in enumerate(history.counts):
        colour = COLOURS[layer]
        aside = 3.5 * (layer - (len(history.layers) - 1) / 2)
        corners = [
            (frame.x(step), frame.y(count) - aside)
            for (since, count), (until, _) in pairwise([*counts, (history.last_step, 0)])
            for step in (since, until)
        ]
        if len(history.layers) == 1:
            parts.append(area(corners, frame.bottom, PALE))
        parts.append(polyline(corners, colour, 2.5))
        places = [(frame.x(step), frame.y(count) - aside) for step, count in counts[1:]]
        for ((_, before), (_, count)), place in zip(pairwise(counts), places, strict=True):
            marks += _mark(place, count, _radius(places), is_birth=count > before, colour=colour)
        marks += [
            circle((frame.x(entry["step"]), frame.y(entry["heads"][layer]) - aside), 2.6, BACKGROUND, INK)
            for entry in history.spared
            if entry["layer"] == layer
        ]
        ends.append(corners[-1][1])
    heights = apart(ends, 15, frame.top + 2, frame.bottom - 4)
    for layer, y in enumerate(heights):
        heads = history.heads[layer]
        label = counted(heads, "head") if len(history.layers) == 1 else f"layer {layer}: {heads}"
        parts += _end(history, frame, layer, y, label, COLOURS[layer])
    return [*parts, *marks, *_end_captions(history, frame)]


def _rows(history: HeadHistory, frame: Frame) -> list[str]:
    """A row for each layer, the deepest on top, as the stream flows upwards; dark where there are many heads."""
    row = frame.height / frame.high
    counts = [count for layer in history.counts for _, count in layer]
    fewest, most = min(counts), max(counts)

    def share(count: int) -> float:
        return 0.12 + 0.6 * (count - fewest) / max(1, most - fewest)  # not so dark that a ring on it is hard to see

    parts = [caption(frame, "layer", left=True), caption(frame, "heads of each layer, darker with more of them")]
    cells: dict[int, list[Box]] = defaultdict(list)
    marks = []
    for layer, stretches in enumerate(history.counts):
        y, middle, size = frame.y(layer + 1), frame.y(layer + 0.5), min(12, row - 2)
        parts.append(text((frame.left - 10, middle), f"{layer}", size=size, colour=MUTED, anchor="end"))
        for (since, count), (until, _) in pairwise([*stretches, (history.last_step, 0)]):
            cells[count].append((frame.x(since), y, frame.x(until) - frame.x(since), row - 1))
        places = [(frame.x(step), middle) for step, _ in stretches[1:]]
        for ((_, before), (_, count)), place in zip(pairwise(stretches), places, strict=True):
            radius = min(_radius(places), 0.46 * row)
            marks += _mark(place, count, radius, is_birth=count > before, colour=ORANGE)
        first = stretches[0][1]
        if not places or places[0][0] > frame.left + 30:
            ink = BACKGROUND if share(first) > 0.5 else INK
            marks.append(text((frame.left + 8, middle), f"{first}", size=size - 1, colour=ink))
        marks += [
            circle((frame.x(entry["step"]), middle), 2.6, BACKGROUND, INK)
            for entry in history.spared
            if entry["layer"] == layer
        ]
        parts += _end(history, frame, layer, middle, counted(history.heads[layer], "head"), INK, size)
    parts += [boxes(where, shade(share(count))) for count, where in sorted(cells.items())]
    return [*parts, *marks, *_end_captions(history, frame)]


def _mark(at: Point, count: int, radius: float, *, is_birth: bool, colour: str) -> list[str]:
    """How many heads there are after a birth, in a ring, or after a removal, in a disc."""
    if is_birth:
        return badge(at, count, radius, colour=colour)
    return badge(at, count, radius, colour=BACKGROUND, fill=INK, ink=BACKGROUND)


def _radius(places: Sequence[Point]) -> float:
    """Of rings that do not touch each other."""
    distances = [0.48 * math.dist(a, b) for a, b in pairwise(places)]
    return max(2.5, min(RING, *distances)) if distances else RING


def _end(
    history: HeadHistory, frame: Frame, layer: int, y: float, label: str, colour: str, size: float = 12
) -> list[str]:
    """How many heads a layer has at the end, beside how many were expected."""
    predicted = history.predicted[layer]
    parts = [text((frame.right + 12, y), label, size=size, colour=colour, bold=True)]
    if predicted is not None:
        parts.append(text((frame.right + 12 + PREDICTED, y), f"{predicted}", size=size, colour=MUTED))
    return parts


def _end_captions(history: HeadHistory, frame: Frame) -> list[str]:
    parts = [caption(frame, "at the end", right=True)]
    if any(predicted is not None for predicted in history.predicted):
        at = (frame.right + 12 + PREDICTED, frame.top - 14)
        parts.append(text(at, "predicted", size=11, colour=MUTED))
    return parts


# --- demand ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DemandCurve:
    """What is drawn of a layer, or of several together."""

    name: str
    colour: str
    readings: Sequence[DemandPoint]


def _demand_curves(history: HeadHistory) -> list[DemandCurve]:
    """One for each layer, or for the largest and the median of many; those of which something is known."""
    stretch = math.ceil(max(map(len, history.readings)) / SHOWN)
    layers = [_thinned(readings, stretch) for readings in history.readings]
    if len(layers) <= len(COLOURS):
        names = [f"layer {layer}" if len(layers) > 1 else "" for layer in history.layers]
        curves = [DemandCurve(*of) for of in zip(names, COLOURS, layers, strict=False)]
    else:
        steps = list(zip(*layers, strict=True))
        curves = [
            DemandCurve("largest", ORANGE, [max(step, key=_known_demand) for step in steps]),
            DemandCurve("median", BLUE, [_median(step) for step in steps]),
        ]
    return [curve for curve in curves if any(math.isfinite(reading.demand) for reading in curve.readings)]


def _thinned(readings: Sequence[DemandPoint], stretch: int) -> list[DemandPoint]:
    """The mean of every `stretch` readings, of those that are known."""
    if stretch <= 1:
        return list(readings)
    groups = [readings[i : i + stretch] for i in range(0, len(readings), stretch)]
    return [
        DemandPoint(
            group[-1].step, *(_mean([getattr(r, name) for r in group]) for name in ("demand", "noise", "threshold"))
        )
        for group in groups
    ]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _known_demand(reading: DemandPoint) -> float:
    return reading.demand if math.isfinite(reading.demand) else -math.inf


def _median(readings: Sequence[DemandPoint]) -> DemandPoint:
    """Of the layers whose demand is known; it has no noise of its own."""
    known = [reading.demand for reading in readings if math.isfinite(reading.demand)]
    middle = median(known) if known else math.nan
    return DemandPoint(readings[0].step, middle, math.nan, median(reading.threshold for reading in readings))


def _demand_range(curves: Sequence[DemandCurve]) -> tuple[float, float]:
    """Powers of ten at the ends of the axis, which has room for all that is above its noise."""
    readings = [reading for curve in curves for reading in curve.readings]
    clear = [r.demand for r in readings if r.demand > max(0.0, r.noise)]
    thresholds = [r.threshold for r in readings if 0 < r.threshold < math.inf]
    high = math.log10(1.5 * max([*clear, *thresholds], default=1.0))
    low = math.log10(min([value / 1.5 for value in clear] + [value / 3 for value in thresholds], default=0.1))
    return max(min(low, high - 1), high - DECADES), high


def _demand(history: HeadHistory, curves: Sequence[DemandCurve], frame: Frame) -> list[str]:
    """The demand of every decision on a logarithmic axis, the band of its noise, and where births begin."""
    is_demand = history.criterion == "demand"
    what = "demand left, of the largest so far" if is_demand else "energy of the heads, of that at the start"
    noise = f"band: ± {ERRORS} standard errors" if is_demand else "band: what noise alone would have"
    ticks = log_ticks(10**frame.low, 10**frame.high)
    parts = [
        caption(frame, f"{what} ({noise})"),
        *_grid(frame, [math.log10(tick) for tick in ticks], [f"{tick:g}" for tick in ticks]),
        *_guides(history, frame),
    ]

    def y(value: float) -> float:
        """What is below the axis, or below zero, lies on it."""
        return frame.y(max(frame.low, math.log10(value)) if value > 0 else frame.low) if value == value else math.nan

    bands, lines, dots, labels = [], [], [], []
    for curve in curves:
        places = [(frame.x(r.step), y(r.demand)) for r in curve.readings]
        edges = [
            (frame.x(r.step), y(r.demand + ERRORS * r.noise), y(r.demand - ERRORS * r.noise))
            if is_demand
            else (frame.x(r.step), y(r.noise), frame.bottom)
            for r in curve.readings
        ]
        bands.append(band(edges, curve.colour, 0.16))
        lines.append(polyline(places, curve.colour, 2))
        *_, last = [r for r in curve.readings if math.isfinite(r.demand)]
        dots.append(dot((frame.x(last.step), y(last.demand)), 3.5, curve.colour))
        least = 10**frame.low
        value = f"{last.demand:.2g}" if last.demand > least else f"< {least:.1g}"
        labels.append((y(last.demand), f"{curve.name} {value}".strip(), curve.colour))
    for colour, corners in _thresholds(curves, history.last_step):
        lines.append(polyline([(frame.x(step), y(value)) for step, value in corners], colour, 1.5, dash="5 4"))
        label = (y(corners[-1][1]), f"births above {corners[-1][1]:.2g}", INK)
        labels += [] if label in labels else [label]
    heights = apart([height for height, _, _ in labels], 15, frame.top + 4, frame.bottom - 4)
    texts = [
        text((frame.right + 12, height), label, size=11.5, colour=colour, bold=colour != INK)
        for height, (_, label, colour) in zip(heights, labels, strict=True)
    ]
    # A little air, so that strokes on the edge stay whole.
    return [*parts, window(frame.left, frame.top - 2, frame.width, frame.height + 4, *bands, *lines), *dots, *texts]


def _thresholds(curves: Sequence[DemandCurve], last_step: int) -> list[tuple[str, list[tuple[int, float]]]]:
    """Stairs for all together where they are the same, and else for each curve, in its colour."""
    stairs: dict[tuple[tuple[int, float], ...], str] = {}
    for curve in curves:
        known = [r for r in curve.readings if math.isfinite(r.threshold)]
        changes = [(r.step, r.threshold) for before, r in pairwise(known) if r.threshold != before.threshold]
        if known:
            levels = [(0, known[0].threshold), *changes]
            spans = zip(levels, [*levels[1:], (last_step, 0.0)], strict=True)
            stairs[tuple((step, value) for (since, value), (until, _) in spans for step in (since, until))] = (
                curve.colour
            )
    return [(INK if len(stairs) == 1 else colour, list(corners)) for corners, colour in stairs.items()]


# --- loss, and what all have ----------------------------------------------------------------------------------------


def _loss(
    history: HeadHistory, shown: list[tuple[int, float]], smooth: list[tuple[int, float]], frame: Frame
) -> list[str]:
    ticks = nice_ticks(frame.low, frame.high, 4)
    *_, (_, last) = finite_points(smooth)
    step, highest = max(finite_points(shown), key=lambda point: point[1])
    above = f" (off the scale: {loss_text(highest)} at step {step:,})" if highest > frame.high else ""
    height = min(max(frame.y(last), frame.top + 4), frame.bottom - 4)
    return [
        caption(frame, f"training loss{above}"),
        *_grid(frame, ticks, tick_labels(ticks)),
        *_guides(history, frame),
        window(
            frame.left, frame.top - 2, frame.width, frame.height + 4,
            polyline(frame.place(shown), MUTED, 1, opacity=0.35), polyline(frame.place(smooth), INK, 2),
        ),
        text((frame.right + 12, height), loss_text(last), size=11.5, bold=True),
    ]  # fmt: skip


def _grid(frame: Frame, ticks: Sequence[float], labels: Sequence[str]) -> list[str]:
    parts = []
    for tick, label in zip(ticks, labels, strict=True):
        parts.append(line((frame.left, frame.y(tick)), (frame.right, frame.y(tick))))
        parts.append(text((frame.left - 10, frame.y(tick)), label, size=11, colour=MUTED, anchor="end"))
    return parts


def _guides(history: HeadHistory, frame: Frame) -> list[str]:
    """A line at each birth and removal, from panel to panel."""
    xs = sorted({frame.x(entry["step"]) for entry in history.changes})
    return [line((x, frame.top - 4), (x, frame.bottom), GUIDE, dash="2 3") for x in xs]


def _legend(history: HeadHistory, y: float) -> list[str]:
    """What the marks mean, where there are any."""
    actions = {entry["action"] for entry in (*history.changes, *history.spared)}
    colour = COLOURS[0] if len(history.layers) == 1 else INK if len(history.layers) <= len(COLOURS) else ORANGE
    meanings = {
        "birth": ("a head is born", 130),
        "removal": ("a head leaves", 130),
        "spare": ("a trial without a head failed", 210),
    }
    parts: list[str] = []
    x = PLOT_LEFT + 8
    for action, (meaning, width) in meanings.items():
        if action in actions:
            at, is_birth = (x, y), action == "birth"
            spared = [circle(at, 2.6, BACKGROUND, INK)]
            parts += spared if action == "spare" else _mark(at, 2, 7, is_birth=is_birth, colour=colour)
            parts.append(text((x + 14, y), meaning, size=11))
            x += width
    if history.changes:
        parts.append(text((x, y), "numbers: heads from then on", size=11, colour=MUTED))
    return parts
