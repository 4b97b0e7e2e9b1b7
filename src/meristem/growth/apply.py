"""Edits carried out in a living model: plan, weights and the optimizer's moments change together, or not at all.

An edit and a checkpoint take the same way into a model, `adopt`: it is given a plan with the weights that belong to it,
and its optimizer what it keeps of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from meristem.errors import InputError
from meristem.growth.edits import (
    AVERAGE,
    BIAS,
    BLOCK,
    FIRST_MOMENTS,
    GAINS,
    GATES,
    OUT,
    PREFIX,
    QKV,
    SECOND_MOMENTS,
    WEIGHT,
    Edit,
)
from meristem.model.growable import Growable
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.ranks import whole_tensor
from meristem.wording import listed

MOMENTS = FIRST_MOMENTS | SECOND_MOMENTS | {AVERAGE}
States = Mapping[str, Mapping[str, Any]]  # what an optimizer keeps of every parameter, by the parameter's name


@torch.no_grad()
def apply_edit(model: Growable, optimizer: torch.optim.Optimizer | None, edit: Edit) -> Moves:
    """Change the structure of a model, and say what moved where; without an optimizer nobody trains what is born.

    An edit that cannot be, and an optimizer that keeps what cannot follow, are refused by name, and nothing has changed
    then.
    """
    before = model.plan
    plan, moves = edit.apply(before), edit.moves(before)
    old = tensors_of(model)
    new = edit.tensors(before, old, WEIGHT)
    sources = {name: _source(name, moves) for name in new}
    changed = {name: source for name, source in sources.items() if source is None or new[name] is not old[source]}
    states: States = {}
    if optimizer is not None and changed:
        touched = {source for source in changed.values() if source is not None}
        kept = {name: _whole(state) for name, state in _states(old, optimizer).items() if name in touched}
        for name, source in changed.items():
            if source in kept and new[name].shape != old[source].shape:
                _check_follows(optimizer, old[source], kept[source])
        states = _edited(edit, before, changed, kept)
    if plan == before and moves.stays and not states:
        for name in changed:  # as strengths do at every update while they change: the rest need not be looked at
            _put(cast("nn.Module", model), name, new[name])
    else:
        adopt(model, optimizer, plan, new, states, moves)
    return moves


def check_can_follow(model: Growable, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer that keeps of the attention's weights what could not follow heads that come and go."""
    if optimizer is None:
        return
    for block in model.stack:
        for weight in block.attention.parameters():
            _check_follows(optimizer, weight, optimizer.state.get(weight, {}))


@torch.no_grad()
def adopt(
    model: Growable,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    states: States,
    moves: Moves | None = None,
) -> None:
    """Give a model a plan and the weights that belong to it, and its optimizer what it keeps of them.

    `moves` says which of the model's blocks stay where, and `states` only what the optimizer keeps of weights that do
    not. Without it, as from a checkpoint, those that there are stay as far as they are wanted. Tensors that do not fit
    the plan are refused by name, and nothing has changed then. The groups of the optimizer follow: a new parameter
    joins those that do the same work in other blocks.
    """
    module, count = cast("nn.Module", model), len(model.blocks)
    held = tensors_of(model)
    _check_tensors(held, plan, tensors)
    named = _parameters(held)
    sources = moves.layers if moves is not None else (*range(count), *[None] * len(plan.layers))[: len(plan.layers)]
    grouped: dict[str, int] = {}
    rebuilt = sources != tuple(range(count))
    if rebuilt:
        grouped = _groups(named, optimizer, moves, tensors)
        kept = zip(sources, plan.layers, strict=True)
        model.blocks = nn.ModuleList(
            model.make_block(layer) if old is None else model.blocks[old] for old, layer in kept
        )
    for name, tensor in tensors.items():
        if rebuilt or tensor is not held[name]:
            _put(module, name, tensor)
    if plan != model.plan:
        model.follow_plan(plan)
    if optimizer is None:
        return
    now = _parameters(tensors_of(model))
    gone = list(named.values()) if moves is None else list({*named.values()} - {*now.values()})
    if gone or now.keys() != named.keys():
        _regroup(optimizer, named, now, grouped)
    for parameter in gone:
        optimizer.state.pop(parameter, None)
    for name in states.keys() & now.keys():
        optimizer.state[now[name]] = dict(states[name])


