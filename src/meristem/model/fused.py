"""Operations that the compiler does not fuse well by itself, each as one opaque operator.

Every operator has a plain PyTorch form, which runs anywhere and defines the result, and a Triton form for CUDA in
`triton_kernels.py`. The compiler sees an operator as a single node: it neither splits nor reorders it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu
from torch.utils.flop_counter import register_flop_formula

from meristem.errors import InputError

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


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that products of x run in: autocast's if it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- cross entropy ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("meristem::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """Cross entropy of each row, (N,), 0 where the target is -100; logits (N, V) become its gradient times `scale`.

    Other targets outside the vocabulary are refused on a CPU. Triton, which cannot stop, gives them a loss and a
    gradient of NaN, so that the step is not taken.
    """
    if _use_triton(logits):
        from meristem.model.triton_kernels import cross_entropy_kernel_

        return cross_entropy_kernel_(logits, targets, scale)
    if targets.device.type == "cpu":
        _check_targets(targets, logits.shape[1])
    wide = _wide(logits.dtype)
    target = targets[:, None]
    valid = target != IGNORE
    column = target.masked_fill(~valid, 0)
    gradient = torch.log_softmax(logits.to(wide), dim=-1)
    losses = -gradient.gather(-1, column) * valid
    gradient.exp_().scatter_add_(-1, column, -torch.ones_like(losses))
    logits.copy_(gradient.mul_(valid * scale))
    return losses[:, 0]


@cross_entropy_.register_fake
def _(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=_wide(logits.dtype))


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    outside = targets[((targets < 0) | (targets >= vocabulary)) & (targets != IGNORE)]
    if len(outside):
        expected = f"must be from 0 to {vocabulary - 1}, or {IGNORE} where nothing is to be predicted"
        raise InputError("labels", int(outside[0]), expected)


# --- heads -------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x (B, T, heads, dim) by the angle of each position; computed in float32, or float64 for float64.

    Coordinate i is paired with i + dim / 2; `cos` and `sin` are (T, 1, dim) or (B, T, 1, dim), and the first half of
    `sin` carries the minus of the rotation.
    """
    wide = x.to(_wide(x.dtype))
    swapped = wide.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (wide * cos + swapped * sin).to(x.dtype)


@torch.library.custom_op("meristem::turn_heads_", mutates_args=("packed",))
def turn_heads_(packed: Tensor, cos: Tensor, sin: Tensor, turned: int) -> None:
    """Rotate the first `turned` heads of packed (B, T, heads, dim) in place."""
    if _use_triton(packed):
        from meristem.model.triton_kernels import turn_into

        turn_into(packed, packed[:, :, :turned], cos, sin, 1)
    else:
        packed[:, :, :turned] = rotate(packed[:, :, :turned], cos, sin)


@torch.library.custom_op("meristem::turn_heads_backward", mutates_args=())
def turn_heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of packed, from those of its queries, keys and values, each (B, T, its heads, dim)."""
    if _use_triton(dq):
        from meristem.model.triton_kernels import turn_into

        heads, kv_heads = dq.shape[2], dk.shape[2]
        packed = dq.new_empty((*dq.shape[:2], heads + 2 * kv_heads, dq.shape[3]))
        turn_into(packed, dq, cos, sin, -1)
        turn_into(packed[:, :, heads:], dk, cos, sin, -1)
        turn_into(packed[:, :, heads + kv_heads :], dv, cos, sin, 0)
        return packed
    return torch.cat((rotate(dq, cos, -sin), rotate(dk, cos, -sin), dv), dim=2)


@turn_heads_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, heads, dim = dq.shape
    return dq.new_empty((batch, length, heads + 2 * dk.shape[2], dim))


class _ProjectHeads(torch.autograd.Function):
    """Written out because automatic backward pads and adds three large tensors where one pass will do."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        cast = weight.to(x.dtype)
        packed = (x @ cast.T).unflatten(-1, (heads + 2 * kv_heads, -1))
        turned = heads + kv_heads
        turn_heads_(packed, cos, sin, turned)
        ctx.save_for_backward(x, cast, cos, sin)
        ctx.weight_dtype = weight.dtype
        return packed[:, :, :heads], packed[:, :, heads:turned], packed[:, :, turned:]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        packed = turn_heads_backward(dq, dk, dv, cos, sin).flatten(2)
        weight_grad = packed.flatten(0, 1).T @ x.flatten(0, 1)
        return packed @ weight, weight_grad.to(ctx.weight_dtype), None, None, None, None


