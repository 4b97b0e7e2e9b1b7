"""Log-likelihoods of continuations by a language model: what tasks ask for, without the harness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from meristem.model import Decoder

ROWS = 1024  # positions whose logits are there at a time: 200 MB at 50,000 ids


class Piece(NamedTuple):
    """Ids that go into the model together, and those that follow its last positions, which are scored."""

    tokens: list[int]
    targets: list[int]


class Score(NamedTuple):
    """The log-likelihood of a continuation, in nats, and whether each of its tokens was the likeliest one."""

    log_likelihood: float
    greedy: bool


def scores(
    model: Decoder,
    requests: Sequence[Sequence[Piece]],
    batch: int,
    progress: Callable[[range], Iterable[int]] = iter,
) -> list[Score]:
    """The score of each request, which is the sum of those of its pieces; pieces of like length share a batch.

    `progress` is handed the beginnings of all batches and hands them on, such as a bar that shows how far it is.
    """
    pieces = [(number, piece) for number, request in enumerate(requests) for piece in request]
    pieces.sort(key=lambda each: -len(each[1].tokens))  # the longest first: what does not fit is known at once
    totals = [Score(0.0, True)] * len(requests)
    for begin in progress(range(0, len(pieces), batch)):
        part = pieces[begin : begin + batch]
        for (number, _), score in zip(part, scored(model, [piece for _, piece in part]), strict=True):
            before = totals[number]
            totals[number] = Score(before.log_likelihood + score.log_likelihood, before.greedy and score.greedy)
    return totals


@torch.inference_mode()
def scored(model: Decoder, pieces: Sequence[Piece]) -> list[Score]:
    """The scores of some pieces, in one pass; logits are made of the positions that count only."""
    device = model.embedding.weight.device
    tokens = torch.zeros(len(pieces), max(len(piece.tokens) for piece in pieces), dtype=torch.int64)
    for row, piece in zip(tokens, pieces, strict=True):  # what is padded on the right is seen by nobody before it
        row[: len(piece.tokens)] = torch.tensor(piece.tokens)
    hidden = model.hidden(tokens.to(device))  # (B, T, d)
    ends = [(len(piece.tokens), len(piece.targets)) for piece in pieces]
    rows = torch.cat([hidden[row, end - count : end] for row, (end, count) in enumerate(ends)])  # (n, d)
    targets = torch.tensor([token for piece in pieces for token in piece.targets], device=device)
    found: list[torch.Tensor] = []
    likeliest: list[torch.Tensor] = []
    for some, wanted in zip(rows.split(ROWS), targets.split(ROWS), strict=True):
        logits = model.unembed(some).float()
        found.append(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0])
        likeliest.append(logits.argmax(-1) == wanted)
    counts = [count for _, count in ends]
    sums = torch.cat(found).double().cpu().split(counts)
    greedy = torch.cat(likeliest).cpu().split(counts)
    return [Score(float(each.sum()), bool(hits.all())) for each, hits in zip(sums, greedy, strict=True)]
