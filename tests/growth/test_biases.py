"""Biases of queries, keys and values follow their heads, and so does what an optimizer keeps of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meristem import AddBlock, AddHead, Decoder, LayerPlan, Muon, Plan, RemoveHead, parameter_groups
from meristem.growth.apply import apply_edit
from meristem.growth.head_surgery import newborn_head

PLAN = replace(
    Plan.uniform(layers=2, width=16, heads=4, vocabulary=23, context=8),
    qkv_bias=True, qk_norm=True, qk_gain=True, tied=False,
)  # fmt: skip


def trained(kind: str) -> tuple[Decoder, torch.optim.Optimizer]:
    """A model after three updates, in which no bias, gain or moment is as it began."""
    model = Decoder(PLAN, seed=1).double()
    optimizer: torch.optim.Optimizer = Muon(model, lr=0.05)
    if kind == "adamw":
        optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=0.05)
    for step in range(3):
        tokens = torch.randint(23, (4, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model.loss(tokens, tokens.roll(-1, 1)).backward()
        optimizer.step()
    return model, optimizer


def by_head(vector: Tensor, heads: int) -> Tensor:
    """(queries keys values, heads, head dim)."""
    return vector.unflatten(0, (3, heads, -1))


def logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.logits(torch.arange(16).view(2, 8))


def kept(model: Decoder, optimizer: torch.optim.Optimizer, layer: int = 0) -> tuple[Tensor, dict[str, Any]]:
    bias = model.stack[layer].attention.qkv.bias
    return bias.detach().clone(), {name: value.clone() for name, value in optimizer.state[bias].items()}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_births_and_removals(kind: str) -> None:
    model, optimizer = trained(kind)
    before, (bias, moments) = logits(model), kept(model, optimizer)
    assert bias.abs().min() > 0
    apply_edit(model, optimizer, AddHead(0, newborn_head(model.plan.layers[0], 16, None, seed=5)))
    torch.testing.assert_close(logits(model), before, rtol=1e-12, atol=1e-12)
    grown, now = kept(model, optimizer)
    assert torch.equal(by_head(grown, 5)[:, :4], by_head(bias, 4))
    assert not by_head(grown, 5)[:, 4].any()
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(by_head(now[name], 5)[:, :4], by_head(moments[name], 4))
    assert not by_head(now["exp_avg"], 5)[:, 4].any()
    mean = by_head(moments["exp_avg_sq"], 4).mean(1)
    torch.testing.assert_close(by_head(now["exp_avg_sq"], 5)[:, 4], mean)
    assert now["step"] == moments["step"]
    apply_edit(model, optimizer, RemoveHead(0, 4))
    torch.testing.assert_close(logits(model), before, rtol=1e-12, atol=1e-12)
    apply_edit(model, optimizer, RemoveHead(0, 1))
    less, then = kept(model, optimizer)
    for mine, theirs in ((less, bias), (then["exp_avg"], moments["exp_avg"])):
        assert torch.equal(by_head(mine, 3), by_head(theirs, 4)[:, [0, 2, 3]])
    assert sum(parameter.numel() for parameter in model.parameters()) == model.plan.parameters


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_copies_of_blocks(kind: str) -> None:
    """One of another shape has the biases of its rows as they are packed, and new gains if heads have another dim."""
    model, optimizer = trained(kind)
    bias, moments = kept(model, optimizer)
    for at, shape in enumerate((None, LayerPlan(6, 4, 6), LayerPlan(2, 8, 2)), start=2):
        apply_edit(model, optimizer, AddBlock(at, 0, shape))
    for name in ("query_gain", "key_gain"):
        gains = [getattr(block.attention, name) for block in model.stack]
        assert torch.equal(gains[2], gains[0])
        assert torch.equal(gains[3], gains[0])
        assert gains[0].std() > 0
        assert torch.equal(gains[4], torch.ones(8, dtype=torch.float64))
        assert not optimizer.state[gains[4]]["exp_avg"].any()
        second = optimizer.state[gains[0]]["exp_avg_sq"].mean()
        torch.testing.assert_close(optimizer.state[gains[4]]["exp_avg_sq"], second.expand(8))
    copied, own = kept(model, optimizer, 2)
    assert torch.equal(copied, bias)
    assert torch.equal(own["exp_avg"], moments["exp_avg"])
    wider = kept(model, optimizer, 3)[0]
    assert torch.equal(by_head(wider, 6)[:, :4], by_head(bias, 4))
    assert not by_head(wider, 6)[:, 4:].any()
    assert torch.equal(kept(model, optimizer, 4)[0], bias)
    assert logits(model).isfinite().all()


def test_biases_and_gains_do_not_decay_and_are_not_orthogonalised() -> None:
    model = Decoder(PLAN)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    for groups in (parameter_groups(model, 0.1), Muon(model, lr=0.1).param_groups):
        *decaying, free = groups
        names = {named[id(parameter)] for parameter in free["params"]}
        assert free["weight_decay"] == 0
        assert {name for name in named.values() if name.endswith(("bias", "gain"))} <= names
        assert "output.weight" in {named[id(parameter)] for parameter in decaying[-1]["params"]}
