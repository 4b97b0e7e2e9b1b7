"""Text generation with the cache: greedy or sampled, many prompts at once, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.limits import check_integer
from meristem.model.cache import KVCache
from meristem.model.decoder import Decoder
from meristem.model.operators import product_dtype


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature 0 is greedy; top_k and top_p cut the tail."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not self.temperature >= 0:  # refuses nan too
            raise InputError("temperature", self.temperature, "must be 0 (greedy) or above")
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 1)
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise InputError("top_p", self.top_p, "must be above 0 and at most 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 63:
            raise InputError("seed", self.seed, "must be in 0..2^63 - 1")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def next_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities (B, V) of the next token from logits (B, V), after temperature, top-k and top-p."""
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Measured from the likeliest token, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    ordered, order = scaled.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    if sampling.top_k is not None:
        probabilities[:, sampling.top_k :] = 0
    if sampling.top_p is not None:
        before = probabilities.cumsum(-1) - probabilities  # mass of the likelier tokens
        probabilities = probabilities * (before < sampling.top_p * probabilities.sum(-1, keepdim=True))
    probabilities = torch.zeros_like(probabilities).scatter_(-1, order, probabilities)
    return probabilities / probabilities.sum(-1, keepdim=True)


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
    refused at once, not when the first token is asked for.
    """
    capacity = _check(model, prompts, max_tokens, sampling, vocabulary)
    return _steps(model, prompts, capacity, max_tokens, sampling, end_of_text, vocabulary)


@torch.no_grad()
def _steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    capacity: int,
    max_tokens: int,
    sampling: Sampling,
    end_of_text: int | None,
    vocabulary: int | None,
) -> Iterator[list[int | None]]:
    device = model.embedding.weight.device
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(p) for p in prompts], device=device)
    rows = [[0] * (longest - len(p)) + list(p) for p in prompts]
    tokens = torch.tensor(rows, device=device)
    ragged = padding if bool(padding.any()) else None
    dtype = product_dtype(model.embedding.weight)
    cache = KVCache(model.plan, len(prompts), capacity, device, dtype)
    generator = torch.Generator(device).manual_seed(sampling.seed)
    ended = [False] * len(prompts)
    for _ in range(max_tokens):
        logits = model.unembed(model.hidden(tokens, cache, ragged)[:, -1])
        if vocabulary is not None:
            logits = logits[:, :vocabulary]
        tokens = torch.multinomial(next_probabilities(logits, sampling), 1, generator=generator)
        chosen = [int(t) for t in tokens[:, 0].tolist()]
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
