"""The picture of a run's losses."""

from __future__ import annotations

from meristem.report.curves import Curve, finite_points, loss_range, smoothed, thinned
from meristem.report.drawing.colours import BLUE, GREEN, MUTED, ORANGE
from meristem.report.drawing.elements import document, dot, polyline, text, triangle
from meristem.report.drawing.frame import (
    LABEL_WIDTH,
    PLOT_LEFT,
    PLOT_WIDTH,
    EndLabel,
    Frame,
    bottom_axis,
    end_labels,
    grid,
    side_name,
    top_axis,
)
from meristem.report.drawing.numbers import loss_text, rounded
from meristem.report.drawing.scales import CountScale, Scale
from meristem.wording import counted

HEIGHT = 300


def loss_svg(
    train: Curve, held_out: Curve, title: str = "", tokens_per_step: int | None = None, *, unit: str = "token",
    average: Curve = (),
) -> str:  # fmt: skip
    """Training loss, raw and smoothed, and held-out loss over the steps, also that of an `average` of the weights.

    Values that are not finite are gaps.

    The losses of the first steps would flatten everything after them, so the scale follows the later ones and
    the subtitle says how high the curve went. `tokens_per_step` adds a second axis in tokens; `unit` is what the
    losses are means over.
    """
    title, top = title or "Loss", 108 if tokens_per_step else 80
    width, height = PLOT_LEFT + PLOT_WIDTH + LABEL_WIDTH, top + HEIGHT + 60
    measured = [("held-out", held_out, ORANGE), ("average", average, GREEN)]
    points = finite_points([*train, *held_out, *average])
    if not points:
        empty = text((width / 2, top + HEIGHT / 2), "no losses yet", size=14, colour=MUTED, anchor="middle")
        return document(width, height, title, "", [empty])

    last_step = max(step for step, _ in [*train, *held_out, *average])
    shown = thinned(train)
    smooth = smoothed(shown)
    steps, losses = CountScale(0, max(last_step, 1)), Scale(*loss_range(shown, [*smooth, *held_out, *average]))
    frame = Frame(PLOT_LEFT, top, PLOT_WIDTH, HEIGHT, steps, losses)

    curves = [
        polyline(frame.place(shown), BLUE, 1, opacity=0.3),
        polyline(frame.place(smooth), BLUE, 2),
        *(polyline(frame.place(curve), colour, 2) for _, curve, colour in measured if curve),
    ]
    curves += [dot(at, 3.5, BLUE) for at in frame.place(finite_points(smooth)[-1:])]
    for _, curve, colour in measured:
        curves += [dot(at, 3.5 if len(curve) <= 50 else 2, colour) for at in frame.place(finite_points(curve))]
    facts = counted(last_step, "step")
    axes = [*grid(frame, 5, size=12), side_name(frame, f"loss (nats per {unit})"), *bottom_axis(frame, "steps")]
    if tokens_per_step:
        facts += f", {rounded(last_step * tokens_per_step)} tokens"
        axes += top_axis(frame, CountScale(0, steps.high * tokens_per_step), "tokens")
    step, loss = max(points, key=lambda point: point[1])
    if loss > losses.high:
        curves.append(triangle((frame.x(step), top + 8), 5, MUTED))
        facts += f"; off the scale at the triangle: {loss:.2f} at step {step:,}"
    ends = [end for curve in [("training", smooth, BLUE), *measured] for end in _end(frame, *curve)]
    return document(width, height, title, facts, [*axes, frame.clipped(*curves), *end_labels(frame, ends)])


def _end(frame: Frame, name: str, curve: Curve, colour: str) -> list[EndLabel]:
    """The name and last value of a curve, if it has any."""
    return [EndLabel(frame.y(loss), f"{name} {loss_text(loss)}", colour) for _, loss in finite_points(curve)[-1:]]
