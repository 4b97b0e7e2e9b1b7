"""Heads that come and go: the function, the moments and the counts (incrt.md 6, oracles 13, 14, 16 and 24)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meristem import Decoder, InputError, LayerPlan, Plan, parameter_groups
from meristem.growth.edits import AddHead, RemoveHead
from meristem.growth.heads import Head, head_of
from meristem.growth.surgery import add_head, remove_head
from meristem.plan import Loop

WIDTH, DIM, VOCABULARY, CONTEXT = 24, 6, 41, 12


def plan_of(*heads: int, shared: bool = False) -> Plan:
    layers = tuple(LayerPlan(h, DIM, 1 if shared else h) for h in heads)
    return Plan(WIDTH, VOCABULARY, CONTEXT, 32, layers)


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (3, CONTEXT), generator=torch.Generator().manual_seed(seed))


def trained(plan: Plan, steps: int = 3) -> tuple[Decoder, torch.optim.AdamW]:
    model = Decoder(plan)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
    for step in range(steps):
        update(model, optimizer, step)
    return model, optimizer


def update(model: Decoder, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    batch = tokens(seed)
    loss = model(batch, batch.roll(-1, 1)).loss
    assert loss is not None
    loss.backward()
    optimizer.step()


def newborn(shared: bool = False) -> Head:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(DIM, WIDTH, generator=generator) / math.sqrt(WIDTH) for _ in range(3))
    return Head(query, None if shared else key, None if shared else value, torch.zeros(WIDTH, DIM))


def moments(model: Decoder, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [copy.deepcopy(optimizer.state[parameter]) for parameter in model.parameters()]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data(), st.booleans())
def test_oracle_13_a_birth_preserves_the_function_and_removal_undoes_it(
    heads: list[int], data: st.DataObject, shared: bool
) -> None:
    """Logits bit-equal; then weights, moments and step counts as if nothing had been. Oracle 24: the counts follow."""
    shared = shared and min(heads) > 1  # a single head with one pair of keys and values has its own
    plan = plan_of(*heads, shared=shared)
    model, optimizer = trained(plan)
    before, weights, states = model(tokens()).logits, copy.deepcopy(model.state_dict()), moments(model, optimizer)
    assert before is not None
    layer = data.draw(st.integers(0, len(heads) - 1))
    add_head(model, optimizer, AddHead(layer, newborn(shared)))
    after = model(tokens()).logits
    assert after is not None
    assert torch.equal(after, before)
    assert model.plan.layers[layer].heads == heads[layer] + 1
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == model.plan.parameters == plan.parameters + (2 if shared else 4) * WIDTH * DIM
    remove_head(model, optimizer, RemoveHead(layer, heads[layer]))
    assert model.plan == plan
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for old, new in zip(states, moments(model, optimizer), strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(value, new[name]) for name, value in old.items())


def test_oracle_14_a_newborn_learns_to_write_first() -> None:
    """At birth only its output has a gradient; one update later the rest has one too."""
    model, optimizer = trained(plan_of(2, 1))
    add_head(model, optimizer, AddHead(1, newborn()))
    attention = model.stack[1].attention
    for first in (True, False):
        update(model, optimizer, 7)
        assert attention.qkv.weight.grad is not None
        assert attention.out.weight.grad is not None
        query, key, value, out = head_of(attention.layer, attention.qkv.weight.grad, attention.out.weight.grad, 1)
        assert key is not None
        assert value is not None
        assert bool(out.any())
        assert [bool(part.any()) for part in (query, key, value)] == [not first] * 3


def test_a_newborn_has_the_others_second_moment_and_no_first() -> None:
    model, optimizer = trained(plan_of(3))
    attention = model.stack[0].attention
    squares = [optimizer.state[p]["exp_avg_sq"] for p in (attention.qkv.weight, attention.out.weight)]
    others = [head_of(attention.layer, squares[0], squares[1], index) for index in range(3)]
    add_head(model, optimizer, AddHead(0, newborn()))
    layer = attention.layer
    pairs = [[optimizer.state[p][name] for p in (attention.qkv.weight, attention.out.weight)]
             for name in ("exp_avg", "exp_avg_sq")]  # fmt: skip
    first, second = (head_of(layer, qkv, out, 3) for qkv, out in pairs)
    for part, values in zip(second, zip(*others, strict=True), strict=True):
        torch.testing.assert_close(part, torch.stack([v for v in values if v is not None]).mean(0))
    assert not any(bool(part.any()) for part in first if part is not None)


@pytest.mark.parametrize("head", [0, 1, 2])
def test_oracle_16_a_head_without_output_leaves_no_trace(head: int) -> None:
    model, optimizer = trained(plan_of(3, 2))
    with torch.no_grad():
        model.stack[0].attention.out.weight[:, head * DIM : (head + 1) * DIM] = 0
    before = model(tokens()).logits
    remove_head(model, optimizer, RemoveHead(0, head))
    after = model(tokens()).logits
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    update(model, optimizer, 3)  # the optimizer goes on with what is left
    assert len(optimizer.state) == len(list(model.parameters()))


def test_what_cannot_be_is_refused_by_name() -> None:
    model, optimizer = trained(plan_of(1, 2), steps=1)
    with pytest.raises(InputError, match=r"head = 0: is the last one"):
        remove_head(model, optimizer, RemoveHead(0, 0))
    with pytest.raises(InputError, match=r"head = 2: must be in 0\.\.1"):
        remove_head(model, optimizer, RemoveHead(1, 2))
    with pytest.raises(InputError, match=r"layer = 2: must be in 0\.\.1"):
        add_head(model, optimizer, AddHead(2, newborn()))
    grouped = Plan(WIDTH, VOCABULARY, CONTEXT, 32, (LayerPlan(4, DIM, 2),))
    with pytest.raises(InputError, match=r"kv_heads = 2: must be 1 or 4"):
        AddHead(0, newborn()).apply(grouped)
    looped = plan_of(3).with_layer(0, LayerPlan(3, DIM, 3, Loop((0, 2), 1)))
    with pytest.raises(InputError, match=r"head = 1: cannot leave a layer whose heads \[0, 2\] are looped"):
        RemoveHead(0, 1).apply(looped)
