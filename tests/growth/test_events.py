"""Events are written and read back as they were, say nothing in the place of another, and can always be told."""

from __future__ import annotations

from typing import Any

import pytest

from meristem.errors import InputError
from meristem.growth.descriptions import describe_demand
from meristem.growth.events import FIELDS, Event, GrowthEvent, Measurement, event_from_dict

BIRTH = GrowthEvent(3, "mine", "birth", "why", 1, {"heads": [1, 2], "seen": {"much": 1.5}}, "1234")
MEASURED = Measurement(3, "mine", {"demand": [1.0]}, "1234")
VALUES: tuple[Any, ...] = (None, True, -1, 3.5, "x", [], {}, [None], [[]], ["x", "y"], {"layer": 7}, (1, 2))
NAMES = ("heads", "passes", "shortlist", "birth", "before", "layers", "order", "demand", "noise", "threshold")
ACTIONS = ("birth", "removal", "spare", "add", "deepen", "fade", "fix", "wait", "stack", "postponed", "mine")


@pytest.mark.parametrize("event", [BIRTH, MEASURED])
def test_an_event_is_read_back_as_it_was(event: Event) -> None:
    assert event_from_dict(event.to_dict()) == event
    assert event.to_dict().keys() <= FIELDS | event.facts.keys()


@pytest.mark.parametrize(
    ("action", "policy"), [("birth", "incrt"), ("removal", "incrt"), ("spare", "prune"), ("add", "sgt"), ("fix", "sgt")]
)
def test_lines_of_before_there_were_policies_in_them(action: str, policy: str) -> None:
    event = event_from_dict({"step": 3, "event": "growth", "action": action, "layer": 0, "rule": "why", "heads": [2]})
    assert event == GrowthEvent(3, policy, action, "why", 0, {"heads": [2]})
    assert event_from_dict({"step": 3, "event": "demand", "demand": [1.0]}) == Measurement(
        3, "incrt", {"demand": [1.0]}
    )


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_fact_cannot_take_the_place_of_what_an_event_says(field: str) -> None:
    for make in (
        lambda facts: GrowthEvent(3, "mine", "birth", "why", 1, facts),
        lambda facts: Measurement(3, "mine", facts),
    ):
        with pytest.raises(InputError, match=rf"^mine\.facts\.{field} = 7: must have another name"):
            make({"seen": 1, field: 7})


@pytest.mark.parametrize("action", ACTIONS)
def test_an_event_can_be_told_whatever_its_facts_are(action: str) -> None:
    whole = {"heads": [1], "passes": 1, "shortlist": [0], "demand": [1.0], "noise": [0.1], "threshold": [0.5]}
    for layer in (None, 0, 5, -1):
        for name in NAMES:
            for facts in ({}, whole):
                for value in VALUES:
                    event = GrowthEvent(3, "mine", action, "why", layer, {**facts, name: value})
                    assert "(why" in str(event)
                    assert isinstance(describe_demand(event), str)
