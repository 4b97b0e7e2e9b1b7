"""Structure and growth in words, a line each."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from meristem.plan import Plan


def describe_structure(plan: Plan) -> str:
    """Head counts over depth in a few characters, such as `heads 3x2 6x2 8x2 12x6`."""
    runs = [(heads, len(list(group))) for heads, group in groupby(plan.heads)]
    text = "heads " + " ".join(f"{heads}x{count}" for heads, count in runs)
    loops = describe_loops(plan)
    return f"{text}, looped {loops}" if loops else text


def describe_loops(plan: Plan) -> str:
    """What is run again, such as `L10:h3,h7 x1 L7:h0,h2 x1`, or `L10:block x1`; empty if nothing is."""
    parts = [f"L{index}:{layer.run_again}" for index, layer in enumerate(plan.layers) if layer.run_again]
    return " ".join(reversed(parts))


def describe_growth(event: dict[str, Any]) -> str:
    """A decision in one line; what a policy of somebody's own does is told plainly, whatever it calls it."""
    if event["action"] in ("birth", "removal", "spare") and isinstance(event.get("heads"), list):
        return _describe_head(event)
    if event["action"] == "stack" and {"before", "layers", "order"} <= event.keys():
        return f"{event['before']} blocks become {event['layers']}: {event['order']} ({event['rule']})"
    if event["action"] not in ("add", "fade", "deepen", "fix", "wait") or "shortlist" not in event:
        where = "" if event.get("layer") is None else f" in layer {event['layer']}"
        return f"{event['action']}{where} ({event['rule']})"
    heads = ", ".join(map(str, event["heads"] or ()))
    looped = f"all heads, {heads} to stay" if event.get("birth") == "paper" else f"heads {heads}"
    done = {
        "add": f"layer {event['layer']} now loops {looped}",
        "fade": f"layer {event['layer']} now loops heads {heads} only",
        "deepen": f"layer {event['layer']} now loops heads {heads} in {event['passes']} passes",
        "fix": "growth has ended",
        "wait": "no growth",
    }[event["action"]]
    listed = f" {event['shortlist']}" if event["shortlist"] else ""
    return f"{done} ({event['rule']}{'; shortlist' if listed else ''}{listed})"


def _describe_head(event: dict[str, Any]) -> str:
    layer = event["layer"]
    count = event["heads"][layer]
    now = f"layer {layer} now has {count} head{'s' if count > 1 else ''}"
    done = {
        "birth": f"a head is born: {now}",
        "removal": f"a head has left: {now}",
        "spare": f"layer {layer} keeps its head {event.get('head')}",
    }[event["action"]]
    return f"{done} ({event['rule']})"


# What births are decided by, by criterion or policy; births at random times measure nothing.
MEASURES = {"demand": "demand", "incrt": "demand", "published": "energy"}


def describe_demand(event: Mapping[str, Any], criterion: str) -> str:
    """The heads of all layers, and the demand of the layer that is nearest to a birth, or farthest above."""
    measured = zip(event["demand"], event["noise"], event["threshold"], strict=True)
    known = [
        (demand / threshold, demand, "" if noise is None else f" ± {noise:.2g}", threshold, layer)
        for layer, (demand, noise, threshold) in enumerate(measured)
        if demand is not None and threshold
    ]
    heads = "heads " + "-".join(map(str, event["heads"]))
    if not known:
        return heads
    _, demand, noise, threshold, layer = max(known)
    where = f" in L{layer}" if len(event["heads"]) > 1 else ""
    return f"{heads} {MEASURES.get(criterion, criterion)} {demand:.2f}{noise} of {threshold:.2f}{where}"
