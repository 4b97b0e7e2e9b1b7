"""How the next token is chosen, greedily or by chance; all of it on the device of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.limits import MOST_SEED, check_integer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature 0 is greedy; top_k and top_p cut the tail.

    >>> sampling = Sampling(temperature=0.8, top_p=0.95, seed=7)
    >>> once = generate(model, [[1, 2, 3]], max_tokens=5, sampling=sampling)
    >>> once == generate(model, [[1, 2, 3]], max_tokens=5, sampling=sampling)
    True
    """

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
        check_integer("seed", self.seed, 0, MOST_SEED)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def next_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities (B, V) of the next token from logits (B, V), after temperature, top-k and top-p."""
    logits = logits.float()
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Measured from the likeliest token, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    if sampling.top_k is None and sampling.top_p is None:
        return scaled.softmax(-1)
    ordered, order = scaled.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    if sampling.top_k is not None:
        probabilities[:, sampling.top_k :] = 0
    if sampling.top_p is not None:
        before = probabilities.cumsum(-1) - probabilities  # mass of the likelier tokens
        probabilities = probabilities * (before < sampling.top_p * probabilities.sum(-1, keepdim=True))
    probabilities = torch.zeros_like(probabilities).scatter_(-1, order, probabilities)
    return probabilities / probabilities.sum(-1, keepdim=True)


def chances(seed: int, tokens: int, batch: int) -> Tensor:
    """The random numbers of a whole request, (tokens, batch) from 0 up to 1.

    They are drawn on the CPU before the first step: so a seed means the same on every device, and a recorded step has
    no random numbers of its own to make.
    """
    return torch.rand(tokens, batch, generator=torch.Generator().manual_seed(seed))


def draw(logits: Tensor, sampling: Sampling, chance: Tensor) -> Tensor:
    """The next token of each row of logits (B, V), by its chance (B,) from 0 up to 1; (B,).

    A row whose logits are not numbers gives V, a token that does not exist.
    """
    # In float64 a chance of 24 bits times the sum stays below the sum, so a token is always found; and one without
    # probability is never the first whose sum lies above the chance.
    reached = next_probabilities(logits, sampling).double().cumsum(-1)
    return torch.searchsorted(reached, chance[:, None].double() * reached[:, -1:], right=True)[:, 0]


def likeliest(logits: Tensor) -> Tensor:
    """The likeliest token of each row of logits (B, V), (B,); V, as in `draw`, where the largest is not a number."""
    peaks, tokens = logits.max(-1)
    return torch.where(peaks < torch.inf, tokens, logits.shape[1])  # nan is not below anything
