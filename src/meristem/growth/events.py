"""What growth has to say: events with a fixed schema, which logs keep and everybody reads.

A line of a log is an event's fields with what the policy measured beside them. Lines of before there was a version are
read as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meristem.errors import InputError
from meristem.growth.descriptions import describe_growth

VERSION = 1
# Names of what is done that readers know more of than the name; policies of somebody's own may have others.
HEAD_CHANGES = ("birth", "removal")
HEAD_ACTIONS = (*HEAD_CHANGES, "spare")
LOOP_ACTIONS = ("add", "deepen", "fade", "fix", "wait")
FIELDS = frozenset(("step", "event", "version", "policy", "action", "layer", "rule", "plan", "moves"))  # no facts
# Which policy wrote a line of before events said so, by its action.
_FORMER = {"spare": "prune", **dict.fromkeys(LOOP_ACTIONS, "sgt")}


@dataclass(frozen=True)
class GrowthEvent:
    """A decision about the structure: what a policy did at a step, to which layer, and by which rule.

    `facts` are plain values by the policy's own names: what it decided from, and what came of it. `plan` is the digest
    of the structure afterwards, and `moves` says which layers and heads are where now, if any have moved
    (`Moves.to_dict`).
    """

    step: int
    policy: str
    action: str
    rule: str
    layer: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    plan: str | None = None
    moves: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_facts(self.policy, self.facts)

    def to_dict(self) -> dict[str, Any]:
        """A line of events.jsonl."""
        moved = {"moves": dict(self.moves)} if self.moves else {}
        return {
            "step": self.step, "event": "growth", "version": VERSION, "policy": self.policy, "action": self.action,
            "layer": self.layer, "rule": self.rule, **self.facts, **moved, "plan": self.plan,
        }  # fmt: skip

    def __str__(self) -> str:
        return describe_growth(self)


@dataclass(frozen=True)
class Measurement:
    """What a policy measured when it decided that nothing changes."""

    step: int
    policy: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    plan: str | None = None

    def __post_init__(self) -> None:
        check_facts(self.policy, self.facts)

    def to_dict(self) -> dict[str, Any]:
        """A line of events.jsonl."""
        head = {"step": self.step, "event": "measured", "version": VERSION, "policy": self.policy}
        return {**head, **self.facts, "plan": self.plan}

    def __str__(self) -> str:
        return f"{self.policy} measured {', '.join(self.facts)}"


Event = GrowthEvent | Measurement


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """The inverse of `to_dict`, for lines of older versions too; what is no event of growth is refused by name."""
    if data.get("version", VERSION) != VERSION:
        raise InputError("version", data["version"], f"must be {VERSION}")
    step, layer, plan = data.get("step"), data.get("layer"), data.get("plan")
    if type(step) is not int:
        raise InputError("step", step, "must be an integer")
    if plan is not None and not isinstance(plan, str):
        raise InputError("plan", plan, "must be text or null")
    facts = {name: value for name, value in data.items() if name not in FIELDS}
    if data.get("event") in ("measured", "demand"):
        return Measurement(step, _text(data, "policy", "incrt"), facts, plan)
    if data.get("event") != "growth":
        raise InputError("event", data.get("event"), "must be growth or measured")
    if layer is not None and type(layer) is not int:
        raise InputError("layer", layer, "must be an integer or null")
    action = _text(data, "action")
    policy = _text(data, "policy", _FORMER.get(action, "incrt"))
    moves = data.get("moves", {})
    if not isinstance(moves, dict):
        raise InputError("moves", moves, "must say which layers and heads moved where")
    return GrowthEvent(step, policy, action, _text(data, "rule"), layer, facts, plan, moves)


def check_facts(policy: str, facts: Mapping[str, Any]) -> None:
    """Refuse facts that a line cannot hold, or that would stand in the place of what an event itself says."""
    for name in sorted(FIELDS & facts.keys()):
        expected = f"must have another name: {name} is what every event says itself"
        raise InputError(f"{policy}.facts.{name}", facts[name], expected)
    for name, value in facts.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"{policy}.facts.{name}", value, f"must be plain values: {error}") from None


def _text(data: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = data.get(name, default)
    if not isinstance(value, str):
        raise InputError(name, value, "must be text")
    return value
