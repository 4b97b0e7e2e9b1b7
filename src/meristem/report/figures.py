"""The two pictures of a run: the structure of its plan, and its losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from meristem.errors import InputError
from meristem.plan import LayerPlan, Plan
from meristem.report.svg import (
    BACKGROUND,
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    Point,
    apart,
    blend,
    compact,
    document,
    dot,
    fit,
    line,
    nice_ticks,
    polyline,
    rect,
    text,
    tick_labels,
    triangle,
    window,
)

Curve = Sequence[tuple[int, float]]

MARGIN = 24
TIMES = "\u00d7"

BOXES_LEFT, BOXES_TOP, BOXES_WIDTH = 72, 94, 400
NARROW, WIDE = "#d3e5f4", "#12497b"
NARROW_DIM, WIDE_DIM = 16, 256  # a fixed range of shades, so that pictures of different plans compare
DISTANCE_WIDTH = 240
HEADS, KEYS, LOOPS = f"heads {TIMES} dim", "kv heads", "run again"  # names of columns
NAMED_HEADS = 3  # in a label; more are counted

PLOT_LEFT, PLOT_WIDTH, PLOT_HEIGHT, LABEL_WIDTH = 76, 700, 300, 124
SHOWN_POINTS = 1000
OPENING = 0.1  # share of the steps whose losses do not set the scale


def structure_svg(plan: Plan, distances: Sequence[float] | None = None, title: str = "") -> str:
    """The heads of every layer as boxes, layer 0 on top; widths and shades of the boxes follow the head dim.

    `distances` are the mean attention distances of the layers in tokens; with them a panel on the right shows
    how far each layer looks, against the distance of attention spread evenly over the past.
    """
    count = len(plan.layers)
    if distances is not None and len(distances) != count:
        raise InputError("distances", len(distances), f"must hold one value per layer: {count}")
    row = max(13.0, min(36.0, 540 / count))
    bottom = BOXES_TOP + count * row
    scale = BOXES_WIDTH / max(plan.width, *(layer.query_width for layer in plan.layers))
    label_size = min(12.0, row - 3)

    parts = [
        _caption(BOXES_LEFT - 14, "layer", anchor="end"),
        _caption(BOXES_LEFT, "heads, as wide as their dim"),
    ]
    for index, layer in enumerate(plan.layers):
        y = BOXES_TOP + index * row
        parts.append(text((BOXES_LEFT - 14, y + row / 2), f"{index}", size=label_size, colour=MUTED, anchor="end"))
        parts += _heads(layer, y, row, scale)
    parts += _width_ruler(plan.width, bottom, scale)

    columns, right = _columns(plan)
    parts += [_caption(x, name) for name, x in columns.items()]
    first = 0
    for layer, run in groupby(plan.layers):
        length = len(list(run))
        parts += _run_label(layer, columns, BOXES_TOP + first * row, length * row, label_size)
        first += length

    if distances is not None:
        parts += _distance_panel(plan, distances, right, row)
        right += DISTANCE_WIDTH
    legend = _legend(plan, bottom + 58)
    facts = f"{count} layers, width {plan.width}, {_rounded(plan.parameters)} parameters"
    width = right + MARGIN
    height = bottom + (82 if legend else 48)
    return document(width, height, title or facts, [*heading(title or "Structure", facts, width), *parts, *legend])


def loss_svg(
    train: Curve, held_out: Curve, title: str = "", tokens_per_step: int | None = None, *, unit: str = "token"
) -> str:
    """Training loss, raw and smoothed, and held-out loss over the steps; values that are not finite are gaps.

    The losses of the first steps would flatten everything after them, so the scale follows the later ones and
    the subtitle says how high the curve went. `tokens_per_step` adds a second axis in tokens; `unit` is what the
    losses are means over.
    """
    name, top = title or "Loss", 108 if tokens_per_step else 80
    width, height = PLOT_LEFT + PLOT_WIDTH + LABEL_WIDTH, top + PLOT_HEIGHT + 60
    points = finite_points([*train, *held_out])
    if not points:
        middle = (width / 2, top + PLOT_HEIGHT / 2)
        empty = text(middle, "no losses yet", size=14, colour=MUTED, anchor="middle")
        return document(width, height, name, [*heading(name, "", width), empty])

    last_step = max(step for step, _ in [*train, *held_out])
    shown = thinned(train)
    smooth = smoothed(shown)
    low, high = loss_range(shown, [*smooth, *held_out])
    frame = Frame(PLOT_LEFT, top, PLOT_WIDTH, PLOT_HEIGHT, max(last_step, 1), low, high)

    curves = [
        polyline(frame.place(shown), BLUE, 1, opacity=0.3),
        polyline(frame.place(smooth), BLUE, 2),
        polyline(frame.place(held_out), ORANGE, 2),
    ]
    curves += [dot(at, 3.5, BLUE) for at in frame.place(finite_points(smooth)[-1:])]
    curves += [dot(at, 3.5 if len(held_out) <= 50 else 2, ORANGE) for at in frame.place(finite_points(held_out))]
    facts = f"{last_step:,} steps"
    if tokens_per_step:
        facts += f", {_rounded(last_step * tokens_per_step)} tokens"
    step, loss = max(points, key=lambda point: point[1])
    if loss > high:
        curves.append(triangle((frame.x(step), top + 8), 5, MUTED))
        facts += f"; off the scale at the triangle: {loss:.2f} at step {step:,}"
    parts = [
        *heading(name, facts, width),
        *_loss_axes(frame, tokens_per_step, unit),
        # A few pixels of air, so that strokes and dots on the edge stay whole.
        window(frame.left - 5, top - 2, PLOT_WIDTH + 10, PLOT_HEIGHT + 4, *curves),
        *_end_labels(frame, [("training", smooth, BLUE), ("held-out", held_out, ORANGE)]),
    ]
    return document(width, height, name, parts)


# --- structure ----------------------------------------------------------------------------------------------


def _heads(layer: LayerPlan, y: float, row: float, scale: float) -> list[str]:
    """The boxes of one layer, over a bar for each key/value head that several of them share."""
    grouped = layer.kv_heads < layer.heads
    bar = max(2.0, 0.12 * row) if grouped else 0.0
    step = layer.head_dim * scale
    gap = min(2.0, 0.2 * step)
    top, height = y + 0.1 * row, 0.8 * row - (bar + 1.5 if grouped else 0)
    share = math.log(layer.head_dim / NARROW_DIM) / math.log(WIDE_DIM / NARROW_DIM)
    fill = blend(NARROW, WIDE, min(1.0, max(0.0, share)))
    boxes = [
        rect(BOXES_LEFT + i * step, top, step - gap, height, fill, radius=min(2.0, 0.2 * step))
        for i in range(layer.heads)
    ]
    if grouped:
        group = step * layer.heads / layer.kv_heads
        boxes += [
            rect(BOXES_LEFT + i * group, top + height + 1.5, group - gap, bar, GREEN) for i in range(layer.kv_heads)
        ]
    return boxes + _again(layer, top, height, scale, INK if share < 0.6 else BACKGROUND)


def _again(layer: LayerPlan, top: float, height: float, scale: float, ink: str) -> list[str]:
    """Outlines of what is run again, head by head or the whole block, with the number of times where there is room."""
    if layer.loop is None and not layer.repeats:
        return []
    step = layer.head_dim * scale
    gap = min(2.0, 0.2 * step)
    # The outline lies inside its box and leaves it a core, however narrow the box is.
    edge = min(2.5, 0.25 * (step - gap), 0.2 * height)
    heads, times = (range(layer.heads), layer.repeats) if layer.loop is None else (layer.loop.heads, layer.loop.passes)
    spans = [(0, layer.heads)] if layer.loop is None else [(head, 1) for head in heads]
    parts = [
        rect(
            BOXES_LEFT + first * step + edge / 2, top + edge / 2, count * step - gap - edge, height - edge, "none",
            stroke=ORANGE, stroke_width=edge,
        )
        for first, count in spans
    ]  # fmt: skip
    label = f"{TIMES}{times}"
    size = min(12.0, 0.65 * height, (step - gap - 2 * edge) / (0.6 * len(label)))
    if size > 6:
        middles = [(BOXES_LEFT + (head + 0.5) * step - gap / 2, top + height / 2) for head in heads]
        parts += [text(middle, label, size=size, colour=ink, anchor="middle", bold=True) for middle in middles]
    return parts


def _width_ruler(width: int, bottom: float, scale: float) -> list[str]:
    """A measure under the boxes, which shows where heads times dim is not the width."""
    y, end = bottom + 16, BOXES_LEFT + width * scale
    label = f"width {width}"
    middle, half = (BOXES_LEFT + end) / 2, 3.6 * len(label)
    return [
        line((BOXES_LEFT, y), (end, y), MUTED),
        *(line((x, y - 4), (x, y + 4), MUTED) for x in (BOXES_LEFT, end)),
        rect(middle - half, y - 6, 2 * half, 12, BACKGROUND),
        text((middle, y), label, size=11, colour=MUTED, anchor="middle"),
    ]


def _columns(plan: Plan) -> tuple[dict[str, float], float]:
    """Where the columns of numbers begin, only those that say something, and where they end."""
    widths = {HEADS: 82}
    if plan.kv_heads != plan.heads:
        widths[KEYS] = 62
    if any(layer.loop or layer.repeats for layer in plan.layers):
        widths[LOOPS] = 106
    x: float = BOXES_LEFT + BOXES_WIDTH + 28
    columns: dict[str, float] = {}
    for name, width in widths.items():
        columns[name], x = x, x + width
    return columns, x + 14


def _run_label(layer: LayerPlan, columns: dict[str, float], y: float, height: float, size: float) -> list[str]:
    """The numbers of a run of equal layers, once, behind a bracket along the run."""
    cells = {HEADS: f"{layer.heads} {TIMES} {layer.head_dim}", KEYS: f"{layer.kv_heads}"}
    if layer.loop is not None or layer.repeats:
        cells[LOOPS] = looped(layer)
    x = BOXES_LEFT + BOXES_WIDTH + 16
    return [
        line((x, y + 2), (x, y + height - 2), MUTED, 1.5),
        *(
            text((at, y + height / 2), cells[name], size=size, colour=ORANGE if name == LOOPS else INK)
            for name, at in columns.items()
            if name in cells
        ),
    ]


def looped(layer: LayerPlan) -> str:
    """What a layer runs again and how often; many heads are counted instead of named."""
    if layer.loop is not None and len(layer.loop.heads) > NAMED_HEADS:
        return f"{len(layer.loop.heads)} heads {TIMES}{layer.loop.passes}"
    return layer.run_again.replace(" x", f" {TIMES}")


def even_distance(context: int) -> float:
    """Mean distance of attention spread evenly over the past, for queries in the second half of the context."""
    queries = range(context // 2, context)
    return sum(queries) / (2 * len(queries))


def _distance_panel(plan: Plan, distances: Sequence[float], x: float, row: float) -> list[str]:
    """Attention distances beside the rows of their layers, with a token axis below."""
    bottom = BOXES_TOP + row * len(distances)
    even = even_distance(plan.context)
    high = 1.08 * max([1.0, even, *(value for value in distances if math.isfinite(value))])

    def at(tokens: float) -> float:
        return x + tokens / high * DISTANCE_WIDTH

    parts = [_caption(x, "mean attention distance (tokens)")]
    for tick in nice_ticks(0, high, 4):
        parts.append(line((at(tick), BOXES_TOP), (at(tick), bottom)))
        parts.append(text((at(tick), bottom + 14), f"{tick:g}", size=11, colour=MUTED, anchor="middle"))
    parts.append(line((at(even), BOXES_TOP), (at(even), bottom), MUTED, dash="4 3"))
    note = f"dashed: even attention, {even:g}"
    parts.append(text((x + DISTANCE_WIDTH + 10, bottom + 30), note, size=11, colour=MUTED, anchor="end"))
    points = [(at(value), BOXES_TOP + (i + 0.5) * row) for i, value in enumerate(distances)]
    parts.append(polyline(points, PURPLE, 1.5, opacity=0.5))
    parts += [dot(point, min(4.5, 0.28 * row), PURPLE) for point in points if math.isfinite(point[0])]
    return parts


def _legend(plan: Plan, y: float) -> list[str]:
    """What the bars and outlines mean, where there are any."""
    parts: list[str] = []
    x: float = BOXES_LEFT
    if plan.kv_heads != plan.heads:
        parts += [
            rect(x, y - 2, 22, 4, GREEN),
            text((x + 28, y), "key/value head, shared by the heads above it", size=11),
        ]
        x += 300
    if any(layer.loop or layer.repeats for layer in plan.layers):
        parts.append(rect(x + 1, y - 5, 14, 10, "none", stroke=ORANGE, stroke_width=2))
        parts.append(text((x + 22, y), f"run again, {TIMES}n: in n extra passes", size=11))
    return parts


# --- loss ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The plotting area, and how steps and losses map into it."""

    left: float
    top: float
    width: float
    height: float
    last_step: int
    low: float
    high: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, step: float) -> float:
        return self.left + step / self.last_step * self.width

    def y(self, loss: float) -> float:
        return self.bottom - (loss - self.low) / (self.high - self.low) * self.height

    def place(self, curve: Curve) -> list[Point]:
        return [(self.x(step), self.y(loss)) for step, loss in curve]


