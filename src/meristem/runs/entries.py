"""Which lines of a run's logs can be believed. A damaged one is passed over, and must not stop whoever reads on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from meristem.errors import InputError, shown
from meristem.plan import Gates, Plan

LARGE = 1e30  # beyond it no number of a log is meant
LOOP_ACTIONS = ("add", "fade", "deepen", "fix", "wait")
HEAD_ACTIONS = ("birth", "removal", "spare")

Entry = Mapping[str, Any]
Counts = Sequence[int | None]  # heads of every layer, None where they come and go


def sound_metrics(entries: Iterable[Entry], steps: int) -> list[Entry]:
    """The lines of metrics.jsonl whose numbers are numbers, of a run of so many steps."""
    names = ("loss", "held_out_loss", "accuracy")
    return [e for e in entries if _is_step(e, steps) and all(_is_number(e.get(name)) for name in names)]


def sound_observations(entries: Iterable[Entry], plan: Plan, steps: int, *, varying: bool = False) -> list[Entry]:
    """The lines of entropy.jsonl that have an entropy for every head, and loops that can be.

    Where heads are `varying`, layers may have had any number of them.
    """
    counts = _counts(plan, varying)
    measured = (e for e in entries if _is_step(e, steps) and _is_entropy(e.get("head_entropy"), counts))
    return [e for e in measured if _has_loops(e, counts)]


def sound_loop_growth(entries: Iterable[Entry], plan: Plan, steps: int, *, varying: bool = False) -> list[Entry]:
    """The growth lines of events.jsonl that tell of loops, and can be."""
    growth = (e for e in entries if e.get("event") == "growth" and _is_step(e, steps))
    counts = _counts(plan, varying)
    return _in_order([e for e in growth if _is_loop_growth(e, counts) and _has_loops(e, counts)], plan.gates)


def sound_head_growth(entries: Iterable[Entry], layers: int, steps: int) -> list[Entry]:
    """The lines of events.jsonl that tell of heads, and can be; a measurement was a `demand` in older ones."""
    told = (e for e in entries if e.get("event") in ("demand", "measured", "growth") and _is_step(e, steps))
    return [e for e in told if _is_head_growth(e, layers)]


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


def _is_loop_growth(entry: Entry, counts: Counts) -> bool:
    if not {"layer", "heads", "passes"} <= entry.keys():
        return False
    layer, heads = entry["layer"], entry["heads"]
    grows = entry.get("action") in ("add", "fade", "deepen")
    if entry.get("action") not in LOOP_ACTIONS or (grows and (layer is None or not heads)):
        return False
    if layer is not None and not _is_index(layer, len(counts)):
        return False
    if heads is not None and (layer is None or not _are_heads(heads, counts[layer])):
        return False
    shortlist = entry.get("shortlist")
    return (
        (entry["passes"] is None or _is_index(entry["passes"], 1 << 10))
        and isinstance(entry.get("rule"), str)
        and _is_list(shortlist, lambda value: _is_index(value, len(counts)))
        and ("head_entropy" not in entry or _is_entropy(entry["head_entropy"], counts))
    )


def _in_order(decisions: Iterable[Entry], gates: Gates | None) -> list[Entry]:
    """The decisions of which each is one that can follow those before it: a layer's loop begins once, then deepens."""
    believed: list[Entry] = []
    loops: dict[int, tuple[list[int], int]] = {}  # the heads and passes that have grown so far, by layer
    for decision in decisions:
        layer, heads = decision["layer"], decision["heads"]
        if decision["action"] in ("add", "deepen"):
            former, passes = loops.get(layer, (heads, 0))
            starts = decision["action"] == "add"
            most = gates or Gates(passes + 1, len(heads))
            if starts != (passes == 0) or former != heads or passes == most.passes or len(heads) > most.heads:
                continue
            loops[layer] = (heads, passes + 1)
        believed.append(decision)
    return believed


def _is_head_growth(entry: Entry, layers: int) -> bool:
    if entry.get("policy") == "prune":
        return _is_pruning(entry, layers)
    if entry.get("action") == "stack":
        told = (("rule", str), ("order", str), ("before", int), ("layers", int))
        heads = _is_list(entry.get("heads"), lambda count: _is_index(count, 1 << 20), layers)
        return heads and all(isinstance(entry.get(name), kind) for name, kind in told)
    measured = [entry.get(name) for name in ("demand", "noise", "threshold")]
    if not any(all(_is_list(values, _is_number, length) for values in measured) for length in (0, layers)):
        return False  # births at random times measure nothing
    if not _is_list(entry.get("heads"), lambda count: _is_index(count, 1 << 20), layers):
        return False
    if not _is_list(entry.get("rules"), lambda rule: isinstance(rule, str), layers):
        return False
    predicted = entry.get("predicted_heads") or []
    if not _is_list(predicted, _is_prediction) or len(predicted) not in (0, layers):
        return False
    return entry["event"] != "growth" or _is_head_change(entry, layers)


def _is_pruning(entry: Entry, layers: int) -> bool:
    """What was measured of heads that might leave, or a trial without one of them."""
    shares = entry.get("own_share")
    if not _is_list(shares, lambda layer: _is_list(layer, _is_number), layers):
        return False
    return entry["event"] != "growth" or (
        _is_list(entry.get("heads"), lambda count: _is_index(count, 1 << 20), layers) and _is_head_change(entry, layers)
    )


def _is_head_change(entry: Entry, layers: int) -> bool:
    losses = [name for name in ("loss_with", "loss_without") if name in entry]
    return (
        entry.get("action") in HEAD_ACTIONS
        and _is_index(entry.get("layer"), layers)
        and isinstance(entry.get("rule"), str)
        and len(losses) != 1
        and all(_is_number(entry[name]) for name in losses)
    )


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
