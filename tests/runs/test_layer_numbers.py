"""Whatever blocks come and go, what logs say is told of the layers of the end, by their numbers there."""

from __future__ import annotations

from typing import Any

import pytest

from meristem.growth.events import Event, GrowthEvent, Measurement
from meristem.plan import Plan
from meristem.runs.entries import sound_head_growth
from meristem.runs.layer_numbers import NOWHERE, LayerNumbers


def change(step: int, action: str, layer: int | None = None, moves: Any = None, **facts: Any) -> GrowthEvent:
    return GrowthEvent(step, "mine", action, "why", layer, facts, moves=moves or {})


def placed(numbers: LayerNumbers) -> list[GrowthEvent]:
    return [event for event in numbers.events if isinstance(event, GrowthEvent)]


ADD = {"layers": [0, None, 1, 2], "copies": {"1": 0}}  # a copy of the first of three layers
REMOVE = {"layers": [0, 2, 3]}  # the second of four


def test_events_before_a_stack_without_moves_are_of_the_layers_at_the_end_whatever_they_tell() -> None:
    stack = change(5, "stack", copies=[[2, 1], [1, 0]], heads=[1, 1, 1, 1])
    events = [change(2, "birth", 1), change(3, "birth", 0, heads=[2, 2]), stack, change(7, "birth", 1)]
    told = [(event.layer, event.facts.get("heads")) for event in placed(LayerNumbers(2, events))]
    assert told == [(2, None), (0, [2, 0, 2, 0]), (None, [1, 1, 1, 1]), (1, None)]


def test_moves_and_the_copies_of_a_stack_say_the_same() -> None:
    copies = [[2, 1], [1, 0]]
    older = [change(2, "birth", 1), change(5, "stack", copies=copies), change(7, "birth", 3)]
    moves = {"layers": [0, None, 1, None], "copies": {"1": 0, "3": 1}}
    newer = [older[0], change(5, "stack", moves=moves, copies=copies), older[2]]
    assert LayerNumbers(2, older).events == LayerNumbers(2, newer).events


def test_numbers_that_recur_are_told_apart_by_their_place_in_the_log() -> None:
    """Three layers become four, three again without another one, and four once more."""
    events = [
        change(1, "birth", 1), change(2, "widen", 1, ADD), change(3, "birth", 1), change(3, "birth", 2),
        change(4, "narrow", 2, {"layers": [0, 1, 3]}), change(5, "birth", 1), change(6, "widen", 1, ADD),
        change(7, "birth", 2), change(7, "birth", 9),
    ]  # fmt: skip
    numbers = LayerNumbers(3, events)
    assert (numbers.layers, numbers.all_layers) == (4, 5)
    gone, first_copy, second_copy = 4, 2, 1
    assert [event.layer for event in numbers.events if isinstance(event, GrowthEvent)] == [
        gone, first_copy, first_copy, gone, gone, first_copy, second_copy, first_copy, NOWHERE,
    ]  # fmt: skip
    assert numbers.taken_out == {gone: (2, 4)}
    assert [event.moves for event in placed(numbers) if event.moves] == [
        {"born": {first_copy: 0}, "copied": {first_copy: 0}},
        {"left": [gone]},
        {"born": {second_copy: 0}, "copied": {second_copy: 0}},
    ]
    plan = Plan.from_heads([2, 4, 8], width=32, vocabulary=11, context=8)
    assert numbers.start_heads(plan) == (2, 0, 0, 8, 4)


def test_a_layer_that_was_taken_out_is_named_by_its_last_number() -> None:
    numbers = LayerNumbers(3, [change(1, "birth", 1), change(2, "widen", 1, ADD), change(1000, "narrow", 1, REMOVE)])
    birth, widen, narrow = placed(numbers)
    assert numbers.named(birth, f"step 1: {birth}") == "step 1: birth in layer 1 (why)"
    assert numbers.named(widen, f"step 2: {widen}") == "step 2: widen in layer 1 (taken out at step 1,000) (why)"
    assert numbers.named(narrow, f"step 1000: {narrow}") == "step 1000: narrow in layer 1 (why)"


