"""Configurations as they were when growth was one word: flat keys in [growth] and [incrt], read as those of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meristem.errors import InputError

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
    policy = growth.get("policy", "none")
    if policy not in ("none", "sgt", "incrt"):
        raise InputError("growth.policy", policy, "must be one of none, sgt, incrt")
    loops, heads = _loops(growth), _heads(incrt)
    names = {"none": [], "sgt": [loops], "incrt": heads}[policy]
    new: dict[str, Any] = {}
    for name, section in ((loops, growth), (heads[0], incrt)):
        new |= {f"growth.{name}.{key}": section[key] for key in SHARED[name] if key in section}
    new |= _special(growth, incrt, loops, heads[0])
    if "observe_every" in growth:
        new["growth.observe.every"] = growth["observe_every"]
    if growth.get("observe", False):
        names = ["observe", *names]  # it measures before the others change anything
        new |= {f"growth.observe.{key}": growth[key] for key in ("probe", "rows") if key in growth}
    if "policy" in growth or "observe" in growth:  # a whole section: what belongs to others had no effect
        new = {key: value for key, value in new.items() if key.split(".")[1] in names}
        new["growth.policies"] = names
    # Overrides come last, by whichever keys.
    last = next(key for key in reversed([*values]) if key in former or key.startswith("growth."))
    return {**rest, **new} if last in former else {**new, **rest}


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _loops(growth: Mapping[str, Any]) -> str:
    """The policy that the keys of loops are of."""
    static = bool(growth.get("layers")) or growth.get("like") is not None
    if growth.get("unit", "head") == "block":
        return "block_loop"
    return "static_loops" if static else "sgt"


def _heads(incrt: Mapping[str, Any]) -> list[str]:
    """The policies that the keys of heads are of."""
    criterion = incrt.get("criterion", "demand")
    if criterion not in ("demand", "published", "random"):
        raise InputError("incrt.criterion", criterion, "must be one of demand, published, random")
    if criterion != "demand":
        return [{"published": "published", "random": "random_births"}[criterion]]
    return ["incrt", "prune"] if incrt.get("prune", True) else ["incrt"]


def _special(growth: Mapping[str, Any], incrt: Mapping[str, Any], loops: str, heads: str) -> dict[str, Any]:
    """Keys that have other names, or another meaning, today."""
    new: dict[str, Any] = {}
    if loops != "sgt":
        new |= {f"growth.{loops}.{key}": growth[key] for key in ("layers", "like") if growth.get(key)}
    if loops == "block_loop" and "passes" in growth:
        new["growth.block_loop.times"] = growth["passes"]
    if heads == "published":
        new |= {f"growth.published.{key}": incrt[key] for key in ("numerics", "prune") if key in incrt}
    if heads == "random_births" and "births" in incrt:
        new["growth.random_births.births"] = incrt["births"]
    if heads == "incrt":
        shared = ("decide_every", "cool_down", "redundant", "tolerance")
        new |= {f"growth.prune.{key}": incrt[key] for key in shared if key in incrt}
        if incrt.get("grace"):
            new["growth.prune.grace"] = incrt["grace"]
    return new
