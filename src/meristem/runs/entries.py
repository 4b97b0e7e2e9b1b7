"""Which lines of a run's logs can be believed. A damaged one is passed over, and must not stop whoever reads on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from meristem.errors import InputError, shown
from meristem.growth.events import HEAD_ACTIONS, HEAD_CHANGES, LOOP_ACTIONS, Event, GrowthEvent, event_from_dict
from meristem.limits import MOST_HEADS, MOST_PASSES
from meristem.plan import Gates, Plan

LARGE = 1e30  # beyond it no number of a log is meant

Entry = Mapping[str, Any]
Counts = Sequence[int | None]  # heads of every layer, None where they come and go


def sound_metrics(entries: Iterable[Entry], steps: int) -> list[Entry]:
    """The lines of metrics.jsonl whose numbers are numbers, of a run of so many steps."""
    names = ("loss", "held_out_loss", "held_out_loss_average", "accuracy", "macro_f1")
    return [e for e in entries if _is_step(e, steps) and all(_is_number(e.get(name)) for name in names)]


def whole_length(entries: Iterable[Entry], steps: int, flops: float | None) -> int:
    """The updates of a run of so many `steps` at most, by its sound metrics where its FLOPs say how long it is."""
    counted = [e for e in entries if type(e.get("flops")) is int]
    if flops is None or len(counted) < 2:
        return steps
    before, last = counted[-2:]
    updates, spent = last["step"] - before["step"], last["flops"] - before["flops"]
    if updates < 1 or spent < 1:
        return steps
    return min(steps, last["step"] + max(0, int((flops - last["flops"]) * updates // spent)))


def sound_observations(entries: Iterable[Entry], plan: Plan, steps: int, *, varying: bool = False) -> list[Entry]:
    """The lines of entropy.jsonl that have an entropy for every head, and loops that can be.

    Where heads are `varying`, layers may have had any number of them.
    """
    counts = _counts(plan, varying)
    measured = (e for e in entries if _is_step(e, steps) and _is_entropy(e.get("head_entropy"), counts))
    return [e for e in measured if _has_loops(e, counts)]


def loops_of(facts: Entry, plan: Plan) -> list[Entry]:
    """The loops that an observation or an event tells of; none where somebody's own policy calls other things so."""
    return facts.get("loops", []) if _has_loops(facts, _counts(plan, varying=True)) else []


def tells_of_loops(event: GrowthEvent) -> bool:
    """Whether an event is about loops, whatever else it did."""
    return event.action in LOOP_ACTIONS and {"heads", "passes"} <= event.facts.keys()


def growth_events(entries: Iterable[Entry], steps: int) -> list[Event]:
    """The lines of events.jsonl that are events of growth, of a run of so many steps."""
    events: list[Event] = []
    for entry in entries:
        with suppress(InputError):
            events.append(event_from_dict(entry))
    return [event for event in events if _is_index(event.step, steps + 1)]


def sound_loop_growth(
    events: Iterable[Event], plan: Plan, *, varying: bool = False, end: Plan | None = None
) -> list[GrowthEvent]:
    """The decisions about loops of which each can follow those before it: a loop begins once, then deepens.

    Its heads stay the same, unless others in their layer came or went. A copy of a looped layer begins with its loop,
    unless the `end` has none there, and that is told as a decision of its own. Where blocks come and go, events are
    those of `LayerNumbers`.
    """
    counts, most = _counts(plan, varying), plan.gates or Gates(MOST_PASSES, MOST_HEADS)
    believed: list[GrowthEvent] = []
    loops: dict[int, tuple[list[int], int]] = {}  # the heads and passes that have grown so far, by layer
    renumbered: set[int] = set()  # layers in which heads came or went since
    bare = {layer for layer, shape in enumerate(end.layers if end else ()) if shape.loop is None}
    for event in events:
        if not isinstance(event, GrowthEvent):
            continue
        layer = event.layer
        if layer is not None and event.action in HEAD_CHANGES:
            renumbered.add(layer)
        renumbered |= event.moves.get("changed", {}).keys()
        for copy, source in event.moves.get("copied", {}).items():
            if source in loops and copy < len(counts) and copy not in bare:
                loops[copy] = loops[source]
                renumbered.add(copy)
                believed.append(_copied_loop(event, copy, *loops[source]))
        if not _is_loop_growth(event, counts):
            continue
        if layer is not None and event.action in ("add", "deepen"):
            heads, passes = event.facts["heads"], event.facts["passes"] or 0
            former, before = loops.get(layer, (heads, 0))
            follows = (event.action == "add") == (before == 0) and (former == heads or layer in renumbered)
            fits = before < passes <= most.passes and len(heads) <= most.heads
            if not follows or not fits or plan.layers[layer].repeats:
                continue
            loops[layer] = (heads, passes)
            renumbered.discard(layer)
        believed.append(event)
    return believed


