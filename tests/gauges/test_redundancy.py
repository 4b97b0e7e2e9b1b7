"""What the other heads of a layer can stand in for, against plain least squares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meristem.gauges.redundancy import HeadMoments, second_moments

DOUBLE = torch.float64


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def moments(outputs: Tensor) -> HeadMoments:
    gram, count = second_moments(outputs, torch.ones(outputs.shape[0], outputs.shape[2], dtype=torch.bool))
    return HeadMoments(gram / count, outputs.shape[3])


def written(outputs: Tensor, out: Tensor) -> Tensor:
    return outputs.transpose(1, 2).flatten(2) @ out.T


@settings(max_examples=20, deadline=None)
@given(heads=st.integers(2, 5), dim=st.integers(1, 4), seed=st.integers(0, 99))
def test_shares_and_folding_are_those_of_least_squares(heads: int, dim: int, seed: int) -> None:
    """The others' best attempt at a head's output, by lstsq on the tokens themselves."""
    outputs, out = random(40, heads, 3, dim, seed=seed), random(6, heads * dim, seed=seed + 1)
    total = written(outputs, out).square().sum()
    shares = moments(outputs).shares(out)
    for head in range(heads):
        flat = outputs.transpose(1, 2).flatten(0, 1)  # (tokens, heads, dim)
        others = torch.cat((flat[:, :head], flat[:, head + 1 :]), 1).flatten(1)
        own = flat[:, head] @ out[:, head * dim : (head + 1) * dim].T
        rest = own - others @ torch.linalg.lstsq(others, own).solution
        assert float(shares[head]) == pytest.approx(float(rest.square().sum() / total), rel=1e-3, abs=1e-9)
        folded = moments(outputs).folded(out, head)
        assert not folded[:, head * dim : (head + 1) * dim].any()
        change = written(outputs, out) - written(outputs, folded)
        torch.testing.assert_close(change.flatten(0, 1), rest, rtol=0, atol=1e-4 * float(own.abs().max()))


def test_padding_is_not_counted() -> None:
    outputs = random(5, 2, 7, 3, seed=0)
    real = torch.arange(7) < torch.tensor([7, 3, 1, 5, 2])[:, None]
    gram, count = second_moments(outputs, real)
    assert int(count) == 18
    torch.testing.assert_close(gram, second_moments(torch.where(real[:, None, :, None], outputs, 9.0), real)[0])


def test_incrt_oracle_15_a_duplicate_leaves_without_a_trace() -> None:
    """Two heads that read the same, in float32: the one that stays takes over the other's part."""
    outputs = random(64, 3, 10, 4, seed=1).float()
    outputs[:, 2] = outputs[:, 0]
    out = random(16, 12, seed=2).float()
    measured = moments(outputs)
    assert float(measured.shares(out)[2]) < 1e-5
    before, after = written(outputs, out), written(outputs, measured.folded(out, 2))
    assert float((before - after).norm() / before.norm()) < 1e-4


def test_a_layer_that_reads_nothing_has_no_redundant_numbers_to_trip_over() -> None:
    shares = moments(torch.zeros(4, 2, 3, 2)).shares(torch.zeros(5, 4))
    assert bool(shares.isfinite().all())


def test_heads_that_leave_together_are_folded_like_one_after_the_other() -> None:
    outputs, out = random(50, 5, 3, 2, seed=4), random(6, 10, seed=5)
    known = moments(outputs)
    together = known.folded(out, 1, 2)
    flat = outputs.transpose(1, 2).flatten(0, 1)
    others = torch.cat((flat[:, :1], flat[:, 3:]), 1).flatten(1)
    own = flat[:, 1:3].flatten(1) @ out[:, 2:6].T
    fit = torch.linalg.lstsq(others, own).solution.T
    assert together[:, 2:6].eq(0).all()
    torch.testing.assert_close(torch.cat((together[:, :2], together[:, 6:]), 1) - out[:, [0, 1, 6, 7, 8, 9]], fit,
                               rtol=1e-4, atol=1e-4)  # fmt: skip
    once = known.folded(out, 1)
    stays = [0, 1, 4, 5, 6, 7, 8, 9]
    twice = known.without(1).folded(once[:, stays], 1)
    torch.testing.assert_close(twice, together[:, stays], rtol=1e-4, atol=1e-4)
