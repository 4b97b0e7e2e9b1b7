"""The structure of a run over time: its plan at the start and after every event, put together from the log.

An event has a digest of the plan that it led to, by which what was put together is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

from meristem.errors import InputError
from meristem.growth.events import GrowthEvent
from meristem.moves import Moves
from meristem.plan import LayerPlan, Loop, Plan
from meristem.runs.layer_numbers import LayerNumbers


@dataclass(frozen=True)
class Snapshot:
    """The plan from a step on, what its layers are called, and a name for each head that it alone ever has.

    `numbers` are those that the layers have at the end of the run. A snapshot is `checked` if the digest of the plan
    is the one that was recorded.
    """

    step: int
    plan: Plan
    numbers: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]
    checked: bool = True
    born: frozenset[int] = field(default_factory=frozenset)  # heads that came with the event
    event: int | None = None  # of `LayerNumbers.events`; None at the start


def snapshots(start: Plan, numbers: LayerNumbers, newest: Plan) -> list[Snapshot]:
    """The plan at the start, and after every event that changed it; `newest` is that of a checkpoint."""
    names = count()
    first = tuple(tuple(next(names) for _ in range(heads)) for heads in start.heads)
    history = [Snapshot(0, start, numbers.orders[0], first)]
    for index, (event, moves) in enumerate(zip(numbers.told, numbers.moves, strict=True)):
        if not isinstance(event, GrowthEvent):
            continue
        before = history[-1]
        after = newest if event.plan == newest.digest else _after(before.plan, event, moves)
        if len(after.layers) != len(numbers.orders[index + 1]):  # what the event says cannot be
            after = before.plan
        heads = _followed_heads(before.heads, after, moves, names)
        born = frozenset(head for layer in heads for head in layer) - {head for layer in before.heads for head in layer}
        checked = event.plan == after.digest
        if after != before.plan or not moves.stays:
            order = numbers.orders[index + 1]
            history.append(Snapshot(event.step, after, order, heads, checked, born, index))
    return history


def _after(plan: Plan, event: GrowthEvent, moves: Moves) -> Plan:
    """The plan after an event, as far as the event tells it; as before where that cannot be."""
    with suppress(InputError, TypeError, ValueError, KeyError, IndexError):
        layers = tuple(_moved_layer(plan, event, moves, new) for new in range(len(moves.layers)))
        target = plan.target if len(plan.target) > len(layers) else ()
        plan = replace(plan, layers=layers, target=target)
    if event.layer is None or not 0 <= event.layer < len(plan.layers):
        return plan
    candidates: list[Plan] = []
    with suppress(InputError, TypeError, ValueError):
        for loop in _loops(plan, event):
            candidates.append(plan.with_layer(event.layer, replace(plan.layers[event.layer], loop=loop)))
    return next((one for one in candidates if one.digest == event.plan), candidates[0] if candidates else plan)


def _moved_layer(plan: Plan, event: GrowthEvent, moves: Moves, new: int) -> LayerPlan:
    """The layer that has the number `new` after an event."""
    old = moves.layers[new]
    if old is None:
        return _born_layer(plan, event, moves, new)
    layer, heads = plan.layers[old], moves.heads.get(new)
    if heads is None:
        return layer
    loop = layer.loop
    if loop is not None:
        kept, fading = (
            tuple(place for place, was in enumerate(heads) if was is not None and was in of)
            for of in (loop.heads, loop.fading)
        )
        loop = Loop(kept, loop.passes, fading) if set(kept) > set(fading) else None
    return replace(_with_heads(layer, len(heads)), loop=loop)


def _born_layer(plan: Plan, event: GrowthEvent, moves: Moves, new: int) -> LayerPlan:
    """A layer that an event brought: that of the target, or like its source, or like the one before it."""
    size, final, source = len(moves.layers), len(plan.target), moves.copies.get(new)
    if not final:
        if source is not None:
            return plan.layers[source]
        return replace(plan.layers[min(max(0, new - 1), len(plan.layers) - 1)], loop=None, repeats=0)
    shape = plan.target[new * final // size if event.facts.get("order") == "interleave" else new]
    heads = event.facts.get("heads")
    told = heads[new] if isinstance(heads, list) and len(heads) == size else shape.heads
    return _with_heads(shape, told)


def _with_heads(layer: LayerPlan, heads: int) -> LayerPlan:
    """The layer with so many heads, which share one pair of keys and values if those before did."""
    shared = layer.kv_heads == 1 < layer.heads
    kv_heads = 1 if shared else heads * layer.kv_heads // layer.heads
    return replace(layer, heads=heads, kv_heads=kv_heads, loop=None)


def _loops(plan: Plan, event: GrowthEvent) -> Iterator[Loop]:
    """What the loop can be that an event gave its layer; nothing if it is about none.

    An event names the heads that were chosen; whether others are fading still it does not say.
    """
    facts = event.facts
    if event.layer is None or event.action not in ("add", "deepen", "fade") or not {"heads", "passes"} <= facts.keys():
        return
    layer, heads, passes = plan.layers[event.layer], tuple(facts["heads"] or ()), facts["passes"]
    if not heads or type(passes) is not int:
        return
    if event.action == "add" and facts.get("birth") == "paper":  # all begin, and those that were not chosen fade
        others = [head for head in range(layer.heads) if head not in heads]
        others = others if plan.gates is None else others[: max(0, plan.gates.heads - len(heads))]
        yield Loop(tuple(sorted((*heads, *others))), passes, tuple(others))
    if event.action == "deepen" and layer.loop is not None and layer.loop.fading:
        yield replace(layer.loop, passes=passes)
    yield Loop(heads, passes)


def _followed_heads(
    before: Sequence[Sequence[int]], after: Plan, moves: Moves, names: Iterator[int]
) -> tuple[tuple[int, ...], ...]:
    """The names of all heads after an event; what was born gets new ones."""
    followed = []
    for new, layer in enumerate(after.layers):
        old = moves.layers[new] if new < len(moves.layers) else None
        places = moves.heads.get(new, tuple(range(layer.heads)))
        known = () if old is None else before[old]
        places = (*places, *(None,) * layer.heads)[: layer.heads]
        followed.append(
            tuple(next(names) if was is None or was >= len(known) else known[was] for was in places)
        )  # fmt: skip
    return tuple(followed)
