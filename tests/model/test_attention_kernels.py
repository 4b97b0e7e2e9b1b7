"""Every attention kernel in use against explicit softmax (prism.md 6, oracle 13), and their choice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import meristem.model.attention as attention_module
from meristem.errors import InputError
from meristem.model import Decoder, backends
from meristem.model.attention import Attention
from meristem.model.backends import BACKENDS, choose_backends
from meristem.model.rotary import rotary_table
from meristem.plan import LayerPlan

from .helpers import explicit_attention, needs_gpu, random_tokens, relative_error, small_plan

DIMS = (32, 64, 96, 128, 192, 256)
CPU = torch.device("cpu")


def output_and_gradients(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], grad: Tensor
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def random_inputs(dim: int, kv_heads: int, length: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(dim)
    shapes = [(2, heads, length, dim) for heads in (4, kv_heads, kv_heads, 4)]
    *inputs, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return inputs, grad


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_oracle_13_kernels_equal_explicit_softmax(dim: int, backend: str, kv_heads: int) -> None:
    inputs, grad = random_inputs(dim, kv_heads, 65)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != 4)

    found = output_and_gradients(fused, inputs, grad)
    expected = output_and_gradients(explicit_attention, inputs, grad)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_oracle_13_layers_equal_explicit_softmax(dim: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer as a whole: its own scale, its causal flag and its kernel, by output and all gradients."""
    generator = torch.Generator().manual_seed(0)
    layer = LayerPlan(2, dim, 1)
    attention = Attention(48, layer)
    attention.backend = backend
    pair = rotary_table(dim, 33)
    inputs = [torch.randn(2, 33, 48, generator=generator), attention.qkv.weight, attention.out.weight]
    grad = torch.randn(2, 33, 48, generator=generator)

    def run(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        weights = {"qkv.weight": qkv, "out.weight": out}
        result: Tensor = torch.func.functional_call(attention, weights, (x, torch.ones(48), pair))
        return result

    found = output_and_gradients(run, inputs, grad)
    monkeypatch.setattr(
        attention_module, "scaled_dot_product_attention", lambda q, k, v, **_: explicit_attention(q, k, v)
    )
    expected = output_and_gradients(run, inputs, grad)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) <= 1e-5


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_oracle_13_kernels_in_bf16_on_the_gpu(dim: int, backend: str, kv_heads: int) -> None:
    device = torch.device("cuda")
    layer = LayerPlan(4, dim, kv_heads)
    try:
        choose_backends([layer], device, torch.bfloat16, backend)
    except InputError:
        pytest.skip(f"{backend} refuses head dim {dim} with {4 // kv_heads} queries per key here")
    inputs, grad = random_inputs(dim, kv_heads, 513)
    inputs = [x.to(device, torch.bfloat16) for x in inputs]
    grad = grad.to(device, torch.bfloat16)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads != 4)

    found = output_and_gradients(fused, inputs, grad)
    expected = output_and_gradients(explicit_attention, [x.float() for x in inputs], grad)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) <= 2e-2


# --- choice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_auto_takes_flash_on_a_cpu(kv_heads: int) -> None:
    layers = [LayerPlan(4, dim, kv_heads) for dim in (*DIMS, 2, 6, 50, 384)]
    assert choose_backends(layers, CPU, torch.float32) == ["flash"] * len(layers)


def test_a_named_kernel_is_taken_for_all_layers() -> None:
    layers = [LayerPlan(4, dim, 4) for dim in DIMS]
    assert choose_backends(layers, CPU, torch.float32, "math") == ["math"] * len(layers)


def test_an_unknown_kernel_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"attention = 'fast': must be auto or one of cudnn, flash, eff.*, math"):
        choose_backends([LayerPlan(4, 64, 4)], CPU, torch.float32, "fast")


def test_a_kernel_that_cannot_run_is_refused() -> None:
    with pytest.raises(InputError, match=r"attention = 'cudnn': cannot run head dim 64 in torch\.float32 on cpu"):
        choose_backends([LayerPlan(4, 64, 4)], CPU, torch.float32, "cudnn")


def test_the_model_runs_with_the_chosen_kernels() -> None:
    plan = small_plan(kv_group=2)
    model, tokens = Decoder(plan), random_tokens(plan)
    assert {block.attention.backend for block in model.blocks} == {None}  # type: ignore[union-attr]
    free = model(tokens).logits
    for wanted in ("flash", "math"):
        names = model.use_attention(CPU, torch.float32, wanted)
        assert names == [wanted] * len(plan.layers) == [b.attention.backend for b in model.blocks]  # type: ignore[union-attr]
        torch.testing.assert_close(model(tokens).logits, free, rtol=0, atol=1e-5)


@needs_gpu
@pytest.mark.gpu
def test_auto_runs_every_head_dim_on_the_gpu_without_the_math_kernel() -> None:
    layers = [LayerPlan(4, dim, kv_heads) for dim in DIMS for kv_heads in (4, 2)]
    assert "math" not in choose_backends(layers, torch.device("cuda"), torch.bfloat16)


def test_trying_a_kernel_draws_no_random_numbers() -> None:
    """Otherwise a run's own would depend on whether the kernels had been tried before."""
    backends._runs.cache_clear()
    before = torch.get_rng_state()
    choose_backends(small_plan().layers, torch.device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_kernel_is_found_where_there_are_no_gradients() -> None:
    """As for a block that is born during a run."""
    backends._runs.cache_clear()
    with torch.no_grad():
        assert choose_backends([LayerPlan(2, 24, 2)], CPU, torch.float32) == ["flash"]
