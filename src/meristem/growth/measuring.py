"""What a batch shows of a model's attention: what it reads, what the loss asks of it, how its heads overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from meristem.gauges.redundancy import HeadMoments
from meristem.growth.criteria import HeadsRead, Seen
from meristem.growth.surgery import Model
from meristem.model.block import Pass
from meristem.ranks import some_of, sum_over_ranks, world

SEQUENCES, TOKENS = 64, 8192  # of the whole batch, over all processes, that are looked at at most

Batch = tuple[Tensor, Tensor]  # tokens and targets
Batches = Iterator[Batch]


def look(model: Model, tokens: Tensor, targets: Tensor) -> Seen:
    """What some sequences of a batch show of every layer."""
    tokens, targets = _chosen(tokens, targets)
    # All that is asked for are gradients by activations, so only the first layer's output need lead to them.
    with _frozen(model, but=model.stack[0].attention.out.weight), torch.enable_grad():
        loss, passes = _watched(model, tokens, targets)
        gradients = torch.autograd.grad(loss, [seen.update for seen in passes])
    with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
        blocks = zip(model.stack, passes, strict=True)
        inputs = torch.stack([block.attention_input(seen.stream.detach()) for block, seen in blocks])
        mask = model.attention_mask(tokens)
        heads = HeadsRead([seen.head_outputs.detach() for seen in passes], _real(mask, len(tokens)))
        sizes = _sizes([seen.stream.detach() for seen in passes], heads.real)
        return Seen(loss.detach().float(), inputs, torch.stack(gradients) * targets.numel(), mask, sizes, heads)


@torch.no_grad()
def heads_read(model: Model, tokens: Tensor, targets: Tensor) -> HeadsRead:
    """What the heads read of some sequences of a batch."""
    tokens, targets = _chosen(tokens, targets)
    _, passes = _watched(model, tokens, targets)
    return HeadsRead([seen.head_outputs for seen in passes], _real(model.attention_mask(tokens), len(tokens)))


@torch.no_grad()
def head_moments(batches: Iterable[HeadsRead]) -> list[HeadMoments]:
    """Of every layer's heads, over all processes."""
    grams: list[Tensor] = []
    count: Tensor | float = 0.0
    for read in batches:
        sums = [HeadMoments.of(head_outputs, read.real) for head_outputs in read.head_outputs]
        grams = [old + new for old, (new, _) in zip(grams, sums, strict=True)] if grams else [new for new, _ in sums]
        count = count + sums[0][1]
        dims = [head_outputs.shape[-1] for head_outputs in read.head_outputs]
    assert isinstance(count, Tensor)
    tokens_seen = sum_over_ranks(count)
    return [HeadMoments(sum_over_ranks(gram) / tokens_seen, dim) for gram, dim in zip(grams, dims, strict=True)]


def _real(attention_mask: Tensor, batch: int) -> Tensor:
    """Which of the tokens (B, T) are not padding: those that may look at something."""
    return attention_mask.any(-1).expand(batch, -1)


def _sizes(streams: Sequence[Tensor], real: Tensor) -> Tensor:
    """Of every stream (B, T, d) the root mean square of a coordinate, over real tokens (B, T) of all processes."""
    squares = [(stream.float() * real[..., None]).square().mean(-1).sum() for stream in streams]
    *sums, count = sum_over_ranks(torch.stack([*squares, real.sum()]))
    return (torch.stack(sums) / count).sqrt()


def _watched(model: Model, tokens: Tensor, targets: Tensor) -> tuple[Tensor, list[Pass]]:
    passes: list[Pass] = []
    loss = model.loss(tokens, targets, watch=lambda layer, number, seen: passes.append(seen))
    return loss, passes


@contextmanager
def silenced(model: Model) -> Iterator[None]:
    """The model as it would be without attention."""
    weights = [block.attention.out.weight for block in model.stack]
    saved = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        torch._foreach_zero_(weights)
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
def _frozen(model: Model, but: Tensor) -> Iterator[None]:
    """Gradients by the parameters are not asked for, and so not computed."""
    trained = [p for p in model.parameters() if p.requires_grad and p is not but]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
