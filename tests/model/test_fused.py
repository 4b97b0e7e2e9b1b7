"""The fused operators against plain formulas, and their Triton forms against the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm, silu

from meristem.errors import InputError
from meristem.model.fused import (
    _add_norm,
    _add_norm_backward,
    _embed_backward,
    add_norm,
    cross_entropy_,
    embed,
    fold_gain,
    fold_gain_backward,
    norm_heads,
    project_heads,
    swiglu,
    swiglu_backward,
    swiglu_feed_forward,
)
from meristem.model.fused_loops import _through_norm, follow_heads, gated_linear, gather_heads, norm_project_heads
from meristem.model.loss import linear_cross_entropy
from meristem.model.rotary import rotary_table

from .helpers import complex_rotation, needs_gpu, normed_heads, relative_error, split_heads


class Wide(NamedTuple):
    """What a feed-forward layer takes: a norm (..., d), the weight of gate and up (2 f, d), gain (d,), down (d, f)."""

    x: Tensor
    weight: Tensor
    gain: Tensor
    down: Tensor

    def to(self, *dtypes: torch.dtype) -> Wide:
        return Wide(*(t.detach().to(dtype).requires_grad_() for t, dtype in zip(self, dtypes, strict=True)))


def plain_feed_forward(x: Tensor, weight: Tensor, gain: Tensor, down: Tensor) -> Tensor:
    gate, up = ((x * gain) @ weight.T).chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up) @ down.T


def feed_forward_inputs(shape: tuple[int, ...], hidden: int = 6) -> Wide:
    generator = torch.Generator().manual_seed(0)
    shapes = [shape, (2 * hidden, shape[-1]), (shape[-1],), (shape[-1], hidden)]
    x, weight, gain, down = (torch.randn(size, generator=generator, dtype=torch.float64) for size in shapes)
    return Wide(x, weight, 1 + gain / 4, down).to(*[torch.float64] * 4)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 14), (2, 1, 3, 2)])
def test_swiglu_is_the_plain_formula(shape: tuple[int, ...]) -> None:
    inputs = feed_forward_inputs(shape)
    found, expected = swiglu_feed_forward(*inputs), plain_feed_forward(*inputs)
    torch.testing.assert_close(found, expected)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients, references = (torch.autograd.grad(out, inputs, grad) for out in (found, expected))
    for mine, theirs in zip(gradients, references, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_swiglu_gradcheck() -> None:
    assert torch.autograd.gradcheck(swiglu_feed_forward, tuple(feed_forward_inputs((2, 3, 8))))


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("weights", [F32, BF16])
def test_swiglu_in_bf16(weights: torch.dtype) -> None:
    """As under autocast, or in a sharded model: products run in the dtype of x, gradients have that of the weights."""
    inputs = feed_forward_inputs((16, 32), 20)
    mixed = inputs.to(BF16, weights, weights, weights)
    found, expected = swiglu_feed_forward(*mixed), plain_feed_forward(*inputs)
    assert found.dtype == BF16
    assert relative_error(found, expected.detach()) <= 2e-2
    mine = torch.autograd.grad(found.float().square().sum(), mixed)
    theirs = torch.autograd.grad(expected.square().sum(), inputs)
    assert [g.dtype for g in mine] == [BF16, weights, weights, weights]
    for one, other in zip(mine, theirs, strict=True):
        assert relative_error(one, other) <= 3e-2


def kept_for_backward(function: Callable[..., Any], *inputs: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    kept: list[tuple[tuple[int, ...], torch.dtype]] = []

    def note(x: Tensor) -> Tensor:
        kept.append((tuple(x.shape), x.dtype))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        function(*inputs)
    return kept


def test_a_feed_forward_keeps_no_hidden_layer_for_backward() -> None:
    """The product of gate and up, (N, f), is formed again instead of being kept."""
    inputs = feed_forward_inputs((64, 8), 20).to(BF16, F32, F32, F32)
    kept = kept_for_backward(swiglu_feed_forward, *inputs)
    own = [((64, 8), BF16), ((64, 40), BF16), ((40, 8), BF16), ((8, 20), BF16)]
    assert sorted(map(str, kept)) == sorted(map(str, [*own, ((40, 8), F32), ((8,), F32)]))


def test_a_sharded_model_keeps_no_copy_of_its_weights() -> None:
    inputs = feed_forward_inputs((64, 8), 20).to(*[BF16] * 4)
    weights = [shape for shape, _ in kept_for_backward(swiglu_feed_forward, *inputs) if shape[0] != 64]
    assert sorted(weights) == [(8,), (8, 20), (40, 8)]


def cross_entropy_inputs(dtype: torch.dtype, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(columns, (rows,), generator=generator)
    targets[::3] = -100
    return logits, targets, torch.tensor(0.37, dtype=torch.float64)


def plain_cross_entropy(logits: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row, and its gradient times scale, by automatic differentiation in float64."""
    leaf = logits.detach().double().requires_grad_()
    losses = cross_entropy(leaf, targets, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum() * scale, leaf)[0]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_cross_entropy_leaves_its_gradient(dtype: torch.dtype, limit: float) -> None:
    logits, targets, scale = cross_entropy_inputs(dtype, 13, 29)
    expected = plain_cross_entropy(logits, targets, scale)
    losses = cross_entropy_(logits, targets, scale.to(torch.float64 if dtype == torch.float64 else torch.float32))
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not losses[::3].any()
    assert not logits[::3].any()
    assert relative_error(losses, expected[0]) <= limit
    assert relative_error(logits, expected[1]) <= limit


