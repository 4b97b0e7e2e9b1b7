"""A Transformer block: attention and feed-forward, each added to the residual stream. It does not know its depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from meristem.model.attention import Attention, View
from meristem.model.cache import CacheSlot
from meristem.model.fused import add_norm, swiglu_feed_forward
from meristem.model.fused_loops import follow_heads, gated, gated_linear, norm_project_heads
from meristem.model.rotary import RotaryPair
from meristem.plan import LayerPlan, Plan

INIT_STD = 0.02


class Pass(NamedTuple):
    """What gauges see of one attention pass.

    Queries and keys as they are compared (rotated, and normed if the plan says so), and the outputs of the heads, are
    (B, heads, T, head dim) each; the stream that the pass read, and the update that it adds to it, are (B, T, d).
    """

    queries: Tensor
    keys: Tensor
    head_outputs: Tensor
    stream: Tensor
    update: Tensor


PassWatch = Callable[[int, Pass], None]  # called with the number of the pass, 0 being the normal one


class Norm(nn.Module):
    """RMSNorm of the residual stream after a branch, or two, are added to it; returns the new stream and its norm.

    The gain, `weight` (d,), is left to the product that reads the norm: its weight is far smaller than the stream.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.eps = plan.norm_eps
        self.weight = nn.Parameter(torch.ones(plan.width))

    def forward(self, x: Tensor, branch: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return add_norm(x, branch, self.eps, second)

    def gained(self, normed: Tensor) -> Tensor:
        """A norm (..., d) times its gain, in its own dtype."""
        return (normed * self.weight).to(normed.dtype)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        """The update (B, T, d) that follows from a norm x (B, T, d) whose gain is (d,)."""
        return swiglu_feed_forward(x, self.gate_up.weight, gain, self.down.weight)


class Block(nn.Module):
    """Pre-norm block on the residual stream, (B, T, d).

    The stream travels as a pair: x, and the last branch's output, which is not added yet. Each sum is then made
    together with the norm that follows it, in one pass over memory.
    """

    def __init__(self, plan: Plan, layer: LayerPlan) -> None:
        super().__init__()
        self.attention_norm = Norm(plan)
        self.attention = Attention(
            plan.width, layer, qk_norm=plan.qk_norm, qk_gain=plan.qk_gain, bias=plan.qkv_bias, eps=plan.norm_eps
        )
        self.feed_forward_norm = Norm(plan)
        self.feed_forward = FeedForward(plan.width, plan.feed_forward)

    def forward(
        self,
        x: Tensor,
        branch: Tensor,
        rope: RotaryPair,
        gates: Tensor | None = None,
        view: View = View(),  # noqa: B008  (immutable)
        slots: Sequence[CacheSlot] | None = None,
        watch: PassWatch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention over all heads, then again over the looped ones, which read the stream as it is by then.

        `gates` (passes, heads) are the strengths of the loops, 1 if not given; `view` says what the tokens may see;
        `slots` has a cache for each pass, and `watch` is shown each of them.
        """
        x, normed = self.attention_norm(x, branch)
        branch = self.attention(normed, self.attention_norm.weight, rope, _of_pass(view, 0, x, slots, watch))
        stream: tuple[Tensor, ...] = (x, branch)
        if self.attention.passes and slots is None and watch is None and self.attention.follows:
            stream = self._loops(x, branch, rope, gates, view)
        elif self.attention.passes:
            stream = self._loops_one_by_one(x, branch, rope, gates, view, slots, watch)
        x, normed = self.feed_forward_norm(*stream)
        return x, self.feed_forward(normed, self.feed_forward_norm.weight)

    def _loops_one_by_one(
        self, x: Tensor, branch: Tensor, rope: RotaryPair, gates: Tensor | None, view: View,
        slots: Sequence[CacheSlot] | None, watch: PassWatch | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The extra passes as they are defined, for who has to see each of them and for heads that cannot follow.

        Returned are x and branch after the last.
        """
        attention, looped = self.attention, self.attention.looped_heads()
        for number in range(1, 1 + attention.passes):
            x, normed = self.attention_norm(x, branch)
            out = looped.gated_out(None if gates is None else gates[number - 1])
            heads = attention.project(normed, self.attention_norm.weight, rope, looped)
            branch = attention.attend(*heads, out, _of_pass(view, number, x, slots, watch))
        return x, branch

    def _loops(
        self, x: Tensor, branch: Tensor, rope: RotaryPair, gates: Tensor | None, view: View
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same passes without a stream between them: x, branch, and what all of them together add to these two.

        The first one reads the stream, and what the others would read there follows from what was added since.
        """
        attention, looped = self.attention, self.attention.looped_heads()
        strengths = [None if gates is None else gates[number] for number in range(attention.passes)]
        out, weight = looped.out.flatten(1), looped.qkv * self.attention_norm.weight
        if attention.passes > 1:
            weight = torch.cat((weight, out.T))
        x, branch, *parts = norm_project_heads(x, branch, weight, *rope, heads=looped.heads, eps=attention.eps)
        queries, keys, values = parts[:3]
        read = attention.read(*attention.normed(queries, keys), values, view)
        if attention.passes == 1:
            return x, branch, gated_linear(read, strengths[0], out)
        packed, scale = parts[3:]
        read, step = gated(read, strengths[0]), out.T @ weight.T
        for strength in strengths[1:]:
            queries, keys, values = follow_heads(packed, scale, read, step, *rope, eps=attention.eps, width=x.shape[-1])
            read = read + gated(attention.read(*attention.normed(queries, keys), values, view), strength)
        return x, branch, linear(read.flatten(2).to(packed.dtype), out)

    def attention_input(self, stream: Tensor) -> Tensor:
        """What the attention reads of a stream (B, T, d)."""
        return self.attention_norm.gained(self.attention_norm(stream, torch.zeros_like(stream))[1])

    def initialise(self, depth: int, generator: torch.Generator) -> None:
        """Draw normal weights; the two products that write to the stream are scaled by 1 / sqrt(2 depth)."""
        residual = INIT_STD / math.sqrt(2 * depth)
        draw_normal(self.attention.qkv.weight, INIT_STD, generator)
        draw_normal(self.attention.out.weight, residual, generator)
        draw_normal(self.feed_forward.gate_up.weight, INIT_STD, generator)
        draw_normal(self.feed_forward.down.weight, residual, generator)
        self.attention.reset_vectors()
        self.attention_norm.reset_parameters()
        self.feed_forward_norm.reset_parameters()


def _of_pass(
    view: View, number: int, stream: Tensor, slots: Sequence[CacheSlot] | None, watch: PassWatch | None
) -> View:
    """The view of one attention pass: with its own cache, and shown to the watch with its number and the stream."""
    if slots is not None:
        view = view._replace(cache=slots[number])
    if watch is not None:
        view = view._replace(watch=partial(_show, watch, number, stream))
    return view


def _show(
    watch: PassWatch, number: int, stream: Tensor, queries: Tensor, keys: Tensor, head_outputs: Tensor, update: Tensor
) -> None:
    watch(number, Pass(queries, keys, head_outputs, stream, update))


@torch.no_grad()
def draw_normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill a weight from a CPU generator, so that every device starts from the same numbers."""
    weight.copy_(torch.empty(weight.shape, dtype=torch.float32).normal_(0, std, generator=generator))
