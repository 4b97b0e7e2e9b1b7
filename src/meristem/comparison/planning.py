"""Which runs a comparison is made of, and what each is trained with. Nothing here runs anything."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from meristem.comparison.file import MEASURING_SEED, Comparison, arm_values, folder_name
from meristem.comparison.results import Result, is_carried
from meristem.comparison.search import FIRST, suggested
from meristem.config import Config, build_config
from meristem.config.growth import table_name
from meristem.data import LabelledData, TokenData, open_data
from meristem.devices import choose_device
from meristem.errors import InputError, RunError
from meristem.plan import Plan
from meristem.training.growth_from_config import starting_plan
from meristem.training.length import with_steps
from meristem.training.tasks import Task, check_kind, initial_plan, make_task

MEASURED = 60  # updates in which the speed of an arm that does not grow is measured
ROUNDS = 3  # of measuring an arm that grows, each with the length that the one before it points to
NEAR = 0.03  # parts by which a measured run may miss the budget: the length is then reckoned from it
CLOSE = 0.01  # parts by which what is matched may differ
OTHER_ORDER = (
    MEASURING_SEED  # no seed of a file is as large: between the seeds of the data of runs that start from one another
)
TOKENS = (
    "train.batch_size",
    "model.context",
    "model.plan",
    "model.start_from",
    "data.path",
)  # what the tokens of an update depend on


@dataclass(frozen=True)
class RunKey:
    """A run of a comparison. One that is `measuring` only tells how long an arm must be to spend its budget."""

    arm: str
    seed: int
    rate: float | None = None  # None: that of the configuration
    trial: int | None = None  # of a search
    measuring: int = 0  # the round, from 1 on

    def __str__(self) -> str:
        rate = "" if self.rate is None else f", rate {self.rate:g}"
        trial = "" if self.trial is None else f", trial {self.trial}"
        which = f"measured (round {self.measuring})" if self.measuring else f"seed {self.seed}"
        return f"{self.arm}{rate}{trial}, {which}"

    @property
    def path(self) -> Path:
        """Where its folder lies below that of the comparison."""
        arm = folder_name(self.arm)
        if self.measuring:
            return Path("measure") / arm / f"round-{self.measuring}"
        rate = () if self.rate is None else (f"rate-{self.rate:g}",)
        trial = () if self.trial is None else (f"trial-{self.trial}",)
        return Path("runs", arm, *rate, *trial, f"seed-{self.seed}")


Results = Mapping[RunKey, Result]


class Waiting(Exception):
    """A run cannot begin yet: it takes after one that has not ended."""


class Lost(RunError):
    """A run cannot be made: it takes after one that has diverged."""


def timed_arms(comparison: Comparison) -> list[str]:
    """The arms whose speed is measured, for which a run has the machine to itself."""
    arms = []
    for arm in comparison.arms:
        budget = comparison.budget_of(arm)
        if budget.kind == "seconds":
            arms += [arm] if budget.of is None else [arm, budget.of]
    return list(dict.fromkeys(arms))


def measuring_keys(comparison: Comparison, results: Results) -> list[RunKey]:
    """The runs, known by now, by which lengths are found: of arms matched in seconds, and in FLOPs if they grow."""
    matched = [a for a in comparison.arms if comparison.budget_of(a).kind == "flops"]
    grown = [a for a in matched if comparison.may_grow(a) and not comparison.spends_flops(a)]
    keys = []
    for arm in dict.fromkeys([*timed_arms(comparison), *grown]):
        for number in range(1, ROUNDS + 1):
            with suppress(Waiting):
                if number == 1 or _off_length(comparison, arm, results, number - 1):
                    keys.append(_measuring(arm, number))
    return keys


def tuning_keys(comparison: Comparison) -> list[RunKey]:
    """The runs on which each arm's rate, or its settings, are chosen."""
    if comparison.search is not None:
        return [
            RunKey(arm, seed, trial=trial)
            for trial in range(comparison.search.trials)
            for arm in filter(comparison.is_searched, comparison.arms)
            for seed in comparison.search.seeds
        ]
    return [
        RunKey(arm.name, seed, rate)
        for seed in comparison.rate_seeds
        for arm in comparison.arms.values()
        if arm.rate_of is None
        for rate in comparison.rates
    ]


def tuning_score(comparison: Comparison, results: Results, key: RunKey) -> float:
    """What a rate, or a trial, came to in the mean over the seeds it was tried with; lower is better."""
    sign = 1 if comparison.lower_is_better else -1
    runs = [_known(results, replace(key, seed=seed)) for seed in comparison.tuning_seeds]
    return statistics.fmean(math.inf if run.diverged else sign * run.scores[comparison.measure] for run in runs)


