"""The fused operators of loops, heads that read again; their CUDA forms are in `triton_loops.py`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from meristem.model.fused import rotate, rotate_heads_
from meristem.model.operators import accum_dtype, operator, product_dtype, use_triton

# --- weights of a few heads -----------------------------------------------------------------------------------------


class _GatherHeads(torch.autograd.Function):
    """Backward lets each head look up where it went: one sum with its other gradient, without zeros to add to."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dim: int, heads: Tensor, takers: Tensor) -> Tensor:
        ctx.save_for_backward(takers)
        ctx.dim = dim
        return weight.index_select(dim, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (takers,) = ctx.saved_tensors
        shape = [-1 if dim == ctx.dim else 1 for dim in range(grad.ndim)]
        parts = (
            torch.where((places >= 0).view(shape), grad.index_select(ctx.dim, places.clamp(min=0)), 0)
            for places in takers.unbind(1)
        )
        return functools.reduce(torch.add, parts), None, None, None


def gather_heads(weight: Tensor, dim: int, heads: Tensor, takers: Tensor) -> Tensor:
    """Gather the given heads of a weight, in which heads lie along `dim`.

    `takers` (all heads, most times a head is gathered) has the places of each head in `heads`, and -1 where it is
    gathered less often.
    """
    gathered: Tensor = _GatherHeads.apply(weight, dim, heads, takers)
    return gathered


# --- residual sum, norm and projection of a few heads ---------------------------------------------------------------
#
# A loop reads the whole stream to project two heads out of it, and what it costs is the traffic of that stream. Here
# the sum is not written at all, and the norm's gain is in the narrow weight instead of the wide stream. In backward,
# what comes back through the norm's factor needs the inner product of gradient and result in each row, and both of
# these are narrow: the gradient of the stream is then a product with two terms added to it.


@operator("add_unit")
def _add_unit(x: Tensor, branch: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The RMS norm of x + branch without a gain, (N, d) in `dtype`, and the factor of each row in it, (N,)."""
    if use_triton(x):
        from meristem.model.triton_loops import add_unit_kernel

        return add_unit_kernel(x, branch, eps, dtype)
    precise = (x + branch).to(accum_dtype(x.dtype))
    scale = torch.rsqrt(precise.square().mean(-1, keepdim=True) + eps)
    return (precise * scale).to(dtype), scale[:, 0]


@_add_unit.register_fake
def _(x: Tensor, branch: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[0], dtype=accum_dtype(x.dtype))


@operator("unrotate")
def _unrotate(
    dq: Tensor, dk: Tensor, dv: Tensor, packed: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, width: int,
    packed_grad: Tensor | None, scale_grad: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient of packed (N, 3 or 4 heads, e) before its heads were rotated, from those (B, T, heads, e) of its parts.

    And the factor (N,) of the normed row in what comes back through the norm, whose own factors are `scale` (N,). If
    packed and scale were used as such too, they have gradients of their own, of the same shapes.
    """
    if use_triton(dq):
        from meristem.model.triton_loops import unrotate_kernel

        return unrotate_kernel(dq, dk, dv, packed, scale, cos, sin, width, packed_grad, scale_grad)
    heads, accum = dq.shape[2], scale.dtype
    arriving = torch.cat((dq, dk, dv), dim=2).flatten(0, 1)
    if packed_grad is not None:
        arriving = packed_grad.to(accum) + pad(arriving, (0, 0, 0, packed.shape[1] - arriving.shape[1]))
    inner = (arriving.to(accum) * packed.to(accum)).sum((1, 2))  # rotation leaves inner products as they are
    if scale_grad is not None:
        inner = inner + scale_grad * scale
    whole = arriving.unflatten(0, dq.shape[:2])
    back = torch.cat((rotate(whole[:, :, : 2 * heads], cos, -sin), whole[:, :, 2 * heads :]), dim=2)
    return back.flatten(0, 1).to(packed.dtype), inner * scale / width


@_unrotate.register_fake
def _(
    dq: Tensor, dk: Tensor, dv: Tensor, packed: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, width: int,
    packed_grad: Tensor | None, scale_grad: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(packed), torch.empty_like(scale)


@operator("through_norm")
def _through_norm(total_grad: Tensor, product: Tensor, unit: Tensor, scale: Tensor, inner: Tensor) -> Tensor:
    """total_grad + product * scale - unit * inner, the gradient of the stream (N, d); the factors are of rows, (N,)."""
    if use_triton(total_grad):
        from meristem.model.triton_loops import through_norm_kernel

        return through_norm_kernel(total_grad, product, unit, scale, inner)
    return (total_grad + product * scale[:, None] - unit * inner[:, None]).to(total_grad.dtype)


@_through_norm.register_fake
def _(total_grad: Tensor, product: Tensor, unit: Tensor, scale: Tensor, inner: Tensor) -> Tensor:
    return torch.empty_like(total_grad)


class _NormProjectHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        cast = weight.to(dtype)
        unit, scale = _add_unit(x.flatten(0, -2), branch.flatten(0, -2), eps, dtype)
        packed = (unit @ cast.T).unflatten(-1, (-1, cos.shape[-1])).unflatten(0, x.shape[:-1])
        rotate_heads_(packed, cos, sin, 2 * heads)
        ctx.save_for_backward(unit, packed, scale, cast, cos, sin)
        ctx.branch_dtype, ctx.weight_dtype = branch.dtype, weight.dtype
        parts = (x, packed[:, :, :heads], packed[:, :, heads : 2 * heads], packed[:, :, 2 * heads : 3 * heads])
        return parts if packed.shape[2] == 3 * heads else (*parts, packed, scale.view(x.shape[:-1]))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, total_grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, packed_grad: Tensor | None = None,
        scale_grad: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        unit, packed, scale, weight, cos, sin = ctx.saved_tensors
        shape = total_grad.shape
        own = (None if grad is None else grad.flatten(0, 1) for grad in (packed_grad, scale_grad))
        heads_grad, inner = _unrotate(dq, dk, dv, packed.flatten(0, 1), scale, cos, sin, shape[-1], *own)
        rows = heads_grad.flatten(1)
        # Triton kernels that formed the product as well, so that it need not go through memory, were no faster
        # (results/2026-11-15-growth-cost-narrow).
        grad = _through_norm(total_grad.flatten(0, -2), rows @ weight, unit, scale, inner).view(shape)
        weight_grad = (rows.T @ unit).to(ctx.weight_dtype)
        return grad, grad.to(ctx.branch_dtype), weight_grad, None, None, None, None, None


def norm_project_heads(
    x: Tensor, branch: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, ...]:
    """Queries, keys and values (B, T, heads, e) of a few heads, of the norm of x + branch (B, T, d).

    The rows of `weight` (3 heads e, d) have the norm's gain in them. Returned are x, branch and the three. If there are
    more rows, also all that they project, packed (B, T, rows / e, e), and the norm's factor in each token (B, T).

    What is done with x and branch afterwards has to depend on their sum alone, and all of its gradient comes back
    through x: so the gradient of the norm is added to it and the result handed to both in one pass.
    """
    x, *parts = _NormProjectHeads.apply(x, branch, weight, cos, sin, heads, eps, product_dtype(x))
    return x, branch.detach(), *parts


# --- the same heads after they have read ---------------------------------------------------------------------------
#
# What looped heads have read, s, is added to the stream through their output projection O: x + s O. So the stream need
# not be seen again for the next pass. With V all that the heads project from the norm of x (whose factor is r), they
# project r x V + r s O V from x + s O, in units of the old norm; the product O V is small. And if O^T is part of V, the
# new norm is known too: |x + s O|^2 = |x|^2 + s . (x O^T + (x + s O) O^T).


@operator("follow")
def _follow(
    packed: Tensor, change: Tensor, read: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    """Queries, keys and values (B, T, 3 heads, e) after a change, and the old norm over the new one (B, T).

    `packed` (B, T, 4 heads, e) are those before, in which queries and keys are rotated, and x O^T; `change`, of the
    same shape but not rotated, is s O V, to be multiplied by `scale` (B, T); `read` (B, T, heads, e) is s.
    """
    if use_triton(packed):
        from meristem.model.triton_loops import follow_kernel

        return follow_kernel(packed, change, read, scale, cos, sin, eps, width)
    heads, accum = read.shape[2], scale.dtype
    factor = scale[..., None, None]
    step = change.to(accum) * factor
    qkv = packed[:, :, : 3 * heads] + torch.cat(
        (rotate(step[:, :, : 2 * heads], cos, sin), step[:, :, 2 * heads : 3 * heads]), dim=2
    )
    growth = (read.to(accum) * (2 * packed[:, :, 3 * heads :].to(accum) + step[:, :, 3 * heads :])).sum((2, 3))
    square = 1 + scale * growth / width
    inverse = torch.maximum(square, eps * scale.square()).rsqrt()  # rounding may not make it negative
    return (qkv * inverse[..., None, None]).to(packed.dtype), inverse


@_follow.register_fake
def _(
    packed: Tensor, change: Tensor, read: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    batch, length, heads, dim = read.shape
    return packed.new_empty((batch, length, 3 * heads, dim)), torch.empty_like(scale)


@operator("follow_backward")
def _follow_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, result: Tensor, inverse: Tensor, packed: Tensor, change: Tensor, read: Tensor,
    scale: Tensor, cos: Tensor, sin: Tensor, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of packed, change, read and scale, in the shapes and under the names of `_follow`."""
    if use_triton(packed):
        from meristem.model.triton_loops import follow_backward_kernel

        return follow_backward_kernel(dq, dk, dv, result, inverse, packed, change, read, scale, cos, sin, width)
    heads, accum = read.shape[2], scale.dtype
    arriving = torch.cat((dq, dk, dv), dim=2).to(accum)
    square_grad = -0.5 * inverse.square() * (arriving * result.to(accum)).sum((2, 3))
    qkv_grad = arriving * inverse[..., None, None]
    back = torch.cat((rotate(qkv_grad[:, :, : 2 * heads], cos, -sin), qkv_grad[:, :, 2 * heads :]), dim=2)
    s, factor = read.to(accum), scale[..., None, None]
    slope = (square_grad * scale / width)[..., None, None]
    sight = 2 * packed[:, :, 3 * heads :].to(accum) + change[:, :, 3 * heads :].to(accum) * factor
    change_grad = torch.cat((back, slope * s), dim=2)  # of what is multiplied by scale
    scale_grad = (change_grad * change.to(accum)).sum((2, 3)) + square_grad / width * (s * sight).sum((2, 3))
    return (
        torch.cat((qkv_grad, 2 * slope * s), dim=2).to(packed.dtype),
        (change_grad * factor).to(change.dtype),
        (slope * sight).to(read.dtype),
        scale_grad,
    )


@_follow_backward.register_fake
def _(
    dq: Tensor, dk: Tensor, dv: Tensor, result: Tensor, inverse: Tensor, packed: Tensor, change: Tensor, read: Tensor,
    scale: Tensor, cos: Tensor, sin: Tensor, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    # What was read may lie in memory as the attention kernel left it; its gradient does not.
    return torch.empty_like(packed), torch.empty_like(change), read.new_empty(read.shape), torch.empty_like(scale)


class _FollowHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, scale: Tensor, read: Tensor, step: Tensor, cos: Tensor, sin: Tensor, eps: float,
        width: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        cast = step.to(packed.dtype)
        change = (read.flatten(2) @ cast).unflatten(-1, packed.shape[2:])
        result, inverse = _follow(packed, change, read, scale, cos, sin, eps, width)
        ctx.save_for_backward(packed, change, read, scale, result, inverse, cast, cos, sin)
        ctx.width, ctx.step_dtype = width, step.dtype
        heads = read.shape[2]
        return result[:, :, :heads], result[:, :, heads : 2 * heads], result[:, :, 2 * heads :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        packed, change, read, scale, result, inverse, step, cos, sin = ctx.saved_tensors
        packed_grad, change_grad, read_grad, scale_grad = _follow_backward(
            dq, dk, dv, result, inverse, packed, change, read, scale, cos, sin, ctx.width
        )
        flat = change_grad.flatten(2).flatten(0, 1)
        step_grad = read.flatten(2).flatten(0, 1).T @ flat
        read_grad = read_grad + (flat @ step.T).view(read.shape)
        return packed_grad, scale_grad, read_grad, step_grad.to(ctx.step_dtype), None, None, None, None


def follow_heads(
    packed: Tensor, scale: Tensor, read: Tensor, step: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, T, heads, e) of the stream to which what these heads have read has been added.

    `packed` (B, T, 4 heads, e) and `scale` (B, T) are what `norm_project_heads` made of the stream before, with weights
    V whose last rows are the output projection O (heads e, d); `read` (B, T, heads, e) goes to the stream through O;
    `step` (heads e, 4 heads e) is O V; `width` is d.
    """
    parts: tuple[Tensor, Tensor, Tensor] = _FollowHeads.apply(
        packed, scale, read.to(packed.dtype), step, cos, sin, eps, width
    )
    return parts


# --- gates ----------------------------------------------------------------------------------------------------------


def gated(x: Tensor, gates: Tensor | None) -> Tensor:
    """What heads have read, x (..., heads, e), each times its gate (heads,), if there are gates."""
    return x if gates is None else x * gates[:, None]


class _GatedLinear(torch.autograd.Function):
    """A product of gated heads, in whose backward the gates meet nothing larger than the weight.

    In its forward they do: a layer with more passes adds up what was read, and a birth may not change a bit.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, gates, weight)
        return gated(x, gates).to(x.dtype).flatten(1) @ weight.to(x.dtype).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gates, weight = ctx.saved_tensors
        heads = weight.unflatten(1, x.shape[1:])
        heads_grad = (grad.T @ x.flatten(1)).view(heads.shape).to(weight.dtype)  # of each head times its gate
        x_grad = (grad @ gated(heads, gates).to(grad.dtype).flatten(1)).view(x.shape)
        return x_grad, (heads_grad * heads).sum((0, 2)).to(gates.dtype), gated(heads_grad, gates).flatten(1)


def gated_linear(x: Tensor, gates: Tensor | None, weight: Tensor) -> Tensor:
    """gated(x, gates) @ weight.T for x (B, T, heads, e) and weight (d, heads e); computed in the dtype of x."""
    if gates is None:
        return linear(x.flatten(2), weight)
    rows: Tensor = _GatedLinear.apply(x.flatten(0, 1), gates, weight)
    return rows.unflatten(0, x.shape[:2])
