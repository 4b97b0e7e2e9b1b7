"""Heads and blocks that come in a loop of Accelerate or Fabric are those of a plain loop, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning_fabric import Fabric
from torch import Tensor

from meristem.growth import Grower, prepared
from meristem.model import Decoder
from meristem.training.optimizer import parameter_groups

from .test_trainer_births import BASE, BATCH, POLICIES, windows

Loop = tuple[Any, Any, Callable[[Tensor], None]]  # the model and the optimizer as the loop has them, and its backward


def plain(model: Decoder, optimizer: torch.optim.Optimizer) -> Loop:
    return model, optimizer, lambda loss: loss.backward()


def accelerate(model: Decoder, optimizer: torch.optim.Optimizer) -> Loop:
    accelerator = Accelerator(cpu=True)
    return (*accelerator.prepare(model, optimizer), accelerator.backward)


def fabric(model: Decoder, optimizer: torch.optim.Optimizer) -> Loop:
    made = Fabric(accelerator="cpu", devices=1)
    return (*made.setup(model, optimizer), made.backward)


def trained(wrap: Callable[[Decoder, torch.optim.Optimizer], Loop]) -> Decoder:
    model = Decoder(prepared(BASE, POLICIES), seed=0)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-2)
    wrapped, stepped, backward = wrap(model, optimizer)
    grower = Grower(model, optimizer, POLICIES)
    for tokens in windows().split(BATCH):
        backward(wrapped(tokens[:, :-1], targets=tokens[:, 1:]).loss)
        stepped.step()
        stepped.zero_grad()
        grower.step(tokens[:, :-1], tokens[:, 1:])
        assert all(parameter.grad is None for parameter in model.parameters())
    return model


@pytest.mark.parametrize("wrap", [accelerate, fabric])
def test_growth_is_that_of_a_plain_loop(wrap: Callable[[Decoder, torch.optim.Optimizer], Loop]) -> None:
    one, other = trained(wrap), trained(plain)
    assert one.plan == other.plan
    assert sum(one.plan.heads) > sum(prepared(BASE, POLICIES).heads)
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
