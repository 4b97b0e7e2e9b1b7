"""An average of the weights over the updates.

It is kept with the optimizer's moments of every weight, where edits carry it along and checkpoints save it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from meristem.growth.edits import AVERAGE, AVERAGED
from meristem.ranks import own_parts

QUICK = 10  # the larger, the more an average is of the last weights while it is young


@torch.no_grad()
def update_average(optimizer: torch.optim.Optimizer, decay: float, skipped: Tensor) -> None:
    """Take the weights after an update into their average, unless the update was `skipped` (1.0 or 0.0, a scalar).

    After t updates the newest weights count max(1 - decay, 10 / (9 + t)): the first average is the weights themselves,
    and a young one forgets the early ones soon. So begins the average of a weight that is new. Nothing here waits for
    the device.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)]
    states = [optimizer.state[p] for p in parameters]
    for parameter, state in zip(parameters, states, strict=True):
        if AVERAGE not in state:
            state[AVERAGE], state[AVERAGED] = parameter.detach().clone(), torch.zeros_like(skipped)
    counts = [state[AVERAGED] for state in states]
    finite = 1 - skipped
    torch._foreach_add_(counts, [finite] * len(counts))  # a single tensor would be read by the host
    shares = finite * (QUICK / (QUICK - 1 + torch.stack(counts))).clamp(min=1 - decay)
    averages, _ = own_parts([state[AVERAGE] for state in states])  # of a sharded model its own rows
    torch._foreach_lerp_(averages, own_parts(parameters)[0], list(shares.unbind()))


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The average in the place of the weights, in their own memory; afterwards they come back to the bit."""
    held = [(p, state[AVERAGE]) for p, state in optimizer.state.items() if AVERAGE in state]
    _exchange(held)
    try:
        yield
    finally:
        _exchange(held)


@torch.no_grad()
def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for parameter, average in pairs:
        weights = parameter.clone()
        parameter.copy_(average)
        average.copy_(weights)