@pytest.mark.parametrize("target", [-1, -99, -101, 29, 10**12])
def test_targets_outside_the_vocabulary_are_refused(target: int) -> None:
    logits, targets, scale = cross_entropy_inputs(torch.float32, 13, 29)
    targets[4] = target
    before = logits.clone()
    with pytest.raises(InputError, match=rf"targets = {target}: must be from 0 to 28, or -100"):
        cross_entropy_(logits, targets, scale.float())
    assert torch.equal(logits, before)


OPERATORS = [
    "cross_entropy_", "embed_backward", "fold_gain", "fold_gain_backward", "swiglu", "swiglu_backward", "rotate_heads_",
    "rotate_heads_backward", "norm_rotate_heads_", "norm_rotate_heads_backward", "norm_heads", "norm_heads_backward",
    "add_norm", "add_norm_backward", "add_unit", "unrotate", "through_norm", "follow", "follow_backward",
]  # fmt: skip


def swapped(x: Tensor) -> Tensor:
    """x (B, T, heads, dim) as attention's gradients lie in memory, (B, heads, T, dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_registered_correctly(name: str) -> None:
    """What the compiler assumes of an operator (shapes, dtypes, mutation) is what it does."""
    x = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    logits, targets, scale = cross_entropy_inputs(torch.float32, 5, 7)
    arguments: dict[str, tuple[Any, ...]] = {
        "cross_entropy_": (logits, targets, scale.float()),
        "embed_backward": (logits.bfloat16(), targets.clamp(min=0), 9, torch.float32),
        "fold_gain": (logits, logits[0].clone(), torch.bfloat16),
        "fold_gain_backward": (logits.bfloat16(), logits, logits[0].clone()),
        "swiglu": (x.flatten(0, 2),),
        "through_norm": (logits.bfloat16(), logits, logits, logits[:, 0].clone(), logits[:, 1].clone()),
        "swiglu_backward": (x.flatten(0, 2), x.flatten(0, 2)[:, :2].contiguous()),
        "rotate_heads_": (x, *rotary_table(4, 3), 4),
        "rotate_heads_backward": (x[:, :, :2], x[:, :, 2:4], x[:, :, 4:], *rotary_table(4, 3)),
        "norm_rotate_heads_": (x, *rotary_table(4, 3), 4, 1e-5),
        "norm_heads": (swapped(x[:, :, :2]), 1e-5),
        "norm_heads_backward": (swapped(x[:, :, :2]), x[:, :, 2:4].contiguous(), x[:, :, 2:4, 0].contiguous()),
        "add_norm": (logits, logits.bfloat16(), logits.bfloat16(), 1e-5, torch.bfloat16),
        "add_norm_backward": (logits, scale.float().expand(5).clone(), logits, logits, torch.bfloat16),
    }
    row = torch.rand(6, generator=torch.Generator().manual_seed(1))
    grads = (x[:, :, :2], x[:, :, 2:4], x[:, :, 4:])
    normed = (x.clone(), x[:, :, :4, 0].contiguous())
    arguments["norm_rotate_heads_backward"] = (*map(swapped, grads), *normed, *rotary_table(4, 3))
    four = torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(4))
    own = (four.flatten(0, 1), row.clone())
    arguments["unrotate"] = (*grads, four.flatten(0, 1).contiguous(), row, *rotary_table(4, 3), 8, *own)
    read, scales = swapped(x[:, :, :2]), row.view(2, 3)
    arguments["follow"] = (four, four.clone(), read, scales, *rotary_table(4, 3), 1e-5, 8)
    followed = (x, scales.clone(), four, four.clone(), read, scales)
    arguments["follow_backward"] = (*grads, *followed, *rotary_table(4, 3), 8)
    arguments["add_unit"] = (logits, logits.bfloat16(), 1e-5, torch.bfloat16)
    operator = getattr(torch.ops.meristem, name).default
    torch.library.opcheck(operator, arguments[name])


def add_norm_reference(inputs: list[Tensor], grads: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The sum and its norm, in float64 by PyTorch's own operators, and the gradients of all inputs."""
    leaves = [t.detach().cpu().double().requires_grad_() for t in inputs]
    total = torch.stack(leaves).sum(0)
    outputs = [total, rms_norm(total, total.shape[-1:], None, 1e-5)]
    gradients = torch.autograd.grad(outputs, leaves, [g.detach().cpu().double() for g in grads])
    return [t.detach() for t in outputs], list(gradients)


