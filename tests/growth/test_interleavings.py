"""Edits of all kinds in any order: what a model says, what is counted, and what an optimizer and a file keep."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meristem import parameter_groups
from meristem.errors import InputError
from meristem.growth import AddBlock, AddHead, LoopHeads, RemoveBlock, RemoveHead, RepeatBlock
from meristem.growth.apply import adopt, apply_edit, tensors_of
from meristem.growth.edits import Edit, SetStrengths
from meristem.growth.head_surgery import newborn_head
from meristem.model import Decoder, KVCache
from meristem.plan import Gates, LayerPlan, Plan, Rotary
from model.helpers import variants, with_exact_positions
from model.test_structure import count_flops

PASSES, LOOPED = 2, 2
START = Plan(
    16, 23, 8, 24, (LayerPlan(2, 4, 2), LayerPlan(3, 4, 1), LayerPlan(1, 8, 1)),
    gates=Gates(PASSES, LOOPED, trained=True),
)  # fmt: skip
MOST_BLOCKS, MOST_HEADS = 5, 5
ROUNDING: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def tokens(seed: int) -> Tensor:
    return torch.randint(23, (2, 8), generator=torch.Generator().manual_seed(seed))


class Living:
    """A model that is trained, and edited in between."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.model = with_exact_positions(Decoder(plan, seed))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():  # attention that is far from an average
                parameter.mul_(4 if parameter.dim() == 2 else 1)
                if name.endswith(("bias", "query_gain", "key_gain")):
                    parameter.add_(torch.linspace(-0.5, 0.5, len(parameter), dtype=torch.float64))
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, 0.1), lr=1e-2)

    @property
    def plan(self) -> Plan:
        return self.model.plan

    def update(self, seed: int) -> None:
        self.optimizer.zero_grad()
        loss = self.model(tokens(seed), tokens(seed).roll(-1, 1)).loss
        assert loss is not None
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def logits(self) -> Tensor:
        found = self.model(tokens(99)).logits
        assert found is not None
        return found

    def edit(self, edit: Edit) -> None:
        apply_edit(self.model, self.optimizer, edit)

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps of every parameter, by the parameter's name."""
        named = self.model.named_parameters()
        return {name: self.optimizer.state[one] for name, one in named if one in self.optimizer.state}

    @property
    def everything(self) -> tuple[Any, ...]:
        """Plan, weights, what the optimizer keeps, and which parameters its groups hold."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        return copy.deepcopy((self.plan, dict(self.model.state_dict()), self.states, groups))


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (one[0], one[3]) == (other[0], other[3])
    for mine, theirs in zip(one[1:3], other[1:3], strict=True):
        assert mine.keys() == theirs.keys()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


# --- actions ---------------------------------------------------------------------------------------------------------
# Each makes an edit, and says whether what the model says stays as it is.

Draw = Callable[[Any], Any]


def layer_with(living: Living, draw: Draw, wanted: Callable[[LayerPlan], bool]) -> int | None:
    fitting = [index for index, layer in enumerate(living.plan.layers) if wanted(layer)]
    return draw(st.sampled_from(fitting)) if fitting else None


def loop_heads(living: Living, draw: Draw) -> bool | None:
    """A new loop, or a deeper one."""
    index = layer_with(living, draw, lambda own: own.repeats == 0 and (own.loop is None or own.loop.passes < PASSES))
    if index is None:
        return None
    layer = living.plan.layers[index]
    if layer.loop is not None:
        living.edit(LoopHeads(index, layer.loop.heads, layer.loop.passes + 1))
        return True
    heads = draw(st.sets(st.integers(0, layer.heads - 1), min_size=1, max_size=LOOPED))
    living.edit(LoopHeads(index, tuple(sorted(heads)), draw(st.integers(1, PASSES))))
    return True


def strengthen(living: Living, draw: Draw) -> bool:
    strengths = {
        index: [[draw(st.sampled_from((0.0, 0.3, 1.0)))] * len(loop.heads)] * loop.passes
        for index, loop in living.plan.loops.items()
    }
    living.edit(SetStrengths(strengths))
    return False


def repeat_block(living: Living, draw: Draw) -> bool | None:
    index = layer_with(living, draw, lambda own: own.loop is None)
    if index is None:
        return None
    times = draw(st.integers(0, 2))
    same = times == living.plan.layers[index].repeats
    living.edit(RepeatBlock(index, times))
    return same


def add_head(living: Living, draw: Draw) -> bool | None:
    index = layer_with(living, draw, lambda own: own.heads < MOST_HEADS)
    if index is None:
        return None
    living.edit(AddHead(index, newborn_head(living.plan.layers[index], 16, None, draw(st.integers(0, 99)))))
    return True


def remove_head(living: Living, draw: Draw) -> bool | None:
    """One that writes nothing; if it is looped, its loop goes with it."""
    index = layer_with(living, draw, lambda own: own.heads > (1 if own.kv_heads == own.heads else 2))
    if index is None:
        return None
    layer = living.plan.layers[index]
    head = draw(st.integers(0, layer.heads - 1))
    with torch.no_grad():
        out = living.model.stack[index].attention.out.weight
        out[:, head * layer.head_dim : (head + 1) * layer.head_dim] = 0
    before = living.logits()
    looped = layer.loop is not None and head in layer.loop.heads
    if looped:
        assert_refused(living, RemoveHead(index, head))
    living.edit(RemoveHead(index, head, with_loop=looped))
    torch.testing.assert_close(living.logits(), before, **ROUNDING)
    return None


def add_block(living: Living, draw: Draw) -> bool | None:
    count = len(living.plan.layers)
    if count == MOST_BLOCKS:
        return None
    source = draw(st.one_of(st.none(), st.integers(0, count - 1)))
    before = living.logits()
    living.edit(AddBlock(draw(st.integers(0, count)), source, seed=draw(st.integers(0, 99))))
    if source is None:
        assert torch.equal(living.logits(), before)  # bit for bit
    return source is None


def remove_block(living: Living, draw: Draw) -> bool | None:
    """One that writes nothing."""
    count = len(living.plan.layers)
    if count == 1:
        assert_refused(living, RemoveBlock(0))
        return None
    index = draw(st.integers(0, count - 1))
    with torch.no_grad():
        living.model.stack[index].attention.out.weight.zero_()
        living.model.stack[index].feed_forward.down.weight.zero_()
    before = living.logits()
    living.edit(RemoveBlock(index))
    torch.testing.assert_close(living.logits(), before, **ROUNDING)
    return None


def train(living: Living, draw: Draw) -> bool:
    living.update(draw(st.integers(0, 99)))
    return False


def refused(living: Living, draw: Draw) -> bool:
    """What cannot be, of every kind."""
    count, layer = len(living.plan.layers), draw(st.integers(0, len(living.plan.layers) - 1))
    own = living.plan.layers[layer]
    bad: list[Edit] = [
        LoopHeads(count, (0,), 1), LoopHeads(layer, (own.heads,), 1), LoopHeads(layer, (0,), PASSES + 1),
        LoopHeads(layer, (), 1), RepeatBlock(-1, 1), RepeatBlock(layer, -1), RemoveHead(layer, own.heads),
        AddHead(layer, newborn_head(replace(own, head_dim=6), 16, None, 0)), AddHead(count, empty(living, layer)),
        AddBlock(count + 1), AddBlock(0, copy_of=count), RemoveBlock(count),
    ]  # fmt: skip
    if own.heads > LOOPED:
        bad.append(LoopHeads(layer, tuple(range(own.heads)), 1))
    if own.loop is not None:
        bad.append(RepeatBlock(layer, 1))
    if own.repeats:
        bad.append(LoopHeads(layer, (0,), 1))
    assert_refused(living, draw(st.sampled_from(bad)))
    return True


def empty(living: Living, layer: int) -> Any:
    return newborn_head(living.plan.layers[layer], 16, None, 0)


def assert_refused(living: Living, edit: Edit) -> None:
    before = living.everything
    with pytest.raises(InputError):
        living.edit(edit)
    assert_same(before, living.everything)


ACTIONS = (
    loop_heads, strengthen, repeat_block, add_head, remove_head, add_block, remove_block, train, refused,
)  # fmt: skip


# --- what holds after each -------------------------------------------------------------------------------------------


def assert_counted(living: Living) -> None:
    parameters = list(living.model.parameters())
    assert sum(parameter.numel() for parameter in parameters) == living.plan.parameters
    assert len(living.model.stack) == len(living.plan.layers)
    seen = count_flops(living.model, tokens(99), backward=False, watch=lambda *one: None)  # every pass by itself
    assert seen == tokens(99).numel() * living.plan.cost.forward.full


def assert_optimizer_follows(living: Living) -> None:
    parameters = {id(parameter): parameter for parameter in living.model.parameters()}
    held = [id(parameter) for group in living.optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(parameters)
    for parameter, state in living.optimizer.state.items():
        assert id(parameter) in parameters
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
    for group, fresh in zip(living.optimizer.param_groups, parameter_groups(living.model, 0.1), strict=True):
        assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in fresh["params"]]


@torch.no_grad()
def assert_decodes(living: Living, first: int) -> None:
    model = living.model
    cache = KVCache(living.plan, 2, 8, "cpu", torch.float64)
    parts = torch.split(tokens(99), [first, *[1] * (8 - first)], dim=1)
    found = torch.cat([model.unembed(model.hidden(part, cache)) for part in parts], dim=1)
    torch.testing.assert_close(found, living.logits(), rtol=1e-9, atol=1e-9)


def assert_comes_back(living: Living, built: Plan) -> None:
    """By way of a file, into a model of any other structure; and goes on as it would have."""
    plan = Plan.from_dict(json.loads(json.dumps(living.plan.to_dict())))
    again = Living(built, seed=9)
    again.update(3)  # moments that must not stay
    weights = {name: tensor.detach().clone() for name, tensor in tensors_of(living.model).items()}
    adopt(again.model, again.optimizer, plan, weights, copy.deepcopy(living.states))
    with_exact_positions(again.model)  # tables that the plan has changed are made anew
    assert_same(again.everything, living.everything)
    assert torch.equal(again.logits(), living.logits())
    twin = copy.deepcopy(living)
    for one in (again, twin):
        one.update(5)
    assert_same(again.everything, twin.everything)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_edits_in_any_order(data: st.DataObject) -> None:
    start = replace(START, **data.draw(variants()))
    living = Living(start)
    for step in range(2):
        living.update(step)
    for action in data.draw(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=10), label="actions"):
        before = living.logits()
        stays = action(living, data.draw)
        if stays:
            torch.testing.assert_close(living.logits(), before, **ROUNDING)
        assert_counted(living)
        assert_optimizer_follows(living)
        assert_decodes(living, data.draw(st.integers(1, 7)))
    usual = replace(start, norm_eps=1e-5, rotary=Rotary())  # what tensors do not tell comes with the plan
    assert_comes_back(living, data.draw(st.sampled_from((living.plan, living.plan.bare, usual))))
    living.update(7)
    assert_optimizer_follows(living)
