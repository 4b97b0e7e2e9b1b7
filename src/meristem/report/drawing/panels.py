"""Panels over one another with a common axis of steps, and lines at the steps where something happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from meristem.report.drawing.colours import BACKGROUND, GUIDE, INK
from meristem.report.drawing.elements import MARGIN, Point, document, line
from meristem.report.drawing.frame import (
    LABEL_WIDTH,
    PLOT_LEFT,
    PLOT_WIDTH,
    Frame,
    LegendEntry,
    bottom_axis,
    caption,
    grid,
    legend,
)
from meristem.report.drawing.scales import CountScale, Scale

TOP, GAP = 100, 44  # of the first panel, and between two
STRONG_DASH = "5 3"

Draw = Callable[[Frame], list[str]]  # draws into a place that is known only when the panels are stacked


def nothing(_: Frame) -> list[str]:
    return []


@dataclass(frozen=True)
class StepLine:
    """A line down a panel where something happened; a strong one for what everybody should notice."""

    step: int
    is_strong: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot over the steps, without its place on the page, so that it can be stacked with others.

    `behind` and `front` draw what lies behind and in front of its `lines`. A panel of rows has no `ticks`. `labels`
    is how many pixels it needs for what stands beside its right end.
    """

    caption: str
    height: float
    scale: Scale
    ticks: int = 0  # of the scale, about
    behind: Draw = nothing
    front: Draw = nothing
    lines: Sequence[StepLine] = ()
    legend: Sequence[LegendEntry] = ()
    labels: float = LABEL_WIDTH


def with_lines(panels: Iterable[Panel], lines: Sequence[StepLine]) -> list[Panel]:
    """The panels, each with these lines besides its own."""
    return [replace(panel, lines=[*panel.lines, *lines]) for panel in panels]


def stacked(panels: Sequence[Panel], last_step: int, title: str, facts: str = "") -> str:
    """A picture of the panels over one another, with one axis of steps below and one legend for all."""
    steps, top = CountScale(0, max(1, last_step)), float(TOP)
    frames: list[Frame] = []
    for panel in panels:
        frames.append(Frame(PLOT_LEFT, top, PLOT_WIDTH, panel.height, steps, panel.scale))
        top = frames[-1].bottom + GAP
    drawn = [part for panel, frame in zip(panels, frames, strict=True) for part in _drawn(panel, frame)]
    bottom = frames[-1].bottom
    width = PLOT_LEFT + PLOT_WIDTH + max(panel.labels for panel in panels)
    entries = {entry.meaning: entry for panel in panels for entry in panel.legend}
    meanings, height = legend(list(entries.values()), PLOT_LEFT, bottom + 58, width - MARGIN)
    parts = [*drawn, *bottom_axis(frames[-1], "steps"), *meanings]
    return document(width, bottom + 58 + height, title, facts, parts)


def _drawn(panel: Panel, frame: Frame) -> list[str]:
    lines = [part for one in panel.lines for part in _step_line(one, frame)]
    ground = grid(frame, panel.ticks) if panel.ticks else []
    return [caption(frame, panel.caption), *ground, *panel.behind(frame), *lines, *panel.front(frame)]


def _step_line(one: StepLine, frame: Frame) -> list[str]:
    x = frame.x(one.step)
    if not one.is_strong:
        return [line((x, frame.top - 4), (x, frame.bottom), GUIDE, dash="2 3")]
    top, bottom = (x, frame.top - 4), (x, frame.bottom + 4)
    return [line(top, bottom, BACKGROUND, 3), line(top, bottom, INK, 1.5, dash=STRONG_DASH)]


def strong_line_key(at: Point) -> list[str]:
    """A strong line in a legend."""
    x, y = at
    return [line((x, y - 8), (x, y + 8), INK, 1.5, dash=STRONG_DASH)]
