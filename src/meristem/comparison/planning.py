"""Which runs a comparison is made of, and what each is trained with. Nothing here runs anything."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from meristem.comparison.file import Comparison, arm_values, folder_name
from meristem.comparison.results import Result
from meristem.config import Config, build_config
from meristem.config.growth import table_name
from meristem.data import LabelledData, TokenData, open_data
from meristem.devices import choose_device
from meristem.errors import InputError, RunError
from meristem.plan import Plan
from meristem.training.growth_from_config import starting_plan
from meristem.training.tasks import initial_plan, make_task

MEASURED = 60  # updates in which the speed of an arm that does not grow is measured
CLOSE = 0.01  # parts by which matched parameters may differ


@dataclass(frozen=True)
class RunKey:
    """A run of a comparison. One that is `measuring` only tells how long an arm must be to spend its budget."""

    arm: str
    seed: int
    rate: float | None = None  # None: that of the configuration
    measuring: bool = False

    def __str__(self) -> str:
        rate = "" if self.rate is None else f", rate {self.rate:g}"
        return f"{self.arm}{rate}, {'measured alone' if self.measuring else f'seed {self.seed}'}"

    @property
    def path(self) -> Path:
        """Where its folder lies below that of the comparison."""
        arm = folder_name(self.arm)
        rate = Path() if self.rate is None else Path(f"rate-{self.rate:g}")
        return Path("measure") / arm if self.measuring else Path("runs") / arm / rate / f"seed-{self.seed}"


Results = Mapping[RunKey, Result]


class Waiting(Exception):
    """A run cannot begin yet: it takes after one that has not ended."""


def measuring_keys(comparison: Comparison) -> list[RunKey]:
    """The runs by which lengths are found: of all arms that are matched in seconds, and those that grow in FLOPs."""
    needed = []
    for arm in comparison.arms:
        budget = comparison.budget_of(arm)
        if budget.kind == "seconds":
            needed += [arm] if budget.of is None else [arm, budget.of]
        elif budget.kind == "flops" and _may_grow(comparison, arm):
            needed.append(arm)
    return [RunKey(arm, comparison.measuring_seed, measuring=True) for arm in dict.fromkeys(needed)]


def rate_keys(comparison: Comparison) -> list[RunKey]:
    """The runs on which each arm's rate is chosen."""
    return [
        RunKey(arm, seed, rate)
        for seed in comparison.rate_seeds
        for arm in comparison.arms
        for rate in comparison.rates
    ]


def best_rate(comparison: Comparison, arm: str, results: Results) -> float:
    """The rate at which an arm was best in the mean over `rate_seeds`."""
    sign = 1 if comparison.lower_is_better else -1

    def score(rate: float) -> float:
        runs = [_known(results, RunKey(arm, seed, rate)) for seed in comparison.rate_seeds]
        scores = [math.inf if run.diverged else sign * run.scores[comparison.measure] for run in runs]
        return statistics.fmean(scores)

    by_rate = {rate: score(rate) for rate in comparison.rates}
    if min(by_rate.values()) == math.inf:
        raise RunError(f"{arm}: diverged at every rate of the list")
    return min(by_rate, key=by_rate.__getitem__)


def seed_key(comparison: Comparison, arm: str, seed: int, results: Results) -> RunKey:
    """A run that is reported: at the arm's own best rate, where rates are compared."""
    return RunKey(arm, seed, best_rate(comparison, arm, results) if comparison.rates else None)


def count_of_runs(comparison: Comparison) -> int:
    """All runs of a comparison, those that measure and choose included."""
    return len(measuring_keys(comparison)) + len(rate_keys(comparison)) + len(comparison.arms) * len(comparison.seeds)


def known_keys(comparison: Comparison, results: Results) -> list[RunKey]:
    """All runs that are known by now, in the order in which they are best made."""
    keys = [*measuring_keys(comparison), *rate_keys(comparison)]
    for seed in comparison.seeds:
        for arm in comparison.arms:
            try:
                keys.append(seed_key(comparison, arm, seed, results))
            except Waiting:
                continue
    return keys


def configuration(comparison: Comparison, key: RunKey, results: Results) -> Config:
    """What a run is trained with; `Waiting` if that depends on a run that has not ended yet."""

    def resolve(other: str, what: str) -> Any:
        return _beside(comparison, key, other, results).reference(what)

    values = arm_values(comparison, key.arm, resolve)
    values |= {"train.seed": key.seed, "data.seed": key.seed, "checkpoint.keep": 1}
    if key.rate is not None:
        values["optimizer.lr"] = key.rate
    config = build_config({**values, **_own_seeds(build_config(values), key.seed)})
    return _matched(comparison, key, config, results)