def tensors_of(model: Growable) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, the very objects."""
    return dict(cast("nn.Module", model).state_dict(keep_vars=True))


def check_held(optimizer: torch.optim.Optimizer | None, name: str, *parameters: Tensor) -> None:
    """Refuse an optimizer that would not train these parameters; None trains nothing, and is for the caller to know."""
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held.issuperset(map(id, parameters)):
        raise InputError("optimizer", f"{name} missing", "must hold all parameters of the model")


# --- parts -----------------------------------------------------------------------------------------------------------


def _edited(edit: Edit, before: Plan, sources: Mapping[str, str | None], states: States) -> dict[str, dict[str, Any]]:
    """What an optimizer keeps of these tensors, by the names they had, after an edit.

    What is as large as the weight is mapped, numbers go along.
    """
    kinds = dict.fromkeys(kind for state in states.values() for kind, value in state.items() if _is_moment(kind, value))
    mapped = {
        kind: edit.tensors(before, {n: s[kind] for n, s in states.items() if _is_moment(kind, s.get(kind))}, kind)
        for kind in kinds
    }
    result: dict[str, dict[str, Any]] = {}
    for name, source in sources.items():
        if source is None or source not in states:
            continue
        single = {key: value for key, value in states[source].items() if not _is_moment(key, value)}
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in single.items()}
        moments = {kind: tensors[name] for kind, tensors in mapped.items() if name in tensors}
        result[name] = {key: (moments | copied)[key] for key in states[source] if key in moments or key in copied}
    return result


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer keeps of a weight, gathered where every process has its part of it."""
    return {key: whole_tensor(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def _is_moment(kind: str, value: Any) -> bool:
    """Whether this is as large as the weight, which may be a single number itself."""
    return isinstance(value, Tensor) and (value.numel() > 1 or kind in MOMENTS)


def _source(name: str, moves: Moves) -> str | None:
    """The name that a tensor, or the one it is a copy of, had before."""
    found = BLOCK.fullmatch(name)
    if found is None:
        return name
    layer = int(found[1])
    old = moves.copies.get(layer, moves.layers[layer])
    return None if old is None else f"{PREFIX}{old}.{found[2]}"


def _role(name: str) -> str:
    """The name of a parameter without the number of its block."""
    return BLOCK.sub(rf"{PREFIX}*.\2", name)


def _check_follows(optimizer: torch.optim.Optimizer, weight: Tensor, state: Mapping[str, Any]) -> None:
    """Refuse an optimizer that keeps of a weight what is neither a moment of every entry nor a single number."""
    for name, value in state.items():
        if value is None or isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            continue
        shape = tuple(getattr(value, "shape", ()))
        if name not in MOMENTS or shape != tuple(weight.shape):
            raise InputError(
                "optimizer", type(optimizer).__name__,
                f"keeps {name!r} of shape {shape} for a weight of shape {tuple(weight.shape)}, which cannot follow "
                f"heads that come and go; AdamW and others that keep a first and second moment of every weight can",
            )  # fmt: skip


def _parameters(tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}


def _states(tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: dict(optimizer.state[p]) for name, p in _parameters(tensors).items() if optimizer.state.get(p)}


def _check_tensors(held: Mapping[str, Tensor], plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Refuse, by name, what is not a model of this plan: a tensor too many or too few, or of another shape.

    `held` are those of the model as it is, in which all blocks have the same names.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in held.items():
        found = BLOCK.fullmatch(name)
        if found is None:
            shapes[name] = tuple(tensor.shape)
        elif found[1] == "0":
            shapes |= {f"{PREFIX}{layer}.{found[2]}": tuple(tensor.shape) for layer in range(len(plan.layers))}
    for index, layer in enumerate(plan.layers):
        shapes[f"{PREFIX}{index}.{QKV}"] = (layer.query_width + 2 * layer.kv_width, plan.width)
        shapes[f"{PREFIX}{index}.{OUT}"] = (plan.width, layer.query_width)
        if (bias := f"{PREFIX}{index}.{BIAS}") in shapes:
            shapes[bias] = (layer.query_width + 2 * layer.kv_width,)
        shapes |= {name: (layer.head_dim,) for own in GAINS if (name := f"{PREFIX}{index}.{own}") in shapes}
    for name in (name for name in GATES if name in shapes):
        shapes[name] = (len(plan.layers), *shapes[name][1:])
    if shapes.keys() != tensors.keys():
        wrong = sorted(shapes.keys() ^ tensors.keys())
        raise InputError("tensors", listed(wrong, 4), "are missing or not of this model")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise InputError(name, tuple(tensors[name].shape), f"must be of shape {shape}")


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of one of the model's: into it where it is as large, else instead of it."""
    *path, own = name.split(".")
    home = module.get_submodule(".".join(path))
    old: Tensor = getattr(home, own)
    if tensor is old:
        return
    if tensor.shape == old.shape:
        staged = tensor.pin_memory() if old.is_cuda and not tensor.is_cuda else tensor
        old.copy_(staged, non_blocking=True)
        return
    placed = old.new_empty(tensor.shape).copy_(tensor)  # its own memory, aligned: one that a file was read into is not
    setattr(home, own, nn.Parameter(placed, old.requires_grad) if isinstance(old, nn.Parameter) else placed)


def _groups(
    named: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    moves: Moves | None,
    names: Iterable[str],
) -> dict[str, int]:
    """The number of the optimizer's group of every parameter to come: where it, or what it is a copy of, was before.

    One that is new joins the group of those that do the same work in other blocks.
    """
    if optimizer is None:
        return {}
    numbers = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    before = {name: numbers[id(p)] for name, p in named.items() if id(p) in numbers}
    roles = {_role(name): number for name, number in before.items()}
    sources = {name: name if moves is None else _source(name, moves) for name in names}
    found = {name: before.get(source or "", roles.get(_role(name))) for name, source in sources.items()}
    return {name: number for name, number in found.items() if number is not None}


def _regroup(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    now: Mapping[str, nn.Parameter],
    grouped: Mapping[str, int],
) -> None:
    """Exchange the parameters in the optimizer's groups for those that the model has now."""
    before = {id(parameter): name for name, parameter in named.items()}
    for number, group in enumerate(optimizer.param_groups):
        if now.keys() == named.keys():
            group["params"] = [now[before[id(p)]] if id(p) in before else p for p in group["params"]]
        else:  # in the order of a model that is built so, since sums over parameters round by their order
            others = [p for p in group["params"] if id(p) not in before]
            group["params"] = others + [p for name, p in now.items() if grouped.get(name) == number]
