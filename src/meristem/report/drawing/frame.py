"""A plotting area: its grid, axes and captions, the labels at the ends of its curves, and the legend under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meristem.report.drawing.colours import INK, MUTED, shade
from meristem.report.drawing.elements import Point, boxes, line, text, window
from meristem.report.drawing.scales import Scale

PLOT_LEFT, PLOT_WIDTH, LABEL_WIDTH = 76, 700, 124  # of plots over the steps, and what their labels need on the right
END_GAP, END_COLUMN = 12, 100  # between a plot and the labels at its end, and between two columns of these
LEGEND_ROW = 18


@dataclass(frozen=True)
class Frame:
    """Where a plot lies on the page, and how values map into it: x to the right, y upwards."""

    left: float
    top: float
    width: float
    height: float
    x_scale: Scale
    y_scale: Scale

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.left + self.x_scale.share(value) * self.width

    def y(self, value: float) -> float:
        return self.bottom - self.y_scale.share(value) * self.height

    def place(self, points: Sequence[tuple[float, float]]) -> list[Point]:
        return [(self.x(x), self.y(y)) for x, y in points]

    def end(self, column: int = 0) -> float:
        """Where the labels beside the end of the plot begin."""
        return self.right + END_GAP + column * END_COLUMN

    def clipped(self, *curves: str) -> str:
        """The curves, cut off at the edges; a few pixels of air keep strokes and dots on the edge whole."""
        return window(self.left - 5, self.top - 2, self.width + 10, self.height + 4, *curves)


# --- axes -----------------------------------------------------------------------------------------------------------


def grid(frame: Frame, count: int, size: float = 11) -> list[str]:
    """Lines across the plot at about `count` values of y, which stand on the left."""
    parts = []
    for value, label in frame.y_scale.ticks(count):
        y = frame.y(value)
        parts.append(line((frame.left, y), (frame.right, y)))
        parts.append(text((frame.left - 10, y), label, size=size, colour=MUTED, anchor="end"))
    return parts


def upright_grid(frame: Frame, count: int) -> list[str]:
    """Lines down the plot at about `count` values of x, which stand below."""
    parts = []
    for value, label in frame.x_scale.ticks(count):
        x = frame.x(value)
        parts.append(line((x, frame.top), (x, frame.bottom)))
        parts.append(text((x, frame.bottom + 14), label, size=11, colour=MUTED, anchor="middle"))
    return parts


def bottom_axis(frame: Frame, name: str) -> list[str]:
    """The axis of x under a plot, with its name."""
    parts = [line((frame.left, frame.bottom), (frame.right, frame.bottom), MUTED)]
    for value, label in frame.x_scale.ticks(6):
        x = frame.x(value)
        parts.append(line((x, frame.bottom), (x, frame.bottom + 5), MUTED))
        parts.append(text((x, frame.bottom + 17), label, colour=MUTED, anchor="middle"))
    centre = frame.left + frame.width / 2
    return [*parts, text((centre, frame.bottom + 40), name, colour=MUTED, anchor="middle")]


def top_axis(frame: Frame, scale: Scale, name: str) -> list[str]:
    """A second axis over a plot, with another scale of x."""
    parts = [line((frame.left, frame.top), (frame.right, frame.top), MUTED)]
    for value, label in scale.ticks(6):
        x = frame.left + scale.share(value) * frame.width
        parts.append(line((x, frame.top), (x, frame.top - 5), MUTED))
        parts.append(text((x, frame.top - 15), label, colour=MUTED, anchor="middle"))
    return [*parts, text((frame.right + 34, frame.top - 15), name, colour=MUTED)]


def side_name(frame: Frame, name: str) -> str:
    """The name of the axis of y, written upwards."""
    return text((24, frame.top + frame.height / 2), name, colour=MUTED, anchor="middle", turn=-90)


# --- captions and labels --------------------------------------------------------------------------------------------


def caption(frame: Frame, content: str, x: float | None = None) -> str:
    """The name of a plot over its left end, or of a column that begins at `x`."""
    return text((frame.left if x is None else x, frame.top - 14), content, size=11, colour=MUTED)


def row_caption(frame: Frame, content: str) -> str:
    """What the names on the left of a plot are, over them."""
    return text((frame.left - 10, frame.top - 14), content, size=11, colour=MUTED, anchor="end")


def layer_names(frame: Frame, layers: int) -> list[str]:
    """The number of every layer on the left of a plot whose rows are the layers."""
    size = min(12, frame.height / layers - 2)
    places = [(frame.left - 10, frame.y(layer + 0.5)) for layer in range(layers)]
    names = [text(at, f"{layer}", size=size, colour=MUTED, anchor="end") for layer, at in enumerate(places)]
    return [row_caption(frame, "layer"), *names]


@dataclass(frozen=True)
class EndLabel:
    """What is said about a curve beside its end, at the height of that end."""

    height: float
    content: str
    colour: str = INK
    bold: bool = True


def end_labels(frame: Frame, labels: Sequence[EndLabel], size: float = 12) -> list[str]:
    """Labels beside the ends of curves, moved apart where they would touch."""
    heights = apart([label.height for label in labels], 15, frame.top + 4, frame.bottom - 4)
    return [
        text((frame.end(), y), label.content, size=size, colour=label.colour, bold=label.bold)
        for y, label in zip(heights, labels, strict=True)
    ]


def apart(heights: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """The heights, moved as little as it takes for labels there to be `gap` apart and to stay within bounds."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[float]] = []  # with the gaps taken out: those that would be out of order meet in the middle
    for place, i in enumerate(order):
        groups.append([heights[i] - place * gap])
        while len(groups) > 1 and _middle(groups[-2]) > _middle(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    middles = [_middle(group) for group in groups for _ in group]
    room = bottom - max(0, len(order) - 1) * gap
    moved = {i: max(top, min(middles[place], room)) + place * gap for place, i in enumerate(order)}
    return [moved[i] for i in range(len(heights))]


def _middle(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- legends --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LegendEntry:
    """What a mark means; `mark` draws it around a point, within `width` pixels. Without a mark it is a remark."""

    meaning: str
    mark: Callable[[Point], list[str]] | None = None
    width: float = 16


def legend(entries: Sequence[LegendEntry], left: float, top: float, right: float) -> tuple[list[str], float]:
    """The entries side by side, in as many rows as they need, and how high these are; 0 without any."""
    parts: list[str] = []
    x, y = left, top + 8
    for entry in entries:
        start = 0 if entry.mark is None else entry.width + 6
        width = start + 0.55 * 11 * len(entry.meaning)  # a letter's mean width in a usual font
        if x > left and x + width > right:
            x, y = left, y + LEGEND_ROW
        parts += [] if entry.mark is None else entry.mark((x + entry.width / 2, y))
        parts.append(text((x + start, y), entry.meaning, size=11, colour=MUTED if entry.mark is None else INK))
        x += width + 24
    return parts, y - top + 20 if parts else 0


def shade_bar(frame: Frame, low: float, high: float, shades: int) -> list[str]:
    """Which shade is which value, over the right end of a plot."""
    width, y = 96, frame.top - 14
    left, pitch = frame.right - width - 24, width / shades
    return [
        text((left - 6, y), f"{low:.1f}", size=11, colour=MUTED, anchor="end"),
        *(boxes([(left + i * pitch, y - 5, pitch, 10)], shade(i / (shades - 1))) for i in range(shades)),
        text((left + width + 6, y), f"{high:.1f}", size=11, colour=MUTED),
    ]
