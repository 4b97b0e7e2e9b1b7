"""Configurations as they were when growth was one word: flat keys in [growth] and [incrt], read as those of today.

Every such key becomes keys of today in its own place, so that of several the last one holds, whichever it is. Within
a file those of before are put first: what today's say holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from meristem.config.growth import HEADS, LOOPS
from meristem.errors import InputError
from meristem.growth.policies import POLICIES
from meristem.wording import listed

# Keys that chose among policies, with what they were if not given.
CHOOSING: dict[str, Any] = {
    "growth.policy": "none", "growth.unit": "head", "growth.layers": (), "growth.like": None, "growth.observe": False,
    "incrt.criterion": "demand", "incrt.prune": True,
}  # fmt: skip
CHOICES = {
    "growth.policy": ("none", "sgt", "incrt"), "growth.unit": ("head", "block"),
    "incrt.criterion": ("demand", "published", "random"),
}  # fmt: skip
OF_SGT = (
    "passes", "heads", "heads_per_layer", "max_layers", "shortlist", "excluded", "order", "start", "window", "beta",
    "birth", "train_gates", "seed", "probe", "rows",
)  # fmt: skip
OF_INCRT = (
    "feed_every", "decide_every", "calibration", "cool_down", "warm_up", "last_birth", "max_heads", "certainty",
    "share", "steady", "plateau", "hits", "feeds", "seed",
)  # fmt: skip
OF_PRUNE = ("decide_every", "cool_down", "grace", "redundant", "tolerance")
# What was usual then and is not now: complete files have it of policies that the run did not use.
USUAL_THEN = {("incrt", "cool_down"): 200, ("incrt", "feeds"): 20}
NOT_GIVEN = ("growth.stack.start_layers", "growth.stack.layers")  # 0 then
DROPPED = "growth.random_births.feed_every"  # nothing was fed
FORMER = frozenset({
    *CHOOSING, "growth.observe_every", *(f"growth.{name}" for name in OF_SGT),
    "incrt.numerics", "incrt.births", *(f"incrt.{name}" for name in (*OF_INCRT, *OF_PRUNE)),
})  # fmt: skip


def former_first(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one file, whose order says nothing, with those of today behind those of before."""
    return {key: values[key] for key in sorted(values, key=lambda key: key not in FORMER)}


def translated(values: Mapping[str, Any], note: Callable[[str], None] | None = None) -> dict[str, Any]:
    """The same settings by the keys of today, which are left as they are; `note` is told of those of before."""
    if DROPPED in values:
        values = {key: value for key, value in values.items() if key != DROPPED}
        if note is not None:
            note(f"{DROPPED}: of no use, as nothing is measured for births at random times")
    values = {
        key: value for key, value in values.items() if not (key in NOT_GIVEN and type(value) is int and not value)
    }
    given = FORMER & values.keys()
    if not given:
        return dict(values)
    _check(values)
    choosing = _choosing(values)
    names, exchanged = _policies(values.get("growth.policies", ()), choosing)
    new: dict[str, Any] = {}
    idle, beaten = [], []
    for key, value in values.items():
        places = [*_places(key, value, choosing, names)] if key in FORMER else [*_moved(key, value, exchanged)]
        new |= {place: value for place in places if key not in FORMER or _counts(place, value, names)}
        if not places and key not in CHOOSING and not _is_usual(key, value):
            idle.append(key)
        if key in FORMER and (stronger := _stronger(key, places, values, choosing)):
            beaten.append(f"{key}: of no use, as {stronger} holds")
    if "growth.policies" in values or names or not choosing.keys().isdisjoint(("growth.policy", "growth.observe")):
        new["growth.policies"] = names
    if note is not None:
        text = "read as they were before policies had tables of their own, [growth.NAME]; see the guide"
        note(f"{listed(sorted(given), 4)}: {text}")
        if idle:
            note(f"{', '.join(idle)}: of no use with growth.policies = {names}")
        for text in beaten:
            note(text)
    return new


def _stronger(key: str, places: Sequence[str], values: Mapping[str, Any], choosing: Mapping[str, Any]) -> str | None:
    """The key of today that stands behind one of before, and says otherwise."""
    if not places:
        chooses = key in CHOOSING and key not in choosing and _plain(values[key]) != _plain(CHOOSING[key])
        return "growth.policies" if chooses else None
    keys = [*values]
    behind = (place for place in places if place in keys[keys.index(key) :])
    return next((place for place in behind if _plain(values[place]) != _plain(values[key])), None)


