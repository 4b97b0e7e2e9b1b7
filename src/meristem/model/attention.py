"""Causal self-attention of one layer, with its own number and width of heads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from meristem.model.backends import BACKENDS
from meristem.model.cache import CacheSlot
from meristem.model.fused import project_heads
from meristem.model.rotary import RotaryPair
from meristem.plan import LayerPlan

HeadsWatch = Callable[[Tensor, Tensor, Tensor], None]  # called with turned queries and keys, and the output


class HeadWeights(NamedTuple):
    """The projections of a layer's heads, or of some of them.

    `qkv` (rows, d) holds queries, keys, values, head by head; `out` (d, columns) one column block per query head.
    """

    qkv: Tensor
    out: Tensor
    heads: int
    kv_heads: int

    def gated(self, gates: Tensor | None) -> HeadWeights:
        """The same heads, each head's output multiplied by its gate, (heads,)."""
        if gates is None:
            return self
        scaled = self.out.unflatten(1, (self.heads, -1)) * gates[:, None]
        return self._replace(out=scaled.flatten(1))


class Attention(nn.Module):
    """Shapes: input and output (B, T, d); the projection's rows are ordered queries, keys, values, head by head."""

    looped: Tensor

    def __init__(self, width: int, layer: LayerPlan) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, layer.query_width + 2 * layer.kv_width, bias=False)
        self.out = nn.Linear(layer.query_width, width, bias=False)
        self.backend: str | None = None  # None lets torch choose
        self.register_buffer("looped", torch.empty(0, dtype=torch.long), persistent=False)
        self.restructure(layer)

    def restructure(self, layer: LayerPlan) -> None:
        """Take the plan of the layer; a later one may differ in what is run again."""
        self.layer = layer
        heads = torch.tensor(() if layer.loop is None else layer.loop.heads, dtype=torch.long)
        shared = heads // (layer.heads // layer.kv_heads)  # the key/value head of each looped query head
        rows = torch.cat((heads, layer.heads + shared, layer.heads + layer.kv_heads + shared))
        self.looped = rows.to(self.looped.device)
        self.passes = 0 if layer.loop is None else layer.loop.passes  # read by compiled code, which heads are is not

    def all_heads(self) -> HeadWeights:
        """The weights of the layer."""
        return HeadWeights(self.qkv.weight, self.out.weight, self.layer.heads, self.layer.kv_heads)

    def looped_heads(self) -> HeadWeights:
        """The slices of the weights that belong to the looped heads; each has its own copy of keys and values.

        Which heads these are is a matter of values, not of shapes: a compiled graph serves any choice.
        """
        count, dim = len(self.looped) // 3, self.layer.head_dim
        qkv = self.qkv.weight.unflatten(0, (-1, dim)).index_select(0, self.looped)
        out = self.out.weight.unflatten(1, (-1, dim)).index_select(1, self.looped[:count])
        return HeadWeights(qkv.flatten(0, 1), out.flatten(1), count, count)

    def project(
        self, x: Tensor, rotary: RotaryPair, weights: HeadWeights | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both turned to their positions) and values, each (B, its heads, T, head dim)."""
        weights = weights or self.all_heads()
        queries, keys, values = project_heads(x, weights.qkv, *rotary, heads=weights.heads, kv_heads=weights.kv_heads)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryPair,
        weights: HeadWeights | None = None,
        *,
        causal: bool = True,
        mask: Tensor | None = None,
        cache: CacheSlot | None = None,
        start: int = 0,
        watch: HeadsWatch | None = None,
    ) -> Tensor:
        """Attend over x, and over what the cache holds before `start`, with all heads or those of `weights`.

        `mask` (B, 1, T, S) replaces `causal`.
        """
        weights = weights or self.all_heads()
        queries, keys, values = self.project(x, rotary, weights)
        if cache is not None:
            keys, values = cache.append(start, keys, values)
        # The fixed kernel is the training one; decoding has masks and shapes that it may refuse.
        fixed = None if cache is not None or mask is not None else self.backend
        with nullcontext() if fixed is None else sdpa_kernel(BACKENDS[fixed]):
            mixed = scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=causal and mask is None,
                enable_gqa=weights.heads != weights.kv_heads,
            )
        result = linear(mixed.transpose(1, 2).flatten(2), weights.out)
        if watch is not None:
            watch(queries, keys, result)
        return result