def sound_head_growth(events: Iterable[Event], start: Sequence[int], end: Plan | None = None) -> list[Event]:
    """What was decided and measured about heads, in a run that began with so many in every layer, and came to an `end`.

    Facts that cannot be, or that somebody's own policy means otherwise, are left out. How many heads there are from a
    decision on is counted where it does not say so, by what it moved: a layer is born with as many as the one that it
    is like, unless it ends with others and none came or went meanwhile. Where nothing is said a birth is one more.
    Where blocks come and go, events are those of `LayerNumbers`.
    """
    believed: list[Event] = []
    events, heads = list(events), list(start)
    changes = [event for event in events if isinstance(event, GrowthEvent)]
    changed = {event.layer for event in changes if event.action in HEAD_CHANGES}
    changed |= {layer for event in changes for layer in event.moves.get("changed", ())}
    lasting = {layer: count for layer, count in enumerate(end.heads if end else ()) if layer not in changed}
    for event in events:
        facts = _head_facts(event.facts, len(start))
        if not isinstance(event, GrowthEvent):
            if facts.keys() & {"heads", "demand", "own_share"}:
                believed.append(replace(event, facts=facts))
        elif _is_head_growth(event, len(start)):
            heads = _heads_after(event, heads, facts.get("heads"), lasting)
            believed.append(replace(event, facts={**facts, "heads": heads}))
    return believed


def predicted_heads(events: Iterable[Event], layers: int) -> list[dict[str, float] | None]:
    """How many heads the first measurement of every layer let one expect; None where there was none.

    Before a threshold is known there is nothing to count against.
    """
    predicted: list[dict[str, float] | None] = [None] * layers
    for event in events:
        expected, threshold = event.facts.get("predicted_heads"), event.facts.get("threshold")
        if expected and threshold:
            for layer in range(layers):
                if predicted[layer] is None and threshold[layer] is not None:
                    predicted[layer] = expected[layer]
    return predicted


def other_growth(events: Iterable[Event], layers: int) -> list[GrowthEvent]:
    """Decisions that are neither about heads nor about loops, or of which only somebody's own policy knows more."""
    return [
        event
        for event in events
        if isinstance(event, GrowthEvent)
        and (event.layer is None or _is_index(event.layer, layers))
        and not _is_head_growth(event, layers)
        and not tells_of_loops(event)
    ]


def check_alike(name: str, value: Any, like: Any) -> None:
    """Raise where a JSON value has another type than its counterpart in one that is known to be right.

    What either of them does not have, or has not got yet (None, or an empty list), is not compared.
    """
    if value is None or like is None:
        return
    if isinstance(like, dict) and isinstance(value, dict):
        for key in like.keys() & value.keys():
            check_alike(f"{name}.{key}", value[key], like[key])
    elif isinstance(like, (list, tuple)) and isinstance(value, list):
        for number, entry in enumerate(value if like else ()):
            check_alike(f"{name}[{number}]", entry, like[min(number, len(like) - 1)])
    elif type(value) is not type(like) and not {type(value), type(like)} <= {int, float}:
        raise InputError(name, value, f"must be of the type of {shown(like)}")


def _counts(plan: Plan, varying: bool) -> Counts:
    return (None,) * len(plan.layers) if varying else plan.heads


def _copied_loop(event: GrowthEvent, copy: int, heads: list[int], passes: int) -> GrowthEvent:
    """What a copy of a looped layer brings, as a decision."""
    action, rule = "add" if passes == 1 else "deepen", "it is a copy of a layer that does"
    facts = {"heads": heads, "passes": passes, "shortlist": []}
    return replace(event, action=action, rule=rule, layer=copy, facts=facts, moves={})


def _is_loop_growth(event: GrowthEvent, counts: Counts) -> bool:
    if not tells_of_loops(event):
        return False
    layer, facts = event.layer, event.facts
    if layer is not None and not _is_index(layer, len(counts)):
        return False
    if facts["heads"] is None and event.action in ("add", "fade", "deepen"):
        return False
    if facts["heads"] is not None and (layer is None or not _are_heads(facts["heads"], counts[layer])):
        return False
    return (
        (facts["passes"] is None or _is_index(facts["passes"], 1 << 10))
        and _is_list(facts.get("shortlist", []), lambda value: _is_index(value, len(counts)))
        and ("head_entropy" not in facts or _is_entropy(facts["head_entropy"], counts))
        and _has_loops(facts, counts)
    )


