"""Attention and nothing else: what it adds to its input is compared with the targets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meristem.model.attention import Attention, View
from meristem.model.block import Pass, draw_normal
from meristem.model.rotary import RotaryPair
from meristem.model.transformer import Watch
from meristem.plan import LayerPlan, Plan


class StudentLayer(nn.Module):
    """A layer that reads its input as it is."""

    def __init__(self, width: int, layer: LayerPlan) -> None:
        super().__init__()
        self.attention = Attention(width, layer)

    def attention_input(self, stream: Tensor) -> Tensor:
        return stream


class Student(nn.Module):
    """One layer of bidirectional attention without positions, over tokens (B, T, d) of real numbers."""

    def __init__(self, width: int, length: int, head_dim: int, heads: int = 1, seed: int = 0) -> None:
        super().__init__()
        layer = LayerPlan(heads, head_dim, heads)
        self.plan = Plan(width=width, vocabulary=1, context=length, feed_forward=1, layers=(layer,))
        self.blocks = nn.ModuleList([StudentLayer(width, layer)])
        # Angles of zero: the tokens have no order.
        self.register_buffer("cos", torch.ones(length, 1, head_dim))
        self.register_buffer("sin", torch.zeros(length, 1, head_dim))
        self.register_buffer("gain", torch.ones(width), persistent=False)  # there is no norm
        attention = self.stack[0].attention
        generator = torch.Generator().manual_seed(seed)
        draw_normal(attention.qkv.weight, width**-0.5, generator)
        draw_normal(attention.out.weight, 0.5 * head_dim**-0.5, generator)

    cos: Tensor
    sin: Tensor
    gain: Tensor

    @property
    def stack(self) -> list[StudentLayer]:
        return list(self.blocks)  # type: ignore[arg-type]

    def make_block(self, layer: LayerPlan) -> StudentLayer:
        """Another layer, with weights of its own."""
        return StudentLayer(self.plan.width, layer)

    def follow_plan(self, plan: Plan) -> None:
        """Follow a plan whose changes the weights already have."""
        self.stack[0].attention.restructure(plan.layers[0])
        self.plan = plan

    def forward(self, tokens: Tensor, watch: Watch | None = None) -> Tensor:
        """What the heads write, (B, T, d)."""
        attention = self.stack[0].attention

        def show(queries: Tensor, keys: Tensor, head_outputs: Tensor, update: Tensor) -> None:
            assert watch is not None
            watch(0, 0, Pass(queries, keys, head_outputs, tokens, update))

        view = View(causal=False, watch=None if watch is None else show)
        result: Tensor = attention(tokens, self.gain, self.rope(attention.layer.head_dim), view)
        return result

    def loss(self, tokens: Tensor, targets: Tensor, *, watch: Watch | None = None) -> Tensor:
        """Squared error, summed over a token's coordinates, averaged over tokens."""
        return (self(tokens, watch) - targets).square().sum(-1).mean()

    def rope(self, head_dim: int) -> RotaryPair:
        """No rotation at any position."""
        return self.cos, self.sin

    def attention_mask(self, tokens: Tensor) -> Tensor:
        """Every token may look at every one, (T, T)."""
        return torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device)
