"""The weights of a model as decoding reads them: one attention pass after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meristem.model.block import Block
from meristem.model.decoder import Decoder
from meristem.model.operators import accum_dtype
from meristem.plan import LayerPlan, Plan


class FeedForwardWeights(NamedTuple):
    """A feed-forward: `gate_up` (2 f, d), which has the gain of the norm before it, and `down` (d, f)."""

    gate_up: Tensor
    down: Tensor


class PassWeights(NamedTuple):
    """One attention pass, and the feed-forward if one follows it.

    The rows of `qkv` (.., d) are queries, keys and values, head by head, with the gain of the norm before them; `out`
    is (d, heads e). `bias` (..,) is that of queries, keys and values, and `gains` (2, e) are those of the norms of
    queries and keys, where there are any. Every pass has a slot of the cache to itself.
    """

    qkv: Tensor
    out: Tensor
    heads: int
    head_dim: int
    feed_forward: FeedForwardWeights | None
    bias: Tensor | None = None
    gains: Tensor | None = None

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield from (self.qkv, self.out)
        yield from self.feed_forward or ()
        yield from (tensor for tensor in (self.bias, self.gains) if tensor is not None)


class Weights(NamedTuple):
    """All of a model: loops and repeats are passes like the others."""

    embedding: Tensor
    passes: tuple[PassWeights, ...]
    unembedding: Tensor  # with the gain of the last norm
    rope: dict[int, Tensor]  # cosines and signed sines of each head dim, (T, 2, dim)
    qk_norm: bool  # whether queries and keys are normed
    eps: float  # of every norm

    @property
    def tensors(self) -> list[Tensor]:
        """Each tensor once, always in the same order."""
        passes = (tensor for each in self.passes for tensor in each.tensors)
        found = (self.embedding, *passes, self.unembedding, *self.rope.values())
        return list({id(tensor): tensor for tensor in found}.values())


@torch.no_grad()
def unrolled(model: Decoder, ready: Callable[[Tensor], Tensor] = Tensor.detach) -> Weights:
    """The weights of a model as they are now; those of its products are made `ready`."""
    embedding, gates = model.embedding.weight.detach(), model.gates
    passes: list[PassWeights] = []
    for index, (block, layer) in enumerate(zip(model.stack, model.plan.layers, strict=True)):
        strengths = None if gates is None or layer.loop is None else gates[index, :, : len(layer.loop.heads)]
        passes += _passes(block, layer, strengths, ready)
    kind = accum_dtype(embedding.dtype)
    rope = {dim: torch.cat(model.rope(dim), dim=1).to(kind) for dim in sorted(set(model.plan.head_dims))}
    unembedding = ready(model.unembedding.weight * model.norm.weight)
    return Weights(embedding, tuple(passes), unembedding, rope, model.plan.qk_norm, model.plan.norm_eps)


def _passes(
    block: Block, layer: LayerPlan, gates: Tensor | None, ready: Callable[[Tensor], Tensor]
) -> list[PassWeights]:
    attention, feed_forward = block.attention, block.feed_forward
    gate_up = feed_forward.gate_up.weight * block.feed_forward_norm.weight
    last = FeedForwardWeights(ready(gate_up), ready(feed_forward.down.weight))
    gain = block.attention_norm.weight
    qkv, out = ready(attention.qkv.weight * gain), ready(attention.out.weight)
    bias = None if attention.bias is None else ready(attention.bias)
    gains = None
    if attention.query_gain is not None and attention.key_gain is not None:
        gains = torch.stack((attention.query_gain, attention.key_gain))
    whole = PassWeights(qkv, out, layer.heads, layer.head_dim, last, bias, gains)
    if not attention.passes:
        return [whole] * (1 + layer.repeats)
    looped = attention.looped_heads()
    qkv, bias = ready(looped.qkv * gain), None if looped.bias is None else ready(looped.bias)
    loops = [
        PassWeights(qkv, ready(looped.gated_out(strength)), looped.heads, layer.head_dim, None, bias, gains)
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
