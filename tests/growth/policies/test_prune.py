"""Which head is tried without, and what comes of it (incrt.md 2.4)."""

from __future__ import annotations

import json
import math

import pytest
from meristem.growth.policies.pruning import HeadAge, Pruning, PruningState

from meristem import InputError

OLD = 10_000


def suspected(policy: Pruning, state: PruningState, *shares: list[float], times: int) -> PruningState:
    for _ in range(times):
        state = policy.suspect(state, OLD, shares)
    return state


def test_the_least_needed_head_is_tried_after_three_decisions_in_a_row() -> None:
    policy = Pruning()
    state = suspected(policy, policy.start([2, 3]), [0.5, 9e-4], [0.3, 2e-4, 0.3], times=2)
    assert policy.tries(state) is None
    state = suspected(policy, state, [0.5, 1e-4], [0.3, 2e-4, 0.3], times=1)  # another one is needed even less
    assert policy.tries(state) is None
    assert policy.tries(suspected(policy, state, [0.5, 1e-4], [0.3, 2e-4, 0.3], times=2)) == (0, 1)
    assert policy.tries(suspected(policy, state, [0.5, 2e-3], [0.3, 2e-3, 0.3], times=5)) is None


def test_the_young_the_last_and_the_unmeasured_are_left_alone() -> None:
    policy = Pruning(grace=100)
    state = policy.born(policy.start([1, 1]), OLD - 99, 1)
    assert state.heads[1] == (HeadAge(), HeadAge(OLD - 99, grown=True))
    assert policy.tries(suspected(policy, state, [0.0], [0.5, 0.0], times=5)) is None
    assert policy.tries(suspected(policy, state, [0.0], [math.nan, 0.0], times=5)) is None
    assert policy.tries(suspected(policy, state, [0.0], [0.0, 0.5], times=5)) == (1, 0)
    assert not policy.watches(policy.start([1, 1]), OLD)
    assert policy.watches(state, OLD)


def test_a_head_that_was_spared_has_its_grace_again() -> None:
    policy = Pruning(grace=100)
    state = suspected(policy, policy.start([3]), [0.5, 0.0, 0.5], times=3)
    state = policy.spared(state, OLD, 0, 1)
    assert policy.tries(state) is None
    assert policy.tries(suspected(policy, state, [0.5, 0.0, 0.5], times=5)) is None
    later = policy.suspect(state, OLD + 100, [[0.5, 0.0, 0.5]])
    assert later.suspect == (0, 1)


def test_removal_moves_the_ages_of_the_heads_behind() -> None:
    policy = Pruning()
    state = policy.born(policy.born(policy.start([1, 2]), 5, 1), 7, 1)
    state = policy.removed(state, 1, 2)
    assert [age.since for age in state.heads[1]] == [0, 0, 7]
    assert PruningState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_a_small_rise_of_the_loss_passes() -> None:
    policy = Pruning(tolerance=1e-3)
    assert policy.passes(2.0, 2.0019)
    assert not policy.passes(2.0, 2.0021)
    assert policy.passes(1e-6, 1e-6 + 9e-6)  # where there is next to no loss, a share of it would be nothing
    assert not policy.passes(1.0, math.nan)


@pytest.mark.parametrize(("field", "value"), [("grace", -1), ("patience", 0), ("redundant", 1.5), ("tolerance", -0.1)])
def test_bad_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{field} = {value}"):
        Pruning(**{field: value})  # type: ignore[arg-type]
