"""The picture of growth is told by the files of a run, and true to them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from meristem.growth import LoopHeads, RepeatBlock, Sgt, SgtState
from meristem.growth.events import GrowthEvent
from meristem.plan import Plan
from meristem.report.drawing.colours import ORANGE
from meristem.report.loop_history import LoopHistory
from meristem.report.loops_figure import COLUMNS, PALE, loops_svg
from meristem.report.pictures import draw_growth, draw_structure
from meristem.report.run_growth import RunGrowth
from meristem.report.structure_figure import TIMES, looped
from report.helpers import SVG, Element, assert_labels_are_inside_and_apart, number, parsed, texts
from training.helpers import prepared, trained

LEFT, WIDTH = 76, 700  # of the plots


def entropy(layers: int, heads: int, step: int) -> list[list[float]]:
    """Entropies that fall over the run, deep layers last, and differ between heads."""
    return [
        [math.exp(-step / (200 + 20 * layer)) * (1 - 0.02 * head) for head in range(heads)] for layer in range(layers)
    ]


def simulated(plan: Plan, policy: Sgt, observe_every: int = 0, delta: float = 0.0, last_step: int = 0) -> LoopHistory:
    """What the files of a run with this policy would hold, trained gates having drifted by `delta`."""
    plan, layers = policy.prepare(plan), len(plan.layers)
    last_step = last_step or policy.total_steps
    state, decisions, observations = SgtState(), [], []
    for step in range(1, last_step + 1):
        heads = entropy(layers, max(plan.heads), step)
        seen = {"step": step, "head_entropy": heads, "loops": loops(plan, policy, state, step, delta)}
        if observe_every and step % observe_every == 0:
            observations.append(seen)
        if policy.decides(state, step):
            made = policy.judge(state, step, heads)
            state = made.state
            grown = next((g for g in state.grown if g.layer == made.layer), None)
            facts = {
                "head_entropy": heads, "loops": seen["loops"], "heads": None if grown is None else list(grown.heads),
                "passes": None if grown is None else len(grown.births), "shortlist": list(made.shortlist),
            }  # fmt: skip
            decisions.append(GrowthEvent(step, "sgt", made.action, made.rule, made.layer, facts))
    return LoopHistory(plan, last_step, decisions, observations, policy)


def loops(plan: Plan, policy: Sgt, state: SgtState, step: int, delta: float) -> list[dict[str, Any]]:
    ramps = policy.ramps(plan, state, step)
    for edit in policy.edits(plan, state, step):
        plan = edit.apply(plan)
    return [
        {
            "layer": layer,
            "heads": list(loop.heads),
            "passes": loop.passes,
            "gates": [[strength + delta for strength in strengths] for strengths in ramps[layer]],
        }
        for layer, loop in plan.loops.items()
    ]


def uniform(layers: int, heads: int = 4) -> Plan:
    return Plan.uniform(layers=layers, width=32 * heads, heads=heads, vocabulary=320, context=128)


def badges(root: Element, radius: float) -> list[Element]:
    """Rings of that radius; those of the rows are the largest."""
    return [c for c in root.iter(f"{SVG}circle") if c.get("stroke") == ORANGE and number(c, "r") == radius]


# --- history ------------------------------------------------------------------------------------------------------


def test_births_strengths_and_costs() -> None:
    policy = Sgt(total_steps=400, passes=2, max_layers=2, start=40, window=50)
    history = simulated(uniform(6), policy, observe_every=5, delta=-0.1)
    assert [(one.layer, one.number, one.birth) for one in history.passes] == [
        (5, 1, 40), (5, 2, 90), (4, 1, 140), (4, 2, 190)
    ]  # fmt: skip
    assert history.fixed == 240
    first = dict(history.passes[0].strength)
    assert first[40] == 0
    assert first[65] == pytest.approx(0.5 - 0.1)
    assert first[400] == pytest.approx(0.9)
    bare = history.plan.cost.training.causal
    assert [step for step, _ in history.cost if step in (0, 40, 90, 140, 190)] == [0, 40, 90, 140, 190]
    heads = (0, 1)
    final = LoopHeads(4, heads, 2).apply(LoopHeads(5, heads, 2).apply(history.plan))
    assert history.structure(400) == final
    assert history.cost[-1][1] == pytest.approx(final.cost.training.causal / bare - 1)
    one = LoopHeads(5, heads, 1).apply(history.plan).cost.training.causal / bare - 1
    assert history.mean_cost == pytest.approx(one * (50 + 2 * 50 + 3 * 50 + 4 * 210) / 400)


def test_a_ramp_that_nobody_observed_is_that_of_the_birth() -> None:
    policy = Sgt(total_steps=300, start=40, window=30)
    history = simulated(uniform(4), policy)
    assert dict(history.passes[-1].strength)[history.passes[-1].birth + 30] == 1
    seldom = simulated(uniform(4), policy, observe_every=100, delta=0.2)
    strength = dict(seldom.passes[0].strength)  # of layer 3, known at 70, 100 (decisions) and 100, 200, 300
    assert strength[70] == pytest.approx(1.2)


def test_published_births_are_strong_at_once_and_cost_all_heads_first() -> None:
    policy = Sgt(total_steps=300, start=40, window=50, birth="paper", max_layers=1)
    history = simulated(uniform(4), policy, observe_every=7)
    assert {strength for _, strength in history.passes[0].strength} == {1.0}
    (_, none), (born, all_heads), (faded, chosen) = history.cost
    assert (none, born, faded) == (0, 40, 90)
    assert all_heads == pytest.approx(2 * chosen)


# --- picture ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [2, 6, 12, 24, 48])
@pytest.mark.parametrize("observe_every", [0, 4])
@pytest.mark.parametrize("passes", [1, 3])
def test_labels(layers: int, observe_every: int, passes: int) -> None:
    policy = Sgt(total_steps=1000, passes=passes, start=50, window=50)
    history = simulated(uniform(layers, 16), policy, observe_every)
    root = parsed(loops_svg(history, "a long title " * 30))
    assert_labels_are_inside_and_apart(root)
    assert texts(root).count(f"h0,h1 {TIMES}{passes}") == min(3, layers - 1)
    assert any(f"fixed at step {history.fixed}" in content for content in texts(root))


@pytest.mark.parametrize("last_step", [1, 39, 40, 41, 90, 100])
def test_a_run_that_has_just_begun(last_step: int) -> None:
    policy = Sgt(total_steps=400, passes=3, start=40, window=50)
    for observe_every in (0, 1):
        history = simulated(uniform(3), policy, observe_every, last_step=last_step)
        if history.decisions or history.observations:
            assert_labels_are_inside_and_apart(parsed(loops_svg(history)))


def test_windows_may_be_short_and_heads_many() -> None:
    policy = Sgt(total_steps=3000, passes=6, start=5, window=5, max_layers=5, heads="all")
    root = parsed(loops_svg(simulated(uniform(12, 8), policy, 50)))
    assert_labels_are_inside_and_apart(root)
    assert f"8 heads {TIMES}6" in texts(root)


def test_births_are_where_they_happened() -> None:
    policy = Sgt(total_steps=400, passes=3, max_layers=2, start=40, window=50)
    history = simulated(uniform(6), policy, 4)
    root = parsed(loops_svg(history))
    layer_rows = {one.layer: 100 + 30 * (5 - one.layer) + 15 for one in history.passes}
    drawn = [(number(c, "cx"), number(c, "cy")) for c in badges(root, 8)]
    expected = [(LEFT + one.birth / 400 * WIDTH, layer_rows[one.layer]) for one in history.passes]
    assert sum(sorted(drawn), ()) == pytest.approx(sum(sorted(expected), ()), abs=0.01)
    bars = [node for node in root.iter(f"{SVG}rect") if node.get("fill") == PALE]
    assert [number(bar, "x") for bar in bars] == pytest.approx([x for x, _ in expected], abs=0.01)


def brightness(root: Element, x: float, y: float) -> int:
    """Of the cell of the heat map at a place."""
    for node in root.iter(f"{SVG}path"):
        for cell in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h", node.get("d", "")):
            left, top, width, height = map(float, cell)
            if left <= x < left + width and top <= y < top + height:
                colour = node.get("fill", "")
                return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    raise AssertionError("no cell here")


def test_the_heat_map_shows_what_was_measured() -> None:
    """The higher the entropy, the darker, with the deepest layer on top."""
    root = parsed(loops_svg(simulated(uniform(3), Sgt(total_steps=100, start=40), 1)))
    assert {"0.0", "1.0"} <= set(texts(root))  # the ends of the scale
    found = {}
    for layer in range(3):
        for step in (1, 20, 50, 99):
            value = sum(entropy(3, 4, step)[layer]) / 4
            found[value] = brightness(root, LEFT + (step - 0.5) / 100 * WIDTH, 100 + 30 * (2 - layer) + 2)
    by_entropy = [found[value] for value in sorted(found)]
    assert by_entropy == sorted(by_entropy, reverse=True)
    assert len(set(by_entropy)) > 6


def test_the_scale_is_the_same_for_all_runs() -> None:
    """So that two pictures can be compared: one entropy, one colour, whatever else the run has seen."""

    def picture(*levels: float) -> Element:
        seen = [{"step": step, "head_entropy": [[level] * 4] * 3} for step, level in enumerate(levels, 1)]
        root = parsed(loops_svg(LoopHistory(uniform(3), len(levels), (), seen)))
        assert {"0.0", "1.0"} <= set(texts(root))
        return root

    narrow, wide = picture(0.6, 0.61, 0.6), picture(0.6, 1.0, 0.0)
    at_first = (LEFT + 5, 100 + 2)
    assert brightness(narrow, *at_first) == brightness(wide, *at_first)
    assert brightness(wide, LEFT + 0.5 * WIDTH, 102) < brightness(wide, *at_first)
    assert brightness(wide, LEFT + 0.9 * WIDTH, 102) > brightness(wide, *at_first)


def test_entropies_at_decisions_only_leave_the_rest_open() -> None:
    policy = Sgt(total_steps=400, start=40, window=50)
    quiet, observed = (simulated(uniform(6), policy, every) for every in (0, 4))
    assert any("measured at decisions only" in content for content in texts(parsed(loops_svg(quiet))))
    assert not any("decisions only" in content for content in texts(parsed(loops_svg(observed))))
    assert len(quiet.entropies) == len(quiet.decisions) == 4


def test_entropies_that_are_not_finite_are_gaps() -> None:
    """As they are in the log, where they are null: one head is enough to leave its layer open."""
    broken: list[Any] = entropy(6, 4, 2)
    broken[4] = [0.5, None, 0.5, 0.5]
    observations = [{"step": s, "head_entropy": broken if s == 2 else entropy(6, 4, s)} for s in (1, 2, 3)]
    facts = {"head_entropy": broken, "heads": None, "passes": None, "shortlist": []}
    decision = GrowthEvent(2, "sgt", "wait", "", facts=facts)
    policy = Sgt(total_steps=10, start=2, window=2)
    for seen in ((), observations):
        history = LoopHistory(uniform(6), 3, [decision], seen, policy)
        values = dict(history.entropies)[2]
        assert math.isnan(values[4])
        assert values[5] == pytest.approx(sum(entropy(6, 4, 2)[5]) / 4)
        svg = loops_svg(history)
        assert "nan" not in svg.lower()
        root = parsed(svg)
        assert_labels_are_inside_and_apart(root)
        place = LEFT + (0.5 if seen else 0.66) * WIDTH
        assert brightness(root, place, 100 + 2)  # layer 5
        with pytest.raises(AssertionError, match="no cell here"):
            brightness(root, place, 100 + 30 + 2)


def test_strengths_that_are_not_finite_spoil_no_picture() -> None:
    """As the grower writes them: null."""
    history = simulated(uniform(4), Sgt(total_steps=300, start=40, window=50, max_layers=1), 25)
    history.observations[-2]["loops"][0]["gates"][0][1] = None
    svg = loops_svg(history)
    assert "nan" not in svg.lower()
    assert_labels_are_inside_and_apart(parsed(svg))


def test_the_end_of_a_fade_is_no_birth() -> None:
    policy = Sgt(total_steps=300, start=40, window=50, birth="paper", max_layers=1)
    history = simulated(uniform(4), policy)
    fade = GrowthEvent(90, "sgt", "fade", "", 3, {"heads": [0, 1], "passes": 1, "shortlist": []})
    told = LoopHistory(history.plan, history.last_step, [*history.decisions, fade], (), policy)
    assert [(one.layer, one.number, one.birth) for one in told.passes] == [(3, 1, 40)]
    assert told.structure(300) == history.structure(300)
    assert told.cost == history.cost
    assert told.entropies == history.entropies  # it has none
    assert loops_svg(told) == loops_svg(history)


def test_structures_from_the_start_are_lines_without_births() -> None:
    loop = LoopHeads(3, (0, 2), 2).apply(uniform(4))
    block = RepeatBlock(1, 2).apply(uniform(4))
    for plan, name in ((loop, f"h0,h2 {TIMES}2"), (block, f"block {TIMES}2")):
        observations = [{"step": s, "head_entropy": entropy(4, 4, s)} for s in range(1, 50)]
        root = parsed(loops_svg(LoopHistory(plan, 50, (), observations)))
        assert name in texts(root)
        assert not badges(root, 8)
        assert any("more FLOPs per token from the start" in content for content in texts(root))
        assert_labels_are_inside_and_apart(root)


def test_long_logs_make_small_files() -> None:
    policy = Sgt(total_steps=8000, passes=3)
    svg = loops_svg(simulated(uniform(12), policy, 1, delta=0.1))
    assert len(svg) < 120_000
    widths = {float(cell.split("v")[0]) for cell in svg.split("h")[1:] if cell[:1].isdigit() and "v" in cell[:8]}
    assert min(widths) >= WIDTH / COLUMNS - 1.1  # the last column may be shorter


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("growth"))


@pytest.mark.parametrize(
    ("observe", "changes"),
    [(False, {"passes": 2}), (True, {"passes": 2}), (True, {"birth": "paper"})],
)
def test_a_run_that_grew(observe: bool, changes: dict[str, Any], data: Path, tmp_path: Path) -> None:
    run = trained(
        data, tmp_path / "run", growth__policy="sgt", growth__start=2.0, growth__window=3.0, growth__observe=observe,
        **{f"growth__{key}": value for key, value in changes.items()},
    )  # fmt: skip
    path = draw_growth(run.path)
    assert path == run.path / "growth.svg"
    assert_labels_are_inside_and_apart(parsed(path.read_text()))
    history, steps = RunGrowth(run).loops, run.config.train.steps
    assert history.last_step == steps
    assert history.structure(steps) == run.newest_plan  # the picture's structure is the checkpoint's
    *_, flops = [entry["flops"] for entry in run.read(run.metrics) if "flops" in entry]
    once = run.plan.cost.training.causal * run.config.train.batch_size * run.plan.context
    assert flops == pytest.approx(steps * once * (1 + history.mean_cost))
    structure = draw_structure(run.path)
    assert structure is not None
    assert looped(run.newest_plan.layer(1)) in texts(parsed(structure.read_text()))


def test_a_run_that_only_watched_and_one_that_did_neither(data: Path, tmp_path: Path) -> None:
    assert draw_growth(trained(data, tmp_path / "watches", growth__observe=True).path) is not None
    plain = trained(data, tmp_path / "plain")
    assert draw_growth(plain.path) is None
    assert not (plain.path / "growth.svg").exists()
