"""From the results of runs to what is said of them: a row for each arm, a line for each contrast, and notes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from meristem.comparison.file import Comparison, Contrast
from meristem.comparison.paired import PairedDifference, paired_difference
from meristem.comparison.planning import Results, Waiting, best_rate, seed_key
from meristem.comparison.results import Result
from meristem.comparison.verdicts import Verdict, detectable_difference, seeds_needed, verdicts
from meristem.wording import counted

Runs = Mapping[str, Mapping[int, Result]]  # by arm and seed

MATCHED = 0.01  # parts by which what was matched may differ without being said


@dataclass(frozen=True)
class ArmRow:
    """An arm in numbers, each the mean over its seeds; times are seconds."""

    arm: str
    seeds: int
    mean: float
    deviation: float | None
    rate: float
    steps: float
    tokens: float
    flops: float
    parameters: float
    tokens_per_second: float
    peak_memory: float | None
    training_seconds: float
    compilation_seconds: float
    evaluation_seconds: float
    saving_seconds: float
    reached: int  # seeds that reached the target loss
    seconds_to_target: float | None  # of these
    structures: dict[str, int]  # how many seeds ended with each
    against: PairedDifference | None  # the baseline of the primary contrast; None of itself


@dataclass(frozen=True)
class ContrastLine:
    """A contrast with its verdict, and what its seeds could have shown."""

    contrast: Contrast
    primary: bool
    difference: PairedDifference
    verdict: Verdict
    detectable: float  # with 80 % chance
    needed: int | None  # seeds to show a difference as large as the one that was measured
    by_seed: dict[int, float]  # the single differences


@dataclass(frozen=True)
class TimeLine:
    """A contrast in training seconds: without compilation, and with it."""

    contrast: Contrast
    without: PairedDifference
    without_verdict: Verdict
    compiled: PairedDifference
    compiled_verdict: Verdict


@dataclass(frozen=True)
class Analysis:
    """All that is said about a comparison."""

    arms: list[ArmRow]
    contrasts: list[ContrastLine]
    times: list[TimeLine]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def analyse(
    comparison: Comparison, results: Results, shown: Sequence[Mapping[str, Any]] = (), side_by_side: int = 1
) -> Analysis:
    """What the runs that are done say; `shown` tells of earlier looks, `side_by_side` how many ran at a time."""
    runs = reported(comparison, results)
    rows = [_row(comparison, arm, runs) for arm, by_seed in runs.items() if by_seed]
    lines = _contrasts(comparison, runs)
    times = _times([line.contrast for line in lines], runs)
    notes = [
        *_divergence_notes(comparison, results), *_rate_notes(comparison, results),
        *_budget_notes(comparison, rows), *_look_notes(comparison, runs, shown),
        *_power_notes(comparison, lines),
    ]  # fmt: skip
    if side_by_side > 1:
        notes.append(f"Up to {side_by_side} runs went side by side: seconds and tokens/s are of a shared machine.")
    return Analysis(rows, lines, times, notes)


def reported(comparison: Comparison, results: Results) -> dict[str, dict[int, Result]]:
    """The runs that are reported, by arm and seed; not those that diverged."""
    runs: dict[str, dict[int, Result]] = {arm: {} for arm in comparison.arms}
    for arm in comparison.arms:
        for seed in comparison.seeds:
            with suppress(Waiting):
                key = seed_key(comparison, arm, seed, results)
                if key in results and not results[key].diverged:
                    runs[arm][seed] = results[key]
    return runs


def _row(comparison: Comparison, arm: str, by_arm: Runs) -> ArmRow:
    runs = list(by_arm[arm].values())
    point = comparison.arms[arm].point
    baseline = next(c.baseline for c in comparison.primary if comparison.arms[c.baseline].point == point)
    scores = [run.scores[comparison.measure] for run in runs]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(run, name) for run in runs)

    target = comparison.target_loss
    reached = [s for run in runs if target is not None and (s := run.seconds_to(target)) is not None]
    memory = [run.peak_memory for run in runs if run.peak_memory is not None]
    return ArmRow(
        arm, len(runs), statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else None,
        runs[0].rate, mean("steps"), mean("tokens"), mean("flops"), mean("parameters"), mean("tokens_per_second"),
        statistics.fmean(memory) if memory else None, mean("training_seconds"), mean("compilation_seconds"),
        mean("evaluation_seconds"), mean("saving_seconds"), len(reached),
        statistics.fmean(reached) if reached else None, dict(Counter(run.structure for run in runs)),
        None if arm == baseline else _difference(comparison, by_arm, Contrast(arm, baseline)),
    )  # fmt: skip


def _contrasts(comparison: Comparison, runs: Runs) -> list[ContrastLine]:
    """The primary contrast, then the others, corrected for their number; on a grid all are corrected together."""
    families = [comparison.primary, comparison.secondary]
    if len(comparison.primary) > 1:
        families = [(*comparison.primary, *comparison.secondary)]
    lines: list[ContrastLine] = []
    for family in families:
        found = {c: d for c in family if (d := _difference(comparison, runs, c)) is not None}
        judged = verdicts(list(found.values()), comparison.margin, lower_is_better=comparison.lower_is_better)
        for (contrast, difference), verdict in zip(found.items(), judged, strict=True):
            lines.append(
                ContrastLine(
                    contrast, contrast in comparison.primary, difference, verdict,
                    detectable_difference(difference.deviation, difference.pairs),
                    seeds_needed(difference.mean, difference.deviation) if difference.mean else None,
                    {arm.seed: arm.scores[comparison.measure] - baseline.scores[comparison.measure]
                     for arm, baseline in _pairs(runs, contrast)},
                )
            )  # fmt: skip
    return lines


def _pairs(runs: Runs, contrast: Contrast) -> list[tuple[Result, Result]]:
    arm, baseline = runs[contrast.arm], runs[contrast.baseline]
    return [(arm[seed], baseline[seed]) for seed in arm if seed in baseline]


def _paired(pairs: Sequence[tuple[Result, Result]], value: Callable[[Result], float]) -> PairedDifference:
    return paired_difference([value(arm) for arm, _ in pairs], [value(baseline) for _, baseline in pairs])


def _difference(comparison: Comparison, runs: Runs, contrast: Contrast) -> PairedDifference | None:
    pairs = _pairs(runs, contrast)
    return _paired(pairs, lambda run: run.scores[comparison.measure]) if len(pairs) > 1 else None


def _times(contrasts: Sequence[Contrast], runs: Runs) -> list[TimeLine]:
    """Seconds of training against the baseline's, without and with compilation, each corrected for their number."""
    pairs = [_pairs(runs, contrast) for contrast in contrasts]
    without = [_paired(each, lambda run: run.training_seconds) for each in pairs]
    compiled = [_paired(each, lambda run: run.training_seconds + run.compilation_seconds) for each in pairs]
    found = zip(contrasts, without, verdicts(without), compiled, verdicts(compiled), strict=True)
    return [TimeLine(*line) for line in found]