def best_rate(comparison: Comparison, arm: str, results: Results) -> float:
    """The rate at which an arm, or the one that it has its rate of, was best in the mean over `rate_seeds`."""
    arm = comparison.tuned_arm(arm)
    by_rate = {rate: tuning_score(comparison, results, RunKey(arm, 0, rate)) for rate in comparison.rates}
    if min(by_rate.values()) == math.inf:
        raise RunError(f"{arm}: diverged at every rate of the list")
    return min(by_rate, key=by_rate.__getitem__)


def best_trial(comparison: Comparison, arm: str, results: Results) -> int:
    """The trial of a search in which an arm was best."""
    assert comparison.search is not None
    scores = [tuning_score(comparison, results, RunKey(arm, 0, trial=n)) for n in range(comparison.search.trials)]
    if min(scores) == math.inf:
        raise RunError(f"{arm}: diverged in every trial")
    return scores.index(min(scores))


def trial_settings(comparison: Comparison, arm: str, trial: int, results: Results) -> dict[str, Any]:
    """What a trial tries; after the first ones it waits for those before it."""
    assert comparison.search is not None
    before = range(trial if trial >= FIRST else 0)
    scores = tuple(tuning_score(comparison, results, RunKey(arm, 0, trial=number)) for number in before)
    return suggested(comparison.search, scores, trial)


def seed_key(comparison: Comparison, arm: str, seed: int, results: Results) -> RunKey:
    """A run that is reported, at the arm's own best rate or settings where these are compared."""
    if comparison.is_searched(arm):
        return RunKey(arm, seed, trial=best_trial(comparison, arm, results))
    return RunKey(arm, seed, best_rate(comparison, arm, results) if comparison.rates else None)


def count_of_runs(comparison: Comparison, results: Results) -> int:
    """All runs of a comparison that are known by now, those that measure and choose included."""
    chosen = len(measuring_keys(comparison, results)) + len(tuning_keys(comparison))
    return chosen + len(comparison.arms) * len(comparison.seeds)


def known_keys(comparison: Comparison, results: Results) -> list[RunKey]:
    """All runs that are known by now, in the order in which they are best made."""
    keys = [*measuring_keys(comparison, results), *tuning_keys(comparison)]
    for seed in comparison.seeds:
        for arm in comparison.arms:
            with suppress(Waiting):
                keys.append(seed_key(comparison, arm, seed, results))
    return keys


def possible_keys(comparison: Comparison) -> list[RunKey]:
    """All runs that a comparison may come to have, whatever is measured and chosen."""
    keys = [_measuring(arm, number) for arm in comparison.arms for number in range(1, ROUNDS + 1)]
    for arm in comparison.arms:
        searched = comparison.search if comparison.is_searched(arm) else None
        trials = (None,) if searched is None else range(searched.trials)
        keys += [
            RunKey(arm, seed, rate, trial)
            for seed in (*comparison.seeds, *comparison.tuning_seeds)
            for rate in comparison.rates or (None,)
            for trial in trials
        ]
    return keys


def configuration(comparison: Comparison, key: RunKey, results: Results) -> Config:
    """What a run is trained with; `Waiting` if that depends on a run that has not ended yet."""

    def resolve(other: str, what: str) -> Any:
        return _followed(comparison, key, other, results).reference(what)

    values = arm_values(comparison, key.arm, resolve)
    order = key.seed + OTHER_ORDER * stages_behind(comparison, key.arm)
    values |= {"train.seed": key.seed, "data.seed": order, "checkpoint.keep": 1}
    if key.rate is not None:
        values["optimizer.lr"] = key.rate
    if key.trial is not None:
        values |= trial_settings(comparison, key.arm, key.trial, results)
    flops = wanted(comparison, key, results) if comparison.spends_flops(key.arm) else None
    values |= comparison.length_values(key.arm, flops)
    config = build_config({**values, **_own_seeds(build_config(values), key.seed)})
    return _matched(comparison, key, config, results)


def source_key(comparison: Comparison, key: RunKey, results: Results) -> RunKey | None:
    """The run that one starts from, if it does."""
    other = comparison.source(key.arm)
    return None if other is None else _beside(comparison, key, other, results)


def stages_behind(comparison: Comparison, arm: str) -> int:
    """How many arms, one after the other, start from the runs of an arm: 0 of those that most comparisons have.

    Arms with as many see the data in the same order, and a second budget brings other batches than the first.
    """
    heirs = (other for other in comparison.arms if comparison.source(other) == arm)
    return max((1 + stages_behind(comparison, heir) for heir in heirs), default=0)


def _own_seeds(config: Config, seed: int) -> dict[str, int]:
    """The seeds of policies that have one, and of a schedule that is drawn."""
    policies = zip(config.growth.policies, config.build_policies(), strict=True)
    seeds = {f"growth.{table_name(name)}.seed": seed for name, policy in policies if hasattr(policy, "seed")}
    return seeds | ({"model.shuffle_seed": seed} if config.model.schedule == "shuffle" else {})


