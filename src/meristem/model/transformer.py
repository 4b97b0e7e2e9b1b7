"""What the language model and the classifier share: a stack of blocks with the structure of a plan.

Pre-norm RMSNorm, rotary positions over each layer's own head dim, SwiGLU; biases of queries, keys and values at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from meristem.errors import InputError
from meristem.model.attention import Attention, View
from meristem.model.backends import choose_backends
from meristem.model.block import INIT_STD, Block, Norm, Pass, PassWatch, draw_normal
from meristem.model.cache import CacheSlot, KVCache
from meristem.model.fused import embed
from meristem.model.rotary import RotaryPair, RotaryTables
from meristem.plan import LayerPlan, Plan


class Output(NamedTuple):
    """What a model returns: the `loss` when targets were given, `logits` when they were not."""

    loss: Tensor | None
    logits: Tensor | None


Watch = Callable[[int, int, Pass], None]  # called with the layer, the number of its pass, and the pass


def _enter(embedding: nn.Embedding, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream x, and the branch: what was computed last, which the next norm adds to it (see `Block`)."""
    x = embed(tokens, embedding.weight)
    return x, torch.zeros_like(x)  # nothing has been computed yet


def _block(
    block: Block, x: Tensor, branch: Tensor, rope: RotaryPair, gates: Tensor | None, view: View,
    slots: Sequence[CacheSlot] | None, watch: PassWatch | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return cast("tuple[Tensor, Tensor]", block(x, branch, rope, gates, view, slots, watch))


def _leave(end: Callable[..., Tensor], *parts: Any) -> Tensor:
    return end(*parts)


@dataclass(frozen=True)
class Regions:
    """The three parts of the way from tokens to loss, each of which can be compiled on its own.

    All blocks of a kind then share one graph, and a layer that grows costs no new graph for the others.
    """

    enter: Callable[..., tuple[Tensor, Tensor]] = _enter
    block: Callable[..., tuple[Tensor, Tensor]] = _block
    leave: Callable[..., Tensor] = _leave  # called with the loss of the model at hand, and what that takes

    def mapped(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Regions:
        """The regions with each part changed in the same way."""
        return Regions(change(self.enter), change(self.block), change(self.leave))


class Transformer(nn.Module):
    """Embedding, blocks and last norm of `plan`; each kind of model adds its `loss`, `logits` and `attention_mask`.

    Two plans with equal shapes, such as Prism and its uniform twin, get bit-equal weights from one seed.
    """

    gate_ramp: Tensor | None  # (layers, passes, heads), set by births; the strength of a loop is ramp + delta
    gate_delta: nn.Parameter | None

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self._kernels: tuple[torch.device, torch.dtype, str] | None = None  # as they were asked for
        self.embedding = nn.Embedding(plan.vocabulary, plan.width)
        self.blocks = nn.ModuleList(Block(plan, layer) for layer in plan.layers)
        self.norm = Norm(plan)
        dims = (layer.head_dim for layer in (*plan.layers, *plan.target))
        self.rotary = RotaryTables(dims, plan.context, plan.rotary)
        gates = plan.gates
        shape = (0, 0, 0) if gates is None else (len(plan.layers), gates.passes, gates.heads)
        self.register_buffer("gate_ramp", None if gates is None else torch.zeros(shape))
        trained = gates is not None and gates.trained
        self.register_parameter("gate_delta", nn.Parameter(torch.zeros(shape)) if trained else None)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        regions: Regions = Regions(),  # noqa: B008  (immutable)
    ) -> Output:
        """The mean loss of tokens (B, T), a scalar, if there are targets; their logits if not.

        Targets of a language model are (B, T), those of a classifier (B,); logits are (B, T, V) or (B, classes).

        >>> loss, logits = model(tokens, targets=targets)
        >>> loss.shape, logits
        (torch.Size([]), None)
        """
        if targets is None:
            return Output(None, self.logits(tokens))
        return Output(self.loss(tokens, targets, regions), None)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        regions: Regions = Regions(),  # noqa: B008  (immutable)
        watch: Watch | None = None,
    ) -> Tensor:
        """The mean loss, a scalar; `watch` is shown every attention pass."""
        raise NotImplementedError

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits that the model gives tokens (B, T)."""
        raise NotImplementedError

    def attention_mask(self, tokens: Tensor) -> Tensor:
        """Which tokens (columns) each token (row) may look at: boolean, (T, T) or (B, T, T)."""
        raise NotImplementedError

    def rope(self, head_dim: int) -> RotaryPair:
        """The rotation of heads of so many dims at every position: cosines and sines, each (T, 1, dim)."""
        return self.rotary.pair(head_dim, slice(None))

    # --- structure and weights --------------------------------------------------------------------------------------

    @property
    def stack(self) -> list[Block]:
        """The blocks in order."""
        return cast("list[Block]", list(self.blocks))

    def initialise(self, seed: int) -> None:
        """Draw all weights anew."""
        self.draw(torch.Generator().manual_seed(seed))

    def draw(self, generator: torch.Generator) -> None:
        """Take all weights from a generator, always in the same order."""
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

    def make_block(self, layer: LayerPlan) -> Block:
        """A block of the given shape where the others are, whose weights are still to be given."""
        weight = self.embedding.weight
        with torch.device("meta"):  # nothing is drawn
            block = Block(self.plan, layer)
        block = block.to(weight.dtype).to_empty(device=weight.device).train(self.training)
        block.attention.restructure(layer)
        if self._kernels is not None:
            (block.attention.backend,) = self._chosen_kernels([layer], *self._kernels)
        return block

    def follow_plan(self, plan: Plan) -> None:
        """Follow a plan whose changes the weights already have."""
        for block, layer in zip(self.stack, plan.layers, strict=True):
            block.attention.restructure(layer)
            block.attention.qk_norm = plan.qk_norm
        for module in self.modules():
            if isinstance(module, Norm | Attention):
                module.eps = plan.norm_eps
        if plan.rotary != self.plan.rotary:
            self.rotary = RotaryTables((), plan.context, plan.rotary).to(self.embedding.weight.device)
        self.rotary.add(plan.head_dims)
        self.plan = plan

    @property
    def gates(self) -> Tensor | None:
        """Strengths of the loops, (layers, passes, heads); None if the plan has no gates."""
        if self.gate_ramp is None or self.gate_delta is None:
            return self.gate_ramp
        return self.gate_ramp + self.gate_delta

    def use_attention(self, device: torch.device, dtype: torch.dtype, wanted: str = "auto") -> list[str]:
        """Fix the attention kernel of every layer for training in `dtype`, and return their names."""
        self._kernels = (device, dtype, wanted)
        names = self._chosen_kernels(self.plan.layers, device, dtype, wanted)
        for block, name in zip(self.stack, names, strict=True):
            block.attention.backend = name
        return names

    def _chosen_kernels(
        self, layers: Sequence[LayerPlan], device: torch.device, dtype: torch.dtype, wanted: str
    ) -> list[str]:
        return choose_backends(layers, device, dtype, wanted, masked=self.plan.classes is not None)

    # --- the way through the blocks ---------------------------------------------------------------------------------

    def stream(
        self,
        tokens: Tensor,
        view: View = View(),  # noqa: B008  (immutable)
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        regions: Regions = Regions(),  # noqa: B008  (immutable)
        watch: Watch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream of tokens (B, T) after the last block, and that block's output, which is not added yet.

        `view` says what the tokens may see; they follow what the cache holds, and have `positions` (B, T) of their own
        where rows do not begin at 0.
        """
        start, stop = view.start, view.start + tokens.shape[1]
        limit = self.plan.context if cache is None else cache.capacity
        if stop > limit:
            raise InputError("tokens", stop, f"positions are more than the {limit} there are")
        places = slice(start, stop) if positions is None else positions
        gates = self.gates
        x, branch = regions.enter(self.embedding, tokens)
        for index, (block, layer) in enumerate(zip(self.stack, self.plan.layers, strict=True)):
            rope = self.rotary.pair(layer.head_dim, places)
            strengths = gates[index, :, : len(layer.loop.heads)] if gates is not None and layer.loop else None
            for repeat in range(1 + layer.repeats):  # each counts as a pass, with a cache and a number of its own
                slots = None if cache is None else cache.layers[index][repeat:]
                shown = None if watch is None else _numbered(watch, index, repeat)
                x, branch = regions.block(block, x, branch, rope, strengths, view, slots, shown)
        if cache is not None:
            cache.length = stop
        return x, branch

    def with_idle_gates(self, loss: Tensor) -> Tensor:
        """The loss, in which gates that nobody uses yet still have a gradient, of zero."""
        if self.gate_delta is not None and not self.plan.loops:
            return loss + 0 * self.gate_delta.sum()
        return loss


def _numbered(watch: Watch, layer: int, repeat: int) -> PassWatch:
    return lambda number, seen: watch(layer, repeat + number, seen)
