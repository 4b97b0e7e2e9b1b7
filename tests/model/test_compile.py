"""Compiled models equal eager ones, and compile as often as there are shapes (prism.md 6, oracle 17)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from meristem.model import Decoder
from meristem.model.operators import announce_operators
from meristem.plan import Gates, Rotary

from .helpers import lively, looped, needs_gpu, random_tokens, relative_error, small_plan


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    announce_operators()  # a whole model in one graph takes forever without it
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counter(backend: str) -> Any:
    return CompileCounterWithBackend(backend)


def loss_and_gradients(model: Decoder, forward: Any, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss = forward(tokens, tokens.roll(-1, dims=1)).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return {"loss": loss.detach(), **gradients}


BIASED = {"qkv_bias": True, "tied": False, "norm_eps": 1e-6}
GAINED = {"qk_norm": True, "qk_gain": True, "rotary": Rotary(500_000.0, 8.0, (1.0, 4.0), 16)}
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler])])
@pytest.mark.parametrize(
    ("grown", "variant"),
    [(False, {}), (True, {}), (True, {"qk_norm": True}), (True, BIASED), (True, GAINED)],
    ids=["plain", "with loops", "normed", "biased", "gained"],
)
def test_oracle_17_compiled_equals_eager(backend: str, grown: bool, variant: dict[str, Any]) -> None:
    """One graph without breaks, loss and gradients included; a second batch compiles nothing.

    What is different in every block takes no more than three of them: each pass through one takes a second to compile.
    """
    plan = replace(small_plan(kv_group=2), **variant)
    loops: dict[int, tuple[tuple[int, ...], int]] = {1: ((3, 0), 1), 2: ((2, 3), 2)}
    if variant:
        plan = replace(plan, layers=plan.layers[:3])
    else:
        loops[4] = ((5, 4, 11), 3)
    if grown:
        plan = looped(plan, loops, Gates(passes=3, heads=4))
    model = lively(plan)
    graphs = counter(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=graphs)
    for seed in (0, 1):
        tokens = random_tokens(plan, seed=seed)
        expected = loss_and_gradients(model, model, tokens)
        found = loss_and_gradients(model, compiled, tokens)
        for name, value in expected.items():
            assert relative_error(found[name], value) <= 1e-5, name
    assert graphs.frame_count == 1


def test_oracle_17_blocks_compile_once_per_head_dim() -> None:
    plan = small_plan("shuffle")
    model = lively(plan)
    tokens = random_tokens(plan)
    with torch.no_grad():
        expected = model(tokens).logits
        graphs = counter("eager")
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False, backend=graphs)
        found = model(tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert 1 <= graphs.frame_count <= len(set(plan.head_dims)) == 4


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("grown", "variant"),
    [(False, {}), (True, {}), (True, {"qk_norm": True}), (True, BIASED), (True, GAINED)],
    ids=["plain", "with loops", "normed", "biased", "gained"],
)
def test_oracle_17_compiled_equals_eager_on_the_gpu(grown: bool, variant: dict[str, Any]) -> None:
    plan = replace(small_plan(kv_group=2, context=256), **variant)
    if grown:
        plan = looped(plan, {1: ((3, 0), 1), 2: ((2, 3), 2), 4: ((5, 4, 11), 3)}, Gates(passes=3, heads=4))
    model = Decoder(plan).cuda()
    model.use_attention(torch.device("cuda"), torch.bfloat16)
    tokens = random_tokens(plan, batch=4).cuda()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.autocast("cuda", torch.bfloat16):
        expected = loss_and_gradients(model, model, tokens)
        found = loss_and_gradients(model, compiled, tokens)
        with torch.no_grad():
            difference = (compiled(tokens).logits.float() - model(tokens).logits.float()).abs()
    assert float((found["loss"] - expected["loss"]).abs()) <= 1e-2
    assert float(difference.max()) <= 5e-2
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 5e-2, name
