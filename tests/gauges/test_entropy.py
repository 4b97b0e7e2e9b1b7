"""The entropy of heads (sgt.md 1, D4, D6 and 6, oracle 7)."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meristem.errors import InputError
from meristem.gauges import EntropyGauge, fused_entropies, read_heads, row_entropies
from meristem.gauges.entropy import probe_rows
from meristem.growth.edits import RepeatBlock
from meristem.model import Decoder
from meristem.plan import Gates, Plan
from model.helpers import (
    DTYPES,
    Recorder,
    causal_probabilities,
    lively,
    looped,
    needs_gpu,
    random_tokens,
    small_plan,
)

LOOPS = {1: ((3, 0), 1), 2: ((2, 3), 2), 4: ((5, 4, 11), 3)}
GAUGES = [EntropyGauge(1), EntropyGauge(5), EntropyGauge(), EntropyGauge(form="fused")]


def direct_entropies(queries: Tensor, keys: Tensor) -> Tensor:
    """Entropy in nats of every row, (B, h, T), from the whole map in float64."""
    return torch.special.entr(causal_probabilities(queries.double(), keys.double())).sum(-1)


def direct_reading(queries: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Normalised entropy of each head, (h,), summed over the batch, mean over rows."""
    visible = torch.tensor([math.log(row + 1) for row in rows.tolist()], dtype=torch.float64)
    return (direct_entropies(queries, keys)[..., rows] / visible).mean(-1).sum(0)


def rows_of(gauge: EntropyGauge, length: int) -> Tensor:
    return torch.arange(length // 2, length) if gauge.form == "fused" else probe_rows(length, gauge.rows)


def random_heads(
    heads: int, kv_heads: int, length: int, dim: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Queries and keys whose scores have a standard deviation of scale^2."""
    generator = torch.Generator().manual_seed(dim)
    queries = scale * torch.randn(3, heads, length, dim, dtype=dtype, generator=generator)
    return queries, scale * torch.randn(3, kv_heads, length, dim, dtype=dtype, generator=generator)


# --- rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gauge", GAUGES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [2, 3, 64])
def test_sgt_oracle_7_identical_keys(gauge: EntropyGauge, dtype: torch.dtype, length: int) -> None:
    queries, keys = random_heads(4, 2, length, 8, dtype)
    keys = keys[:, :, :1].expand_as(keys)
    found = gauge.of_heads(queries, keys)
    assert found.shape == (4,)
    torch.testing.assert_close(found / 3, torch.ones_like(found), rtol=0, atol=2e-6)


def one_dominant_key(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Key 0 has a score of 50 or more above all others; it lies in a direction that the others do not have."""
    queries, keys = random_heads(2, 2, 256, 16, dtype)
    direction = torch.randn(16, dtype=dtype, generator=torch.Generator().manual_seed(1))
    direction /= direction.norm()
    queries += 25 * direction
    keys -= (keys @ direction)[..., None] * direction
    keys[:, :, 0] = 3 * math.sqrt(16) * direction
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(16)
    assert float((scores[..., :1] - scores[..., 1:]).min()) >= 50
    return queries, keys


@pytest.mark.parametrize("gauge", GAUGES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sgt_oracle_7_one_dominant_key(gauge: EntropyGauge, dtype: torch.dtype) -> None:
    found = gauge.of_heads(*one_dominant_key(dtype)) / 3
    assert float(found.max()) < 1e-6
    assert float(found.min()) >= 0


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 10), (3, 1, 64)])
@pytest.mark.parametrize("length", [2, 33, 256])
def test_sgt_oracle_7_both_forms_equal_the_direct_one(
    dtype: torch.dtype, limit: float, heads: int, kv_heads: int, dim: int, length: int
) -> None:
    queries, keys = random_heads(heads, kv_heads, length, dim, dtype)
    expected = direct_entropies(queries, keys)
    assert expected.shape == (3, heads, length)
    fused = fused_entropies(queries, keys)
    rows = torch.tensor([0, length // 2, length - 1])
    some = row_entropies(queries, keys, rows)
    every = row_entropies(queries, keys, torch.arange(length))
    assert fused.dtype == some.dtype == dtype
    for found, wanted in ((fused, expected), (some, expected[..., rows]), (every, expected)):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=limit)


def test_sgt_oracle_7_strong_logits() -> None:
    """Scores four times as large, where entropies are far from those of the average.

    The fused form takes the difference of two numbers that are as large as the scores, and loses more.
    """
    queries, keys = random_heads(4, 2, 256, 32, scale=2)
    expected = direct_entropies(queries, keys)
    assert float((expected[..., 128:] / math.log(256)).mean()) < 0.5
    rows, fused = row_entropies(queries, keys, torch.arange(256)), fused_entropies(queries, keys)
    for found, limit in ((rows, 1e-5), (fused, 5e-5)):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("scale", [3, 4])
def test_rows_are_exact_for_strong_logits(scale: float) -> None:
    """Scores 9 and 16 times as large; what is lost is lost in the scores themselves."""
    queries, keys = random_heads(4, 2, 256, 32, scale=scale)
    found = row_entropies(queries, keys, torch.arange(256))
    torch.testing.assert_close(found.double(), direct_entropies(queries, keys), rtol=0, atol=1e-5)
    assert float(found.min()) >= 0


@pytest.mark.parametrize("scale", [1, 2])
def test_sgt_oracle_7_bf16_inputs(scale: float) -> None:
    """All that is lost is lost in rounding the inputs: on the mean of a head, little."""
    queries, keys = random_heads(6, 2, 256, 32, scale=scale)
    narrow = queries.bfloat16(), keys.bfloat16()
    expected, rounded = direct_entropies(queries, keys), direct_entropies(*narrow)
    rows, fused = row_entropies(*narrow, torch.arange(256)), fused_entropies(*narrow)
    for found, limit in ((rows, 1e-5), (fused, 5e-5)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), rounded, rtol=0, atol=limit)
        torch.testing.assert_close(found.double().mean((0, 2)), expected.mean((0, 2)), rtol=0, atol=1e-3)


