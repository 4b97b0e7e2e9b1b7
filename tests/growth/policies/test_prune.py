"""Which head is tried without, and what comes of it (incrt.md 2.4)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from meristem import InputError
from meristem.growth.edits import AddHead, RemoveHead
from meristem.growth.head_surgery import newborn_head
from meristem.growth.policies.prune import Prune, PruneState
from meristem.plan import Plan

OLD = 10_000


def plan_of(heads: list[int]) -> Plan:
    return Plan.from_heads(heads, width=24)


def begun(heads: list[int]) -> PruneState:
    return Prune().begin(plan_of(heads))


def born(state: PruneState, step: int, layer: int) -> PruneState:
    """After somebody has given a layer a head."""
    plan = plan_of([len(ages) for ages in state.since])
    edit = AddHead(layer, newborn_head(plan.layers[layer], plan.width, None, 0))
    return Prune().moved(state, step, edit.apply(plan), edit.moves(plan))


def suspected(policy: Prune, state: PruneState, *shares: list[float], times: int) -> PruneState:
    for _ in range(times):
        state = policy.judge(state, OLD, shares)
    return state


def test_the_least_needed_head_is_tried_after_three_decisions_in_a_row() -> None:
    policy = Prune()
    state = suspected(policy, begun([2, 3]), [0.5, 9e-4], [0.3, 2e-4, 0.3], times=2)
    assert policy.tries(state) is None
    state = suspected(policy, state, [0.5, 1e-4], [0.3, 2e-4, 0.3], times=1)  # another one is needed even less
    assert policy.tries(state) is None
    assert policy.tries(suspected(policy, state, [0.5, 1e-4], [0.3, 2e-4, 0.3], times=2)) == (0, 1)
    assert policy.tries(suspected(policy, state, [0.5, 2e-3], [0.3, 2e-3, 0.3], times=5)) is None


def test_the_young_the_last_and_the_unmeasured_are_left_alone() -> None:
    policy = Prune(grace=100)
    state = born(begun([1, 1]), OLD - 99, 1)
    assert state.since[1] == (0, OLD - 99)
    assert policy.tries(suspected(policy, state, [0.0], [0.5, 0.0], times=5)) is None
    assert policy.tries(suspected(policy, state, [0.0], [math.nan, 0.0], times=5)) is None
    assert policy.tries(suspected(policy, state, [0.0], [0.0, 0.5], times=5)) == (1, 0)
    assert not policy.watches(begun([1, 1]), OLD)
    assert policy.watches(state, OLD)


def test_a_head_that_was_spared_has_its_grace_again() -> None:
    policy = Prune(grace=100)
    state = suspected(policy, begun([3]), [0.5, 0.0, 0.5], times=3)
    state = policy.spared(state, OLD, 0, 1)
    assert policy.tries(state) is None
    assert policy.tries(suspected(policy, state, [0.5, 0.0, 0.5], times=5)) is None
    later = policy.judge(state, OLD + 100, [[0.5, 0.0, 0.5]])
    assert later.suspect == (0, 1)


def test_removal_moves_the_ages_of_the_heads_behind() -> None:
    policy = Prune()
    state = born(born(begun([1, 2]), 5, 1), 7, 1)
    plan, edit = plan_of([1, 4]), RemoveHead(1, 2)
    state = policy.moved(state, 9, edit.apply(plan), edit.moves(plan))
    assert state.since == ((0,), (0, 0, 7))
    assert state.last_change == 9
    assert policy.load(json.loads(json.dumps(policy.dump(state)))) == state
    watched = suspected(policy, state, [0.5], [0.5, 1e-4, 0.5], times=2)
    assert watched.suspect == (1, 1)
    assert policy.load(json.loads(json.dumps(policy.dump(watched)))) == watched


def test_a_small_rise_of_the_loss_passes() -> None:
    policy = Prune(tolerance=1e-3)
    assert policy.passes(2.0, 2.0019)
    assert not policy.passes(2.0, 2.0021)
    assert policy.passes(1e-6, 1e-6 + 9e-6)  # where there is next to no loss, a share of it would be nothing
    assert not policy.passes(1.0, math.nan)


@pytest.mark.parametrize(("field", "value"), [("grace", -1), ("patience", 0), ("redundant", 1.5), ("tolerance", -0.1)])
def test_bad_settings_are_named(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{field} = {value}"):
        Prune(**{field: value})
