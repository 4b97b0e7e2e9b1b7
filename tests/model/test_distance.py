"""Attention distance (prism.md 1.6 and 6, oracles 18 and 19)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.gauges import attention_distance, layer_distances
from meristem.model import Decoder
from meristem.plan import Plan

from .helpers import DTYPES, Recorder, causal_probabilities, lively, needs_gpu, random_tokens, small_plan


def explicit_distance(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over heads of the distance of each head's map, and the distance of the mean map."""
    length = queries.shape[2]
    positions = torch.arange(length, dtype=queries.dtype)
    distances = (positions[:, None] - positions).abs()
    maps = causal_probabilities(queries, keys)
    by_head = (maps * distances).sum(-1)[:, :, length // 2 :].mean((0, 2))
    of_mean = (maps.mean((0, 1)) * distances).sum(-1)[length // 2 :].mean()
    return by_head.mean(), of_mean


@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle_18_uniform_attention(dtype: torch.dtype) -> None:
    queries = torch.zeros(1, 2, 1024, 8, dtype=dtype)
    keys = torch.randn(1, 2, 1024, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))
    distance = attention_distance(queries, keys)
    assert distance.dtype == dtype
    assert distance.shape == ()
    assert float(distance) == pytest.approx(383.75, abs=1e-3 if dtype == torch.float32 else 1e-9)


def test_oracle_18_upper_bound() -> None:
    queries, keys = torch.ones(1, 1, 1024, 8), torch.zeros(1, 1, 1024, 8)
    keys[:, :, 0] = 100
    assert float(attention_distance(queries, keys)) == pytest.approx(767.5, abs=1e-3)


@pytest.mark.parametrize("offset", [0, 1, 5, 32])
def test_oracle_18_fixed_offset(offset: int) -> None:
    """Query t matches the one-hot key t - offset only."""
    keys = torch.eye(64)[None, None]
    queries = 1000 * torch.eye(64).roll(offset, dims=0)[None, None]
    assert float(attention_distance(queries, keys)) == pytest.approx(offset, abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_uniform_attention_at_other_lengths(length: int) -> None:
    """Query t averages t - s over s = 0..t, which is t / 2; odd lengths round the first half down."""
    expected = sum(t / 2 for t in range(length // 2, length)) / (length - length // 2)
    zero = torch.zeros(1, 1, length, 4)
    assert float(attention_distance(zero, zero)) == pytest.approx(expected, abs=1e-5)
    if length == 64:
        assert expected == 23.75


@pytest.mark.parametrize("schedule", ["uniform", "prism"])
def test_oracle_18_untrained_model(schedule: str) -> None:
    shape: dict[str, Any] = {"layers": 4, "width": 768, "heads": 12, "vocabulary": 64, "feed_forward": 64}
    plan = Plan.scheduled(schedule, **shape)
    distances = layer_distances(Decoder(plan), random_tokens(plan, batch=1))
    assert distances.shape == (4,)
    assert float((distances - 383.75).abs().max()) <= 5
    assert len(set(distances.tolist())) == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 10), (3, 1, 64)])
@pytest.mark.parametrize("length", [64, 33])
def test_oracle_19_three_forms_agree(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = 2 * torch.randn(3, heads, length, dim, dtype=dtype, generator=generator)
    keys = 2 * torch.randn(3, kv_heads, length, dim, dtype=dtype, generator=generator)
    keys[:, :, length // 3] *= 3  # attract some queries, so that the heads are far from uniform
    limit = 1e-4 if dtype == torch.float32 else 1e-11
    distance = attention_distance(queries, keys)
    for expected in explicit_distance(queries, keys):
        torch.testing.assert_close(distance, expected, rtol=limit, atol=0)


@pytest.mark.parametrize("kv_group", [1, 2])
def test_oracle_19_every_layer_of_a_model(kv_group: int) -> None:
    """Against maps made from the queries and keys that the model's own forward pass attends with."""
    plan = small_plan(kv_group=kv_group)
    model, tokens = lively(plan), random_tokens(plan)
    seen: list[tuple[Tensor, Tensor]] = []
    for block in model.blocks:
        attention: Any = block.attention

        def project(*arguments: Any, original: Any = attention.project) -> Any:
            parts = original(*arguments)
            seen.append((parts[0].transpose(1, 2), parts[1].transpose(1, 2)))
            return parts

        attention.project = project
    with torch.no_grad():
        model(tokens)
    expected = torch.stack([explicit_distance(queries, keys)[0] for queries, keys in seen])
    torch.testing.assert_close(layer_distances(model, tokens), expected, rtol=1e-4, atol=0)
    assert float(expected.std()) > 0.1


def test_no_map_is_stored() -> None:
    queries, keys = torch.randn(1, 4, 200, 16), torch.randn(1, 2, 200, 16)
    with Recorder() as recorder:
        attention_distance(queries, keys)
    shapes = [shape for shape, _ in recorder.made]
    assert (1, 4, 200, 16) in shapes
    assert not [shape for shape in shapes if shape[-2:] == (200, 200)]


def test_precision_does_not_follow_the_model() -> None:
    """Under autocast, and from bf16 queries and keys, positions and sums stay in float32."""
    queries, keys = torch.zeros(1, 1, 1024, 8), torch.ones(1, 1, 1024, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert float(attention_distance(queries, keys)) == pytest.approx(383.75, abs=1e-3)
        narrow = attention_distance(queries.bfloat16(), keys.bfloat16())
    assert narrow.dtype == torch.float32
    assert float(narrow) == pytest.approx(383.75, abs=1e-3)


def test_gauges_need_no_gradient() -> None:
    plan = small_plan()
    model = lively(plan)
    assert not layer_distances(model, random_tokens(plan)).requires_grad


def test_too_many_positions() -> None:
    plan = small_plan(context=8)
    with pytest.raises(InputError, match=r"tokens = 9: .*8"):
        layer_distances(Decoder(plan), torch.zeros(1, 9, dtype=torch.long))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kv_group", [1, 2])
def test_distances_on_the_gpu(kv_group: int) -> None:
    plan = small_plan(kv_group=kv_group, context=1024)
    model, tokens = lively(plan), random_tokens(plan)
    expected = layer_distances(model, tokens)
    found = layer_distances(model.cuda(), tokens.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=0)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_no_map_is_stored_on_the_gpu(kv_heads: int) -> None:
    """Float32 with groups would fall to the math kernel, were the keys not repeated."""
    queries, keys = (torch.randn(1, heads, 200, 16, device="cuda") for heads in (4, kv_heads))
    with Recorder() as recorder:
        attention_distance(queries, keys)
    assert not [shape for shape, _ in recorder.made if shape[-2:] == (200, 200)]
