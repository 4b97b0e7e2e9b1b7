"""Agreement between the processes of a distributed run; in a single process each of these does nothing."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from meristem.errors import RunError

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if _many() else 0


def world() -> int:
    return dist.get_world_size() if _many() else 1


def some_of(mine: int, wanted: int) -> slice:
    """Which of this process's `mine` sequences belong to the `wanted`, at most, of the whole batch.

    They are the same ones of the whole batch however many processes share it; of a few there may be none here.
    """
    stride = -(-mine * world() // wanted)  # rounded up
    return slice(-rank() * mine % stride, None, stride)


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of a small tensor over all processes."""
    if _many():
        values = values.clone()
        dist.all_reduce(values)
    return values


def mean_over_ranks(values: Tensor) -> Tensor:
    """The average of a small tensor over all processes."""
    return sum_over_ranks(values) / world()


def from_first_rank(value: T) -> T:
    """The first process's value, for all."""
    box = [value]
    if _many():
        dist.broadcast_object_list(box)
    return box[0]


def require_equal(value: str, what: str) -> None:
    """An error on every process if `value` is not the same on all of them."""
    if not _many():
        return
    values: list[str] = [""] * world()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        raise RunError(f"the processes do not agree on the {what}: {values}")


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