def _check(values: Mapping[str, Any]) -> None:
    """Refuse what keys cannot be chosen from."""
    for key, allowed in CHOICES.items():
        if values.get(key, allowed[0]) not in allowed:
            raise InputError(key, values[key], f"must be one of {', '.join(allowed)}")
    for key in ("growth.observe", "incrt.prune"):
        if type(values.get(key, False)) is not bool:
            raise InputError(key, values[key], "must be of type bool")
    policies = values.get("growth.policies", ())
    if not isinstance(policies, (list, tuple)) or not all(isinstance(name, str) for name in policies):
        raise InputError("growth.policies", policies, "must be a list of str")


def _choosing(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that choose among policies; where today's list stands behind them it holds instead."""
    keys = [*values]
    begin = keys.index("growth.policies") if "growth.policies" in values else 0
    if "growth.policy" in keys[begin:]:
        begin = 0
    return {key: values[key] for key in keys[begin:] if key in CHOOSING}


def _policies(today: Sequence[str], choosing: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The policies that all keys together name, in their order; and which of today's list were exchanged for which."""
    prunes, exchanged = choosing.get("incrt.prune", True), {}
    if "growth.policy" in choosing:
        loops, heads = _loops(choosing, LOOPS[0]), _heads(choosing, HEADS[0])
        names = {"none": [], "sgt": [loops], "incrt": [heads]}[choosing["growth.policy"]]
        pruned = prunes and "incrt" in names
    else:
        exchanged = {name: _loops(choosing, name) for name in today if name in LOOPS}
        exchanged |= {name: _heads(choosing, name) for name in today if name in HEADS}
        names = [exchanged.get(name, name) for name in today if name not in ("observe", "prune")]
        said = not choosing.keys().isdisjoint(("incrt.criterion", "incrt.prune"))
        pruned = prunes and "incrt" in names if said else "prune" in today
    if pruned:
        behind = names.index("incrt") + 1 if "incrt" in names else len(names)
        names = [*names[:behind], "prune", *names[behind:]]
    if choosing.get("growth.observe", "observe" in today):
        names = ["observe", *names]  # it measures before the others change anything
    return names, {old: new for old, new in exchanged.items() if old != new}


def _moved(key: str, value: Any, exchanged: Mapping[str, str]) -> Iterator[str]:
    """A key of today: itself, or that of the policy that its own was exchanged for, if it has such a setting."""
    section, _, rest = key.partition(".")
    policy, _, name = rest.partition(".")
    if section != "growth" or policy not in exchanged:
        yield key
    elif not _is_usual(key, value) and (new := _renamed(exchanged[policy], name)) in _fields(exchanged[policy]):
        yield f"growth.{exchanged[policy]}.{new}"


def _renamed(policy: str, name: str) -> str:
    return "times" if (policy, name) == ("block_loop", "passes") else name


def _loops(values: Mapping[str, Any], name: str) -> str:
    """The policy of loops, which is `name` if no key says otherwise."""
    if values.get("growth.unit") == "block":
        return "block_loop"
    return "static_loops" if values.get("growth.layers") or values.get("growth.like") else name


def _heads(values: Mapping[str, Any], name: str) -> str:
    """The policy of heads, which is `name` if no key says otherwise."""
    criteria = {"demand": "incrt", "published": "published", "random": "random_births"}
    return criteria[values["incrt.criterion"]] if "incrt.criterion" in values else name


def _places(key: str, value: Any, choosing: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """The keys of today that a key of before speaks of."""
    section, _, name = key.partition(".")
    family, choose = (LOOPS, _loops) if section == "growth" else (HEADS, _heads)
    policy = next((policy for policy in names if policy in family), None) or choose(choosing, family[0])
    if name in ("layers", "like", "births", "grace") and not value:
        return  # not given
    if _renamed(policy, name) in _fields(policy):
        yield f"growth.{policy}.{_renamed(policy, name)}"
    if section == "incrt" and "prune" in names and name in OF_PRUNE:
        yield f"growth.prune.{name}"
    if section == "growth" and "observe" in names and name in ("probe", "rows"):
        yield f"growth.observe.{name}"
    if name == "observe_every":
        yield "growth.observe.every"


def _fields(policy: str) -> set[str]:
    return {entry.name for entry in fields(POLICIES[policy])}


def _counts(place: str, value: Any, names: Sequence[str]) -> bool:
    """Whether a setting is kept: complete files have those of all policies, most of them as usual."""
    _, policy, name = place.split(".")
    usual = USUAL_THEN.get((policy, name), getattr(POLICIES[policy], name, None))
    return policy in names or _plain(value) != _plain(usual)


def _is_usual(key: str, value: Any) -> bool:
    """Whether a setting of before is as if it were left out."""
    section, *table, name = key.split(".")
    usual = {"numerics": "author", "births": 0, "grace": 0}
    homes = table or (["sgt"] if section == "growth" else ["incrt", "prune"])
    then = [USUAL_THEN.get((home, name), getattr(POLICIES[home], name, usual.get(name))) for home in homes]
    return any(_plain(value) == _plain(one) for one in then)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
