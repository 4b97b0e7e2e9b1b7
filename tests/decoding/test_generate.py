"""Generation: greedy and sampled, ragged batches, ends, bounds and errors."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meristem.decoding import Sampling, generate, stream
from meristem.errors import InputError, RunError
from meristem.growth.apply import apply_edit
from meristem.growth.edits import RemoveHead
from meristem.model import Decoder
from model.helpers import ARMS, SCHEDULES, grown_plans, lively, plans, random_tokens, small_plan
from model.test_llama import llama, uniform_plan

from .helpers import KINDS, PROMPTS, model_of, repeated_argmax

GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_that_of_the_plain_path(kind: str) -> None:
    """Token by token in float32: alone, and beside longer and shorter prompts."""
    model = model_of(kind)
    expected = [repeated_argmax(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_tokens=20, sampling=GREEDY) == expected
    assert [generate(model, [prompt], max_tokens=20, sampling=GREEDY)[0] for prompt in PROMPTS] == expected
    assert len({token for row in expected for token in row}) > 10


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


@settings(max_examples=20, deadline=None)
@given(plan=grown_plans(min_context=8), data=st.data())
def test_any_grown_plan_and_any_prompts_in_a_batch(plan: Any, data: st.DataObject) -> None:
    model = lively(plan, torch.float64)
    prompt = st.lists(st.integers(0, plan.vocabulary - 1), min_size=1, max_size=5)
    prompts = data.draw(st.lists(prompt, min_size=1, max_size=4))
    expected = [repeated_argmax(model, p, 4) for p in prompts]
    assert generate(model, prompts, max_tokens=4, sampling=GREEDY) == expected


@pytest.mark.parametrize("kv_group", [1, 2])
def test_greedy_is_that_of_transformers(kv_group: int) -> None:
    plan = uniform_plan(kv_group)
    model = lively(plan)
    tokens = random_tokens(plan, batch=3, length=7)
    found = llama(model).generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=30, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert generate(model, tokens.tolist(), max_tokens=30, sampling=GREEDY) == found[:, 7:].tolist()


def test_a_model_that_has_changed_is_decoded_as_it_is_now() -> None:
    model = model_of("gated loops")
    before = generate(model, PROMPTS, max_tokens=8, sampling=GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
        assert model.gate_ramp is not None
        model.gate_ramp.mul_(3)
    expected = [repeated_argmax(model, prompt, 8) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_tokens=8, sampling=GREEDY) == expected != before
    apply_edit(model, None, RemoveHead(5, 3))
    expected = [repeated_argmax(model, prompt, 8) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_tokens=8, sampling=GREEDY) == expected


def test_streams_do_not_disturb_each_other() -> None:
    model = model_of("loops")
    expected = [generate(model, [prompt], max_tokens=9, sampling=GREEDY)[0] for prompt in PROMPTS[:2]]
    both = zip(*(stream(model, [prompt], max_tokens=9, sampling=GREEDY) for prompt in PROMPTS[:2]), strict=True)
    assert [list(column) for column in zip(*[[a[0], b[0]] for a, b in both], strict=True)] == expected


def test_training_goes_on_within_an_autocast_that_has_generated() -> None:
    """What is made for decoding, without a gradient, is not what the next forward finds in the cache of autocast."""
    model = Decoder(small_plan())
    windows = random_tokens(model.plan)
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, PROMPTS, max_tokens=3)
        loss = model(windows[:, :-1], windows[:, 1:]).loss
    assert loss is not None
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_nothing_outside_is_changed_between_two_tokens() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in stream(lively(small_plan()), [[1, 2]], max_tokens=3):
            assert not torch.is_inference_mode_enabled()
            assert torch.is_grad_enabled()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_small_products_run_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And large ones on all; which of them are large depends on the number of texts too."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    model = lively(small_plan())
    generate(model, [[1, 2]], max_tokens=2)
    assert asked == [1, torch.get_num_threads()]
    asked.clear()
    generate(model, [[1, 2]] * 300, max_tokens=2)
    assert asked == []


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


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_p=0.9)], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_token_is_drawn_from_what_is_no_number(sampling: Sampling, value: float) -> None:
    model = lively(small_plan())
    with torch.no_grad():
        model.norm.weight.fill_(value)
    with pytest.raises(RunError, match="logits are not numbers"):
        generate(model, PROMPTS, max_tokens=3, sampling=sampling)


def test_seeds() -> None:
    model = lively(small_plan())
    first, again, other = (generate(model, PROMPTS, max_tokens=20, sampling=Sampling(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_seed_gives_the_same_text_however_long() -> None:
    model = lively(small_plan())
    long, short = (generate(model, PROMPTS, max_tokens=count, sampling=Sampling(seed=3)) for count in (20, 5))
    assert [row[:5] for row in long] == short


def test_the_largest_seed_is_taken() -> None:
    model, largest = lively(small_plan()), (1 << 63) - 1
    seeds = (largest, largest, largest - 1)
    last, again, other = (generate(model, PROMPTS, max_tokens=20, sampling=Sampling(seed=seed)) for seed in seeds)
    assert last == again != other
    assert all(len(row) == 20 for row in last)
    with pytest.raises(InputError, match=f"seed = {largest + 1}: must be at most"):
        Sampling(seed=largest + 1)


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


# --- errors -----------------------------------------------------------------------------------------------


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
