"""What a step of a single token is made of: five operations a layer, each with a plain form and one for CUDA.

The plain form defines the result; the CUDA forms are in `triton_decode.py`. None of them is known to the compiler: a
step is recorded, not compiled, and on a CPU the way through the compiler's registry would take longer than the work.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from meristem.model.fused import swiglu
from meristem.model.operators import accum_dtype, use_triton
from meristem.plan import NORM_EPS

FEW_ROWS = 4  # up to so many texts at once a product is a matter of reading its weight, which one kernel does best


def norm_linear(x: Tensor, branch: Tensor, weight: Tensor, eps: float = NORM_EPS) -> tuple[Tensor, Tensor]:
    """The residual sum x + branch (B, d), and its RMS norm through `weight` (n, d): (B, n)."""
    if not use_triton(x):
        total, normed = _add_norm(x, branch, eps, weight.dtype)
        return total, linear(normed, weight)
    from meristem.model.triton_kernels import add_norm_kernel

    if x.shape[0] <= FEW_ROWS:
        from meristem.decoding.triton_decode import norm_matvec

        return norm_matvec(x, branch, weight, eps)
    total, normed, _ = add_norm_kernel(x, branch, None, eps, weight.dtype)
    return total, linear(normed, weight)


def norm_swiglu(x: Tensor, branch: Tensor, gate_up: Tensor, eps: float = NORM_EPS) -> tuple[Tensor, Tensor]:
    """The residual sum x + branch (B, d), and silu(gate) * up, (B, f), of its norm through `gate_up` (2 f, d)."""
    if not use_triton(x):
        total, normed = _add_norm(x, branch, eps, gate_up.dtype)
        hidden: Tensor = swiglu(linear(normed, gate_up))
        return total, hidden
    from meristem.decoding.triton_decode import norm_swiglu_matvec
    from meristem.model.triton_kernels import add_norm_kernel, swiglu_kernel

    if x.shape[0] <= FEW_ROWS:
        return norm_swiglu_matvec(x, branch, gate_up, eps)
    total, normed, _ = add_norm_kernel(x, branch, None, eps, gate_up.dtype)
    return total, swiglu_kernel(linear(normed, gate_up))


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, k) through weight (n, k): (B, n)."""
    if not use_triton(x) or x.shape[0] > FEW_ROWS:
        return linear(x, weight)
    from meristem.decoding.triton_decode import matvec

    return matvec(x, weight)


def _add_norm(x: Tensor, branch: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    total = x + branch
    return total, rms_norm(total.to(accum_dtype(total.dtype)), total.shape[-1:], None, eps).to(dtype)


def gain_heads_(packed: Tensor, gains: Tensor, heads: int, eps: float) -> None:
    """RMS-norm the queries and keys of packed (B, (heads + 2 kv heads) e), and multiply them by their gains (2, e)."""
    own = packed.unflatten(-1, (-1, gains.shape[-1]))
    kv_heads = (own.shape[1] - heads) // 2
    for part, gain in zip((own[:, :heads], own[:, heads : heads + kv_heads]), gains, strict=True):
        kind = accum_dtype(part.dtype)
        part.copy_(rms_norm(part.to(kind), gain.shape, gain.to(kind), eps))


def attend_(
    packed: Tensor, cache: Tensor, rope: Tensor, position: Tensor, padding: Tensor | None, heads: int,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    """What the heads of the newest token read, (B, heads e); its keys and values are put into the cache.

    `packed` (B, (heads + 2 kv heads) e) holds its queries, keys and values, and is overwritten; `cache`
    (B, 2 kv heads, capacity, e) the keys, then the values, of the tokens before; `rope` (B, 2, e) the cosines and
    signed sines of its position in each row; `position` (1,) its place in the cache. A row sees what lies between its
    `padding` (B,) and itself; None is no padding. With an `eps` queries and keys are RMS-normed, head by head, and so
    are those that the cache holds.
    """
    if use_triton(packed):
        from meristem.decoding.triton_decode import attend_kernel_

        return attend_kernel_(packed, cache, rope, position, padding, heads, eps)
    batch, dim, at = packed.shape[0], rope.shape[-1], int(position)
    packed = packed.view(batch, -1, dim)
    turned = packed[:, : heads + cache.shape[1] // 2]
    precise = turned.to(rope.dtype)
    if eps is not None:
        precise = rms_norm(precise, (dim,), None, eps)
    turned.copy_(precise * rope[:, :1] + precise.roll(dim // 2, -1) * rope[:, 1:])
    cache[:, :, at] = packed[:, heads:]
    keys, values = cache[:, :, : at + 1].chunk(2, dim=1)
    mask = None if padding is None else torch.arange(at + 1, device=packed.device) >= padding[:, None, None, None]
    read = scaled_dot_product_attention(
        packed[:, :heads, None], keys, values, attn_mask=mask, enable_gqa=heads != keys.shape[1]
    )
    return read.reshape(batch, heads * dim)
