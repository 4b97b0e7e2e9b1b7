"""Small pure functions that write SVG: elements, a document with its own background, and axis ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
INK, MUTED, GRID, BACKGROUND = "#1f2328", "#59636e", "#e4e8ec", "#ffffff"

# Okabe and Ito: told apart with any kind of colour vision.
BLUE, GREEN, ORANGE, PURPLE = "#0072b2", "#009e73", "#d55e00", "#aa3377"

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, width, height


def element(tag: str, *children: str, **attributes: object) -> str:
    """One element; `stroke_width=2` becomes `stroke-width="2"` and an attribute that is None is left out."""
    written = "".join(
        f' {name.replace("_", "-")}="{_value(value)}"' for name, value in attributes.items() if value is not None
    )
    return f"<{tag}{written}>{''.join(children)}</{tag}>" if children else f"<{tag}{written}/>"


def line(start: Point, end: Point, colour: str = GRID, width: float = 1, dash: str | None = None) -> str:
    """A straight line."""
    (x1, y1), (x2, y2) = start, end
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=width, stroke_dasharray=dash)


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    stroke: str | None = None,
    stroke_width: float | None = None,
    radius: float | None = None,
) -> str:
    """A rectangle, outlined if a stroke is given."""
    box = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
    return element("rect", **box, fill=fill, stroke=stroke, stroke_width=stroke_width)


def boxes(where: Iterable[Box], fill: str) -> str:
    """Many rectangles of one colour in one element; those that touch show no seam."""
    path = "".join(f"M{_value(x)} {_value(y)}h{_value(w)}v{_value(h)}h{_value(-w)}z" for x, y, w, h in where)
    return element("path", d=path, fill=fill, shape_rendering="crispEdges")


def area(points: Sequence[Point], base: float, fill: str) -> str:
    """What lies between a line through the points and the height `base`."""
    outline = [(points[0][0], base), *points, (points[-1][0], base)]
    return element("path", d="M" + "L".join(f"{_value(x)} {_value(y)}" for x, y in outline) + "z", fill=fill)


def band(edges: Iterable[tuple[float, float, float]], fill: str, opacity: float) -> str:
    """What lies between two lines, given as x, one height and the other; interrupted where one is not finite."""
    path = ""
    for whole, stretch in groupby(edges, key=lambda edge: all(map(math.isfinite, edge))):
        points = list(stretch) if whole else []
        outline = [(x, y) for x, y, _ in points] + [(x, y) for x, _, y in reversed(points)]
        path += "M" + "L".join(f"{_value(x)} {_value(y)}" for x, y in outline) + "z" if outline else ""
    return element("path", d=path, fill=fill, opacity=opacity)


def circle(at: Point, radius: float, fill: str, stroke: str, stroke_width: float = 1) -> str:
    """An outlined disc."""
    return element("circle", cx=at[0], cy=at[1], r=radius, fill=fill, stroke=stroke, stroke_width=stroke_width)


def dot(at: Point, radius: float, fill: str) -> str:
    """A disc with a thin white rim, which keeps it apart from the line it sits on."""
    return circle(at, radius, fill, BACKGROUND)


def triangle(at: Point, size: float, fill: str) -> str:
    """A triangle that points up."""
    x, y = at
    return element(
        "path",
        d=f"M{_value(x - size)} {_value(y + size)}h{_value(2 * size)}L{_value(x)} {_value(y - size)}z",
        fill=fill,
    )


def text(
    at: Point,
    content: str,
    *,
    size: float = 12,
    colour: str = INK,
    anchor: str = "start",
    bold: bool = False,
    turn: float | None = None,
) -> str:
    """A line of text, vertically centred on `at`; `turn` rotates it by that many degrees."""
    x, y = at
    return element(
        "text",
        escape(content),
        x=x,
        y=y + 0.35 * size,  # half the height of a capital: renderers disagree about dominant-baseline
        font_size=size,
        fill=colour,
        text_anchor=None if anchor == "start" else anchor,
        font_weight=600 if bold else None,
        transform=None if turn is None else f"rotate({_value(turn)} {_value(x)} {_value(y)})",
    )


def polyline(
    points: Iterable[Point], colour: str, width: float, opacity: float | None = None, dash: str | None = None
) -> str:
    """A line through the points, interrupted where a coordinate is not finite; a lone point is a speck."""
    commands, pen_down = [], False
    for x, y in points:
        finite = math.isfinite(x) and math.isfinite(y)
        if finite:
            commands.append(f"{'L' if pen_down else 'M'}{_value(x)} {_value(y)}{'' if pen_down else 'h0'}")
        pen_down = finite
    return element(
        "path",
        d="".join(commands),
        fill="none",
        stroke=colour,
        stroke_width=width,
        stroke_linejoin="round",
        stroke_linecap="round",
        stroke_dasharray=dash,
        opacity=opacity,
    )


def window(x: float, y: float, width: float, height: float, *children: str) -> str:
    """Cut the children off at a rectangle; they keep the coordinates of the document."""
    view = " ".join(map(_value, (x, y, width, height)))
    return element("svg", *children, x=x, y=y, width=width, height=height, viewBox=view)


def document(width: float, height: float, name: str, parts: Sequence[str]) -> str:
    """The whole file. The background is part of it, so that the picture reads on a dark page too."""
    body = "\n".join([element("title", escape(name)), rect(0, 0, width, height, BACKGROUND, radius=6), *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_value(width)}" height="{_value(height)}" '
        f'viewBox="0 0 {_value(width)} {_value(height)}" role="img" font-family="{FONT}">\n{body}\n</svg>\n'
    )


def fit(content: str, width: float, size: float) -> str:
    """The text, shortened with an ellipsis where it would run over `width` pixels."""
    room = int(width / (0.58 * size))  # a cautious mean width of a letter
    return content if len(content) <= room else content[: max(room - 1, 0)].rstrip() + "…"


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


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers within `low` and `high`: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(math.log(factor * power / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within `low` and `high`, and their double and fivefold where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
    ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """The ticks, all with the decimals that their spacing needs; large ones in few letters."""
    if ticks and max(map(abs, ticks)) >= 1e4:
        return [compact(tick) for tick in ticks]
    spacing = ticks[1] - ticks[0] if len(ticks) > 1 else 0.01
    decimals = max(0, -math.floor(math.log10(spacing) + 1e-9))
    return [f"{tick:.{decimals}f}" for tick in ticks]


def compact(value: float) -> str:
    """A count in few letters: 950, 1.5k, 20M, 2.88B."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"


def blend(light: str, dark: str, share: float) -> str:
    """The colour between two others, `share` of the way from the first to the second."""
    pairs = [(int(light[i : i + 2], 16), int(dark[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _value(value: object) -> str:
    """Numbers with two decimals at most; everything else escaped."""
    if isinstance(value, int | float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value))
