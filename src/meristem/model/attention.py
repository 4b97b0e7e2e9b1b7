"""Causal self-attention of one layer, with its own number and width of heads."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from meristem.model.backends import BACKENDS
from meristem.model.cache import LayerCache
from meristem.model.fused import project_heads
from meristem.model.rotary import RotaryPair
from meristem.plan import LayerPlan


class Attention(nn.Module):
    """Shapes: input and output (B, T, d); the projection's rows are ordered queries, keys, values, head by head."""

    def __init__(self, width: int, layer: LayerPlan) -> None:
        super().__init__()
        self.layer = layer
        self.qkv = nn.Linear(width, layer.query_width + 2 * layer.kv_width, bias=False)
        self.out = nn.Linear(layer.query_width, width, bias=False)
        self.backend: str | None = None  # None lets torch choose

    def project(self, x: Tensor, rotary: RotaryPair) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both turned to their positions) and values, each (B, its heads, T, head dim)."""
        queries, keys, values = project_heads(
            x, self.qkv.weight, *rotary, heads=self.layer.heads, kv_heads=self.layer.kv_heads
        )
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryPair,
        *,
        causal: bool = True,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        start: int = 0,
    ) -> Tensor:
        """Attend over x, and over what the cache holds before `start`; `mask` (B, 1, T, S) replaces `causal`."""
        queries, keys, values = self.project(x, rotary)
        if cache is not None:
            keys, values = cache.append(start, keys, values)
        # The fixed kernel is the training one; decoding has masks and shapes that it may refuse.
        fixed = None if cache is not None or mask is not None else self.backend
        with nullcontext() if fixed is None else sdpa_kernel(BACKENDS[fixed]):
            mixed = scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=causal and mask is None,
                enable_gqa=self.layer.heads != self.layer.kv_heads,
            )
        return self.out(mixed.transpose(1, 2).flatten(2))
