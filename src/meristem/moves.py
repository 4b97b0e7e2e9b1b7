"""Which layers and heads moved where when a structure changed: for whoever keeps something of each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Moves:
    """A change of structure as maps from new places to old ones.

    `layers` has the old number of every new layer, None for one that was born. `heads` has, by the new number of a
    layer whose heads changed, the old number of every head, None for one that was born. `copies` names the old layer
    that a new one is a copy of; its `layers` entry is None.
    """

    layers: tuple[int | None, ...]
    heads: Mapping[int, tuple[int | None, ...]] = field(default_factory=dict)
    copies: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def none(cls, layers: int) -> Moves:
        """Everything stays where it is."""
        return cls(tuple(range(layers)))

    @property
    def stays(self) -> bool:
        """Whether all layers and heads keep their places."""
        return not self.heads and self.layers == tuple(range(len(self.layers)))

    @property
    def touched(self) -> frozenset[int]:
        """The layers, by their new numbers, that were born or whose heads changed."""
        return frozenset(self.heads) | {new for new, old in enumerate(self.layers) if old is None}

    def layer(self, old: int) -> int | None:
        """Where a layer went; None if it has left."""
        return self.layers.index(old) if old in self.layers else None

    def head(self, layer: int, old: int) -> int | None:
        """Where a head of a layer, by its new number, went within it; None if it has left."""
        heads = self.heads.get(layer)
        if heads is None:
            return old
        return heads.index(old) if old in heads else None

    def of_layers(self, values: Sequence[T], born: Callable[[int], T]) -> tuple[T, ...]:
        """One value for each layer, moved with it; `born` gives that of a new layer."""
        return tuple(born(new) if old is None else values[old] for new, old in enumerate(self.layers))

    def of_heads(self, layer: int, values: Sequence[T], born: Callable[[], T]) -> tuple[T, ...]:
        """One value for each head of a layer, by its new number, moved with it; `born` gives that of a new head."""
        heads = self.heads.get(layer)
        return tuple(values) if heads is None else tuple(born() if old is None else values[old] for old in heads)
