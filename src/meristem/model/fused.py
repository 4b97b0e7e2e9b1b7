"""Operations that the compiler does not fuse well by itself, each as one opaque operator.

Every operator has a plain PyTorch form, which runs anywhere and defines the result, and a Triton form for CUDA in
`triton_kernels.py`. The compiler sees an operator as a single node: it neither splits nor reorders it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

IGNORE = -100


@cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _use_triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- cross entropy ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("meristem::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """Cross entropy of each row, (N,), 0 where the target is -100; logits (N, V) become its gradient times `scale`."""
    if _use_triton(logits):
        from meristem.model.triton_kernels import cross_entropy_kernel_

        return cross_entropy_kernel_(logits, targets, scale)
    wide = _wide(logits.dtype)
    target = targets[:, None]
    valid = target != IGNORE
    gradient = torch.log_softmax(logits.to(wide), dim=-1)
    losses = -gradient.gather(-1, target.clamp(min=0)) * valid
    gradient.exp_().scatter_add_(-1, target.clamp(min=0), -torch.ones_like(losses))
    logits.copy_(gradient.mul_(valid * scale))
    return losses[:, 0]


@cross_entropy_.register_fake
def _(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=_wide(logits.dtype))


# --- heads -----------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x (B, T, heads, dim) by the angle of each position; computed in float32, or float64 for float64.

    Coordinate i is paired with i + dim / 2; `cos` and `sin` are (T, 1, dim) or (B, T, 1, dim), and the first half of
    `sin` carries the minus of the rotation.
    """
    wide = x.to(_wide(x.dtype))
    swapped = wide.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (wide * cos + swapped * sin).to(x.dtype)


@torch.library.custom_op("meristem::turn_heads", mutates_args=())
def turn_heads(packed: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    """packed (B, T, heads, dim) with its first `turned` heads rotated and the others copied."""
    if _use_triton(packed):
        from meristem.model.triton_kernels import turn_heads_kernel

        return turn_heads_kernel(packed, cos, sin, turned)
    return torch.cat((rotate(packed[:, :, :turned], cos, sin), packed[:, :, turned:]), dim=2)


@turn_heads.register_fake
def _(packed: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    return torch.empty_like(packed)


@torch.library.custom_op("meristem::turn_heads_backward", mutates_args=())
def turn_heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of packed, from those of its queries, keys and values, each (B, T, its heads, dim)."""
    if _use_triton(dq):
        from meristem.model.triton_kernels import turn_heads_backward_kernel

        return turn_heads_backward_kernel(dq, dk, dv, cos, sin)
    return torch.cat((rotate(dq, cos, -sin), rotate(dk, cos, -sin), dv), dim=2)


@turn_heads_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, heads, dim = dq.shape
    return dq.new_empty((batch, length, heads + 2 * dk.shape[2], dim))


class _SplitHeads(torch.autograd.Function):
    """Written out because automatic backward pads and adds three large tensors where one pass will do."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        turned = heads + kv_heads
        # Values are copied along so that the packed projection need not be kept beside the result.
        result = turn_heads(packed, cos, sin, turned)
        return result[:, :, :heads], result[:, :, heads:turned], result[:, :, turned:]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return turn_heads_backward(dq, dk, dv, *ctx.saved_tensors), None, None, None, None


def split_heads(packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned to their positions, and values, from packed (B, T, heads + 2 kv heads, dim)."""
    parts: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(packed, cos, sin, heads, kv_heads)
    return parts


# --- SwiGLU ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("meristem::swiglu_backward", mutates_args=())
def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up (N, 2 f) from that of y = silu(gate) * up, (N, f); and y again, which was not kept."""
    if _use_triton(gate_up):
        from meristem.model.triton_kernels import swiglu_backward_kernel

        return swiglu_backward_kernel(gate_up, grad)
    wide = _wide(gate_up.dtype)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    active = gate * sigmoid
    dy = grad.to(wide)
    gate_grad = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((gate_grad, dy * active), dim=-1).to(gate_up.dtype), (active * up).to(gate_up.dtype)


@swiglu_backward.register_fake
def _(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(grad)


class _SwigluLinear(torch.autograd.Function):
    """silu(gate) * up, times a weight; the hidden product is formed again in backward instead of being kept."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        cast = weight.to(gate_up.dtype)
        ctx.save_for_backward(gate_up, cast)
        ctx.weight_dtype = weight.dtype
        return (silu(gate) * up) @ cast.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        gate_up_grad, hidden = swiglu_backward(gate_up, grad @ weight)
        return gate_up_grad, (grad.T @ hidden).to(ctx.weight_dtype)


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) * up) @ weight.T for gate_up (..., 2 f) and weight (d, f); computed in the dtype of gate_up."""
    rows: Tensor = _SwigluLinear.apply(gate_up.flatten(0, -2), weight)
    return rows.unflatten(0, gate_up.shape[:-1])
