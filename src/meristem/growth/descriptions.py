"""Structure and growth in words, a line each."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from meristem.plan import Plan
from meristem.wording import counted

if TYPE_CHECKING:
    from meristem.growth.events import Event, GrowthEvent


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


def describe_growth(event: GrowthEvent) -> str:
    """A decision in one line; where a policy of somebody's own has other facts than those here, it is told plainly."""
    plainly = event.action if event.layer is None else f"{event.action} in layer {event.layer}"
    done = _head_done(event) or _loop_done(event) or _stack_done(event) or plainly
    listed = f"; shortlist {event.facts['shortlist']}" if event.facts.get("shortlist") else ""
    return f"{done} ({event.rule}{listed})"


def _head_done(event: GrowthEvent) -> str:
    """What was done to a head, where the heads of all layers are known."""
    layer, heads = event.layer, event.facts.get("heads")
    if layer is None or not isinstance(heads, list) or layer not in range(len(heads)) or type(heads[layer]) is not int:
        return ""
    now = f"layer {layer} now has {counted(heads[layer], 'head')}"
    return {
        "birth": f"a head is born: {now}",
        "removal": f"a head has left: {now}",
        "spare": f"layer {layer} keeps its head {event.facts.get('head')}",
    }.get(event.action, "")


def _loop_done(event: GrowthEvent) -> str:
    """What was done about loops, where their heads and passes are told."""
    layer, facts = event.layer, event.facts
    if not {"heads", "passes"} <= facts.keys() or not isinstance(facts["heads"], list | None):
        return ""
    heads = ", ".join(map(str, facts["heads"] or ()))
    looped = f"all heads, {heads} to stay" if facts.get("birth") == "paper" else f"heads {heads}"
    return {
        "add": f"layer {layer} now loops {looped}",
        "fade": f"layer {layer} now loops heads {heads} only",
        "deepen": f"layer {layer} now loops heads {heads} in {facts['passes']} passes",
        "fix": "growth has ended",
        "wait": "no growth",
    }.get(event.action, "")


def _stack_done(event: GrowthEvent) -> str:
    facts = event.facts
    before = facts.get("before")
    if event.action != "stack" or type(before) is not int or not {"layers", "order"} <= facts.keys():
        return ""
    return f"{counted(before, 'block')} become{'s' * (before == 1)} {facts['layers']}: {facts['order']}"


# What births are decided by, by criterion or policy; births at random times measure nothing.
MEASURES = {"demand": "demand", "incrt": "demand", "published": "energy"}


class Reason(NamedTuple):
    """What a decision was made on, and what that was held against; both are empty where nothing was measured."""

    reading: str = ""
    threshold: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


def describe_change(event: GrowthEvent, tolerance: float | None = None) -> str:
    """A decision and its reason in one line; `tolerance` is what a trial lets the loss rise by, if it is known."""
    reason = str(describe_reason(event, tolerance))
    return f"{event}; {reason}" if reason else str(event)


def describe_reason(event: GrowthEvent, tolerance: float | None = None) -> Reason:
    """The reading that a decision was made on, and its threshold, where the facts have the form they are known in."""
    facts, layer = event.facts, event.layer
    if event.action == "birth":
        demand, noise, threshold = (_of_layer(facts.get(name), layer) for name in ("demand", "noise", "threshold"))
        if demand is not None and threshold is not None:
            name = MEASURES.get(event.policy, "demand")
            spread = "" if noise is None or name != "demand" else f" ± {noise:.2g}"  # its standard error
            return Reason(f"{name} {demand:.3g}{spread}", f"above {threshold:.3g}")
    if {"loss_with", "loss_without"} <= facts.keys():
        limit = "" if tolerance is None else f"may rise by {tolerance:.2%}"
        return Reason(_losses_text(facts["loss_with"], "with it", facts["loss_without"], "without"), limit)
    if {"loss_before", "loss_after"} <= facts.keys():
        return Reason(_losses_text(facts["loss_before"], "before", facts["loss_after"], "after"))
    entropies, shortlist = facts.get("layer_entropy"), facts.get("shortlist")
    entropy = _of_layer(entropies, layer)
    if event.action in ("add", "deepen") and entropy is not None:
        listed = [_of_layer(entropies, one) for one in shortlist] if isinstance(shortlist, list) else []
        known = [value for value in listed if value is not None]
        limit = f"at least {min(known):.3g}, the lowest on the shortlist" if known else ""
        return Reason(f"entropy {entropy:.3g}", limit)
    return Reason()


def _of_layer(values: Any, layer: Any) -> float | None:
    """The number of one layer, of a list with one for each; None where there is none."""
    if not isinstance(values, list) or type(layer) is not int or not 0 <= layer < len(values):
        return None
    return values[layer] if _is_known(values[layer]) else None


def _losses_text(first: Any, when: str, second: Any, then: str) -> str:
    """Two losses, and by how much the second is above the first, which may be less than their digits show."""
    told = [f"{loss:.4g}" if _is_known(loss) else "not finite" for loss in (first, second)]
    change = f" ({second - first:+.2g})" if _is_known(first) and _is_known(second) else ""
    return f"loss {told[0]} {when}, {told[1]} {then}{change}"


def _is_known(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # also of an integer that is no float any more


def describe_demand(event: Event) -> str:
    """The heads of all layers, and the demand of the layer that is nearest to a birth, or farthest above.

    Empty if the event does not tell of these, whatever a policy of somebody's own may call so.
    """
    heads = event.facts.get("heads")
    measured: list[Any] = [event.facts.get(name) for name in ("demand", "noise", "threshold")]
    if not isinstance(heads, list) or not all(map(_are_numbers, measured)) or len(set(map(len, measured))) > 1:
        return ""
    known = [
        (demand / threshold, demand, "" if noise is None else f" ± {noise:.2g}", threshold, layer)
        for layer, (demand, noise, threshold) in enumerate(zip(*measured, strict=True))
        if demand is not None and threshold
    ]
    text = "heads " + "-".join(map(str, heads))
    if not known:
        return text
    _, demand, noise, threshold, layer = max(known)
    where = f" in L{layer}" if len(heads) > 1 else ""
    return f"{text} {MEASURES.get(event.policy, 'demand')} {demand:.2f}{noise} of {threshold:.2f}{where}"


def _are_numbers(values: Any) -> bool:
    """Whether this is a list of numbers, with None for those that are not known."""
    return isinstance(values, list) and all(value is None or type(value) in (int, float) for value in values)
