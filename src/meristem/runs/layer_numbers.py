"""The numbers of layers in a run's logs: blocks come and go, and a layer is told by its number at the end.

A line has the numbers of its time. What a change moved stands in its event; lines of before events said so tell it in
the copies of a stack.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from meristem.growth.events import LOOP_ACTIONS, Event, GrowthEvent
from meristem.limits import MOST_HEADS, MOST_LAYERS
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.runs.entries import growth_events
from meristem.runs.run_folder import RunFolder

Entry = Mapping[str, Any]
Layers = tuple[int, ...]  # those of a time, in their order, each by a name that it alone ever has

NOWHERE = -1  # for a number that no layer had
# What events and observations have of every layer, and what stands for a layer that was not there.
ABSENT: dict[str, Any] = {
    "heads": 0, "demand": None, "noise": None, "threshold": None, "rules": "not born yet", "own_share": [],
    "predicted_heads": {"count": 0}, "asymmetry": None, "rank": None, "head_entropy": [], "layer_entropy": None,
}  # fmt: skip


class LayerNumbers:
    """The layers that a run has had, by their numbers at the end; those that were taken out have numbers after these.

    `events` are those of the run in these numbers. What they say of every layer they say of all that there have been,
    and their `moves` have other names: `born` layers, each with the one whose shape it has, `copied` ones with their
    sources, those that have `left`, and the number of heads of layers in which heads `changed`.
    """

    def __init__(self, start: int, events: Iterable[Event]) -> None:
        self.told = told = list(events)  # as they were written
        self._steps = [event.step for event in told]
        self._then: list[Layers] = [tuple(range(start))]  # at the start, and after every event
        self.moves: list[Moves] = []  # what every event moved, in the numbers of its time
        names = count(start)
        gone: dict[int, tuple[int, int]] = {}  # numbers when they left, and the steps
        for event in told:
            before = self._then[-1]
            moves = _told_moves(event, len(before))
            self.moves.append(moves)
            self._then.append(moves.of_layers(before, lambda _: next(names)))
            stays = {*moves.layers}
            gone |= {name: (number, event.step) for number, name in enumerate(before) if number not in stays}
        last = self._then[-1]
        self._numbers = {name: number for number, name in enumerate((*last, *gone))}
        self.layers = len(last)
        self.taken_out = {self._numbers[name]: left for name, left in gone.items()}
        self.events = [self._placed(*one) for one in zip(range(len(told)), told, self.moves, strict=True)]

    @property
    def all_layers(self) -> int:
        """The number of layers that there have been."""
        return self.layers + len(self.taken_out)

    @property
    def orders(self) -> list[tuple[int, ...]]:
        """The layers at the start and after every event, in their order at the time."""
        return [tuple(self._numbers[name] for name in then) for then in self._then]

    def start_heads(self, plan: Plan) -> tuple[int, ...]:
        """The heads at the start, none in layers that were born later."""
        heads = {self._numbers[name]: heads for name, heads in enumerate(plan.heads)}
        return tuple(heads.get(layer, 0) for layer in range(self.all_layers))

    def observations(self, entries: Iterable[Entry]) -> list[Entry]:
        """The lines of entropy.jsonl in these numbers, without those of another number of layers than there were."""
        placed = []
        for entry in entries:
            step, entropy = entry.get("step"), entry.get("head_entropy")
            if type(step) is int and isinstance(entropy, list):
                times = self._times(bisect_right(self._steps, step), step)
                then = next((then for then in times if len(then) == len(entropy)), None)
                placed += [] if then is None else [self._facts(entry, then)]
        return placed

    def named(self, event: GrowthEvent, text: str) -> str:
        """A text about an event, in which a layer that was taken out has its last number, and when it left."""
        if event.layer not in self.taken_out:
            return text
        number, step = self.taken_out[event.layer]
        later = "" if event.layer in event.moves.get("left", ()) else f" (taken out at step {step:,})"
        return text.replace(f"layer {event.layer}", f"layer {number}{later}", 1)

    # --- placing ----------------------------------------------------------------------------------------------------

    def _times(self, index: int, step: int) -> list[Layers]:
        """What the layers were after so many events, and before those of them that are of the same step."""
        times = [self._then[index]]
        while index and self._steps[index - 1] == step:
            index -= 1
            times.append(self._then[index])
        return times

    def _placed(self, index: int, event: Event, moves: Moves) -> Event:
        times = self._times(index + 1, event.step)
        if not isinstance(event, GrowthEvent):
            return replace(event, facts=self._facts(event.facts, *times))
        of_loop = ("heads",) if event.action in LOOP_ACTIONS else ()  # there they are those of one layer
        facts = self._facts(event.facts, *times, kept=of_loop)
        before, after = ([self._numbers[name] for name in self._then[at]] for at in (index, index + 1))
        layer = event.layer
        if layer is not None:  # one that the change has born, or else one that there was before
            bears = 0 <= layer < len(after) and moves.layers[layer] is None
            layer = after[layer] if bears else before[layer] if 0 <= layer < len(before) else NOWHERE
        return replace(event, layer=layer, facts=facts, moves=_placed_moves(moves, before, after))

    def _facts(self, facts: Entry, *times: Layers, kept: Sequence[str] = ()) -> Entry:
        """Facts in the numbers at the end, but for those that are kept, and without those of other numbers of layers.

        `times` are those that they can be of.
        """
        result = dict(facts)
        for name in ABSENT.keys() & facts.keys() - {*kept}:
            if isinstance(values := facts[name], list):
                del result[name]
                for then in [then for then in times if len(then) == len(values)][:1]:
                    known = {self._numbers[layer]: value for layer, value in zip(then, values, strict=True)}
                    result[name] = [known.get(layer, ABSENT[name]) for layer in range(self.all_layers)]
        numbers = [self._numbers[name] for name in times[0]]
        shortlist, loops = facts.get("shortlist"), facts.get("loops")
        if isinstance(shortlist, list) and _are_indices(shortlist, len(numbers)):
            result["shortlist"] = [numbers[number] for number in shortlist if numbers[number] < self.layers]
        if isinstance(loops, list) and _are_indices([_layer_of(loop) for loop in loops], len(numbers)):
            result["loops"] = [{**loop, "layer": numbers[loop["layer"]]} for loop in loops]
        return result


def read_growth(folder: RunFolder, steps: int) -> LayerNumbers:
    """What the growth of a run has been in its first steps, and the layers that it has had."""
    return LayerNumbers(len(folder.plan.layers), growth_events(folder.read(folder.events), steps))


# --- moves -----------------------------------------------------------------------------------------------------------


def _placed_moves(moves: Moves, before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """What a change moved, by the numbers at the end of the layers before and after it."""
    stays, second = {*after}, min(1, len(after) - 1)
    born = {after[new]: after[new - 1 if new else second] for new, old in enumerate(moves.layers) if old is None}
    copied = {after[new]: before[source] for new, source in moves.copies.items()}
    whole = {
        "born": born | copied,
        "copied": copied,
        "left": [layer for layer in before if layer not in stays],
        "changed": {after[layer]: len(heads) for layer, heads in moves.heads.items()},
    }
    return {name: value for name, value in whole.items() if value}


def _told_moves(event: Event, layers: int) -> Moves:
    """What an event moved in a model of so many layers; nothing where what it says cannot be."""
    moved = isinstance(event, GrowthEvent) and (_read_moves(event.moves, layers) or _read_stack(event, layers))
    return moved or Moves.none(layers)


def _read_moves(data: Entry, layers: int) -> Moves | None:
    """The inverse of `Moves.to_dict`; None where there is nothing, or something that cannot be."""
    order, heads, copies = data.get("layers", [*range(layers)]), data.get("heads", {}), data.get("copies", {})
    if not data or not _is_order(order, layers, MOST_LAYERS):
        return None
    if not isinstance(heads, dict) or not isinstance(copies, dict):
        return None
    places = {str(new): new for new in range(len(order))}
    born = {place for place, new in places.items() if order[new] is None}
    if not heads.keys() <= places.keys() or not copies.keys() <= born or not _are_indices([*copies.values()], layers):
        return None
    if not all(_is_order(of_layer, MOST_HEADS, MOST_HEADS) for of_layer in heads.values()):
        return None
    return Moves(
        tuple(order),
        {places[layer]: tuple(of_layer) for layer, of_layer in heads.items()},
        {places[new]: source for new, source in copies.items()},
    )


def _read_stack(event: GrowthEvent, layers: int) -> Moves | None:
    """The copies that a stack says it made; None if it says nothing of the kind, or they cannot have been made."""
    copies = event.facts.get("copies")
    if event.action != "stack" or not isinstance(copies, list) or layers + len(copies) > MOST_LAYERS:
        return None
    moves = Moves.none(layers)
    for now, copy in enumerate(copies, layers):
        if not isinstance(copy, list) or len(copy) != 2 or not _are_indices(copy, now + 1) or copy[1] == now:
            return None
        at, source = copy
        moves = moves.then(Moves((*range(at), None, *range(at, now)), copies={at: source}))
    return moves


def _layer_of(loop: Any) -> Any:
    return loop.get("layer") if isinstance(loop, dict) else None


def _is_order(value: Any, old: int, most: int) -> bool:
    """Whether this says of something's new places which of so many old ones each had, None for what was born."""
    if not isinstance(value, list) or not 0 < len(value) <= most:
        return False
    known = [place for place in value if place is not None]
    return _are_indices(known, old) and len(set(known)) == len(known)


def _are_indices(values: Sequence[Any], end: int) -> bool:
    return all(type(value) is int and 0 <= value < end for value in values)
