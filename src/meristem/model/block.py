"""A Transformer block: attention and feed-forward, each added to the residual stream. It does not know its depth."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from meristem.model.attention import Attention
from meristem.model.fused import add_norm, swiglu_linear
from meristem.model.rotary import RotaryPair
from meristem.plan import LayerPlan

NORM_EPS = 1e-5
INIT_STD = 0.02


class Norm(nn.Module):
    """RMSNorm of the residual stream after a branch is added to it; returns the new stream and its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm(x, branch, self.weight, NORM_EPS)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu_linear(self.gate_up(x), self.down.weight)


class Block(nn.Module):
    """Pre-norm block on the residual stream, (B, T, d).

    The stream travels as a pair: x, and the last branch's output, which is not added yet. Each sum is then made
    together with the norm that follows it, in one pass over memory.
    """

    def __init__(self, width: int, feed_forward: int, layer: LayerPlan) -> None:
        super().__init__()
        self.attention_norm = Norm(width)
        self.attention = Attention(width, layer)
        self.feed_forward_norm = Norm(width)
        self.feed_forward = FeedForward(width, feed_forward)

    def forward(self, x: Tensor, branch: Tensor, rotary: RotaryPair, **attention: Any) -> tuple[Tensor, Tensor]:
        x, normed = self.attention_norm(x, branch)
        x, normed = self.feed_forward_norm(x, self.attention(normed, rotary, **attention))
        return x, self.feed_forward(normed)

    def initialise(self, depth: int, generator: torch.Generator) -> None:
        """Normal weights; the two products that write to the stream are scaled by 1 / sqrt(2 depth)."""
        residual = INIT_STD / math.sqrt(2 * depth)
        draw_normal(self.attention.qkv.weight, INIT_STD, generator)
        draw_normal(self.attention.out.weight, residual, generator)
        draw_normal(self.feed_forward.gate_up.weight, INIT_STD, generator)
        draw_normal(self.feed_forward.down.weight, residual, generator)
        self.attention_norm.reset_parameters()
        self.feed_forward_norm.reset_parameters()


@torch.no_grad()
def draw_normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill from a CPU generator, so that every device starts from the same numbers."""
    weight.copy_(torch.empty(weight.shape, dtype=torch.float32).normal_(0, std, generator=generator))
