"""The picture of a plan: the heads of every layer, what is run again, and how far each layer looks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from meristem.errors import InputError
from meristem.plan import LayerPlan, Plan
from meristem.report.drawing.colours import BACKGROUND, GREEN, INK, MUTED, ORANGE, PURPLE, blend
from meristem.report.drawing.elements import MARGIN, Box, Point, document, dot, line, polyline, rect, text
from meristem.report.drawing.frame import Frame, LegendEntry, caption, layer_names, legend, upright_grid
from meristem.report.drawing.numbers import rounded
from meristem.report.drawing.scales import Scale
from meristem.wording import counted

TIMES = "\u00d7"

BOXES_LEFT, BOXES_TOP, BOXES_WIDTH = 72, 94, 400
NARROW, WIDE = "#d3e5f4", "#12497b"
NARROW_DIM, WIDE_DIM = 16, 256  # a fixed range of shades, so that pictures of different plans compare
DISTANCE_WIDTH = 240
HEADS, KEYS, LOOPS = f"heads {TIMES} dim", "kv heads", "run again"  # names of columns
NAMED_HEADS = 3  # in a label; more are counted


def structure_svg(plan: Plan, distances: Sequence[float] | None = None, title: str = "") -> str:
    """The heads of every layer as boxes, layer 0 on top; widths and shades of the boxes follow the head dim.

    `distances` are the mean attention distances of the layers in tokens; with them a panel on the right shows
    how far each layer looks, against the distance of attention spread evenly over the past.
    """
    count = len(plan.layers)
    if distances is not None and len(distances) != count:
        raise InputError("distances", len(distances), f"must hold one value per layer: {count}")
    height = count * max(13.0, min(36.0, 540 / count))
    widths = Scale(0, max(plan.width, *(layer.query_width for layer in plan.layers)))
    frame = Frame(BOXES_LEFT, BOXES_TOP, BOXES_WIDTH, height, widths, Scale(count, 0))

    parts = [caption(frame, "heads, as wide as their dim"), *layer_names(frame, count)]
    for index, layer in enumerate(plan.layers):
        parts += _heads(layer, index, frame)
    parts += _width_ruler(plan.width, frame)

    columns, right = _columns(plan, frame)
    parts += [caption(frame, name, x) for name, x in columns.items()]
    first = 0
    for layer, run in groupby(plan.layers):
        end = first + len(list(run))
        parts += _run_label(layer, columns, frame, first, end)
        first = end

    if distances is not None:
        parts += _distances(plan, distances, replace(frame, left=right, width=DISTANCE_WIDTH))
        right += DISTANCE_WIDTH
    width, below = right + MARGIN, frame.bottom + 48
    meanings, legend_height = legend(_legend_entries(plan), BOXES_LEFT, below, right)
    facts = f"{counted(count, 'layer')}, width {plan.width}, {rounded(plan.parameters)} parameters"
    return document(width, below + legend_height, title or "Structure", facts, [*parts, *meanings])


def _heads(layer: LayerPlan, index: int, frame: Frame) -> list[str]:
    """The boxes of one layer, over a bar for each key/value head that several of them share."""
    grouped = layer.kv_heads < layer.heads
    row = frame.y(index + 1) - frame.y(index)
    bar = max(2.0, 0.12 * row) if grouped else 0.0
    step = frame.x(layer.head_dim) - frame.left
    gap = min(2.0, 0.2 * step)
    top, height = frame.y(index) + 0.1 * row, 0.8 * row - (bar + 1.5 if grouped else 0)
    share = math.log(layer.head_dim / NARROW_DIM) / math.log(WIDE_DIM / NARROW_DIM)
    fill = blend(NARROW, WIDE, min(1.0, max(0.0, share)))
    radius = min(2.0, 0.2 * step)
    parts = [rect(frame.left + i * step, top, step - gap, height, fill, radius=radius) for i in range(layer.heads)]
    if grouped:
        group = step * layer.heads / layer.kv_heads
        parts += [
            rect(frame.left + i * group, top + height + 1.5, group - gap, bar, GREEN) for i in range(layer.kv_heads)
        ]
    return parts + _again(layer, (frame.left, top, step, height), gap, INK if share < 0.6 else BACKGROUND)


def _again(layer: LayerPlan, first_box: Box, gap: float, ink: str) -> list[str]:
    """Outlines of what is run again, head by head or the whole block, with the number of times where there is room.

    `first_box` is that of the layer's first head with the gap behind it.
    """
    if layer.loop is None and not layer.repeats:
        return []
    left, top, step, height = first_box
    # The outline lies inside its box and leaves it a core, however narrow the box is.
    edge = min(2.5, 0.25 * (step - gap), 0.2 * height)
    heads, times = (range(layer.heads), layer.repeats) if layer.loop is None else (layer.loop.heads, layer.loop.passes)
    spans = [(0, layer.heads)] if layer.loop is None else [(head, 1) for head in heads]
    parts = [
        rect(
            left + first * step + edge / 2, top + edge / 2, count * step - gap - edge, height - edge, "none",
            stroke=ORANGE, stroke_width=edge,
        )
        for first, count in spans
    ]  # fmt: skip
    label = f"{TIMES}{times}"
    size = min(12.0, 0.65 * height, (step - gap - 2 * edge) / (0.6 * len(label)))
    if size > 6:
        middles = [(left + (head + 0.5) * step - gap / 2, top + height / 2) for head in heads]
        parts += [text(middle, label, size=size, colour=ink, anchor="middle", bold=True) for middle in middles]
    return parts


def _width_ruler(width: int, frame: Frame) -> list[str]:
    """A measure under the boxes, which shows where heads times dim is not the width."""
    y, end = frame.bottom + 16, frame.x(width)
    label = f"width {width}"
    middle, half = (frame.left + end) / 2, 3.6 * len(label)
    return [
        line((frame.left, y), (end, y), MUTED),
        *(line((x, y - 4), (x, y + 4), MUTED) for x in (frame.left, end)),
        rect(middle - half, y - 6, 2 * half, 12, BACKGROUND),
        text((middle, y), label, size=11, colour=MUTED, anchor="middle"),
    ]


def _columns(plan: Plan, frame: Frame) -> tuple[dict[str, float], float]:
    """Where the columns of numbers begin, only those that say something, and where they end."""
    widths = {HEADS: 82}
    if plan.kv_heads != plan.heads:
        widths[KEYS] = 62
    if any(layer.loop or layer.repeats for layer in plan.layers):
        widths[LOOPS] = 106
    x = frame.right + 28
    columns: dict[str, float] = {}
    for name, width in widths.items():
        columns[name], x = x, x + width
    return columns, x + 14


def _run_label(layer: LayerPlan, columns: Mapping[str, float], frame: Frame, first: int, end: int) -> list[str]:
    """The numbers of a run of equal layers, from `first` to before `end`, once, behind a bracket along the run."""
    cells = {HEADS: f"{layer.heads} {TIMES} {layer.head_dim}", KEYS: f"{layer.kv_heads}"}
    if layer.loop is not None or layer.repeats:
        cells[LOOPS] = looped(layer)
    x, y, size = frame.right + 16, frame.y((first + end) / 2), min(12.0, frame.y(1) - frame.y(0) - 3)
    return [
        line((x, frame.y(first) + 2), (x, frame.y(end) - 2), MUTED, 1.5),
        *(
            text((at, y), cells[name], size=size, colour=ORANGE if name == LOOPS else INK)
            for name, at in columns.items()
            if name in cells
        ),
    ]


def looped(layer: LayerPlan) -> str:
    """What a layer runs again and how often; many heads are counted instead of named."""
    if layer.loop is not None and len(layer.loop.heads) > NAMED_HEADS:
        return f"{counted(len(layer.loop.heads), 'head')} {TIMES}{layer.loop.passes}"
    return layer.run_again.replace(" x", f" {TIMES}")


def even_distance(context: int) -> float:
    """Mean distance of attention spread evenly over the past, for queries in the second half of the context."""
    queries = range(context // 2, context)
    return sum(queries) / (2 * len(queries))


def _distances(plan: Plan, distances: Sequence[float], rows: Frame) -> list[str]:
    """Attention distances beside the rows of their layers, with a token axis below."""
    even = even_distance(plan.context)
    high = 1.08 * max([1.0, even, *(value for value in distances if math.isfinite(value))])
    frame = replace(rows, x_scale=Scale(0, high))
    note = f"dashed: even attention, {even:g}"
    points = frame.place([(value, layer + 0.5) for layer, value in enumerate(distances)])
    radius = min(4.5, 0.28 * frame.height / len(distances))
    return [
        caption(frame, "mean attention distance (tokens)"),
        *upright_grid(frame, 4),
        line((frame.x(even), frame.top), (frame.x(even), frame.bottom), MUTED, dash="4 3"),
        text((frame.right + 10, frame.bottom + 30), note, size=11, colour=MUTED, anchor="end"),
        polyline(points, PURPLE, 1.5, opacity=0.5),
        *(dot(point, radius, PURPLE) for point in points if math.isfinite(point[0])),
    ]


def _legend_entries(plan: Plan) -> list[LegendEntry]:
    """What the bars and outlines mean, where there are any."""
    entries = []
    if plan.kv_heads != plan.heads:
        entries.append(LegendEntry("key/value head, shared by the heads above it", _bar_key, width=22))
    if any(layer.loop or layer.repeats for layer in plan.layers):
        entries.append(LegendEntry(f"run again, {TIMES}n: in n extra passes", _outline_key))
    return entries


def _bar_key(at: Point) -> list[str]:
    return [rect(at[0] - 11, at[1] - 2, 22, 4, GREEN)]


def _outline_key(at: Point) -> list[str]:
    return [rect(at[0] - 7, at[1] - 5, 14, 10, "none", stroke=ORANGE, stroke_width=2)]