def _loss_axes(frame: Frame, tokens_per_step: int | None, unit: str) -> list[str]:
    parts: list[str] = []
    ticks = nice_ticks(frame.low, frame.high)
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        y = frame.y(tick)
        parts.append(line((frame.left, y), (frame.right, y)))
        parts.append(text((frame.left - 10, y), label, colour=MUTED, anchor="end"))
    parts += step_axis(frame)
    parts.append(
        text(
            (24, frame.top + frame.height / 2),
            f"loss (nats per {unit})",
            colour=MUTED,
            anchor="middle",
            turn=-90,
        )
    )
    if tokens_per_step:
        for tick in nice_ticks(0, frame.last_step * tokens_per_step, 6):
            x = frame.x(tick / tokens_per_step)
            parts.append(line((x, frame.top), (x, frame.top - 5), MUTED))
            parts.append(text((x, frame.top - 15), compact(tick), colour=MUTED, anchor="middle"))
        parts.append(text((frame.right + 34, frame.top - 15), "tokens", colour=MUTED))
        parts.append(line((frame.left, frame.top), (frame.right, frame.top), MUTED))
    return parts


def step_axis(frame: Frame) -> list[str]:
    """The axis under a plot over the steps."""
    parts = [line((frame.left, frame.bottom), (frame.right, frame.bottom), MUTED)]
    for tick in filter(float.is_integer, nice_ticks(0, frame.last_step, 6)):
        x = frame.x(tick)
        parts.append(line((x, frame.bottom), (x, frame.bottom + 5), MUTED))
        parts.append(text((x, frame.bottom + 17), compact(tick), colour=MUTED, anchor="middle"))
    centre = frame.left + frame.width / 2
    parts.append(text((centre, frame.bottom + 40), "steps", colour=MUTED, anchor="middle"))
    return parts


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


