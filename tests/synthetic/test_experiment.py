"""Models that grow on tasks with a known answer (incrt.md 5.4 and 6, oracles 17, 18, 19 and 21)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from meristem.growth import Incrt, Prune, Published
from meristem.growth.events import GrowthEvent
from meristem.synthetic import Found, KnownTask, grow
from meristem.synthetic.experiment import DECAY


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """The matrices are small: a second thread would be waited for longer than it works."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def grown(task: KnownTask, **options: Any) -> Found:
    return grow(task, [Incrt(seed=task.seed), Prune()], seed=task.seed, **options)


def changes(outcome: Found, action: str) -> list[GrowthEvent]:
    return [event for event in outcome.events if isinstance(event, GrowthEvent) and event.action == action]


# --- oracles ------------------------------------------------------------------------------------------------------


def assert_found(outcome: Found) -> None:
    answer = outcome.task.answer
    assert outcome.heads in (answer, answer + 1)
    assert outcome.loss < 0.01
    assert all(event.facts["demand"][0] > event.facts["threshold"][0] for event in changes(outcome, "birth"))
    *_, last = (event.facts for event in outcome.events if event.policy == "incrt")
    assert last["demand"][0] < last["threshold"][0]  # sufficient: nothing above the threshold is left


def test_incrt_oracle_18_two_heads_are_found() -> None:
    assert_found(grown(KnownTask(heads=2), steps=1200))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_incrt_oracle_18_the_teachers_heads_are_found(heads: int, seed: int) -> None:
    assert_found(grown(KnownTask(heads=heads, seed=seed)))


def test_incrt_oracle_19_a_bag_keeps_one_head() -> None:
    outcome = grown(KnownTask("bag"), steps=800)
    assert outcome.heads == 1
    assert outcome.loss < 1e-4
    assert not changes(outcome, "birth")


def test_incrt_oracle_17_noise_brings_no_birth() -> None:
    """What cannot be learnt asks for nothing."""
    outcome = grown(KnownTask("noise"), steps=800)
    assert not changes(outcome, "birth")
    assert outcome.loss == pytest.approx(1, abs=0.02)


def test_noise_on_rows_that_repeat_brings_no_birth_as_some_are_held_back() -> None:
    """Without these, learning by heart would look like something that is asked for."""
    task = KnownTask("noise", width=16, length=8, rows=64)
    found = [grow(task, [Incrt(warm_up=100, hold_back=share)], steps=220) for share in (0.0, 0.05)]
    assert [bool(changes(outcome, "birth")) for outcome in found] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_incrt_oracle_17_noise_brings_no_birth_in_3000_updates(seed: int) -> None:
    """None of which is in the part of the run in which births have ended."""
    steps = math.ceil(3000 / DECAY)
    assert round(DECAY * steps) >= 3000
    assert not changes(grown(KnownTask("noise", seed=seed), steps=steps), "birth")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_incrt_oracle_19_a_bag_keeps_one_head_to_the_end(seed: int) -> None:
    assert grown(KnownTask("bag", seed=seed)).heads == 1


@pytest.mark.slow
def test_incrt_oracle_21_heads_that_are_too_many_leave() -> None:
    outcome = grown(KnownTask(heads=3), heads=8, steps=3500)
    assert outcome.heads in (3, 4)
    removals = changes(outcome, "removal")
    assert len(removals) - len(changes(outcome, "birth")) == 8 - outcome.heads
    for event in removals:
        assert event.facts["loss_without"] <= event.facts["loss_with"] + 0.01 * max(event.facts["loss_with"], 1e-3)
    assert outcome.loss <= 1.01 * removals[0].facts["loss_with"]


# --- what a run is ------------------------------------------------------------------------------------------------


def test_without_a_policy_the_heads_stay() -> None:
    outcome = grow(KnownTask(heads=2), [], steps=20, heads=3)
    assert (outcome.heads, outcome.events) == (3, [])


def test_reports_follow_every_update() -> None:
    told: list[tuple[int, float, int, int]] = []
    outcome = grow(
        KnownTask(heads=2), [Incrt(decide_every=10, calibration=5)], steps=30,
        report=lambda step, loss, heads, events: told.append((step, loss, heads, len(events))),
    )  # fmt: skip
    assert [step for step, *_ in told] == list(range(1, 31))
    assert [step for step, _, _, events in told if events] == [10, 20, 30]
    assert [event.step for event in outcome.events] == [10, 20, 30]


def test_runs_are_reproducible() -> None:
    first, again, other = (grow(KnownTask(), [Incrt(seed=1)], steps=30, seed=seed).loss for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_births_end_when_the_learning_rate_falls() -> None:
    """Also those of the published rule, which would go on."""
    outcome = grow(KnownTask(), [Published(share=1e-3)], steps=300)
    born = [event.step for event in changes(outcome, "birth")]
    assert born
    assert max(born) <= 210
    assert outcome.heads == 1 + len(born)
