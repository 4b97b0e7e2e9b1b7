"""What growth has to say after a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meristem.errors import InputError


def check_rule(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse to go on from a state that another policy left: settings as they are in JSON."""
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            raise InputError(f"policy.{name}", mine.get(name), f"must be {theirs.get(name)!r}, as in the state")


def expected_heads(events: Iterable[Mapping[str, Any]]) -> list[dict[str, float]] | None:
    """How many heads of every layer the first measurement let one expect; None if no event says so.

    Before the thresholds are known there is nothing to count against.
    """
    for event in events:
        if event.get("predicted_heads") and all(value is not None for value in event["threshold"]):
            return list(event["predicted_heads"])
    return None


@dataclass(frozen=True)
class Growth:
    """What a step brought: decisions with their reasons, whether the structure changed, and an observation if due.

    Where parameters were `exchanged`, the model has others now: an optimizer that the grower knows has them already,
    but whoever else holds on to them, such as a wrapper for several processes, must be made anew.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    changed: bool = False
    exchanged: bool = False
    observation: dict[str, Any] | None = None
