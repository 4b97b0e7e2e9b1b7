"""Growing on a task with a known answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from meristem.gauges.probe import HeldBack
from meristem.growth import Grower, Policy
from meristem.growth.events import Event
from meristem.synthetic.known_tasks import KnownTask
from meristem.synthetic.student import Student

BATCH, RATE, DECAY = 64, 1e-2, 0.7  # sequences; learning rate; part of the run after which it falls and births end
TESTED = 2048  # sequences on which the final loss is measured
FRESH = 2**30  # number of the first batch that is not trained on


@dataclass(frozen=True)
class Found:
    """What a run found: heads, the loss at the end (of 1 at the start), and all decisions."""

    task: KnownTask
    heads: int
    loss: float
    events: list[Event]


def grow(
    task: KnownTask,
    policies: Sequence[Policy] = (),
    *,
    steps: int = 3000,
    head_dim: int = 4,
    heads: int = 1,
    seed: int = 0,
    batch: int = BATCH,
    rate: float = RATE,
    report: Callable[[int, float, int, list[Event]], None] = lambda *facts: None,
) -> Found:
    """Train a student that starts with `heads` heads; without policies it keeps them. Births end with the fast rate.

    Of rows that repeat, some are held back for policies that want them.
    `report` is called after every update with the updates done, the loss, the heads, and the decisions of that step.
    """
    model = Student(task.width, task.length, head_dim, heads, seed)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    decay = round(DECAY * steps)
    grower = Grower(model, optimizer, [_ending(policy, decay) for policy in policies])
    events: list[Event] = []

    kept = max((policy.held_back(task.rows) for policy in policies), default=0) if task.rows else 0

    def held_back(step: int) -> HeldBack | None:
        return HeldBack(kept, lambda: task.batch(min(batch, kept), step, range(kept))) if kept else None

    def fresh(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (task.without_end.batch(batch, FRESH + 1000 * step + number) for number in itertools.count())

    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, 0.1 + 0.9 * (steps - step) / max(1, steps - decay))
        tokens, targets = task.batch(batch, step, range(kept, task.rows))
        loss = model.loss(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        growth = grower.step(tokens, targets, None if kept else partial(fresh, step), held_back(step))
        events += growth.events
        report(step, float(loss.detach()), model.plan.heads[0], growth.events)
    with torch.no_grad():
        final = model.loss(*task.without_end.batch(TESTED, FRESH - 1))
    return Found(task, model.plan.heads[0], float(final), events)


def _ending(policy: Policy, step: int) -> Policy:
    """The policy without births after a step, if it knows of such an end."""
    if not hasattr(policy, "last_birth_step"):
        return policy
    return replace(policy, last_birth=min(policy.last_birth_step, step))  # type: ignore[type-var]
