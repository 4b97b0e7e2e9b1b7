"""A Transformer block: attention and feed-forward, each added to the residual stream. It does not know its depth."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from meristem.model.attention import Attention
from meristem.model.fused import swiglu_linear
from meristem.model.rotary import RotaryPair
from meristem.plan import LayerPlan

NORM_EPS = 1e-5
INIT_STD = 0.02


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu_linear(self.gate_up(x), self.down.weight)


class Block(nn.Module):
    """Pre-norm block on the residual stream x, (B, T, d)."""

    def __init__(self, width: int, feed_forward: int, layer: LayerPlan) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.attention = Attention(width, layer)
        self.feed_forward_norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.feed_forward = FeedForward(width, feed_forward)

    def forward(self, x: Tensor, rotary: RotaryPair, **attention: Any) -> Tensor:
        # The sum stays outside the product: a fused addmm would round a float32 stream to bf16 under autocast.
        x = x + self.attention(self.attention_norm(x), rotary, **attention)
        return x + self.feed_forward(self.feed_forward_norm(x))

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
