"""A plotting area places values, and its labels and legends do not touch."""

from __future__ import annotations

from meristem.report.drawing.elements import circle, document
from meristem.report.drawing.frame import EndLabel, Frame, LegendEntry, apart, end_labels, grid, legend, top_axis
from meristem.report.drawing.scales import CountScale, Scale
from report.helpers import SVG, assert_labels_are_inside_and_apart, number, parsed, texts

FRAME = Frame(50, 20, 200, 100, CountScale(0, 10), Scale(1, 3))


def test_x_runs_to_the_right_and_y_upwards() -> None:
    assert FRAME.place([(0, 1), (5, 2), (10, 3)]) == [(50, 120), (150, 70), (250, 20)]


def test_the_grid_is_where_its_labels_say() -> None:
    root = parsed(document(400, 200, "", "", grid(FRAME, 4)))
    heights = {float(node.text or "") for node in root.iter(f"{SVG}text") if node.text}
    assert sorted(number(node, "y1") for node in root.iter(f"{SVG}line")) == sorted(map(FRAME.y, heights))


def test_a_second_axis_has_its_own_scale() -> None:
    root = parsed(document(400, 200, "", "", top_axis(FRAME, CountScale(0, 4000), "tokens")))
    places = {node.text: number(node, "x") for node in root.iter(f"{SVG}text")}
    assert (places["0"], places["2k"], places["4k"]) == (50, 150, 250)


def test_labels_move_apart_as_little_as_it_takes() -> None:
    assert apart([30, 10], 15, 0, 100) == [30, 10]
    assert apart([20, 20], 10, 0, 100) == [15, 25]
    assert apart([20, 24, 80], 10, 0, 100) == [17, 27, 80]
    assert apart([99, 50, 98], 10, 0, 100) == [100, 50, 90]
    assert apart([0, 1, 2], 10, 0, 100) == [0, 10, 20]
    assert apart([], 10, 0, 100) == []


def test_labels_at_one_end_are_apart() -> None:
    labels = [EndLabel(119, "one"), EndLabel(119, "another"), EndLabel(300, "far below")]
    root = parsed(document(400, 200, "", "", end_labels(FRAME, labels)))
    assert_labels_are_inside_and_apart(root)
    assert {"one", "another", "far below"} <= set(texts(root))


def test_a_legend_takes_as_many_rows_as_it_needs() -> None:
    entries = [LegendEntry(f"the meaning of mark {i}", lambda at: [circle(at, 5, "red", "red")]) for i in range(9)]
    entries.append(LegendEntry("a remark"))
    one, wide = legend(entries, 20, 70, 10_000)
    several, narrow = legend(entries, 20, 70, 600)
    assert (wide, narrow) == (28, 28 + 2 * 18)
    assert legend([], 20, 70, 600) == ([], 0)
    for parts, width, height in ((one, 10_000, wide), (several, 600, narrow)):
        root = parsed(document(width, 70 + height, "", "", parts))
        assert_labels_are_inside_and_apart(root)
        assert len(list(root.iter(f"{SVG}circle"))) == 9
        assert len(texts(root)) == 2 + 10