def _is_head_growth(event: GrowthEvent, layers: int) -> bool:
    if event.moves.keys() & {"born", "left", "changed"}:
        return True
    if event.action == "stack":
        return _are_counts(event.facts.get("heads"), layers)
    return event.action in HEAD_ACTIONS and _is_index(event.layer, layers)


def _heads_after(
    event: GrowthEvent, heads: Sequence[int], told: Sequence[int] | None, lasting: Mapping[int, int]
) -> list[int]:
    """The heads of every layer after a decision: what it moved counts more than what it says."""
    says = told if event.action in (*HEAD_ACTIONS, "stack") else None  # others may mean something else
    after = list(heads if says is None else says)
    if says is None and not event.moves and event.layer is not None and event.action in HEAD_CHANGES:
        after[event.layer] = max(1, after[event.layer] + (1 if event.action == "birth" else -1))
    for layer, like in event.moves.get("born", {}).items():
        after[layer] = (says[layer] if says else 0) or lasting.get(layer) or after[like]
    for layer in event.moves.get("left", ()):
        after[layer] = 0
    for layer, count in event.moves.get("changed", {}).items():
        after[layer] = count
    return after


def _head_facts(facts: Entry, layers: int) -> dict[str, Any]:
    """Facts without those of heads that have not the form they are read in; some say nothing without the others."""

    def numbers(value: Any) -> bool:
        return _is_list(value, _is_number, layers)

    forms: dict[str, Callable[[Any], bool]] = {
        "heads": lambda value: _are_counts(value, layers),
        "demand": numbers, "noise": numbers, "threshold": numbers,
        "rules": lambda value: _is_list(value, lambda rule: isinstance(rule, str), layers),
        "predicted_heads": lambda value: _is_list(value, _is_prediction, layers),
        "own_share": lambda value: _is_list(value, lambda layer: _is_list(layer, _is_number), layers),
        "loss_with": _is_number, "loss_without": _is_number,
    }  # fmt: skip
    known = {name: value for name, value in facts.items() if name not in forms or forms[name](value)}
    for together in ({"demand", "noise", "threshold"}, {"loss_with", "loss_without"}):
        if not together <= known.keys():
            known = {name: value for name, value in known.items() if name not in together}
    return known


def _has_loops(entry: Entry, counts: Counts) -> bool:
    return "loops" not in entry or _is_list(entry["loops"], lambda loop: _is_loop(loop, counts))


def _is_loop(loop: Any, counts: Counts) -> bool:
    if not isinstance(loop, dict) or not _is_index(loop.get("layer"), len(counts)):
        return False
    if not _are_heads(loop.get("heads"), counts[loop["layer"]]) or not _is_index(loop.get("passes"), 1 << 10):
        return False
    gates, size = loop.get("gates"), len(loop["heads"])
    if "gates" not in loop or not _is_list(loop.get("update"), _is_number):
        return False
    return gates is None or _is_list(gates, lambda one: _is_list(one, _is_number, size), loop["passes"])


def _are_counts(value: Any, layers: int) -> bool:
    return _is_list(value, lambda count: _is_index(count, 1 << 20), layers)


def _is_prediction(value: Any) -> bool:
    return isinstance(value, dict) and value.get("count") is not None and all(map(_is_number, value.values()))


def _is_entropy(value: Any, counts: Counts) -> bool:
    if not isinstance(value, list) or len(value) != len(counts):
        return False
    return all(_is_list(layer, _is_number, heads) for layer, heads in zip(value, counts, strict=True))


def _are_heads(value: Any, count: int | None) -> bool:
    return _is_list(value, lambda head: _is_index(head, count or 1 << 20)) and len(set(value)) == len(value) > 0


def _is_list(value: Any, each: Callable[[Any], bool], length: int | None = None) -> bool:
    return isinstance(value, list) and length in (None, len(value)) and all(map(each, value))


def _is_index(value: Any, end: int) -> bool:
    return type(value) is int and 0 <= value < end


def _is_step(entry: Entry, steps: int) -> bool:
    return _is_index(entry.get("step"), steps + 1)


def _is_number(value: Any) -> bool:
    """A number that is finite, or None, as which those that are not are recorded."""
    return value is None or (type(value) in (int, float) and abs(value) < LARGE)
