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
from meristem.report.drawing.scales import CountScale, Scale

TOP, GAP, HEIGHT = 100, 56, 200
ROOM = 8  # times the tolerance, or the rise of the new run, that the scale of the loss shows at most


@dataclass(frozen=True)
class Smaller:
    """A model on the way: heads left, by how much its loss has risen, and what it has of what it had.

    `cache` and `attention` are shares; `speed` is in tokens per second, None where it was not measured.
    """

    heads: int
    rise: float
    cache: float
    attention: float
    speed: float | None


def prune_svg(
    points: Sequence[Smaller], kept: int, title: str, *, tolerance: float | None = None, repaired: float | None = None
) -> str:
    """Loss above, sizes and speed below, over the heads that are left, which become fewer to the right.

    The new model is point number `kept`; `repaired` is the rise of its loss after a repair.
    """
    first, new = points[0], points[kept]
    fewest = min(point.heads for point in points)
    heads = CountScale(first.heads, min(fewest, first.heads - 1))
    rises = [point.rise for point in points if math.isfinite(point.rise)] + [repaired or 0.0]
    most = ROOM * max(tolerance or 0.0, new.rise, repaired or 0.0)
    top = min(max(rises), most) if most > 0 else max(rises)
    low, high = min(0.0, *rises), max(top, tolerance or 0.0, 1e-4)
    upper = Frame(PLOT_LEFT, TOP, PLOT_WIDTH, HEIGHT, heads, Scale(low - 0.05 * (high - low), high * 1.05))
    speeds = [(point.heads, point.speed / first.speed) for point in points if point.speed and first.speed]
    shares: list[tuple[str, str, list[tuple[int, float]]]] = [
        ("attention parameters", BLUE, [(point.heads, point.attention) for point in points]),
        ("KV cache", ORANGE, [(point.heads, point.cache) for point in points if first.cache]),
        ("tokens/s", GREEN, speeds),
    ]
    values = [value for _, _, curve in shares for _, value in curve]
    lower = Frame(
        PLOT_LEFT, upper.bottom + GAP, PLOT_WIDTH, HEIGHT, heads, Scale(0.95 * min(values), 1.05 * max(values))
    )
    parts = [
        caption(upper, "loss on rows set aside, above that of the whole model (nats)"), *grid(upper, 5),
        caption(lower, "of what the whole model has"), *grid(lower, 5),
    ]  # fmt: skip
    for frame in (upper, lower):
        x = frame.x(new.heads)
        parts.append(line((x, frame.top - 4), (x, frame.bottom), MUTED, dash="4 3"))
    parts.append(text((upper.x(new.heads), upper.top - 12), f"{new.heads} heads", colour=MUTED, anchor="middle"))
    if tolerance is not None:
        y = upper.y(tolerance)
        parts.append(line((upper.left, y), (upper.right, y), PURPLE, dash="5 3"))
    losses = [polyline(upper.place([(point.heads, point.rise) for point in points]), BLUE, 2)]
    losses += [dot(at, 2.5, BLUE) for at in upper.place([(p.heads, p.rise) for p in points if math.isfinite(p.rise)])]
    if repaired is not None:
        losses += [dot(at, 5, ORANGE) for at in upper.place([(new.heads, repaired)])]
    parts.append(upper.clipped(*losses))
    for _, colour, curve in shares:
        parts.append(
            lower.clipped(polyline(lower.place(curve), colour, 2), *(dot(at, 2, colour) for at in lower.place(curve)))
        )
    ends = [
        EndLabel(lower.y(curve[-1][1]), f"{name} {curve[-1][1]:.0%}", colour) for name, colour, curve in shares if curve
    ]
    labels = [EndLabel(upper.y(new.rise), f"new run {new.rise:+.4f}", BLUE)]
    labels += [] if tolerance is None else [EndLabel(upper.y(tolerance), f"tolerance {tolerance:g}", PURPLE)]
    labels += [] if repaired is None else [EndLabel(upper.y(repaired), f"repaired {repaired:+.4f}", ORANGE)]
    parts += [*end_labels(upper, labels), *end_labels(lower, ends), *bottom_axis(lower, "heads left")]
    facts = f"{first.heads} heads became {new.heads}: loss {new.rise:+.4f}"
    facts += "" if repaired is None else f", after its repair {repaired:+.4f}"
    return document(PLOT_LEFT + PLOT_WIDTH + LABEL_WIDTH + 60, lower.bottom + 64, f"{title}, pruned", facts, parts)
