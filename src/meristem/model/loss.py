"""Cross entropy over the vocabulary without ever holding all logits.

Rows are handled in chunks, and the gradients are formed in the forward pass, while a chunk's logits are at hand:
no logits are kept and nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meristem.model.fused import IGNORE, cross_entropy_, fold_gain, fold_gain_backward
from meristem.model.operators import accum_dtype, product_dtype, product_in
from meristem.plan import LOSS_CHUNK


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, gain: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """Mean cross entropy of the logits `hidden @ weight.T`, a float32 scalar.

    hidden (N, d), weight (V, d), targets (N,) with -100 where nothing is to be predicted; `gain` (d,) is that of the
    norm which has made hidden, if it has one. Products run in the autocast dtype if autocast is on; sums and the
    softmax run in float32 (float64 for float64 input).
    """
    rows = chunk or max(1, LOSS_CHUNK // weight.shape[0])
    dtype = product_dtype(hidden)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, gain)):
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, gain, targets, rows, dtype)
        return loss
    return _chunked(hidden, _cast(weight, gain, dtype), targets, rows, False, False)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, gain: Tensor | None, targets: Tensor, rows: int, dtype: torch.dtype
    ) -> Tensor:
        by_hidden, by_weight, by_gain = ctx.needs_input_grad[:3]
        cast = _cast(weight, gain, dtype)
        loss, hidden_grad, product_grad = _chunked(hidden, cast, targets, rows, by_hidden, by_weight or by_gain)
        ctx.save_for_backward(hidden_grad, product_grad, weight, gain)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, product_grad, weight, gain = ctx.saved_tensors
        if hidden_grad is not None:
            hidden_grad = hidden_grad * grad
        if product_grad is None:
            return hidden_grad, None, None, None, None, None
        if gain is None:
            return hidden_grad, (product_grad * grad).to(weight.dtype), None, None, None, None
        # The factor goes with the gain, which is far smaller than the weight.
        weight_grad, gain_grad = fold_gain_backward(product_grad, weight, gain * grad)
        return hidden_grad, weight_grad, gain_grad * grad, None, None, None


def _cast(weight: Tensor, gain: Tensor | None, dtype: torch.dtype) -> Tensor:
    folded: Tensor = weight.to(dtype) if gain is None else fold_gain(weight, gain, dtype)
    return folded


def _chunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, by_hidden: bool, by_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss, and its gradients by hidden and, in the dtype of sums, by weight, if they are wanted."""
    accum = accum_dtype(weight.dtype)
    scale = 1 / (targets != IGNORE).sum().clamp(min=1).to(accum)
    cast_hidden = hidden.to(weight.dtype)
    losses: list[Tensor] = []
    hidden_grads: list[Tensor] = []
    weight_grad: Tensor | None = None
    for start in range(0, hidden.shape[0], rows):
        h = cast_hidden[start : start + rows]
        logits = h @ weight.T
        losses.append(cross_entropy_(logits, targets[start : start + rows], scale))
        # Logits now hold the gradient of the loss by themselves.
        if by_hidden:
            hidden_grads.append(logits @ weight)
        if by_weight:
            part = product_in(logits.T, h, accum)
            weight_grad = part if weight_grad is None else weight_grad + part
    return _joined(losses).sum() * scale, _joined(hidden_grads).to(hidden.dtype) if by_hidden else None, weight_grad


def _joined(chunks: list[Tensor]) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
