"""Small pure functions that write SVG: lines, shapes, marks, text, and the document around them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from meristem.report.drawing.colours import BACKGROUND, GRID, INK, MUTED, ORANGE

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MARGIN = 24

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


def badge(
    at: Point, number: int, radius: float, *, colour: str = ORANGE, fill: str = BACKGROUND, ink: str = INK
) -> list[str]:
    """A number in a ring; a small ring has no room for it."""
    ring = circle(at, radius, fill, colour, min(2.0, 0.3 * radius))
    if radius <= 4:
        return [ring]
    size = 1.35 * radius if number < 10 else 1.1 * radius
    return [ring, text(at, f"{number}", size=size, colour=ink, anchor="middle", bold=True)]


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


def document(width: float, height: float, title: str, facts: str, parts: Sequence[str]) -> str:
    """The whole file with its heading. The background is part of it, so that the picture reads on a dark page too."""
    room = width - 2 * MARGIN
    heading = [
        text((MARGIN, 28), fit(title, room, 16), size=16, bold=True),
        text((MARGIN, 50), fit(facts, room, 12), colour=MUTED),
    ]
    ground = rect(0, 0, width, height, BACKGROUND, radius=6)
    body = "\n".join([element("title", escape(title)), ground, *heading, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_value(width)}" height="{_value(height)}" '
        f'viewBox="0 0 {_value(width)} {_value(height)}" role="img" font-family="{FONT}">\n{body}\n</svg>\n'
    )


def fit(content: str, width: float, size: float) -> str:
    """The text, shortened with an ellipsis where it would run over `width` pixels."""
    room = int(width / (0.58 * size))  # a cautious mean width of a letter
    return content if len(content) <= room else content[: max(room - 1, 0)].rstrip() + "…"


def _value(value: object) -> str:
    """Numbers with two decimals at most; everything else escaped."""
    if isinstance(value, int | float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value))
