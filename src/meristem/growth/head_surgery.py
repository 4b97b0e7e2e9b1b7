"""Adding and removing heads: pure maps on a layer's plan, on its two weights and on everything shaped like them.

The rows of `qkv` are the queries, keys and values of a layer, head by head, perhaps with their bias as one more column;
the columns of `out` belong to the heads.
An optimizer's moments have the same shapes, so the same maps serve them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from meristem.errors import InputError
from meristem.plan import LayerPlan, Loop

# What a newborn's values are scaled by. The optimizer's first steps of `out` are as long as those of old heads, so with
# values of full size the newborn would write much before it has learnt what.
NEWBORN_VALUES = 0.05


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

    def with_columns(self, count: int) -> Head:
        """Queries, keys and values in rows of `count` columns, what they lack being zero: a bias, if there is one."""
        return self.mapped(lambda part: pad(part, (0, count - part.shape[1])))._replace(out=self.out)


def with_head(layer: LayerPlan) -> LayerPlan:
    """The layer with one head more, which has its own keys and values unless all heads share one pair."""
    _check_groups(layer)
    if layer.heads == layer.ceiling:
        raise InputError("heads", layer.heads, "is the layer's ceiling: it may have no more")
    shared = layer.heads != layer.kv_heads
    return replace(layer, heads=layer.heads + 1, kv_heads=layer.kv_heads + (0 if shared else 1))


def fewest_heads(layer: LayerPlan) -> int:
    """The number of heads that have to stay: one, or two that share keys and values, as one alone would not say so."""
    return 1 if layer.heads == layer.kv_heads else 2


def without_head(layer: LayerPlan, head: int, *, with_loop: bool = False) -> LayerPlan:
    """The layer with one head less; its loop follows the heads that stay.

    A head that is looped leaves only `with_loop`, which then goes on with the others, or ends if there are none.
    """
    _check_groups(layer)
    if not 0 <= head < layer.heads:
        raise InputError("head", head, f"must be in 0..{layer.heads - 1}")
    if layer.heads == 1:
        raise InputError("head", head, "is the last one of its layer and has to stay")
    if layer.heads <= fewest_heads(layer):
        raise InputError("head", head, "is one of the last two of its layer, which share keys and values; both stay")
    loop = layer.loop
    if loop is not None and head in loop.heads and not with_loop:
        raise InputError("head", head, f"is one of the looped ones, {list(loop.heads)}; it leaves with its loop only")
    if loop is not None:
        kept, fading = (
            tuple(other - (other > head) for other in heads if other != head) for heads in (loop.heads, loop.fading)
        )
        loop = Loop(kept, loop.passes, fading) if set(kept) > set(fading) else None
    shared = layer.heads != layer.kv_heads
    return replace(layer, heads=layer.heads - 1, kv_heads=layer.kv_heads - (0 if shared else 1), loop=loop)


def without_group(layer: LayerPlan, group: int) -> LayerPlan:
    """The layer without a pair of keys and values and all the heads that share it; its loop follows those that stay."""
    size = layer.heads // layer.kv_heads
    if not 0 <= group < layer.kv_heads:
        raise InputError("group", group, f"must be in 0..{layer.kv_heads - 1}")
    if layer.kv_heads == 1:
        raise InputError("group", group, "is the last one of its layer and has to stay")
    loop, own = layer.loop, range(group * size, (group + 1) * size)
    if loop is not None:
        if set(loop.heads) & set(own):
            raise InputError("group", group, f"has looped heads, {list(loop.heads)}, which leave with their loop only")
        kept, fading = (
            tuple(head - size * (head >= own.stop) for head in heads) for heads in (loop.heads, loop.fading)
        )
        loop = Loop(kept, loop.passes, fading)
    return replace(layer, heads=layer.heads - size, kv_heads=layer.kv_heads - 1, loop=loop)


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


def drop_group(layer: LayerPlan, qkv: Tensor, out: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Both weights without a pair of keys and values and the heads that share it."""
    e, size = layer.head_dim, layer.heads // layer.kv_heads
    queries, keys, values = qkv.split((layer.query_width, layer.kv_width, layer.kv_width))
    kept = [_without(queries, group, size * e), *(_without(part, group, e) for part in (keys, values))]
    return torch.cat(kept), _without(out.T, group, size * e).T.contiguous()


def packed_layer(source: LayerPlan, shape: LayerPlan) -> LayerPlan:
    """The layer of the head dim and ceiling of `shape` with as many heads as the projections of `source` fill."""
    heads = -(-source.query_width // shape.head_dim)
    heads = heads if shape.ceiling is None else min(heads, shape.ceiling)
    return replace(shape, heads=heads, kv_heads=1 if shape.kv_heads == 1 < shape.heads else heads)


def repacked(
    source: LayerPlan, copy: LayerPlan, qkv: Tensor, out: Tensor, fill: Callable[[str, Tensor, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Both weights of a layer in the widths of a copy that has other heads: rows as they are packed, cut or filled up.

    `fill(name, rows, count)` gives the rows (count, d) that follow those of query, key, value or out where they are
    too few.
    """

    def fitted(name: str, rows: Tensor, width: int) -> Tensor:
        missing = width - len(rows)
        return rows[:width] if missing <= 0 else torch.cat((rows, fill(name, rows, missing)))

    query, key, value = qkv.split((source.query_width, source.kv_width, source.kv_width))
    new = torch.cat(
        (
            fitted("query", query, copy.query_width),
            fitted("key", key, copy.kv_width),
            fitted("value", value, copy.kv_width),
        )
    )
    return new, fitted("out", out.T, copy.query_width).T.contiguous()


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


def newborn_head(layer: LayerPlan, width: int, directions: tuple[Tensor, Tensor, Tensor] | None, seed: int) -> Head:
    """A head for a layer of a model of this width that writes nothing yet.

    Its queries, keys and values (e, d) are those of a scout that has found what is asked for; where there is none they
    are drawn at random. Values have rows of norm 1 in either case, and are made small here.

    >>> head = newborn_head(plan.layers[0], plan.width, None, seed=0)
    >>> head.query.shape, int(head.out.count_nonzero())
    (torch.Size([8, 32]), 0)
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, layer.head_dim, width, generator=generator) / width**0.5
    query, key, value = drawn.unbind() if directions is None else directions
    value = NEWBORN_VALUES * value
    shared = layer.heads != layer.kv_heads
    return Head(query, None if shared else key, None if shared else value, torch.zeros(width, layer.head_dim))


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