def _end_labels(frame: Frame, curves: Sequence[tuple[str, Curve, str]]) -> list[str]:
    """The name and last value of each curve beside its end, moved apart where they would touch."""
    ends = [(name, end[0][1], colour) for name, curve, colour in curves if (end := finite_points(curve)[-1:])]
    heights = apart([frame.y(loss) for _, loss, _ in ends], 16, frame.top + 8, frame.bottom - 8)
    return [
        text((frame.right + 10, y), f"{name} {loss_text(loss)}", colour=colour, bold=True)
        for y, (name, loss, colour) in zip(heights, ends, strict=True)
    ]


def loss_text(loss: float) -> str:
    if abs(loss) < 0.01:
        return f"{loss:.2g}"
    return f"{loss:.3f}" if loss < 1e4 else compact(loss)


def finite_points(curve: Curve) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in curve if math.isfinite(loss)]


def smoothed(curve: Curve) -> list[tuple[int, float]]:
    """Means over a centred window of a fortieth of the points, so that the line does not lag; gaps remain."""
    reach = len(curve) // 80
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


def thinned(curve: Curve) -> list[tuple[int, float]]:
    """At most `SHOWN_POINTS` points: where there are more, each is the mean of a stretch of the curve."""
    stretch = max(1, math.ceil(len(curve) / SHOWN_POINTS))
    thinned: list[tuple[int, float]] = []
    for start in range(0, len(curve), stretch):
        points = curve[start : start + stretch]
        losses = [loss for _, loss in finite_points(points)]
        thinned.append((points[-1][0], sum(losses) / len(losses) if losses else math.nan))
    return thinned


# --- both ---------------------------------------------------------------------------------------------------


def heading(title: str, facts: str, width: float) -> list[str]:
    return [
        text((MARGIN, 28), fit(title, width - 2 * MARGIN, 16), size=16, bold=True),
        text((MARGIN, 50), fit(facts, width - 2 * MARGIN, 12), colour=MUTED),
    ]


def _caption(x: float, content: str, anchor: str = "start") -> str:
    """The head of a column of the structure."""
    return text((x, BOXES_TOP - 14), content, size=11, colour=MUTED, anchor=anchor)


def _rounded(count: int) -> str:
    return compact(float(f"{count:.4g}"))
