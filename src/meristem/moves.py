"""Which layers and heads moved where when a structure changed: for whoever keeps something of each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Moves:
    """A change of structure as maps from new places to old ones.

    `layers` has the old number of every new layer, None for one that was born. `heads` has, by the new number of a
    layer whose heads changed, the old number of every head, None for one that was born. `copies` names the old layer
    that a new one is a copy of; its `layers` entry is None.

    >>> moves = RemoveHead(0, 1).moves(plan)
    >>> moves.head(0, 3), moves.head(0, 1)
    (2, None)
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

    def then(self, later: Moves) -> Moves:
        """Both changes as one."""

        def source(layer: int) -> int | None:
            """The old layer that one in between is, or is a copy of."""
            return self.copies.get(layer, self.layers[layer])

        layers = tuple(None if middle is None else self.layers[middle] for middle in later.layers)
        copied = {new: later.copies.get(new, middle) for new, middle in enumerate(later.layers) if layers[new] is None}
        sources = {new: source(middle) for new, middle in copied.items() if middle is not None}
        heads: dict[int, tuple[int | None, ...]] = {}
        for new, middle in enumerate(later.layers):
            before = None if middle is None else self.heads.get(middle)
            after = later.heads.get(new)
            if before is not None and after is not None:
                heads[new] = tuple(None if head is None else before[head] for head in after)
            elif before is not None or after is not None:
                heads[new] = before or after or ()
        return Moves(layers, heads, {new: old for new, old in sources.items() if old is not None})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what stays as it is is left out."""
        same = self.layers == tuple(range(len(self.layers)))
        return {
            **({} if same else {"layers": list(self.layers)}),
            **({"heads": {str(layer): list(heads) for layer, heads in self.heads.items()}} if self.heads else {}),
            **({"copies": {str(new): old for new, old in self.copies.items()}} if self.copies else {}),
        }

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
