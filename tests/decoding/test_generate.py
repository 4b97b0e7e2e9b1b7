"""Generation: greedy and sampled, ragged batches, ends, bounds and errors."""

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

from meristem.decoding import Sampling, generate, stream
from meristem.decoding.sampling import next_probabilities
from meristem.errors import InputError
from meristem.model import Decoder
from model.helpers import ARMS, SCHEDULES, lively, needs_gpu, plans, small_plan

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 17, 3, 60], [44], [9, 9, 2, 31, 7, 8, 50], [1, 2]]


@torch.no_grad()
def repeated_argmax(model: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kv_group", [1, 2])
def test_greedy_is_the_argmax_of_the_whole_sequence(schedule: str, kv_group: int) -> None:
    model = lively(small_plan(schedule, kv_group=kv_group))
    for prompt in PROMPTS:
        found = generate(model, [prompt], max_tokens=12, sampling=GREEDY)
        assert found == [repeated_argmax(model, prompt, 12)]


@pytest.mark.parametrize("schedule", ARMS)
def test_prompts_of_different_lengths_share_a_batch(schedule: str) -> None:
    """In float64, so that the other kernel behind a mask cannot tip a near tie."""
    model = lively(small_plan(schedule, kv_group=2), torch.float64)
    alone = [generate(model, [prompt], max_tokens=15, sampling=GREEDY)[0] for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_tokens=15, sampling=GREEDY) == alone
    assert len({tuple(continuation) for continuation in alone}) == len(PROMPTS)


@settings(max_examples=20, deadline=None)
@given(plan=plans(min_context=8), data=st.data())
def test_any_plan_and_any_prompts_in_a_batch(plan: Any, data: st.DataObject) -> None:
    model = lively(plan, torch.float64)
    prompt = st.lists(st.integers(0, plan.vocabulary - 1), min_size=1, max_size=5)
    prompts = data.draw(st.lists(prompt, min_size=1, max_size=4))
    expected = [repeated_argmax(model, p, 4) for p in prompts]
    assert generate(model, prompts, max_tokens=4, sampling=GREEDY) == expected


def test_the_whole_context_can_be_used() -> None:
    """The last token drawn is not fed back, so one more than the context can hold exists in all."""
    model = lively(small_plan(context=8))
    assert generate(model, [[1, 2, 3]], max_tokens=6, sampling=GREEDY) == [repeated_argmax(model, [1, 2, 3], 6)]
    assert len(generate(model, [list(range(8))], max_tokens=1)[0]) == 1


def test_generation_stops_at_end_of_text() -> None:
    model = lively(small_plan(), torch.float64)
    free = generate(model, PROMPTS, max_tokens=15, sampling=GREEDY)
    end = free[0][6]
    cut = [row[: row.index(end)] if end in row else row for row in free]
    assert {len(row) for row in cut} != {15}
    assert generate(model, PROMPTS, max_tokens=15, sampling=GREEDY, end_of_text=end) == cut


def test_stream_ends_with_the_last_prompt() -> None:
    model = lively(small_plan())
    free = list(stream(model, [[5, 17]], max_tokens=10, sampling=GREEDY))
    assert len(free) == 10
    (end,) = free[4]
    assert end is not None
    first = free.index([end])
    assert list(stream(model, [[5, 17]], max_tokens=10, sampling=GREEDY, end_of_text=end)) == free[:first]


def test_stream_marks_ended_prompts() -> None:
    model = lively(small_plan(), torch.float64)
    free = list(stream(model, PROMPTS, max_tokens=15, sampling=GREEDY))
    end = free[2][1]
    steps = list(stream(model, PROMPTS, max_tokens=15, sampling=GREEDY, end_of_text=end))
    for row in range(len(PROMPTS)):
        column = [step[row] for step in free]
        stop = column.index(end) if end in column else 15
        assert [step[row] for step in steps] == (column[:stop] + [None] * 15)[: len(steps)]


def test_padding_ids_are_never_drawn() -> None:
    """Without the bound the model does draw them."""
    model = lively(small_plan())
    sampling = Sampling(temperature=5, seed=3)
    free = generate(model, PROMPTS, max_tokens=20, sampling=sampling)
    bounded = generate(model, PROMPTS, max_tokens=20, sampling=sampling, vocabulary=10)
    assert max(map(max, free)) >= 10
    assert max(map(max, bounded)) < 10
    assert len({token for row in bounded for token in row}) > 5


def test_seeds() -> None:
    model = lively(small_plan())
    first, again, other = (generate(model, PROMPTS, max_tokens=20, sampling=Sampling(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_largest_seed_is_taken() -> None:
    generate(lively(small_plan()), PROMPTS, max_tokens=1, sampling=Sampling(seed=(1 << 63) - 1))


def test_generation_leaves_no_gradient_and_does_not_change_the_model() -> None:
    model = lively(small_plan())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generate(model, PROMPTS, max_tokens=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_generation_under_autocast() -> None:
    """The cache takes the dtype of the products; most greedy tokens survive the rounding."""
    model = Decoder(small_plan())
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(model, PROMPTS, max_tokens=5, sampling=GREEDY)
    expected = generate(model, PROMPTS, max_tokens=5, sampling=GREEDY)
    assert found[0][0] == expected[0][0]
    assert [len(row) for row in found] == [5] * len(PROMPTS)


# --- the distribution -------------------------------------------------------------------------------------


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


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.5}, r"temperature = -0\.5: must be 0"),
        ({"temperature": float("nan")}, r"temperature = nan: must be 0"),
        ({"top_k": 0}, r"top_k = 0: must be at least 1"),
        ({"top_p": 0.0}, r"top_p = 0\.0: must be above 0"),
        ({"top_p": 1.5}, r"top_p = 1\.5: must be above 0 and at most 1"),
        ({"seed": -1}, r"seed = -1: must be in 0\.\.2\^63 - 1"),
        ({"seed": 1 << 63}, r"seed = 9223372036854775808: must be in"),
    ],
)
def test_bad_sampling(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**arguments)


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        ([], 1, r"prompts = \[\]: must be one or more"),
        ([[1], []], 1, r"prompts = \[\[1\], \[\]\]: .* at least one token"),
        ([[1]], 0, r"max_tokens = 0: must be at least 1"),
        ([[1, 2, 3], [1]], 7, r"max_tokens = 7: must be at most 6: context 8, prompt 3"),
        ([[0] * 9], 1, r"prompts = 9: tokens are too many for a context of 8"),
    ],
)
def test_bad_requests(prompts: list[list[int]], max_tokens: int, message: str) -> None:
    model = Decoder(small_plan(context=8))
    with pytest.raises(InputError, match=message):
        generate(model, prompts, max_tokens=max_tokens)
    with pytest.raises(InputError, match=message):
        stream(model, prompts, max_tokens=max_tokens)  # at once, before a token is asked for


@needs_gpu
@pytest.mark.gpu
def test_generation_on_the_gpu() -> None:
    model = lively(small_plan(kv_group=2), torch.float64)
    expected = generate(model, PROMPTS, max_tokens=15, sampling=GREEDY)
    assert generate(model.cuda(), PROMPTS, max_tokens=15, sampling=GREEDY) == expected
