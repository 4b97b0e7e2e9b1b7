"""The pictures are well-formed, show what they should, and keep their labels inside and apart."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest

from meristem.errors import InputError
from meristem.growth import RepeatBlock
from meristem.plan import LayerPlan, Loop, Plan
from meristem.report.figures import TIMES, looped, loss_svg, structure_svg
from meristem.report.svg import BLUE, GREEN, ORANGE, PURPLE, compact, fit, nice_ticks, tick_labels
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


# --- structure --------------------------------------------------------------------------------------------


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


# --- loss -------------------------------------------------------------------------------------------------


def curve(steps: int, noise: float = 0.08) -> list[tuple[int, float]]:
    generator = random.Random(0)
    return [(s, 3.2 + 7.7 * math.exp(-25 * s / steps) + generator.gauss(0, noise)) for s in range(steps)]


def strokes(root: Element, colour: str) -> list[str]:
    return [node.get("d", "") for node in root.iter(f"{SVG}path") if node.get("stroke") == colour]


def test_loss_labels() -> None:
    held_out = [(s, loss + 0.05) for s, loss in curve(1000, noise=0)[::100]] + [(999, 3.251)]
    root = parsed(loss_svg(curve(1000), held_out, "124M", tokens_per_step=2**18))
    assert {"124M", "steps", "tokens", "250M", "held-out 3.251"} <= set(texts(root))
    label = next(content for content in texts(root) if content.startswith("training"))
    assert float(label.split()[1]) == pytest.approx(3.2, abs=0.05)  # smoothed, where single losses scatter by 0.08
    assert_labels_are_inside_and_apart(root)


def test_first_steps_do_not_squash_the_curve() -> None:
    root = parsed(loss_svg(curve(1000), []))
    scale = [float(content) for content in texts(root) if re.fullmatch(r"\d\.\d+", content)]
    assert max(scale) < 5
    assert any("off the scale" in content and "at step 0" in content for content in texts(root))


def test_a_divergence_stays_in_view() -> None:
    train = [(s, 3.0 if s < 800 else 3.0 + (s - 800) / 40) for s in range(1000)]
    root = parsed(loss_svg(train, []))
    assert not any("off the scale" in content for content in texts(root))


def test_gaps_interrupt_the_lines() -> None:
    train = [(s, math.nan if 400 <= s < 450 else 3.0 - s / 1000) for s in range(900)]
    root = parsed(loss_svg(train, [(0, 3.0), (300, math.inf), (600, 2.5), (899, 2.2)]))
    assert [path.count("M") for path in strokes(root, BLUE)] == [2, 2]
    assert [path.count("M") for path in strokes(root, ORANGE)] == [2]
    assert "nan" not in "".join(strokes(root, BLUE) + strokes(root, ORANGE))


def test_long_logs_make_small_files() -> None:
    assert len(loss_svg(curve(100_000), [])) < 60_000


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ([], []),
        ([(0, math.nan)], []),
        ([(0, 5.0)], []),
        ([(3, 0.0)], []),
        ([], [(10, 3.1)]),
        ([(s, 2.0) for s in range(10)], [(0, 2.0), (9, 2.0)]),
        ([(0, 9.0), *((s, math.nan) for s in range(1, 2000))], [(0, math.nan)]),
        ([(1, 1e9), (2, 3.0)], []),
        ([(1, 3.0), (2, 1e9)], [(2, 1e12)]),
    ],
)
def test_few_odd_or_missing_losses(train: list[tuple[int, float]], held_out: list[tuple[int, float]]) -> None:
    for tokens in (None, 1, 2**19):
        root = parsed(loss_svg(train, held_out, tokens_per_step=tokens))
        assert_labels_are_inside_and_apart(root)
        known = any(math.isfinite(loss) for _, loss in [*train, *held_out])
        assert ("no losses yet" in texts(root)) != known


# --- helpers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (2.9, 4.85, [3.0, 3.5, 4.0, 4.5]),
        (0, 0.5, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_nice_ticks(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high) == expected


def test_tick_labels_share_their_decimals() -> None:
    assert tick_labels([3.0, 3.5, 4.0]) == ["3.0", "3.5", "4.0"]
    assert tick_labels([0.0, 20.0]) == ["0", "20"]


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0"), (950, "950"), (1500, "1.5k"), (2e7, "20M"), (2.88e9, "2.88B")]
)
def test_compact(value: float, expected: str) -> None:
    assert compact(value) == expected


def test_fit() -> None:
    assert fit("short", 500, 12) == "short"
    assert fit("a" * 100, 116, 10) == "a" * 19 + "…"