def check_add_norm(
    width: int, dtype: torch.dtype, branch_dtype: torch.dtype, device: str, limit: float, branches: int = 1
) -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [dtype, *[branch_dtype] * branches]
    inputs = [torch.randn(2, 9, width, generator=generator).to(device, kind).requires_grad_() for kind in dtypes]
    mixed = branch_dtype != dtype
    with torch.autocast(device, torch.bfloat16, enabled=mixed):
        found = add_norm(inputs[0], inputs[1], 1e-5, *inputs[2:])
    assert found[0].dtype == dtype  # a float32 stream is not rounded
    assert found[1].dtype == branch_dtype
    grads = tuple(torch.randn(t.shape, generator=generator).to(device, t.dtype) for t in found)
    outputs, gradients = add_norm_reference(inputs, grads)
    for mine, theirs in zip((*found, *torch.autograd.grad(found, inputs, grads)), outputs + gradients, strict=True):
        # Backward reads the norm as it was rounded; the sum is not rounded.
        exact = not mixed or mine is found[0]
        assert relative_error(mine.detach().cpu(), theirs) <= (limit if exact else max(limit, 1e-2))


@pytest.mark.parametrize("width", [1, 8, 96])
@pytest.mark.parametrize("branches", [1, 2])
def test_add_norm_against_torch(width: int, branches: int) -> None:
    check_add_norm(width, torch.float64, torch.float64, "cpu", 1e-12, branches)
    check_add_norm(width, torch.float32, torch.float32, "cpu", 1e-5, branches)
    check_add_norm(width, torch.float32, torch.bfloat16, "cpu", 1e-5, branches)


