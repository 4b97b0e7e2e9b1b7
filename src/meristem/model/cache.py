"""Keys and values of past tokens, each layer in its own shape."""

from __future__ import annotations

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.plan import LayerPlan, Plan


class CacheSlot:
    """Keys and values of one attention pass, (B, heads, capacity, head dim) each; `both` has them as one tensor."""

    def __init__(
        self, heads: int, head_dim: int, batch: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.both = torch.zeros((batch, 2 * heads, capacity, head_dim), device=device, dtype=dtype)
        self.keys, self.values = self.both.chunk(2, dim=1)

    def append(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, heads, T, head dim) from `start`; return all up to their end."""
        stop = start + keys.shape[2]
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values
        return self.keys[:, :, :stop], self.values[:, :, :stop]


def pass_heads(layer: LayerPlan) -> list[int]:
    """Key/value heads of every attention pass of a layer: the normal one, then loops or repeats."""
    normal = [layer.kv_heads] * (1 + layer.repeats)
    return normal if layer.loop is None else normal + [len(layer.loop.heads)] * layer.loop.passes


class KVCache:
    """The slots of all layers, one per attention pass, and the number of tokens they hold."""

    def __init__(self, plan: Plan, batch: int, capacity: int, device: torch.device | str, dtype: torch.dtype) -> None:
        if capacity > plan.context:
            raise InputError("capacity", capacity, f"must be at most the context, {plan.context}")
        self.layers = [
            [CacheSlot(heads, layer.head_dim, batch, capacity, device, dtype) for heads in pass_heads(layer)]
            for layer in plan.layers
        ]
        self.capacity = capacity
        self.length = 0

    @property
    def nbytes(self) -> int:
        return sum(slot.both.nbytes for layer in self.layers for slot in layer)
