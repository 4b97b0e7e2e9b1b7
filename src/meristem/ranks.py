"""Agreement between the processes of a distributed run; in a single process each of these does nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from meristem.errors import RunError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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


def by_first_rank(work: Callable[[], T]) -> T:
    """What `work` gives in the first process, for all: it is done there alone, and the others wait until it is done.

    If it fails there, it is an error in every process.
    """
    if not _many():
        return work()
    done: tuple[Any, str | None] = None, None
    if rank() == 0:
        try:
            done = work(), None
        except Exception as error:
            from_first_rank((None, str(error)))
            raise
    result, failure = from_first_rank(done)
    if failure is not None:
        raise RunError(f"the first process could not do it: {failure}")
    return cast("T", result)


def rows_of_rank(rows: int, of: int | None = None) -> slice:
    """Which rows of a tensor belong to this process, or to another one, where every process has its part of them."""
    number, share = rank() if of is None else of, -(-rows // world())
    return slice(min(rows, number * share), min(rows, (number + 1) * share))


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor of which every process has its rows, gathered by all of them; itself if it is whole already."""
    return tensor.full_tensor() if _is_part(tensor) else tensor


def own_parts(tensors: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """The rows of tensors that this process has, in place, and whether that is only a part of them."""
    parts = [tensor.to_local() if _is_part(tensor) else tensor for tensor in tensors]
    return parts, any(map(_is_part, tensors))


def require_equal(value: str, what: str) -> None:
    """An error on every process if `value` is not the same on all of them."""
    if not _many():
        return
    values: list[str] = [""] * world()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        raise RunError(f"the processes do not agree on the {what}: {values}")


def _is_part(tensor: Tensor) -> TypeGuard[DTensor]:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor  # takes a while

    return isinstance(tensor, DTensor)


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