def test_autocast_does_not_round_the_factor_of_a_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    x, branch, grad = (torch.randn(64, 96, generator=generator) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        _, normed, factors = _add_norm(x, branch, None, 1e-5, torch.float32)
        back, _ = _add_norm_backward(normed, factors, x, grad, torch.float32)
    (_, unit), (expected, _) = add_norm_reference([x, branch], (x, grad))
    assert relative_error(normed, unit) <= 1e-6
    assert relative_error(back, expected) <= 1e-6


def test_second_derivatives_are_refused() -> None:
    """Backward takes for constants what it has kept: they would be wrong, and nobody would know."""
    x, weight, targets = torch.randn(3, 8), torch.randn(5, 8), torch.tensor([0, 4, 2])
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: add_norm(x, x, 1e-5)[1],
        lambda x: norm_heads(x.view(1, 3, 2, 4), 1e-5),
        lambda x: linear_cross_entropy(x, weight, targets),
        lambda x: swiglu_feed_forward(x, torch.randn(6, 8), torch.ones(8), torch.randn(8, 3)),
    ]
    for function in functions:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


def heads_and_grad(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    x[0, 0, 0] = 0  # a head of zeros stays one
    x[0, 0, 1] *= 1e-3  # where eps counts
    return x.requires_grad_(), grad


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("dim", [2, 6, 64])
def test_norm_heads_is_the_plain_formula(dim: int, dtype: torch.dtype, limit: float) -> None:
    x, grad = heads_and_grad(2, 5, 3, dim)
    rounded, rounded_grad = x.detach().to(dtype).requires_grad_(), swapped(grad.to(dtype))
    exact = rounded.detach().double().requires_grad_()
    found, expected = norm_heads(rounded, 1e-5), normed_heads(exact)
    assert found.dtype == dtype
    assert not found[0, 0, 0].any()
    assert relative_error(found, expected) <= limit
    mine = torch.autograd.grad(found, rounded, rounded_grad)[0]
    theirs = torch.autograd.grad(expected, exact, rounded_grad.double())[0]
    assert mine.dtype == dtype
    assert relative_error(mine, theirs) <= limit


def test_gradcheck_of_normed_heads() -> None:
    x, _ = heads_and_grad(2, 3, 4, 6)
    assert torch.autograd.gradcheck(lambda heads: norm_heads(heads, 1e-5), (x,))
    cos, sin = (table.double() for table in rotary_table(6, 3))
    assert torch.autograd.gradcheck(lambda packed: split_heads(packed, cos, sin, 2, 1, 1e-5), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_heads_comes_before_their_rotation_or_after_it(dtype: torch.dtype) -> None:
    x = heads_and_grad(2, 7, 6, 8)[0].detach().to(dtype)
    pair = rotary_table(8, 7)
    parts, bare = split_heads(x, *pair, 4, 1, 1e-5), split_heads(x, *pair, 4, 1)
    for found, other in zip(parts[:2], bare[:2], strict=True):
        assert relative_error(found, norm_heads(other, 1e-5)) <= (1e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(parts[2], bare[2])


def test_the_norm_of_heads_keeps_one_number_a_head_for_backward() -> None:
    """Besides what is kept anyway: the normed, rotated heads are those that attention keeps."""
    x, weight, gain = torch.randn(2, 5, 12, dtype=BF16), torch.randn(24, 12), torch.ones(12)
    leaves = [t.requires_grad_() for t in (x, weight, gain)]
    pair = rotary_table(4, 5)
    bare, kept = (kept_for_backward(project_heads, *leaves, *pair, 4, 1, eps) for eps in (None, 1e-5))
    for each in bare:
        kept.remove(each)
    assert kept == [((2, 5, 6, 4), BF16), ((2, 5, 5), F32)]


# --- Triton -----------------------------------------------------------------------------------------------

GPU_DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), GPU_DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 100), (33, 4096), (10, 50304), (5, 50257)])
def test_triton_cross_entropy(dtype: torch.dtype, limit: float, rows: int, columns: int) -> None:
    logits, targets, scale = cross_entropy_inputs(dtype, rows, columns)
    if rows == 1:
        targets[:] = 0
    expected = plain_cross_entropy(logits, targets, scale)
    device_logits = logits.cuda()
    losses = cross_entropy_(device_logits, targets.cuda(), scale.float().cuda())
    torch.testing.assert_close(losses.cpu().double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        device_logits.cpu().double(), expected[1], rtol=1e-2 if limit > 1e-4 else 1e-4, atol=1e-6
    )
    assert not losses.cpu()[targets == -100].any()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), GPU_DTYPES)
