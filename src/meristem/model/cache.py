"""Keys and values of past tokens, each layer in its own shape."""

from __future__ import annotations

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.plan import LayerPlan, Plan


class LayerCache:
    """Keys and values of one layer, (B, kv heads, capacity, head dim) each."""

    def __init__(
        self, layer: LayerPlan, batch: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (batch, layer.kv_heads, capacity, layer.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def append(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, kv heads, T, head dim) from `start`; return all up to their end."""
        stop = start + keys.shape[2]
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class KVCache:
    """The caches of all layers and the number of tokens they hold."""

    def __init__(self, plan: Plan, batch: int, capacity: int, device: torch.device | str, dtype: torch.dtype) -> None:
        if capacity > plan.context:
            raise InputError("capacity", capacity, f"must be at most the context, {plan.context}")
        self.layers = [LayerCache(layer, batch, capacity, device, dtype) for layer in plan.layers]
        self.capacity = capacity
        self.length = 0

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
