"""Heads come and go in a living model: its weights and its optimizer's moments are exchanged together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meristem.errors import InputError
from meristem.growth.edits import AddHead, RemoveHead
from meristem.growth.heads import drop_head, empty_head, insert_head, mean_head
from meristem.model.attention import Attention
from meristem.model.rotary import RotaryPair
from meristem.model.transformer import Watch
from meristem.plan import Plan

# Takes the two projections of a layer, or two tensors shaped like them, and what they are; gives the new ones.
Map = Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor]]

# What torch's optimizers keep of every weight: where gradients point, and how large they or the updates are.
FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer", "grad_avg"})
SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta"})


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

    def loss(self, tokens: Tensor, targets: Tensor, *, watch: Watch | None = None) -> Tensor: ...

    def attention_mask(self, tokens: Tensor) -> Tensor: ...

    def rope(self, head_dim: int) -> RotaryPair: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def add_head(model: Model, optimizer: torch.optim.Optimizer | None, edit: AddHead) -> None:
    """Give a layer another head. One whose output projection is zero leaves the model's function as it is.

    That is bit for bit where the output product, longer by zeros, is summed in the same order, else to rounding.

    The newborn's first moment is zero. Its second moment is the mean of the other heads': from zero, under a step
    count that is large by now, its first updates would be several times too long. Weights that do not fit, and an
    optimizer that keeps something else, are refused by name, and nothing has changed then.
    """
    plan = edit.apply(model.plan)
    layer = model.plan.layers[edit.layer]

    def insert(qkv: Tensor, out: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        if kind == "weight":
            head = edit.head.mapped(lambda part: part.to(qkv))
        elif kind in FIRST_MOMENTS:
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
    """Put changed projections in the place of a layer's own, in the model and in the optimizer; or fail before."""
    old = attention.qkv.weight, attention.out.weight
    states = [{} if optimizer is None else dict(optimizer.state.get(weight, {})) for weight in old]
    moments = [] if optimizer is None else _moments(optimizer, old, states)
    new = tuple(nn.Parameter(part) for part in change(old[0].detach(), old[1].detach(), "weight"))
    for name in moments:
        qkv, out = (state.get(name, torch.zeros_like(weight)) for state, weight in zip(states, old, strict=True))
        for state, moment in zip(states, change(qkv, out, name), strict=True):
            if name in state:
                state[name] = moment
    attention.qkv.weight, attention.out.weight = new
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [next((n for o, n in zip(old, new, strict=True) if o is p), p) for p in group["params"]]
    for before, after, state in zip(old, new, states, strict=True):
        if optimizer.state.pop(before, None) is not None:
            optimizer.state[after] = state


def _moments(
    optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], states: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The names of what an optimizer keeps of every weight; what is neither that nor a single number is refused."""
    names = []
    for weight, state in zip(weights, states, strict=True):
        for name, value in state.items():
            if value is None or isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                continue
            shape = tuple(getattr(value, "shape", ()))
            if name not in FIRST_MOMENTS | SECOND_MOMENTS or shape != tuple(weight.shape):
                raise InputError(
                    "optimizer", type(optimizer).__name__,
                    f"keeps {name!r} of shape {shape} for a weight of shape {tuple(weight.shape)}, which cannot follow "
                    f"heads that come and go; AdamW and others that keep a first and second moment of every weight can",
                )  # fmt: skip
            names.append(name)
    return list(dict.fromkeys(names))
