"""The picture of a run whose heads came and went: their number, the demand that was left, and the loss."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median

from meristem.growth.events import HEAD_CHANGES
from meristem.report.curves import Curve, finite_points, loss_range, smoothed, thinned
from meristem.report.drawing.colours import BACKGROUND, BLUE, GREEN, GRID, INK, MUTED, ORANGE, PURPLE, shade
from meristem.report.drawing.elements import Box, Point, area, badge, band, boxes, circle, dot, polyline, text
from meristem.report.drawing.frame import EndLabel, Frame, LegendEntry, apart, caption, end_labels, layer_names
from meristem.report.drawing.numbers import loss_text
from meristem.report.drawing.panels import Panel, StepLine, stacked, strong_line_key, with_lines
from meristem.report.drawing.scales import CountScale, LogScale, Scale
from meristem.report.head_history import DemandPoint, HeadHistory
from meristem.wording import counted

COLOURS = (BLUE, ORANGE, GREEN, PURPLE)  # of the layers; more layers than that are rows
LABELS = 180  # pixels beside the panels
HEADS_HEIGHT, DEMAND_HEIGHT, LOSS_HEIGHT = 130, 170, 110
PALE = "#e3eff8"  # under the stairs of a single layer
SHOWN = 140  # decisions of a curve at most; of more, means are shown
DECADES = 4  # of the demand at most: what is less is next to nothing
ERRORS = 2  # standard errors of the band, up and down
RING = 8.0  # radius of a birth at most


def heads_svg(history: HeadHistory, title: str = "", loss_scale: tuple[float, float] | None = None) -> str:
    """Heads of every layer with births and removals, the demand with its noise and threshold, and the training loss.

    `loss_scale` are the ends of the axis of the losses, which otherwise follows them.
    """
    panels = with_lines(head_panels(history, loss_scale), block_lines(history))
    if history.blocks:
        copied = all(event.action == "stack" for event in history.blocks)
        meaning = LegendEntry("blocks are copied" if copied else "blocks come or go", strong_line_key)
        panels = [replace(panel, legend=[*panel.legend, meaning]) for panel in panels]
    return stacked(panels, history.last_step, title or "Heads", heads_facts(history))


def block_lines(history: HeadHistory) -> list[StepLine]:
    """Bold lines where blocks come and go."""
    return [StepLine(event.step, is_strong=True) for event in history.blocks]


def head_panels(history: HeadHistory, loss_scale: tuple[float, float] | None = None) -> list[Panel]:
    """What the picture is stacked of: heads, and demand and loss where they are known."""
    is_small = len(history.layers) <= len(COLOURS)
    heads = _stairs_panel(history) if is_small else _rows_panel(history)
    below = []
    if curves := _demand_curves(history):
        below.append(_demand_panel(history, curves))
    if finite_points(history.losses):
        below.append(_loss_panel(history.losses, loss_scale))
    changes = [StepLine(step) for step in sorted({event.step for event in history.changes})]
    return [heads, *with_lines(below, changes)]


def heads_facts(history: HeadHistory) -> str:
    """What a picture says of the heads, in a line."""
    first, last = counted(sum(history.start), "head"), f"{sum(history.heads):,}"
    actions = [event.action for event in history.changes]
    order = [action for action in dict.fromkeys((*HEAD_CHANGES, *actions)) if action in actions]
    changes = [counted(actions.count(action), action) for action in order]
    if history.blocks:
        first += f" in {counted(sum(heads > 0 for heads in history.start), 'block')}"
        last += f" in {counted(len(history.layers), 'block')}"
        changes.append(f"{counted(len(history.blocks), 'change')} of depth")
    said = [
        f"{history.last_step:,} steps; {first} at the start, {last} at the end",
        ", ".join(changes) or "no birth",
    ]
    if history.taken_out:
        said.append(f"{counted(history.taken_out, 'layer')} taken out, not shown")
    if any(history.readings) and not _demand_curves(history):
        said.append("no demand was ever certain")
    return "; ".join(said)


# --- heads ----------------------------------------------------------------------------------------------------------


def _stairs_panel(history: HeadHistory) -> Panel:
    """A line for each layer, a little apart where they have equally many heads."""
    most = max(count for counts in history.counts for _, count in counts)
    name, draw = "heads" if len(history.layers) == 1 else "heads of each layer", partial(_stairs, history)
    legend = _meanings(history, BLUE if len(history.layers) == 1 else INK)
    return Panel(name, HEADS_HEIGHT, CountScale(0, most + 0.7), 4, front=draw, legend=legend, labels=LABELS)


def _stairs(history: HeadHistory, frame: Frame) -> list[str]:
    lines, marks, ends = [], [], []
    taken: list[Point] = []
    for layer, counts in enumerate(history.counts):
        colour = COLOURS[layer]
        aside = 3.5 * (layer - (len(history.layers) - 1) / 2)
        corners = [
            (frame.x(step), frame.y(count) - aside)
            for (since, count), (until, _) in pairwise([*counts, (history.last_step, 0)])
            for step in (since, until)
        ]
        if len(history.layers) == 1:
            lines.append(area(corners, frame.bottom, PALE))
        lines.append(polyline(corners, colour, 2.5))
        places = [(frame.x(step), frame.y(count) - aside) for step, count in counts[1:]]
        radius = _radius(places)
        for ((_, before), (_, count)), place in zip(pairwise(counts), places, strict=True):
            place = _beside(place, taken, 2 * radius + 1)
            marks += _mark(place, count, radius, is_birth=count > before, colour=colour)
            taken.append(place)
        marks += [
            _spared((frame.x(event.step), frame.y(event.facts["heads"][layer]) - aside))
            for event in history.spared
            if event.layer == layer
        ]
        ends.append(corners[-1][1])
    for layer, y in enumerate(apart(ends, 15, frame.top + 2, frame.bottom - 4)):
        heads = history.heads[layer]
        label = counted(heads, "head") if len(history.layers) == 1 else f"layer {layer}: {heads}"
        lines += _end(history, frame, layer, y, label, COLOURS[layer])
    return [*lines, *marks, *_end_captions(history, frame)]


def _beside(place: Point, taken: list[Point], distance: float) -> Point:
    """The place, or one to the right of it that is so far from all that are taken: layers may change together."""
    x, y = place
    while any(abs(x - other) < distance and abs(y - height) < distance for other, height in taken):
        x += distance
    return x, y


def _rows_panel(history: HeadHistory) -> Panel:
    """A row for each layer, the deepest on top, as the stream flows upwards; dark where there are many heads."""
    layers = len(history.layers)
    row = max(13.0, min(26.0, 330 / layers))
    return Panel(
        "heads of each layer, darker with more of them", row * layers, Scale(0, layers), behind=partial(_rows, history),
        front=partial(_row_marks, history), legend=_meanings(history, ORANGE), labels=LABELS,
    )  # fmt: skip


def _rows(history: HeadHistory, frame: Frame) -> list[str]:
    cells: dict[int, list[Box]] = defaultdict(list)
    height = frame.height / len(history.layers) - 1
    for layer, stretches in enumerate(history.counts):
        for (since, count), (until, _) in pairwise([*stretches, (history.last_step, 0)]):
            cells[count].append((frame.x(since), frame.y(layer + 1), frame.x(until) - frame.x(since), height))
    rows = [  # a layer without heads is not born yet
        boxes(where, shade(_darkness(history, count)) if count else GRID) for count, where in sorted(cells.items())
    ]
    return [*layer_names(frame, len(history.layers)), *rows]


def _darkness(history: HeadHistory, count: int) -> float:
    """The shade of so many heads among those of all layers; not so dark that a ring on it is hard to see."""
    counts = [count for layer in history.counts for _, count in layer if count]
    return 0.12 + 0.6 * (count - min(counts)) / max(1, max(counts) - min(counts))


def _row_marks(history: HeadHistory, frame: Frame) -> list[str]:
    row = frame.height / len(history.layers)
    size = min(12, row - 2)
    parts = []
    for layer, stretches in enumerate(history.counts):
        middle = frame.y(layer + 0.5)
        places = [(frame.x(step), middle) for step, _ in stretches[1:]]
        for ((_, before), (_, count)), place in zip(pairwise(stretches), places, strict=True):
            radius = min(_radius(places), 0.46 * row)
            parts += _mark(place, count, radius, is_birth=count > before, colour=ORANGE)
        first = stretches[0][1]
        if first and (not places or places[0][0] > frame.left + 30):
            ink = BACKGROUND if _darkness(history, first) > 0.5 else INK
            parts.append(text((frame.left + 8, middle), f"{first}", size=size - 1, colour=ink))
        parts += [_spared((frame.x(event.step), middle)) for event in history.spared if event.layer == layer]
        parts += _end(history, frame, layer, middle, counted(history.heads[layer], "head"), INK, size)
    return [*parts, *_end_captions(history, frame)]


def _meanings(history: HeadHistory, colour: str) -> list[LegendEntry]:
    """What the marks mean, where there are any; `colour` is that of a birth."""
    marks = {
        "birth": LegendEntry("a head is born", partial(_mark, count=2, radius=7, is_birth=True, colour=colour)),
        "removal": LegendEntry("a head leaves", partial(_mark, count=2, radius=7, is_birth=False, colour=colour)),
        "spare": LegendEntry("a trial without a head failed", lambda at: [_spared(at)]),
    }
    steps = [(before, after) for counts in history.counts for (_, before), (_, after) in pairwise(counts) if before]
    shown = {"birth" if after > before else "removal" for before, after in steps}
    shown |= {"spare"} if history.spared else set()
    entries = [entry for name, entry in marks.items() if name in shown]
    return [*entries, LegendEntry("numbers: heads from then on")] if steps else entries


def _mark(at: Point, count: int, radius: float, *, is_birth: bool, colour: str) -> list[str]:
    """How many heads there are after a birth, in a ring, or after a removal, in a disc."""
    if is_birth:
        return badge(at, count, radius, colour=colour)
    return badge(at, count, radius, colour=BACKGROUND, fill=INK, ink=BACKGROUND)


def _spared(at: Point) -> str:
    return circle(at, 2.6, BACKGROUND, INK)


def _radius(places: Sequence[Point]) -> float:
    """The radius of rings that do not touch each other."""
    distances = [0.48 * math.dist(a, b) for a, b in pairwise(places)]
    return max(2.5, min(RING, *distances)) if distances else RING


def _end(
    history: HeadHistory, frame: Frame, layer: int, y: float, label: str, colour: str, size: float = 12
) -> list[str]:
    """How many heads a layer has at the end, beside how many were expected."""
    predicted = history.predicted[layer]
    parts = [text((frame.end(), y), label, size=size, colour=colour, bold=True)]
    if predicted is not None:
        parts.append(text((frame.end(column=1), y), f"{predicted}", size=size, colour=MUTED))
    return parts


def _end_captions(history: HeadHistory, frame: Frame) -> list[str]:
    parts = [caption(frame, "at the end", frame.end())]
    if any(predicted is not None for predicted in history.predicted):
        parts.append(caption(frame, "predicted", frame.end(column=1)))
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
    """The middle one of the layers whose demand is known; it has no noise of its own."""
    known = [reading.demand for reading in readings if math.isfinite(reading.demand)]
    middle = median(known) if known else math.nan
    return DemandPoint(readings[0].step, middle, math.nan, median(reading.threshold for reading in readings))


def _demand_panel(history: HeadHistory, curves: Sequence[DemandCurve]) -> Panel:
    """The demand of every decision, the band of its noise, and where births begin."""
    is_demand = history.criterion == "demand"
    what = "demand left, of the largest so far" if is_demand else "energy of the heads, of that at the start"
    noise = f"band: ± {ERRORS} standard errors" if is_demand else "band: what noise alone would have"
    draw = partial(_demand, history, curves)
    return Panel(f"{what} ({noise})", DEMAND_HEIGHT, _demand_scale(curves), ticks=4, front=draw, labels=LABELS)


def _demand_scale(curves: Sequence[DemandCurve]) -> LogScale:
    """One decade at least, with room for all that is above its noise."""
    readings = [reading for curve in curves for reading in curve.readings]
    clear = [r.demand for r in readings if r.demand > max(0.0, r.noise)]
    thresholds = [r.threshold for r in readings if 0 < r.threshold < math.inf]
    high = 1.5 * max([*clear, *thresholds], default=1.0)
    low = min([value / 1.5 for value in clear] + [value / 3 for value in thresholds], default=0.1)
    return LogScale(max(min(low, high / 10), high / 10**DECADES), high)


def _demand(history: HeadHistory, curves: Sequence[DemandCurve], frame: Frame) -> list[str]:
    bands, lines, dots, labels = [], [], [], []
    for curve in curves:
        bands.append(band(_noise(history, curve, frame), curve.colour, 0.16))
        lines.append(polyline(frame.place([(r.step, r.demand) for r in curve.readings]), curve.colour, 2))
        *_, last = [r for r in curve.readings if math.isfinite(r.demand)]
        dots.append(dot((frame.x(last.step), frame.y(last.demand)), 3.5, curve.colour))
        least = frame.y_scale.low
        value = f"{last.demand:.2g}" if last.demand > least else f"< {least:.1g}"
        labels.append(EndLabel(frame.y(last.demand), f"{curve.name} {value}".strip(), curve.colour))
    for colour, corners in _thresholds(curves, history.last_step):
        lines.append(polyline(frame.place(corners), colour, 1.5, dash="5 4"))
        threshold = corners[-1][1]
        label = EndLabel(frame.y(threshold), f"births above {threshold:.2g}", bold=False)
        labels += [] if label in labels else [label]
    return [frame.clipped(*bands, *lines), *dots, *end_labels(frame, labels, size=11.5)]


def _noise(history: HeadHistory, curve: DemandCurve, frame: Frame) -> list[tuple[float, float, float]]:
    """The edges of the band: around the demand, or from what noise alone would have down to the axis."""
    if history.criterion != "demand":
        return [(frame.x(r.step), frame.y(r.noise), frame.bottom) for r in curve.readings]
    return [
        (frame.x(r.step), frame.y(r.demand + ERRORS * r.noise), frame.y(r.demand - ERRORS * r.noise))
        for r in curve.readings
    ]


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


# --- loss -----------------------------------------------------------------------------------------------------------


def _loss_panel(losses: Curve, ends: tuple[float, float] | None) -> Panel:
    """The training loss, raw and smoothed; `ends` are those of its axis."""
    shown = thinned(losses)
    smooth = smoothed(shown)
    scale = Scale(*(ends or loss_range(shown, smooth)))
    step, highest = max(finite_points(shown), key=lambda point: point[1])
    above = f" (off the scale: {loss_text(highest)} at step {step:,})" if highest > scale.high else ""
    draw = partial(_loss, shown, smooth)
    return Panel(f"training loss{above}", LOSS_HEIGHT, scale, ticks=4, front=draw, labels=LABELS)


def _loss(shown: Curve, smooth: Curve, frame: Frame) -> list[str]:
    *_, (_, last) = finite_points(smooth)
    curves = [polyline(frame.place(shown), MUTED, 1, opacity=0.35), polyline(frame.place(smooth), INK, 2)]
    label = EndLabel(frame.y(last), loss_text(last))
    return [frame.clipped(*curves), *end_labels(frame, [label], size=11.5)]