@pytest.mark.parametrize("target", [-1, -99, -101, 100, 10**12])
def test_triton_targets_outside_the_vocabulary_are_nan(dtype: torch.dtype, limit: float, target: int) -> None:
    """Nothing outside the row is read, and the other rows are as ever."""
    logits, targets, scale = cross_entropy_inputs(dtype, 7, 100)
    expected = plain_cross_entropy(logits, targets, scale)
    targets[4] = target
    device_logits = logits.cuda()
    losses = cross_entropy_(device_logits, targets.cuda(), scale.float().cuda()).cpu()
    assert losses.isnan().tolist() == [row == 4 for row in range(7)]
    assert bool(device_logits[4].isnan().all())
    others = torch.arange(7) != 4
    torch.testing.assert_close(losses[others].double(), expected[0][others], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        device_logits.cpu().double()[others], expected[1][others], rtol=1e-2 if limit > 1e-4 else 1e-4, atol=1e-6
    )


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 96, 768, 1024, 1536, 3000])
@pytest.mark.parametrize("branches", [1, 2])
def test_triton_add_norm(width: int, branches: int) -> None:
    check_add_norm(width, torch.float32, torch.float32, "cuda", 1e-5, branches)
    check_add_norm(width, torch.float32, torch.bfloat16, "cuda", 1e-5, branches)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_embed_is_a_lookup(dtype: torch.dtype) -> None:
    weight = torch.randn(11, 6, generator=torch.Generator().manual_seed(0), dtype=dtype, requires_grad=True)
    tokens = torch.randint(11, (3, 40), generator=torch.Generator().manual_seed(1))
    grad = torch.randn(3, 40, 6, generator=torch.Generator().manual_seed(2), dtype=dtype)
    found, expected = embed(tokens, weight), weight[tokens]
    assert torch.equal(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, weight, grad)[0] for out in (found, expected)))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 24, 768, 3000])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_triton_embed_backward(dtype: torch.dtype, width: int, index: torch.dtype) -> None:
    """With tokens that come often, never, and in more rows than there are."""
    generator = torch.Generator().manual_seed(0)
    tokens = (torch.randint(29, (500,), generator=generator).square() % 29).to(index)
    grad = torch.randn(500, width, generator=generator).to(dtype)
    expected = torch.zeros(29, width, dtype=torch.float64).index_add_(0, tokens, grad.double())
    found = _embed_backward(grad.cuda(), tokens.cuda(), 29, torch.float32)
    assert relative_error(found.cpu(), expected) <= 1e-5


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), GPU_DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 24), (130, 1376), (64, 768), (2049, 1024), (3, 3000)])
def test_triton_fold_gain(dtype: torch.dtype, limit: float, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gain, grad = (torch.randn(shape, generator=generator) for shape in ((rows, width), (width,), (rows, width)))
    assert relative_error(fold_gain(weight.cuda(), gain.cuda(), dtype).cpu(), weight.double() * gain) <= limit
    narrow = grad.to(dtype)
    found = fold_gain_backward(narrow.cuda(), weight.cuda(), gain.cuda())
    assert [part.dtype for part in found] == [torch.float32] * 2
    for mine, theirs in zip(found, (narrow.double() * gain, (narrow.double() * weight).sum(0)), strict=True):
        assert relative_error(mine.cpu(), theirs) <= 1e-5


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 24, 768, 3000])
def test_triton_through_norm(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(37, width)] * 3 + [(37,)] * 2
    grad, product, unit, scale, inner = (torch.randn(shape, generator=generator) for shape in shapes)
    expected = grad.double() + product.double() * scale[:, None] - unit.double() * inner[:, None]
    for dtype, limit in GPU_DTYPES:
        inputs = *(t.to(dtype).cuda() for t in (grad, product, unit)), scale.cuda(), inner.cuda()
        assert relative_error(_through_norm(*inputs).cpu(), expected) <= 2 * limit


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), GPU_DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 24), (130, 1376), (64, 2048), (3, 3000)])
def test_triton_swiglu_backward(dtype: torch.dtype, limit: float, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = (3 * torch.randn(rows, 2 * width, generator=generator)).to(dtype)
    grad = torch.randn(rows, width, generator=generator).to(dtype)
    leaf = gate_up.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    hidden = silu(gate) * up
    expected = torch.autograd.grad(hidden, leaf, grad.double())[0]
    found, again = swiglu_backward(gate_up.cuda(), grad.cuda())
    assert found.dtype == again.dtype == dtype
    assert relative_error(found.cpu(), expected) <= limit
    assert relative_error(again.cpu(), hidden.detach()) <= limit
    assert relative_error(swiglu(gate_up.cuda()).cpu(), hidden.detach()) <= limit


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), GPU_DTYPES)
@pytest.mark.parametrize("dim", [2, 6, 32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1), (1, 1), (12, 12)])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_triton_split_heads(
    dtype: torch.dtype, limit: float, dim: int, heads: int, kv_heads: int, ragged: bool, normed: bool
) -> None:
    """Forward and backward, with positions shared by the batch or, as for ragged prompts, each row's own."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 70, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    cos, sin = rotary_table(dim, 80)
    starts = (0, 10) if ragged else (0, 0)
    pair = [torch.stack([t[s : s + 70] for s in starts]) if ragged else t[:70] for t in (cos, sin)]
    both = heads + kv_heads
    leaf = packed.double().requires_grad_()
    compared = normed_heads(leaf[:, :, :both], normed)
    rotated = torch.cat([complex_rotation(compared[i : i + 1], s) for i, s in enumerate(starts)])
    expected = (rotated[:, :, :heads], rotated[:, :, heads:], leaf[:, :, both:])
    grads = [torch.randn(p.shape, generator=generator).to(dtype) for p in expected]
    reference = torch.autograd.grad(expected, leaf, [g.double() for g in grads])[0]
    device_leaf = packed.cuda().requires_grad_()
    found = split_heads(device_leaf, pair[0].cuda(), pair[1].cuda(), heads, kv_heads, 1e-5 if normed else None)
    # Attention hands its gradients back in its own layout, (B, heads, T, dim).
    for layout in ([g.cuda() for g in grads], [swapped(g.cuda()) for g in grads]):
        gradient = torch.autograd.grad(found, device_leaf, layout, retain_graph=True)[0]
        assert relative_error(gradient.cpu(), reference) <= limit
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert relative_error(mine.detach().cpu(), theirs.detach()) <= limit
    assert torch.equal(found[2].detach().cpu(), packed[:, :, both:])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), GPU_DTYPES)
@pytest.mark.parametrize("dim", [2, 6, 32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 2, 5, 12])
def test_triton_norm_heads(dtype: torch.dtype, limit: float, dim: int, heads: int) -> None:
    """Heads as a loop has them: some of those that a token has side by side."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(3, 67, 3 * heads, dim, generator=generator).to(dtype)
    grad = torch.randn(3, 67, heads, dim, generator=generator).to(dtype)
    leaf = packed.double().requires_grad_()
    expected = normed_heads(leaf[:, :, heads : 2 * heads])
    reference = torch.autograd.grad(expected, leaf, grad.double())[0]
    device_leaf = packed.cuda().requires_grad_()
    found = norm_heads(device_leaf[:, :, heads : 2 * heads], 1e-5)
    assert found.dtype == dtype
    assert relative_error(found.cpu(), expected) <= limit
    for layout in (grad.cuda(), swapped(grad.cuda())):
        gradient = torch.autograd.grad(found, device_leaf, layout, retain_graph=True)[0]
        assert relative_error(gradient.cpu(), reference) <= limit


