"""What the layers compute, whatever the schedule (prism.md 6, oracles 7 to 12, 14, 16)."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import math
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import meristem.model.attention as attention_module
from meristem.model import Decoder
from meristem.model.attention import Attention
from meristem.model.fused import rotate
from meristem.model.rotary import RotaryPair, rotary_table
from meristem.plan import LayerPlan, Plan

from .helpers import (
    ARMS,
    SCHEDULES,
    causal_probabilities,
    complex_rotation,
    explicit_attention,
    lively,
    normed_heads,
    plans,
    random_tokens,
    small_plan,
    split_heads,
    with_exact_positions,
)


def like_uniform(schedule: str, dtype: torch.dtype, **shape: Any) -> tuple[Decoder, Decoder]:
    """The uniform model and the scheduled one with the same weights."""
    return lively(small_plan("uniform", **shape), dtype), lively(small_plan(schedule, **shape), dtype)


def wide_pair(dim: int, length: int, dtype: torch.dtype = torch.float64) -> RotaryPair:
    cos, sin = rotary_table(dim, length)
    return cos.to(dtype), sin.to(dtype)


@pytest.mark.parametrize("schedule", ARMS)
@pytest.mark.parametrize("kv_group", [1, 2])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_oracle_7_first_position_is_the_same_for_every_schedule(
    schedule: str, kv_group: int, dtype: torch.dtype, limit: float
) -> None:
    """With groups, the head count orders the values in the output: layers can be compared, models cannot."""
    uniform, model = like_uniform(schedule, dtype, kv_group=kv_group)
    tokens = random_tokens(model.plan)
    if kv_group == 1:
        difference = model(tokens).logits[:, 0] - uniform(tokens).logits[:, 0]
        assert float(difference.detach().abs().max()) <= limit
    x = torch.randn(2, 5, model.plan.width, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for block in model.blocks:
        attention = block.attention
        assert isinstance(attention, Attention)
        layer = attention.layer
        values = attention.qkv(x[:, :1])[..., layer.query_width + layer.kv_width :]
        heads = values.unflatten(-1, (layer.kv_heads, -1))
        repeated = heads.repeat_interleave(layer.heads // layer.kv_heads, dim=2).flatten(2)
        out = attention(x, torch.ones_like(x[0, 0]), model.rotary.pair(layer.head_dim, slice(0, 5)))
        torch.testing.assert_close(out[:, :1], attention.out(repeated), rtol=0, atol=limit)


@pytest.mark.parametrize("schedule", ARMS)
def test_oracle_8_later_positions_see_the_schedule(schedule: str) -> None:
    uniform, model = like_uniform(schedule, torch.float32)
    tokens = random_tokens(model.plan)
    difference = (model(tokens).logits - uniform(tokens).logits).detach().abs()
    assert float(difference[:, 1:].amax(-1).min()) > 1e-3


def test_oracle_8_one_layer_of_the_small_model() -> None:
    """With initial weights and unit input, 3 heads and 12 differ by 0.19 at most (prism.md 6); the median of many."""
    differences = []
    for seed in range(16):
        few, many = (
            Decoder(Plan.uniform(layers=1, width=768, heads=h, vocabulary=2, feed_forward=8), seed=seed)
            for h in (3, 12)
        )
        x = torch.randn(1, 16, 768, generator=torch.Generator().manual_seed(seed))
        gain = torch.ones(768)
        first, second = (m.stack[0].attention(x, gain, rotary_table(m.plan.head_dims[0], 16)) for m in (few, many))
        differences.append(float((first - second).detach().abs().max()))
    assert min(differences) > 1e-3
    assert median(differences) == pytest.approx(0.19, rel=0.1)


@pytest.mark.parametrize("schedule", ARMS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_oracle_9_without_queries_attention_averages(schedule: str, dtype: torch.dtype, limit: float) -> None:
    uniform, model = like_uniform(schedule, dtype)
    for decoder in (uniform, model):
        for block in decoder.blocks:
            attention = block.attention
            assert isinstance(attention, Attention)
            with torch.no_grad():
                attention.qkv.weight[: attention.layer.query_width] = 0
    x = torch.randn(2, 7, model.plan.width, dtype=dtype, generator=torch.Generator().manual_seed(1))
    counts, gain = torch.arange(1, 8, dtype=dtype)[:, None], torch.ones_like(x[0, 0])
    for mine, theirs in zip(model.blocks, uniform.blocks, strict=True):
        one, other = mine.attention, theirs.attention
        assert isinstance(one, Attention)
        assert isinstance(other, Attention)
        out = one(x, gain, model.rotary.pair(one.layer.head_dim, slice(0, 7)))
        values = one.qkv(x)[..., -model.plan.width :]
        torch.testing.assert_close(out, one.out(values.cumsum(1) / counts), rtol=0, atol=limit)
        same = other(x, gain, uniform.rotary.pair(other.layer.head_dim, slice(0, 7)))
        torch.testing.assert_close(out, same, rtol=0, atol=limit)
    tokens = random_tokens(model.plan)
    torch.testing.assert_close(model(tokens).logits, uniform(tokens).logits, rtol=0, atol=10 * limit)


@pytest.mark.parametrize(
    ("width", "heads", "expected"),
    [
        *[(768, h, 0.307) for h in (3, 6, 8, 12)],
        *[(1024, h, 0.410) for h in (4, 8, 16)],
        *[(1536, h, 0.614) for h in (6, 12, 16)],
    ],
)
def test_oracle_10_initial_scores_have_one_scale(
    width: int, heads: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken from the call itself, so that a scale given to the kernel would count."""
    scores: list[Tensor] = []

    def spy(queries: Tensor, keys: Tensor, values: Tensor, scale: float | None = None, **_: Any) -> Tensor:
        factor = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
        scores.append(queries @ keys.transpose(-1, -2) * factor)
        return torch.zeros_like(queries)

    monkeypatch.setattr(attention_module, "scaled_dot_product_attention", spy)
    generator = torch.Generator().manual_seed(0)
    attention = Attention(width, LayerPlan(heads, width // heads, heads))
    with torch.no_grad():
        attention.qkv.weight.normal_(0, 0.02, generator=generator)
    x = torch.randn(1, 96, width, generator=generator)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    attention(x, torch.ones(width), rotary_table(width // heads, 96))
    assert float(scores[0].detach().std()) == pytest.approx(expected, rel=0.1)


# --- rotary positions -------------------------------------------------------------------------------------

DIMS = (32, 64, 96, 128, 192, 256)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_oracle_11_norms_are_preserved(dim: int, dtype: torch.dtype, limit: float) -> None:
    x = torch.randn(2, 1024, 2, dim, dtype=dtype, generator=torch.Generator().manual_seed(0))
    rotated = rotate(x, *rotary_table(dim, 1024))
    assert rotated.dtype == dtype
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=limit, atol=0)
    assert not torch.allclose(rotated[:, 1:], x[:, 1:], atol=0.1)


@pytest.mark.parametrize("dim", DIMS)
def test_oracle_11_scores_of_constant_inputs_are_toeplitz(dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    pair = rotary_table(dim, 128)
    q, k = (torch.randn(dim, generator=generator) / dim**0.25 for _ in range(2))
    queries, keys = (rotate(v.expand(1, 128, 1, dim), *pair)[0, :, 0] for v in (q, k))
    scores = queries @ keys.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=0, atol=1e-4)
    assert float(scores[0].std()) > 0.05  # it does depend on the distance


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_oracle_11_values_are_untouched(kv_heads: int, dtype: torch.dtype) -> None:
    packed = torch.randn(2, 9, 4 + 2 * kv_heads, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    queries, keys, values = split_heads(packed, *rotary_table(16, 9), 4, kv_heads)
    assert torch.equal(values, packed[:, :, 4 + kv_heads :])
    assert (queries.shape[2], keys.shape[2]) == (4, kv_heads)
    assert queries.dtype == keys.dtype == values.dtype == dtype
    assert not torch.equal(keys, packed[:, :, 4 : 4 + kv_heads])


def test_oracle_11_frequencies_nest() -> None:
    """freq_64[i] = freq_128[2 i] = freq_256[4 i] and freq_32[i] = freq_96[3 i]; 64 is not inside 96."""

    def halves(dim: int) -> list[Tensor]:
        return [table[:, 0, : dim // 2] for table in rotary_table(dim, 1024)]

    for narrow, wide in ((64, 128), (64, 256), (128, 256), (32, 96), (96, 192)):
        for mine, theirs in zip(halves(narrow), halves(wide), strict=True):
            torch.testing.assert_close(mine, theirs[:, :: wide // narrow], rtol=0, atol=1e-7)
    inner, outer = (
        halves(64)[1][1],
        halves(96)[1][1],
    )  # sines at position 1: distinct for distinct frequencies
    nearest = (inner[:, None] - outer).abs().amin(-1)
    assert float(nearest.max()) > 1e-3


@settings(max_examples=30, deadline=None)
@given(half=st.integers(1, 64), length=st.integers(1, 40), seed=st.integers(0, 99))
def test_rotation_is_a_complex_product(half: int, length: int, seed: int) -> None:
    x = torch.randn(2, length, 3, 2 * half, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rotated = rotate(x, *rotary_table(2 * half, length))
    torch.testing.assert_close(rotated, complex_rotation(x), rtol=0, atol=1e-6)  # the tables are float32
    back = rotate(rotated, *(table * sign for table, sign in zip(rotary_table(2 * half, length), (1, -1), strict=True)))
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("normed", [False, True])
def test_split_heads_against_a_complex_product(heads: int, kv_heads: int, normed: bool) -> None:
    packed = torch.randn(
        2, 5, heads + 2 * kv_heads, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    expected = (
        complex_rotation(normed_heads(packed[:, :, :heads], normed)),
        complex_rotation(normed_heads(packed[:, :, heads : heads + kv_heads], normed)),
        packed[:, :, heads + kv_heads :],
    )
    eps = 1e-5 if normed else None
    parts = split_heads(packed, *wide_pair(6, 5), heads, kv_heads, eps)
    weights = [torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) for p in parts]
    gradients = []
    for found in (parts, expected):
        total = torch.stack([(p * w).sum() for p, w in zip(found, weights, strict=True)]).sum()
        gradients.append(torch.autograd.grad(total, packed)[0])
    for mine, theirs in zip(parts, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: split_heads(x, *wide_pair(6, 5), heads, kv_heads, eps), (packed,))


@pytest.mark.parametrize(("narrow", "wide"), [(64, 256), (128, 256), (32, 96)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_oracle_12_a_narrow_head_inside_a_wide_one(narrow: int, wide: int, dtype: torch.dtype, limit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    step = wide // narrow
    pairs = torch.arange(narrow // 2) * step
    places = torch.cat((pairs, pairs + wide // 2))
    scores = []
    q, k = (torch.randn(1, 48, 1, narrow, generator=generator).to(dtype) for _ in range(2))
    for dim in (narrow, wide):
        queries, keys = q, k
        if dim == wide:
            queries, keys = (torch.zeros(1, 48, 1, wide, dtype=dtype) for _ in range(2))
            queries[..., places] = q * math.sqrt(wide / narrow)
            keys[..., places] = k
        pair = rotary_table(dim, 48)
        rotated = [rotate(x, *pair).transpose(1, 2) for x in (queries, keys)]
        scores.append(causal_probabilities(rotated[0], rotated[1]))
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=limit)


# --- the whole model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kv_group", [1, 2])
def test_oracle_14_the_future_has_no_influence(schedule: str, kv_group: int) -> None:
    plan = small_plan(schedule, kv_group=kv_group)
    model, tokens = lively(plan), random_tokens(plan)
    with torch.no_grad():
        before = model(tokens).logits
        for place in (1, 13, plan.context - 1):
            changed = tokens.clone()
            changed[:, place] = (changed[:, place] + 1) % plan.vocabulary
            difference = (model(changed).logits - before).abs()
            assert float(difference[:, :place].max()) <= 1e-6
            assert float(difference[:, place].amax(-1).min()) > 1e-3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_oracle_16_groups_equal_repeated_heads(schedule: str) -> None:
    grouped_plan, full_plan = small_plan(schedule, kv_group=2), small_plan(schedule)
    grouped, full = lively(grouped_plan), lively(full_plan)
    state = grouped.state_dict()
    assert {tuple(w.shape) for name, w in state.items() if "qkv" in name} == {(96 + 2 * 48, 96)}
    for index, layer in enumerate(grouped_plan.layers):
        name = f"blocks.{index}.attention.qkv.weight"
        queries, keys, values = state[name].split((96, 48, 48))
        keys, values = (
            w.unflatten(0, (layer.kv_heads, -1)).repeat_interleave(2, dim=0).flatten(0, 1) for w in (keys, values)
        )
        state[name] = torch.cat((queries, keys, values))
    full.load_state_dict(state)
    tokens = random_tokens(full_plan)
    torch.testing.assert_close(grouped(tokens).logits, full(tokens).logits, rtol=0, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(plan=plans(), seed=st.integers(0, 99))
def test_model_equals_a_model_written_out_by_hand(plan: Plan, seed: int) -> None:
    """In float64, with complex rotations and explicit attention maps."""
    model = with_exact_positions(lively(plan, torch.float64, seed))
    tokens = random_tokens(plan, seed=seed)
    state = model.state_dict()

    def norm(x: Tensor, name: str) -> Tensor:
        weight: Tensor = state[f"{name}.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + plan.norm_eps) * weight

    x = state["embedding.weight"][tokens]
    for index, layer in enumerate(plan.layers):
        name = f"blocks.{index}"
        packed = norm(x, f"{name}.attention_norm") @ state[f"{name}.attention.qkv.weight"].T
        packed = packed + state.get(f"{name}.attention.qkv.bias", 0)
        parts = packed.split((layer.query_width, layer.kv_width, layer.kv_width), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, layer.head_dim)) for part in parts)
        q, k = (normed_heads(part, plan.qk_norm, plan.norm_eps) for part in (q, k))
        q, k = q * state.get(f"{name}.attention.query_gain", 1), k * state.get(f"{name}.attention.key_gain", 1)
        q, k = (complex_rotation(part, rotary=plan.rotary) for part in (q, k))
        head_outputs = explicit_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + head_outputs.transpose(1, 2).flatten(2) @ state[f"{name}.attention.out.weight"].T
        both = norm(x, f"{name}.feed_forward_norm") @ state[f"{name}.feed_forward.gate_up.weight"].T
        gate, up = both.chunk(2, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ state[f"{name}.feed_forward.down.weight"].T
    expected = norm(x, "norm") @ state["embedding.weight" if plan.tied else "output.weight"].T
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-9, atol=1e-9)
