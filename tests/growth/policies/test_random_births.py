"""Births at random times in random layers (incrt.md D15)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meristem import InputError
from meristem.growth import RandomBirths
from meristem.growth.policies.random_births import RandomState
from meristem.plan import Plan


def drawn_for(policy: RandomBirths, layers: int) -> RandomState:
    """The births of a model with so many layers."""
    return policy.begin(Plan.from_heads([1] * layers, width=16))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 10**6), st.sets(st.integers(0, 3)))
def test_random_births_are_as_many_as_asked_for(births: int, layers: int, seed: int, full: set[int]) -> None:
    """In time, one at a decision, the same again for the same seed, and never in a full layer."""
    policy = RandomBirths(births, last_birth=900, warm_up=310, seed=seed)
    state, born = drawn_for(policy, layers), []
    for done in range(50, 2001, 50):
        decision = policy.judge(state, done, layers, full)
        state = decision.state
        if decision.layer is not None:
            born.append((done, decision.layer))
            assert decision.rules[decision.layer] == "drawn at random"
    room = set(range(layers)) - full
    assert len(born) == (births if room else 0)
    assert {layer for _, layer in born} <= room
    assert all(310 <= done <= 900 for done, _ in born)
    assert state.due == ()
    if not full:
        assert tuple(born) == drawn_for(policy, layers).due


def test_random_births_are_spread_over_time_and_layers() -> None:
    drawn = [place for seed in range(300) for place in drawn_for(RandomBirths(2, last_birth=1000, seed=seed), 3).due]
    times, layers = zip(*drawn, strict=True)
    assert sum(times) / len(times) == pytest.approx(650, abs=30)  # standard error 9
    assert [layers.count(layer) / 600 for layer in range(3)] == pytest.approx([1 / 3] * 3, abs=0.06)  # and 0.02


def test_the_state_comes_back_from_json() -> None:
    policy = RandomBirths(3, 5000)
    drawn = drawn_for(policy, 4)
    assert policy.load(json.loads(json.dumps(policy.dump(drawn)))) == drawn


def test_bad_settings_are_named() -> None:
    with pytest.raises(InputError, match="births = 12: must be at most 11"):
        RandomBirths(12, last_birth=800)
    assert len(drawn_for(RandomBirths(11, last_birth=800), 1).due) == 11
    with pytest.raises(InputError, match="births = -1"):
        RandomBirths(-1, last_birth=800)