# --- heads that read again --------------------------------------------------------------------------------


class Narrow(NamedTuple):
    """A stream in two parts, a norm's gain, the projections of a few heads, and what these have read."""

    x: Tensor
    branch: Tensor
    gain: Tensor
    qkv: Tensor
    out: Tensor
    read: Tensor

    def to(self, *target: Any) -> Narrow:
        return Narrow(*(t.detach().to(*target).requires_grad_() for t in self))


def narrow_inputs(heads: int, dim: int, width: int = 40) -> Narrow:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (3, 7, width),
        (3, 7, width),
        (width,),
        (3 * heads * dim, width),
        (width, heads * dim),
        (3, 7, heads, dim),
    ]
    x, branch, gain, qkv, out, read = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return Narrow(x, branch, 1 + gain / 4, qkv / width**0.5, out / (heads * dim) ** 0.5, read).to(torch.float64)


def with_the_stream(inputs: Narrow, cos: Tensor, sin: Tensor, heads: int, *, follow: bool) -> tuple[Tensor, ...]:
    """The sum, and queries, keys, values of its norm; after what was read is added to it, again."""
    total, normed = add_norm(inputs.x, inputs.branch, 1e-5)
    found = total, *project_heads(normed, inputs.qkv, inputs.gain, cos, sin, heads, heads)
    if not follow:
        return found
    normed = add_norm(total, linear(inputs.read.flatten(2), inputs.out), 1e-5)[1]
    return *found, *project_heads(normed, inputs.qkv, inputs.gain, cos, sin, heads, heads)


