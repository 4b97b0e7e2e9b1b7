"""The demand gauge against real heads, plain linear algebra and noise (incrt.md 6, oracles 17 and 20)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meristem.gauges.demand import FLOOR, DemandGauge

DOUBLE = torch.float64


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def everything(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool)


def correlated(*shape: int, seed: int = 0) -> Tensor:
    """Tokens with a mean and unequal directions."""
    width = shape[-1]
    return random(*shape, seed=seed) @ random(width, width, seed=seed + 1) / math.sqrt(width) + 0.5


@pytest.mark.parametrize("causal", [False, True])
def test_oracle_20_the_gain_is_the_slope_of_a_real_head(causal: bool) -> None:
    """The mixed second difference of a loss in output amplitude and score scale of a softmax head, at 1e-3 each."""
    batch, length, width, dim, small = 3, 7, 10, 3, 1e-3
    x, base, target = (f(batch, length, width, seed=s) for f, s in ((correlated, 0), (random, 3), (random, 4)))
    allowed = everything(length).tril() if causal else everything(length)

    def loss(y: Tensor) -> Tensor:
        """Per sequence, then averaged: not quadratic, so that it has more than a second derivative."""
        return torch.cosh(y - target).sum((1, 2)).mean()

    leaf = base.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    gauge = DemandGauge(1, width, dim, dtype=DOUBLE)
    gradients = gradient[None] * batch  # of a sequence's own loss
    gauge.feed(x[None], gradients, allowed)
    scores = (gauge.scores.left_core @ gauge.scores.right.mT)[0]
    output = (gauge.outputs.left_core @ gauge.outputs.right.mT)[0]
    gauge.feed(x[None], gradients, allowed)
    gain = float(gauge.sums[0] / gauge.sums[3])
    white = ((x[None] - gauge.mean) @ gauge.whitener[:, None])[0]

    def with_head(amplitude: float, scale: float) -> float:
        weights = (scale * white @ scores @ white.mT).masked_fill(~allowed, -math.inf).softmax(-1)
        return float(loss(base + amplitude * weights @ white @ output.T))

    corners = [(a, s, a * s) for a in (small, -small) for s in (small, -small)]
    slope = sum(math.copysign(with_head(a, s), sign) for a, s, sign in corners) / (4 * small**2)
    assert -gain == pytest.approx(slope, rel=1e-4)


def test_oracle_17_noise_is_not_a_demand() -> None:
    """Gradients that have nothing to do with the tokens: |z| < 4 in at least 95 of 100 windows."""
    gauge = DemandGauge(4, 16, 4)
    certain = 0
    for window in range(25):
        for feed in range(10):
            seed = 100 * window + feed
            x, noise = (random(4, 16, 8, 16, seed=s, dtype=torch.float32) for s in (seed, seed + 50))
            gauge.feed(x, noise, everything(8))
        certain += sum(abs(reading.certainty) >= 4 for reading in gauge.readings())
        gauge.reset()
    assert certain <= 5


def test_a_head_that_is_missing_is_demanded_and_found() -> None:
    """Targets from one head of rank one: the certainty is high, and the directions are that head's."""
    width, dim = 16, 2
    basis, _ = torch.linalg.qr(random(width, width, seed=9))
    look, seen, read, write = basis.float()[:4]
    gauge = DemandGauge(1, width, dim)
    for feed in range(20):
        x = random(128, 12, width, seed=feed, dtype=torch.float32)
        weights = (2.5 * (x @ look)[:, :, None] * (x @ seen)[:, None, :]).softmax(-1)
        target = (weights @ (x @ read)[:, :, None]) * write
        gauge.feed(x[None], -2 * target[None], everything(12))  # the gradient of a squared error where nothing is said
    (reading,) = gauge.readings()
    assert reading.certainty > 6
    query, key = gauge.directions(0)
    assert query.shape == key.shape == (dim, width)
    # What is looked for and what is read there enter alike at first order, so the keys may be any mixture of the two.
    for found, true in ((query, look[None]), (key, torch.stack((seen, read)))):
        assert float(found.norm()) == pytest.approx(math.sqrt(dim), rel=1e-4)
        assert float((true @ found[0]).norm() / found[0].norm()) > 0.7  # by chance it would be about 0.3


def test_strong_directions_are_weakened_as_a_symmetric_root_would() -> None:
    gauge = DemandGauge(2, 12, 3, dtype=DOUBLE)
    x = torch.stack((correlated(8, 9, 12, seed=0), 30 * correlated(8, 9, 12, seed=5)))
    for _ in range(3):
        gauge.feed(x, random(2, 8, 9, 12, seed=7), everything(9))
    assert gauge.covariance is not None
    for layer in range(2):
        covariance = torch.cov(x[layer].flatten(0, 1).T, correction=0)
        torch.testing.assert_close(gauge.covariance[layer], covariance)
        eye = torch.eye(12, dtype=DOUBLE)
        floored = covariance + FLOOR * covariance.diagonal().mean() * eye
        whitener = gauge.whitener[layer]
        torch.testing.assert_close(whitener.T @ floored @ whitener, eye, rtol=0, atol=1e-9)
        values, vectors = torch.linalg.eigh(floored)
        torch.testing.assert_close(
            whitener, vectors * values.rsqrt() @ vectors.T, rtol=0, atol=1e-6 * float(values[0]) ** -0.5
        )


