"""The picture and the lines of a run whose heads come and go are told by its events, and true to them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import Call
from meristem.data import prepare_labelled
from meristem.growth.events import Event, event_from_dict
from meristem.report.drawing.colours import BACKGROUND, BLUE, GUIDE, INK, ORANGE
from meristem.report.head_history import HINT, HeadHistory
from meristem.report.heads_figure import COLOURS, SHOWN, heads_svg
from meristem.report.pictures import draw_growth, draw_loss
from meristem.report.run_growth import RunGrowth
from meristem.runs.run_folder import RunFolder
from report.helpers import SVG, Element, assert_labels_are_inside_and_apart, number, parsed, texts
from training.helpers import EAGER_HEADS, prepared, trained

LEFT, WIDTH = 76, 700  # of the plots
RULE = "the demand is certain, large and steady"


def decision(
    step: int, heads: Sequence[int], demand: Sequence[float | None], *, noise: float | None = 0.01,
    threshold: float | Sequence[float] = 0.1, predicted: Sequence[int] | None = None, **change: Any,
) -> Event:  # fmt: skip
    """What was decided or measured about heads, from a line of events.jsonl of before there were versions."""
    layers = len(heads)
    line = {
        "step": step, "event": "growth" if change else "demand", "loss": 1.0, "heads": list(heads),
        "demand": list(demand), "noise": [noise] * len(demand),
        "threshold": [threshold] * len(demand) if isinstance(threshold, float) else list(threshold),
        "rules": [RULE] * layers,
        "predicted_heads": [{"count": count, "estimate": 1.0} for count in predicted or [4] * len(demand)],
        **({"rule": RULE, **change} if change else {}),
    }  # fmt: skip
    return event_from_dict(line)


def one_layer() -> HeadHistory:
    """From 1 head to 3 and back to 2 in 1000 steps; a trial in between."""
    removal: dict[str, Any] = {"action": "removal", "layer": 0, "head": 1, "loss_with": 0.5, "loss_without": 0.5004}
    decisions = [
        decision(100, [1], [1.0], noise=0.2),
        decision(200, [2], [0.8], noise=0.1, action="birth", layer=0),
        decision(400, [3], [0.5], action="birth", layer=0),
        decision(600, [3], [0.05], noise=0.005),
        decision(700, [3], [0.01], noise=0.001, action="spare", layer=0, head=2, loss_with=0.5, loss_without=None),
        decision(800, [2], [0.002], noise=0.002, **removal),
        decision(1000, [2], [-0.001], threshold=0.2),
    ]
    return HeadHistory((1,), 1000, decisions, [(step, 2 - step / 1000) for step in range(1, 1001)])


def many_layers(layers: int, steps: int = 2000) -> HeadHistory:
    """A birth every 200 steps, in one layer after the other, and a removal at the end of each lap."""
    heads, decisions = [1] * layers, []
    for step in range(50, steps + 1, 50):
        demand = [math.exp(-step / (300 + 40 * layer)) for layer in range(layers)]
        change: dict[str, Any] = {}
        if step % 200 == 0:
            layer = step // 200 % layers
            leaves = heads[layer] == 3
            heads[layer] += -1 if leaves else 1
            change = {"action": "removal" if leaves else "birth", "layer": layer, "head": 0}
        decisions.append(decision(step, heads, demand, **change))
    return HeadHistory(
        (1,) * layers, steps, decisions, [(step, 3 + 5 * math.exp(-step / 300)) for step in range(steps)]
    )


def x(step: float, last: float) -> float:
    return LEFT + step / last * WIDTH


def height(root: Element, label: str) -> float:
    """Of the grid line with this label."""
    node = next(n for n in root.iter(f"{SVG}text") if n.text == label and n.get("text-anchor") == "end")
    return number(node, "y") - 0.35 * number(node, "font-size")


def demand_height(root: Element, value: float) -> float:
    """On the logarithmic axis."""
    tenth, hundredth = height(root, "0.1"), height(root, "0.01")
    return tenth - (hundredth - tenth) * math.log10(10 * value)


def rings(root: Element, **attributes: str) -> list[tuple[float, float]]:
    """Centres of the marks in the plot, by what they look like; those of the legend are smaller."""
    found = [
        node
        for node in root.iter(f"{SVG}circle")
        if number(node, "r") == 8 and all(node.get(name) == value for name, value in attributes.items())
    ]
    return [(number(node, "cx"), number(node, "cy")) for node in found]


def points(path: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]


def curves(root: Element, colour: str, width: str = "2") -> list[str]:
    """The solid lines of a colour and width."""
    found = [n for n in root.iter(f"{SVG}path") if n.get("stroke") == colour and n.get("stroke-width") == width]
    return [n.get("d", "") for n in found if n.get("stroke-dasharray") is None]


# --- history ------------------------------------------------------------------------------------------------------


def test_counts_readings_and_predictions() -> None:
    history = one_layer()
    assert history.counts == [[(0, 1), (200, 2), (400, 3), (800, 2)]]
    assert history.heads == (2,)
    assert history.predicted == [4]
    assert [(r.step, r.demand, r.threshold) for r in history.readings[0]][-2:] == [
        (800, 0.002, 0.1),
        (1000, -0.001, 0.2),
    ]


def test_lines_say_what_grew_when_and_why() -> None:
    assert one_layer().lines() == [
        f"step 200: a head is born: layer 0 now has 2 heads ({RULE}); demand 0.8 ± 0.1, above 0.1",
        f"step 400: a head is born: layer 0 now has 3 heads ({RULE}); demand 0.5 ± 0.01, above 0.1",
        f"step 800: a head has left: layer 0 now has 2 heads ({RULE}); loss 0.5 with it, 0.5004 without (+0.0004)",
        "1 trial without a head showed it to be needed",
        "layer 0: 2 heads (1 at the start, 4 predicted); at step 1,000 demand -0.001 ± 0.01, births begin at 0.2: "
        + RULE,
        HINT,
    ]


def test_lines_of_what_is_not_known() -> None:
    birth = decision(50, [1, 2], [None, 0.5], noise=None, predicted=[9, 3], action="birth", layer=1)
    first, unknown, known, hint = HeadHistory((1, 1), 60, [birth]).lines()
    assert first.endswith("demand 0.5, above 0.1")
    assert unknown == f"layer 0: 1 head (1 at the start); at step 50 no certain demand so far: {RULE}"
    assert known.startswith("layer 1: 2 heads (1 at the start, 3 predicted)")
    assert hint == HINT
    published = HeadHistory((1, 1), 60, [birth], criterion="published").lines()
    assert len(published) == 3
    assert "3 predicted" in published[-1]


def test_births_at_random_times_measure_nothing() -> None:
    birth = decision(30, [2, 1], [], action="birth", layer=0)
    history = HeadHistory((1, 1), 60, [decision(20, [1, 1], []), birth], [(1, 3.0), (60, 2.0)])
    assert history.readings == [[], []]
    assert history.lines() == [
        f"step 30: a head is born: layer 0 now has 2 heads ({RULE})",
        "layer 0: 2 heads (1 at the start)",
        "layer 1: 1 head (1 at the start)",
    ]
    root = parsed(heads_svg(history))
    assert not any("demand" in content or "predicted" in content for content in texts(root))
    assert_labels_are_inside_and_apart(root)


# --- picture ------------------------------------------------------------------------------------------------------


def test_births_and_removals_are_where_they_happened() -> None:
    root = parsed(heads_svg(one_layer()))
    born = [(x(200, 1000), height(root, "2")), (x(400, 1000), height(root, "3"))]
    assert sum(rings(root, stroke=BLUE), ()) == pytest.approx(sum(born, ()), abs=0.02)
    assert sum(rings(root, fill=INK), ()) == pytest.approx((x(800, 1000), height(root, "2")), abs=0.02)
    tried = [(number(n, "cx"), number(n, "cy")) for n in root.iter(f"{SVG}circle") if number(n, "r") == 2.6]
    assert tried[0] == pytest.approx((x(700, 1000), height(root, "3")), abs=0.02)
    stairs = points(curves(root, BLUE, "2.5")[0])
    expected = [(0, 1), (200, 1), (200, 2), (400, 2), (400, 3), (800, 3), (800, 2), (1000, 2)]
    corners = [(x(step, 1000), height(root, str(count))) for step, count in expected]
    assert sum(stairs, ()) == pytest.approx(sum(corners, ()), abs=0.02)
    assert "1,000 steps; 1 head at the start, 2 at the end; 2 births, 1 removal" in texts(root)
    assert {"2 heads", "predicted", "4", "a head is born", "a head leaves"} <= set(texts(root))


def test_every_lower_panel_has_a_guide_at_every_change() -> None:
    root = parsed(heads_svg(one_layer()))
    guides = [number(node, "x1") for node in root.iter(f"{SVG}line") if node.get("stroke") == GUIDE]
    assert guides == pytest.approx(2 * [x(step, 1000) for step in (200, 400, 800)], abs=0.01)


def test_the_demand_its_band_and_its_threshold() -> None:
    root = parsed(heads_svg(one_layer()))
    line = points(curves(root, BLUE)[0])
    shown = {100: 1.0, 200: 0.8, 400: 0.5, 600: 0.05, 700: 0.01}
    for (at, y), (step, value) in zip(line, shown.items(), strict=False):
        assert (at, y) == pytest.approx((x(step, 1000), demand_height(root, value)), abs=0.05)
    (edge,) = [n.get("d", "") for n in root.iter(f"{SVG}path") if n.get("opacity") == "0.16"]
    outline = points(edge)
    upper, lower = outline[:7], outline[:6:-1]
    assert upper[1] == pytest.approx((x(200, 1000), demand_height(root, 1.0)), abs=0.05)  # 0.8 and 2 * 0.1
    assert lower[1] == pytest.approx((x(200, 1000), demand_height(root, 0.6)), abs=0.05)
    assert lower[3][1] == pytest.approx(demand_height(root, 0.04), abs=0.05)
    (threshold,) = [n.get("d", "") for n in root.iter(f"{SVG}path") if n.get("stroke-dasharray") == "5 4"]
    corners = [(0, 0.1), (1000, 0.1), (1000, 0.2), (1000, 0.2)]
    expected = [(x(step, 1000), demand_height(root, value)) for step, value in corners]
    assert sum(points(threshold), ()) == pytest.approx(sum(expected, ()), abs=0.05)
    assert "births above 0.2" in texts(root)


def test_a_demand_below_zero_lies_on_the_axis() -> None:
    root = parsed(heads_svg(one_layer()))
    (_, floor), (_, last) = points(curves(root, BLUE)[0])[-2:]
    assert last == floor  # neither the one below zero nor the one lost in its noise
    assert any(content.startswith("< 0.0") for content in texts(root))


def test_values_that_are_not_finite_are_gaps() -> None:
    demands = [1.0, 0.9, None, 0.8, 0.7]
    decisions = [decision(10 * i, [1], [d], noise=None if i == 5 else 0.1) for i, d in enumerate(demands, 1)]
    losses = [(s, math.nan if s == 20 else 3.0 - s / 50) for s in range(1, 51)]
    svg = heads_svg(HeadHistory((1,), 50, decisions, losses))
    assert "nan" not in svg.lower()
    root = parsed(svg)
    assert curves(root, BLUE)[0].count("M") == 2
    assert curves(root, INK)[0].count("M") == 2
    (edge,) = [n.get("d", "") for n in root.iter(f"{SVG}path") if n.get("opacity") == "0.16"]
    assert edge.count("M") == 2
    assert len(points(edge)) == 2 * (2 + 1)  # the last has no noise
    assert_labels_are_inside_and_apart(root)


def test_a_demand_that_never_was_certain() -> None:
    decisions = [decision(step, [1], [None], noise=None, predicted=[8]) for step in (50, 100)]
    root = parsed(heads_svg(HeadHistory((1,), 100, decisions, [(1, 1.0), (100, 1.0)])))
    assert "100 steps; 1 head at the start, 1 at the end; no birth; no demand was ever certain" in texts(root)
    assert "predicted" not in texts(root)  # what noise lets one expect is nothing to go by
    assert_labels_are_inside_and_apart(root)


@pytest.mark.parametrize("layers", [1, 2, 4, 5, 12, 24, 48])
def test_labels(layers: int) -> None:
    root = parsed(heads_svg(many_layers(layers), "a long title " * 30))
    assert_labels_are_inside_and_apart(root)


@pytest.mark.parametrize("last_step", [50, 250, 400])
def test_a_run_that_has_just_begun(last_step: int) -> None:
    for layers in (1, 3, 8):
        whole = many_layers(layers)
        seen = [event for event in whole.decisions if event.step <= last_step]
        for losses in ((), ((1, math.nan),), whole.losses[:last_step]):
            root = parsed(heads_svg(HeadHistory(whole.start, last_step, seen, losses)))
            assert_labels_are_inside_and_apart(root)


def test_few_layers_are_lines_a_little_apart() -> None:
    history = many_layers(3)
    root = parsed(heads_svg(history))
    for layer, colour in enumerate(COLOURS[:3]):
        (stairs,) = [points(path) for path in curves(root, colour, "2.5")]
        assert stairs[-1][1] == pytest.approx(height(root, str(history.heads[layer])), abs=4)
        assert f"layer {layer}: {history.heads[layer]}" in texts(root)
        assert len(curves(root, colour)) == 1  # its demand
    starts = sorted(points(curves(root, colour, "2.5")[0])[0][1] for colour in COLOURS[:3])
    assert starts[1] - starts[0] >= 3
    assert starts[2] - starts[1] >= 3


def test_many_layers_are_rows_with_the_counts_at_the_changes() -> None:
    history = many_layers(6)
    root = parsed(heads_svg(history))
    rows = {layer: 100 + 26 * (5 - layer) + 13 for layer in range(6)}
    born = [(x(e.step, 2000), rows[e.layer or 0]) for e in history.changes if e.action == "birth"]
    drawn = rings(root, stroke=ORANGE, fill=BACKGROUND)
    assert sum(sorted(drawn), ()) == pytest.approx(sum(sorted(born), ()), abs=0.02)
    assert texts(root).count("2 heads") == history.heads.count(2)
    largest, median = points(curves(root, ORANGE)[0]), points(curves(root, BLUE)[0])
    assert len(largest) == len(median) == len(history.decisions)
    for event, (_, top), (_, middle) in zip(history.decisions[:10], largest, median, strict=False):
        assert top == pytest.approx(demand_height(root, max(event.facts["demand"])), abs=0.05)
        two = sorted(event.facts["demand"])[2:4]
        assert middle == pytest.approx(demand_height(root, sum(two) / 2), abs=0.05)


def test_layers_that_became_stricter_have_thresholds_of_their_own() -> None:
    decisions = [decision(s, [1, 1], [0.5, 0.4], threshold=[0.1, 0.1 if s < 50 else 0.2]) for s in range(10, 101, 10)]
    root = parsed(heads_svg(HeadHistory((1, 1), 100, decisions)))
    dashed = [n for n in root.iter(f"{SVG}path") if n.get("stroke-dasharray") == "5 4"]
    assert [node.get("stroke") for node in dashed] == [BLUE, ORANGE]
    assert {"births above 0.1", "births above 0.2"} <= set(texts(root))
    assert_labels_are_inside_and_apart(root)


def test_long_logs_make_small_files() -> None:
    decisions = [decision(5 * i, [1], [1.0 + i % 2]) for i in range(1, 4001)]
    history = HeadHistory((1,), 20_000, decisions, [(s, 3.0) for s in range(20_000)], "published")
    svg = heads_svg(history)
    assert len(svg) < 60_000
    root = parsed(svg)
    assert any(content.startswith("energy of the heads") for content in texts(root))
    line = points(curves(root, BLUE)[0])
    assert len(line) <= SHOWN
    assert [y for _, y in line] == pytest.approx([line[0][1]] * len(line), abs=3)  # means: 1 and 2 are 50 pixels apart


# --- runs ---------------------------------------------------------------------------------------------------------

EAGER: dict[str, Any] = {**EAGER_HEADS, "train__steps": 24, "eval__every": 12}


def labelled(folder: Path) -> Path:
    """Rows of two classes, which one word tells apart."""
    rows = [f"w{i % 7} {('low', 'high')[i % 2]} w{i % 5} n{i}\t{('low', 'high')[i % 2]}" for i in range(60)]
    source = folder / "rows.tsv"
    source.write_text("\n".join(["text\tlabel", *rows]) + "\n", encoding="utf-8")
    prepare_labelled([source], folder / "data", held_out=0.2)
    return folder / "data"


def assert_told_by_its_files(run: RunFolder, call: Call) -> None:
    picture = draw_growth(run.path)
    assert picture == run.path / "growth.svg"
    history = RunGrowth(run).heads
    assert history.changes
    assert history.start == run.plan.heads
    assert history.heads == run.newest_plan.heads  # the picture's structure is the checkpoint's
    root = parsed(picture.read_text(encoding="utf-8"))
    assert "training loss" in " ".join(texts(root))
    assert_labels_are_inside_and_apart(root)
    said = call("report", run.path)
    assert said.code == 0, said.err
    assert said.out.startswith(f"{run.path.name}: step 24 of 24, training loss ")
    told = said.out.splitlines()  # of trials also what the loss may rise by, which the configuration says
    assert all(any(text.startswith(line) for text in told) for line in history.lines())
    assert str(picture) in said.out


ARMS: dict[str, dict[str, Any]] = {
    "demand": {},
    "published": {"incrt__criterion": "published", "incrt__share": 1e-3, "incrt__decide_every": 1, "incrt__seed": 1},
    "random": {"incrt__criterion": "random", "incrt__births": 3},
}


@pytest.mark.parametrize("arm", ARMS)
def test_a_decoder_that_grew(arm: str, tmp_path: Path, call: Call) -> None:
    run = trained(prepared(tmp_path), tmp_path / "run", **{**EAGER, **ARMS[arm]})
    assert_told_by_its_files(run, call)
    assert RunGrowth(run).heads.criterion == ("published" if arm == "published" else "demand")


def test_a_classifier_that_grew(tmp_path: Path, call: Call) -> None:
    run = trained(labelled(tmp_path), tmp_path / "run", **EAGER, model__layers=1)
    assert_told_by_its_files(run, call)
    draw_loss(run.path)
    found = texts(parsed((run.path / "loss.svg").read_text(encoding="utf-8")))
    assert "loss (nats per row)" in found
    assert "tokens" not in found  # rows differ in length


def test_the_report_of_a_run_that_does_not_grow(tmp_path: Path, call: Call) -> None:
    run = trained(prepared(tmp_path), tmp_path / "run")
    said = call("report", run.path)
    assert said.code == 0
    first, structure, pictures, page = said.out.splitlines()
    assert re.fullmatch(r"run: step 12 of 12, training loss \d\.\d{4}, held-out loss \d\.\d{4}", first)
    assert structure == "heads 2x1 4x1"
    assert pictures == f"pictures: {run.path / 'loss.svg'}"
    assert page == f"page: {run.path / 'report.html'}"


def test_the_report_of_loops(tmp_path: Path, call: Call) -> None:
    run = trained(
        prepared(tmp_path), tmp_path / "run", growth__policy="sgt", growth__start=2.0, growth__window=3.0
    )  # fmt: skip
    said = call("report", run.path)
    assert "step 2: layer 1 now loops heads" in said.out
    assert str(run.path / "growth.svg") in said.out


def test_the_report_of_what_is_no_run(tmp_path: Path, call: Call) -> None:
    said = call("report", tmp_path)
    assert said.code == 2
    assert "not a run" in said.err
