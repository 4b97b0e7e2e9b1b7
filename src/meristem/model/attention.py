"""Self-attention of one layer, with its own number and width of heads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from meristem.model.backends import BACKENDS
from meristem.model.cache import CacheSlot
from meristem.model.fused import norm_heads, project_heads, rotate, write_heads
from meristem.model.fused_loops import gather_heads
from meristem.model.rotary import RotaryPair
from meristem.plan import NORM_EPS, LayerPlan

# Called with queries and keys as attention compares them (rotated, and normed if the plan says so), the heads' outputs
# (B, heads, T, head dim each), and what the layer adds.
HeadsWatch = Callable[[Tensor, Tensor, Tensor, Tensor], None]
PIECE = 128  # terms that are summed at once on a CPU


class View(NamedTuple):
    """What the tokens of an attention pass may see: those before them and themselves if `causal`, else all.

    A boolean `mask` (B or 1, 1, T, S), true where a token may look, is used instead if it is given. With a `cache`, the
    tokens follow the `start` tokens that it holds, and see these too. `watch` is shown what the heads do.
    """

    causal: bool = True
    mask: Tensor | None = None
    start: int = 0
    cache: CacheSlot | None = None
    watch: HeadsWatch | None = None


class LoopedHeads(NamedTuple):
    """The slices of a layer's projections that belong to its looped heads.

    `qkv` (3 heads e, d) holds queries, keys, values, head by head, with their `bias` (3 heads e,) if they have one;
    `out` (d, heads, e) is what writes to the stream.
    """

    qkv: Tensor
    out: Tensor
    bias: Tensor | None = None

    @property
    def heads(self) -> int:
        return self.out.shape[1]

    def gated_out(self, gates: Tensor | None) -> Tensor:
        """The output projection (d, heads e), each head multiplied by its gate (heads,) if there are gates."""
        return (self.out if gates is None else self.out * gates[:, None]).flatten(1)


class Attention(nn.Module):
    """Self-attention from (B, T, d) to (B, T, d). Rows of `qkv` are ordered queries, keys, values, head by head.

    With `qk_norm` queries and keys are RMS-normed, head by head; with `qk_gain` these norms have gains (head dim,),
    which all queries of the layer share, and all keys. `bias` is that of queries, keys and values.
    """

    looped: Tensor
    takers: Tensor
    query_gain: nn.Parameter | None
    key_gain: nn.Parameter | None

    def __init__(
        self, width: int, layer: LayerPlan, *, qk_norm: bool = False, qk_gain: bool = False, bias: bool = False,
        eps: float = NORM_EPS,
    ) -> None:  # fmt: skip
        super().__init__()
        self.qk_norm, self.eps = qk_norm, eps
        self.qkv = nn.Linear(width, layer.query_width + 2 * layer.kv_width, bias=bias)
        for name in ("query_gain", "key_gain"):
            self.register_parameter(name, nn.Parameter(torch.ones(layer.head_dim)) if qk_gain else None)
        self.out = nn.Linear(layer.query_width, width, bias=False)
        self.backend: str | None = None  # None lets torch choose
        self.register_buffer("looped", torch.empty(0, dtype=torch.long), persistent=False)
        self.register_buffer("takers", torch.empty(0, 0, dtype=torch.long), persistent=False)
        self.restructure(layer)

    def reset_vectors(self) -> None:
        """Set biases to 0 and gains to 1, where there are any."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        for gain in (self.query_gain, self.key_gain):
            if gain is not None:
                nn.init.ones_(gain)

    def restructure(self, layer: LayerPlan) -> None:
        """Take the plan of the layer; a later one may differ in what is run again."""
        self.layer = layer
        heads = () if layer.loop is None else layer.loop.heads
        shared = [head // (layer.heads // layer.kv_heads) for head in heads]  # the key/value head of each
        rows = [
            *heads,
            *(layer.heads + head for head in shared),
            *(layer.heads + layer.kv_heads + head for head in shared),
        ]
        self.looped = torch.tensor(rows, dtype=torch.long, device=self.looped.device)
        self.takers = torch.tensor(_takers(rows, layer), dtype=torch.long, device=self.takers.device)
        # Compiled code depends on the number of passes alone: which heads are looped is in a tensor.
        self.passes = 0 if layer.loop is None else layer.loop.passes

    @property
    def bias(self) -> Tensor | None:
        """The bias of queries, keys and values, in the order of the rows of `qkv`."""
        bias: Tensor | None = self.qkv.bias
        return bias

    @property
    def looped_queries(self) -> Tensor:
        """The looped heads; `looped` has their keys and values after them, as rows of the packed projection."""
        return self.looped[: len(self.looped) // 3]

    def looped_heads(self) -> LoopedHeads:
        """The weights of the looped heads; each has its own copy of the keys and values it shares with others.

        Which heads these are is a matter of values, not of shapes: a compiled graph serves any choice.
        """
        dim = self.layer.head_dim
        qkv = gather_heads(self.qkv.weight.unflatten(0, (-1, dim)), 0, self.looped, self.takers)
        queries = self.takers[: self.layer.heads]
        out = gather_heads(self.out.weight.unflatten(1, (-1, dim)), 1, self.looped_queries, queries)
        if (bias := self.bias) is not None:
            bias = gather_heads(bias.unflatten(0, (-1, dim)), 0, self.looped, self.takers).flatten()
        return LoopedHeads(qkv.flatten(0, 1), out, bias)

    @property
    def follows(self) -> bool:
        """Whether heads that read again can go by what was added to the stream, without seeing it.

        A bias does not grow with the norm, and a gain does not commute with the rotation.
        """
        return self.bias is None and self.query_gain is None

    def forward(
        self,
        x: Tensor,
        gain: Tensor,
        rope: RotaryPair,
        view: View = View(),  # noqa: B008  (immutable)
    ) -> Tensor:
        """Attention with all heads over a norm x (B, T, d), whose gain is (d,)."""
        return self.attend(*self.project(x, gain, rope), self.out.weight, view)

    def project(
        self, x: Tensor, gain: Tensor, rope: RotaryPair, looped: LoopedHeads | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each (B, T, its heads, head dim), of all heads or the looped ones.

        If the plan says so queries and keys are normed.
        """
        heads, kv_heads, weight, bias = self.layer.heads, self.layer.kv_heads, self.qkv.weight, self.bias
        if looped is not None:
            heads, kv_heads, weight, bias = looped.heads, looped.heads, looped.qkv, looped.bias
        if self.query_gain is None or self.key_gain is None:
            eps = self.eps if self.qk_norm else None
            return project_heads(x, weight, gain, *rope, heads=heads, kv_heads=kv_heads, eps=eps, bias=bias)
        # A gain stands between norm and rotation, which the fused operator makes in one pass.
        packed = linear(x, (weight * gain).to(x.dtype), None if bias is None else bias.to(x.dtype))
        queries, keys, values = packed.unflatten(-1, (-1, self.layer.head_dim)).split((heads, kv_heads, kv_heads), 2)
        gained = norm_heads(queries, self.eps) * self.query_gain, norm_heads(keys, self.eps) * self.key_gain
        queries, keys = (rotate(part, *rope).to(x.dtype) for part in gained)
        return queries, keys, values

    def normed(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, T, heads, head dim) that were not projected here, normed if the plan says so."""
        return (norm_heads(queries, self.eps), norm_heads(keys, self.eps)) if self.qk_norm else (queries, keys)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, view: View) -> Tensor:
        """What heads, each (B, T, heads, head dim), write through `out` (d, heads e) to the stream, (B, T, d)."""
        head_outputs = self.read(queries, keys, values, view)
        update = write(head_outputs.flatten(2), out)
        if view.watch is not None:
            view.watch(queries.transpose(1, 2), keys.transpose(1, 2), head_outputs.transpose(1, 2), update)
        return update

    def read(self, queries: Tensor, keys: Tensor, values: Tensor, view: View) -> Tensor:
        """What heads, each (B, T, heads, head dim), read of the tokens they see, in the same shape."""
        queries, keys, values = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        causal, mask, start, cache, _ = view
        if cache is not None:
            keys, values = cache.append(start, keys, values)
        # The fixed kernel is the training one, causal or with an encoder's mask; decoding may ask for more than it can.
        fixed = self.backend if cache is None and (mask is None or not causal) else None
        with nullcontext() if fixed is None else sdpa_kernel(BACKENDS[fixed]):
            head_outputs = scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=causal and mask is None,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
        return head_outputs.transpose(1, 2)


def write(head_outputs: Tensor, out: Tensor) -> Tensor:
    """What heads with the outputs (B, T, heads e) write to the stream through `out` (d, heads e), (B, T, d).

    CPU libraries cut sums of more than 192 terms at places that depend on their number. Cut here, at the same places
    always, a head that writes nothing yet changes no bit of what the others write. (On several threads a library may
    still divide small products by their shape.)
    """
    # Pieces in half precision would be rounded each.
    if head_outputs.device.type != "cpu" or head_outputs.dtype.itemsize < 4:
        return write_heads(head_outputs, out)
    parts = zip(head_outputs.split(PIECE, -1), out.split(PIECE, 1), strict=True)
    return reduce(torch.add, (linear(*part) for part in parts))


def _takers(looped: list[int], layer: LayerPlan) -> list[list[int]]:
    """For each head of the packed projection, its places in `looped`, then -1 up to as many as there could be.

    Keys and values can be taken several times, by looped queries that share them.
    """
    most = min(len(looped) // 3, layer.heads // layer.kv_heads)
    places = [
        [place for place, taken in enumerate(looped) if taken == head]
        for head in range(layer.heads + 2 * layer.kv_heads)
    ]
    return [own + [-1] * (most - len(own)) for own in places]
