"""A decision is carried out as a whole or not at all, and what stays keeps its place in the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from meristem import (
    AddBlock,
    Change,
    Decision,
    Decoder,
    Grower,
    InputError,
    Plan,
    Policy,
    Published,
    RemoveHead,
    RepeatBlock,
    Stack,
    prepared,
)
from meristem.gauges.gauge import Gauge
from meristem.growth.apply import apply_edit
from meristem.growth.policy import Readings

PLAN = Plan.uniform(layers=4, width=16, heads=2, vocabulary=23, context=8)


def windows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(23, (4, 9), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


@dataclass(frozen=True)
class Half(Policy):
    """Wants something that can be, and something that cannot."""

    def begin(self, plan: Plan) -> int:
        return 0

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...]:
        return ()

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        return Decision(state + 1, (Change("half", "why not", (RepeatBlock(0, 2), RemoveHead(0, 99)), layer=0),))


def test_a_decision_that_cannot_be_changes_nothing() -> None:
    model = Decoder(PLAN)
    grower = Grower(model, None, [Half()])
    with pytest.raises(InputError, match="head = 99"):
        grower.step(*windows(0))
    assert model.plan == PLAN
    assert grower.states == {"half": 0}


@dataclass(frozen=True)
class Overwrites(Half):
    """Wants something that can be, and would tell of it as of another step."""

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        return Decision(state + 1, (Change("again", "why not", (RepeatBlock(0, 2),), 0, {"step": 7}),))


def test_a_decision_that_cannot_be_told_changes_nothing() -> None:
    model = Decoder(PLAN)
    grower = Grower(model, None, [Overwrites()])
    with pytest.raises(InputError, match=r"overwrites\.facts\.step = 7: must have another name"):
        grower.step(*windows(0))
    assert model.plan == PLAN
    assert grower.states == {"overwrites": 0}


class NoDataclass(Policy):
    def needs(self, state: Any, step: int, plan: Plan) -> None:
        return None


def test_a_policy_without_settings_that_can_be_saved_is_refused() -> None:
    with pytest.raises(InputError, match="must be a dataclass"):
        Grower(Decoder(PLAN), None, [NoDataclass()])


def test_blocks_keep_their_own_groups_and_a_copy_joins_its_sources() -> None:
    model = Decoder(PLAN)
    rates = {0: 0.1, 1: 0.01, 2: 0.02, 3: 0.03}
    groups: list[dict[str, Any]] = [{"params": [*model.blocks[i].parameters()], "lr": lr} for i, lr in rates.items()]
    blocks = {id(p) for group in groups for p in group["params"]}
    rest = {"params": [p for p in model.parameters() if id(p) not in blocks], "lr": 1.0}
    optimizer = torch.optim.AdamW([*groups, rest])
    apply_edit(model, optimizer, AddBlock(1, copy_of=3))
    found = [
        {group["lr"] for group in optimizer.param_groups for p in group["params"] for q in block.parameters() if p is q}
        for block in model.blocks
    ]
    assert found == [{0.1}, {0.03}, {0.01}, {0.02}, {0.03}]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])


def test_the_published_rule_goes_on_after_a_stack() -> None:
    policies: list[Policy] = [Stack(50, start_layers=2, at=(15,)), Published(total_steps=50, start_heads=1)]
    model = Decoder(prepared(PLAN, policies))
    optimizer = torch.optim.AdamW(model.parameters())
    grower = Grower(model, optimizer, policies)
    for step in range(40):
        tokens, targets = windows(step)
        loss = model(tokens, targets).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        grower.step(tokens, targets)
    assert len(model.plan.layers) == 4