def _known(results: Results, key: RunKey) -> Result:
    if key not in results:
        raise Waiting(str(key))
    return results[key]


def _beside(comparison: Comparison, key: RunKey, other: str, results: Results) -> RunKey:
    """The run of another arm that one takes after, with the same seed.

    While rates are chosen it has the same rate, but one that another starts from its own best one.
    """
    if key.measuring:
        return seed_key(comparison, other, comparison.seeds[0], results)
    if key.seed in comparison.rate_seeds:
        own = other == comparison.source(key.arm)
        return RunKey(other, key.seed, best_rate(comparison, other, results) if own else key.rate)
    return seed_key(comparison, other, key.seed, results)


def _followed(comparison: Comparison, key: RunKey, other: str, results: Results) -> Result:
    """The run of another arm that one takes after, if it came to an end."""
    found = _known(results, _beside(comparison, key, other, results))
    if found.diverged:
        raise Lost(f"{key}: cannot be run, as {other} diverged, which it takes after")
    return found


# --- budgets ---------------------------------------------------------------------------------------------------------


def _matched(comparison: Comparison, key: RunKey, config: Config, results: Results) -> Config:
    """The configuration with the length, or the size, that its budget says."""
    kind, spends = comparison.budget_of(key.arm).kind, comparison.spends_flops(key.arm)
    grows = comparison.may_grow(key.arm)
    length = _length(comparison, key)
    if key.measuring == 1 and not grows:
        return _long(config, min(MEASURED, config.train.steps))
    if kind == "parameters":
        sized = config if key.measuring else _sized(config, wanted(comparison, key, results))
        return _long(sized, math.ceil(length * sized.train.steps))
    if kind == "tokens":
        updates = length * _updates_of_tokens(comparison, key.arm, config)
    elif key.measuring == 1:
        return config
    elif kind == "flops" and (spends or not grows):
        updates = wanted(comparison, key, results) / _step_flops(config)
    else:
        rounds = key.measuring - 1 if key.measuring else _rounds(comparison, key.arm, results)
        updates = _measured_updates(comparison, key, results, rounds)
    if updates < 1:
        raise _too_little(comparison, key, updates, wanted(comparison, key, results))
    return config if spends else _long(config, round(updates) if kind == "seconds" else math.ceil(round(updates, 6)))


def _too_little(comparison: Comparison, key: RunKey, updates: float, goal: float) -> InputError:
    """The error for a run that may spend less than an update needs, by the key of the file that says so."""
    budget, field, length = comparison.budget_of(key.arm), comparison.budget_field(key.arm), _length(comparison, key)
    needed = f"less than {key.arm} needs for one update, {goal / updates:.3g}"
    if budget.of is not None:
        return InputError(f"{field}.of", budget.of, f"spent {goal:.3g} {budget.kind}, {needed}")
    if updates >= length:
        expected = f"leaves {key.arm} {updates:.2g} of an update; must be about {length / updates:.3g} or more"
        return InputError("rate_length", comparison.rate_length, expected)
    if budget.amount is None:
        expected = f"are fewer tokens than one update of {key.arm} has; must be more, or its batch smaller"
        return InputError("train.steps", comparison.values["train.steps"], expected)
    return InputError(f"{field}.{budget.kind}", budget.amount, f"is {needed}")


def _length(comparison: Comparison, key: RunKey) -> float:
    """How long a run is, as a part of those that are reported: rates may be tried in shorter ones."""
    return comparison.rate_length if key.seed in comparison.rate_seeds else 1.0


def wanted(comparison: Comparison, key: RunKey, results: Results) -> float:
    """What a run may spend, of the kind of its budget."""
    budget = comparison.budget_of(key.arm)
    if budget.of is None:
        shorter = 1.0 if budget.kind == "parameters" else _length(comparison, key)
        return shorter * float(budget.amount or 0)
    of = _followed(comparison, key, budget.of, results)
    if budget.kind == "seconds":
        pace = _known(results, _measuring(of.arm, 1))
        if pace.diverged:
            raise RunError(f"{pace.folder}: diverged, so that no other arm can be matched to its seconds")
        return of.steps * pace.training_seconds / pace.steps
    return float(getattr(of, budget.kind))


def _measuring(arm: str, number: int) -> RunKey:
    return RunKey(arm, MEASURING_SEED, measuring=number)


def _spent(comparison: Comparison, run: Result) -> float:
    """What a run has spent of its budget."""
    if run.diverged:
        raise RunError(f"{run.folder}: diverged, so that the length of {run.arm} cannot be found")
    return run.training_seconds if comparison.budget_of(run.arm).kind == "seconds" else float(run.flops)


