"""Logs of a run whose blocks were stacked: what was said of few layers, told of those that there are at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meristem.plan import Plan

Entry = Mapping[str, Any]

# What events and observations have of every layer, and what stands for a layer that was not born yet.
UNBORN: dict[str, Any] = {
    "heads": 0, "demand": None, "noise": None, "threshold": None, "rules": "not born yet", "own_share": [],
    "predicted_heads": {"count": 0}, "asymmetry": None, "rank": None, "head_entropy": [], "layer_entropy": None,
}  # fmt: skip
LOOPS = ("add", "deepen", "fade", "fix", "wait", "postponed")  # actions whose `heads` are those of a loop


class Depth:
    """The numbers of layers that a run has had, and where each of them is among the last."""

    def __init__(self, start: int, entries: Iterable[Entry]) -> None:
        self.places: dict[int, tuple[int, ...]] = {start: tuple(range(start))}  # by number of layers
        for entry in entries:
            if entry.get("action") == "stack" and _is_stack(entry, max(self.places)):
                self._stack(entry["copies"])

    def _stack(self, copies: Sequence[Sequence[int]]) -> None:
        count = max(self.places)
        for at, _ in copies:
            count += 1
            self.places = {
                had: tuple(place + (place >= at) for place in places) for had, places in self.places.items()
            } | {count: tuple(range(count))}

    @property
    def layers(self) -> int:
        """The number of layers at the end."""
        return max(self.places)

    def lifted(self, entry: Entry) -> Entry:
        """An entry with what it says of its layers as of those at the end; one that cannot be is left as it is."""
        per_layer = [name for name in UNBORN if name != "heads" or entry.get("action") not in LOOPS]
        named = [name for name in per_layer if isinstance(entry.get(name), list) and entry[name]]
        counts = {len(entry[name]) for name in named}
        if len(counts) != 1 or (count := counts.pop()) not in self.places or count == self.layers:
            return entry
        places = self.places[count]
        result = dict(entry)
        for name in named:
            values = dict(zip(places, entry[name], strict=True))
            result[name] = [values.get(layer, UNBORN[name]) for layer in range(self.layers)]
        if type(layer := entry.get("layer")) is int and 0 <= layer < count:
            result["layer"] = places[layer]
        return result

    def start_heads(self, plan: Plan) -> tuple[int, ...]:
        """The heads at the start, none in layers that were born later."""
        heads = dict(zip(self.places[len(plan.layers)], plan.heads, strict=True))
        return tuple(heads.get(layer, 0) for layer in range(self.layers))


def _is_stack(entry: Entry, layers: int) -> bool:
    """Whether the copies that a stack says it made can have been made in a model of so many layers."""
    copies = entry.get("copies")
    if not isinstance(copies, list) or not copies:
        return False
    for number, copy in enumerate(copies):
        whole = isinstance(copy, list) and len(copy) == 2 and all(type(value) is int for value in copy)
        if not whole or not 0 <= copy[0] <= layers + number or not 0 <= copy[1] < layers + number:
            return False
    return True
