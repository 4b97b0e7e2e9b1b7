"""The weights of a model as decoding and export read them: one attention pass after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meristem.model.block import Block
from meristem.model.decoder import Decoder
from meristem.model.operators import accum_dtype
from meristem.model.transformer import Transformer
from meristem.plan import LayerPlan, Plan


class FeedForwardWeights(NamedTuple):
    """A feed-forward: `gate_up` (2 f, d) and `down` (d, f).

    `gain` (d,) is that of the norm before; None if it is already multiplied into `gate_up`.
    """

    gate_up: Tensor
    down: Tensor
    gain: Tensor | None = None


class PassWeights(NamedTuple):
    """One attention pass, and the feed-forward if one follows it.

    The rows of `qkv` (.., d) are queries, keys and values, head by head; `out` is (d, heads e). `gain` (d,) is that of
    the norm before; None if it is already multiplied into `qkv`. `bias` (..,) is that of queries, keys and values, and
    `head_gains` (2, e) are those of the norms of queries and keys, where there are any. Every pass has a slot of the
    cache to itself.
    """

    qkv: Tensor
    out: Tensor
    heads: int
    head_dim: int
    feed_forward: FeedForwardWeights | None
    gain: Tensor | None = None
    bias: Tensor | None = None
    head_gains: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return (len(self.qkv) // self.head_dim - self.heads) // 2

    @property
    def tensors(self) -> Iterator[Tensor]:
        found = (self.qkv, self.out, self.gain, *(self.feed_forward or ()), self.bias, self.head_gains)
        yield from (tensor for tensor in found if tensor is not None)


class Weights(NamedTuple):
    """All of a model: loops and repeats are passes like the others."""

    embedding: Tensor
    passes: tuple[PassWeights, ...]
    unembedding: Tensor  # with the gain of the last norm, unless that is given
    rope: dict[int, Tensor]  # cosines and signed sines of each head dim, (T, 2, dim)
    qk_norm: bool  # whether queries and keys are normed
    eps: float  # of every norm
    gain: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Each tensor once, always in the same order."""
        passes = (tensor for each in self.passes for tensor in each.tensors)
        found = (self.embedding, *passes, self.unembedding, self.gain, *self.rope.values())
        return list({id(tensor): tensor for tensor in found if tensor is not None}.values())


@torch.no_grad()
def unrolled(
    model: Transformer, ready: Callable[[Tensor], Tensor] = Tensor.detach, *, fold_gains: bool = True
) -> Weights:
    """The weights of a model as they are now; those of its products are made `ready`.

    The gain of a norm is multiplied into the product that reads it, or stands beside it.
    """
    embedding, gates = model.embedding.weight.detach(), model.gates
    passes: list[PassWeights] = []
    for index, (block, layer) in enumerate(zip(model.stack, model.plan.layers, strict=True)):
        strengths = None if gates is None or layer.loop is None else gates[index, :, : len(layer.loop.heads)]
        passes += _passes(block, layer, strengths, ready, fold_gains)
    kind = accum_dtype(embedding.dtype)
    rope = {dim: torch.cat(model.rope(dim), dim=1).to(kind) for dim in sorted(set(model.plan.head_dims))}
    output = model.unembedding if isinstance(model, Decoder) else model.embedding
    unembedding, gain = _folded(output.weight, model.norm.weight, ready, fold_gains)
    return Weights(embedding, tuple(passes), unembedding, rope, model.plan.qk_norm, model.plan.norm_eps, gain)


def _folded(
    weight: Tensor, gain: Tensor, ready: Callable[[Tensor], Tensor], fold: bool
) -> tuple[Tensor, Tensor | None]:
    """A weight with its gain, and no gain; or both of them."""
    return (ready(weight * gain), None) if fold else (ready(weight), ready(gain))


def _passes(
    block: Block, layer: LayerPlan, gates: Tensor | None, ready: Callable[[Tensor], Tensor], fold: bool
) -> list[PassWeights]:
    attention, feed_forward = block.attention, block.feed_forward
    gate_up, gain = _folded(feed_forward.gate_up.weight, block.feed_forward_norm.weight, ready, fold)
    last = FeedForwardWeights(gate_up, ready(feed_forward.down.weight), gain)
    qkv, gain = _folded(attention.qkv.weight, block.attention_norm.weight, ready, fold)
    bias = None if attention.bias is None else ready(attention.bias)
    gains = None
    if attention.query_gain is not None and attention.key_gain is not None:
        gains = torch.stack((attention.query_gain, attention.key_gain))
    whole = PassWeights(qkv, ready(attention.out.weight), layer.heads, layer.head_dim, last, gain, bias, gains)
    if not attention.passes:
        return [whole] * (1 + layer.repeats)
    looped = attention.looped_heads()
    qkv, gain = _folded(looped.qkv, block.attention_norm.weight, ready, fold)
    bias = None if looped.bias is None else ready(looped.bias)
    loops = [
        PassWeights(qkv, ready(looped.gated_out(strength)), looped.heads, layer.head_dim, None, gain, bias, gains)
        for strength in ([None] * attention.passes if gates is None else gates[: attention.passes])
    ]
    return [whole._replace(feed_forward=None), *loops[:-1], loops[-1]._replace(feed_forward=last)]


class ReadyWeights:
    """Weights in the dtype of the products, kept where they are while the model goes on changing.

    What has this dtype already is shared with the model, the rest is a copy. Before each use `follow` takes over the
    values of the model.
    """

    def __init__(self, model: Decoder, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.plan: Plan = model.plan
        self.weights = unrolled(model, lambda weight: weight.detach().to(dtype))
        owned = {tensor.data_ptr() for tensor in model.parameters()}
        self._shared = [tensor.data_ptr() in owned for tensor in self.weights.tensors]

    def follow(self, model: Decoder) -> bool:
        """Take the values of the model; False if it has another structure or lies elsewhere, and nothing is done."""
        if model.plan != self.plan:
            return False
        pairs = list(zip(self.weights.tensors, unrolled(model).tensors, self._shared, strict=True))
        if any(kept.data_ptr() != live.data_ptr() for kept, live, shared in pairs if shared):
            return False
        copies = [(kept, live) for kept, live, shared in pairs if not shared]
        torch._foreach_copy_([kept for kept, _ in copies], [live for _, live in copies])
        return True