def test_later_keys_do_not_count() -> None:
    """Not even such that would drown all others, or overflow."""
    queries, keys = random_heads(2, 2, 16, 8)
    expected = row_entropies(queries, keys, torch.tensor([7]))
    keys[:, :, 8:] *= 1000
    assert torch.equal(row_entropies(queries, keys, torch.tensor([7])), expected)
    torch.testing.assert_close(fused_entropies(queries, keys)[..., 7:8], expected, rtol=0, atol=1e-5)


def test_precision_does_not_follow_autocast() -> None:
    queries, keys = random_heads(4, 2, 128, 32)
    expected = direct_entropies(queries, keys)
    with torch.autocast("cpu", torch.bfloat16):
        for found in (fused_entropies(queries, keys), row_entropies(queries, keys, torch.arange(128))):
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_no_map_is_formed() -> None:
    queries, keys = random_heads(4, 2, 200, 16)
    for gauge in GAUGES:
        with Recorder() as recorder:
            gauge.of_heads(queries, keys)
        made = [shape for shape, _ in recorder.made]
        assert (3, 4, 200, 16) in made
        assert not [shape for shape in made if shape[-2:] == (200, 200)]


@pytest.mark.parametrize("length", [2, 3, 17, 1024])
def test_one_probe_row_is_the_last(length: int) -> None:
    assert probe_rows(length, 1).tolist() == [length - 1]


