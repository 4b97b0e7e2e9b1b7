"""The picture of a plan shows its heads to scale, what is run again and distances; labels stay inside and apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meristem.errors import InputError
from meristem.growth import RepeatBlock
from meristem.plan import LayerPlan, Loop, Plan
from meristem.report.drawing.colours import GREEN, ORANGE, PURPLE
from meristem.report.structure_figure import TIMES, looped, structure_svg
from report.helpers import SVG, Element, assert_labels_are_inside_and_apart, number, parsed, texts

DISTANCES = [160.0, 119, 123, 107, 126, 147, 178, 159, 147, 200, 164, 109]


def boxes_of(root: Element, row: int) -> list[Element]:
    """The boxes of the heads of a layer, found by the height of its label."""
    label = next(node for node in root.iter(f"{SVG}text") if node.text == f"{row}" and node.get("text-anchor"))
    middle = number(label, "y") - 0.35 * number(label, "font-size")
    return [
        node
        for node in root.iter(f"{SVG}rect")
        if node.get("fill") not in {"#ffffff", GREEN, "none"}
        and number(node, "y") < middle < number(node, "y") + number(node, "height")
    ]


def mixed_plan() -> Plan:
    layers = (
        LayerPlan(2, 256, 2),
        LayerPlan(4, 128, 2, Loop((0, 3), 2)),
        LayerPlan(7, 64, 7, Loop((2,), 1)),
        LayerPlan(12, 64, 4),
        LayerPlan(5, 32, 5),
    )
    return Plan(512, 50304, 1024, 1376, layers)


@pytest.mark.parametrize(("layers", "width", "heads"), [(4, 256, 4), (6, 192, 6), (12, 768, 12), (24, 1024, 16)])
@pytest.mark.parametrize("measured", [False, True])
def test_structure_labels(layers: int, width: int, heads: int, measured: bool) -> None:
    plan = Plan.prism(layers=layers, width=width, heads=heads)
    distances = [200 + 150 * math.sin(i) for i in range(layers)] if measured else None
    assert_labels_are_inside_and_apart(parsed(structure_svg(plan, distances, "Prism")))


@pytest.mark.parametrize("distance", [0.0, 100.0, 1000.0])
def test_structure_labels_when_every_layer_differs(distance: float) -> None:
    """48 layers, grouped, every other one looped, so that every row has labels of its own."""
    plan = Plan.uniform(layers=48, width=2048, heads=32, kv_group=8)
    for i in range(0, 48, 2):
        plan = plan.with_layer(i, replace(plan.layers[i], loop=Loop((0, 3), 2)))
    root = parsed(structure_svg(plan, [distance] * 48, "a long title " * 30))
    assert texts(root).count(f"32 {TIMES} 64") == 48
    assert texts(root).count(f"h0,h3 {TIMES}2") == 24
    assert_labels_are_inside_and_apart(root)
    assert all(number(node, "cx") < number(root, "width") for node in root.iter(f"{SVG}circle"))


def test_boxes_are_as_many_and_as_wide_as_the_heads() -> None:
    plan = Plan.prism(layers=12, width=768, heads=12)
    root = parsed(structure_svg(plan, DISTANCES))
    widths = {}
    for index, layer in enumerate(plan.layers):
        boxes = boxes_of(root, index)
        assert len(boxes) == layer.heads
        pitch = number(boxes[1], "x") - number(boxes[0], "x")
        widths[layer.head_dim] = pitch
        assert pitch * layer.heads == pytest.approx(400, abs=0.1)
        assert len({node.get("fill") for node in boxes}) == 1
    assert widths[256] / widths[64] == pytest.approx(4, rel=1e-2)
    shades = {boxes_of(root, i)[0].get("fill") for i in range(12)}
    assert len(shades) == 4
    assert [t for t in texts(root) if TIMES in t][1:] == [
        f"3 {TIMES} 256",
        f"6 {TIMES} 128",
        f"8 {TIMES} 96",
        f"12 {TIMES} 64",
    ]


def test_rows_may_be_narrower_or_wider_than_the_model() -> None:
    plan = mixed_plan()
    root = parsed(structure_svg(plan))
    spans = []
    for index, layer in enumerate(plan.layers):
        boxes = boxes_of(root, index)
        assert len(boxes) == layer.heads
        spans.append(layer.heads * (number(boxes[1], "x") - number(boxes[0], "x")))
    expected = [400 * layer.query_width / 768 for layer in plan.layers]
    assert spans == pytest.approx(expected, abs=0.3)
    assert "width 512" in texts(root)


def test_groups_and_loops_are_marked() -> None:
    root = parsed(structure_svg(mixed_plan(), [100, 200, math.nan, 150, 80], '<&> "quoted"'))
    rects = list(root.iter(f"{SVG}rect"))
    legend = 1
    assert sum(node.get("fill") == GREEN for node in rects) == 2 + 4 + legend
    assert sum(node.get("stroke") == ORANGE for node in rects) == 2 + 1 + legend
    assert {"kv heads", "run again", f"h0,h3 {TIMES}2", f"h2 {TIMES}1", '<&> "quoted"'} <= set(texts(root))
    assert texts(root).count(f"{TIMES}2") == 2  # in the boxes of the looped heads
    assert texts(root).count(f"{TIMES}1") == 1
    assert sum(node.get("fill") == PURPLE for node in root.iter(f"{SVG}circle")) == 4
    assert_labels_are_inside_and_apart(root)


def test_blocks_that_are_run_again_are_marked() -> None:
    plan = RepeatBlock(2, 3).apply(Plan.uniform(layers=4, width=192, heads=6))
    root = parsed(structure_svg(plan))
    outlines = [node for node in root.iter(f"{SVG}rect") if node.get("stroke") == ORANGE]
    assert sorted(number(node, "width") > 390 for node in outlines) == [False, True]  # the legend's, and the row's
    assert f"block {TIMES}3" in texts(root)
    assert texts(root).count(f"{TIMES}3") == 6
    assert_labels_are_inside_and_apart(root)


def test_many_looped_heads_are_counted() -> None:
    layer = LayerPlan(12, 64, 12, Loop(tuple(range(12)), 1))
    assert looped(layer) == f"12 heads {TIMES}1"
    assert looped(LayerPlan(12, 64, 12)) == ""


def test_plain_plans_have_no_columns_for_groups_and_loops() -> None:
    found = texts(parsed(structure_svg(Plan.prism(layers=6, width=192, heads=6))))
    assert not any("kv" in content or "again" in content for content in found)


def test_even_attention_is_the_value_of_oracle_18() -> None:
    svg = structure_svg(Plan.prism(layers=12, width=768, heads=12, context=1024), DISTANCES)
    assert "dashed: even attention, 383.75" in texts(parsed(svg))


def test_distances_are_drawn_to_scale() -> None:
    root = parsed(structure_svg(Plan.prism(layers=12, width=768, heads=12), DISTANCES))
    dots = [number(node, "cx") for node in root.iter(f"{SVG}circle")]
    ticks = {
        node.text: number(node, "x") for node in root.iter(f"{SVG}text") if node.text in {"0", "100"}
    }  # the axis is written after the layers, whose labels it overrides here
    unit = (ticks["100"] - ticks["0"]) / 100
    assert [(x - ticks["0"]) / unit for x in dots] == pytest.approx(DISTANCES, abs=0.1)


def test_distances_must_match_the_layers() -> None:
    with pytest.raises(InputError, match=r"distances = 2: must hold one value per layer: 6"):
        structure_svg(Plan.prism(layers=6, width=192, heads=6), [1.0, 2.0])
