"""The operations of a step: plain forms against formulas in float64, CUDA forms against plain ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from meristem.decoding import decode_ops
from meristem.decoding.decode_ops import FEW_ROWS, attend_, norm_linear, norm_swiglu, product
from meristem.model.rotary import rotary_table
from meristem.plan import NORM_EPS
from model.helpers import complex_rotation, explicit_attention, needs_gpu, normed_heads, relative_error

SHAPES = [(4, 4, 32), (6, 2, 48), (2, 1, 96), (1, 1, 300), (3, 3, 2), (5, 5, 22)]  # heads, kv heads, dim


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def normed(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + NORM_EPS)


def test_products_after_a_norm() -> None:
    x, branch, weight = draw(3, 20), draw(3, 20, seed=1), draw(14, 20)
    total, found = norm_linear(x, branch, weight)
    assert torch.equal(total, x + branch)
    torch.testing.assert_close(found, normed(x + branch) @ weight.T)
    total, found = norm_swiglu(x, branch, weight)
    gate, up = (normed(x + branch) @ weight.T).split(7, dim=1)
    assert torch.equal(total, x + branch)
    torch.testing.assert_close(found, silu(gate) * up)
    torch.testing.assert_close(product(x, weight), x @ weight.T)


def test_the_stream_keeps_its_precision() -> None:
    """A float32 stream with a branch in half precision: the sum is not rounded, the product is in half precision."""
    x, branch = draw(2, 8).float(), draw(2, 8, seed=1).bfloat16()
    total, found = norm_linear(x, branch, draw(4, 8).bfloat16())
    assert torch.equal(total, x + branch.float())
    assert (total.dtype, found.dtype) == (torch.float32, torch.bfloat16)


def rope_rows(dim: int, places: Tensor) -> Tensor:
    return torch.cat(rotary_table(dim, 64), dim=1).double()[places]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_of_the_newest_token(heads: int, kv_heads: int, dim: int, padded: bool, qk_norm: bool) -> None:
    """It is the last row of attention over the whole text; what lies before or behind in the cache is not seen."""
    length, capacity, batch = 9, 13, 3
    padding = torch.tensor([0, 4, 8]) if padded else torch.zeros(batch, dtype=torch.long)
    packed = draw(batch, length, heads + 2 * kv_heads, dim)
    cache = torch.full((batch, 2 * kv_heads, capacity, dim), torch.nan, dtype=torch.float64)
    expected = []
    for row, first in enumerate(padding.tolist()):
        text = packed[row : row + 1, first:]
        compared = normed_heads(text[:, :, : heads + kv_heads], qk_norm)
        queries, keys = complex_rotation(compared[:, :, :heads]), complex_rotation(compared[:, :, heads:])
        values = text[:, :, heads + kv_heads :]
        read = explicit_attention(*(part.transpose(1, 2) for part in (queries, keys, values)))
        expected.append(read[0, :, -1].flatten())
        held = torch.cat((keys, values), dim=2)[0, :-1].transpose(0, 1)
        cache[row, :, first : length - 1] = held
        cache[row, :, :first] = 1e3  # padding: finite, and far from anything
    rope = rope_rows(dim, length - 1 - padding)
    position = torch.tensor([length - 1])
    newest, seen_padding = packed[:, -1].flatten(1).clone(), padding if padded else None
    found = attend_(newest, cache, rope, position, seen_padding, heads, NORM_EPS if qk_norm else None)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=1e-6)
    assert not cache[:, :, length - 1].isnan().any()
    assert cache[:, :, length:].isnan().all()


# --- CUDA forms -----------------------------------------------------------------------------------------------------


def both(monkeypatch: pytest.MonkeyPatch, operation: Any, *arguments: Any) -> list[tuple[Any, list[Any]]]:
    """Result and arguments afterwards of an operation on a GPU, plain and by Triton."""
    outcomes = []
    for triton in (False, True):
        with monkeypatch.context() as patch:
            if not triton:
                patch.setattr(decode_ops, "use_triton", lambda _: False)
            own = [each.cuda().clone() if isinstance(each, Tensor) else each for each in arguments]
            outcomes.append((operation(*own), own))
    return outcomes


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("batch", [1, FEW_ROWS, FEW_ROWS + 1, 33])
@pytest.mark.parametrize(("outputs", "width"), [(24, 40), (2304, 768), (50, 2736), (9000, 64)])
def test_triton_products_are_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: float, batch: int, outputs: int, width: int
) -> None:
    x, branch = draw(batch, width).float(), draw(batch, width, seed=1).to(dtype)
    weight = (draw(outputs, width) / math.sqrt(width)).to(dtype)
    for operation in (norm_linear, norm_swiglu):
        (plain, _), (found, _) = both(monkeypatch, operation, x, branch, weight)
        assert relative_error(found[0], plain[0]) <= 1e-6
        assert relative_error(found[1], plain[1]) <= limit
        assert found[1].dtype == plain[1].dtype == dtype
    (plain, _), (found, _) = both(monkeypatch, product, branch, weight)
    assert relative_error(found, plain) <= limit


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("capacity", "at"), [(40, 0), (40, 7), (40, 39), (2048, 5), (2048, 1500), (2048, 2047)])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_triton_attention_is_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: float, heads: int, kv_heads: int, dim: int,
    capacity: int, at: int, qk_norm: bool,
) -> None:  # fmt: skip
    batch = 3
    packed = draw(batch, (heads + 2 * kv_heads) * dim).to(dtype)
    cache = draw(batch, 2 * kv_heads, capacity, dim).to(dtype)
    cache[:, :, at:] = torch.nan  # never looked at
    rope, position = draw(batch, 2, dim).float(), torch.tensor([at])
    for padding in (None, torch.tensor([0, at // 2, at])):
        outcomes = both(monkeypatch, attend_, packed, cache, rope, position, padding, heads, qk_norm)
        (plain, plain_arguments), (found, arguments) = outcomes
        assert relative_error(found, plain) <= limit
        assert relative_error(arguments[1][:, :, : at + 1], plain_arguments[1][:, :, : at + 1]) <= limit
        assert arguments[1][:, :, at + 1 :].isnan().all()
