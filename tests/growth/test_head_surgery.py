"""Heads on their own: what a newborn looks for, how few a layer can have, and what becomes of its loop."""

from __future__ import annotations

import math

import pytest
import torch

from meristem import InputError, LayerPlan
from meristem.growth.head_surgery import fewest_heads, newborn_head, with_head, without_head
from meristem.plan import Loop


@pytest.mark.parametrize("shared", [False, True])
def test_a_newborn_looks_and_reads_as_its_scout_does(shared: bool) -> None:
    """Without a scout all is chance; in either case its values are small, and it writes nothing."""
    width, dim = 64, 16
    layer = LayerPlan(2, dim, 1 if shared else 2)
    query, key, value = torch.randn(3, dim, width, generator=torch.Generator().manual_seed(1))
    asked = newborn_head(layer, width, (query, key, value), 3)
    chance, again, other = (newborn_head(layer, width, None, seed) for seed in (3, 3, 4))
    assert torch.equal(asked.query, query)
    if shared:
        assert asked.key is asked.value is chance.key is chance.value is None
    else:
        assert torch.equal(asked.key, key)  # type: ignore[arg-type]
        torch.testing.assert_close(asked.value, 0.05 * value)
        assert float(chance.value.std()) == pytest.approx(0.05 / math.sqrt(width), rel=0.1)  # type: ignore[union-attr]
    assert torch.equal(chance.query, again.query)
    assert abs(float(torch.cosine_similarity(chance.query.flatten(), other.query.flatten(), dim=0))) < 0.1
    assert float(chance.query.std()) == pytest.approx(1 / math.sqrt(width), rel=0.1)
    assert not bool(asked.out.any())
    assert not bool(chance.out.any())


def test_two_heads_that_share_keys_and_values_are_the_fewest() -> None:
    kinds = LayerPlan(1, 6, 1), LayerPlan(3, 6, 3), LayerPlan(2, 6, 1), LayerPlan(3, 6, 1)
    assert [fewest_heads(layer) for layer in kinds] == [1, 1, 2, 2]


def test_a_loop_follows_its_heads() -> None:
    layer = LayerPlan(4, 6, 4, Loop((1, 3), 2))
    assert with_head(layer) == LayerPlan(5, 6, 5, Loop((1, 3), 2))
    assert without_head(layer, 0) == LayerPlan(3, 6, 3, Loop((0, 2), 2))
    assert without_head(layer, 2) == LayerPlan(3, 6, 3, Loop((1, 2), 2))


def test_a_looped_head_leaves_with_its_loop_only() -> None:
    layer = LayerPlan(4, 6, 4, Loop((1, 3), 2))
    with pytest.raises(InputError, match=r"head = 3: is one of the looped ones, \[1, 3\]; it leaves with its loop"):
        without_head(layer, 3)
    assert without_head(layer, 3, with_loop=True) == LayerPlan(3, 6, 3, Loop((1,), 2))
    assert without_head(LayerPlan(2, 6, 2, Loop((1,), 2)), 1, with_loop=True) == LayerPlan(1, 6, 1)


def test_a_loop_ends_with_the_last_head_that_was_to_stay_in_it() -> None:
    fading = LayerPlan(3, 6, 3, Loop((0, 1, 2), 1, fading=(0, 2)))
    assert without_head(fading, 1, with_loop=True) == LayerPlan(2, 6, 2)
    assert without_head(fading, 0, with_loop=True) == LayerPlan(2, 6, 2, Loop((0, 1), 1, fading=(1,)))


def test_a_layer_has_no_more_heads_than_its_ceiling() -> None:
    with pytest.raises(InputError, match=r"heads = 3: is the layer's ceiling: it may have no more"):
        with_head(LayerPlan(3, 6, 3, ceiling=3))
    assert with_head(LayerPlan(2, 6, 2, ceiling=3)).heads == 3