def project_heads(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, turned to their positions, and values, (B, T, their heads, dim), of x (B, T, d).

    The rows of `weight` are ordered queries, keys, values, head by head; computed in the dtype of x.
    """
    parts: tuple[Tensor, Tensor, Tensor] = _ProjectHeads.apply(x, weight, cos, sin, heads, kv_heads)
    return parts


# --- residual sum and norm ------------------------------------------------------------------------------------------


@torch.library.custom_op("meristem::add_norm", mutates_args=())
def _add_norm(
    x: Tensor, branch: Tensor, second: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + branch + second (N, d), its RMS norm in `dtype`, and the reciprocal root mean square of each row."""
    if _use_triton(x):
        from meristem.model.triton_kernels import add_norm_kernel

        return add_norm_kernel(x, branch, second, weight, eps, dtype)
    total = x + branch if second is None else x + branch + second
    wide = total.to(_wide(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return total, (wide * scale * weight).to(dtype), scale[:, 0]


@_add_norm.register_fake
def _(
    x: Tensor, branch: Tensor, second: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[0], dtype=_wide(x.dtype))


@torch.library.custom_op("meristem::add_norm_backward", mutates_args=())
def _add_norm_backward(
    total: Tensor, scale: Tensor, weight: Tensor, total_grad: Tensor, normed_grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the sum, the same again in `dtype` (empty if that is its own), and of the weight."""
    if _use_triton(total):
        from meristem.model.triton_kernels import add_norm_backward_kernel

        return add_norm_backward_kernel(total, scale, weight, total_grad, normed_grad, dtype)
    unit = total.to(scale.dtype) * scale[:, None]
    flow = normed_grad.to(scale.dtype) * weight
    grad = total_grad + (flow - unit * (unit * flow).mean(-1, keepdim=True)) * scale[:, None]
    grad = grad.to(total.dtype)
    copy = grad.new_empty(0) if dtype == total.dtype else grad.to(dtype)
    return grad, copy, (normed_grad.to(scale.dtype) * unit).sum(0).to(weight.dtype)


@_add_norm_backward.register_fake
def _(
    total: Tensor, scale: Tensor, weight: Tensor, total_grad: Tensor, normed_grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    copy = total.new_empty(0) if dtype == total.dtype else torch.empty_like(total, dtype=dtype)
    return torch.empty_like(total), copy, torch.empty_like(weight)


class _AddNorm(torch.autograd.Function):
    """One pass over the residual stream each way, where sum, norm and casts would take several."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, second: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total, normed, scale = _add_norm(x, branch, second, weight, eps, dtype)
        ctx.save_for_backward(total, scale, weight)
        ctx.branch_dtype = branch.dtype
        return total, normed

    @staticmethod
    def backward(ctx: Any, total_grad: Tensor, normed_grad: Tensor) -> tuple[Tensor | None, ...]:
        total, scale, weight = ctx.saved_tensors
        grad, copy, weight_grad = _add_norm_backward(total, scale, weight, total_grad, normed_grad, ctx.branch_dtype)
        branch_grad = copy if copy.numel() else grad
        return grad, branch_grad, branch_grad if ctx.needs_input_grad[2] else None, weight_grad, None, None


def add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, second: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The residual sum x + branch, and its RMS norm times `weight`; all (..., d). `second` is one more branch.

    The sum keeps the dtype of x, so that a float32 stream is not rounded; the norm has the autocast dtype if autocast
    is on, else that of x. Two branches have the same dtype.
    """
    rows = None if second is None else second.flatten(0, -2)
    total, normed = _AddNorm.apply(x.flatten(0, -2), branch.flatten(0, -2), rows, weight, eps, product_dtype(x))
    return total.view(x.shape), normed.view(x.shape)


# --- residual sum, norm and projection of a few heads ---------------------------------------------------------------
#
# A loop reads the whole stream to project two heads out of it, and what it costs is the traffic of that stream. Here
# the sum is not written at all, and the norm's gain is in the narrow weight instead of the wide stream. In backward,
# what comes back through the norm's factor needs the inner product of gradient and result in each row, and both of
# these are narrow: the gradient of the stream is then a product with two terms added to it, made in one pass.


@torch.library.custom_op("meristem::add_unit", mutates_args=())
def _add_unit(x: Tensor, branch: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The RMS norm of x + branch without a gain, (N, d) in `dtype`, and the factor of each row in it, (N,)."""
    if _use_triton(x):
        from meristem.model.triton_kernels import add_unit_kernel

        return add_unit_kernel(x, branch, eps, dtype)
    wide = (x + branch).to(_wide(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(dtype), scale[:, 0]


@_add_unit.register_fake
def _(x: Tensor, branch: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[0], dtype=_wide(x.dtype))


@torch.library.custom_op("meristem::unturn", mutates_args=())
def _unturn(
    dq: Tensor, dk: Tensor, dv: Tensor, packed: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, width: int,
    packed_grad: Tensor | None, scale_grad: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient of packed (N, 3 or 4 heads, e) before its heads were turned, from those (B, T, heads, e) of its parts.

    And the factor (N,) of the normed row in what comes back through the norm, whose own factors are `scale` (N,). If
    packed and scale were used as such too, they have gradients of their own, of the same shapes.
    """
    if _use_triton(dq):
        from meristem.model.triton_kernels import unturn_kernel

        return unturn_kernel(dq, dk, dv, packed, scale, cos, sin, width, packed_grad, scale_grad)
    heads, wide = dq.shape[2], scale.dtype
    arriving = torch.cat((dq, dk, dv), dim=2).flatten(0, 1)
    if packed_grad is not None:
        arriving = packed_grad.to(wide) + pad(arriving, (0, 0, 0, packed.shape[1] - arriving.shape[1]))
    inner = (arriving.to(wide) * packed.to(wide)).sum((1, 2))  # turning leaves inner products as they are
    if scale_grad is not None:
        inner = inner + scale_grad * scale
    whole = arriving.unflatten(0, dq.shape[:2])
    back = torch.cat((rotate(whole[:, :, : 2 * heads], cos, -sin), whole[:, :, 2 * heads :]), dim=2)
    return back.flatten(0, 1).to(packed.dtype), inner * scale / width


@_unturn.register_fake
def _(
    dq: Tensor, dk: Tensor, dv: Tensor, packed: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, width: int,
    packed_grad: Tensor | None, scale_grad: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(packed), torch.empty_like(scale)


@torch.library.custom_op("meristem::narrow_backward", mutates_args=())
def _narrow_backward(
    total_grad: Tensor, unit: Tensor, scale: Tensor, inner: Tensor, heads_grad: Tensor, weight: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """total_grad + scale * (heads_grad @ weight) - inner * unit, (N, d); and again in `dtype` (empty if it is its own).

    And the gradient of the weight, heads_grad.T @ unit, in the dtype of the products.
    """
    if _use_triton(total_grad):
        from meristem.model.triton_kernels import narrow_backward_kernels

        return narrow_backward_kernels(total_grad, unit, scale, inner, heads_grad, weight, dtype)
    wide = scale.dtype
    product = (heads_grad.to(wide) @ weight.to(wide)) * scale[:, None]
    grad = (total_grad + product - unit.to(wide) * inner[:, None]).to(total_grad.dtype)
    copy = grad.new_empty(0) if dtype == total_grad.dtype else grad.to(dtype)
    return grad, copy, heads_grad.T @ unit


@_narrow_backward.register_fake
def _(
    total_grad: Tensor, unit: Tensor, scale: Tensor, inner: Tensor, heads_grad: Tensor, weight: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    copy = total_grad.new_empty(0) if dtype == total_grad.dtype else torch.empty_like(total_grad, dtype=dtype)
    return torch.empty_like(total_grad), copy, torch.empty_like(weight)


@register_flop_formula(torch.ops.meristem.narrow_backward)
def _narrow_backward_flops(grad: Any, *rest: Any, **options: Any) -> int:
    weight = rest[4]
    return int(2 * 2 * grad[0] * weight[0] * weight[1])


class _NormProjectHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        cast = weight.to(dtype)
        unit, scale = _add_unit(x.flatten(0, -2), branch.flatten(0, -2), eps, dtype)
        packed = (unit @ cast.T).unflatten(-1, (-1, cos.shape[-1])).unflatten(0, x.shape[:-1])
        turn_heads_(packed, cos, sin, 2 * heads)
        ctx.save_for_backward(unit, packed, scale, cast, cos, sin)
        ctx.branch_dtype, ctx.weight_dtype = branch.dtype, weight.dtype
        parts = (x, packed[:, :, :heads], packed[:, :, heads : 2 * heads], packed[:, :, 2 * heads : 3 * heads])
        return parts if packed.shape[2] == 3 * heads else (*parts, packed, scale.view(x.shape[:-1]))

    @staticmethod
    def backward(
        ctx: Any, total_grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, packed_grad: Tensor | None = None,
        scale_grad: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        unit, packed, scale, weight, cos, sin = ctx.saved_tensors
        shape = total_grad.shape
        own = (None if grad is None else grad.flatten(0, 1) for grad in (packed_grad, scale_grad))
        heads_grad, inner = _unturn(dq, dk, dv, packed.flatten(0, 1), scale, cos, sin, shape[-1], *own)
        grad, copy, weight_grad = _narrow_backward(
            total_grad.flatten(0, -2), unit, scale, inner, heads_grad.flatten(1), weight, ctx.branch_dtype
        )
        branch_grad = copy if copy.numel() else grad
        return (
            grad.view(shape), branch_grad.view(shape), weight_grad.to(ctx.weight_dtype), None, None, None, None, None,
        )  # fmt: skip


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


@torch.library.custom_op("meristem::follow", mutates_args=())
def _follow(
    packed: Tensor, change: Tensor, read: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    """Queries, keys and values (B, T, 3 heads, e) after a change, and the old norm over the new one (B, T).

    `packed` (B, T, 4 heads, e) are those before, in which queries and keys are turned, and x O^T; `change`, of the same
    shape but not turned, is s O V, to be multiplied by `scale` (B, T); `read` (B, T, heads, e) is s.
    """
    if _use_triton(packed):
        from meristem.model.triton_kernels import follow_kernel

        return follow_kernel(packed, change, read, scale, cos, sin, eps, width)
    heads, wide = read.shape[2], scale.dtype
    factor = scale[..., None, None]
    step = change.to(wide) * factor
    qkv = packed[:, :, : 3 * heads] + torch.cat(
        (rotate(step[:, :, : 2 * heads], cos, sin), step[:, :, 2 * heads : 3 * heads]), dim=2
    )
    growth = (read.to(wide) * (2 * packed[:, :, 3 * heads :].to(wide) + step[:, :, 3 * heads :])).sum((2, 3))
    square = 1 + scale * growth / width
    inverse = torch.maximum(square, eps * scale.square()).rsqrt()  # rounding may not make it negative
    return (qkv * inverse[..., None, None]).to(packed.dtype), inverse


@_follow.register_fake
def _(
    packed: Tensor, change: Tensor, read: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
) -> tuple[Tensor, Tensor]:
    batch, length, heads, dim = read.shape
    return packed.new_empty((batch, length, 3 * heads, dim)), torch.empty_like(scale)


@torch.library.custom_op("meristem::follow_backward", mutates_args=())
def _follow_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, result: Tensor, inverse: Tensor, packed: Tensor, change: Tensor, read: Tensor,
    scale: Tensor, cos: Tensor, sin: Tensor, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of packed, change, read and scale, in the shapes and under the names of `_follow`."""
    if _use_triton(packed):
        from meristem.model.triton_kernels import follow_backward_kernel

        return follow_backward_kernel(dq, dk, dv, result, inverse, packed, change, read, scale, cos, sin, width)
    heads, wide = read.shape[2], scale.dtype
    arriving = torch.cat((dq, dk, dv), dim=2).to(wide)
    square_grad = -0.5 * inverse.square() * (arriving * result.to(wide)).sum((2, 3))
    qkv_grad = arriving * inverse[..., None, None]
    back = torch.cat((rotate(qkv_grad[:, :, : 2 * heads], cos, -sin), qkv_grad[:, :, 2 * heads :]), dim=2)
    s, factor = read.to(wide), scale[..., None, None]
    slope = (square_grad * scale / width)[..., None, None]
    sight = 2 * packed[:, :, 3 * heads :].to(wide) + change[:, :, 3 * heads :].to(wide) * factor
    change_grad = torch.cat((back, slope * s), dim=2)  # of what is multiplied by scale
    scale_grad = (change_grad * change.to(wide)).sum((2, 3)) + square_grad / width * (s * sight).sum((2, 3))
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
    """In backward the gates meet nothing larger than the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, gates, weight)
        return gated(x, gates).to(x.dtype).flatten(1) @ weight.to(x.dtype).T

    @staticmethod
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


# --- for the compiler -------------------------------------------------------------------------------------------------


def announce_operators() -> None:
    """Tell the compiler about these operators before it meets them in a deep model.

    Torch before 2.13 describes an operator it does not know with all that leads up to it, in text, for a log line that
    nobody asked for; in a chain of such operators that takes time exponential in the depth.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    operators = (
        cross_entropy_, turn_heads_, turn_heads_backward, _add_norm, _add_norm_backward, _add_unit, _unturn,
        _narrow_backward, _follow, _follow_backward, swiglu_backward,
    )  # fmt: skip
    for operator in operators:
        target = operator._opoverload
        if target not in lowerings:
            tag = get_layout_constraint_tag(target, with_default=True)
            make_fallback(target, layout_constraint=tag_to_layout_constraint(tag), warn=False)
