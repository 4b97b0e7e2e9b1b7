"""What a model is called with, checked: shapes and types always, values where nobody has to wait for them.

The checks stand before the parts that are compiled. Values on a GPU are left alone, because to look at them is to wait
for the device; there the embedding and the loss find them out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meristem.errors import InputError
from meristem.model.fused import IGNORE
from meristem.plan import Plan

INDICES = (torch.int64, torch.int32)


def check_plan(plan: object) -> None:
    """Raise unless it is a plan that a model is built from."""
    if not isinstance(plan, Plan):
        raise InputError("plan", type(plan).__name__, "must be a Plan, such as Plan.uniform makes")


def check_model(model: object) -> None:
    """Raise unless it is a model that is built from a plan."""
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "plan", None), Plan):
        raise InputError("model", type(model).__name__, "must be a Meristem model, such as a Decoder or a Classifier")


def check_tokens(tokens: object, vocabulary: int, field: str = "tokens") -> None:
    """Raise unless tokens are a tensor of token ids, (B, T); `field` is what they are called."""
    if not isinstance(tokens, Tensor):
        raise InputError(field, type(tokens).__name__, "must be a tensor of token ids, (B, T)")
    if tokens.dim() != 2:
        expected = "must be (B, T), one sequence in each row"
        raise InputError(field, tuple(tokens.shape), expected + (f"; use {field}[None]" if tokens.dim() == 1 else ""))
    if tokens.dtype not in INDICES:
        raise InputError(field, tokens.dtype, "must be token ids of type torch.int64 or torch.int32")
    if _can_look(tokens):
        check_range(field, tokens, f"must be token ids from 0 to {vocabulary - 1}", vocabulary)


def check_targets(
    targets: object, shape: tuple[int, ...], what: str, dtypes: tuple[torch.dtype, ...], field: str = "targets"
) -> None:
    """Raise unless targets are a tensor of such a shape and type; `what` says what they hold."""
    if not isinstance(targets, Tensor):
        raise InputError(field, type(targets).__name__, f"must be a tensor {shape} of {what}")
    if tuple(targets.shape) != shape:
        raise InputError(field, tuple(targets.shape), f"must have the shape {shape}: {what}")
    if targets.dtype not in dtypes:
        raise InputError(field, targets.dtype, f"must be {what}, of type torch.int64")


def check_classes(targets: Tensor, classes: int) -> None:
    """Raise if a class is not one of those there are; rows of class -100 are left out of the loss."""
    if _can_look(targets):
        expected = f"must be classes from 0 to {classes - 1}"
        check_range("targets", targets[targets != IGNORE], expected, classes)


def check_range(field: str, values: Tensor, expected: str, count: int) -> None:
    """Raise unless all values are from 0 to `count` - 1; the first that is not is named."""
    if not values.numel():
        return
    least, most = torch.aminmax(values)
    if int(least) < 0 or int(most) >= count:
        raise InputError(field, int(values[(values < 0) | (values >= count)][0]), expected)


def _can_look(values: Tensor) -> bool:
    return values.device.type == "cpu" and not torch.compiler.is_compiling()
