"""Loss and gradients of one update: forward and backward over its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meristem.model.operators import announce_operators, product_dtype
from meristem.model.transformer import Regions
from meristem.training.devices import autocast

VARIANTS = 64  # of one piece of code; more than any plan needs (kinds of blocks times passes)


def compiled_regions() -> Regions:
    """The parts of the model, compiled: one graph per kind of block and number of loops.

    A whole graph or an error, for every part: falling back to slow Python without a word is not an option.
    """
    announce_operators()
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    regions = Regions().mapped(partial(torch.compile, dynamic=False, fullgraph=True))
    return replace(regions, enter=partial(_enter_as_between_blocks, regions.enter))


def _enter_as_between_blocks(enter: Callable[..., tuple[Tensor, Tensor]], *parts: Any) -> tuple[Tensor, Tensor]:
    """The empty branch before the first block, of the type that later ones have and with a gradient as they have.

    To the compiler the first block is then one like any other, and needs no graph of its own.
    """
    x, branch = enter(*parts)
    return x, branch.to(product_dtype(x)).requires_grad_(x.requires_grad)


class Gradients:
    """Leaves the mean gradient over the micro-batches in the parameters' `.grad`.

    With `graph`, forward and backward of a micro-batch are recorded once as a CUDA graph and then replayed, which
    removes the gaps between some five hundred kernel launches. A model that has changed is recorded anew at once; only
    where one change follows soon upon another it has to rest first, since a recording takes as long as several updates.
    """

    def __init__(self, model: nn.Module, *, compile: bool, device: torch.device) -> None:
        self.device = device
        self._follow(model)
        self.regions = compiled_regions() if compile else Regions()
        self.graph = _Graph(self) if compile and device.type == "cuda" and self.distributed is None else None

    def restructured(self, model: nn.Module | None = None) -> None:
        """To be told when the model has changed: what was recorded is no longer its forward pass.

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

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels (micro-batches, b, T) in; the mean loss out, still on the device."""
        if self.graph is not None:
            self.graph.stood += 1
            if self.graph.rest == 0:
                return self.graph.accumulate(tokens, labels)
            self.graph.rest -= 1
        for parameter in self.parameters:
            parameter.grad = None
        count = len(tokens)
        total = torch.zeros((), device=self.device)
        for index in range(count):
            last = index == count - 1
            # Gradients are exchanged between processes once, with the last micro-batch.
            with nullcontext() if last or self.distributed is None else self.distributed.no_sync():
                total += self.backward(tokens[index], labels[index], 1 / count)
        return total

    def backward(self, tokens: Tensor, labels: Tensor, weight: float) -> Tensor:
        with autocast(self.device):
            loss = self.model(tokens, labels, self.regions).loss
        assert loss is not None
        weighted = loss * weight
        weighted.backward()
        return weighted.detach()


class _Graph:
    """A recorded forward and backward of one micro-batch shape. A replay overwrites the gradients, it does not add."""

    REST = 20  # updates

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.recording: torch.cuda.CUDAGraph | None = None
        self.loss: Tensor | None = None
        self.rest = 0  # updates until one is recorded
        self.stood = 0  # updates since the model has changed

    def forget(self) -> None:
        self.rest = 0 if self.stood >= self.REST else self.REST
        self.stood = 0
        self.recording = self.loss = None
        self._clear()  # the gradients live in the recording's memory
        torch.cuda.empty_cache()

    def accumulate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.recording is None:
            self._record(tokens[0], labels[0], 1 / len(tokens))
        grads = [p.grad for p in self.gradients.parameters if p.grad is not None]
        loss = self._replay(tokens[0], labels[0])
        if len(tokens) == 1:
            return loss
        total, sums = loss.clone(), [g.clone() for g in grads]
        for index in range(1, len(tokens)):
            total += self._replay(tokens[index], labels[index])
            torch._foreach_add_(sums, grads)
        torch._foreach_copy_(grads, sums)
        return total

    def _record(self, tokens: Tensor, labels: Tensor, weight: float) -> None:
        self.tokens, self.labels = tokens.clone(), labels.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # compiles, and lets libraries allocate their workspaces
            self._clear()
            self.gradients.backward(self.tokens, self.labels, weight)
        torch.cuda.current_stream().wait_stream(aside)
        self._clear()
        torch.cuda.empty_cache()  # the recording allocates from a pool of its own
        self.recording = torch.cuda.CUDAGraph()
        # Thread by thread: a checkpoint may be on its way to the host meanwhile, which has nothing to do with this.
        with torch.cuda.graph(self.recording, capture_error_mode="thread_local"):
            self.loss = self.gradients.backward(self.tokens, self.labels, weight)

    def _replay(self, tokens: Tensor, labels: Tensor) -> Tensor:
        assert self.recording is not None
        assert self.loss is not None
        self.tokens.copy_(tokens)
        self.labels.copy_(labels)
        self.recording.replay()
        return self.loss

    def _clear(self) -> None:
        for parameter in self.gradients.parameters:
            parameter.grad = None
