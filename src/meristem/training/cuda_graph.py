"""Forward and backward as one recorded CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meristem.errors import InputError

if TYPE_CHECKING:
    from meristem.training.gradients import Gradients


class RecordedStep:
    """A recorded forward and backward of one micro-batch shape. A replay overwrites the gradients, it does not add.

    The first update after a change is made without a recording: that compiles kernels and lets libraries allocate their
    workspaces. The next one is recorded. Only where one change follows soon upon another the model has to rest first,
    since a recording takes as long as an update or two.
    """

    REST = 10  # updates

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.recording: torch.cuda.CUDAGraph | None = None
        self.loss: Tensor | None = None
        self.rest = 0  # updates before one is recorded
        self.stood = 0  # updates since the model has changed
        self.fresh = True

    def is_due(self) -> bool:
        """Whether this update is recorded, or replayed; to be asked once for each."""
        self.stood += 1
        self.rest -= 1
        return self.rest < 0

    def forget(self) -> None:
        self.rest = 1 if self.stood >= self.REST else self.REST
        self.stood = 0
        self.recording = self.loss = None
        self._clear()  # the gradients live in the recording's memory
        torch.cuda.empty_cache()

    def accumulate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.recording is None:
            self._record(tokens[0], targets[0], 1 / len(tokens))
            self.shape = tokens.shape
        if tokens.shape != self.shape:  # a copy could stretch them, and the share of each is in the recording
            raise InputError("tokens", tuple(tokens.shape), f"must have the recorded shape {tuple(self.shape)}")
        grads = [p.grad for p in self.gradients.parameters if p.grad is not None]
        loss = self._replay(tokens[0], targets[0])
        if len(tokens) == 1:
            return loss
        total, sums = loss.clone(), [g.clone() for g in grads]
        for index in range(1, len(tokens)):
            total += self._replay(tokens[index], targets[index])
            torch._foreach_add_(sums, grads)
        torch._foreach_copy_(grads, sums)
        return total

    def _record(self, tokens: Tensor, targets: Tensor, weight: float) -> None:
        self.tokens, self.targets = tokens.clone(), targets.clone()
        if self.fresh:  # no update yet: one would leave the optimizer's moments all over the memory it has used
            self.gradients.backward(self.tokens, self.targets, weight)
            self.fresh = False
        self._clear()
        torch.cuda.empty_cache()  # the recording allocates from a pool of its own
        recording = torch.cuda.CUDAGraph()
        # Thread by thread: a checkpoint may be on its way to the host meanwhile, which has nothing to do with this.
        with torch.cuda.graph(recording, capture_error_mode="thread_local"):
            loss = self.gradients.backward(self.tokens, self.targets, weight)
        self.recording, self.loss = recording, loss  # whole: one that an error has broken off cannot be replayed

    def _replay(self, tokens: Tensor, targets: Tensor) -> Tensor:
        assert self.recording is not None
        assert self.loss is not None
        self.tokens.copy_(tokens)
        self.targets.copy_(targets)
        self.recording.replay()
        return self.loss

    def _clear(self) -> None:
        for parameter in self.gradients.parameters:
            parameter.grad = None
