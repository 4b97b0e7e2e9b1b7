"""Text generation: greedy or sampled, many prompts at once, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral

import torch

from meristem.decoding.recording import decoding_of
from meristem.decoding.sampling import Sampling
from meristem.errors import InputError, RunError
from meristem.limits import check_integer
from meristem.model.decoder import Decoder
from meristem.model.operators import product_dtype


def room(model: Decoder, prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens fit after the longest prompt: the last one drawn is not fed back."""
    if not _is_list(prompts) or not all(_is_list(prompt) for prompt in prompts):
        raise InputError("prompts", prompts, "must be one or more prompts, each a list of at least one token id")
    longest, context = max(map(len, prompts)), model.plan.context
    if longest > context:
        raise InputError("prompts", longest, f"tokens are too many for a context of {context}; shorten the prompt")
    return context + 1 - longest


def _is_list(value: object) -> bool:
    """Whether there is something in it, in order; a text is none of token ids."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) > 0


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  (immutable)
    end_of_text: int | None = None,
    vocabulary: int | None = None,
) -> Iterator[list[int | None]]:
    """Yield, for each new position, the next token of every prompt; None for prompts that have ended.

    `vocabulary` is the number of ids that mean something: the padding ids above it are never drawn. A bad request is
    refused at once, not when the first token is asked for. The model must stay as it is until the last one: some of its
    weights are read as they are at each step, others are copies from the beginning.

    >>> for ids in stream(model, [[1, 2, 3], [4]], max_tokens=2, sampling=Sampling(temperature=0)):
    ...     print(len(ids), "tokens, one for each prompt")
    2 tokens, one for each prompt
    2 tokens, one for each prompt
    """
    capacity = _check(model, prompts, max_tokens, sampling, vocabulary)
    dtype = product_dtype(model.embedding.weight)
    return _steps(model, prompts, capacity, max_tokens, sampling, end_of_text, vocabulary, dtype)


@torch.inference_mode()
def _steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    capacity: int,
    max_tokens: int,
    sampling: Sampling,
    end_of_text: int | None,
    vocabulary: int | None,
    dtype: torch.dtype,
) -> Iterator[list[int | None]]:
    ended = [False] * len(prompts)
    with decoding_of(model, dtype, len(prompts), capacity, replace(sampling, seed=0), vocabulary) as decoding:
        decoding.prefill(model, prompts, sampling.seed, max_tokens)
        for chosen in decoding.draws(max_tokens):
            if max(chosen) >= (vocabulary or model.plan.vocabulary):
                raise RunError("the model's logits are not numbers, so no token can be drawn: its weights diverged")
            ended = [e or t == end_of_text for e, t in zip(ended, chosen, strict=True)]
            if all(ended):
                return
            yield [None if e else t for e, t in zip(ended, chosen, strict=True)]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  (immutable)
    end_of_text: int | None = None,
    vocabulary: int | None = None,
) -> list[list[int]]:
    """The continuation of every prompt, without the prompt and without the end-of-text token.

    Prompts are lists of ids, of any lengths; each continuation is a list of `max_tokens` ids at most. `sampling` and
    `vocabulary` are as in `stream`.

    >>> model = Decoder(Plan.uniform(layers=2, width=32, heads=4, vocabulary=100, context=16))
    >>> greedy = Sampling(temperature=0)
    >>> [len(ids) for ids in generate(model, [[1, 2, 3], [4]], max_tokens=5, sampling=greedy)]
    [5, 5]
    """
    steps = stream(
        model,
        prompts,
        max_tokens=max_tokens,
        sampling=sampling,
        end_of_text=end_of_text,
        vocabulary=vocabulary,
    )
    continuations: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        for continuation, token in zip(continuations, step, strict=True):
            if token is not None:
                continuation.append(token)
    return continuations


def _is_id(value: object, ids: int) -> bool:
    return isinstance(value, Integral) and 0 <= int(value) < ids


def _check(
    model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling, vocabulary: int | None
) -> int:
    """The cache capacity needed, or an error that says what is wrong with the request."""
    if not isinstance(model, Decoder):
        raise InputError("model", type(model).__name__, "must be a Decoder: only a language model continues a text")
    if not isinstance(sampling, Sampling):
        raise InputError("sampling", sampling, "must be a Sampling, such as Sampling(temperature=0.8)")
    check_integer("max_tokens", max_tokens, 1)
    most = room(model, prompts)
    ids = model.plan.vocabulary
    for token in (t for prompt in prompts for t in prompt):
        if not _is_id(token, ids):
            raise InputError("prompts", token, f"must be token ids from 0 to {ids - 1}")
    if vocabulary is not None and not (isinstance(vocabulary, int) and 1 <= vocabulary <= ids):
        raise InputError("vocabulary", vocabulary, f"must be from 1 to the model's {ids}")
    longest, context = max(map(len, prompts)), model.plan.context
    if max_tokens > most:
        raise InputError("max_tokens", max_tokens, f"must be at most {most}: context {context}, prompt {longest}")
    return longest + max_tokens - 1
