"""Which events of a log are believed, and what of them."""

from __future__ import annotations

from typing import Any

import pytest

from meristem.growth import Sgt
from meristem.growth.events import GrowthEvent, Measurement
from meristem.plan import Plan
from meristem.runs.entries import growth_events, other_growth, sound_head_growth, sound_loop_growth
from report.own_policies import ODD

PLAN = Sgt(total_steps=100, passes=2, heads_per_layer=2).prepare(
    Plan.uniform(layers=3, width=32, heads=4, vocabulary=11, context=8)
)


def loop(step: int, action: str, heads: list[int], passes: int) -> GrowthEvent:
    return GrowthEvent(step, "sgt", action, "why", 1, {"heads": heads, "passes": passes, "shortlist": [1]})


def change(step: int, action: str, layer: int | None, **facts: Any) -> GrowthEvent:
    return GrowthEvent(step, "mine", action, "why", layer, facts)


def test_only_lines_that_are_events_of_the_run_are_read() -> None:
    event = change(3, "birth", 0)
    lines = [
        event.to_dict(),
        {"step": 1, "event": "start"},
        {**event.to_dict(), "step": 11},
        {**event.to_dict(), "version": 2},
        {**event.to_dict(), "rule": None},
    ]
    assert growth_events(lines, 10) == [event]


@pytest.mark.parametrize("action", ["birth", "removal"])
def test_a_loop_goes_on_whose_heads_were_numbered_anew(action: str) -> None:
    first, deeper = loop(10, "add", [2, 3], 1), loop(30, "deepen", [1, 2], 2)
    assert sound_loop_growth([first, change(20, action, 1), deeper], PLAN) == [first, deeper]
    assert sound_loop_growth([first, deeper], PLAN) == [first]  # nothing can have moved them
    assert sound_loop_growth([first, change(20, action, 2), deeper], PLAN) == [first]
    assert sound_loop_growth([change(5, action, 1), first, deeper], PLAN) == [first]
    again = loop(40, "deepen", [1, 2], 3)
    assert sound_loop_growth([first, change(20, action, 1), deeper, again], PLAN) == [first, deeper]  # too deep


def test_heads_that_a_decision_does_not_tell_are_counted() -> None:
    events = [
        change(1, "birth", 0),
        change(2, "birth", 1, heads=[2, 5]),
        change(3, "spare", 1),
        change(4, "removal", 1),
        change(5, "removal", 0, heads="fewer"),
        change(6, "removal", 0),
        change(7, "birth", 2),
        change(8, "birth", None),
    ]
    believed = sound_head_growth(events, (1, 1))
    told = [(event.step, event.facts["heads"]) for event in believed]
    assert told == [(1, [2, 1]), (2, [2, 5]), (3, [2, 5]), (4, [2, 4]), (5, [1, 4]), (6, [1, 4])]
    assert [event.step for event in other_growth(events, 2)] == [8]  # of which layer is not known


def test_facts_that_mean_something_else_are_left_out() -> None:
    (event,) = sound_head_growth([change(1, "birth", 0, **ODD, mine=1), Measurement(1, "mine", ODD)], (1, 1))
    assert event.facts["mine"] == 1
    assert event.facts["heads"] == [2, 1]
    assert not event.facts.keys() & {
        "demand",
        "noise",
        "threshold",
        "rules",
        "predicted_heads",
        "own_share",
        "loss_with",
    }


def test_what_has_no_form_here_is_told_by_its_name() -> None:
    others = [change(1, "postponed", 0), change(2, "reshape", None), change(3, "add", 1), change(4, "stack", None)]
    formed = [loop(5, "add", [0, 1], 1), change(6, "birth", 0), change(7, "reshape", 9)]
    assert other_growth([*others, *formed, Measurement(8, "mine")], 3) == others
