"""What a batch shows of a model: what attention reads, what the loss asks of it, what its heads write.

A probe looks at a batch once, however many instruments ask; what it shows is remembered until the structure changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.model.block import Pass
from meristem.model.growable import Growable
from meristem.model.operators import accum_dtype
from meristem.ranks import some_of, sum_over_ranks, world

SEQUENCES, TOKENS = 64, 8192  # of the whole batch, over all processes, that are looked at at most

Batch = tuple[Tensor, Tensor]  # tokens and targets
Batches = Iterator[Batch]
Fresh = Callable[[], Batches]  # this process's share of batches that the model has not been trained on yet


class HeldBack(NamedTuple):
    """Rows that are never trained on: how many there are in all, and what gives this process's share of some of them.

    grower.step(tokens, targets, held_back=HeldBack(512, next_of_them))
    """

    rows: int
    batch: Callable[[], Batch]


class HeadsRead(NamedTuple):
    """What the heads of every layer read, (B, heads, T, head dim) each, and which tokens (B, T) are not padding."""

    head_outputs: list[Tensor]
    real: Tensor


class Seen(NamedTuple):
    """What a batch shows: the loss, what every layer's attention reads, and the gradient of the loss by what it writes.

    Both are (layers, B, T, d), the gradient that of the mean loss times the number of its terms; `attention_mask`
    (T, T) or (B, T, T) says which tokens each token may look at, and `sizes` (layers,) how large the stream is. `heads`
    is what the heads read. Of a layer that is looped or repeated this is its first pass.
    """

    loss: Tensor
    inputs: Tensor
    gradients: Tensor
    attention_mask: Tensor
    sizes: Tensor
    heads: HeadsRead


class Probe:
    """The batch of an update, as instruments see it: tokens (B, T), this process's share, and maybe their targets.

    `fresh` gives batches that the model has not been trained on yet; without it, rows that are `held_back` or else the
    present batch stand in. `loss` is that of the update itself, if it is known.
    """

    def __init__(
        self, model: Growable, tokens: Tensor, targets: Tensor | None = None, fresh: Fresh | None = None,
        held_back: HeldBack | None = None, loss: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.model, self.tokens, self._targets, self.loss = model, tokens, targets, loss
        self.held_back = held_back
        self.fresh: Fresh = fresh or (lambda: iter([held_back.batch() if held_back else (self.tokens, self.targets)]))
        self._seen: dict[bool, Seen] = {}
        self._held_back: dict[bool, Seen] = {}
        self._heads: HeadsRead | None = None

    @property
    def targets(self) -> Tensor:
        if self._targets is None:
            raise InputError("targets", None, "are needed to measure what the task asks of attention")
        return self._targets

    def look(self, *, silent: bool = False) -> Seen:
        """What some sequences of the batch show of every layer; `silent`: of the model without attention."""
        if silent not in self._seen:
            self._seen[silent] = self._look(self.tokens, self.targets, silent)
        return self._seen[silent]

    def look_held_back(self, *, silent: bool = False) -> Seen | None:
        """What some of the rows that are held back show; None if there are none."""
        if self.held_back is None:
            return None
        if silent not in self._held_back:
            self._held_back[silent] = self._look(*self.held_back.batch(), silent)
        return self._held_back[silent]

    @property
    def rows(self) -> int:
        """How many rows are held back, which come again and again; 0 if there are none."""
        return 0 if self.held_back is None else self.held_back.rows

    def _look(self, tokens: Tensor, targets: Tensor, silent: bool) -> Seen:
        with silenced(self.model) if silent else nullcontext():
            return look(self.model, tokens, targets)

    @property
    def heads(self) -> HeadsRead:
        """What the heads read of some sequences of the batch."""
        if False in self._seen:
            return self._seen[False].heads
        if self._heads is None:
            self._heads = heads_read(self.model, self.tokens, self.targets)
        return self._heads

    def forget(self) -> None:
        """The model has changed: what was seen is no longer what it shows."""
        self._seen, self._held_back, self._heads = {}, {}, None


def look(model: Growable, tokens: Tensor, targets: Tensor) -> Seen:
    """What some sequences of a batch show of every layer."""
    tokens, targets = _chosen(tokens, targets)
    # All that is asked for are gradients by activations, so only the first layer's output need lead to them.
    with _frozen(model, but=model.stack[0].attention.out.weight), torch.enable_grad():
        loss, passes = _watched(model, tokens, targets)
        terms = torch.full_like(loss, targets.numel())
        gradients = torch.autograd.grad(loss, [seen.update for seen in passes], terms)
    with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
        blocks = zip(model.stack, passes, strict=True)
        inputs = torch.stack([block.attention_input(seen.stream.detach()) for block, seen in blocks])
        mask = model.attention_mask(tokens)
        heads = HeadsRead([seen.head_outputs.detach() for seen in passes], _real(mask, len(tokens)))
        sizes = _sizes([seen.stream.detach() for seen in passes], heads.real)
        return Seen(loss.detach().float(), inputs, torch.stack(gradients), mask, sizes, heads)


@torch.no_grad()
def heads_read(model: Growable, tokens: Tensor, targets: Tensor) -> HeadsRead:
    """What the heads read of some sequences of a batch."""
    tokens, targets = _chosen(tokens, targets)
    _, passes = _watched(model, tokens, targets)
    return HeadsRead([seen.head_outputs for seen in passes], _real(model.attention_mask(tokens), len(tokens)))


def _real(attention_mask: Tensor, batch: int) -> Tensor:
    """Which of the tokens (B, T) are not padding: those that may look at something."""
    return attention_mask.any(-1).expand(batch, -1)


def _sizes(streams: Sequence[Tensor], real: Tensor) -> Tensor:
    """The root mean square of a coordinate of every stream (B, T, d), over real tokens (B, T) of all processes."""
    precise = accum_dtype(streams[0].dtype)
    lengths = torch.stack([torch.linalg.vector_norm(stream, dim=-1, dtype=precise) for stream in streams])
    squares = (lengths * real).square().sum((1, 2)) / streams[0].shape[-1]
    sums = sum_over_ranks(torch.cat((squares, real.sum()[None])))
    return (sums[:-1] / sums[-1]).sqrt()


def _watched(model: Growable, tokens: Tensor, targets: Tensor) -> tuple[Tensor, list[Pass]]:
    """The loss, and the first pass of every layer: what is run again reads what that has written."""
    passes: list[Pass] = []

    def watch(layer: int, number: int, seen: Pass) -> None:
        if number == 0:
            passes.append(seen)

    return model.loss(tokens, targets, watch=watch), passes


@contextmanager
def silenced(model: Growable) -> Iterator[None]:
    """The model as it would be without attention."""
    weights = [block.attention.out.weight for block in model.stack]
    with writing(weights, [torch.zeros_like(weight) for weight in weights]):
        yield


@contextmanager
def writing(weights: list[Tensor], others: list[Tensor]) -> Iterator[None]:
    """Other output projections in the place of layers' own, for a while."""
    saved = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        torch._foreach_copy_(weights, others)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, saved)


def _chosen(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Some sequences of this process, one at least."""
    chosen = some_of(len(tokens), max(world(), min(SEQUENCES, TOKENS // tokens.shape[1])))
    return tokens[chosen], targets[chosen]


@contextmanager
def _frozen(model: Growable, but: Tensor) -> Iterator[None]:
    """Gradients by the parameters are not asked for, and so not computed; but by one, whether it is trained or not."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in trained:
        parameter.requires_grad_(parameter is but)
    try:
        yield
    finally:
        for parameter, was in trained:
            parameter.requires_grad_(was)
