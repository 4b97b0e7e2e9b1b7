"""Loss and gradients of one update: forward and backward over its micro-batches."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meristem.devices import autocast
from meristem.model.transformer import Regions
from meristem.training.compilation import compiled_regions, recomputed
from meristem.training.cuda_graph import RecordedStep
from meristem.training.sharding import Sharded


class Gradients:
    """Leaves the mean gradient over the micro-batches in the parameters' `.grad`.

    On a GPU, forward and backward of a micro-batch are recorded as a CUDA graph and then replayed, which removes the
    gaps between some thousand kernel launches. Gradients that processes exchange are not recorded. With `recompute` the
    activations of a block are not kept for the backward pass but computed again.
    """

    def __init__(
        self, model: nn.Module, *, device: torch.device, compile: bool = False, recompute: bool = False,
        record: bool = True,
    ) -> None:  # fmt: skip
        self.device = device
        self._follow(model)
        self.regions = compiled_regions() if compile else Regions()
        if recompute:
            self.regions = recomputed(self.regions)
        alone = not isinstance(model, DistributedDataParallel | Sharded)
        self.graph = RecordedStep(self) if record and device.type == "cuda" and alone else None

    def restructured(self, model: nn.Module | None = None) -> None:
        """Forget what was recorded, as the model has changed and that is no longer its forward pass.

        If parameters were exchanged the model, wrapped anew, must be given.
        """
        if self.graph is not None:
            self.graph.forget()
        if model is not None:
            self._follow(model)

    def _follow(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.distributed = model if isinstance(model, DistributedDataParallel) else None

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens and targets (micro-batches, b, T) in; the mean loss out, still on the device."""
        if self.graph is not None and self.graph.is_due():
            return self.graph.accumulate(tokens, targets)
        for parameter in self.parameters:
            parameter.grad = None
        count = len(tokens)
        total = torch.zeros((), device=self.device)
        for index in range(count):
            last = index == count - 1
            # Gradients are exchanged between processes once, with the last micro-batch. Not those of a sharded model,
            # which would have to be held whole until then.
            with nullcontext() if last or self.distributed is None else self.distributed.no_sync():
                total += self.backward(tokens[index], targets[index], 1 / count)
        return total

    def backward(self, tokens: Tensor, targets: Tensor, weight: float) -> Tensor:
        with autocast(self.device):
            loss = self.model(tokens, targets, self.regions).loss
        assert loss is not None
        weighted = loss * weight
        weighted.backward()
        return weighted.detach()
