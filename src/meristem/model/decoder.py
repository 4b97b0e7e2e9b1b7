"""The decoder-only language model, built from a plan.

Pre-norm RMSNorm, rotary positions over each layer's own head dim, SwiGLU, tied embeddings, no biases.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from meristem.errors import InputError
from meristem.model.backends import choose_backends
from meristem.model.block import INIT_STD, Block, Norm, draw_normal
from meristem.model.cache import KVCache
from meristem.model.loss import linear_cross_entropy
from meristem.model.rotary import RotaryTables
from meristem.plan import Plan


class DecoderOutput(NamedTuple):
    """`loss` when labels were given, `logits` (B, T, V) when they were not."""

    loss: Tensor | None
    logits: Tensor | None


class Decoder(nn.Module):
    """A language model with the structure of `plan`, initialised from `seed`.

    Two plans with equal shapes, such as Prism and its uniform twin, get bit-equal weights from one seed.
    """

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        super().__init__()
        looped = [i for i, layer in enumerate(plan.layers) if layer.loop is not None]
        if looped:
            raise InputError(f"layers[{looped[0]}].loop", plan.layers[looped[0]].loop, "loops cannot be built yet")
        self.plan = plan
        self.embedding = nn.Embedding(plan.vocabulary, plan.width)
        self.blocks = nn.ModuleList(Block(plan.width, plan.feed_forward, layer) for layer in plan.layers)
        self.norm = Norm(plan.width)
        self.rotary = RotaryTables(plan.head_dims, plan.context)
        self.initialise(seed)

    @property
    def stack(self) -> list[Block]:
        """The blocks in order."""
        return cast("list[Block]", list(self.blocks))

    def initialise(self, seed: int) -> None:
        """Draw all weights anew."""
        generator = torch.Generator().manual_seed(seed)
        draw_normal(self.embedding.weight, INIT_STD, generator)
        for block in self.stack:
            block.initialise(len(self.stack), generator)
        self.norm.reset_parameters()

    def use_attention(self, device: torch.device, dtype: torch.dtype, wanted: str = "auto") -> list[str]:
        """Fix the attention kernel of every layer for training in `dtype`, and return their names."""
        names = choose_backends(self.plan.layers, device, dtype, wanted)
        for block, name in zip(self.stack, names, strict=True):
            block.attention.backend = name
        return names

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> DecoderOutput:
        """tokens (B, T); labels (B, T) hold the token that follows each position, -100 where none is asked for."""
        hidden = self.hidden(tokens)
        if labels is None:
            return DecoderOutput(None, self.logits(hidden))
        return DecoderOutput(linear_cross_entropy(hidden.flatten(0, 1), self.embedding.weight, labels.flatten()), None)

    def hidden(self, tokens: Tensor, cache: KVCache | None = None, padding: Tensor | None = None) -> Tensor:
        """Normed last hidden states (B, T, d) of tokens (B, T), which follow what the cache holds.

        `padding` (B,) counts the padding tokens on the left of each row, so that prompts of different lengths can
        share a batch.
        """
        start = 0 if cache is None else cache.length
        length = tokens.shape[1]
        stop = start + length
        limit = self.plan.context if cache is None else cache.capacity
        if stop > limit:
            raise InputError("tokens", stop, f"positions are more than the {limit} there are")
        positions: slice | Tensor = slice(start, stop)
        if padding is not None:
            positions = (torch.arange(start, stop, device=tokens.device) - padding[:, None]).clamp(min=0)
        # A single new token sees all that came before, and a first pass is plainly causal: neither needs a mask.
        masked = padding is not None or (start > 0 and length > 1)
        mask = visibility(start, stop, padding, tokens.device) if masked else None
        x = self.embedding(tokens)
        branch = torch.zeros_like(x)  # nothing has been computed yet
        for index, block in enumerate(self.stack):
            x, branch = block(
                x,
                branch,
                self.rotary.pair(block.attention.layer.head_dim, positions),
                causal=length > 1,
                mask=mask,
                cache=None if cache is None else cache.layers[index],
                start=start,
            )
        if cache is not None:
            cache.length = stop
        return self.norm(x, branch)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, (..., V)."""
        return linear(hidden, self.embedding.weight)


def visibility(start: int, stop: int, padding: Tensor | None, device: torch.device) -> Tensor:
    """Which positions before `stop` each of those from `start` may see: (B or 1, 1, stop - start, stop), boolean.

    `padding` (B,) positions on the left of a row are seen by nobody but themselves, so that no row is empty.
    """
    columns = torch.arange(stop, device=device)
    rows = columns[start:, None]
    seen = columns <= rows
    if padding is None:
        return seen[None, None]
    return ((seen & (columns >= padding[:, None, None])) | (columns == rows))[:, None]