def test_inputs_that_change_at_once_are_followed() -> None:
    """The iteration goes on from the last whitening, which may be far too large for the new inputs."""
    gauge = DemandGauge(1, 12, 3, dtype=DOUBLE)
    for feed in range(60):
        scale = 1.0 if feed < 5 else 1000.0
        gauge.feed(scale * correlated(1, 8, 9, 12, seed=feed), random(1, 8, 9, 12, seed=feed), everything(9))
        assert bool(gauge.whitener.isfinite().all())
    assert gauge.covariance is not None
    eye = torch.eye(12, dtype=DOUBLE)
    floored = gauge.covariance[0] + FLOOR * gauge.covariance[0].diagonal().mean() * eye
    torch.testing.assert_close(gauge.whitener[0].T @ floored @ gauge.whitener[0], eye, rtol=0, atol=0.05)


def test_a_state_goes_on_exactly() -> None:
    def fed(gauge: DemandGauge, feeds: range) -> DemandGauge:
        for feed in feeds:
            gauge.feed(correlated(2, 6, 9, 12, seed=feed), random(2, 6, 9, 12, seed=feed), everything(9))
        return gauge

    whole = fed(DemandGauge(2, 12, 3, dtype=DOUBLE), range(6))
    half = fed(DemandGauge(2, 12, 3, dtype=DOUBLE), range(3))
    again = DemandGauge(2, 12, 3, dtype=DOUBLE)
    again.load({name: tensor.clone() for name, tensor in half.tensors().items()}, half.values())
    fed(again, range(3, 6))
    assert again.readings() == whole.readings()
    again.reset()
    whole.reset()
    assert fed(again, range(3)).readings() == fed(whole, range(3)).readings()


def test_less_may_be_asked_for_than_a_head_could_do() -> None:
    """A demand of rank one, and none at all, in float32: nothing is divided by nothing."""
    x, (write, read) = random(2, 32, 8, 16, seed=0, dtype=torch.float32), torch.eye(16)[:2]
    wanted = (x[:1] @ read)[..., None].cumsum(2) * write
    gauge = DemandGauge(2, 16, 4)
    for feed in range(8):
        gradients = torch.cat((wanted, torch.zeros_like(wanted)))
        gauge.feed(x.roll(feed, 1), gradients.roll(feed, 1), everything(8).tril())
    assert all(bool(tensor.isfinite().all()) for tensor in gauge.tensors().values())
    for basis in (gauge.scores.left, gauge.scores.right, gauge.outputs.left, gauge.outputs.right):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(4).expand(2, 4, 4), rtol=0, atol=1e-3)


def test_layers_do_not_disturb_each_other() -> None:
    x, gradients = correlated(3, 5, 6, 8), random(3, 5, 6, 8, seed=2)
    together = DemandGauge(3, 8, 2, dtype=DOUBLE)
    for step in range(6):
        together.feed(x.roll(step, 1), gradients.roll(step, 1), everything(6))
    for layer in range(3):
        alone = DemandGauge(1, 8, 2, dtype=DOUBLE)
        for mine, theirs in ((alone.scores, together.scores), (alone.outputs, together.outputs)):
            fresh = DemandGauge(3, 8, 2, dtype=DOUBLE)
            start = fresh.scores if theirs is together.scores else fresh.outputs
            mine.left, mine.right = start.left[layer : layer + 1], start.right[layer : layer + 1]
        for step in range(6):
            part = slice(layer, layer + 1)
            alone.feed(x[part].roll(step, 1), gradients[part].roll(step, 1), everything(6))
        expected = together.readings()[layer]
        assert alone.readings()[0].certainty == pytest.approx(expected.certainty, rel=1e-6)
        assert alone.readings()[0].slope == pytest.approx(expected.slope, rel=1e-6)


def test_padding_is_not_seen() -> None:
    """Sequences with padding behind them give what they give without it."""
    x, gradients = correlated(1, 4, 6, 8), random(1, 4, 6, 8, seed=2)
    short, padded = (DemandGauge(1, 8, 2, dtype=DOUBLE) for _ in range(2))
    allowed = torch.zeros(4, 9, 9, dtype=torch.bool)
    allowed[:, :6, :6] = True
    for step in range(4):
        mine, theirs = (t.roll(step, 1) for t in (x, gradients))
        short.feed(mine, theirs, everything(6))
        padding = random(1, 4, 3, 8, seed=11)
        # The loss does not depend on padding.
        padded.feed(torch.cat((mine, padding), 2), torch.cat((theirs, 0 * padding), 2), allowed)
    assert padded.readings()[0].certainty == pytest.approx(short.readings()[0].certainty, rel=1e-9)
    torch.testing.assert_close(padded.scores.total, short.scores.total)


def test_memory_does_not_depend_on_batch_or_length() -> None:
    def held(batch: int, length: int) -> int:
        gauge = DemandGauge(2, 16, 4)
        gauge.feed(random(2, batch, length, 16), random(2, batch, length, 16, seed=1), everything(length))
        lows = (gauge.scores, gauge.outputs)
        tensors = [value for owner in (gauge, *lows) for value in vars(owner).values() if isinstance(value, Tensor)]
        return sum(tensor.numel() for tensor in tensors)

    assert held(2, 4) == held(9, 11) <= 2 * (4 * 16 * 16 + 4 * 16 * 4 + 2 * 4 * 4 + 16 + 4)
