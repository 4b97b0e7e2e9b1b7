"""The picture of a model that becomes smaller: its loss, its sizes and its speed against the heads that are left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meristem.report.drawing.colours import BLUE, GREEN, MUTED, ORANGE, PURPLE
from meristem.report.drawing.elements import document, dot, line, polyline, text
from meristem.report.drawing.frame import (
    LABEL_WIDTH,
    PLOT_LEFT,
    PLOT_WIDTH,
    EndLabel,
    Frame,
    bottom_axis,
    caption,
    end_labels,
    grid,
)
from meristem.report.drawing.numbers import compact
from meristem.report.drawing.scales import CountScale, Scale

TOP, GAP, HEIGHT = 100, 44, 170
ROOM = 8  # times the tolerance, or the rise of the new run, that the scale of the loss shows at most


@dataclass(frozen=True)
class Smaller:
    """A model on the way: heads left, by how much its loss has risen, and what it has of what it had.

    `cache` and `attention` are shares, `cache` 0 of a model that keeps none; `speed` is in tokens per second, None
    where it was not measured.
    """

    heads: int
    rise: float
    cache: float
    attention: float
    speed: float | None


def prune_svg(
    points: Sequence[Smaller], kept: int, title: str, *, tolerance: float | None = None, repaired: float | None = None
) -> str:
    """Loss, sizes and speed over the heads that are left, which become fewer to the right.

    The new model is point number `kept`; `repaired` is the rise of its loss after a repair.
    """
    first, new = points[0], points[kept]
    heads = CountScale(first.heads, min(first.heads - 1, *(point.heads for point in points)))
    losses = _loss_panel(points, new, heads, tolerance, repaired)
    panels = [losses, _share_panel(points)]
    speeds = [(point.heads, point.speed) for point in points if point.speed is not None]
    if speeds:
        panels.append(_speed_panel(speeds))
    parts: list[str] = []
    for number, (name, scale, curves, labels) in enumerate(panels):
        frame = Frame(PLOT_LEFT, TOP + number * (HEIGHT + GAP), PLOT_WIDTH, HEIGHT, heads, scale)
        x = frame.x(new.heads)
        parts += [caption(frame, name), *grid(frame, 5), line((x, frame.top - 4), (x, frame.bottom), MUTED, dash="4 3")]
        for colour, curve, size in curves:
            known = [(at, value) for at, value in curve if math.isfinite(value)]
            marks = [dot(at, size, colour) for at in frame.place(known)] if size else []
            dash = None if size else "5 3"
            parts.append(frame.clipped(polyline(frame.place(curve), colour, 2, dash=dash), *marks))
        parts += end_labels(frame, [EndLabel(frame.y(value), said, colour) for value, said, colour in labels])
        if not number:
            parts.append(text((x, frame.top - 12), f"{new.heads} heads", colour=MUTED, anchor="middle"))
    facts = f"{first.heads} heads became {new.heads}: loss {new.rise:+.4f}"
    facts += "" if repaired is None else f", after its repair {repaired:+.4f}"
    parts += bottom_axis(frame, "heads left")
    return document(PLOT_LEFT + PLOT_WIDTH + LABEL_WIDTH + 20, frame.bottom + 60, f"{title}, pruned", facts, parts)


Drawn = tuple[str, Sequence[tuple[int, float]], float]  # colour, points, and the size of their dots; 0 is a mere line
Label = tuple[float, str, str]  # at a height, what is said in which colour
Plot = tuple[str, Scale, list[Drawn], list[Label]]


def _loss_panel(
    points: Sequence[Smaller], new: Smaller, heads: Scale, tolerance: float | None, repaired: float | None
) -> Plot:
    rises = [point.rise for point in points if math.isfinite(point.rise)] + [repaired or 0.0]
    most = ROOM * max(tolerance or 0.0, new.rise, repaired or 0.0)
    high = max(min(max(rises), most) if most > 0 else max(rises), tolerance or 0.0, 1e-4)
    low = min(0.0, *rises)
    scale = Scale(low - 0.05 * (high - low), high + 0.05 * (high - low))
    curves: list[Drawn] = [(BLUE, [(point.heads, point.rise) for point in points], 2.5)]
    labels: list[Label] = [(new.rise, f"pruned {new.rise:+.4f}", BLUE)]
    if tolerance is not None:
        curves.insert(0, (PURPLE, [(round(heads.low), tolerance), (round(heads.high), tolerance)], 0))
        labels.append((tolerance, f"tolerance {tolerance:g}", PURPLE))
    if repaired is not None:
        curves.append((ORANGE, [(new.heads, repaired)], 5))
        labels.append((repaired, f"repaired {repaired:+.4f}", ORANGE))
    return "loss on rows set aside, above that of the whole model (nats)", scale, curves, labels


def _share_panel(points: Sequence[Smaller]) -> Plot:
    curves: list[Drawn] = [(BLUE, [(point.heads, point.attention) for point in points], 2.5)]
    labels: list[Label] = [(points[-1].attention, f"attention {points[-1].attention:.0%}", BLUE)]
    name = "parameters of attention, of what the whole model has"
    if points[0].cache:
        curves.append((ORANGE, [(point.heads, point.cache) for point in points], 1.5))
        labels.append((points[-1].cache, f"KV cache {points[-1].cache:.0%}", ORANGE))
        name = "parameters of attention, and bytes of the KV cache, of what the whole model has"
    low = min(value for _, curve, _ in curves for _, value in curve)
    return name, Scale(min(0.95, low - 0.03), 1.02), curves, labels


def _speed_panel(speeds: Sequence[tuple[int, float]]) -> Plot:
    most = max(speed for _, speed in speeds)
    labels: list[Label] = [(speeds[-1][1], f"{compact(round(speeds[-1][1]))} tokens/s", GREEN)]
    return "tokens per second, writing one text", Scale(0, 1.1 * most), [(GREEN, speeds, 2.5)], labels