# --- notes -----------------------------------------------------------------------------------------------------------


def _divergence_notes(comparison: Comparison, results: Results) -> list[str]:
    """Arms of which runs are missing because they diverged."""
    notes = []
    for arm in comparison.arms:
        lost = []
        for seed in comparison.seeds:
            with suppress(Waiting):
                key = seed_key(comparison, arm, seed, results)
                lost += [str(seed)] if key in results and results[key].diverged else []
        if lost:
            count = f"{len(lost)} of {counted(len(comparison.seeds), 'seed')}"
            notes.append(f"{arm} diverged with {count} ({', '.join(lost)}): what is said of it is of the others only.")
    return notes


def _rate_notes(comparison: Comparison, results: Results) -> list[str]:
    if not comparison.rates:
        rates = {comparison.arms[arm].changes.get("optimizer.lr") for arm in comparison.arms}
        if rates == {None}:
            return ["One rate for all arms: it was not tuned for any of them."]
        return ["Rates are those of the file: they were not tuned for each arm."]
    notes = [f"Each arm at its own best rate, chosen on {counted(len(comparison.rate_seeds), 'other seed')}."]
    edges = (comparison.rates[0], comparison.rates[-1])
    best = {}
    for arm in comparison.arms:
        with suppress(Waiting):
            best[arm] = best_rate(comparison, arm, results)
    if outer := [f"{arm} ({rate:g})" for arm, rate in best.items() if rate in edges]:
        notes.append(f"At the edge of the list, so that a better rate may lie beyond: {', '.join(outer)}.")
    return notes


