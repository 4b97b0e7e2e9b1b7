"""Cross entropy over the vocabulary without ever holding all logits.

Rows are handled in chunks, and the gradients are formed in the forward pass, while a chunk's logits are at hand:
no logits are kept and nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meristem.model.fused import IGNORE, cross_entropy_
from meristem.model.operators import accum_dtype, product_dtype, product_in
from meristem.plan import LOSS_CHUNK


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int | None = None) -> Tensor:
    """Mean cross entropy of the logits `hidden @ weight.T`, a float32 scalar.

    hidden (N, d), weight (V, d), targets (N,) with -100 where nothing is to be predicted. Products run in the
    autocast dtype if autocast is on; sums and the softmax run in float32 (float64 for float64 input).
    """
    rows = chunk or max(1, LOSS_CHUNK // weight.shape[0])
    dtype = product_dtype(hidden)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, rows, dtype)
        return loss
    return _chunked(hidden, weight, targets, rows, dtype, False, False)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        wanted = ctx.needs_input_grad[:2]
        loss, hidden_grad, weight_grad = _chunked(hidden, weight, targets, rows, dtype, *wanted)
        ctx.save_for_backward(hidden_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = (None if saved is None else saved * grad for saved in ctx.saved_tensors)
        return hidden_grad, weight_grad, None, None, None


def _chunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype, by_hidden: bool, by_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss, and its gradients by hidden and weight if they are wanted."""
    accum = accum_dtype(dtype)
    scale = 1 / (targets != IGNORE).sum().clamp(min=1).to(accum)
    cast_hidden, cast_weight = hidden.to(dtype), weight.to(dtype)
    losses: list[Tensor] = []
    hidden_grads: list[Tensor] = []
    weight_grad: Tensor | None = None
    for start in range(0, hidden.shape[0], rows):
        h = cast_hidden[start : start + rows]
        logits = h @ cast_weight.T
        losses.append(cross_entropy_(logits, targets[start : start + rows], scale))
        # Logits now hold the gradient of the loss by themselves.
        if by_hidden:
            hidden_grads.append(logits @ cast_weight)
        if by_weight:
            part = product_in(logits.T, h, accum)
            weight_grad = part if weight_grad is None else weight_grad + part
    return (
        torch.cat(losses).sum() * scale,
        torch.cat(hidden_grads).to(hidden.dtype) if by_hidden else None,
        None if weight_grad is None else weight_grad.to(weight.dtype),
    )
