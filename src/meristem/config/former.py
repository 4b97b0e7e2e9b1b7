"""Configurations as they were when growth was one word: flat keys in [growth] and [incrt], read as those of today."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from meristem.errors import InputError
from meristem.growth.policies import POLICIES

LOOPS = (
    "passes", "heads", "heads_per_layer", "max_layers", "shortlist", "excluded", "order", "start", "window", "beta",
    "birth", "train_gates", "seed", "probe", "rows",
)  # fmt: skip
GROWTH = ("policy", "unit", "layers", "like", "observe", "observe_every", *LOOPS)
PRUNING = ("grace", "redundant", "tolerance")
DEMAND = (
    "feed_every", "decide_every", "calibration", "cool_down", "warm_up", "last_birth", "max_heads", "certainty",
    "share", "steady", "plateau", "hits", "feeds", "seed",
)  # fmt: skip
INCRT = ("criterion", "numerics", "births", "prune", *DEMAND, *PRUNING)
HOMES = {"numerics": "published", "births": "random_births", "prune": "published", **dict.fromkeys(PRUNING, "prune")}
FORMER = frozenset({f"growth.{name}" for name in GROWTH} | {f"incrt.{name}" for name in INCRT})
# What each policy takes of the keys that several shared.
SHARED = {
    "sgt": LOOPS,
    "static_loops": tuple(name for name in LOOPS if name not in ("start", "window", "beta", "birth", "probe", "rows")),
    "block_loop": ("heads_per_layer", "max_layers", "shortlist", "excluded", "order"),
    "incrt": DEMAND,
    "published": ("feed_every", "decide_every", "last_birth", "max_heads", "share", "seed"),
    "random_births": ("feed_every", "decide_every", "warm_up", "last_birth", "max_heads", "seed"),
}


def former_keys(values: Mapping[str, Any]) -> list[str]:
    """Those of the keys that are of before; `growth.observe` is a table today, and was a word."""
    return [key for key, value in values.items() if key in FORMER and not isinstance(value, Mapping)]


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings by the keys of today; keys of today are left as they are."""
    former = former_keys(values)
    rest = {key: value for key, value in values.items() if key not in former}
    growth, incrt = (_section({key: values[key] for key in former}, name) for name in ("growth", "incrt"))
    if not growth and not incrt:
        return rest
    policy = _choice("growth.policy", growth.get("policy", "none"), "none", "sgt", "incrt")
    loops, heads = _loops(growth), _heads(incrt)
    names = _policies(rest, growth, {"none": [], "sgt": [loops], "incrt": heads}[policy])
    new = _loop_settings(growth, loops) | _head_settings(incrt, heads)
    if "observe_every" in growth:
        new["growth.observe.every"] = growth["observe_every"]
    for key in ("probe", "rows"):
        if key in growth and "observe" in names:
            new[f"growth.observe.{key}"] = growth[key]
            if "sgt" not in names:
                del new[f"growth.sgt.{key}"]
    if "policy" in growth or "observe" in growth:  # a whole section, in which much may stand that is as ever
        new = {key: value for key, value in new.items() if key.split(".")[1] in names or not _is_default(key, value)}
        new["growth.policies"] = names
    elif "growth.policies" in rest:
        for key in ("growth.unit", "incrt.criterion", "incrt.prune"):
            if key in former:
                raise InputError(key, values[key], "chooses a policy: name it in growth.policies instead")
    # Overrides come last, by whichever keys.
    last = next(key for key in reversed([*values]) if key in former or key.startswith("growth."))
    return {**rest, **new} if last in former else {**new, **rest}


def _policies(rest: Mapping[str, Any], growth: Mapping[str, Any], chosen: list[str]) -> list[str]:
    """The policies: those that a former word stands for, or else those of today; observing is an answer of its own."""
    given = rest.get("growth.policies", ())
    given = list(given) if isinstance(given, (list, tuple)) else []
    observes = growth.get("observe", "observe" in given)
    named = chosen if "policy" in growth else [name for name in given if name != "observe"]
    return ["observe", *named] if observes else named  # it measures before the others change anything


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _choice(key: str, value: Any, *allowed: str) -> Any:
    if value not in allowed:
        raise InputError(key, value, f"must be one of {', '.join(allowed)}")
    return value


def _is_default(key: str, value: Any) -> bool:
    """Whether a setting of a policy is as if it had not been given."""
    _, policy, name = key.split(".")
    defaults = {entry.name: entry.default for entry in fields(POLICIES[policy])}
    return bool(defaults[name] == (tuple(value) if isinstance(value, list) else value))


def _loops(growth: Mapping[str, Any]) -> str:
    """The policy that the keys of loops are of."""
    static = bool(growth.get("layers")) or growth.get("like") is not None
    if _choice("growth.unit", growth.get("unit", "head"), "head", "block") == "block":
        return "block_loop"
    return "static_loops" if static else "sgt"


def _heads(incrt: Mapping[str, Any]) -> list[str]:
    """The policies that the keys of heads are of."""
    criterion = _choice("incrt.criterion", incrt.get("criterion", "demand"), "demand", "published", "random")
    if criterion != "demand":
        return [{"published": "published", "random": "random_births"}[criterion]]
    return ["incrt", "prune"] if incrt.get("prune", True) else ["incrt"]


def _loop_settings(growth: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """The keys of loops as those of this policy; what it has no use for stays with SGT, where that is noted."""
    new: dict[str, Any] = {}
    for key in (key for key in LOOPS if key in growth):
        if policy == "block_loop" and key == "passes":
            new["growth.block_loop.times"] = growth[key]
        else:
            new[f"growth.{policy if key in SHARED[policy] else 'sgt'}.{key}"] = growth[key]
    if policy != "sgt":
        new |= {f"growth.{policy}.{key}": growth[key] for key in ("layers", "like") if growth.get(key)}
    return new


def _head_settings(incrt: Mapping[str, Any], policies: list[str]) -> dict[str, Any]:
    """The keys of heads as those of these policies; what they have no use for stays with the others, where that is
    noted."""
    new: dict[str, Any] = {}
    for key, value in incrt.items():
        if key in DEMAND:
            new[f"growth.{policies[0] if key in SHARED[policies[0]] else 'incrt'}.{key}"] = value
            if "prune" in policies and key in ("decide_every", "cool_down"):
                new[f"growth.prune.{key}"] = value
        elif key in HOMES and not _is_absent(key, value, policies):
            new[f"growth.{HOMES[key]}.{key}"] = value
    return new


def _is_absent(key: str, value: Any, policies: list[str]) -> bool:
    """Whether a key of heads says nothing: pruning was a word, and 0 stood for no births and for the usual grace."""
    unsaid = key == "grace" or (key == "births" and "random_births" not in policies)
    return (key == "prune" and "incrt" in policies) or (unsaid and not value)
