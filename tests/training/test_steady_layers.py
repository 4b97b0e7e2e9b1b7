"""The layers that SGT would select from entropies that never change."""

from __future__ import annotations

import math
from typing import Any

import pytest

from growth.helpers import decisions, listed, spread
from meristem.errors import InputError
from meristem.growth import Sgt
from meristem.training.growth_from_config import steady_layers

TWELVE = [4] * 12


def vector_policy(**changes: Any) -> Sgt:
    return Sgt(**{"total_steps": 5000, "start": 250, "window": 250, **changes})


@pytest.mark.parametrize(
    ("levels", "changes", "expected"),
    [
        (listed(10, 7, 4), {}, (10, 7, 4)),
        (listed(10, 7, 4), {"passes": 3}, (10, 7, 4)),
        (listed(10, 7, 4), {"order": "shallow_first"}, (4, 7, 10)),
        (listed(10, 7, 4), {"max_layers": 2}, (10, 7)),
        (listed(10, 7, 4), {"excluded": (0, 10)}, (11, 7, 4)),  # the rest is alike, and ties go deep
        ({0: 0.99, 2: 0.9, 6: 0.8, 1: 0.7}, {}, (6, 2, 1)),
    ],
)
def test_steady_layers_are_those_that_would_grow(
    levels: dict[int, float], changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    policy, entropies = vector_policy(**changes), spread(levels, TWELVE)
    assert steady_layers(entropies, policy) == expected
    grown = decisions(policy, lambda done: entropies)[-1][1].grown
    assert tuple(g.layer for g in grown) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_layers_are_not_chosen_by_entropies_that_are_not_finite(bad: float) -> None:
    """A growing run would wait for the next window, but these never change."""
    entropies = spread(listed(10, 7, 4), TWELVE)
    entropies[2][1] = bad
    with pytest.raises(InputError, match=r"entropies = .*: must be finite"):
        steady_layers(entropies, vector_policy())
