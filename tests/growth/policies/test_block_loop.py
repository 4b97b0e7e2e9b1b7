"""Whole blocks that run more than once from the start."""

from __future__ import annotations

import pytest

from growth.helpers import tiny_plan
from meristem.errors import InputError
from meristem.growth import BlockLoop, Grower, RepeatBlock
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


def test_a_model_in_which_the_blocks_run_once_is_refused() -> None:
    policy, plan = BlockLoop((1,), 2), tiny_plan([4] * 3)
    with pytest.raises(InputError, match=r"model\.plan = .*: build the model from policy\.prepare\(plan\)"):
        Grower(Decoder(plan), None, [policy])
    Grower(Decoder(policy.prepare(plan)), None, [policy])
