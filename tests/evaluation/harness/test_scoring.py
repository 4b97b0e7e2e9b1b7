"""Log-likelihoods against a direct computation, one request at a time."""

from __future__ import annotations

import math

import pytest
import torch

from meristem.evaluation.harness import scoring
from meristem.evaluation.harness.scoring import Piece, scored, scores
from meristem.model import Decoder

from .helpers import tiny, zero

PIECES = [
    Piece([5, 6, 7, 8], [9]),
    Piece([1], [2]),
    Piece(list(range(20)), list(range(3, 22))[-19:]),
    Piece([4, 4, 4], [4, 4, 4]),
]


def direct(model: Decoder, piece: Piece) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(torch.tensor([piece.tokens])).logits[0].double()[-len(piece.targets) :]
    found = logits.log_softmax(-1)[range(len(piece.targets)), piece.targets]
    return float(found.sum()), logits.argmax(-1).tolist() == piece.targets


@pytest.mark.parametrize("rows", [1024, 2])
def test_each_piece_is_scored_as_if_it_were_alone(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "ROWS", rows)
    model = tiny()
    with torch.no_grad():
        likeliest = int(model(torch.tensor([[1]])).logits[0, -1].argmax())
    pieces = [*PIECES, Piece([1], [likeliest])]
    for score, piece in zip(scored(model, pieces), pieces, strict=True):
        expected, greedy = direct(model, piece)
        assert score.log_likelihood == pytest.approx(expected, abs=1e-4)
        assert score.greedy == greedy
    assert scored(model, pieces)[-1].greedy


def test_requests_are_sums_of_their_pieces_whatever_the_batch() -> None:
    model = tiny()
    requests = [PIECES[:1], PIECES[1:3], [], PIECES[3:]]
    for batch in (1, 2, 100):
        found = scores(model, requests, batch)
        for score, pieces in zip(found, requests, strict=True):
            alone = [direct(model, piece) for piece in pieces]
            assert score.log_likelihood == pytest.approx(sum(each for each, _ in alone), abs=1e-4)
            assert score.greedy == all(greedy for _, greedy in alone)


def test_a_model_that_knows_nothing() -> None:
    (score,) = scored(zero(vocabulary=256), [Piece(list(range(8)), list(range(8)))])
    assert score.log_likelihood / math.log(2) == pytest.approx(-8 * 8)