def without_it(inputs: Narrow, cos: Tensor, sin: Tensor, heads: int, *, follow: bool) -> tuple[Tensor, ...]:
    """The same by the fused operators."""
    weight = inputs.qkv * inputs.gain
    if follow:
        weight = torch.cat((weight, inputs.out.T))
    x, branch, *parts = norm_project_heads(inputs.x, inputs.branch, weight, cos, sin, heads=heads, eps=1e-5)
    if not follow:
        return x + branch, *parts
    *parts, packed, scale = parts
    step, width = inputs.out.T @ weight.T, x.shape[-1]
    return x + branch, *parts, *follow_heads(packed, scale, inputs.read, step, cos, sin, eps=1e-5, width=width)


def arriving(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outputs]


def check_narrow(
    found: tuple[Tensor, ...], inputs: Narrow, expected: tuple[Tensor, ...], exact: Narrow, limit: float
) -> None:
    """Results, and the gradients of all inputs that are used."""
    grads = arriving(expected)
    mine = torch.autograd.grad(found, inputs, [g.to(o) for g, o in zip(grads, found, strict=True)], allow_unused=True)
    theirs = torch.autograd.grad(expected, exact, grads, allow_unused=True)
    for name, one, other in zip(Narrow._fields, mine, theirs, strict=True):
        assert (one is None) == (other is None), name
    pairs = [*zip(found, expected, strict=True), *zip(mine, theirs, strict=True)]
    for one, other in pairs:
        if one is not None and other is not None:
            assert relative_error(one.cpu(), other) <= limit


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (2, 16), (3, 6)])
@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("follow", [False, True])
def test_heads_that_read_again_need_no_stream(heads: int, dim: int, own_positions: bool, follow: bool) -> None:
    inputs = narrow_inputs(heads, dim)
    positions = torch.arange(21).view(3, 7) % 11 if own_positions else slice(0, 7)
    cos, sin = (table[positions].double() for table in rotary_table(dim, 11))
    found, expected = (form(inputs, cos, sin, heads, follow=follow) for form in (without_it, with_the_stream))
    assert torch.equal(found[0], expected[0])
    check_narrow(found, inputs, expected, inputs, 1e-12)