def test_facts_are_of_the_layers_of_their_time() -> None:
    events: list[Event] = [
        Measurement(1, "mine", {"demand": [0.1, 0.2, 0.3]}),
        change(2, "widen", 1, ADD, demand=[0.1, 0.2, 0.3]),  # measured before
        Measurement(2, "mine", {"demand": [0.1, 0.2, 0.3], "rank": [1.0]}),  # as what is measured beside a change
        change(3, "add", 2, heads=[0, 1, 2, 3], passes=1, shortlist=[3, 1, 2], loops=[{"layer": 3}]),
        change(4, "narrow", 1, REMOVE, demand=[0.1, 0.4, 0.2, 0.3]),
        Measurement(5, "mine", {"demand": [0.1, 0.2, 0.3]}),
    ]
    told = [event.facts for event in LayerNumbers(3, events).events]
    demand = [0.1, 0.2, 0.3, None]
    assert [facts.get("demand") for facts in told] == [demand, demand, demand, None, [0.1, 0.2, 0.3, 0.4], demand]
    assert "rank" not in told[2]  # there never was one layer
    assert told[3] == {"heads": [0, 1, 2, 3], "passes": 1, "shortlist": [2, 1], "loops": [{"layer": 2}]}


def test_observations_are_of_the_layers_of_their_step() -> None:
    numbers = LayerNumbers(3, [change(2, "widen", 1, ADD), change(4, "narrow", 1, REMOVE)])
    three, four = [[0.1], [0.2], [0.3]], [[0.1], [0.4], [0.2], [0.3]]
    entries: list[dict[str, Any]] = [
        {"step": 1, "head_entropy": three}, {"step": 2, "head_entropy": three}, {"step": 2, "head_entropy": four},
        {"step": 3, "head_entropy": four, "loops": [{"layer": 2}]}, {"step": 4, "head_entropy": four},
        {"step": 4, "head_entropy": three}, {"step": 3, "head_entropy": three}, {"step": None, "head_entropy": three},
        {"step": 3, "head_entropy": None},
    ]  # fmt: skip
    found = numbers.observations(entries)
    assert [entry["step"] for entry in found] == [1, 2, 2, 3, 4, 4]  # there were not three layers after step 3
    without, all_four = [[0.1], [0.2], [0.3], []], [[0.1], [0.2], [0.3], [0.4]]
    assert [entry["head_entropy"] for entry in found] == [without, without, all_four, all_four, all_four, without]
    assert found[3]["loops"] == [{"layer": 1}]


@pytest.mark.parametrize(
    "moves",
    [
        {"layers": []}, {"layers": [0, 0, 1]}, {"layers": [0, 3]}, {"layers": [0, True]}, {"layers": {"0": 1}},
        {"layers": [None] * 20_000}, {"heads": []}, {"heads": {"3": [0]}}, {"heads": {"0": []}},
        {"heads": {"0": [1, 1]}},
        {"copies": {"0": 1}}, {"layers": [0, 1, 2, None], "copies": {"3": 3}}, {"layers": [0, 1, 2, None], "copies": 1},
    ],
)  # fmt: skip
def test_moves_that_cannot_be_are_none(moves: dict[str, Any]) -> None:
    numbers = LayerNumbers(3, [change(1, "mine", 2, moves)])
    assert (numbers.layers, numbers.all_layers) == (3, 3)
    assert placed(numbers) == [change(1, "mine", 2)]


def test_heads_are_counted_by_moves() -> None:
    events = [
        change(1, "birth", 0, {"heads": {"0": [0, 1, None, None]}}),
        change(2, "sprout", 0, {"heads": {"0": [0, 1, 2, 3, None], "1": [0, None]}}, heads=[0, 1]),  # head numbers
        change(3, "widen", 1, {"layers": [0, None, 1], "copies": {"1": 0}}),
        change(4, "widen", 0, {"layers": [None, 0, 1, 2]}),  # not a copy: of the shape of the one beside it
        change(5, "removal", 3, {"heads": {"3": [1]}}),
        change(6, "narrow", 1, {"layers": [0, 2, 3]}),
    ]
    numbers = LayerNumbers(2, events)
    plan = Plan.from_heads([2, 1], width=32, vocabulary=11, context=8)
    start = numbers.start_heads(plan)
    assert start == (0, 0, 1, 2)  # the last one was taken out
    counts = [event.facts["heads"] for event in sound_head_growth(numbers.events, start)]
    assert counts == [[0, 0, 1, 4], [0, 0, 2, 5], [0, 5, 2, 5], [5, 5, 2, 5], [5, 5, 1, 5], [5, 5, 1, 0]]
    end = Plan.from_heads([4, 2, 1], width=32, vocabulary=11, context=8)  # blocks were born in shapes of their own
    *_, last = sound_head_growth(numbers.events, start, end)
    assert last.facts["heads"] == [4, 2, 1, 0]
