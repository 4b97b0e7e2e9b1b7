"""Adding and removing heads: pure maps on a layer's plan, on its two weights and on everything shaped like them.

The rows of `qkv` are the queries, keys and values of a layer, head by head; the columns of `out` belong to the heads.
An optimizer's moments have the same shapes, so the same maps serve them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.plan import LayerPlan


class Head(NamedTuple):
    """The slices of one head: queries, keys and values (e, d), and what writes to the stream, (d, e).

    Keys and values are None for a head that shares those of others.
    """

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    out: Tensor

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Head:
        """Every slice changed in the same way."""
        key, value = (None if part is None else change(part) for part in (self.key, self.value))
        return Head(change(self.query), key, value, change(self.out))


def with_head(layer: LayerPlan) -> LayerPlan:
    """The layer with one head more, which has its own keys and values unless all heads share one pair."""
    _check_groups(layer)
    shared = layer.heads != layer.kv_heads
    return replace(layer, heads=layer.heads + 1, kv_heads=layer.kv_heads + (0 if shared else 1))


def fewest_heads(layer: LayerPlan) -> int:
    """As many as have to stay: one, or two that share keys and values, as nothing would say that a single one did."""
    return 1 if layer.heads == layer.kv_heads else 2


def without_head(layer: LayerPlan, head: int) -> LayerPlan:
    """The layer with one head less."""
    _check_groups(layer)
    if not 0 <= head < layer.heads:
        raise InputError("head", head, f"must be in 0..{layer.heads - 1}")
    if layer.heads == 1:
        raise InputError("head", head, "is the last one of its layer and has to stay")
    if layer.heads <= fewest_heads(layer):
        raise InputError("head", head, "is one of the last two of its layer, which share keys and values; both stay")
    if layer.loop is not None:
        raise InputError("head", head, f"cannot leave a layer whose heads {list(layer.loop.heads)} are looped")
    shared = layer.heads != layer.kv_heads
    return replace(layer, heads=layer.heads - 1, kv_heads=layer.kv_heads - (0 if shared else 1))


def check_head(layer: LayerPlan, width: int, head: Head) -> None:
    """Refuse, by name, a head that does not fit into a layer of a model of this width."""
    shared = layer.heads != layer.kv_heads
    rows, columns = (layer.head_dim, width), (width, layer.head_dim)
    parts = (
        ("queries", head.query, rows), ("keys", head.key, None if shared else rows),
        ("values", head.value, None if shared else rows), ("out", head.out, columns),
    )  # fmt: skip
    for name, part, right in parts:
        shape = None if part is None else tuple(part.shape)
        if shape == right:
            continue
        if right is None:
            raise InputError(name, shape, "must be None: the heads of this layer share one pair of keys and values")
        raise InputError(name, shape, f"must be of shape {right}, for heads of {layer.head_dim} and width {width}")


def head_of(layer: LayerPlan, qkv: Tensor, out: Tensor, head: int) -> Head:
    """The slices of one head."""
    e, queries, keys = layer.head_dim, layer.query_width, layer.kv_width
    rows = slice(head * e, (head + 1) * e)
    if layer.heads != layer.kv_heads:
        return Head(qkv[rows], None, None, out[:, rows])
    return Head(qkv[rows], qkv[queries:][rows], qkv[queries + keys :][rows], out[:, rows])


def insert_head(layer: LayerPlan, qkv: Tensor, out: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Both weights with the head as the last one of the layer."""
    queries, keys, values = qkv.split((layer.query_width, layer.kv_width, layer.kv_width))
    parts = [queries, head.query, keys, head.key, values, head.value]
    return torch.cat([part for part in parts if part is not None]), torch.cat((out, head.out), dim=1)


def drop_head(layer: LayerPlan, qkv: Tensor, out: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """Both weights without a head."""
    e = layer.head_dim
    queries, keys, values = qkv.split((layer.query_width, layer.kv_width, layer.kv_width))
    shared = layer.heads != layer.kv_heads
    kept = [_without(queries, head, e), *(part if shared else _without(part, head, e) for part in (keys, values))]
    return torch.cat(kept), _without(out.T, head, e).T.contiguous()


def mean_head(layer: LayerPlan, qkv: Tensor, out: Tensor) -> Head:
    """The average of the layer's heads: what a newborn one is given as its second moment."""
    heads = [head_of(layer, qkv, out, index) for index in range(layer.heads)]
    query, key, value, written = (
        _mean([part for part in parts if part is not None]) for parts in zip(*heads, strict=True)
    )
    assert query is not None
    assert written is not None
    return Head(query, key, value, written)


def empty_head(layer: LayerPlan, qkv: Tensor, out: Tensor) -> Head:
    """A head of zeros."""
    return head_of(layer, qkv, out, 0).mapped(torch.zeros_like)


def newborn_head(
    layer: LayerPlan, qkv: Tensor, out: Tensor, directions: tuple[Tensor, Tensor] | None, seed: int
) -> Head:
    """A head for a layer with these weights that writes nothing yet.

    Where queries and keys (e, d) that look for what is asked for are known, half of its own are these; the rest is
    drawn at random.
    """
    blank = empty_head(layer, qkv, out)
    generator = torch.Generator().manual_seed(seed)

    def drawn(like: Tensor, direction: Tensor | None = None) -> Tensor:
        chance = torch.randn(like.shape, generator=generator).to(like) / like.shape[1] ** 0.5
        return chance if direction is None else (chance + direction.to(like)) / 2

    query, key = (None, None) if directions is None else directions
    return Head(
        drawn(blank.query, query),
        None if blank.key is None else drawn(blank.key, key),
        None if blank.value is None else drawn(blank.value),
        blank.out,
    )


def _mean(parts: list[Tensor]) -> Tensor | None:
    return torch.stack(parts).mean(0) if parts else None


def _without(rows: Tensor, head: int, dim: int) -> Tensor:
    return torch.cat((rows[: head * dim], rows[(head + 1) * dim :]))


def _check_groups(layer: LayerPlan) -> None:
    if layer.kv_heads not in (1, layer.heads):
        raise InputError(
            "kv_heads", layer.kv_heads,
            f"must be 1 or {layer.heads} for heads to come and go: all share keys and values, or each has its own",
        )  # fmt: skip
