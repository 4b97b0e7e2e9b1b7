"""Panels are stacked over one axis of steps, with lines and one legend for all, whatever figure they come from."""

from __future__ import annotations

import pytest

from meristem.growth import Sgt
from meristem.report.drawing.colours import GUIDE, INK, ORANGE
from meristem.report.drawing.elements import Point, circle, dot
from meristem.report.drawing.frame import Frame, LegendEntry
from meristem.report.drawing.panels import GAP, TOP, Panel, StepLine, stacked, with_lines
from meristem.report.drawing.scales import Scale
from meristem.report.heads_figure import head_panels
from meristem.report.loops_figure import loop_panels
from report.helpers import SVG, Element, assert_labels_are_inside_and_apart, number, parsed, texts
from report.test_heads_figure import many_layers
from report.test_loops_figure import simulated, uniform

LEFT, WIDTH = 76, 700  # of the plots


def lines(root: Element, colour: str) -> list[tuple[float, float, float]]:
    """Place, top and bottom of the upright dashed lines of a colour."""
    found = [n for n in root.iter(f"{SVG}line") if n.get("stroke") == colour and n.get("stroke-dasharray")]
    return [(number(n, "x1"), number(n, "y1"), number(n, "y2")) for n in found]


def mark(at: Point) -> list[str]:
    return [circle(at, 4, ORANGE, INK)]


def dots(*places: tuple[float, float]) -> Panel:
    """A panel with dots at places given as step and value."""

    def draw(frame: Frame) -> list[str]:
        return [dot(at, 3, ORANGE) for at in frame.place(places)]

    legend = [LegendEntry("a dot", mark)]
    return Panel("dots", 50, Scale(0, 4), ticks=2, front=draw, legend=legend)


def test_panels_share_their_steps_and_have_scales_of_their_own() -> None:
    root = parsed(stacked([dots((0, 0), (200, 4)), dots((100, 2))], 200, "Two panels", "200 steps"))
    places = [(number(n, "cx"), number(n, "cy")) for n in root.iter(f"{SVG}circle") if number(n, "r") == 3]
    second = TOP + 50 + GAP
    assert places == [(LEFT, TOP + 50), (LEFT + WIDTH, TOP), (LEFT + WIDTH / 2, second + 25)]
    assert texts(root)[:2] == ["Two panels", "200 steps"]
    assert texts(root).count("steps") == 1  # one axis
    assert texts(root).count("a dot") == 1  # one legend
    assert_labels_are_inside_and_apart(root)


def test_lines_run_down_their_panels() -> None:
    faint, strong = StepLine(50), StepLine(150, is_strong=True)
    first, second = with_lines([dots((0, 0))], [faint]), with_lines(with_lines([dots((0, 0))], [faint]), [strong])
    root = parsed(stacked([*first, *second], 200, "Lines"))
    below = TOP + 50 + GAP
    quarter = LEFT + WIDTH / 4
    assert lines(root, GUIDE) == [(quarter, TOP - 4, TOP + 50), (quarter, below - 4, below + 50)]
    assert lines(root, INK) == [(LEFT + 0.75 * WIDTH, below - 4, below + 54)]


def test_lines_lie_between_what_is_behind_and_what_is_in_front() -> None:
    panel = Panel(
        "order", 50, Scale(0, 1), behind=lambda frame: [circle((frame.left, 1), 1, "red", "red")],
        front=lambda frame: [circle((frame.left, 2), 2, "red", "red")], lines=[StepLine(5)],
    )  # fmt: skip
    drawn = stacked([panel], 10, "Order")
    assert drawn.index('r="1"') < drawn.index(GUIDE) < drawn.index('r="2"')


@pytest.mark.parametrize("layers", [2, 6, 12])
def test_loops_and_heads_stack_in_one_picture(layers: int) -> None:
    """As a run in which both grow will show them, with what happened to either marked in all panels."""
    heads = many_layers(layers, 1000)
    loops = simulated(uniform(layers), Sgt(total_steps=1000, passes=2, start=50, window=50), 20)
    assert loops.fixed is not None
    panels = [*head_panels(heads), *loop_panels(loops)]
    marked = with_lines(panels, [StepLine(777)])
    root = parsed(stacked(marked, 1000, "Together", "1,000 steps"))
    assert_labels_are_inside_and_apart(root)
    assert [x for x, _, _ in lines(root, GUIDE)].count(LEFT + 0.777 * WIDTH) == len(panels)
    ended = LEFT + loops.fixed / 1000 * WIDTH
    in_legend = 1
    assert [x for x, _, _ in lines(root, INK)].count(ended) == len(loop_panels(loops))
    assert len(lines(root, INK)) == len(loop_panels(loops)) + in_legend
    assert {"a head is born", "birth of a layer's extra pass", "growth has ended"} <= set(texts(root))
    assert texts(root).count("steps") == 1
