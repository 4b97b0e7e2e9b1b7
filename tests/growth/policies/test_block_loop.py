"""Whole blocks that run more than once from the start."""

from __future__ import annotations

import pytest
import torch

from growth.helpers import tiny_plan, tokens_of
from meristem.errors import InputError
from meristem.growth import AddBlock, BlockLoop, Grower, RepeatBlock
from meristem.growth.apply import apply_edit
from meristem.model import Decoder


def test_block_loop_repeats_whole_blocks_and_needs_no_gates() -> None:
    plan = tiny_plan([4] * 4)
    looped = BlockLoop((3, 1), 2).prepare(plan)
    assert [layer.repeats for layer in looped.layers] == [0, 2, 0, 2]
    assert (looped.loops, looped.gates, looped.parameters) == ({}, None, plan.parameters)
    assert RepeatBlock(2).apply(plan).layers[2].repeats == 1
    block = plan.layer_cost(plan.layers[0]).forward.full
    assert looped.cost.forward.full == plan.cost.forward.full + 4 * block
    with pytest.raises(InputError, match=r"layers = 4: must be in 0\.\.3"):
        BlockLoop((4,)).prepare(plan)
    with pytest.raises(InputError, match=r"layers = \(1, 3, 1\): must be distinct"):
        BlockLoop((1, 3, 1))


def test_a_block_that_runs_twice_becomes_two_without_a_change_of_a_bit() -> None:
    model = Decoder(BlockLoop((1,), 1).prepare(tiny_plan([4] * 3)), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = tokens_of(model.plan, 0)
    model(tokens, targets=tokens).loss.backward()
    optimizer.step()
    before = model(tokens).logits
    for edit in (RepeatBlock(1, 0), AddBlock(2, copy_of=1)):
        apply_edit(model, optimizer, edit)
    assert model.plan == tiny_plan([4] * 4)
    assert torch.equal(model(tokens).logits, before)
    first, second = (model.stack[layer].attention.out.weight for layer in (1, 2))
    assert torch.equal(optimizer.state[first]["exp_avg"], optimizer.state[second]["exp_avg"])


def test_a_model_in_which_the_blocks_run_once_is_refused() -> None:
    policy, plan = BlockLoop((1,), 2), tiny_plan([4] * 3)
    with pytest.raises(InputError, match=r"model\.plan = .*: build the model from policy\.prepare\(plan\)"):
        Grower(Decoder(plan), None, [policy])
    Grower(Decoder(policy.prepare(plan)), None, [policy])
