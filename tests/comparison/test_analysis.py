"""What is said of results that are known, in tables and notes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from comparison.helpers import base_file, comparison, result, results, tables
from meristem.comparison.analysis import analyse, facts_of
from meristem.comparison.file import Comparison, read_comparison
from meristem.comparison.numbers import parts, seconds, short
from meristem.comparison.planning import RunKey
from meristem.comparison.record import show
from meristem.comparison.results import Result
from meristem.comparison.tables import Table, markdown
from meristem.comparison.tables import tables as tables_of
from meristem.errors import InputError

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
    assert "Not done yet: uniform (3 of 4 seeds), prism (3 of 4 seeds)." in found.cautions
    del known[RunKey("prism", 1)]
    assert [line.contrast.arm for line in analyse(asked, known).contrasts] == ["reverse"]


def test_contrasts_that_are_not_done_yet_count_in_the_correction(asked: Comparison, tmp_path: Path) -> None:
    arms = {**tables()["arms"], **{name: {"model.schedule": name} for name in ("reverse", "bump", "shuffle")}}
    more = comparison(tmp_path, arms=arms, seeds=[0, 1, 2, 3])
    (line,) = [line for line in analyse(more, results(LOSSES)).contrasts if not line.primary]
    assert line.verdict.p == pytest.approx(min(1.0, 3 * line.difference.p))


def test_runs_that_diverged_are_left_out_and_said(asked: Comparison) -> None:
    known = results(LOSSES)
    known[RunKey("prism", 2)] = result("prism", 2, 0.0, scores={})
    found = analyse(asked, known)
    assert found.contrasts[0].difference.pairs == 3
    assert "prism diverged with 1 of 4 seeds (2): what is said of it is of the others only." in found.cautions


def test_differences_that_are_all_alike_are_not_judged(asked: Comparison) -> None:
    uniform = LOSSES["uniform"]
    known = results({**LOSSES, "prism": [loss - 0.25 for loss in uniform]})
    found = analyse(asked, known)
    line = found.contrasts[0]
    assert (line.verdict.word, line.detectable, line.needed) == ("cannot be tested", None, None)
    assert "prism minus uniform is -0.2500 in all 4 pairs" in "\n".join(found.cautions)
    assert not [note for note in found.notes if note.startswith("prism minus uniform")]
    (table,) = [table for table in tables_of(asked, found) if table.title == "Contrasts"]
    assert table.rows[0][2:] == ("-0.2500 in all 4 pairs", "-", "-", "**cannot be tested**", "-")


def test_time_is_judged_with_and_without_compilation(asked: Comparison) -> None:
    known = results({"uniform": LOSSES["uniform"]}, training_seconds=10.0)
    for seed in range(4):
        known[RunKey("prism", seed)] = result(
            "prism", seed, 3.0, training_seconds=9.0 + 0.01 * seed, compilation_seconds=8.0 + 0.02 * seed
        )
    (line,) = analyse(asked, known).times
    words = [verdict.word for verdict in (line.without_verdict, line.compiled_verdict) if verdict is not None]
    assert words == ["better", "worse"]
    assert "faster" in markdown(asked, analyse(asked, known))
    assert "slower" in markdown(asked, analyse(asked, known))
    shared = analyse(asked, known, side_by_side=2)  # who ran beside whom is chance
    assert "faster" not in markdown(asked, shared)
    assert "not judged" in markdown(asked, shared)


def test_seconds_to_a_loss_are_of_the_first_evaluation_at_it(asked: Comparison) -> None:
    run = result(
        "prism", 0, 3.0, held_out=[(40, 3.5), (80, 3.2), (100, 3.3)], seconds=[(20, 2.0), (40, 4.0), (79, 7.0)]
    )
    assert [run.seconds_to(loss) for loss in (4.0, 3.3, 3.0)] == [4.0, 7.0, None]


def notes(found: Comparison, known: Any = None, shown: Any = (), **options: Any) -> str:
    analysis = analyse(found, known or results(LOSSES), shown, **options)
    return "\n".join([*analysis.cautions, *analysis.notes])


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
    shorter = comparison(tmp_path, rates=[1e-3, 2e-3, 4e-3], rate_seeds=[8], rate_length=0.25)
    assert "chosen on 1 other seed, in runs of 0.25 of the length." in notes(shorter, known)


def test_seeds_added_after_looking_are_counted(asked: Comparison, tmp_path: Path) -> None:
    earlier = {"time": "yesterday", **facts_of(asked), "seeds": [0, 1, 7]}
    said = notes(asked, shown=[earlier])
    assert "2 seeds of 4 added after looking: there were 3 when results were first shown (yesterday)" in said
    assert "changed after looking" not in said
    assert "left out" not in notes(asked, shown=[{**earlier, "seeds": [0, 1]}])
    said = notes(asked, shown=[{**earlier, "margin": 0.5, "primary": [["reverse", "uniform"]]}])
    assert "margin was changed after looking: it was 0.5, now it is 0.1." in said
    assert "primary was changed after looking" in said
    assert "rates" not in said
    assert "rates were changed after looking: they were [0.001, 0.002], now they are []." in notes(
        asked, shown=[{**earlier, "rates": [0.001, 0.002]}]
    )
    assert "1 seed left out after looking (7)" in said


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


def test_budgets_and_rates_of_others_that_were_changed_after_looking_are_said(tmp_path: Path) -> None:
    """Of arms that were there; records of before these were written down say nothing, later looks do."""
    rates: dict[str, Any] = {"rates": [1e-3, 2e-3], "rate_seeds": [9], "primary": ["a", "b"]}
    then = comparison(tmp_path, arms={"a": {}, "b": {}}, **rates)
    a = {"rate_of": "b", "budget": {"tokens": 512}}
    arms = {"a": a, "b": {}, "new": {"rate_of": "b", "budget": {"kind": "flops", "of": "b"}}}
    now = comparison(tmp_path, arms=arms, budget={"kind": "flops", "flops": 5e6}, **rates)
    look = {"time": "yesterday", **json.loads(json.dumps(facts_of(then)))}
    changed = [
        "budget was changed after looking: it was {'kind': 'tokens'}, now it is {'kind': 'flops', 'flops': 5000000.0}.",
        "arms.a.budget was changed after looking: it was None, now it is {'kind': 'tokens', 'tokens': 512}.",
        "arms.a.rate_of was changed after looking: it was None, now it is b.",
    ]
    old = {key: value for key, value in look.items() if "budget" not in key and "rate_of" not in key}
    for shown, said in (([look], changed), ([old], []), ([old, look], changed)):
        assert [text for text in analyse(now, {}, shown).cautions if "after looking" in text] == said
    assert not any("after looking" in text for text in analyse(then, {}, [look]).cautions)


def test_what_is_left_out_after_looking_is_said(tmp_path: Path) -> None:
    """Fewer contrasts are corrected for less, so that one may become significant by leaving out others."""
    names = ("a", "b", "c", "d")
    arms: dict[str, Any] = {name: {"model.schedule": "uniform"} for name in names}
    asked: dict[str, Any] = {"primary": ["a", "b"], "rates": [1e-3, 2e-3]}
    then = comparison(tmp_path, arms=arms, contrasts=[["c", "b"], ["d", "b"]], rate_seeds=[9], **asked)
    look = {"time": "yesterday", **facts_of(then)}
    del arms["d"]
    now = comparison(tmp_path, arms=arms, contrasts=[["c", "a"]], rate_seeds=[9, 8], **asked)
    assert [text for text in analyse(now, {}, [look]).cautions if "after looking" in text] == [
        "Left out after looking (d, c minus b, d minus b): what is shown may have been chosen, and is corrected for "
        "less.",
        "Asked after looking: c minus a.",
        "rate_seeds were changed after looking: they were [9], now they are [9, 8].",
    ]
    again = {"time": "today", **facts_of(now)}
    assert "Asked after looking: c minus a." in analyse(now, {}, [look, again]).cautions
    assert not any("after looking" in text for text in analyse(then, {}, [look]).cautions)


def test_a_seed_that_nobody_trained_is_not_left_out(asked: Comparison) -> None:
    look = {"time": "yesterday", **facts_of(asked), "seeds": [*asked.seeds, 7]}
    assert "left out" in notes(asked, shown=[{**look, "ended": [*asked.seeds, 7]}])
    assert "left out" not in notes(asked, shown=[{**look, "ended": [*asked.seeds]}])


def test_arms_with_other_held_out_data_are_told(tmp_path: Path) -> None:
    arms: dict[str, Any] = {"uniform": {}, "prism": {"model.context": 16}, "third": {"optimizer.kind": "muon"}}
    said = analyse(comparison(tmp_path, arms=arms), {})
    same = "prism and uniform are not measured on the same held-out data (other model.context)"
    assert any(text.startswith(same) for text in said.cautions)
    assert not any("third and" in text for text in said.cautions)
    assert "One rate for all arms" not in " ".join(said.notes)  # a kind of optimizer has a rate of its own


def test_a_context_that_another_run_brings_along_counts(tmp_path: Path) -> None:
    """What the configuration of such an arm says of it is of no use, and nothing is said before it is known."""
    arms: dict[str, Any] = {"short": {"model.context": 16}, "deeper": {"model.start_from": "@short"}, "fresh": {}}
    found = comparison(tmp_path, arms=arms, primary=["deeper", "fresh"], contrasts=[["deeper", "short"]])
    short = result("short", 0, 3.0, plan={"context": 16})
    known = {RunKey(arm, 0): replace(short, arm=arm) for arm in ("short", "deeper")}

    def told(known: dict[RunKey, Result]) -> list[str]:
        cautions = analyse(found, known).cautions
        return [text.partition(" are not")[0] for text in cautions if "same held-out data" in text]

    assert told({}) == []
    assert told(known) == ["deeper and fresh"]


def test_arms_with_another_order_of_the_data_are_told(tmp_path: Path) -> None:
    arms: dict[str, Any] = {"first": {}, "second": {"model.start_from": "@first"}, "fresh": {}}
    contrasts: dict[str, Any] = {"primary": ["second", "fresh"], "contrasts": [["second", "first"]]}
    told = [text for text in analyse(comparison(tmp_path, arms=arms, **contrasts), {}).cautions if "orders" in text]
    assert [text.partition(" see ")[0] for text in told] == ["second and first"]


def test_what_an_arm_starts_from_is_told_with_what_it_cost(tmp_path: Path) -> None:
    arms: dict[str, Any] = {"first": {}, "second": {"model.start_from": "@first"}, "third": {"model.start_from": "run"}}
    found = comparison(tmp_path, arms=arms, primary=["second", "third"])
    told = [text for text in analyse(found, results({"first": [3.0, 3.0]})).cautions if "start" in text]
    assert told[:2] == [
        "second starts from the runs of first: what came before (1e+09 FLOPs) is in no budget.",
        "third starts from run: what came before is in no budget.",
    ]


def test_what_a_chain_of_arms_cost_is_told_of_its_last_one(tmp_path: Path) -> None:
    """Runs that diverged do not count."""
    arms: dict[str, Any] = {"a": {}, "b": {"model.start_from": "@a"}, "c": {"model.start_from": "@b"}}
    found = comparison(tmp_path, arms=arms, primary=["c", "a"])
    known = results({"a": [3.0, 3.0], "b": [2.0, 2.0]})
    known[RunKey("b", 1)] = result("b", 1, 2.0, scores={}, flops=1)
    told = [text for text in analyse(found, known).cautions if "start" in text]
    assert told[:2] == [
        "b starts from the runs of a: what came before (1e+09 FLOPs) is in no budget.",
        "c starts from the runs of b: what came before (2e+09 FLOPs) is in no budget.",
    ]


def test_a_start_that_all_arms_share_lessens_nothing(tmp_path: Path) -> None:
    given, base = ["--model.start_from", "first"], base_file(tmp_path)
    with pytest.raises(InputError, match=r"arms\.uniform\.model\.schedule = 'uniform': does nothing"):
        read_comparison(tables(), base, None, given)
    arms = {"uniform": {"optimizer.kind": "muon"}, "prism": {}}
    found = read_comparison(tables(arms=arms), base, None, given)
    analysis = analyse(found, results({"uniform": [3.0, 3.0]}))
    assert not [text for text in analysis.cautions if "start" in text]
    assert "uniform, prism start from first: what came before is in no budget." in analysis.notes


@pytest.mark.parametrize(("given", "said"), [("--data.seed", "seeds"), ("--optimizer.lr", "rates")])
def test_what_the_file_says_for_all_runs_cannot_be_overridden(tmp_path: Path, given: str, said: str) -> None:
    tuned = {"rates": [1e-3, 2e-3], "rate_seeds": [9]}
    with pytest.raises(InputError, match=f"{given[2:]} = 3.*is what the {said} of the file say"):
        read_comparison(tables(**tuned), base_file(tmp_path), None, [given, "3"])
    preset = {"preset": {"tiny": {given[2:]: 3}}}
    with pytest.raises(InputError, match=f"{given[2:]} = 3.*is what the {said} of the file say"):
        read_comparison(tables(**tuned, **preset), base_file(tmp_path), "tiny")


def test_policies_of_a_preset_are_a_list(tmp_path: Path) -> None:
    preset = {"preset": {"tiny": {"growth.policies": "depth"}}}
    with pytest.raises(InputError, match=r"growth\.policies = 'depth': must be a list of policies"):
        read_comparison(tables(**preset), base_file(tmp_path), "tiny")


def test_a_preset_that_brings_a_whole_plan_does_away_with_the_shape_of_an_arm(tmp_path: Path) -> None:
    arms = {"uniform": {"model.layers": 3, "model.plan": "plan.json", "eval.every": 2}, "prism": {}}
    preset = {"preset": {"warm": {"arms": {"uniform": {"model.start_from": "first"}}}}}
    found = read_comparison(tables(arms=arms, **preset), base_file(tmp_path), "warm")
    assert found.arms["uniform"].changes == {"eval.every": 2, "model.start_from": "first"}


def test_updates_that_no_arm_has_cannot_be_given(tmp_path: Path) -> None:
    given, base = ["--train.steps", "5"], base_file(tmp_path)
    flops = {"budget": {"kind": "flops", "flops": 1e9}}
    with pytest.raises(InputError, match=r"train\.steps = 5: does nothing: the budget says what every arm"):
        read_comparison(tables(**flops), base, None, given)
    with pytest.raises(InputError, match=r"train\.steps = 5: does nothing"):
        read_comparison(tables(budget={"kind": "tokens", "tokens": 1e6}), base, None, given)
    with pytest.raises(InputError, match=r"train\.steps = 3: does nothing"):
        read_comparison(tables(preset={"tiny": {"train.steps": 3}}, **flops), base, "tiny")
    grown = {
        "arms": {"uniform": {}, "prism": {"growth.policies": ["sgt"], "growth.sgt.window": 1}}
    }  # whose length is measured first
    assert read_comparison(tables(**grown, **flops), base, None, given).values["train.steps"] == 5
    of_one = {"budget": {"kind": "flops", "of": "prism"}}  # which has the updates of the configuration
    assert read_comparison(tables(**of_one), base, None, given).values["train.steps"] == 5


def test_budgets_and_rates_of_others_are_written_down(tmp_path: Path) -> None:
    arms = {**tables()["arms"], "more": {"rate_of": "prism", "budget": {"kind": "flops", "of": "prism"}}}
    grid: dict[str, Any] = {"sweep": {"train.batch_size": [2, 4]}, "rates": [1e-3, 2e-3], "rate_seeds": [9]}
    found = comparison(tmp_path, arms=arms, **grid)
    _, text = show(found, {}, tmp_path)
    own = "train.batch_size = 4, budget.kind = flops, budget.of = prism, rate_of = prism"
    assert re.search(rf"\| more @ batch_size=4 +\| {own} +\|", text)
    facts = json.loads((tmp_path / "comparison.json").read_text())["comparison"]
    assert facts["budget"] == {"kind": "tokens"}
    assert facts["arms.more.budget"] == {"kind": "flops", "of": "prism"}
    assert (facts["arms.more.rate_of"], facts["arms.prism.rate_of"]) == ("prism", None)


def test_power_is_told(asked: Comparison) -> None:
    known = results({"uniform": [3.0, 3.3, 3.1, 3.0], "prism": [3.1, 3.1, 3.2, 2.8]})
    said = notes(asked, known)
    assert re.search(r"with 4 pairs a difference of 0\.\d{4} would have been shown with 80 % chance", said)
    assert re.search(r"one as large as measured, -0\.0500, needs [\d,]+ seeds, [\d,]+ more", said)
    assert re.search(r"one as large as the margin, 0\.1, needs [\d,]+ seeds", said)


def test_what_corrected_contrasts_could_have_shown_is_reckoned_at_their_level(tmp_path: Path) -> None:
    arms = {**tables()["arms"], **{name: {"model.schedule": name} for name in ("reverse", "bump", "shuffle")}}
    losses = {**LOSSES, "bump": [3.0, 3.3, 3.1, 3.0], "shuffle": [3.1, 3.1, 3.2, 2.8]}
    primary, *others = analyse(comparison(tmp_path, arms=arms, seeds=[0, 1, 2, 3]), results(losses)).contrasts
    assert primary.level == 0.05
    assert [line.level for line in others] == pytest.approx([0.05 / 3] * 3)
    for line in (primary, *others):
        assert line.detectable is not None
        beyond = stats.t.ppf(1 - line.level / 2, 3)
        shift = line.detectable / line.difference.error
        assert stats.nct.sf(beyond, 3, shift) + stats.nct.cdf(-beyond, 3, shift) == pytest.approx(0.8, abs=1e-4)


def test_lines_of_the_launches_that_were_cut_off_are_passed_over(tmp_path: Path) -> None:
    asked, lines = comparison(tmp_path, seeds=[0, 1]), [json.dumps({"run": "runs/prism/seed-0", "jobs": 2})] * 2
    (tmp_path / "launches.jsonl").write_text(f'{{"run": "runs/pr{lines[0]}\n{lines[1]}\n{lines[0][:20]}')
    known = {key: run for key, run in results(LOSSES).items() if key.arm != "reverse" and key.seed < 2}
    analysis, _ = show(asked, known, tmp_path)
    assert any("Up to 2 runs went side by side" in note for note in analysis.notes)


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
    assert "prism ended more than 1 % from its budget of counted FLOPs with 2 of 2 seeds: +5.0 % at the most." in said
    assert "uniform ended" not in said
    assert "| +5.00 % " in markdown(found, analyse(found, known))


def test_budgets_of_another_arm_are_held_against_its_run_with_the_same_seed(tmp_path: Path) -> None:
    """Seed 1 spent what it was to; the mean over seeds would hide that seed 0 did not."""
    arms = {**tables()["arms"], "prism": {"model.schedule": "prism", "budget": {"kind": "flops", "of": "uniform"}}}
    found = comparison(tmp_path, arms=arms)
    spent = {"uniform": (1.00e9, 2.00e9), "prism": (1.03e9, 1.97e9)}
    known = {
        RunKey(arm, seed): result(arm, seed, 3.0 + seed, flops=flops)
        for arm, values in spent.items()
        for seed, flops in enumerate(values)
    }
    uniform, prism = analyse(found, known).arms
    assert uniform.off_budget == ()
    assert prism.off_budget == pytest.approx((0.03, -0.015))
    assert "prism ended more than 1 % from its budget of counted FLOPs with 2 of 2 seeds: +3.0 % at" in notes(
        found, known
    )


# --- text ------------------------------------------------------------------------------------------------------------


def test_markdown_tables_are_whole(asked: Comparison) -> None:
    text = markdown(asked, analyse(asked, results(LOSSES)))
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(blocks) == 6
    for block in blocks:
        bars = [[place for place, letter in enumerate(line) if letter == "|"] for line in block.splitlines()]
        assert all(line == bars[0] for line in bars)  # one below the other
    assert re.search(r"\| reverse +\| model\.schedule = reverse +\|", blocks[-1])


def test_bars_in_names_end_no_cell() -> None:
    """Values of a grid, which are anything, are part of the names of arms."""
    assert str(Table("", ("arm", "b"), [("uniform @ path=x|y", "1")])).splitlines()[2] == "| uniform @ path=x\\|y | 1 |"


def test_before_anything_is_done_there_is_a_text_all_the_same(asked: Comparison) -> None:
    text = markdown(asked, analyse(asked, {}))
    assert text.startswith("# question")
    assert "Not done yet: uniform (0 of 4 seeds), prism (0 of 4 seeds), reverse (0 of 4 seeds)." in text


def test_numbers_for_people() -> None:
    assert [short(v) for v in (None, 0, 999, 999.7, 1234, 1.5e15)] == ["-", "0", "999", "1 K", "1.23 K", "1.5 P"]
    assert [parts(v) for v in ((), (0.0,), (-0.012, 0.0071), (0.001, 0.001))] == [
        "-", "+0.00 %", "-1.20 to +0.71 %", "+0.10 %",
    ]  # fmt: skip
    assert [seconds(v) for v in (None, 0.0, 99.94, 99.96, 3661)] == ["-", "0.0 s", "99.9 s", "1:40", "1:01:01"]
