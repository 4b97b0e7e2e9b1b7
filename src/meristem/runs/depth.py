"""Logs of a run whose blocks were stacked: what was said of few layers, told of those that there are at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meristem.growth.events import LOOP_ACTIONS, Event, GrowthEvent
from meristem.plan import Plan

Entry = Mapping[str, Any]

# What events and observations have of every layer, and what stands for a layer that was not born yet.
UNBORN: dict[str, Any] = {
    "heads": 0, "demand": None, "noise": None, "threshold": None, "rules": "not born yet", "own_share": [],
    "predicted_heads": {"count": 0}, "asymmetry": None, "rank": None, "head_entropy": [], "layer_entropy": None,
}  # fmt: skip


class Depth:
    """The numbers of layers that a run has had, and where each of them is among the last."""

    def __init__(self, start: int, events: Iterable[Event]) -> None:
        self.start = start
        self.places: dict[int, tuple[int, ...]] = {start: tuple(range(start))}  # by number of layers
        for event in events:
            self._stack(_copies(event, self.layers))

    def _stack(self, copies: Sequence[Sequence[int]]) -> None:
        for at, _ in copies:
            count = self.layers + 1
            self.places = {
                had: tuple(place + (place >= at) for place in places) for had, places in self.places.items()
            } | {count: tuple(range(count))}

    @property
    def layers(self) -> int:
        """The number of layers at the end."""
        return max(self.places)

    def lifted(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events, in their order, with what they say of their layers as of those at the end."""
        count = self.start
        for event in events:
            count += len(_copies(event, count))
            if not isinstance(event, GrowthEvent):
                yield replace(event, facts=self._lifted(event.facts, count))
                continue
            of_loop = ("heads",) if event.action in LOOP_ACTIONS else ()  # there they are those of one layer
            layer = event.layer
            if layer is not None and 0 <= layer < count:
                layer = self.places[count][layer]
            yield replace(event, layer=layer, facts=self._lifted(event.facts, count, of_loop))

    def lifted_observation(self, entry: Entry) -> Entry:
        """A line of entropy.jsonl as of the layers at the end; one that cannot be is left as it is."""
        entropy = entry.get("head_entropy")
        return self._lifted(entry, len(entropy)) if isinstance(entropy, list) and len(entropy) in self.places else entry

    def _lifted(self, facts: Entry, count: int, kept: Sequence[str] = ()) -> Entry:
        """Facts of so many layers as of those at the end, but for those that are kept."""
        result = dict(facts)
        for name in UNBORN.keys() - kept:
            if isinstance(values := facts.get(name), list) and len(values) == count:
                known = dict(zip(self.places[count], values, strict=True))
                result[name] = [known.get(layer, UNBORN[name]) for layer in range(self.layers)]
        return result

    def start_heads(self, plan: Plan) -> tuple[int, ...]:
        """The heads at the start, none in layers that were born later."""
        heads = dict(zip(self.places[len(plan.layers)], plan.heads, strict=True))
        return tuple(heads.get(layer, 0) for layer in range(self.layers))


def _copies(event: Event, layers: int) -> list[list[int]]:
    """The copies that a stack says it made, if they can have been made in a model of so many layers."""
    if not isinstance(event, GrowthEvent) or event.action != "stack":
        return []
    copies = event.facts.get("copies")
    if not isinstance(copies, list):
        return []
    for number, copy in enumerate(copies):
        whole = isinstance(copy, list) and len(copy) == 2 and all(type(value) is int for value in copy)
        if not whole or not 0 <= copy[0] <= layers + number or not 0 <= copy[1] < layers + number:
            return []
    return copies
