"""First loss and overfitting (prism.md 6, oracles 20 and 21)."""

from __future__ import annotations

import math

import pytest
import torch

from meristem.model import Decoder
from meristem.plan import Plan

from .helpers import random_tokens, small_plan


def initial_loss(schedule: str, width: int, heads: int, layers: int) -> float:
    """Of random tokens, which no untrained model can tell apart, so that targets and inputs are independent."""
    plan = Plan.scheduled(schedule, layers=layers, width=width, heads=heads)
    model = Decoder(plan, seed=1337)
    tokens, targets = (random_tokens(plan, batch=1, length=512, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        return float(model(tokens, targets).loss)


@pytest.mark.parametrize(
    ("width", "heads", "layers", "expected"), [(768, 12, 12, 10.98), (1024, 16, 4, 11.03), (1536, 16, 4, 11.13)]
)
def test_oracle_20_initial_loss(width: int, heads: int, layers: int, expected: float) -> None:
    """The last norm makes it independent of the depth, so four layers stand for the larger models' 24."""
    assert math.log(50304) + 0.02**2 * width / 2 == pytest.approx(expected, abs=5e-3)
    uniform, prism = (initial_loss(schedule, width, heads, layers) for schedule in ("uniform", "prism"))
    assert uniform == pytest.approx(expected, abs=0.15)
    assert prism == pytest.approx(expected, abs=0.15)
    assert abs(uniform - prism) <= 0.02


@pytest.mark.parametrize("schedule", ["uniform", "prism"])
def test_oracle_21_one_batch_can_be_learnt_by_heart(schedule: str) -> None:
    plan = small_plan(schedule, context=128)
    model, tokens = Decoder(plan), random_tokens(plan, batch=8)
    targets = tokens.roll(-1, dims=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0)
    first = last = math.inf
    for step in range(300):
        loss = model(tokens, targets).loss
        last = float(loss.detach())
        if step == 0:
            first = last
        if last < 0.1:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert first > 0.9 * math.log(plan.vocabulary)
    assert last < 0.1
