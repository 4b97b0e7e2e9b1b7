"""Settings that are searched for (Optuna's ask and tell): the table of the file, and what each trial is to try.

A trial is a function of the table and of what the trials before it came to, so that nothing but the runs has to be
kept: a study is made anew by telling it the trials that are done.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from meristem.errors import InputError, missing_extra
from meristem.limits import MOST_SEED, check_integer
from meristem.seeds import own_seed
from meristem.settings import flat

KEYS = ("space", "trials", "seeds", "arms", "sampler_seed")
FIRST = 10  # trials that are drawn without regard to others, so that they may run side by side
DIGITS = 4  # of a number that is tried
# By seeds, budget and configuration; all arms are measured on the same held-out data.
GIVEN = ("train.seed", "data.seed", "train.steps", "train.flops", "data.path", "eval.windows", "eval.rows")


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, whole ones if both ends are; with `log`, evenly by their logarithm."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True)
class Search:
    """What is searched: for each of the arms as many trials, each a mean over seeds that are not reported."""

    space: tuple[tuple[str, Range | tuple[Any, ...]], ...]
    trials: int
    seeds: tuple[int, ...]
    arms: tuple[str, ...]
    sampler_seed: int = 0


def read_search(table: Any, arms: Collection[str]) -> Search:
    """The search that a table describes; `arms` are those of the file, all of which are searched if none is named."""
    if not isinstance(table, dict):
        raise InputError("search", table, "must be a table with space, trials and seeds")
    for key in table:
        if key not in KEYS:
            raise InputError(f"search.{key}", table[key], f"unknown key; a search has {', '.join(KEYS)}")
    trials: Any = table.get("trials")
    sampler_seed = table.get("sampler_seed", 0)
    check_integer("search.trials", trials, 2, 10_000)
    check_integer("search.sampler_seed", sampler_seed, 0, MOST_SEED)
    seeds, named = table.get("seeds"), table.get("arms", list(arms))
    if not isinstance(seeds, list) or not seeds or len({*map(repr, seeds)}) < len(seeds):
        raise InputError("search.seeds", seeds, "must be different integers, one at least, that are not in seeds")
    for seed in seeds:
        check_integer("search.seeds", seed, 0, 10**9 - 1)
    if not isinstance(named, list) or not named or not all(name in arms for name in named):
        raise InputError("search.arms", named, f"must be some of the arms {', '.join(arms)}")
    space = table.get("space")
    if not isinstance(space, dict) or not space:
        raise InputError("search.space", space, "must be a table of section.key = { low = .., high = .. } or [values]")
    parts = flat(space, lambda value: bool({*value} & {"low", "high", "log"}))
    found = tuple((key, _part(f"search.space.{key}", value)) for key, value in parts.items())
    for key, _ in found:
        if key in GIVEN:
            raise InputError("search.space", key, "cannot be searched: it is what seeds, budget or configuration say")
    return Search(found, trials, tuple(seeds), tuple(named), sampler_seed)


def _part(field: str, value: Any) -> Range | tuple[Any, ...]:
    if isinstance(value, list) and len(value) > 1 and all(type(one) in (int, float, str, bool) for one in value):
        return tuple(value)
    if not isinstance(value, dict) or not {"low", "high"} <= {*value} <= {"low", "high", "log"}:
        raise InputError(field, value, "must be { low = .., high = .. }, perhaps with log = true, or a list of values")
    low, high, log = value["low"], value["high"], value.get("log", False)
    numbers = all(type(end) in (int, float) and math.isfinite(end) for end in (low, high))
    if not numbers or not low < high or type(log) is not bool or (log and low <= 0):
        raise InputError(field, value, "must go from a lower to a higher number, with log from above 0")
    return Range(low, high, log)


@cache
def suggested(search: Search, scores: tuple[float, ...], number: int) -> dict[str, Any]:
    """What a trial tries. `scores` are those of all trials before it, lower being better; the first ones need none.

    Numbers have four digits: that is as well as a rate is known, and another machine comes to the same.
    """
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = own_seed(f"search-{search.sampler_seed}-{number}")
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(n_startup_trials=FIRST, seed=seed))
    distributions = {key: _distribution(optuna, part) for key, part in search.space}
    for before, score in enumerate(scores):
        tried = suggested(search, scores[:before] if before >= FIRST else (), before)
        study.add_trial(optuna.trial.create_trial(params=tried, distributions=distributions, value=score))
    asked = study.ask(distributions).params
    return {key: _rounded(asked[key], part) for key, part in search.space}


def _distribution(optuna: Any, part: Range | tuple[Any, ...]) -> Any:
    kinds = optuna.distributions
    if not isinstance(part, Range):
        return kinds.CategoricalDistribution(part)
    return (kinds.IntDistribution if part.whole else kinds.FloatDistribution)(part.low, part.high, log=part.log)


def _rounded(value: Any, part: Range | tuple[Any, ...]) -> Any:
    if not isinstance(part, Range) or part.whole:
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), part.low), part.high)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise missing_extra("optuna", "search") from None
    return optuna