def _measured_updates(comparison: Comparison, key: RunKey, results: Results, rounds: int) -> float:
    """The updates in which an arm spends what it may: on a straight line between the measured runs next to that."""
    goal = wanted(comparison, key, results)
    measured = [_known(results, _measuring(key.arm, number)) for number in range(1, rounds + 1)]
    points = sorted([(0.0, 0), *((_spent(comparison, run), run.steps) for run in measured)])
    above = next((place for place, (spent, _) in enumerate(points) if spent >= goal), None)
    (low, few), (high, many) = (points[0], points[-1]) if above is None else points[above - 1 : above + 1]
    return few + (many - few) * (goal - low) / (high - low)


def _off_length(comparison: Comparison, arm: str, results: Results, rounds: int) -> bool:
    """Whether all rounds so far were of a length at which an arm that grows spends far from what it may.

    What grows, grows at other times in a longer run: its cost is not in proportion to its length.
    """
    if not comparison.may_grow(arm) or comparison.budget_of(arm).kind not in ("flops", "seconds"):
        return False
    goal = wanted(comparison, _measuring(arm, 1), results)
    measured = [_known(results, _measuring(arm, number)) for number in range(1, rounds + 1)]
    return all(abs(_spent(comparison, run) / goal - 1) > NEAR for run in measured)


def _rounds(comparison: Comparison, arm: str, results: Results) -> int:
    """How many rounds an arm is measured in; `Waiting` while that is open."""
    numbers = range(1, ROUNDS)
    return next((n for n in numbers if not _off_length(comparison, arm, results, n)), ROUNDS)


def _updates_of_tokens(comparison: Comparison, arm: str, config: Config) -> float:
    """The updates in which an arm sees the tokens of its budget: those of the base configuration, if none are named."""
    tokens = comparison.budget_of(arm).amount
    if tokens is None:
        searched = comparison.search.space if comparison.search is not None else ()
        if not {*TOKENS} & {*comparison.arms[arm].changes, *(key for key, _ in searched)}:
            return config.train.steps
        base = build_config(comparison.values)
        tokens = base.train.steps * task_for(base).tokens_per_step
    return tokens / task_for(config).tokens_per_step


def _long(config: Config, steps: int) -> Config:
    return replace(config, train=replace(config.train, steps=steps))


def _sized(config: Config, parameters: float) -> Config:
    """The configuration with the feed-forward size, a multiple of 8, that comes nearest to so many parameters."""
    plan = starting_plan_of(config)
    per_channel = 3 * plan.width * len(plan.layers)
    size = plan.feed_forward + (parameters - plan.parameters) / per_channel
    sized = replace(config, model=replace(config.model, feed_forward=max(8, 8 * round(size / 8))))
    got = starting_plan_of(sized).parameters
    if abs(got / parameters - 1) > CLOSE:
        expected = f"cannot be reached within {CLOSE:.0%} by another model.feed_forward: the nearest is {got:,}"
        raise InputError("budget.parameters", parameters, expected)
    return sized


def starting_plan_of(config: Config) -> Plan:
    """The structure that a run begins with; of a run that it starts from there may be the plan alone."""
    if is_carried(config.model.start_from):
        check_kind(config, _data(config.data.path))
        return starting_plan(config, Plan.load(str(config.model.start_from)))
    return starting_plan(config, initial_plan(config, _data(config.data.path)))


def updates_of(config: Config) -> int:
    """The most updates that a run can have: where its FLOPs end it, as many as its first structure could make."""
    found = config if config.train.flops is None else with_steps(config, _step_flops(config))
    return found.train.steps


def _step_flops(config: Config) -> int:
    """Training FLOPs of the first update."""
    return int(task_for(config).step_flops(starting_plan_of(config)).causal)


def task_for(config: Config) -> Task:
    """The task of a run; what it cannot be trained on is refused."""
    fixed = config.train.compile or choose_device(config.train.device).type == "cuda"
    return make_task(config, starting_plan_of(config), _data(config.data.path), fixed=fixed)


@cache
def _data(path: str) -> TokenData | LabelledData:
    return open_data(path, lambda text: None, check=False)


def check_measure(comparison: Comparison) -> None:
    """Refuse to compare by what the data of the comparison have no labels for."""
    if comparison.measure == "held_out_loss":
        return
    for arm in comparison.arms.values():
        path = arm.changes.get("data.path", comparison.values["data.path"])
        if not isinstance(_data(path), LabelledData):
            raise InputError("measure", comparison.measure, f"must be held_out_loss: {path} has no labels")


def data_digest(config: Config) -> str:
    """The digest of the data that a configuration names."""
    return str(_data(config.data.path).index.digest)
