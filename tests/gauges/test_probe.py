"""How large the stream is: the root mean square of a coordinate, over real tokens alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from meristem.gauges.probe import _sizes, look
from meristem.model import Classifier
from meristem.model.block import Pass
from meristem.plan import PADDING, Plan

LENGTHS = (7, 3, 1)


def root_mean_square(stream: NDArray[np.float64], lengths: tuple[int, ...]) -> float:
    """Of a coordinate of a stream (B, T, d), whose rows have so many real tokens, row by row."""
    coordinates = np.concatenate([row[:length].ravel() for row, length in zip(stream, lengths, strict=True)])
    return float(np.sqrt(np.mean(coordinates**2)))


def test_sizes_are_those_of_a_coordinate_of_a_real_token() -> None:
    generator = np.random.default_rng(0)
    streams = [scale * generator.standard_normal((len(LENGTHS), 7, 5)) + shift for scale, shift in ((1, 0), (0.2, 3))]
    real = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    for stream in streams:
        stream[~real.numpy()] = 1e3  # whatever padding holds
    found = _sizes([torch.from_numpy(stream).float() for stream in streams], real)
    assert found.tolist() == pytest.approx([root_mean_square(stream, LENGTHS) for stream in streams], rel=1e-6)


def test_a_batch_shows_the_sizes_of_every_layers_stream() -> None:
    plan = Plan.uniform(layers=3, width=16, heads=2, vocabulary=31, context=7, classes=3)
    model = Classifier(plan, seed=0)
    tokens = torch.randint(1, 31, (len(LENGTHS), 7), generator=torch.Generator().manual_seed(0))
    tokens[torch.arange(7) >= torch.tensor(LENGTHS)[:, None]] = PADDING
    targets = torch.tensor([0, 1, 2])
    streams: list[NDArray[np.float64]] = []

    def watch(layer: int, number: int, shown: Pass) -> None:
        streams.append(shown.stream.detach().double().numpy())

    model.loss(tokens, targets, watch=watch)
    expected = [root_mean_square(stream, LENGTHS) for stream in streams]
    assert look(model, tokens, targets).sizes.tolist() == pytest.approx(expected, rel=1e-5)
    with_padding = [root_mean_square(stream, (7, 7, 7)) for stream in streams]
    assert all(abs(other / right - 1) > 1e-3 for other, right in zip(with_padding, expected, strict=True))


def test_a_model_whose_first_layer_is_frozen_shows_the_same_and_stays_frozen() -> None:
    model = Classifier(Plan.uniform(layers=2, width=8, heads=2, vocabulary=9, context=4, classes=2))
    tokens, targets = torch.tensor([[3, 4, 5, 6], [7, 8, 1, 2]]), torch.tensor([0, 1])
    expected = look(model, tokens, targets)
    model.blocks[0].requires_grad_(False)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    assert torch.equal(look(model, tokens, targets).gradients, expected.gradients)
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
