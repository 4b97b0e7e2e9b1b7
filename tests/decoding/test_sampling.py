"""How the next token is chosen: the distribution, and draws from it."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from meristem.decoding import Sampling, generate
from meristem.decoding.sampling import draw, next_probabilities
from meristem.errors import InputError
from model.helpers import lively, small_plan


def reference_probabilities(logits: Any, temperature: float, top_k: int | None, top_p: float | None) -> Any:
    """By numpy, one row at a time: keep the k likeliest, then the fewest of them that reach the mass p."""
    rows = []
    for row in logits.astype(np.float64):
        if temperature == 0:
            rows.append(np.eye(len(row))[row.argmax()])
            continue
        p = np.exp((row - row.max()) / temperature)
        order = np.argsort(-p)
        kept = order[:top_k]
        if top_p is not None:
            mass = np.cumsum(p[kept]) / p[kept].sum()
            kept = kept[: int(np.searchsorted(mass, top_p)) + 1]
        cut = np.zeros_like(p)
        cut[kept] = p[kept]
        rows.append(cut / cut.sum())
    return np.stack(rows)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0, 0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 25),
    top_p=st.none() | st.floats(0.02, 0.98),
)
def test_probabilities_are_those_of_the_reference(
    seed: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = 2 * torch.randn(3, 20, generator=torch.Generator().manual_seed(seed))
    found = next_probabilities(logits, Sampling(temperature, top_k, top_p)).numpy()
    expected = reference_probabilities(logits.numpy(), temperature, top_k, top_p)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_probabilities_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    cases: list[tuple[Sampling, list[float]]] = [
        (Sampling(), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(0), [0, 1, 0, 0]),
        (Sampling(0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(top_p=0.5), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_p=0.39), [0, 1, 0, 0]),
        (Sampling(top_p=1.0), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_k=3, top_p=0.4), [0, 1, 0, 0]),  # 0.4 of the 0.9 left is reached by the first, 0.444
    ]
    for sampling, expected in cases:
        found = next_probabilities(logits, sampling)
        torch.testing.assert_close(
            found, torch.tensor([expected], dtype=torch.float32), rtol=0, atol=1e-6, msg=str(sampling)
        )


def test_tokens_are_drawn_with_these_probabilities() -> None:
    model = lively(small_plan(vocabulary=12))
    sampling = Sampling(temperature=1.5, top_k=6, seed=4)
    drawn = [row[0] for row in generate(model, [[3, 1]] * 4000, max_tokens=1, sampling=sampling)]
    with torch.no_grad():
        probabilities = next_probabilities(model(torch.tensor([[3, 1]])).logits[:, -1], sampling)[0].numpy()
    counts = np.bincount(drawn, minlength=12)
    allowed = probabilities > 0
    assert allowed.sum() == 6
    assert not counts[~allowed].any()
    expected = probabilities[allowed].astype(np.float64)
    assert stats.chisquare(counts[allowed], 4000 * expected / expected.sum()).pvalue > 1e-4


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=5), Sampling(2.0, top_p=0.6)], ids=str)
def test_even_chances_draw_each_token_by_its_probability(sampling: Sampling) -> None:
    """So many chances at equal distances that every token has its share of them, but for one at each end."""
    count = 1 << 14
    logits = 2 * torch.randn(1, 20, generator=torch.Generator().manual_seed(1))
    chance = torch.arange(count) / count
    counts = np.bincount(draw(logits.expand(count, -1), sampling, chance), minlength=20)
    expected = reference_probabilities(logits.numpy(), sampling.temperature, sampling.top_k, sampling.top_p)[0] * count
    assert np.abs(counts - expected).max() <= 1.01
    assert not counts[expected == 0].any()


def test_the_ends_of_chance_draw_tokens_that_exist() -> None:
    """The first and the last token have no probability, and there are many: the sum of all is not quite 1."""
    logits = torch.zeros(2, 50_000)
    logits[:, [0, -1]] = -torch.inf
    chance = torch.tensor([0.0, 1 - 2**-24])
    assert draw(logits, Sampling(), chance).tolist() == [1, 49_998]


def test_the_smallest_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert next_probabilities(logits, Sampling(temperature=5e-324)).tolist() == [[0, 1, 0]]


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.5}, r"temperature = -0\.5: must be 0"),
        ({"temperature": float("nan")}, r"temperature = nan: must be 0"),
        ({"top_k": 0}, r"top_k = 0: must be at least 1"),
        ({"top_p": 0.0}, r"top_p = 0\.0: must be above 0"),
        ({"top_p": 1.5}, r"top_p = 1\.5: must be above 0 and at most 1"),
        ({"seed": -1}, r"seed = -1: must be at least 0"),
        ({"seed": 1 << 63}, r"seed = 9223372036854775808: must be at most 9,223,372,036,854,775,807"),
        ({"seed": True}, r"seed = True: must be an integer"),
    ],
)
def test_bad_sampling(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**arguments)