@given(length=st.integers(2, 3000), count=st.integers(2, 64))
def test_probe_rows_are_spread_over_the_last_half(length: int, count: int) -> None:
    rows = probe_rows(length, count).tolist()
    half = range(max(1, length // 2), length)
    assert len(rows) == min(count, len(half))
    assert rows == sorted(set(rows))
    assert rows[-1] == length - 1
    assert set(rows) <= set(half)
    gaps = [b - a for a, b in pairwise(rows)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert rows[0] == half[0] or len(rows) == 1


def test_probe_rows_by_hand() -> None:
    assert probe_rows(16, 3).tolist() == [8, 12, 15]  # 11.5 goes to the even one
    assert probe_rows(1024, 16).tolist()[:3] == [512, 546, 580]
    assert probe_rows(6, 16).tolist() == [3, 4, 5]


@pytest.mark.parametrize("count", [1, 16])
def test_probe_rows_are_made_where_they_are_needed(count: int) -> None:
    assert probe_rows(64, count).device == torch.device("cpu")
    assert probe_rows(64, count, "meta").device == probe_rows(64, count, torch.device("meta")).device
    rows = probe_rows(64, count, "meta")
    assert (rows.device.type, rows.dtype, len(rows)) == ("meta", torch.int64, count)


@pytest.mark.parametrize("gauge", GAUGES, ids=str)
@pytest.mark.parametrize("length", [2, 3, 33, 64])
def test_readings_are_means_over_rows_and_sums_over_sequences(gauge: EntropyGauge, length: int) -> None:
    queries, keys = random_heads(6, 3, length, 16)
    expected = direct_reading(queries, keys, rows_of(gauge, length))
    torch.testing.assert_close(gauge.of_heads(queries, keys).double(), expected, rtol=0, atol=2e-6)
    parts = sum(gauge.of_heads(queries[i : i + 1], keys[i : i + 1]) for i in range(3))
    torch.testing.assert_close(parts, gauge.of_heads(queries, keys))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, r"rows = 0: must be an integer of at least 1"),
        ({"rows": -3}, r"rows = -3: must be an integer of at least 1"),
        ({"sequences": 0}, r"sequences = 0: must be an integer of at least 1"),
        ({"form": "flash"}, r"form = 'flash': must be one of rows, fused"),
    ],
)
def test_bad_gauges(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EntropyGauge(**arguments)


# --- models -----------------------------------------------------------------------------------------------


def grown(kv_group: int = 2) -> Plan:
    return RepeatBlock(3, 2).apply(looped(small_plan(kv_group=kv_group), LOOPS, Gates(passes=3, heads=4)))


def direct_readings(model: Decoder, tokens: Tensor, gauge: EntropyGauge) -> Tensor:
    """From the maps of every pass: where a head runs more than once, its last one."""
    maps: dict[tuple[int, int], Tensor] = {}
    rows = rows_of(gauge, tokens.shape[1])
    with torch.no_grad():
        model.hidden(
            tokens,
            watch=lambda layer, number, seen: maps.update(
                {(layer, number): direct_reading(seen.queries, seen.keys, rows)}
            ),
        )
    readings = []
    for index, layer in enumerate(model.plan.layers):
        for head in range(layer.heads):
            if layer.loop is not None and head in layer.loop.heads:
                readings.append(maps[index, layer.loop.passes][layer.loop.heads.index(head)])
            else:
                readings.append(maps[index, layer.repeats][head])
    return torch.stack(readings)


@pytest.mark.parametrize("gauge", GAUGES, ids=str)
@pytest.mark.parametrize("kv_group", [1, 2])
def test_sgt_oracle_7_heads_report_their_last_pass(gauge: EntropyGauge, kv_group: int) -> None:
    plan = grown(kv_group)
    model, tokens = lively(plan), random_tokens(plan, batch=3)
    found = read_heads(model, tokens, gauge).entropy
    assert found.shape == (sum(plan.heads),) == (48,)
    torch.testing.assert_close(found.double(), direct_readings(model, tokens, gauge), rtol=0, atol=1e-5)
    # The heads of a model without loops all report their normal pass.
    model.follow_plan(looped(small_plan(kv_group=kv_group), {}, plan.gates))
    plain = read_heads(model, tokens, gauge).entropy
    torch.testing.assert_close(plain.double(), direct_readings(model, tokens, gauge), rtol=0, atol=1e-5)
    changed = [i for i, (one, other) in enumerate(zip(found.tolist(), plain.tolist(), strict=True)) if one != other]
    first = sum(plan.heads[:3])  # up to layer 2 only the looped heads have looked again, in layer 2 all have
    assert [i for i in changed if i < 6] == [2, 5]
    assert set(range(6, first)) <= set(changed)


def test_entropies_of_a_lively_model_differ_between_heads() -> None:
    """The comparisons above are of numbers that are worth comparing."""
    plan = grown()
    entropies = read_heads(lively(plan), random_tokens(plan, batch=3), EntropyGauge()).entropy / 3
    assert float(entropies.min()) > 0
    assert float(entropies.max()) < 1
    assert float(entropies.std()) > 0.02


def test_an_untrained_model_looks_at_everything() -> None:
    plan = small_plan()
    entropies = read_heads(Decoder(plan), random_tokens(plan, batch=2), EntropyGauge()).entropy / 2
    assert float(entropies.min()) > 0.99
    assert float(entropies.max()) <= 1 + 1e-6


def test_updates_are_measured_against_the_stream() -> None:
    """A pass has added what the next one reads, or what enters the feed-forward norm, minus what it has read itself.

    Only loops have strengths, so only they are told of: layer 3, whose block is repeated, is not.
    """
    plan = grown()
    model, tokens = lively(plan), random_tokens(plan)
    streams: dict[int, list[Tensor]] = {index: [] for index in range(6)}
    sums: dict[int, list[Tensor]] = {index: [] for index in range(6)}
    for index, block in enumerate(model.stack):
        block.feed_forward_norm.register_forward_hook(lambda _, __, out, i=index: sums[i].append(out[0].double()))
    with torch.no_grad():
        model.hidden(tokens, watch=lambda layer, _, seen: streams[layer].append(seen.stream.double()))
    expected: dict[tuple[int, int], float] = {}
    for index, layer in enumerate(plan.layers):
        if layer.loop is None:
            continue
        after = [*streams[index][1:], *sums[index]]
        for number, (old, new) in enumerate(zip(streams[index], after, strict=True)):
            if number > 0:
                expected[index, number] = float((new - old).norm() / old.norm())
    updates = read_heads(model, tokens, EntropyGauge()).updates
    passes = {1: 1, 2: 2, 4: 3}
    assert updates.keys() == expected.keys() == {(i, n) for i, count in passes.items() for n in range(1, count + 1)}
    for place, ratio in expected.items():
        assert updates[place].shape == ()
        assert float(updates[place]) == pytest.approx(ratio, rel=1e-4), place


def test_a_loop_without_strength_has_no_update() -> None:
    plan = grown()
    model, tokens = lively(plan), random_tokens(plan)
    with torch.no_grad():
        for gates in (model.gate_ramp, model.gate_delta):
            assert gates is not None
            gates[2].zero_()
    updates = read_heads(model, tokens, EntropyGauge()).updates
    assert [float(updates[2, number]) for number in (1, 2)] == [0, 0]
    assert float(updates[1, 1]) > 0.01


def test_reading_leaves_no_gradient_and_does_not_change_the_model() -> None:
    plan = grown()
    model, tokens = lively(plan), random_tokens(plan)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    readings = read_heads(model, tokens, EntropyGauge())
    assert not readings.entropy.requires_grad
    assert not any(ratio.requires_grad for ratio in readings.updates.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_readings_under_autocast() -> None:
    """The model's products are rounded, the gauge's sums are not."""
    plan = grown()
    model, tokens = lively(plan), random_tokens(plan, batch=3)
    with torch.autocast("cpu", torch.bfloat16):
        for gauge in GAUGES:
            readings = read_heads(model, tokens, gauge)
            assert readings.entropy.dtype == torch.float32
            direct = direct_readings(model, tokens, gauge)
            torch.testing.assert_close(readings.entropy.double(), direct, rtol=0, atol=1e-5)


@pytest.mark.parametrize("gauge", GAUGES, ids=str)
def test_two_tokens_are_enough_and_one_is_not(gauge: EntropyGauge) -> None:
    plan = grown()
    model = lively(plan)
    assert bool(read_heads(model, random_tokens(plan, length=2), gauge).entropy.isfinite().all())
    with pytest.raises(InputError, match=r"tokens = 1: positions are too few: entropy needs at least 2"):
        read_heads(model, random_tokens(plan, length=1), gauge)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("length", [33, 256])
def test_sgt_oracle_7_on_the_gpu(length: int) -> None:
    queries, keys = random_heads(6, 2, length, 16)
    expected = direct_entropies(queries, keys)
    queries, keys = queries.cuda(), keys.cuda()
    rows = torch.arange(length, device="cuda")
    for found in (fused_entropies(queries, keys), row_entropies(queries, keys, rows)):
        torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=1e-5)
