"""Decoding with a cache gives what the whole sequence gives (prism.md 6, oracle 15)."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meristem.errors import InputError
from meristem.model import Decoder, KVCache
from meristem.plan import Plan

from .helpers import (
    SCHEDULES,
    SIZES,
    lively,
    looped,
    needs_gpu,
    plans,
    random_tokens,
    relative_error,
    small_plan,
    with_exact_positions,
)


@torch.no_grad()
def decode(model: Decoder, tokens: Tensor, prefill: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Logits (B, T, V) from chunks of the given sizes, then token by token."""
    batch, length = tokens.shape
    cache = KVCache(model.plan, batch, length, tokens.device, dtype)
    sizes = [*prefill, *[1] * (length - sum(prefill))]
    parts = [model.unembed(model.hidden(part, cache)) for part in torch.split(tokens, sizes, dim=1)]
    assert cache.length == length
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kv_group", [1, 2])
@pytest.mark.parametrize("prefill", [(), (9,), (5, 7)], ids=["none", "one chunk", "two chunks"])
def test_oracle_15_cached_decoding(schedule: str, kv_group: int, prefill: tuple[int, ...]) -> None:
    plan = small_plan(schedule, kv_group=kv_group)
    model, tokens = lively(plan), random_tokens(plan)
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(decode(model, tokens, prefill, torch.float32), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_oracle_15_cached_decoding_in_bf16(schedule: str) -> None:
    """At the initial scale, where logits are small enough for a limit of 3e-2 in bf16 to make sense."""
    plan = small_plan(schedule, kv_group=2)
    model, tokens = Decoder(plan), random_tokens(plan)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(tokens).logits
        found = decode(model, tokens, (5, 7), torch.bfloat16)
    assert expected.dtype == found.dtype == torch.bfloat16
    assert 0.1 < float(expected.abs().max()) < 4
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-2)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_oracle_15_cached_decoding_on_the_gpu(schedule: str) -> None:
    plan = small_plan(schedule, kv_group=2)
    model, tokens = Decoder(plan).cuda(), random_tokens(plan).cuda()
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        found = decode(model, tokens, (5, 7), torch.bfloat16)
        torch.testing.assert_close(found, model(tokens).logits, rtol=0, atol=3e-2)


def assert_decodes_in_any_chunks(plan: Plan, data: st.DataObject) -> None:
    """In float64 the only differences left are those of the order of sums."""
    model = with_exact_positions(lively(plan, torch.float64))
    tokens = random_tokens(plan)
    first = data.draw(st.integers(1, plan.context - 1))
    prefill = (first, data.draw(st.integers(1, plan.context - first)))
    with torch.no_grad():
        expected = model(tokens).logits
    assert relative_error(decode(model, tokens, prefill, torch.float64), expected) <= 1e-10


@settings(max_examples=30, deadline=None)
@given(plan=plans(min_context=3), data=st.data())
def test_oracle_15_any_plan_and_any_chunks(plan: Plan, data: st.DataObject) -> None:
    assert_decodes_in_any_chunks(plan, data)


@pytest.mark.parametrize("kv_group", [1, 2])
def test_oracle_15_cache_shapes_and_bytes(kv_group: int) -> None:
    sizes = set()
    for schedule in SCHEDULES:
        plan = small_plan(schedule, kv_group=kv_group)
        cache = KVCache(plan, 3, 20, "cpu", torch.bfloat16)
        for layer, held in zip(plan.layers, cache.layers, strict=True):
            assert held[0].keys.shape == held[0].values.shape == (3, layer.heads // kv_group, 20, 96 // layer.heads)
        assert cache.nbytes == 3 * 20 * plan.cost.kv_bytes_per_token
        sizes.add(cache.nbytes)
    assert sizes == {3 * 20 * 6 * 2 * 2 * (96 // kv_group)}


@pytest.mark.parametrize("size", SIZES)
def test_oracle_15_bytes_at_published_sizes(size: str) -> None:
    caches = [
        KVCache(Plan.scheduled(schedule, **SIZES[size]), 1, 1024, "meta", torch.bfloat16) for schedule in SCHEDULES
    ]
    expected = SIZES[size]["layers"] * 1024 * 2 * 2 * SIZES[size]["width"]
    assert {cache.nbytes for cache in caches} == {expected}


def test_what_the_cache_holds() -> None:
    plan = small_plan()
    model, tokens = lively(plan), random_tokens(plan, length=4)
    cache = KVCache(plan, 2, 6, "cpu", torch.float32)
    with torch.no_grad():
        model.hidden(tokens, cache)
        attention = model.blocks[0].attention
        embedded = model.embedding(tokens)
        norm = model.stack[0].attention_norm
        x = norm(embedded, torch.zeros_like(embedded))[1]
        rope = model.rotary.pair(plan.head_dims[0], slice(0, 4))
        _, keys, values = attention.project(x, norm.weight, rope)  # type: ignore[union-attr,operator]
    assert cache.length == 4
    torch.testing.assert_close(cache.layers[0][0].keys[:, :, :4], keys.transpose(1, 2))
    torch.testing.assert_close(cache.layers[0][0].values[:, :, :4], values.transpose(1, 2))
    assert not cache.layers[0][0].keys[:, :, 4:].any()


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [True, False])
def test_normed_heads_are_what_caches_and_watches_see(qk_norm: bool) -> None:
    """Heads of mean square 1, in loops as well; those of a model without the norm are far from it."""
    plan = looped(small_plan(kv_group=2, qk_norm=qk_norm), {1: ((3, 0), 2)})
    model, tokens, cache = lively(plan), random_tokens(plan), KVCache(plan, 2, 32, "cpu", torch.float32)
    seen: list[Tensor] = []
    model.hidden(tokens, watch=lambda layer, number, own: seen.extend((own.queries, own.keys)))
    model.hidden(tokens, cache)
    assert len(seen) == 2 * (6 + 2)
    for heads in (*seen, *(slot.keys for layer in cache.layers for slot in layer)):
        assert bool(((heads.square().mean(-1) - 1).abs() < 1e-3).all()) == qk_norm


def test_capacity_is_bounded_by_the_context() -> None:
    with pytest.raises(InputError, match=r"capacity = 33: must be at most the context, 32"):
        KVCache(small_plan(), 1, 33, "cpu", torch.float32)


def test_a_full_cache_takes_no_more() -> None:
    plan = small_plan()
    model, tokens = Decoder(plan), random_tokens(plan, batch=1, length=5)
    cache = KVCache(plan, 1, 4, "cpu", torch.float32)
    with torch.no_grad():
        with pytest.raises(InputError, match=r"tokens = 5: .* the 4 there are"):
            model.hidden(tokens, cache)
        assert cache.length == 0
        model.hidden(tokens[:, :4], cache)
        with pytest.raises(InputError, match=r"tokens = 5: .* the 4 there are"):
            model.hidden(tokens[:, :1], cache)
