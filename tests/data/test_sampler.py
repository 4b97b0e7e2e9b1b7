from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meristem.data import RowSampler, Sampler, TokenStream, batch, evaluation_windows, padded_length
from meristem.data.sampler import permuted
from meristem.errors import InputError


def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    positions = np.arange(size, dtype=np.uint64)
    return [int(image) for image in permuted(positions, size, seed, np.full_like(positions, epoch))]


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 10**9))
def test_an_epoch_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(size, seed, epoch)) == list(range(size))


def test_large_domains() -> None:
    size = 10**11 + 3
    positions = np.arange(0, size, size // 1000, dtype=np.uint64)
    images = permuted(positions, size, 5, np.zeros_like(positions))
    assert len(np.unique(images)) == len(positions)
    assert images.max() < size
    assert abs(images.mean() / size - 0.5) < 0.05


def test_the_order_never_changes() -> None:
    assert epoch_order(10, 0, 0) == [0, 4, 5, 8, 6, 7, 3, 2, 9, 1]
    assert epoch_order(10, 0, 1) == [6, 4, 7, 8, 9, 2, 0, 1, 5, 3]
    assert epoch_order(10, 1, 0) == [8, 9, 0, 1, 4, 5, 6, 7, 3, 2]
    sampler = Sampler(tokens=100_001, context=100, batch_size=8, seed=1234)
    assert sampler.starts(0).tolist() == [41900, 55800, 43600, 9900, 7100, 17800, 45100, 9300]
    assert sampler.starts(125).tolist() == [68800, 49200, 56700, 71300, 30300, 94900, 69800, 43100]


def test_every_place_is_equally_likely() -> None:
    epochs = np.arange(20_000, dtype=np.uint64)
    for size in (2, 3, 7, 10):
        counts = np.bincount(permuted(np.zeros_like(epochs), size, 7, epochs).astype(int), minlength=size)
        expected = len(epochs) / size
        assert ((counts - expected) ** 2 / expected).sum() < 30


@given(st.integers(9, 500), st.integers(0, 200), st.sampled_from([1, 2, 4]))
def test_ranks_together_are_the_global_batch(tokens: int, step: int, world: int) -> None:
    sampler = Sampler(tokens=tokens, context=8, batch_size=12, seed=3)
    whole = sampler.starts(step)
    shares = [sampler.starts(step, rank, world) for rank in range(world)]
    assert np.concatenate(shares).tolist() == whole.tolist()
    assert whole.max() + 9 <= tokens


def test_steps_in_any_order_visit_each_window_once_an_epoch() -> None:
    sampler = Sampler(tokens=10 * 21 + 1, context=10, batch_size=6, seed=0)
    steps = {step: sampler.starts(step).tolist() for step in reversed(range(7))}
    in_order = [start for step in range(7) for start in steps[step]]
    first, second = in_order[:21], in_order[21:42]
    assert sorted(first) == sorted(second) == list(range(0, 210, 10))
    assert first != second


def test_seeds_differ() -> None:
    assert Sampler(10_001, 10, 32, 0).starts(0).tolist() != Sampler(10_001, 10, 32, 1).starts(0).tolist()


def test_targets_follow_inputs() -> None:
    stream = TokenStream([np.arange(40, dtype=np.uint16), np.arange(40, 101, dtype=np.uint16)])
    sampler = Sampler(tokens=len(stream), context=10, batch_size=4, seed=0)
    inputs, targets = batch(stream, sampler, 1, rank=1, world=2)
    assert inputs.shape == targets.shape == (2, 10)
    assert inputs.dtype == targets.dtype == np.int64
    assert (targets == inputs + 1).all()
    assert inputs[:, 0].tolist() == sampler.starts(1)[2:].tolist()


def test_evaluation_windows_are_the_first() -> None:
    assert evaluation_windows(101, 10, 3).tolist() == [0, 10, 20]
    assert evaluation_windows(100, 10, 99).tolist() == list(range(0, 90, 10))
    assert evaluation_windows(11, 10, 99).tolist() == [0]
    for tokens in (0, 1, 10):
        assert evaluation_windows(tokens, 10, 99).shape == (0,)


def test_bad_requests_are_explained() -> None:
    sampler = Sampler(1001, 10, 6, 0)
    with pytest.raises(InputError, match=r"world = 4.*divide the batch size 6"):
        sampler.starts(0, 0, 4)
    with pytest.raises(InputError, match=r"rank = 2.*0\.\.1"):
        sampler.starts(0, 2, 2)
    with pytest.raises(InputError, match="step"):
        sampler.starts(-1)
    for tokens in (0, 10):
        with pytest.raises(InputError, match=f"training tokens = {tokens}: a context of 10 needs at least 11 tokens"):
            Sampler(tokens, 10, 1, 0)
    with pytest.raises(InputError, match="limit = 0"):
        evaluation_windows(100, 10, 0)
    with pytest.raises(InputError, match="context = 0"):
        evaluation_windows(100, 0, 1)


# --- labelled rows ----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 40), batch_size=st.integers(1, 12), seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_every_epoch_has_every_row_once(count: int, batch_size: int, seed: int, epoch: int) -> None:
    sampler = RowSampler(count, batch_size, seed)
    stream = np.concatenate([sampler.rows(step) for step in range((epoch + 1) * count // batch_size + 1)])
    assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_ranks_share_a_batch_of_rows(world: int) -> None:
    sampler = RowSampler(17, 6, 3)
    for step in (0, 5, 1000):
        shares = [sampler.rows(step, rank, world) for rank in range(world)]
        assert np.concatenate(shares).tolist() == sampler.rows(step).tolist()


def test_row_samplers_refuse_what_cannot_be() -> None:
    with pytest.raises(InputError, match="training rows = 0"):
        RowSampler(0, 1, 0)
    with pytest.raises(InputError, match="batch_size = 0"):
        RowSampler(1, 0, 0)
    with pytest.raises(InputError, match="world = 4"):
        RowSampler(9, 6, 0).rows(0, 0, 4)


@pytest.mark.parametrize(("lengths", "length"), [([1], 16), ([16, 3], 16), ([17], 32), ([60, 2], 50)])
def test_padded_lengths_are_multiples_up_to_the_context(lengths: list[int], length: int) -> None:
    assert padded_length(np.array(lengths), 50) == length


def test_a_part_and_the_rest_share_nothing_and_are_all() -> None:
    """Held back are rows from everywhere; without a part the order is what it always was."""
    held, rest = (RowSampler(90, 10, 4, part) for part in (range(20), range(20, 90)))
    mine = {int(row) for step in range(2) for row in held.rows(step)}
    others = {int(row) for step in range(7) for row in rest.rows(step)}
    assert (len(mine), len(others), mine | others) == (20, 70, set(range(90)))
    assert len({row // 30 for row in mine}) == 3
    assert {int(row) for step in range(2, 4) for row in held.rows(step)} == mine  # in turn, in another order
    assert held.rows(0).tolist() != held.rows(2).tolist()
    assert RowSampler(90, 10, 4).rows(3).tolist() != RowSampler(90, 10, 4, range(90)).rows(3).tolist()
    parts = [Sampler(901, 10, 10, 4, part) for part in (range(20), range(20, 90))]
    starts = [{int(start) for step in range(7) for start in sampler.starts(step)} for sampler in parts]
    assert (len(starts[0]), len(starts[1])) == (20, 70)
    assert starts[0] | starts[1] == set(range(0, 900, 10))


def test_ranks_share_a_batch_of_a_part() -> None:
    sampler = RowSampler(50, 12, 1, range(10, 50))
    shares = [sampler.rows(5, rank, 3).tolist() for rank in range(3)]
    assert [row for share in shares for row in share] == sampler.rows(5).tolist()
