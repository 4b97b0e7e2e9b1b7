"""Heads that come and go in a model: function, moments and counts (incrt.md 6, oracles 13, 14, 16 and 24)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meristem import Decoder, InputError, LayerPlan, Plan, parameter_groups
from meristem.growth.apply import apply_edit
from meristem.growth.edits import FIRST_MOMENTS, SECOND_MOMENTS, AddHead, RemoveGroup, RemoveHead, SetFeedForward
from meristem.growth.head_surgery import Head, head_of, newborn_head
from meristem.model.attention import View
from meristem.plan import Loop

WIDTH, DIM, VOCABULARY, CONTEXT = 24, 6, 41, 12

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "AdamW, amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "SGD, momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups, lr=1.0),
}


def plan_of(*heads: int, shared: bool = False, qk_norm: bool = False) -> Plan:
    layers = tuple(LayerPlan(h, DIM, 1 if shared else h) for h in heads)
    return Plan(WIDTH, VOCABULARY, CONTEXT, 32, layers, qk_norm=qk_norm)


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (3, CONTEXT), generator=torch.Generator().manual_seed(seed))


def trained(
    plan: Plan, steps: int = 3, make: MakeOptimizer = OPTIMIZERS["AdamW"]
) -> tuple[Decoder, torch.optim.Optimizer]:
    model = Decoder(plan)
    optimizer = make(parameter_groups(model, 0.1))
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
    return [copy.deepcopy(optimizer.state.get(parameter, {})) for parameter in model.parameters()]


def everything(model: Decoder, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Plan, weights, moments, and which weights the optimizer's groups hold."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    return [model.plan, copy.deepcopy(model.state_dict()), moments(model, optimizer), groups]


def assert_same(before: list[Any], after: list[Any]) -> None:
    torch.testing.assert_close(after[1:3], before[1:3], rtol=0, atol=0)
    assert (before[0], before[3]) == (after[0], after[3])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data(), st.booleans(), st.booleans())
def test_incrt_oracle_13_a_birth_preserves_the_function_and_removal_undoes_it(
    heads: list[int], data: st.DataObject, shared: bool, qk_norm: bool
) -> None:
    """Logits bit-equal; then weights, moments and step counts as if nothing had been. Oracle 24: the counts follow."""
    shared = shared and min(heads) > 1  # a single head with one pair of keys and values has its own
    plan = plan_of(*heads, shared=shared, qk_norm=qk_norm)
    model, optimizer = trained(plan)
    before, weights, states = model(tokens()).logits, copy.deepcopy(model.state_dict()), moments(model, optimizer)
    assert before is not None
    layer = data.draw(st.integers(0, len(heads) - 1))
    apply_edit(model, optimizer, AddHead(layer, newborn(shared)))
    after = model(tokens()).logits
    assert after is not None
    assert torch.equal(after, before)
    assert model.plan.layers[layer].heads == heads[layer] + 1
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == model.plan.parameters == plan.parameters + (2 if shared else 4) * WIDTH * DIM
    apply_edit(model, optimizer, RemoveHead(layer, heads[layer]))
    assert model.plan == plan
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for old, new in zip(states, moments(model, optimizer), strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(value, new[name]) for name, value in old.items())


def test_incrt_oracle_14_a_newborn_learns_to_write_first() -> None:
    """At birth only its output has a gradient; one update later the rest has one too."""
    model, optimizer = trained(plan_of(2, 1))
    apply_edit(model, optimizer, AddHead(1, newborn()))
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
    apply_edit(model, optimizer, AddHead(0, newborn()))
    layer = attention.layer
    pairs = [[optimizer.state[p][name] for p in (attention.qkv.weight, attention.out.weight)]
             for name in ("exp_avg", "exp_avg_sq")]  # fmt: skip
    first, second = (head_of(layer, qkv, out, 3) for qkv, out in pairs)
    for part, values in zip(second, zip(*others, strict=True), strict=True):
        torch.testing.assert_close(part, torch.stack([v for v in values if v is not None]).mean(0), rtol=1e-6, atol=0)
    assert not any(bool(part.any()) for part in first if part is not None)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_moments_of_other_optimizers_follow_as_well(name: str, shared: bool) -> None:
    """First moments from zero, second ones from the mean; and a removal restores them."""
    model, optimizer = trained(plan_of(2, 3, shared=shared), make=OPTIMIZERS[name])
    attention, before = model.stack[1].attention, everything(model, optimizer)
    weights = attention.qkv.weight, attention.out.weight
    old_layer, old = attention.layer, [copy.deepcopy(optimizer.state.get(weight, {})) for weight in weights]
    apply_edit(model, optimizer, AddHead(1, newborn(shared)))
    new = [optimizer.state.get(weight, {}) for weight in (attention.qkv.weight, attention.out.weight)]
    assert new[0].keys() == old[0].keys()
    kept = [kind for kind, value in old[0].items() if value.numel() > 1]
    assert set(kept) <= FIRST_MOMENTS | SECOND_MOMENTS
    assert bool(kept) == (name != "SGD")
    for kind in kept:
        others = [head_of(old_layer, old[0][kind], old[1][kind], index) for index in range(3)]
        found = head_of(attention.layer, new[0][kind], new[1][kind], 3)
        for part, values in zip(found, zip(*others, strict=True), strict=True):
            there = [value for value in values if value is not None]
            assert (part is None) == (not there)
            if part is not None:
                mean = torch.stack(there).mean(0)
                assert bool(mean.any())
                expected = mean if kind in SECOND_MOMENTS else torch.zeros_like(mean)
                torch.testing.assert_close(part, expected, rtol=1e-6, atol=0)
    apply_edit(model, optimizer, RemoveHead(1, 3))
    assert_same(before, everything(model, optimizer))
    apply_edit(model, optimizer, AddHead(1, newborn(shared)))
    update(model, optimizer, 5)


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda groups: torch.optim.Adafactor(groups, lr=1e-3), r"'Adafactor': keeps 'row_var' of shape \(36, 1\)"),
        (lambda groups: torch.optim.Rprop([{**group, "lr": 1e-3} for group in groups]), r"'Rprop': keeps 'prev'"),
    ],
)
def test_an_optimizer_whose_state_cannot_follow_is_refused_before_anything_changes(
    make: MakeOptimizer, kept: str
) -> None:
    model, optimizer = trained(plan_of(2), make=make)
    before = everything(model, optimizer)
    with pytest.raises(InputError, match=f"optimizer = {kept}"):
        apply_edit(model, optimizer, AddHead(0, newborn()))
    with pytest.raises(InputError, match=f"optimizer = {kept}"):
        apply_edit(model, optimizer, RemoveHead(0, 1))
    assert_same(before, everything(model, optimizer))
    update(model, optimizer, 5)


@pytest.mark.parametrize("frozen", ["qkv", "out"])
def test_a_projection_that_is_not_trained_has_no_moments_after_a_birth_either(frozen: str) -> None:
    model = Decoder(plan_of(2))
    attention = model.stack[0].attention
    getattr(attention, frozen).weight.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
    update(model, optimizer, 0)
    before = everything(model, optimizer)
    apply_edit(model, optimizer, AddHead(0, newborn()))
    assert getattr(attention, frozen).weight not in optimizer.state
    apply_edit(model, optimizer, RemoveHead(0, 2))
    assert_same(before, everything(model, optimizer))


# Below and above 192 products in the last sum, up to which libraries take it in one go.
SIZES = [
    (32, 4, 11), (48, 12, 12), (64, 16, 3), (64, 16, 11), (128, 16, 7), (128, 64, 2), (256, 32, 5), (512, 64, 1),
    (64, 16, 12), (128, 16, 12), (128, 64, 3), (128, 64, 5), (256, 32, 7), (256, 32, 11), (512, 64, 7),
]  # fmt: skip


@pytest.mark.parametrize(("width", "dim", "heads"), SIZES)
def test_a_birth_changes_no_bit_at_any_size(width: int, dim: int, heads: int) -> None:
    """What the old heads read, what the layer writes, and the logits."""
    model = Decoder(Plan(width, VOCABULARY, 64, width, (LayerPlan(heads, dim, heads),)))
    attention = model.stack[0].attention
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(VOCABULARY, (2, 64), generator=generator)
    x = torch.randn(2, 64, width, generator=generator)

    def seen() -> tuple[list[Tensor], Tensor]:
        parts: list[list[Tensor]] = []
        view = View(watch=lambda *heads: parts.append([part.detach() for part in heads]))
        attention(x, torch.ones_like(x[0, 0]), model.rope(dim), view)
        logits = model(batch).logits
        assert logits is not None
        return parts[0], logits.detach()

    (*old, written), before = seen()
    apply_edit(model, None, AddHead(0, newborn_head(attention.layer, width, None, 1)))
    (*new, rewritten), after = seen()
    assert all(torch.equal(part[:, :heads], whole) for part, whole in zip(new, old, strict=True))
    assert torch.equal(rewritten, written)
    assert torch.equal(after, before)


@pytest.mark.parametrize("head", [0, 1, 2])
def test_incrt_oracle_16_a_head_without_output_leaves_no_trace(head: int) -> None:
    model, optimizer = trained(plan_of(3, 2))
    with torch.no_grad():
        model.stack[0].attention.out.weight[:, head * DIM : (head + 1) * DIM] = 0
    before = model(tokens()).logits
    apply_edit(model, optimizer, RemoveHead(0, head))
    assert torch.equal(model(tokens()).logits, before)
    update(model, optimizer, 3)  # the optimizer goes on with what is left
    assert len(optimizer.state) == len(list(model.parameters()))


def test_what_cannot_be_is_refused_by_name() -> None:
    model, optimizer = trained(plan_of(1, 2), steps=1)
    with pytest.raises(InputError, match=r"head = 0: is the last one"):
        apply_edit(model, optimizer, RemoveHead(0, 0))
    with pytest.raises(InputError, match=r"head = 2: must be in 0\.\.1"):
        apply_edit(model, optimizer, RemoveHead(1, 2))
    with pytest.raises(InputError, match=r"layer = 2: must be in 0\.\.1"):
        apply_edit(model, optimizer, AddHead(2, newborn()))
    grouped = Plan(WIDTH, VOCABULARY, CONTEXT, 32, (LayerPlan(4, DIM, 2),))
    with pytest.raises(InputError, match=r"kv_heads = 2: must be 1 or 4"):
        AddHead(0, newborn()).apply(grouped)
    looped = plan_of(3).with_layer(0, LayerPlan(3, DIM, 3, Loop((0, 2), 1)))
    with pytest.raises(InputError, match=r"head = 2: is one of the looped ones, \[0, 2\]; it leaves with its loop"):
        RemoveHead(0, 2).apply(looped)


@pytest.mark.parametrize(
    ("part", "shape", "right"),
    [
        ("query", (DIM + 2, WIDTH), r"queries = \(8, 24\): must be of shape \(6, 24\)"),
        ("query", (DIM, WIDTH - 1), r"queries = \(6, 23\): must be of shape \(6, 24\), for heads of 6 and width 24"),
        ("key", (WIDTH, DIM), r"keys = \(24, 6\): must be of shape \(6, 24\)"),
        ("key", None, r"keys = None: must be of shape \(6, 24\)"),
        ("value", None, r"values = None: must be of shape \(6, 24\)"),
        ("value", (DIM,), r"values = \(6,\): must be of shape \(6, 24\)"),
        ("out", (DIM, WIDTH), r"out = \(6, 24\): must be of shape \(24, 6\)"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_and_nothing_changes(
    part: str, shape: tuple[int, ...] | None, right: str
) -> None:
    model, optimizer = trained(plan_of(2, 1), steps=1)
    before = everything(model, optimizer)
    parts: dict[str, Any] = {part: None if shape is None else torch.zeros(shape)}
    head = newborn()._replace(**parts)
    with pytest.raises(InputError, match=right):
        apply_edit(model, optimizer, AddHead(1, head))
    assert_same(before, everything(model, optimizer))


@pytest.mark.parametrize(("part", "name"), [("key", "keys"), ("value", "values")])
def test_a_head_that_shares_keys_and_values_has_none_of_its_own(part: str, name: str) -> None:
    model, optimizer = trained(plan_of(2, shared=True), steps=1)
    before = everything(model, optimizer)
    head = newborn(shared=True)._replace(**{part: torch.zeros(DIM, WIDTH)})
    with pytest.raises(InputError, match=rf"{name} = \(6, 24\): must be None: the heads of this layer share"):
        apply_edit(model, optimizer, AddHead(0, head))
    assert_same(before, everything(model, optimizer))


def test_heads_that_share_keys_and_values_never_become_one_that_has_its_own() -> None:
    model, optimizer = trained(plan_of(3, shared=True), steps=1)
    apply_edit(model, optimizer, RemoveHead(0, 0))
    before = everything(model, optimizer)
    with pytest.raises(InputError, match=r"head = 1: is one of the last two of its layer, which share"):
        apply_edit(model, optimizer, RemoveHead(0, 1))
    assert_same(before, everything(model, optimizer))
    apply_edit(model, optimizer, AddHead(0, newborn(shared=True)))
    assert model.plan == plan_of(3, shared=True)


def test_a_group_leaves_with_its_keys_and_its_moments() -> None:
    """What is left is a model built from the rows and columns of the others, and so are its moments."""
    layer = LayerPlan(6, DIM, 3, loop=Loop((0, 5), 1))
    model, optimizer = trained(Plan(WIDTH, VOCABULARY, CONTEXT, 32, (layer,)))
    attention = model.stack[0].attention
    heads, pairs = [0, 1, 4, 5], [0, 2]
    rows = [
        start * DIM + at
        for start in (*heads, *(6 + pair for pair in pairs), *(9 + pair for pair in pairs))
        for at in range(DIM)
    ]
    columns = [head * DIM + at for head in heads for at in range(DIM)]
    qkv, out = attention.qkv.weight, attention.out.weight
    kept = {
        "qkv": [tensor.detach()[rows] for tensor in (qkv, optimizer.state[qkv]["exp_avg"])],
        "out": [tensor.detach()[:, columns] for tensor in (out, optimizer.state[out]["exp_avg"])],
    }
    apply_edit(model, optimizer, RemoveGroup(0, 1))
    assert model.plan.layers[0] == LayerPlan(4, DIM, 2, loop=Loop((0, 3), 1))
    for name, (weight, moment) in kept.items():
        parameter = getattr(model.stack[0].attention, name).weight
        assert torch.equal(parameter, weight)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moment)
    update(model, optimizer, 5)
    for edit, wrong in ((RemoveGroup(0, 0), "looped"), (RemoveGroup(0, 7), "group"), (RemoveGroup(1, 0), "layer")):
        with pytest.raises(InputError, match=wrong):
            apply_edit(model, optimizer, edit)


def test_feed_forward_layers_are_given_what_they_write_and_keep_their_moments() -> None:
    model, optimizer = trained(plan_of(2, 2))
    weight = model.stack[1].feed_forward.down.weight
    moment, new = optimizer.state[weight]["exp_avg"].clone(), torch.randn(weight.shape)
    assert apply_edit(model, optimizer, SetFeedForward({1: new})).stays
    assert torch.equal(model.stack[1].feed_forward.down.weight, new)
    assert torch.equal(optimizer.state[model.stack[1].feed_forward.down.weight]["exp_avg"], moment)
    with pytest.raises(InputError, match="down"):
        apply_edit(model, optimizer, SetFeedForward({0: new.T}))
