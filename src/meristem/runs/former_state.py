"""States of growth as they were written before policies had one interface, read as those of today.

The engine knows only today's: whoever reads a state from a file of a run lets it pass through here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from meristem.errors import InputError
from meristem.growth import Grower, Policy, Sgt
from meristem.plan import Plan


def incrt_state(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of births by demand within a state of any version; it has no tensors."""
    if "version" in data:
        found: Mapping[str, Any] = data["policies"]["incrt"]["state"]
        return found
    ages = data["heads"]["ages"]["heads"]
    return {**data["heads"]["criterion"]["state"], "grown": [[age["grown"] for age in layer] for layer in ages]}


def state_of_today(data: Mapping[str, Any], tensors: Mapping[str, Tensor], grower: Grower) -> Mapping[str, Any]:
    """A state of any version as one of today, for this grower; some of the tensors then stand in it."""
    return data if "version" in data else _translated(data, tensors, grower.policies, grower.model.plan)


def _translated(
    data: Mapping[str, Any], tensors: Mapping[str, Tensor], policies: Mapping[str, Policy], plan: Plan
) -> dict[str, Any]:
    """A state that knew loops and heads by name, for these policies and a model of this plan."""
    for name in ("done", "policy", "average"):
        if data.get(name) is None:
            raise InputError(f"state.{name}", None, "is missing: this is no state of a grower like this one")
    entries: dict[str, Any] = {"sgt": _sgt(data, plan), "observe": {"settings": {}, "state": None}}
    gauges: dict[str, Any] = {}
    heads = data.get("heads")
    if heads is not None:
        criterion, ages, rule = heads["criterion"], heads["ages"], dict(heads["rule"])
        pruning = rule.pop("pruning", {})
        rule.pop("last_birth", None)  # was counted in updates
        entry = {"settings": rule, "state": criterion["state"]}
        entries |= {
            "incrt": {"settings": rule, "state": incrt_state(data)},
            "published": entry,
            "random_births": entry,
            "prune": {
                "settings": pruning,
                "state": {
                    "since": [[age["since"] for age in layer] for layer in ages["heads"]],
                    "suspect": ages["suspect"], "times": ages["times"],
                    "last_change": criterion["state"].get("last_change", 0),
                },
            },
        }  # fmt: skip
        for policy in policies.values():
            for gauge in policy.remembers:
                gauges[repr(gauge)] = _gauge(type(gauge).__name__, criterion, tensors)
    return {
        "version": 1,
        "done": data["done"],
        "plan": json.loads(_plan(data, plan, policies).to_json()),
        "policies": {name: entries[name] for name in policies if name in entries},
        "gauges": gauges,
    }


def _plan(data: Mapping[str, Any], plan: Plan, policies: Mapping[str, Policy]) -> Plan:
    """The plan that a state belongs to: its loops followed from it, and of heads it knew how many there were."""
    if data.get("heads") is not None:
        heads = tuple(len(layer) for layer in data["heads"]["ages"]["heads"])
        if plan.heads != heads:
            raise InputError("model.plan.heads", plan.heads, f"must be {heads}, as in the state")
    sgt = policies.get("sgt")
    if isinstance(sgt, Sgt):
        plan = plan.bare
        for edit in sgt.edits(plan, sgt.load(_sgt(data, plan)["state"]), data["done"]):
            plan = edit.apply(plan)
    return plan


def _sgt(data: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    average = {"value": data["average"]["value"] or [], "count": data["average"]["count"]}
    state = {**data["policy"], "average": average, "not_before": 0, "heads": list(plan.heads)}
    if data["rule"].get("birth") == "paper":  # all heads of a layer began, those that were not chosen fade
        state["grown"] = [
            {**grown, "others": [h for h in range(plan.heads[grown["layer"]]) if h not in grown["heads"]]}
            for grown in state["grown"]
        ]
    return {"settings": data["rule"], "state": state}


def _gauge(kind: str, criterion: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of an instrument; a tensor stands there as it is."""
    own = _named(tensors, "criterion.")
    if kind == "TrainingLoss":
        return {"sums": tensors["losses"]}
    if kind == "Demand":
        groups = {dim: {**values, **_named(own, f"{dim}.")} for dim, values in criterion["gauges"].items()}
        # What the calibration had shown is in the policy's own state already.
        return {"fed": criterion["fed"], "start": [], "spectra": criterion["spectra"], "groups": groups}
    return {**criterion["gauge"], **own}


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
