"""A batch of texts that are continued: prefill, then steps of a single token, in memory that stays where it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from meristem.decoding.decode_ops import attend_, gain_heads_, norm_linear, norm_swiglu, product
from meristem.decoding.sampling import Sampling, chances, draw, likeliest
from meristem.decoding.unrolled import ReadyWeights
from meristem.model.cache import KVCache
from meristem.model.decoder import Decoder

# Multiply-adds of a product up to which a second CPU thread costs more than it helps; far more on a busy machine,
# where each product would wait until that thread has its turn.
SMALL = 1 << 20


class Decoding:
    """Weights, cache, tokens and counters of a batch. A step needs nothing from the host, so it can be recorded.

    `vocabulary` is the number of ids that may be drawn; the seed of `sampling` comes with each request.
    """

    always_padded = False  # whether a step expects padding even if no row has any, so that one recording serves all

    def __init__(
        self, ready: ReadyWeights, batch: int, capacity: int, sampling: Sampling, vocabulary: int | None
    ) -> None:
        self.weights, self.dtype = ready.weights, ready.dtype
        self.sampling, self.vocabulary = sampling, vocabulary
        self.device = self.weights.embedding.device
        self.cache = KVCache(ready.plan, batch, capacity, self.device, self.dtype)
        self.slots = [slot.both for layer in self.cache.layers for slot in layer]
        self.tokens = self._zeros(batch)  # drawn last, and not yet read
        self.drawn = self._zeros(capacity, batch)  # all of them, step by step
        self.chances = self._zeros(capacity, batch, dtype=torch.float32)
        self.counters = self._zeros(2)
        self.position, self.steps = self.counters[:1], self.counters[1:]  # of the next token; how many are drawn
        self.padding = self._zeros(batch)
        self.nothing = torch.zeros(batch, ready.plan.width, device=self.device, dtype=self.dtype)
        self.ragged = False
        matrices = [batch * tensor.numel() for tensor in self.weights.tensors if tensor.dim() == 2]
        work = max(*matrices, *(slot.numel() for slot in self.slots))
        self.small = self.device.type == "cpu" and work <= SMALL

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=dtype)

    def prefill(self, model: Decoder, prompts: Sequence[Sequence[int]], seed: int, max_tokens: int) -> None:
        """Read the prompts in one pass, the shorter ones padded on the left, and draw the first token of each."""
        longest = max(map(len, prompts))
        rows = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=self.device)
        padding = torch.tensor([longest - len(prompt) for prompt in prompts])
        self.ragged = bool(padding.any())
        self.padding.copy_(padding)
        self.counters.copy_(torch.tensor([longest - 1, 0]))
        if not self.sampling.greedy:
            self.chances[:max_tokens].copy_(chances(seed, max_tokens, len(prompts)))
        self.cache.length = 0
        with _autocast(self.device, self.dtype if self.dtype != self.weights.embedding.dtype else None):
            normed = model.normed(rows, self.cache, self.padding if self.ragged else None)[:, -1]
        self._draw(linear(normed, self.weights.unembedding))

    def step(self) -> None:
        """Read the tokens drawn last, and draw the next ones."""
        with _autocast(self.device, None), _one_thread(self.small):
            self._draw(self._logits())

    def _logits(self) -> Tensor:
        """Logits (B, V) after the tokens drawn last; what attention needs of them is put into the cache."""
        weights = self.weights
        padding = self.padding if self.ragged or self.always_padded else None
        places = self.position - self.padding
        rope = {dim: table.index_select(0, places) for dim, table in weights.rope.items()}
        x, branch = embedding(self.tokens, weights.embedding).to(self.dtype), self.nothing
        for each, slot in zip(weights.passes, self.slots, strict=True):
            x, packed = norm_linear(x, branch, each.qkv, weights.eps)
            if each.bias is not None:
                packed += each.bias
            if each.head_gains is not None:
                gain_heads_(packed, each.head_gains, each.heads, weights.eps)
            turn, eps = rope[each.head_dim], weights.eps if weights.qk_norm and each.head_gains is None else None
            read = attend_(packed, slot, turn, self.position, padding, each.heads, eps)
            branch = product(read, each.out)
            if each.feed_forward is not None:
                x, hidden = norm_swiglu(x, branch, each.feed_forward.gate_up, weights.eps)
                branch = product(hidden, each.feed_forward.down)
        return norm_linear(x, branch, weights.unembedding, weights.eps)[1]

    def _draw(self, logits: Tensor) -> None:
        logits = logits[:, : self.vocabulary]
        if self.sampling.greedy:
            chosen = likeliest(logits)
        else:
            chosen = draw(logits, self.sampling, self.chances.index_select(0, self.steps)[0])
        # The host refuses a token that does not exist; until then none may be read here.
        torch.clamp(chosen, max=logits.shape[1] - 1, out=self.tokens)
        self.drawn.index_copy_(0, self.steps, chosen[None])
        self.counters += 1

    def draws(self, count: int) -> Iterator[list[int]]:
        """The tokens of the prefill, then those of `count` - 1 steps, as they come to the host."""
        for number in range(count):
            if number:
                self.step()
            yield self.drawn[number].tolist()


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Products in `dtype` whatever holds outside; None is no autocast.

    Nothing is cached: a copy made here has no gradient, and must not be found by a training step outside.
    """
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """Use a single CPU thread, if that is wanted."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if wanted:
            torch.set_num_threads(before)
