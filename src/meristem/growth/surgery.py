"""Heads come and go in a living model: its weights and its optimizer's moments are exchanged together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from meristem.growth.edits import AddHead, RemoveHead
from meristem.growth.heads import drop_head, empty_head, insert_head, mean_head
from meristem.model.attention import Attention
from meristem.model.rotary import RotaryPair
from meristem.model.transformer import Watch
from meristem.plan import Plan

# Takes the two projections of a layer, or two tensors shaped like them, and what they are; gives the new ones.
Map = Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor]]


class Layer(Protocol):
    """A layer whose attention can be given heads."""

    attention: Attention

    def attention_input(self, stream: Tensor) -> Tensor: ...


class Model(Protocol):
    """What heads can be born in: the language model, the classifier, or any other with such layers."""

    plan: Plan

    @property
    def stack(self) -> Sequence[Layer]: ...

    def take(self, plan: Plan) -> None: ...

    def loss(self, tokens: Tensor, labels: Tensor, *, watch: Watch | None = None) -> Tensor: ...

    def allowed(self, tokens: Tensor) -> Tensor: ...

    def angles(self, head_dim: int) -> RotaryPair: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def add_head(model: Model, optimizer: torch.optim.Optimizer | None, edit: AddHead) -> None:
    """Give a layer another head. With a zero output the model's function stays as it is, bit for bit.

    The newborn's first moment is zero. Its second moment is the mean of the other heads': from zero, under a step
    count that is large by now, its first updates would be several times too long.
    """
    plan = edit.apply(model.plan)
    layer = model.plan.layers[edit.layer]

    def insert(qkv: Tensor, out: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        if kind == "weight":
            head = edit.head.mapped(lambda part: part.to(qkv))
        elif kind == "exp_avg":
            head = empty_head(layer, qkv, out)
        else:
            head = mean_head(layer, qkv, out)
        return insert_head(layer, qkv, out, head)

    _exchange(model.stack[edit.layer].attention, optimizer, insert)
    model.take(plan)


def remove_head(model: Model, optimizer: torch.optim.Optimizer | None, edit: RemoveHead) -> None:
    """Take a head out of a layer, for good: its weights and moments are gone."""
    plan = edit.apply(model.plan)
    layer = model.plan.layers[edit.layer]
    _exchange(
        model.stack[edit.layer].attention, optimizer, lambda qkv, out, kind: drop_head(layer, qkv, out, edit.head)
    )
    model.take(plan)


def _exchange(attention: Attention, optimizer: torch.optim.Optimizer | None, change: Map) -> None:
    """Put changed projections in the place of a layer's own, in the model and in the optimizer."""
    old = attention.qkv.weight, attention.out.weight
    new = tuple(nn.Parameter(part) for part in change(old[0].detach(), old[1].detach(), "weight"))
    attention.qkv.weight, attention.out.weight = new
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [next((n for o, n in zip(old, new, strict=True) if o is p), p) for p in group["params"]]
    states = [optimizer.state.pop(parameter, {}) for parameter in old]
    for name, value in states[0].items():
        moments = (value, states[1][name])
        if value.shape == old[0].shape:
            moments = change(*moments, name)
        for parameter, moment in zip(new, moments, strict=True):
            optimizer.state[parameter][name] = moment
