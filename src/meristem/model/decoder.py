"""The decoder-only language model, built from a plan.

Pre-norm RMSNorm, rotary positions over each layer's own head dim, SwiGLU, tied embeddings, no biases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from meristem.errors import InputError
from meristem.model.backends import choose_backends
from meristem.model.block import INIT_STD, Block, Norm, Pass, PassWatch, draw_normal
from meristem.model.cache import KVCache
from meristem.model.loss import linear_cross_entropy
from meristem.model.rotary import RotaryTables
from meristem.plan import Plan


class DecoderOutput(NamedTuple):
    """`loss` when labels were given, `logits` (B, T, V) when they were not."""

    loss: Tensor | None
    logits: Tensor | None


Watch = Callable[[int, int, Pass], None]  # called with the layer, the number of its pass, and the pass


def _enter(embedding: nn.Embedding, tokens: Tensor) -> tuple[Tensor, Tensor]:
    x = embedding(tokens)
    return x, torch.zeros_like(x)  # nothing has been computed yet


def _block(block: Block, *stream: Any, **view: Any) -> tuple[Tensor, Tensor]:
    return cast("tuple[Tensor, Tensor]", block(*stream, **view))


def _leave(norm: Norm, embedding: nn.Embedding, x: Tensor, branch: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(norm(x, branch)[1].flatten(0, 1), embedding.weight, labels.flatten())


@dataclass(frozen=True)
class Regions:
    """The three parts of the way from tokens to loss, each of which can be compiled on its own.

    All blocks of a kind then share one graph, and a layer that grows costs no new graph for the others.
    """

    enter: Callable[..., tuple[Tensor, Tensor]] = _enter
    block: Callable[..., tuple[Tensor, Tensor]] = _block
    leave: Callable[..., Tensor] = _leave

    def mapped(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Regions:
        """Each part changed in the same way."""
        return Regions(change(self.enter), change(self.block), change(self.leave))


class Decoder(nn.Module):
    """A language model with the structure of `plan`, initialised from `seed`.

    Two plans with equal shapes, such as Prism and its uniform twin, get bit-equal weights from one seed.
    """

    gate_ramp: Tensor | None  # (layers, passes, heads), set by births; the strength of a loop is ramp + delta
    gate_delta: nn.Parameter | None

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        super().__init__()
        self.plan = plan
        self.embedding = nn.Embedding(plan.vocabulary, plan.width)
        self.blocks = nn.ModuleList(Block(plan.width, plan.feed_forward, layer) for layer in plan.layers)
        self.norm = Norm(plan.width)
        self.rotary = RotaryTables(plan.head_dims, plan.context)
        gates = plan.gates
        shape = (0, 0, 0) if gates is None else (len(plan.layers), gates.passes, gates.heads)
        self.register_buffer("gate_ramp", None if gates is None else torch.zeros(shape))
        trained = gates is not None and gates.trained
        self.register_parameter("gate_delta", nn.Parameter(torch.zeros(shape)) if trained else None)
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
        if self.gate_delta is not None:
            nn.init.zeros_(self.gate_delta)
        if self.gate_ramp is not None:
            self.gate_ramp.zero_()
            for index, loop in self.plan.loops.items():
                self.gate_ramp[index, : loop.passes, : len(loop.heads)] = 1

    def take(self, plan: Plan) -> None:
        """Follow a plan whose changes the weights already have."""
        for block, layer in zip(self.stack, plan.layers, strict=True):
            block.attention.restructure(layer)
        self.plan = plan

    def restructure(self, plan: Plan) -> None:
        """Take a plan that differs from the present one in loops and repeats only; no tensor changes its shape."""
        if plan.bare != self.plan.bare:
            raise InputError("plan", plan.digest[:12], "may differ from the model's in loops and repeats only")
        if self.gate_ramp is not None:
            for index, layer in enumerate(plan.layers):
                new, old = layer.loop, self.plan.layers[index].loop
                if new != old:  # a pass that was not there, over these heads, begins without strength
                    known = old.passes if old is not None and new is not None and old.heads == new.heads else 0
                    self.gate_ramp[index, known:] = 0
        self.take(plan)

    @property
    def gates(self) -> Tensor | None:
        """Strengths of the loops, (layers, passes, heads); None if the plan has no gates."""
        if self.gate_ramp is None or self.gate_delta is None:
            return self.gate_ramp
        return self.gate_ramp + self.gate_delta

    def use_attention(self, device: torch.device, dtype: torch.dtype, wanted: str = "auto") -> list[str]:
        """Fix the attention kernel of every layer for training in `dtype`, and return their names."""
        names = choose_backends(self.plan.layers, device, dtype, wanted)
        for block, name in zip(self.stack, names, strict=True):
            block.attention.backend = name
        return names

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        regions: Regions = Regions(),  # noqa: B008  (immutable)
    ) -> DecoderOutput:
        """tokens (B, T); labels (B, T) hold the token that follows each position, -100 where none is asked for."""
        if labels is None:
            return DecoderOutput(None, self.logits(self.hidden(tokens)))
        x, branch = self._stream(tokens, regions=regions)
        loss = regions.leave(self.norm, self.embedding, x, branch, labels)
        if self.gate_delta is not None and not self.plan.loops:
            loss = loss + 0 * self.gate_delta.sum()  # gates that nobody uses yet still have a gradient, of zero
        return DecoderOutput(loss, None)

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        padding: Tensor | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Normed last hidden states (B, T, d) of tokens (B, T), which follow what the cache holds.

        `padding` (B,) counts the padding tokens on the left of each row, so that prompts of different lengths can
        share a batch. `watch` is shown every attention pass.
        """
        return self.norm(*self._stream(tokens, cache, padding, watch))[1]

    def _stream(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        padding: Tensor | None = None,
        watch: Watch | None = None,
        regions: Regions = Regions(),  # noqa: B008  (immutable)
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after the last block, and that block's output, which is not added yet."""
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
        gates = self.gates
        x, branch = regions.enter(self.embedding, tokens)
        for index, (block, layer) in enumerate(zip(self.stack, self.plan.layers, strict=True)):
            rotary = self.rotary.pair(layer.head_dim, positions)
            strengths = gates[index, :, : len(layer.loop.heads)] if gates is not None and layer.loop else None
            for repeat in range(1 + layer.repeats):
                x, branch = regions.block(
                    block, x, branch, rotary, strengths,
                    slots=None if cache is None else cache.layers[index][repeat:],
                    watch=None if watch is None else _numbered(watch, index, repeat),
                    causal=length > 1, mask=mask, start=start,
                )  # fmt: skip
        if cache is not None:
            cache.length = stop
        return x, branch

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, (..., V)."""
        return linear(hidden, self.embedding.weight)


def _numbered(watch: Watch, layer: int, repeat: int) -> PassWatch:
    return lambda number, seen: watch(layer, repeat + number, seen)


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
