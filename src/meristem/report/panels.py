"""What the pictures of growth share: panels over one another with a common axis of steps."""

from __future__ import annotations

from meristem.report.figures import Frame
from meristem.report.svg import BACKGROUND, INK, MUTED, ORANGE, Point, blend, circle, text

TOP, GAP = 100, 44  # of the first panel, and between two
LIGHT, MIDDLE, DARK = "#eef5fb", "#5b9dcc", "#0b2f57"  # told apart in grey too


def caption(frame: Frame, content: str, left: bool = False, right: bool = False) -> str:
    """The name of a panel, or of the column on its left or right."""
    x = frame.left - 10 if left else frame.right + 12 if right else frame.left
    return text((x, frame.top - 14), content, size=11, colour=MUTED, anchor="end" if left else "start")


def badge(
    at: Point, number: int, radius: float, *, colour: str = ORANGE, fill: str = BACKGROUND, ink: str = INK
) -> list[str]:
    """A number in a ring; a small ring has no room for it."""
    ring = circle(at, radius, fill, colour, min(2.0, 0.3 * radius))
    if radius <= 4:
        return [ring]
    size = 1.35 * radius if number < 10 else 1.1 * radius
    return [ring, text(at, f"{number}", size=size, colour=ink, anchor="middle", bold=True)]


def shade(share: float) -> str:
    """From light at 0 to dark at 1."""
    return blend(LIGHT, MIDDLE, 2 * share) if share < 0.5 else blend(MIDDLE, DARK, 2 * share - 1)
