"""The demand gauge against real heads, plain linear algebra and noise (incrt.md 6, oracles 17 and 20)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meristem.gauges import demand
from meristem.gauges.demand import BETAS, FORGET, MEMORY, RATE, TEST_MEMORY, DemandGauge, side_by_side
from meristem.growth import Incrt
from meristem.model.rotary import RotaryPair, rotary_table

DOUBLE = torch.float64


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def everything(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool)


def correlated(*shape: int, seed: int = 0) -> Tensor:
    """Tokens with a mean and unequal directions."""
    width = shape[-1]
    return random(*shape, seed=seed) @ random(width, width, seed=seed + 1) / math.sqrt(width) + 0.5


def still(dim: int, length: int = 16) -> RotaryPair:
    """Positions that rotate nothing."""
    return torch.ones(length, 1, dim), torch.zeros(length, 1, dim)


def gauge_of(layers: int, width: int, dim: int, rotary: RotaryPair | None = None) -> DemandGauge:
    return DemandGauge(layers, width, rotary or rotary_table(dim, 16), dtype=DOUBLE)


def feed(gauge: DemandGauge, x: Tensor, gradients: Tensor, mask: Tensor | None = None, size: float = 1.0) -> None:
    gauge.feed(x, gradients, everything(x.shape[2]) if mask is None else mask, torch.full((len(x),), size))


def rotated(x: Tensor, rotary: RotaryPair) -> Tensor:
    """Rotary positions of x (B, T, e) by complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.atan2(rotary[1][: x.shape[1], 0, half:].double(), rotary[0][: x.shape[1], 0, half:].double())
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def head_output(x: Tensor, looks: Tensor, output: Tensor, mask: Tensor, rotary: RotaryPair) -> Tensor:
    """What a head of x (B, T, d) writes, by torch's own attention; its mean over all tokens is taken away."""
    query, key = (rotated(x @ look, rotary) for look in looks)
    read = scaled_dot_product_attention(query, key, x, attn_mask=mask)
    return (read - read.mean((0, 1))) @ output.T


