"""Runs that are still to be made and that others start from, as they will be.

So what starts from them can be checked before the first of them is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from meristem.comparison.file import Comparison
from meristem.comparison.planning import (
    Results,
    RunKey,
    Waiting,
    configuration,
    source_key,
    starting_plan_of,
    task_for,
    tuning_keys,
    updates_of,
)
from meristem.comparison.results import CARRIED, CarriedResult, lost_result
from meristem.config import Config
from meristem.errors import InputError


@contextmanager
def foreseen_configuration(comparison: Comparison, key: RunKey, results: Results) -> Iterator[Config]:
    """What a run will be trained with, also while the runs are missing that it starts from.

    `Waiting` where that cannot be known: if their structure may change, or more is taken after than their plan. Errors
    within this name the arm that it starts from, as the file does.
    """
    with TemporaryDirectory() as place:
        try:
            yield configuration(comparison, key, _with_sources(comparison, key, results, Path(place)))
        except InputError as error:
            if not str(error.value).startswith(place):
                raise
            value = comparison.arms[key.arm].changes["model.start_from"]
            raise InputError(error.field, value, error.expected, error.remedy) from None


def _with_sources(comparison: Comparison, key: RunKey, results: Results, place: Path) -> Results:
    """The results, and what stands for the run that one starts from; its plan is put below `place`."""
    source = comparison.source(key.arm)
    if source is None:
        return results
    scores: dict[str, float] = {comparison.measure: 0.0}  # any rate will do
    tuned = comparison.tuned_arm(source)
    tried = [other for other in tuning_keys(comparison) if other.arm == tuned]
    known = {**{other: replace(lost_result(other.arm, other.seed), scores=scores) for other in tried}, **results}
    own = source_key(comparison, key, known)
    assert own is not None
    if own in results:
        return known
    if comparison.may_grow(source) or comparison.follows_run(key.arm, source):
        raise Waiting(str(own))
    config = configuration(comparison, own, _with_sources(comparison, own, results, place))
    plan, steps, task = starting_plan_of(config), updates_of(config), task_for(config)
    stand_in = replace(
        lost_result(own.arm, own.seed), folder=str(place / CARRIED / own.path), scores=scores, plan=plan.to_dict(),
        steps=steps, tokens=steps * task.tokens_per_step, flops=steps * task.step_flops(plan).causal,
        parameters=plan.parameters, heads=list(plan.heads), heads_at_start=list(plan.heads),
    )  # fmt: skip
    return {**known, own: CarriedResult(**vars(stand_in))}
