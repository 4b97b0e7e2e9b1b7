"""The fused operators of every block and of the loss; their CUDA forms are in `triton_kernels.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, linear, silu

from meristem.errors import InputError
from meristem.model.operators import accum_dtype, operator, product_dtype, product_in, use_triton

IGNORE = -100


# --- cross entropy ---------------------------------------------------------------------------------------------------


@operator("cross_entropy_", mutates=("logits",))
def cross_entropy_(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """Cross entropy of each row, (N,), 0 where the target is -100; logits (N, V) become its gradient times `scale`.

    Other targets outside the vocabulary are refused on a CPU. Triton, which cannot stop, gives them a loss and a
    gradient of NaN, so that the step is not taken.
    """
    if use_triton(logits):
        from meristem.model.triton_kernels import cross_entropy_kernel_

        return cross_entropy_kernel_(logits, targets, scale)
    if targets.device.type == "cpu":
        _check_targets(targets, logits.shape[1])
    accum = accum_dtype(logits.dtype)
    target = targets[:, None]
    valid = target != IGNORE
    column = target.masked_fill(~valid, 0)
    gradient = torch.log_softmax(logits.to(accum), dim=-1)
    losses = -gradient.gather(-1, column) * valid
    gradient.exp_().scatter_add_(-1, column, -torch.ones_like(losses))
    logits.copy_(gradient.mul_(valid * scale))
    return losses[:, 0]


@cross_entropy_.register_fake
def _(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=accum_dtype(logits.dtype))


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    outside = targets[((targets < 0) | (targets >= vocabulary)) & (targets != IGNORE)]
    if len(outside):
        expected = f"must be from 0 to {vocabulary - 1}, or {IGNORE} where nothing is to be predicted"
        raise InputError("targets", int(outside[0]), expected)


# --- embedding -----------------------------------------------------------------------------------------------------


@operator("embed_backward")
def _embed_backward(grad: Tensor, tokens: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """The sums (V, d) of the rows of grad (N, d) that belong to the same of the tokens (N,)."""
    if use_triton(grad):
        from meristem.model.triton_kernels import embed_backward_kernel

        return embed_backward_kernel(grad, tokens, vocabulary, dtype)
    return torch.ops.aten.embedding_dense_backward(grad.to(dtype), tokens, vocabulary, -1, False)


@_embed_backward.register_fake
def _(grad: Tensor, tokens: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty(vocabulary, grad.shape[1], dtype=dtype)


class _Embed(torch.autograd.Function):
    """A lookup without a copy in the weights' dtype on its way to that of the stream."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.like = (weight.shape[0], weight.dtype)
        return embedding(tokens, weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = ctx.saved_tensors
        return None, _embed_backward(grad.flatten(0, -2), tokens.flatten(), *ctx.like), None


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """The rows of weight (V, d) for tokens (B, T): (B, T, d) in the dtype of products."""
    x: Tensor = _Embed.apply(tokens, weight, product_dtype(weight))
    return x


# --- gains of norms ---------------------------------------------------------------------------------------------------
#
# A norm leaves its gain to the product that reads it, whose weight is far smaller than the stream.


@operator("fold_gain")
def fold_gain(weight: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    """weight (m, d) times the gain (d,) of the norm that it reads, rounded to `dtype` once."""
    if use_triton(weight):
        from meristem.model.triton_kernels import fold_gain_kernel

        return fold_gain_kernel(weight, gain, dtype)
    return (weight * gain).to(dtype)


@fold_gain.register_fake
def _(weight: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(weight, dtype=dtype)


@operator("fold_gain_backward")
def fold_gain_backward(grad: Tensor, weight: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight (m, d) and gain (d,) from that of their product."""
    if use_triton(weight):
        from meristem.model.triton_kernels import fold_gain_backward_kernel

        return fold_gain_backward_kernel(grad, weight, gain)
    precise = grad.to(weight.dtype)
    return precise * gain, (precise * weight).sum(0)


@fold_gain_backward.register_fake
def _(grad: Tensor, weight: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty_like(gain)


class Folded(NamedTuple):
    """What the product of a norm and a weight keeps for backward: the weight, its gain, and the two folded.

    In a sharded model these have the products' dtype already, and the whole weight comes back for backward: there the
    folded one, which is as large, is not kept but made again.
    """

    weight: Tensor
    gain: Tensor
    kept: Tensor | None

    @staticmethod
    def of(weight: Tensor, gain: Tensor, dtype: torch.dtype) -> tuple[Tensor, Folded]:
        """The folded weight in `dtype`, and what to keep of it."""
        cast = fold_gain(weight, gain, dtype)
        return cast, Folded(weight, gain, None if weight.dtype == dtype else cast)

    def again(self, dtype: torch.dtype) -> Tensor:
        return fold_gain(self.weight, self.gain, dtype) if self.kept is None else self.kept

    def gradients(self, ctx: Any, grad: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and gain, from that of their product with x (N, d).

        They are the second and third input of the function whose context this is. Whoever asks what the loss wants of
        activations has frozen them: then there is nothing to compute.
        """
        if not any(ctx.needs_input_grad[1:3]):
            return None, None
        return fold_gain_backward(grad.T @ x, self.weight, self.gain)


# --- heads -------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, T, heads, dim) by the angle of each position; computed in float32, or float64 for float64.

    Coordinate i is paired with i + dim / 2; `cos` and `sin` are (T, 1, dim) or (B, T, 1, dim), and the first half of
    `sin` carries the minus of the rotation.
    """
    precise = x.to(accum_dtype(x.dtype))
    return _add_across_(precise * cos, precise, sin).to(x.dtype)


def _add_across_(result: Tensor, x: Tensor, sin: Tensor) -> Tensor:
    """Add the coordinates of x, each times its sine, to those that they are paired with."""
    half = x.shape[-1] // 2
    result[..., :half].addcmul_(x[..., half:], sin[..., :half])
    result[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return result


@operator("rotate_heads_", mutates=("packed",))
def rotate_heads_(packed: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> None:
    """Rotate the first `rotated` heads of packed (B, T, heads, dim) in place."""
    if use_triton(packed):
        from meristem.model.triton_kernels import rotate_into

        rotate_into(packed, packed[:, :, :rotated], cos, sin, 1)
    else:
        packed[:, :, :rotated] = rotate(packed[:, :, :rotated], cos, sin)


@operator("rotate_heads_backward")
def rotate_heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of packed, from those of its queries, keys and values, each (B, T, its heads, dim)."""
    if use_triton(dq):
        from meristem.model.triton_kernels import rotate_into

        heads, kv_heads = dq.shape[2], dk.shape[2]
        packed = dq.new_empty((*dq.shape[:2], heads + 2 * kv_heads, dq.shape[3]))
        rotate_into(packed, dq, cos, sin, -1)
        rotate_into(packed[:, :, heads:], dk, cos, sin, -1)
        rotate_into(packed[:, :, heads + kv_heads :], dv, cos, sin, 0)
        return packed
    heads, kv_heads = dq.shape[2], dk.shape[2]
    packed = dq.new_empty((*dq.shape[:2], heads + 2 * kv_heads, dq.shape[3]))
    queries, keys, values = packed.split((heads, kv_heads, kv_heads), dim=2)
    values.copy_(dv)
    for part, grad in ((queries, dq), (keys, dk)):
        if grad.dtype == cos.dtype:
            _add_across_(torch.mul(grad, cos, out=part), grad, -sin)
        else:
            part.copy_(rotate(grad, cos, -sin))
    return packed


@rotate_heads_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, heads, dim = dq.shape
    return dq.new_empty((batch, length, heads + 2 * dk.shape[2], dim))


# Each head can also be normed, by a factor of its own in each token. Rotation leaves the norm of a head as it is, so
# both are one pass, and backward needs nothing but the result, which attention keeps anyway, and the factors.


def _head_factors(x: Tensor, eps: float) -> Tensor:
    """The reciprocal root mean square (..., heads) of each head of x (..., heads, dim)."""
    return torch.rsqrt(x.square().mean(-1) + eps)  # not by vecdot, which autocast would round


def _through_head_norm(grad: Tensor, normed: Tensor, factors: Tensor) -> Tensor:
    """The gradient of heads before their norm, from that of the normed ones, both (..., heads, dim)."""
    unit, flow = normed.to(factors.dtype), grad.to(factors.dtype)
    along = (unit * flow).mean(-1, keepdim=True)
    return torch.addcmul(flow, unit, along, value=-1).mul_(factors[..., None])


@operator("norm_rotate_heads_", mutates=("packed",))
def norm_rotate_heads_(packed: Tensor, cos: Tensor, sin: Tensor, rotated: int, eps: float) -> Tensor:
    """RMS-norm and rotate the first `rotated` heads of packed (B, T, heads, dim) in place.

    Returned are their factors (B, T, rotated).
    """
    if use_triton(packed):
        from meristem.model.triton_kernels import norm_rotate_into

        return norm_rotate_into(packed, packed[:, :, :rotated], (cos, sin), eps)
    precise = packed[:, :, :rotated].to(accum_dtype(packed.dtype))
    factors = _head_factors(precise, eps)
    packed[:, :, :rotated] = rotate(precise * factors[..., None], cos, sin)
    return factors


@norm_rotate_heads_.register_fake
def _(packed: Tensor, cos: Tensor, sin: Tensor, rotated: int, eps: float) -> Tensor:
    return packed.new_empty((*packed.shape[:2], rotated), dtype=accum_dtype(packed.dtype))


@operator("norm_rotate_heads_backward")
def norm_rotate_heads_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, normed: Tensor, factors: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """The gradient of packed, as `rotate_heads_backward`; `normed` and `factors` are what the norm left of it."""
    heads, kv_heads = dq.shape[2], dk.shape[2]
    packed = torch.empty_like(normed)
    queries, keys, values = packed.split((heads, kv_heads, kv_heads), dim=2)
    parts = ((queries, dq, normed[:, :, :heads], 0), (keys, dk, normed[:, :, heads : heads + kv_heads], heads))
    if use_triton(dq):
        from meristem.model.triton_kernels import norm_rotate_backward_into, rotate_into

        for part, grad, own, first in parts:
            norm_rotate_backward_into(part, grad, own, factors, first, (cos, sin))
        rotate_into(values, dv, cos, sin, 0)
        return packed
    for part, grad, own, first in parts:
        back = _through_head_norm(grad, own, factors[:, :, first : first + grad.shape[2]])
        part.copy_(rotate(back, cos, -sin))
    values.copy_(dv)
    return packed


@norm_rotate_heads_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, normed: Tensor, factors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(normed)


class _ProjectHeads(torch.autograd.Function):
    """Projection and rotation. Automatic backward would pad and add three large tensors where one pass will do."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, heads: int,
        kv_heads: int, eps: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        cast, folded = Folded.of(weight, gain, x.dtype)
        product = x @ cast.T if bias is None else linear(x, cast, bias.to(x.dtype))
        packed = product.unflatten(-1, (heads + 2 * kv_heads, -1))
        ctx.bias_dtype = None if bias is None else bias.dtype
        rotated = heads + kv_heads
        normed: tuple[Tensor, ...] = ()
        if eps is None:
            rotate_heads_(packed, cos, sin, rotated)
        else:
            normed = packed, norm_rotate_heads_(packed, cos, sin, rotated, eps)
        ctx.save_for_backward(x, *folded, cos, sin, *normed)
        return packed[:, :, :heads], packed[:, :, heads:rotated], packed[:, :, rotated:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gain, kept, cos, sin, *normed = ctx.saved_tensors
        folded = Folded(weight, gain, kept)
        if normed:
            packed = norm_rotate_heads_backward(dq, dk, dv, *normed, cos, sin).flatten(2)
        else:
            packed = rotate_heads_backward(dq, dk, dv, cos, sin).flatten(2)
        rows = packed.flatten(0, 1)
        grads = folded.gradients(ctx, rows, x.flatten(0, 1))
        bias_grad = rows.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[3] else None
        return packed @ folded.again(x.dtype), *grads, bias_grad, None, None, None, None, None


def project_heads(
    x: Tensor, weight: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    eps: float | None = None, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rotated queries and keys, and values, (B, T, their heads, dim), of a norm x (B, T, d) with its gain (d,).

    The rows of `weight` are ordered queries, keys, values, head by head, and so are the entries of `bias`, if there is
    one; computed in the dtype of x. With an `eps` queries and keys are RMS-normed, head by head, as `norm_heads` does.
    """
    parts: tuple[Tensor, Tensor, Tensor] = _ProjectHeads.apply(x, weight, gain, bias, cos, sin, heads, kv_heads, eps)
    return parts


@operator("norm_heads")
def _norm_heads(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The RMS norm of each head of x (B, T, heads, dim), and its factors (B, T, heads)."""
    if use_triton(x):
        from meristem.model.triton_kernels import norm_rotate_into

        result = x.new_empty(x.shape)
        return result, norm_rotate_into(result, x, None, eps)
    precise = x.to(accum_dtype(x.dtype))
    factors = _head_factors(precise, eps)
    return (precise * factors[..., None]).to(x.dtype).contiguous(), factors.contiguous()


@_norm_heads.register_fake
def _(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=accum_dtype(x.dtype))


@operator("norm_heads_backward")
def _norm_heads_backward(grad: Tensor, normed: Tensor, factors: Tensor) -> Tensor:
    """The gradient of heads (B, T, heads, dim) from that of their norm."""
    if use_triton(grad):
        from meristem.model.triton_kernels import norm_rotate_backward_into

        result = torch.empty_like(normed)
        norm_rotate_backward_into(result, grad, normed, factors, 0, None)
        return result
    return _through_head_norm(grad, normed, factors).to(normed.dtype).contiguous()


@_norm_heads_backward.register_fake
def _(grad: Tensor, normed: Tensor, factors: Tensor) -> Tensor:
    return torch.empty_like(normed)


class _NormHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        normed, factors = _norm_heads(x, eps)
        ctx.save_for_backward(normed, factors)
        result: Tensor = normed
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _norm_heads_backward(grad, *ctx.saved_tensors), None


def norm_heads(x: Tensor, eps: float) -> Tensor:
    """x (B, T, heads, dim), each head divided by the root of its mean square + eps; computed in float32 at least.

    A head may be rotated before or after: that is the same.
    """
    normed: Tensor = _NormHeads.apply(x, eps)
    return normed


class _WriteHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        cast = weight.to(x.dtype)
        ctx.save_for_backward(x, cast)
        ctx.weight_dtype = weight.dtype
        return x @ cast.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, product_in(grad.T, x, ctx.weight_dtype) if ctx.needs_input_grad[1] else None


def write_heads(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., heads e) @ weight.T for the weight (d, heads e) by which heads write; computed in the dtype of x."""
    rows: Tensor = _WriteHeads.apply(x.flatten(0, -2), weight)
    return rows.unflatten(0, x.shape[:-1])


# --- residual sum and norm ------------------------------------------------------------------------------------------


@operator("add_norm")
def _add_norm(
    x: Tensor, branch: Tensor, second: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + branch + second (N, d), its RMS norm in `dtype`, and the reciprocal root mean square of each row."""
    if use_triton(x):
        from meristem.model.triton_kernels import add_norm_kernel

        return add_norm_kernel(x, branch, second, eps, dtype)
    total = x + branch if second is None else x + branch + second
    precise = total.to(accum_dtype(x.dtype))
    lengths = torch.linalg.vector_norm(precise, dim=-1)  # reads once; vecdot, here and below, autocast would round
    scale = torch.rsqrt(lengths.square() / precise.shape[-1] + eps)
    return total, (precise * scale[:, None]).to(dtype), scale


@_add_norm.register_fake
def _(
    x: Tensor, branch: Tensor, second: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[0], dtype=accum_dtype(x.dtype))


@operator("add_norm_backward")
def _add_norm_backward(
    normed: Tensor, scale: Tensor, total_grad: Tensor, normed_grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradient of the sum, and the same again in `dtype` (empty if that is its own)."""
    if use_triton(total_grad):
        from meristem.model.triton_kernels import add_norm_backward_kernel

        return add_norm_backward_kernel(normed, scale, total_grad, normed_grad, dtype)
    unit, flow = normed.to(scale.dtype), normed_grad.to(scale.dtype)
    along = (unit * flow).sum(-1, keepdim=True) / unit.shape[-1]
    grad = torch.addcmul(total_grad, torch.addcmul(flow, unit, along, value=-1), scale[:, None])
    grad = grad.to(total_grad.dtype)
    return grad, grad.new_empty(0) if dtype == grad.dtype else grad.to(dtype)


@_add_norm_backward.register_fake
def _(
    normed: Tensor, scale: Tensor, total_grad: Tensor, normed_grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    copy = total_grad.new_empty(0) if dtype == total_grad.dtype else torch.empty_like(total_grad, dtype=dtype)
    return torch.empty_like(total_grad), copy


class _AddNorm(torch.autograd.Function):
    """Sum and norm in one pass over the residual stream each way, where sum, norm and casts would take several.

    Backward needs nothing but the norm, which the product that reads it keeps anyway.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, second: Tensor | None, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total, normed, scale = _add_norm(x, branch, second, eps, dtype)
        ctx.save_for_backward(normed, scale)
        ctx.branch_dtype = branch.dtype
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor, normed_grad: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale = ctx.saved_tensors
        grad, copy = _add_norm_backward(normed, scale, total_grad, normed_grad, ctx.branch_dtype)
        branch_grad = copy if copy.numel() else grad
        return grad, branch_grad, branch_grad if ctx.needs_input_grad[2] else None, None, None


def add_norm(x: Tensor, branch: Tensor, eps: float, second: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The residual sum x + branch, and its RMS norm without a gain; all (..., d). `second` is one more branch.

    The sum keeps the dtype of x; the norm has the autocast dtype if autocast is on, else that of x. Two branches have
    the same dtype.
    """
    rows = None if second is None else second.flatten(0, -2)
    total, normed = _AddNorm.apply(x.flatten(0, -2), branch.flatten(0, -2), rows, eps, product_dtype(x))
    return total.view(x.shape), normed.view(x.shape)


# --- SwiGLU ----------------------------------------------------------------------------------------------------------


@operator("swiglu")
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, (N, f), of gate_up (N, 2 f)."""
    if use_triton(gate_up):
        from meristem.model.triton_kernels import swiglu_kernel

        return swiglu_kernel(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


@swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@operator("swiglu_backward")
def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up (N, 2 f) from that of y = silu(gate) * up, (N, f); and y again, which was not kept."""
    if use_triton(gate_up):
        from meristem.model.triton_kernels import swiglu_backward_kernel

        return swiglu_backward_kernel(gate_up, grad)
    accum = accum_dtype(gate_up.dtype)
    gate, up = gate_up.to(accum).chunk(2, dim=-1)
    active, dy = silu(gate), grad.to(accum)
    result = torch.empty_like(gate_up, dtype=accum)
    gate_grad, up_grad = result.chunk(2, dim=-1)
    torch.mul(dy, active, out=up_grad)
    torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=gate_grad)
    return result.to(gate_up.dtype), active.mul_(up).to(gate_up.dtype)


@swiglu_backward.register_fake
def _(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(grad)


class _SwigluFeedForward(torch.autograd.Function):
    """The feed-forward layer keeps gate and up alone; what lies between its products is formed again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gain: Tensor, down: Tensor) -> Tensor:
        cast, folded = Folded.of(weight, gain, x.dtype)
        gate_up, cast_down = x @ cast.T, down.to(x.dtype)
        ctx.save_for_backward(x, gate_up, *folded, cast_down)
        ctx.down_dtype = down.dtype
        return swiglu(gate_up) @ cast_down.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, *parts, down = ctx.saved_tensors
        folded = Folded(*parts)
        gate_up_grad, hidden = swiglu_backward(gate_up, grad @ down)
        grads = folded.gradients(ctx, gate_up_grad, x)
        down_grad = product_in(grad.T, hidden, ctx.down_dtype) if ctx.needs_input_grad[3] else None
        return gate_up_grad @ folded.again(x.dtype), *grads, down_grad


def swiglu_feed_forward(x: Tensor, weight: Tensor, gain: Tensor, down: Tensor) -> Tensor:
    """(silu(gate) * up) @ down.T, (..., d), where gate and up are x @ (weight * gain).T, of a norm x (..., d).

    weight is (2 f, d), gain (d,) and down (d, f); computed in the dtype of x.
    """
    rows: Tensor = _SwigluFeedForward.apply(x.flatten(0, -2), weight, gain, down)
    return rows.unflatten(0, x.shape[:-1])
