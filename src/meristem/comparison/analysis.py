"""From the results of runs to what is said of them: a row for each arm, a line for each contrast, and notes."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meristem.comparison.file import Comparison, Contrast, name_of
from meristem.comparison.paired import PairedDifference, paired_difference
from meristem.comparison.planning import (
    CLOSE,
    Results,
    Waiting,
    best_rate,
    best_trial,
    seed_key,
    stages_behind,
    trial_settings,
    wanted,
)
from meristem.comparison.results import Result
from meristem.comparison.verdicts import LEVEL, Verdict, detectable_difference, seeds_needed, verdicts
from meristem.wording import counted, listed

Runs = Mapping[str, Mapping[int, Result]]  # by arm and seed

SINGULAR = ("target_loss",)
COUNTED = {"flops": "counted FLOPs", "parameters": "parameters"}  # budgets that a run may miss


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
    off_budget: tuple[float, ...] = ()  # by what part each seed spent more than its budget, where that is counted
    settings: dict[str, Any] = field(default_factory=dict)  # that were found by a search


@dataclass(frozen=True)
class ContrastLine:
    """A contrast with its verdict, and what its seeds could have shown.

    `detectable` and `needed` are for a test at `level`: 5 %, or 5 % divided by the number of contrasts that are
    corrected together (the strictest step of Holm's correction).
    """

    contrast: Contrast
    primary: bool
    difference: PairedDifference
    verdict: Verdict
    detectable: float | None  # with 80 % chance; None without a spread
    needed: int | None  # seeds to show a difference as large as the one that was measured
    by_seed: dict[int, float]  # the single differences
    level: float


@dataclass(frozen=True)
class TimeLine:
    """A contrast in training seconds: without compilation, and with it; no verdict where runs shared the machine."""

    contrast: Contrast
    without: PairedDifference
    without_verdict: Verdict | None
    compiled: PairedDifference
    compiled_verdict: Verdict | None


@dataclass(frozen=True)
class Analysis:
    """All that is said about a comparison."""

    arms: list[ArmRow]
    contrasts: list[ContrastLine]
    times: list[TimeLine]
    cautions: list[str]  # what lessens the verdicts
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def analyse(
    comparison: Comparison, results: Results, shown: Sequence[Mapping[str, Any]] = (), side_by_side: int = 1
) -> Analysis:
    """What the runs that are done say; `shown` tells of earlier looks, `side_by_side` how many ran at a time."""
    runs = reported(comparison, results)
    rows = [_row(comparison, arm, runs, results) for arm, by_seed in runs.items() if by_seed]
    lines = _contrasts(comparison, runs)
    times = _times([line.contrast for line in lines], runs, len(comparison.primary) + len(comparison.secondary))
    begun, begun_alike = _source_notes(comparison, results)
    cautions = [*_missing_notes(comparison, results), *_divergence_notes(comparison, results),
                *begun, *_held_out_notes(comparison, results), *_order_notes(comparison),
                *_look_notes(comparison, shown),
                *_spread_notes(lines)]  # fmt: skip
    notes = [
        *begun_alike,
        *_tuning_notes(comparison, results),
        *_budget_notes(comparison, rows),
        *_power_notes(comparison, lines),
    ]
    if side_by_side > 1:
        notes.append(
            f"Up to {side_by_side} runs went side by side: seconds and tokens/s are of a shared machine, and time is "
            "not judged."
        )
        times = [replace(line, without_verdict=None, compiled_verdict=None) for line in times]
    return Analysis(rows, lines, times, cautions, notes)


def reported(comparison: Comparison, results: Results) -> dict[str, dict[int, Result]]:
    """The runs that are reported, by arm and seed; not those that diverged."""
    return {
        arm: {seed: run for seed, run in _ended(comparison, arm, results).items() if not run.diverged}
        for arm in comparison.arms
    }


def _row(comparison: Comparison, arm: str, by_arm: Runs, results: Results) -> ArmRow:
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
        _off_budget(comparison, arm, results, runs), _found_settings(comparison, arm, results),
    )  # fmt: skip


def _off_budget(comparison: Comparison, arm: str, results: Results, runs: Sequence[Result]) -> tuple[float, ...]:
    """By what part each run spent more than it was to, where that is counted and not the length itself."""
    kind = comparison.budget_of(arm).kind
    if kind not in COUNTED:
        return ()
    keys = [seed_key(comparison, arm, run.seed, results) for run in runs]
    return tuple(getattr(results[key], kind) / wanted(comparison, key, results) - 1 for key in keys)


def _found_settings(comparison: Comparison, arm: str, results: Results) -> dict[str, Any]:
    if not comparison.is_searched(arm):
        return {}
    return trial_settings(comparison, arm, best_trial(comparison, arm, results), results)


def _contrasts(comparison: Comparison, runs: Runs) -> list[ContrastLine]:
    """The primary contrast, then the others, corrected for their number; on a grid all are corrected together."""
    families = [comparison.primary, comparison.secondary]
    if len(comparison.primary) > 1:
        families = [(*comparison.primary, *comparison.secondary)]
    lines: list[ContrastLine] = []
    for family in families:
        found = {c: d for c in family if (d := _difference(comparison, runs, c)) is not None}
        better, level = comparison.lower_is_better, LEVEL / max(1, len(family))
        judged = verdicts(list(found.values()), comparison.margin, among=len(family), lower_is_better=better)
        for (contrast, difference), verdict in zip(found.items(), judged, strict=True):
            spread = difference.has_spread
            lines.append(
                ContrastLine(
                    contrast, contrast in comparison.primary, difference, verdict,
                    detectable_difference(difference.deviation, difference.pairs, level) if spread else None,
                    seeds_needed(difference.mean, difference.deviation, level) if difference.mean and spread else None,
                    {arm.seed: arm.scores[comparison.measure] - baseline.scores[comparison.measure]
                     for arm, baseline in _pairs(runs, contrast)},
                    level,
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


def _times(contrasts: Sequence[Contrast], runs: Runs, among: int) -> list[TimeLine]:
    """Seconds of training against the baseline's, without and with compilation, each corrected for their number."""
    pairs = [_pairs(runs, contrast) for contrast in contrasts]
    without = [_paired(each, lambda run: run.training_seconds) for each in pairs]
    compiled = [_paired(each, lambda run: run.training_seconds + run.compilation_seconds) for each in pairs]
    judged = [verdicts(differences, among=among) for differences in (without, compiled)]
    return [TimeLine(*line) for line in zip(contrasts, without, judged[0], compiled, judged[1], strict=True)]


# --- notes -----------------------------------------------------------------------------------------------------------


def _ended(comparison: Comparison, arm: str, results: Results) -> dict[int, Result]:
    """The reported runs of an arm that have ended, also by diverging."""
    with suppress(Waiting):
        keys = {seed: seed_key(comparison, arm, seed, results) for seed in comparison.seeds}
        return {seed: results[key] for seed, key in keys.items() if key in results}
    return {}


def _missing_notes(comparison: Comparison, results: Results) -> list[str]:
    """What is not done yet."""
    total, seeds = len(comparison.seeds), counted(len(comparison.seeds), "seed")
    done = {arm: len(_ended(comparison, arm, results)) for arm in comparison.arms}
    missing = [f"{arm} ({count} of {seeds})" for arm, count in done.items() if count < total]
    return [f"Not done yet: {', '.join(missing)}."] if missing else []


def _divergence_notes(comparison: Comparison, results: Results) -> list[str]:
    """Arms of which runs are missing because they diverged, or took after one that did."""
    notes = []
    for arm in comparison.arms:
        runs = [run for run in _ended(comparison, arm, results).values() if run.diverged]
        for lost, what in ((False, "diverged"), (True, "could not be run, for want of what it takes after,")):
            seeds = [str(run.seed) for run in runs if run.lost == lost]
            if seeds:
                count = f"{len(seeds)} of {counted(len(comparison.seeds), 'seed')} ({', '.join(seeds)})"
                notes.append(f"{arm} {what} with {count}: what is said of it is of the others only.")
    return notes


def _source_notes(comparison: Comparison, results: Results) -> tuple[list[str], list[str]]:
    """Arms that begin with what others have learnt, as their budget does not have what that had cost.

    Those that not all arms begin with alike, and the one that all do.
    """
    heirs: dict[tuple[str | None, Any], list[str]] = {}
    for arm in comparison.arms:
        source = comparison.source(arm)
        begins = source or {**comparison.values, **comparison.arms[arm].changes}.get("model.start_from")
        if begins is not None:
            heirs.setdefault((source, begins), []).append(arm)
    some, alike = list[str](), list[str]()
    for (source, begins), arms in heirs.items():
        spent = None if source is None else _spent_before(comparison, arms[0], results)
        cost = "" if spent is None else f" ({spent:.3g} FLOPs)"
        whose = begins if source is None else f"the runs of {source}"
        verb = "starts" if len(arms) == 1 else "start"
        told = some if len(arms) < len(comparison.arms) else alike
        told.append(f"{listed(arms, 8)} {verb} from {whose}: what came before{cost} is in no budget.")
    return some, alike


def _spent_before(comparison: Comparison, arm: str, results: Results) -> float | None:
    """FLOPs, in the mean, of the runs that an arm starts from and of those before them; None if they are not known."""
    total = 0.0
    for source in comparison.sources(arm):
        spent = [run.flops for run in _ended(comparison, source, results).values() if not run.diverged]
        if not spent:
            return None
        total += statistics.fmean(spent)
    return total


def _order_notes(comparison: Comparison) -> list[str]:
    """Contrasts of arms that do not see the data in the same order, as one starts from another."""
    return [
        f"{contrast.arm} and {contrast.baseline} see the data in different orders, as others start from one of them: "
        "their pairs have less in common."
        for contrast in (*comparison.primary, *comparison.secondary)
        if stages_behind(comparison, contrast.arm) != stages_behind(comparison, contrast.baseline)
    ]


def _held_out_notes(comparison: Comparison, results: Results) -> list[str]:
    """Arms whose loss is not of the same held-out text as that of their baseline."""
    notes = []
    for contrast in (*comparison.primary, *comparison.secondary):
        mine, theirs = (_held_out_text(comparison, arm, results) for arm in (contrast.arm, contrast.baseline))
        if differ := [key for key in mine if key in theirs and mine[key] != theirs[key]]:
            notes.append(
                f"{contrast.arm} and {contrast.baseline} are not measured on the same held-out data (other "
                f"{listed(differ, 2)}): their difference says little of the models."
            )
    return notes


def _held_out_text(comparison: Comparison, arm: str, results: Results) -> dict[str, Any]:
    """What the held-out text of an arm depends on, as far as it is known: a plan brings its context along."""
    values = {**comparison.values, **comparison.arms[arm].changes}
    plans = [run.plan for run in _ended(comparison, arm, results).values() if run.plan]
    known = {"data.path": values["data.path"]}
    if plans:
        known["model.context"] = plans[0]["context"]
    elif values.get("model.plan") is None and values.get("model.start_from") is None:
        known["model.context"] = values["model.context"]
    return known


def _tuning_notes(comparison: Comparison, results: Results) -> list[str]:
    """Whether arms were tuned, and on what."""
    others = counted(len(comparison.tuning_seeds), "other seed")
    if comparison.search is not None:
        return _search_notes(comparison, results, others)
    if not comparison.rates:
        changed = {key for arm in comparison.arms.values() for key in arm.changes}
        if not changed & {"optimizer.lr", "optimizer.kind"}:  # a kind brings a rate along
            return ["One rate for all arms: it was not tuned for any of them."]
        return ["Rates are those of the file: they were not tuned for each arm."]
    short = "" if comparison.rate_length == 1 else f", in runs of {comparison.rate_length:g} of the length"
    notes = [f"Each arm at its own best rate, chosen on {others}{short}."]
    taken = [arm for arm in comparison.arms if comparison.tuned_arm(arm) != arm]
    notes += [f"{arm} has the rate of {comparison.tuned_arm(arm)}: none was tried with it." for arm in taken]
    edges = (comparison.rates[0], comparison.rates[-1])
    best = {}
    for arm in (arm for arm in comparison.arms if arm not in taken):
        with suppress(Waiting):
            best[arm] = best_rate(comparison, arm, results)
    if outer := [f"{arm} ({rate:g})" for arm, rate in best.items() if rate in edges]:
        notes.append(f"At the edge of the list, so that a better rate may lie beyond: {', '.join(outer)}.")
    return notes


def _search_notes(comparison: Comparison, results: Results, others: str) -> list[str]:
    """What a search has found for each arm, and which arms it has left as they were."""
    assert comparison.search is not None
    notes = []
    for arm in filter(comparison.is_searched, comparison.arms):
        with suppress(Waiting):
            best = best_trial(comparison, arm, results)
            found = ", ".join(f"{key} = {value}" for key, value in _found_settings(comparison, arm, results).items())
            trials = counted(comparison.search.trials, "trial")
            notes.append(f"{arm} at its own best of {trials} on {others}, number {best}: {found}.")
    if untouched := [arm for arm in comparison.arms if not comparison.is_searched(arm)]:
        notes.append(f"Not searched, so that contrasts with searched arms favour these: {', '.join(untouched)}.")
    return notes


def _budget_notes(comparison: Comparison, rows: Sequence[ArmRow]) -> list[str]:
    """What was matched, and where it differs although it should not."""
    names = {"tokens": "tokens", "seconds": "seconds of training, measured alone", **COUNTED}
    common = comparison.budget
    whose = f" (those of {common.of})" if common.of else ""
    notes = [f"Arms have equal {names[common.kind]}{whose}, unless said otherwise."]
    for row in rows:
        budget = comparison.budget_of(row.arm)
        if comparison.arms[row.arm].budget is not None:
            own = "those of the configuration" if budget.amount is None else f"{budget.amount:g}"
            whose = f"those of {budget.of}" if budget.of else own
            notes.append(f"{row.arm} has its own budget: {names[budget.kind]}, {whose}.")
        off = [part for part in row.off_budget if abs(part) > CLOSE]
        if off:
            notes.append(
                f"{row.arm} ended more than {100 * CLOSE:g} % from its budget of {names[budget.kind]} with {len(off)} "
                f"of {counted(row.seeds, 'seed')}: {100 * max(off, key=abs):+.1f} % at the most."
            )
    return notes


def _look_notes(comparison: Comparison, shown: Sequence[Mapping[str, Any]]) -> list[str]:
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
    if left := {seed for look in shown for seed in look.get("ended", look["seeds"])} - {*comparison.seeds}:
        notes.append(
            f"{counted(len(left), 'seed')} left out after looking ({', '.join(map(str, sorted(left)))}): what is "
            "shown may have been chosen."
        )
    facts = facts_of(comparison)
    arms, contrasts = facts.pop("arms"), facts.pop("contrasts")
    looks = [look for look in shown if "arms" in look and "contrasts" in look]  # older ones do not say
    gone = [name for look in looks for name in look["arms"] if name not in arms]
    asked = [*contrasts, *facts["primary"]]
    gone += [" minus ".join(pair) for look in looks for pair in look["contrasts"] if pair not in asked]
    if gone:
        names = listed(list(dict.fromkeys(gone)), 4)
        notes.append(
            f"Left out after looking ({names}): what is shown may have been chosen, and is corrected for less."
        )
    new = []
    for pair in contrasts:  # by the first look at both of its arms
        look = next((look for look in looks if {*pair} <= {*look["arms"]}), None)
        if look is not None and pair not in [*look["contrasts"], *look["primary"]]:
            new.append(" minus ".join(pair))
    if new:
        notes.append(f"Asked after looking: {listed(new, 4)}.")
    for name, now in facts.items():
        then = next((look[name] for look in shown if name in look), now)  # an older look may not have it
        if name != "seeds" and then != now:
            was, it, is_ = (
                ("was", "it", "is") if name in SINGULAR or not name.endswith("s") else ("were", "they", "are")
            )
            notes.append(f"{name} {was} changed after looking: {it} {was} {then}, now {it} {is_} {now}.")
    return notes


def facts_of(comparison: Comparison) -> dict[str, Any]:
    """What should stand before results are seen, as plain values."""
    primary, others = (
        [[contrast.arm, contrast.baseline] for contrast in contrasts]
        for contrasts in (comparison.primary, comparison.secondary)
    )
    own = {f"arms.{name_of(arm.name)}.{key}": v for arm in comparison.arms.values() for key, v in arm.facts.items()}
    search = {} if comparison.search is None else asdict(comparison.search)
    searched = {f"search.{key}": value for key, value in search.items() if key != "trials"}
    facts = {"seeds": comparison.seeds, "arms": list(comparison.arms), "primary": primary, "contrasts": others,
             "margin": comparison.margin, "measure": comparison.measure, "target_loss": comparison.target_loss,
             "rates": comparison.rates, "rate_seeds": comparison.rate_seeds, "rate_length": comparison.rate_length,
             "trials": search.get("trials", 0), **searched, "budget": comparison.budget.table, **own}  # fmt: skip
    plain: dict[str, Any] = json.loads(json.dumps(facts))  # as it comes back from the record: lists, no tuples
    return plain


def _spread_notes(lines: Sequence[ContrastLine]) -> list[str]:
    """Contrasts that no test can judge."""
    return [
        f"{line.contrast.arm} minus {line.contrast.baseline} is {line.difference.mean:+.4f} in all "
        f"{line.difference.pairs} pairs: without a spread there is nothing to test it by. Do the seeds change anything?"
        for line in lines
        if not line.difference.has_spread
    ]


def _power_notes(comparison: Comparison, lines: Sequence[ContrastLine]) -> list[str]:
    notes = []
    for line in (line for line in lines if line.primary and line.detectable is not None):
        pairs, name = line.difference.pairs, f"{line.contrast.arm} minus {line.contrast.baseline}"
        notes.append(
            f"{name}: with {counted(pairs, 'pair')} a difference of {line.detectable:.4f} would have been shown with "
            "80 % chance."
        )
        if line.verdict.word == "no difference shown":
            needed = _in_seeds(line.needed, pairs)
            notes.append(f"{name}: one as large as measured, {line.difference.mean:+.4f}, needs {needed}.")
        if comparison.margin is not None:
            needed = _in_seeds(seeds_needed(comparison.margin, line.difference.deviation, line.level), pairs)
            notes.append(f"{name}: one as large as the margin, {comparison.margin:g}, needs {needed}.")
    return notes


def _in_seeds(needed: int | None, pairs: int) -> str:
    """How many seeds are needed, and how many that is more than there are."""
    if needed is None:
        return "more than 10,000 seeds"
    return f"{counted(needed, 'seed')}, {needed - pairs:,} more" if needed > pairs else f"{counted(needed, 'seed')}"
