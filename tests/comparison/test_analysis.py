"""What is said of results that are known, in tables, notes and on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from comparison.helpers import comparison, result, results, tables
from meristem.comparison.analysis import analyse, facts_of, reported
from meristem.comparison.charts import forest, mean_curve, smoothed, ticks
from meristem.comparison.file import Comparison
from meristem.comparison.numbers import seconds, short
from meristem.comparison.page import page
from meristem.comparison.planning import RunKey
from meristem.comparison.record import show
from meristem.comparison.tables import markdown

LOSSES = {"uniform": [3.0, 3.2, 3.1, 3.05], "prism": [2.9, 3.11, 2.99, 2.95], "reverse": [3.01, 3.17, 3.13, 3.04]}


@pytest.fixture
def asked(tmp_path: Path) -> Comparison:
    arms = {**tables()["arms"], "reverse": {"model.schedule": "reverse"}}
    return comparison(tmp_path, arms=arms, seeds=[0, 1, 2, 3], margin=0.1)


def test_rows_and_contrasts(asked: Comparison) -> None:
    found = analyse(asked, results(LOSSES))
    assert [row.arm for row in found.arms] == ["uniform", "prism", "reverse"]
    prism = found.arms[1]
    assert prism.mean == pytest.approx((2.9 + 3.11 + 2.99 + 2.95) / 4)
    assert prism.tokens_per_second == 640.0
    primary, other = found.contrasts
    assert (primary.primary, primary.verdict.word) == (True, "better")
    assert primary.difference.mean == pytest.approx(-0.1)
    assert prism.against == primary.difference
    assert found.arms[0].against is None
    assert (other.primary, other.verdict.word) == (False, "shown to be equal within the margin")


def test_pairs_are_those_of_seeds_that_both_arms_have(asked: Comparison) -> None:
    known = results(LOSSES)
    del known[RunKey("prism", 0)], known[RunKey("uniform", 3)]
    found = analyse(asked, known)
    assert found.contrasts[0].difference.pairs == 2
    del known[RunKey("prism", 1)]
    assert [line.contrast.arm for line in analyse(asked, known).contrasts] == ["reverse"]


def test_runs_that_diverged_are_left_out_and_said(asked: Comparison) -> None:
    known = results(LOSSES)
    known[RunKey("prism", 2)] = result("prism", 2, 0.0, scores={})
    found = analyse(asked, known)
    assert found.contrasts[0].difference.pairs == 3
    assert "prism diverged with 1 of 4 seeds (2): what is said of it is of the others only." in found.notes


def test_time_is_judged_with_and_without_compilation(asked: Comparison) -> None:
    known = results({"uniform": LOSSES["uniform"]}, training_seconds=10.0)
    for seed in range(4):
        known[RunKey("prism", seed)] = result(
            "prism", seed, 3.0, training_seconds=9.0 + 0.01 * seed, compilation_seconds=8.0 + 0.02 * seed
        )
    (line,) = analyse(asked, known).times
    assert (line.without_verdict.word, line.compiled_verdict.word) == ("better", "worse")
    assert "faster" in markdown(asked, analyse(asked, known))
    assert "slower" in markdown(asked, analyse(asked, known))


def test_seconds_to_a_loss_are_of_the_first_evaluation_at_it(asked: Comparison) -> None:
    run = result(
        "prism", 0, 3.0, held_out=[(40, 3.5), (80, 3.2), (100, 3.3)], seconds=[(20, 2.0), (40, 4.0), (79, 7.0)]
    )
    assert [run.seconds_to(loss) for loss in (4.0, 3.3, 3.0)] == [4.0, 7.0, None]


def notes(found: Comparison, known: Any = None, shown: Any = (), **options: Any) -> str:
    return "\n".join(analyse(found, known or results(LOSSES), shown, **options).notes)


def test_what_was_not_tuned_is_said(asked: Comparison, tmp_path: Path) -> None:
    assert "One rate for all arms" in notes(asked)
    assert "side by side" not in notes(asked)
    assert "Up to 4 runs went side by side" in notes(asked, side_by_side=4)


def test_a_best_rate_at_the_edge_is_said(tmp_path: Path) -> None:
    found = comparison(tmp_path, rates=[1e-3, 2e-3, 4e-3], rate_seeds=[8])
    best = {"uniform": 2e-3, "prism": 4e-3}
    known = {
        RunKey(arm, 8, rate): result(arm, 8, 3.0 + abs(rate - best[arm])) for arm in found.arms for rate in found.rates
    }
    for arm in found.arms:
        known |= {RunKey(arm, seed, best[arm]): result(arm, seed, 3.0 + 0.1 * seed) for seed in (0, 1)}
        known |= {RunKey(arm, seed, 1e-3): result(arm, seed, 0.1) for seed in (0, 1)}  # not chosen: not reported
    said = notes(found, known)
    assert "Each arm at its own best rate, chosen on 1 other seed." in said
    assert "may lie beyond: prism (0.004)." in said
    assert all(row.mean > 3 for row in analyse(found, known).arms)


def test_seeds_added_after_looking_are_counted(asked: Comparison, tmp_path: Path) -> None:
    earlier = {"time": "yesterday", **facts_of(asked), "seeds": [0, 1, 7]}
    said = notes(asked, shown=[earlier])
    assert "2 seeds of 4 added after looking: there were 3 when results were first shown (yesterday)" in said
    assert "changed after looking" not in said
    said = notes(asked, shown=[{**earlier, "margin": 0.5, "primary": [["reverse", "uniform"]]}])
    assert "margin was changed after looking: it was 0.5, now it is 0.1." in said
    assert "primary was changed after looking" in said


def test_a_look_is_recorded_and_later_seeds_are_told_from_earlier_ones(tmp_path: Path) -> None:
    """The first look is of two seeds, the second of four."""
    few = comparison(tmp_path, seeds=[0, 1])
    many = comparison(tmp_path, seeds=[0, 1, 2, 3])
    two = {arm: LOSSES[arm] for arm in ("uniform", "prism")}
    _, first = show(few, {key: r for key, r in results(two).items() if key.seed < 2}, tmp_path)
    assert "after looking" not in first
    analysis, second = show(many, results(two), tmp_path)
    assert "2 seeds of 4 added after looking" in second
    record = json.loads((tmp_path / "comparison.json").read_text())
    assert [look["seeds"] for look in record["shown"]] == [[0, 1], [0, 1, 2, 3]]
    assert len(record["runs"]) == 8
    assert record["analysis"]["notes"] == analysis.notes
    assert (tmp_path / "comparison.md").read_text() == second


def test_power_is_told(asked: Comparison) -> None:
    known = results({"uniform": [3.0, 3.3, 3.1, 3.0], "prism": [3.1, 3.1, 3.2, 2.8]})
    said = notes(asked, known)
    assert re.search(r"with 4 pairs a difference of 0\.\d{4} would have been shown with 80 % chance", said)
    assert re.search(r"one as large as measured, -0\.0500, needs [\d,]+ seeds", said)
    assert re.search(r"one as large as the margin, 0\.1, needs [\d,]+ seeds", said)


def test_on_a_grid_all_contrasts_are_corrected_together(tmp_path: Path) -> None:
    found = comparison(tmp_path, sweep={"train.batch_size": [2, 4]}, seeds=[0, 1, 2, 3])
    losses = {f"{arm} @ batch_size={size}": LOSSES[arm] for arm in ("uniform", "prism") for size in (2, 4)}
    lines = analyse(found, results(losses)).contrasts
    assert len(lines) == 2
    assert [line.verdict.p for line in lines] == pytest.approx([2 * line.difference.p for line in lines])


def test_budgets_that_were_missed_are_said(tmp_path: Path) -> None:
    found = comparison(tmp_path, budget={"kind": "flops", "flops": 1e9})
    known = results({"uniform": LOSSES["uniform"]}) | results({"prism": LOSSES["prism"]}, flops=int(1.05e9))
    said = notes(found, known)
    assert "Arms have equal counted FLOPs" in said
    assert "prism ended +5.0% from its budget" in said
    assert "uniform ended" not in said


# --- text and page ---------------------------------------------------------------------------------------------------


def test_markdown_tables_are_whole(asked: Comparison) -> None:
    text = markdown(asked, analyse(asked, results(LOSSES)))
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(blocks) == 5
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_the_page_is_whole_and_needs_nothing_else(asked: Comparison) -> None:
    known = results(LOSSES)
    text = page(asked, analyse(asked, known), reported(asked, known))
    assert not re.search(r"https?:|<script|<link|url\(", text)
    assert len(text) < 100_000
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)
    assert text.count("<table>") == 5
    assert "prism</b> against <b>uniform</b>: <b>better</b>" in text


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    """Names of arms are plain, but values of a grid are anything."""
    found = comparison(tmp_path, sweep={"data.path": ["<script>", "b&b"]})
    losses = {arm: [3.0, 3.1] for arm in found.arms}
    known = results(losses)
    assert "<script" not in page(found, analyse(found, known), reported(found, known))


def test_a_forest_shows_intervals_where_they_are(asked: Comparison) -> None:
    picture = ElementTree.fromstring(forest(analyse(asked, results(LOSSES)), asked.margin))
    lines = [e for e in picture.iter() if e.get("class") == "interval"]
    circles = [e for e in picture.iter() if e.get("class") == "mean"]
    assert len([e for e in picture.iter() if e.get("class") == "seed"]) == 8
    for line, circle in zip(lines, circles, strict=True):
        middle = (float(line.attrib["x1"]) + float(line.attrib["x2"])) / 2
        assert float(circle.attrib["cx"]) == pytest.approx(middle, abs=0.2)


def test_before_anything_is_done_there_is_a_page_all_the_same(asked: Comparison) -> None:
    empty = analyse(asked, {})
    assert "<svg" not in page(asked, empty, reported(asked, {}))
    assert "# question" in markdown(asked, empty)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.3, 0.2), (2.31, 2.33), (0.0, 1234.0), (1.0, 1.0)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    found = ticks(low, high)
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    assert len(found) <= 8


def test_numbers_for_people() -> None:
    assert [short(v) for v in (None, 0, 999, 999.7, 1234, 1.5e15)] == ["-", "0", "999", "1 K", "1.23 K", "1.5 P"]
    assert [seconds(v) for v in (None, 0.0, 99.94, 99.96, 3661)] == ["-", "0.0 s", "99.9 s", "1:40", "1:01:01"]


def test_curves_are_smoothed_and_averaged() -> None:
    assert smoothed([(0, 1.0), (1, 2.0), (2, 3.0)], 1) == [(0, 1.5), (1, 2.0), (2, 2.5)]
    assert mean_curve([[(0, 1.0), (2, 3.0)], [(0, 3.0), (1, 9.0), (2, 5.0)]]) == [(0, 2.0), (2, 4.0)]