@pytest.mark.parametrize("causal", [False, True])
def test_incrt_oracle_20_the_gain_is_the_slope_of_a_real_head(causal: bool) -> None:
    """Differences of a loss: in the output amplitude of a softmax head, and in that and its score scale, at 1e-3 each.

    The loss is not quadratic, so that it has more than a second derivative.
    """
    batch, length, width, dim, small = 3, 7, 10, 4, 1e-3
    x, base, target = (f(batch, length, width, seed=s) for f, s in ((correlated, 0), (random, 3), (random, 4)))
    mask = everything(length).tril() if causal else everything(length)
    rotary = rotary_table(dim, 16)

    def loss(y: Tensor) -> Tensor:
        return torch.cosh(0.3 * (y - target)).sum((1, 2)).mean()

    leaf = base.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    gauge = gauge_of(1, width, dim, rotary)
    feed(gauge, x[None], gradient[None] * batch, mask)
    output = (gauge.outputs.left_core @ gauge.outputs.right.mT)[0]

    def gain_and_slope(scale: float) -> tuple[float, float]:
        """Of the head with scores of that scale: what the gauge says, and the difference in the amplitude."""
        scaled = gauge_of(1, width, dim, rotary)
        scaled.load(gauge.tensors(), gauge.values())
        scaled.looks[0] *= scale
        scaled.sums.zero_()
        written = small * head_output(x, scaled.looks[:, 0], output, mask, rotary)
        feed(scaled, x[None], gradient[None] * batch, mask)
        gain, _, size, count = (float(value) for value in scaled.sums)
        assert small**2 * size == pytest.approx(float(written.square().sum()), rel=1e-6)
        return gain / count, float(loss(base + written) - loss(base - written)) / (2 * small)

    gain, slope = gain_and_slope(1.0)
    assert -gain == pytest.approx(slope, rel=1e-4)
    (gain, slope), (less, lower) = gain_and_slope(small), gain_and_slope(-small)
    assert -(gain - less) == pytest.approx(slope - lower, rel=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_climb_the_slope(causal: bool) -> None:
    """Against finite differences of the slope, through Adam's first step and its moments."""
    length, width, dim = 5, 6, 2
    x, gradients = correlated(4, length, width), random(4, length, width, seed=3)
    mask = everything(length).tril() if causal else everything(length)
    gauge = gauge_of(1, width, dim)
    output, before = (gauge.outputs.left_core @ gauge.outputs.right.mT)[0], gauge.looks[:, 0].clone()
    feed(gauge, x[None], gradients[None], mask)

    def slope(looks: Tensor) -> Tensor:
        written = head_output(x, looks, output, mask, rotary_table(dim, 16))
        return -(gradients * written).sum() / written.square().sum().sqrt()

    steps = 1e-6 * torch.eye(before.numel(), dtype=DOUBLE).view(-1, *before.shape)
    expected = torch.stack([(slope(before + step) - slope(before - step)) / 2e-6 for step in steps]).view_as(before)
    torch.testing.assert_close(gauge.moments[0, :, 0], (1 - BETAS[0]) * expected, rtol=1e-5, atol=1e-8)
    after = (1 - FORGET) * before + RATE / math.sqrt(width) * expected.sign()
    torch.testing.assert_close(gauge.looks[:, 0], after, rtol=0, atol=1e-6)


def test_incrt_oracle_17_noise_is_not_a_demand() -> None:
    """Gradients that have nothing to do with the tokens: |z| < 4 in at least 95 of 100 windows."""
    gauge = DemandGauge(4, 16, rotary_table(4, 8))
    certain = 0
    for window in range(25):
        for number in range(10):
            seed = 100 * window + number
            x, noise = (random(4, 16, 8, 16, seed=s, dtype=torch.float32) for s in (seed, seed + 50))
            feed(gauge, x, noise)
        certain += sum(abs(reading.certainty) >= 4 for reading in gauge.readings())
        gauge.reset(range(4))
    assert certain <= 5


@pytest.mark.parametrize(("sequences", "feeds"), [(8, Incrt().feeds), (3, 100), (2, 100), (1, 100)])
def test_the_certainty_of_noise_has_a_spread_of_one(sequences: int, feeds: int) -> None:
    """Of many scouts, each with noise of its own: after as many feeds as a birth waits for, and after many."""
    generator, layers = torch.Generator().manual_seed(0), 300
    gauge = DemandGauge(layers, 8, rotary_table(4, 8))
    for _ in range(feeds):
        feed(gauge, *torch.randn(2, layers, sequences, 6, 8, generator=generator))
    certainty = torch.tensor([reading.certainty for reading in gauge.readings()])
    assert 0.85 < float(certainty.std()) < 1.2
    assert abs(float(certainty.mean())) < 0.25


def test_the_certainty_is_the_mean_gain_over_its_standard_error() -> None:
    """Where gains are far from zero: of a weighted mean, whose variance has the squares of the weights."""
    length, width, dim, feeds = 12, 6, 4, 8
    gauge, rotary, batches = gauge_of(1, width, dim), rotary_table(dim, 16), []
    for number in range(feeds):
        x = correlated(20 + number, length, width, seed=number)
        output = (gauge.outputs.left_core @ gauge.outputs.right.mT)[0]
        written = head_output(x, gauge.looks[:, 0], output, everything(length), rotary)
        # What the scout would write is asked for, by every sequence as much.
        gradients = -written / written.norm(dim=(1, 2), keepdim=True)
        gradients -= gradients.mean((0, 1))
        batches.append(-(gradients * written).sum((1, 2)))
        feed(gauge, x[None], gradients[None])
    weights = torch.cat([TEST_MEMORY ** (feeds - 1 - i) * torch.ones_like(g) for i, g in enumerate(batches)])
    mean = (weights * torch.cat(batches)).sum() / weights.sum()
    # Not n - 1: gradients and what is read have lost their means over the sequences, both.
    variances = torch.cat([((g - g.mean()).square().sum() / (len(g) - 2)).expand_as(g) for g in batches])
    assert mean**2 > 3 * variances.mean()
    error = (weights.square() * variances).sum().sqrt() / weights.sum()
    (reading,) = gauge.readings()
    assert reading.certainty == pytest.approx(float(mean / error), rel=1e-6)


@pytest.mark.parametrize(("mean", "spread"), [(0.5, 1.0), (0.05, 1.0), (0.0, 1.0), (2.0, 0.5)])
def test_the_worth_is_half_the_squared_slope_by_the_mean_square_of_single_slopes(mean: float, spread: float) -> None:
    """A score test: for log-likelihoods the curvature is the mean square of the sequences' own slopes (Fisher)."""
    gauge = DemandGauge(1, 8, (torch.ones(4, 1, 4), torch.zeros(4, 1, 4)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        gains = mean + spread * torch.randn(1, 512, generator=generator, dtype=torch.float64)
        gauge.feeds += 1
        gauge._test(gains, gains.sum(1), torch.ones(1, dtype=torch.float64), torch.tensor(512.0, dtype=torch.float64))
    (reading,) = gauge.readings()
    assert reading.worth == pytest.approx(mean**2 / (2 * (spread**2 + mean**2)), rel=0.1, abs=5e-4)


def test_a_head_that_is_missing_is_demanded_and_found() -> None:
    """Targets from one head of rank one: the certainty is high, and the scout looks where that head looks."""
    width, dim = 16, 2
    basis, _ = torch.linalg.qr(random(width, width, seed=9))
    look, seen, read, write = basis.float()[:4]
    gauge = DemandGauge(1, width, still(dim))
    for number in range(150):
        x = random(128, 12, width, seed=number, dtype=torch.float32)
        weights = (2.5 * (x @ look)[:, :, None] * (x @ seen)[:, None, :]).softmax(-1)
        target = (weights @ (x @ read)[:, :, None]) * write
        feed(gauge, x[None], -2 * target[None])  # the gradient of a squared error where nothing is said
    (reading,) = gauge.readings()
    assert reading.certainty > 6
    query, key, value = gauge.directions(0)
    assert query.shape == key.shape == value.shape == (dim, width)
    form = query.T @ key  # by chance a share of it is about 1 / 16
    assert float(look @ form @ seen / form.norm()) > 0.7
    assert float(gauge.outputs.left[0].T.matmul(write).norm()) > 0.9
    torch.testing.assert_close(value @ value.T, torch.eye(dim), rtol=0, atol=1e-5)  # it reads along as many directions
    assert float(value.matmul(read).norm()) > 0.9


def test_a_head_that_looks_by_position_is_demanded() -> None:
    """Each token asks for what the one before it was; without positions little of that can be seen."""
    width, dim = 16, 8
    write = torch.linalg.qr(random(width, width, seed=9))[0].float()

    def slope(rotary: RotaryPair) -> float:
        gauge = DemandGauge(1, width, rotary)
        for number in range(100):
            x = random(32, 12, width, seed=number, dtype=torch.float32) + 1
            feed(gauge, x[None], -x.roll(1, 1)[None] @ write, everything(12).tril())
        return gauge.readings()[0].slope

    assert slope(rotary_table(dim, 16)) > 2 * slope(still(dim))


def test_what_the_present_heads_could_write_is_not_a_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever map of what they read is added to the gradients; the rest is what least squares leave."""
    monkeypatch.setattr(demand, "RIDGE", 1e-9)
    x, gradients, read = correlated(2, 4, 6, 8), random(2, 4, 6, 8, seed=2), random(2, 4, 6, 3, seed=5)
    written = read @ random(2, 3, 8, seed=6)[:, None]
    plain, more, without = gauge_of(2, 8, 2), gauge_of(2, 8, 2), gauge_of(2, 8, 2)
    mask, sizes = everything(6), torch.ones(2)
    for number in range(5):
        batch = x.roll(number, 1), gradients.roll(number, 1)
        own = read.roll(number, 1)
        plain.feed(*batch, mask, sizes, own)
        more.feed(batch[0], batch[1] + 7 * written.roll(number, 1), mask, sizes, own)
        known = torch.cat((own, torch.ones_like(own[..., :1])), -1).flatten(1, 2)
        flat = batch[1].flatten(1, 2)
        left = flat - known @ torch.linalg.lstsq(known, flat).solution
        without.feed(batch[0], left.view_as(batch[1]), mask, sizes)
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(more.tensors()[name], tensor, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(without.tensors()[name], tensor, rtol=1e-5, atol=1e-5)
    asked = gauge_of(2, 8, 2)
    feed(asked, x, gradients)
    assert not torch.allclose(asked.outputs.total, plain.outputs.total, rtol=0.1)


def test_layers_with_fewer_heads_have_nothing_in_the_place_of_the_others() -> None:
    one, two = random(4, 1, 6, 3, seed=1), random(4, 2, 6, 3, seed=2)
    together = side_by_side([one, two])
    assert together.shape == (2, 4, 6, 6)
    assert torch.equal(together[0, ..., :3], one[:, 0])
    assert torch.equal(together[1], torch.cat((two[:, 0], two[:, 1]), -1))
    assert not bool(together[0, ..., 3:].any())


def test_scouts_are_tested_on_one_batch_and_learn_from_another() -> None:
    """Where both are the same that is what a feed does."""
    whole, parts = gauge_of(1, 8, 2), gauge_of(1, 8, 2)
    batches = [(correlated(1, 4, 6, 8, seed=s)[:], random(1, 4, 6, 8, seed=s + 50)) for s in range(4)]
    mask, sizes = everything(6), torch.ones(1)
    for batch in batches:
        whole.feed(*batch, mask, sizes)
        before = {name: tensor.clone() for name, tensor in parts.tensors().items()}
        parts.feed(*batch, mask, sizes, learns=False)
        tested = parts.tensors()
        assert [name for name in before if not torch.equal(before[name], tested[name])] == ["sums"]
        sums = parts.sums.clone()
        parts.feed(*batch, mask, sizes, tests=False)
        assert torch.equal(parts.sums, sums)
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(parts.tensors()[name], tensor, rtol=1e-12, atol=1e-12)


def test_rows_that_are_tested_again_are_not_counted_again() -> None:
    """A scout that stays as it is finds the same on the same rows, however often: no more than they are is certain."""
    gauge, rows = gauge_of(1, 8, 2), 32
    x, mask, sizes = correlated(1, rows, 6, 8), everything(6), torch.ones(1)
    gradients = -x.mean(2, keepdim=True).expand_as(x) + random(*x.shape, seed=3)
    for _ in range(5):
        feed(gauge, x, gradients)
    gauge.sums.zero_()
    gauge.feeds.zero_()
    certain = []
    for _ in range(30):
        gauge.feed(x, gradients, mask, sizes, learns=False)
        gauge.feeds += 1
        certain.append((gauge.readings()[0].certainty, gauge.readings(rows)[0].certainty))
    assert certain[-1][0] > 4 * certain[0][0]  # as if they were new
    assert all(bounded == pytest.approx(certain[0][0], rel=1e-6) for _, bounded in certain)


def test_what_is_asked_for_of_all_tokens_alike_is_not_a_demand() -> None:
    """The same gradient everywhere is for the feed-forward or the embedding; with it or without, nothing changes."""
    x, gradients, same = correlated(1, 4, 6, 8), random(1, 4, 6, 8, seed=2), random(8, seed=3)
    plain, shifted = gauge_of(1, 8, 2), gauge_of(1, 8, 2)
    for number in range(5):
        feed(plain, x.roll(number, 1), gradients.roll(number, 1))
        feed(shifted, x.roll(number, 1), gradients.roll(number, 1) + same)
    assert shifted.readings()[0].slope == pytest.approx(plain.readings()[0].slope, rel=1e-9)


def test_the_slope_is_in_units_of_the_stream() -> None:
    """A stream, and with it all that is written, twice as large has gradients half as large: the demand is the same."""
    x, gradients = correlated(1, 4, 6, 8), random(1, 4, 6, 8, seed=2)
    one, two = gauge_of(1, 8, 2), gauge_of(1, 8, 2)
    for number in range(5):
        feed(one, x.roll(number, 1), gradients.roll(number, 1), size=3.0)
        feed(two, x.roll(number, 1), gradients.roll(number, 1) / 2, size=6.0)
    for name in ("slope", "certainty"):
        assert getattr(two.readings()[0], name) == pytest.approx(getattr(one.readings()[0], name), rel=1e-9)


def test_the_spectrum_counts_the_heads_of_a_teacher() -> None:
    """Output maps of three heads, orthogonal and of rank one: three clear directions, the rest small of either sign."""
    width, dim, heads = 12, 2, 3
    basis = torch.linalg.qr(random(width, width, seed=9))[0].float()
    gauge = DemandGauge(1, width, still(dim))
    earlier = torch.empty(0)
    for number in range(20):
        x = random(256, 8, width, seed=number, dtype=torch.float32)
        target = torch.zeros_like(x)
        for look, seen, read, write in basis.view(heads, 4, width):
            weights = (2.5 * (x @ look)[:, :, None] * (x @ seen)[:, None, :]).softmax(-1)
            target += (weights @ (x @ read)[:, :, None]) * write
        feed(gauge, x[None], -2 * target[None])
        if number == 9:
            earlier = gauge.outputs.total.clone()
    (spectrum,) = gauge.spectra(earlier, 10)
    assert min(spectrum[:heads]) > 0.3 * spectrum[0]
    assert max(map(abs, spectrum[heads:])) < 0.2 * spectrum[0]


def test_the_output_map_is_the_best_of_its_rank() -> None:
    """Of one batch again and again, with queries and keys held still: as a singular value decomposition has it."""
    x, gradients = correlated(1, 6, 7, 10), random(1, 6, 7, 10, seed=4)
    gauge = gauge_of(1, 10, 2)
    looks = gauge.looks.clone()
    for _ in range(60):
        gauge.looks = looks.clone()
        feed(gauge, x, gradients)
    read = head_output(x[0], looks[:, 0], torch.eye(10, dtype=DOUBLE), everything(7), rotary_table(2, 16))
    asked = -gradients[0].flatten(0, 1).T @ read.flatten(0, 1) / 6
    torch.testing.assert_close(gauge.outputs.total[0], (1 - MEMORY**60) * asked)
    left, values, right = torch.linalg.svd(asked)
    best = (left[:, :2] * values[:2]) @ right[:2]
    found = (gauge.outputs.left_core @ gauge.outputs.right.mT)[0]
    torch.testing.assert_close(found, best / best.norm(), rtol=0, atol=1e-3)


def test_a_state_goes_on_exactly() -> None:
    def fed(gauge: DemandGauge, feeds: range) -> DemandGauge:
        for number in feeds:
            feed(gauge, correlated(2, 6, 9, 12, seed=number), random(2, 6, 9, 12, seed=number))
        return gauge

    whole = fed(gauge_of(2, 12, 4), range(6))
    half = fed(gauge_of(2, 12, 4), range(3))
    again = gauge_of(2, 12, 4)
    again.load(half.tensors(), half.values())
    fed(again, range(3, 6))
    assert again.readings() == whole.readings()
    again.reset([1])
    whole.reset([1])
    assert fed(again, range(3)).readings() == fed(whole, range(3)).readings()


def test_a_change_in_one_layer_leaves_the_scouts_of_others() -> None:
    gauge = gauge_of(2, 12, 4)
    for number in range(4):
        feed(gauge, correlated(2, 6, 9, 12, seed=number), random(2, 6, 9, 12, seed=number))
    before = {name: value.clone() for name, value in gauge.tensors().items()}
    gauge.reset([1])
    after = gauge.tensors()
    assert [reading.feeds for reading in gauge.readings()] == [4, 0]
    assert gauge.readings()[1].certainty == gauge.readings()[1].slope == 0
    for name, axis in (
        ("sums", 1),
        ("looks", 1),
        ("moments", 2),
        ("outputs.total", 0),
        ("outputs.left", 0),
        ("outputs.core", 0),
    ):
        assert torch.equal(after[name].select(axis, 0), before[name].select(axis, 0))
        assert not torch.equal(after[name].select(axis, 1), before[name].select(axis, 1))


def test_less_may_be_asked_for_than_a_head_could_do() -> None:
    """A demand of rank one, and none at all, in float32: nothing is divided by nothing."""
    x, (write, read) = random(2, 32, 8, 16, seed=0, dtype=torch.float32), torch.eye(16)[:2]
    wanted = (x[:1] @ read)[..., None].cumsum(2) * write
    gauge = DemandGauge(2, 16, rotary_table(4, 8))
    for number in range(8):
        gradients = torch.cat((wanted, torch.zeros_like(wanted)))
        feed(gauge, x.roll(number, 1), gradients.roll(number, 1), everything(8).tril())
    assert all(bool(tensor.isfinite().all()) for tensor in gauge.tensors().values())
    for basis in (gauge.outputs.left, gauge.outputs.right):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(4).expand(2, 4, 4), rtol=0, atol=1e-3)


def test_layers_do_not_disturb_each_other() -> None:
    x, gradients = correlated(3, 5, 6, 8), random(3, 5, 6, 8, seed=2)
    together = gauge_of(3, 8, 2)
    start = {name: value.clone() for name, value in together.tensors().items()}
    for step in range(6):
        feed(together, x.roll(step, 1), gradients.roll(step, 1))
    axes = {"sums": 1, "looks": 1, "moments": 2}
    for layer in range(3):
        alone = gauge_of(1, 8, 2)
        own = {name: value.narrow(axes.get(name, 0), layer, 1) for name, value in start.items()}
        alone.load(own, alone.values())
        for step in range(6):
            part = slice(layer, layer + 1)
            feed(alone, x[part].roll(step, 1), gradients[part].roll(step, 1))
        expected = together.readings()[layer]
        assert alone.readings()[0].certainty == pytest.approx(expected.certainty, rel=1e-6)
        assert alone.readings()[0].slope == pytest.approx(expected.slope, rel=1e-6)


def test_padding_is_not_seen() -> None:
    """Sequences with padding behind them give what they give without it."""
    x, gradients = correlated(1, 4, 6, 8), random(1, 4, 6, 8, seed=2)
    short, padded = gauge_of(1, 8, 2), gauge_of(1, 8, 2)
    mask = torch.zeros(4, 9, 9, dtype=torch.bool)
    mask[:, :6, :6] = True
    for step in range(4):
        mine, theirs = (t.roll(step, 1) for t in (x, gradients))
        feed(short, mine, theirs)
        padding = random(1, 4, 3, 8, seed=11)
        # The loss does not depend on padding.
        feed(padded, torch.cat((mine, padding), 2), torch.cat((theirs, 0 * padding), 2), mask)
    assert padded.readings()[0].certainty == pytest.approx(short.readings()[0].certainty, rel=1e-9)
    torch.testing.assert_close(padded.outputs.total, short.outputs.total)
    torch.testing.assert_close(padded.looks, short.looks)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_a_few_layers_at_a_time_give_what_all_together_give(
    layers: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and never more pairs of tokens than fit, but for a single layer."""
    batch, length = 4, 6
    mask = everything(length).tril().repeat(batch, 1, 1) if masked else everything(length).tril()
    held: list[int] = []
    attend = DemandGauge._attend

    def counted(gauge: DemandGauge, x: Tensor, looks: Tensor, mask: Tensor) -> Tensor:
        held.append(len(x))
        return attend(gauge, x, looks, mask)

    monkeypatch.setattr(DemandGauge, "_attend", counted)

    def fed() -> DemandGauge:
        gauge = gauge_of(5, 8, 2)
        for number in range(3):
            x, gradients = (draw(5, batch, length, 8, seed=number) for draw in (correlated, random))
            feed(gauge, x, gradients, mask)
        return gauge

    whole = fed()
    assert held == [5] * 3
    held.clear()
    monkeypatch.setattr(demand, "PAIRS", layers * batch * length**2 - (1 if layers == 1 else 0))
    parts = fed()
    assert set(held) == {layers, *([5 % layers] if 5 % layers else [])}
    for name, tensor in whole.tensors().items():
        assert torch.equal(parts.tensors()[name], tensor), name


def test_usual_sizes_are_one_piece() -> None:
    """Twelve layers, 8 x 1024 tokens."""
    assert 12 * 8 * 1024**2 <= demand.PAIRS < 2 * 12 * 8 * 1024**2


def test_memory_does_not_depend_on_batch_or_length() -> None:
    def held(batch: int, length: int) -> int:
        gauge = DemandGauge(2, 16, rotary_table(4, 16))
        feed(gauge, random(2, batch, length, 16), random(2, batch, length, 16, seed=1))
        owners = (gauge, gauge.outputs)
        tensors = [value for owner in owners for value in vars(owner).values() if isinstance(value, Tensor)]
        return sum(tensor.numel() for tensor in tensors)

    assert held(2, 4) == held(9, 11) <= 2 * (16 * 16 + 8 * 16 * 4 + 4 * 4 + 5) + 4


def test_the_form_of_a_scout_by_its_definition() -> None:
    gauge = DemandGauge(2, 12, rotary_table(4, 8), seed=3)
    gauge.looks[:, 1] = torch.eye(12)[:, :4]  # symmetric, with four equal singular values
    for form, query, key in zip(gauge.forms(), *gauge.looks.double(), strict=True):
        matrix = query @ key.T
        squares = torch.linalg.svdvals(matrix).square()
        assert form.asymmetry == pytest.approx(float((matrix - matrix.T).norm() / (2 * matrix.norm())), abs=1e-9)
        assert form.rank == pytest.approx(float(squares.sum().square() / squares.square().sum()))
    assert (gauge.forms()[1].asymmetry, gauge.forms()[1].rank) == pytest.approx((0, 4))
