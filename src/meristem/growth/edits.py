"""Edits: each says in one place what it does to a plan, to the weights, and to whatever an optimizer keeps of these.

`tensors` maps the tensors of a model by their names, weights or moments of one kind, to those of the edited model; what
it does not change it hands on as it is. An edit that cannot be is refused by `apply`, before anything has changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.growth.head_surgery import (
    Head,
    check_head,
    drop_group,
    drop_head,
    empty_head,
    insert_head,
    mean_head,
    repacked,
    with_head,
    without_group,
    without_head,
)
from meristem.limits import MOST_LAYERS
from meristem.model.block import Block
from meristem.moves import Moves
from meristem.plan import LayerPlan, Loop, Plan

Tensors = Mapping[str, Tensor]

WEIGHT = "weight"  # the kind of tensors that are no moments
AVERAGE = "average"  # of the weights over the updates; what is new, or made anew, begins in it as the weights do
AVERAGED = "averaged"  # how many updates it has taken in
WEIGHTS = frozenset({WEIGHT, AVERAGE})
# What torch's optimizers keep of every weight: where gradients point, and how large they or the updates are.
FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer", "grad_avg"})
SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta"})
GATES = ("gate_ramp", "gate_delta")  # (layers, passes, heads), those of a model whose plan has gates


class Edit(Protocol):
    """A change of structure."""

    def apply(self, plan: Plan) -> Plan:
        """The plan afterwards; what cannot be is refused by name."""

    def tensors(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        """Weights, or moments of one kind, of a model of this plan, as they are afterwards."""

    def moves(self, plan: Plan) -> Moves:
        """Which layers and heads of this plan move where."""


@dataclass(frozen=True)
class LoopHeads:
    """Run the attention of some heads of a layer again, `passes` times, each time on the stream as it is by then.

    A pass or a head that was not looped before begins without strength, where the plan has gates; those that were keep
    theirs, and what was trained of it.

    >>> LoopHeads(1, heads=(0, 2), passes=2).apply(plan).loops
    {1: Loop(heads=(0, 2), passes=2, fading=())}
    """

    layer: int
    heads: tuple[int, ...]
    passes: int
    fading: tuple[int, ...] = ()  # those of the heads that will leave

    def apply(self, plan: Plan) -> Plan:
        old = plan.layer(self.layer)
        return plan.with_layer(self.layer, replace(old, loop=Loop(self.heads, self.passes, self.fading)))

    def tensors(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        result, old = dict(tensors), plan.layers[self.layer].loop
        same = old is None or old.heads == self.heads  # then what was trained stays in its place
        for name in (name for name in GATES if name in result and not (same and name == "gate_delta")):
            gates = torch.zeros_like(result[name][self.layer])
            for column, head in enumerate(self.heads):
                if old is not None and head in old.heads:
                    known = min(old.passes, self.passes)
                    gates[:known, column] = result[name][self.layer, :known, old.heads.index(head)]
            if not torch.equal(gates, result[name][self.layer]):  # else the very tensor stays
                result[name] = result[name].clone()
                result[name][self.layer] = gates
        return result

    def moves(self, plan: Plan) -> Moves:
        return Moves.none(len(plan.layers))


@dataclass(frozen=True)
class RepeatBlock:
    """Run a whole block again, `times` times.

    >>> RepeatBlock(1, times=2).apply(plan).layers[1].repeats
    2
    """

    layer: int
    times: int = 1

    def apply(self, plan: Plan) -> Plan:
        return plan.with_layer(self.layer, replace(plan.layer(self.layer), repeats=self.times))

    def tensors(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        return dict(tensors)

    def moves(self, plan: Plan) -> Moves:
        return Moves.none(len(plan.layers))


@dataclass(frozen=True, eq=False)
class AddHead:
    """Give a layer another head with these weights, as its last one.

    One whose output projection is zero leaves the model's function as it is: bit for bit where the output product,
    longer by zeros, is summed in the same order, else to rounding. The newborn's first moment is zero. Its second
    moment is the mean of the other heads': from zero, under a step count that is large by now, its first updates would
    be several times too long.

    >>> head = newborn_head(plan.layers[0], plan.width, None, seed=0)
    >>> AddHead(0, head).apply(plan).heads
    (5, 4)
    """

    layer: int
    head: Head

    def apply(self, plan: Plan) -> Plan:
        old = plan.layer(self.layer)
        new = with_head(old)
        check_head(old, plan.width, self.head)
        return plan.with_layer(self.layer, new)

    def tensors(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        layer = plan.layers[self.layer]

        def insert(qkv: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
            if kind in WEIGHTS:
                head = self.head.mapped(lambda part: part.to(qkv)).with_columns(qkv.shape[1])
            elif kind in FIRST_MOMENTS:
                head = empty_head(layer, qkv, out)
            else:
                head = mean_head(layer, qkv, out)
            return insert_head(layer, qkv, out, head)

        return _with_projections(tensors, self.layer, plan, insert)

    def moves(self, plan: Plan) -> Moves:
        heads = plan.layers[self.layer].heads
        return Moves(tuple(range(len(plan.layers))), {self.layer: (*range(heads), None)})


@dataclass(frozen=True, eq=False)
class RemoveHead:
    """Take a head out of a layer, for good: its weights and moments are gone.

    `out` (d, heads e) is the layer's output projection with what the others make of the head's part, where they are to
    stand in for it. A looped head leaves only `with_loop`.

    >>> RemoveHead(0, 3).apply(plan).heads
    (3, 4)
    >>> RemoveHead(0, 3).moves(plan).heads
    {0: (0, 1, 2)}
    """

    layer: int
    head: int
    out: Tensor | None = None
    with_loop: bool = False

    def apply(self, plan: Plan) -> Plan:
        old = plan.layer(self.layer)
        new = without_head(old, self.head, with_loop=self.with_loop)
        _check_folded(plan, old, self.out)
        return plan.with_layer(self.layer, new)

    def tensors(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        layer = plan.layers[self.layer]

        def drop(qkv: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
            folded = self.out.to(out) if kind in WEIGHTS and self.out is not None else out
            return drop_head(layer, qkv, folded, self.head)

        result = _with_projections(tensors, self.layer, plan, drop)
        if layer.loop is not None and self.head in layer.loop.heads:  # its column goes, those after it move up
            column = layer.loop.heads.index(self.head)
            for name in (name for name in GATES if name in result):
                gates = result[name].clone()
                gates[self.layer, :, column:-1] = result[name][self.layer, :, column + 1 :]
                gates[self.layer, :, -1] = 0
                result[name] = gates
        return result

    def moves(self, plan: Plan) -> Moves:
        heads = [head for head in range(plan.layers[self.layer].heads) if head != self.head]
        return Moves(tuple(range(len(plan.layers))), {self.layer: tuple(heads)})


@dataclass(frozen=True, eq=False)
class RemoveGroup:
    """Take a pair of keys and values out of a layer, with all the heads that share it: then the cache shrinks.

    `out` (d, heads e) is the layer's output projection with what the other heads make of their part, as in
    `RemoveHead`.
    """

    layer: int
    group: int
    out: Tensor | None = None

    def apply(self, plan: Plan) -> Plan:
        old = plan.layer(self.layer)
        _check_folded(plan, old, self.out)
        return plan.with_layer(self.layer, without_group(old, self.group))

    def tensors(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        layer = plan.layers[self.layer]

        def drop(qkv: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
            folded = self.out.to(out) if kind in WEIGHTS and self.out is not None else out
            return drop_group(layer, qkv, folded, self.group)

        return _with_projections(tensors, self.layer, plan, drop)

    def moves(self, plan: Plan) -> Moves:
        old = plan.layers[self.layer]
        heads = [head for head in range(old.heads) if head // (old.heads // old.kv_heads) != self.group]
        return Moves(tuple(range(len(plan.layers))), {self.layer: tuple(heads)})


@dataclass(frozen=True)
class AddBlock:
    """Put another block before block `at`, or behind the last one: a copy, or one that is born as identity.

    A copy of block `copy_of` has its weights and its moments, the function of the model changes, and the loss jumps. A
    block born as identity has both output projections zero and changes nothing, bit for bit; its other weights are
    drawn by `seed` and the optimizer knows nothing of it yet. `shape` is the new layer, if it is not to be like its
    source or the block before. A copy of another shape has the packed projections of its source, cut or filled up:
    what is filled up changes nothing at first, and can learn.

    >>> AddBlock(2, copy_of=0).apply(plan).heads
    (4, 4, 4)
    """

    at: int
    copy_of: int | None = None
    shape: LayerPlan | None = None
    seed: int = 0

    def apply(self, plan: Plan) -> Plan:
        count = len(plan.layers)
        if type(self.at) is not int or not 0 <= self.at <= count:
            raise InputError("at", self.at, f"must be in 0..{count}")
        if count == MOST_LAYERS:
            raise InputError("layers", count, "is the most there can be")
        if self.copy_of is not None:
            plan.layer(self.copy_of)
        layers = (*plan.layers[: self.at], self._layer(plan), *plan.layers[self.at :])
        return replace(plan, layers=layers, target=plan.target if len(plan.target) > len(layers) else ())

    def _layer(self, plan: Plan) -> LayerPlan:
        if self.shape is not None:
            return self.shape
        if self.copy_of is not None:
            return plan.layers[self.copy_of]
        return replace(plan.layers[max(0, self.at - 1)], loop=None, repeats=0)

    def tensors(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        result = _with_blocks(tensors, lambda layer: layer if layer < self.at else layer + 1)
        if self.copy_of is not None:
            own = self._copied(plan, tensors, kind)
        elif kind == WEIGHT:
            like = _block(tensors, 0)[QKV]
            own = {name: tensor.to(like) for name, tensor in self._newborn(plan).items()}
        else:
            own = {}
        result |= {f"{PREFIX}{self.at}.{name}": tensor for name, tensor in own.items()}
        for name in (name for name in GATES if name in result):
            rows = list(result[name])
            same = self.copy_of is not None and plan.layers[self.copy_of].loop == self._layer(plan).loop
            rows.insert(self.at, rows[self.copy_of or 0].clone() if same else torch.zeros_like(rows[0]))
            result[name] = torch.stack(rows)
        return result

    def _copied(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        """The tensors of the source, with its projections in the widths of the copy.

        Scores and outputs stay what they are where queries and columns of `out` are filled up with zeros. The keys and
        values that belong to these are drawn, or no gradient would ever reach them.
        """
        assert self.copy_of is not None
        source, copy = plan.layers[self.copy_of], self._layer(plan)
        generator = torch.Generator().manual_seed(self.seed)

        def fill(name: str, rows: Tensor, count: int) -> Tensor:
            if kind in SECOND_MOMENTS:
                return rows.mean(0, keepdim=True).expand(count, -1)
            filled = rows.new_zeros(count, rows.shape[1])
            if kind in WEIGHTS and name in ("key", "value"):
                drawn = torch.randn(count, plan.width, generator=generator) / plan.width**0.5
                filled[:, : plan.width] = drawn.to(rows)
            return filled

        if (source.query_width, source.kv_width) != (copy.query_width, copy.kv_width):
            repack = partial(repacked, source, copy, fill=fill)
            tensors = _with_projections(tensors, self.copy_of, plan, repack)
        own = {name: tensor.clone() for name, tensor in _block(tensors, self.copy_of).items()}
        if source.head_dim != copy.head_dim:  # a gain belongs to a coordinate of heads that are not there any more
            for name in (name for name in GAINS if name in own):
                usual = own[name].mean() if kind in SECOND_MOMENTS else float(kind in WEIGHTS)
                own[name] = torch.ones_like(own[name][:1]).repeat(copy.head_dim) * usual
        return own

    def _newborn(self, plan: Plan) -> dict[str, Tensor]:
        block = Block(plan, self._layer(plan))
        block.initialise(len(plan.layers) + 1, torch.Generator().manual_seed(self.seed))
        with torch.no_grad():
            block.attention.out.weight.zero_()
            block.feed_forward.down.weight.zero_()
        return {name: parameter.detach() for name, parameter in block.named_parameters()}

    def moves(self, plan: Plan) -> Moves:
        old = range(len(plan.layers))
        copies = {} if self.copy_of is None else {self.at: self.copy_of}
        return Moves((*old[: self.at], None, *old[self.at :]), copies=copies)


@dataclass(frozen=True)
class RemoveBlock:
    """Take a block out of the model, for good. Only one that writes nothing leaves the function as it is.

    >>> RemoveBlock(0).apply(plan).heads
    (4,)
    >>> RemoveBlock(0).moves(plan).layers
    (1,)
    """

    layer: int

    def apply(self, plan: Plan) -> Plan:
        plan.layer(self.layer)
        if len(plan.layers) == 1:
            raise InputError("layer", self.layer, "is the last one and has to stay")
        return replace(plan, layers=(*plan.layers[: self.layer], *plan.layers[self.layer + 1 :]))

    def tensors(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        stay = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{PREFIX}{self.layer}.")}
        result = _with_blocks(stay, lambda layer: layer if layer < self.layer else layer - 1)
        for name in (name for name in GATES if name in result):
            result[name] = torch.cat((result[name][: self.layer], result[name][self.layer + 1 :]))
        return result

    def moves(self, plan: Plan) -> Moves:
        return Moves(tuple(old for old in range(len(plan.layers)) if old != self.layer))


@dataclass(frozen=True)
class SetStrengths:
    """Give loops their strength, without the part that is trained: by layer, (passes, looped heads).

    Loops of layers that are not named keep theirs. This changes no structure, and is no event.
    """

    strengths: Mapping[int, Sequence[Sequence[float]]]

    def apply(self, plan: Plan) -> Plan:
        if plan.gates is None:
            raise InputError("plan.gates", None, "are needed to set the strength of loops")
        return plan

    def tensors(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        result = dict(tensors)
        if kind == WEIGHT:
            old = tensors["gate_ramp"]
            result["gate_ramp"] = ramp = old.clone()
            for layer, values in self.strengths.items():
                row = torch.zeros(old.shape[1:], dtype=old.dtype, pin_memory=old.is_cuda)
                row[: len(values), : len(values[0])] = torch.tensor(values)
                ramp[layer].copy_(row, non_blocking=True)
        return result

    def moves(self, plan: Plan) -> Moves:
        return Moves.none(len(plan.layers))


@dataclass(frozen=True, eq=False)
class SetFeedForward:
    """Give feed-forward layers other output projections, (d, f) by layer. This changes no structure."""

    down: Mapping[int, Tensor]

    def apply(self, plan: Plan) -> Plan:
        for layer, weight in self.down.items():
            plan.layer(layer)
            if tuple(weight.shape) != (plan.width, plan.feed_forward):
                expected = f"must be of shape {(plan.width, plan.feed_forward)}"
                raise InputError(f"down[{layer}]", tuple(weight.shape), expected)
        return plan

    def tensors(self, plan: Plan, tensors: Tensors, kind: str) -> dict[str, Tensor]:
        result = dict(tensors)
        for layer, weight in self.down.items():
            name = f"{PREFIX}{layer}.{DOWN}"
            if kind in WEIGHTS and name in result:
                result[name] = weight.to(result[name])
        return result

    def moves(self, plan: Plan) -> Moves:
        return Moves.none(len(plan.layers))


# --- names of tensors ------------------------------------------------------------------------------------------------

PREFIX, QKV, OUT, BIAS = "blocks.", "attention.qkv.weight", "attention.out.weight", "attention.qkv.bias"
DOWN = "feed_forward.down.weight"
GAINS = ("attention.query_gain", "attention.key_gain")
BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")


def projection_names(layer: int) -> tuple[str, str]:
    """The names of a layer's two projections in a model."""
    return f"{PREFIX}{layer}.{QKV}", f"{PREFIX}{layer}.{OUT}"