@pytest.mark.parametrize("follow", [False, True])
def test_heads_that_read_again_under_autocast(follow: bool) -> None:
    """The sum stays in float32 and exact; the rest has bf16's precision, gradients included."""
    exact = narrow_inputs(2, 16)
    inputs = exact.to(torch.float32)
    cos, sin = rotary_table(16, 7)
    with torch.autocast("cpu", torch.bfloat16):
        found = without_it(inputs, cos, sin, 2, follow=follow)
    assert [o.dtype for o in found] == [torch.float32, *[torch.bfloat16] * (len(found) - 1)]
    assert torch.equal(found[0], inputs.x + inputs.branch)
    check_narrow(found, inputs, with_the_stream(exact, cos.double(), sin.double(), 2, follow=follow), exact, 1e-2)


def test_gradcheck_of_heads_that_read_again() -> None:
    inputs, (cos, sin) = narrow_inputs(2, 4, width=5), (table.double() for table in rotary_table(4, 7))
    check = torch.autograd.gradcheck
    assert check(lambda *leaves: without_it(Narrow(*leaves), cos, sin, 2, follow=True), tuple(inputs))


@pytest.mark.parametrize("dim", [0, 1])
def test_heads_gathered_once_twice_or_not_at_all(dim: int) -> None:
    weight = torch.randn(5, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    heads, takers = torch.tensor([3, 1, 3]), torch.tensor([[-1, -1], [1, -1], [-1, -1], [0, 2], [-1, -1]])
    found, expected = gather_heads(weight, dim, heads, takers), weight.index_select(dim, heads)
    assert torch.equal(found, expected)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grad.select(dim, 1)[0, 0] = torch.inf  # reaches the head it belongs to and no other
    mine, theirs = (torch.autograd.grad(o, weight, grad)[0] for o in (found, expected))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gated_product(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 5, 3, 4), (3,), (7, 12)]
    exact = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    x, gates, weight = (t.detach().to(dtype if t is exact[0] else torch.float32).requires_grad_() for t in exact)
    if dtype == torch.float64:
        gates, weight = exact[1], exact[2]
    found, grad = gated_linear(x, gates, weight), torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    expected = linear((exact[0] * exact[1][:, None]).flatten(2), exact[2])
    assert found.dtype == dtype
    limit = 1e-12 if dtype == torch.float64 else 1e-2
    assert relative_error(found, expected) <= limit
    mine = torch.autograd.grad(found, (x, gates, weight), grad.to(dtype))
    for one, other in zip(mine, torch.autograd.grad(expected, exact, grad), strict=True):
        assert relative_error(one, other) <= limit
    plain = gated_linear(x, None, weight.to(dtype))
    assert torch.equal(plain, linear(x.flatten(2), weight.to(dtype)))


def check_narrow_on_the_gpu(heads: int, dim: int, autocast: bool, follow: bool) -> None:
    exact = narrow_inputs(heads, dim, width=200)
    inputs = exact.to("cuda", torch.float32)
    cos, sin = rotary_table(dim, 7)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = without_it(inputs, cos.cuda(), sin.cuda(), heads, follow=follow)
    expected = with_the_stream(exact, cos.double(), sin.double(), heads, follow=follow)
    check_narrow(found, inputs, expected, exact, 1e-2 if autocast else 1e-5)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (2, 64), (3, 24), (12, 64), (2, 256)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("follow", [False, True])
def test_triton_heads_that_read_again(heads: int, dim: int, autocast: bool, follow: bool) -> None:
    check_narrow_on_the_gpu(heads, dim, autocast, follow)