def _own_seeds(config: Config, seed: int) -> dict[str, int]:
    """The seeds of policies that have one, and of a schedule that is drawn."""
    policies = zip(config.growth.policies, config.build_policies(), strict=True)
    seeds = {f"growth.{table_name(name)}.seed": seed for name, policy in policies if hasattr(policy, "seed")}
    return seeds | ({"model.shuffle_seed": seed} if config.model.schedule == "shuffle" else {})


def _may_grow(comparison: Comparison, arm: str) -> bool:
    policies = comparison.arms[arm].changes.get("growth.policies", comparison.values.get("growth.policies", ()))
    return any(name not in ("static_loops", "block_loop", "observe") for name in policies)


def _known(results: Results, key: RunKey) -> Result:
    if key not in results:
        raise Waiting(str(key))
    return results[key]


def _beside(comparison: Comparison, key: RunKey, other: str, results: Results) -> Result:
    """The run of another arm that one takes after: with the same seed, while rates are chosen also the same rate."""
    if key.measuring:
        return _known(results, seed_key(comparison, other, comparison.seeds[0], results))
    if key.seed in comparison.rate_seeds:
        return _known(results, RunKey(other, key.seed, key.rate))
    return _known(results, seed_key(comparison, other, key.seed, results))


# --- budgets ---------------------------------------------------------------------------------------------------------


def _matched(comparison: Comparison, key: RunKey, config: Config, results: Results) -> Config:
    """The configuration with the length, or the size, that its budget says."""
    budget = comparison.budget_of(key.arm)
    grows = _may_grow(comparison, key.arm)
    if key.measuring:
        return config if grows else _long(config, min(MEASURED, config.train.steps))
    if budget.kind == "tokens":
        if budget.amount is None:
            return config
        return _long(config, math.ceil(budget.amount / _task(config).tokens_per_step))
    of = None if budget.of is None else _beside(comparison, key, budget.of, results)
    if of is not None and of.diverged:
        raise RunError(f"{of.folder}: diverged, so that no other arm can be matched to it")
    if budget.kind == "parameters":
        return _sized(config, budget.amount if of is None else of.parameters)
    measured = results.get(RunKey(key.arm, comparison.measuring_seed, measuring=True))
    if budget.kind == "flops":
        wanted = float(of.flops if of is not None else budget.amount or 0)
        steps = wanted / _task(config).step_flops(_starting_plan(config)).causal
        if grows:
            if measured is None:
                raise Waiting("its FLOPs are not measured yet")
            steps = measured.steps * wanted / measured.flops
        return _long(config, math.ceil(round(steps, 6)))
    if measured is None:
        raise Waiting("its speed is not measured yet")
    seconds = budget.amount or 0.0
    if of is not None:
        pace = _known(results, RunKey(of.arm, comparison.measuring_seed, measuring=True))
        seconds = of.steps * pace.training_seconds / pace.steps
    return _long(config, round(seconds * measured.steps / measured.training_seconds))


def _long(config: Config, steps: int) -> Config:
    return replace(config, train=replace(config.train, steps=max(1, steps)))


def _sized(config: Config, parameters: float | None) -> Config:
    """The configuration with the feed-forward size, a multiple of 8, that comes nearest to so many parameters."""
    plan = _starting_plan(config)
    per_channel = 3 * plan.width * len(plan.layers)
    wanted = plan.feed_forward + ((parameters or 0) - plan.parameters) / per_channel
    sized = replace(config, model=replace(config.model, feed_forward=max(8, 8 * round(wanted / 8))))
    got = _starting_plan(sized).parameters
    if parameters is None or abs(got / parameters - 1) > CLOSE:
        expected = f"cannot be reached within {CLOSE:.0%} by another model.feed_forward: the nearest is {got:,}"
        raise InputError("budget.parameters", parameters, expected)
    return sized


def _starting_plan(config: Config) -> Plan:
    return starting_plan(config, initial_plan(config, _data(config.data.path)))


def _task(config: Config) -> Any:
    fixed = config.train.compile or choose_device(config.train.device).type == "cuda"
    return make_task(config, _starting_plan(config), _data(config.data.path), fixed=fixed)


@cache
def _data(path: str) -> TokenData | LabelledData:
    return open_data(path, lambda text: None, check=False)


def data_digest(config: Config) -> str:
    """The digest of the data that a configuration names."""
    return str(_data(config.data.path).index.digest)