def _check_folded(plan: Plan, layer: LayerPlan, out: Tensor | None) -> None:
    """Refuse an output projection that is not as large as that of the layer."""
    if out is not None and tuple(out.shape) != (plan.width, layer.query_width):
        raise InputError("out", tuple(out.shape), f"must be of shape {(plan.width, layer.query_width)}")


def _block(tensors: Tensors, layer: int) -> dict[str, Tensor]:
    """The tensors of one block, by their names within it."""
    prefix = f"{PREFIX}{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _with_blocks(tensors: Tensors, place: Callable[[int], int]) -> dict[str, Tensor]:
    """All tensors, those of blocks by the names of their new places."""
    result = {}
    for name, tensor in tensors.items():
        found = BLOCK.fullmatch(name)
        result[f"{PREFIX}{place(int(found[1]))}.{found[2]}" if found else name] = tensor
    return result


def _with_projections(
    tensors: Tensors, layer: int, plan: Plan, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """All tensors with a layer's two projections changed; one that an optimizer has nothing of counts as zero.

    The biases of queries, keys and values are one more column of their rows, (.., d + 1), in a plan that has them.
    """
    result, shape = dict(tensors), plan.layers[layer]
    rows, bias = shape.query_width + 2 * shape.kv_width, f"{PREFIX}{layer}.{BIAS}"
    projections = zip(projection_names(layer), ((rows, plan.width), (plan.width, shape.query_width)), strict=True)
    sizes: dict[str, tuple[int, ...]] = {**dict(projections), **({bias: (rows,)} if plan.qkv_bias else {})}
    known = [tensors[name] for name in sizes if name in tensors]
    if not known:
        return result
    qkv, out, *biases = (tensors.get(name, known[0].new_zeros(size)) for name, size in sizes.items())
    columns = [qkv, *(own[:, None] for own in biases)]
    qkv, out = change(torch.cat(columns, 1) if biases else qkv, out)
    parts = [qkv[:, : plan.width].contiguous(), out, *(qkv[:, plan.width].contiguous() for _ in biases)]
    return result | {name: part for name, part in zip(sizes, parts, strict=True) if name in tensors}