def _budget_notes(comparison: Comparison, rows: Sequence[ArmRow]) -> list[str]:
    """What was matched, and where it differs although it should not."""
    notes = []
    by_name = {row.arm: row for row in rows}
    kinds = {arm: comparison.budget_of(arm) for arm in by_name}
    names = {"tokens": "tokens", "flops": "counted FLOPs", "seconds": "seconds of training, measured alone",
             "parameters": "parameters"}  # fmt: skip
    common = comparison.budget
    whose = f" (those of {common.of})" if common.of else ""
    notes.append(f"Arms have equal {names[common.kind]}{whose}, unless said otherwise.")
    for arm, budget in kinds.items():
        row = by_name[arm]
        if comparison.arms[arm].budget is not None:
            own = "those of the configuration" if budget.amount is None else f"{budget.amount:g}"
            whose = f"those of {budget.of}" if budget.of else own
            notes.append(f"{arm} has its own budget: {names[budget.kind]}, {whose}.")
        wanted = budget.amount
        if budget.of in by_name and budget.of is not None and budget.kind in ("flops", "parameters"):
            wanted = getattr(by_name[budget.of], budget.kind)
        if budget.kind in ("flops", "parameters") and wanted and abs(getattr(row, budget.kind) / wanted - 1) > MATCHED:
            part = getattr(row, budget.kind) / wanted - 1
            notes.append(f"{arm} ended {part:+.1%} from its budget of {names[budget.kind]}.")
    return notes


def _look_notes(comparison: Comparison, runs: Runs, shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has changed since results were first shown."""
    if not shown:
        return []
    notes, first = [], shown[0]
    added = [seed for seed in comparison.seeds if seed not in first["seeds"]]
    if added:
        when = f"when results were first shown ({first['time']})"
        notes.append(
            f"{counted(len(added), 'seed')} of {len(comparison.seeds)} added after looking: there were "
            f"{len(first['seeds'])} {when}, so the chance of a wrong verdict is above 5 %."
        )
    for name in ("primary", "margin", "measure"):
        now = facts_of(comparison)[name]
        if first.get(name, now) != now:
            notes.append(f"{name} was changed after looking: it was {first[name]}, now it is {now}.")
    return notes


def facts_of(comparison: Comparison) -> dict[str, Any]:
    """What should stand before results are seen, as plain values."""
    primary = [[contrast.arm, contrast.baseline] for contrast in comparison.primary]
    return {"seeds": list(comparison.seeds), "primary": primary, "margin": comparison.margin,
            "measure": comparison.measure}  # fmt: skip


def _power_notes(comparison: Comparison, lines: Sequence[ContrastLine]) -> list[str]:
    notes = []
    for line in (line for line in lines if line.primary):
        pairs, name = line.difference.pairs, f"{line.contrast.arm} minus {line.contrast.baseline}"
        notes.append(
            f"{name}: with {counted(pairs, 'pair')} a difference of {line.detectable:.4f} would have been shown with "
            "80 % chance."
        )
        if line.verdict.word == "no difference shown":
            needed = "more than 10,000" if line.needed is None else f"{line.needed:,}"
            notes.append(f"{name}: one as large as measured, {line.difference.mean:+.4f}, needs {needed} seeds.")
        if comparison.margin is not None:
            of_margin = seeds_needed(comparison.margin, line.difference.deviation)
            needed = "more than 10,000" if of_margin is None else f"{of_margin:,}"
            notes.append(f"{name}: one as large as the margin, {comparison.margin:g}, needs {needed} seeds.")
    return notes
