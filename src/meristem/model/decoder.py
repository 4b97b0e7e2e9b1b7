"""The decoder-only language model, built from a plan, whose output may be tied with its embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from meristem.errors import InputError
from meristem.model.attention import View
from meristem.model.block import INIT_STD, Norm, draw_normal
from meristem.model.cache import KVCache
from meristem.model.inputs import INDICES, check_plan, check_targets, check_tokens
from meristem.model.loss import linear_cross_entropy
from meristem.model.transformer import Regions, Transformer, Watch
from meristem.plan import Plan

Unembedding = nn.Embedding | nn.Linear  # either has the weights of the output, (V, d)


def _vocabulary_loss(norm: Norm, unembedding: Unembedding, x: Tensor, branch: Tensor, targets: Tensor) -> Tensor:
    return _loss_of(norm, unembedding, norm(x, branch)[1], targets)


def _loss_of(norm: Norm, unembedding: Unembedding, normed: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(normed.flatten(0, 1), unembedding.weight, targets.flatten(), gain=norm.weight)


class Decoder(Transformer):
    """A language model with the structure of `plan`, initialised from `seed`.

    Tokens are ids (B, T), with T up to the context. With targets (B, T), the token that follows each position, it
    returns the loss, a scalar; without them the logits (B, T, V).

    >>> model = Decoder(Plan.uniform(layers=2, width=32, heads=4, vocabulary=100, context=16))
    >>> windows = torch.arange(34).view(2, 17)
    >>> model(windows[:, :-1], targets=windows[:, 1:]).loss.backward()
    >>> model(windows[:, :-1]).logits.shape
    torch.Size([2, 16, 100])
    """

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        check_plan(plan)
        if plan.classes is not None:
            raise InputError("plan.classes", plan.classes, "is of classifiers; a language model has none")
        super().__init__(plan)
        self.output = None if plan.tied else nn.Linear(plan.width, plan.vocabulary, bias=False)
        self.initialise(seed)

    @property
    def unembedding(self) -> Unembedding:
        """What has the weights of the output: the embedding, unless the plan says that they are not tied."""
        return self.embedding if self.output is None else self.output

    def draw(self, generator: torch.Generator) -> None:
        super().draw(generator)
        if self.output is not None:
            draw_normal(self.output.weight, INIT_STD, generator)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        regions: Regions = Regions(),  # noqa: B008  (immutable)
        watch: Watch | None = None,
    ) -> Tensor:
        """The mean cross entropy over all positions, a scalar, of tokens (B, T).

        `targets` (B, T) hold the token that follows each position, -100 where none is asked for.

        >>> model.loss(tokens, targets).shape
        torch.Size([])
        """
        check_tokens(tokens, self.plan.vocabulary)
        check_targets(targets, tuple(tokens.shape), "the tokens that follow each position", INDICES)
        x, branch = self.stream(tokens, View(causal=tokens.shape[1] > 1), regions=regions, watch=watch)
        return self.with_idle_gates(regions.leave(_vocabulary_loss, self.norm, self.unembedding, x, branch, targets))

    def loss_of(self, normed: Tensor, targets: Tensor) -> Tensor:
        """The loss of what `normed` gave (B, T, d), for those who want more of it than that."""
        return self.with_idle_gates(_loss_of(self.norm, self.unembedding, normed, targets))

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of the token that follows each position of tokens (B, T).

        >>> model.logits(tokens).shape
        torch.Size([2, 16, 100])
        """
        return self.unembed(self.hidden(tokens))

    def attention_mask(self, tokens: Tensor) -> Tensor:
        """Every token may look at itself and back, (T, T)."""
        return visibility(0, tokens.shape[1], None, tokens.device)[0, 0]

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        padding: Tensor | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Last hidden states (B, T, d), normed and with the norm's gain, of tokens (B, T); see `normed`.

        >>> model.hidden(tokens).shape
        torch.Size([2, 16, 32])
        >>> model.unembed(model.hidden(tokens)).shape
        torch.Size([2, 16, 100])
        """
        return self.norm.gained(self.normed(tokens, cache, padding, watch))

    def normed(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        padding: Tensor | None = None,
        watch: Watch | None = None,
        regions: Regions = Regions(),  # noqa: B008  (immutable)
    ) -> Tensor:
        """The norm (B, T, d), without its gain, of what comes of tokens (B, T), which follow what the cache holds.

        `padding` (B,) counts the padding tokens on the left of each row, so that prompts of different lengths can
        share a batch. `watch` is shown every attention pass.
        """
        check_tokens(tokens, self.plan.vocabulary)
        start = 0 if cache is None else cache.length
        stop, length = start + tokens.shape[1], tokens.shape[1]
        positions = None
        if padding is not None:
            positions = (torch.arange(start, stop, device=tokens.device) - padding[:, None]).clamp(min=0)
        # A single new token sees all that came before, and a first pass is plainly causal: neither needs a mask.
        masked = padding is not None or (start > 0 and length > 1)
        mask = visibility(start, stop, padding, tokens.device) if masked else None
        view = View(causal=length > 1, mask=mask, start=start)
        return self.norm(*self.stream(tokens, view, positions, cache, regions=regions, watch=watch))[1]

    def unembed(self, hidden: Tensor) -> Tensor:
        """The logits (..., V) over the vocabulary of normed hidden states (..., d)."""
        return linear(hidden, self.unembedding.weight)


def visibility(start: int, stop: int, padding: Tensor | None, device: torch.device) -> Tensor:
    """Which positions before `stop` each of those from `start` may see: (B or 1, 1, stop - start, stop), boolean.

    `padding` (B,) positions on the left of a row are seen by nobody but themselves, so that no row is empty.
    """
    columns = torch.arange(stop, device=device)
    rows = columns[start:, None]
    seen = columns <= rows
    if padding is None:
        return seen[None, None]
    return ((seen & (columns >= padding[:, None, None])) | (columns == rows))[:, None]
