"""How long a run is: so many updates, or as many as its FLOPs allow for, which are fewer once the model grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meristem.config import Config
from meristem.errors import InputError
from meristem.growth.policy import Ahead
from meristem.plan import Plan
from meristem.settings import LARGEST
from meristem.training.optimizer import learning_rate
from meristem.training.tasks import Task


class Length:
    """Counts the FLOPs of a run, and says how many updates are left and what the learning rate is.

    Where a run is as long as its FLOPs allow for, the rate follows what is spent of them: a warm-up of a tenth takes a
    tenth of the FLOPs. It never has more than `train.steps`, the updates of the structure that it began with.
    """

    def __init__(self, config: Config, task: Task, plan: Plan, step: int = 0, flops: int = 0) -> None:
        self._config, self._task = config, task
        self._counted = step, flops  # at the last change of the structure
        self.step_flops = task.step_flops(plan)

    def restructured(self, step: int, plan: Plan) -> None:
        """The model has another structure from `step` on."""
        self._counted = step, self.flops(step)
        self.step_flops = self._task.step_flops(plan)

    def flops(self, step: int) -> int:
        """Training FLOPs counted until a step, with what the structure of the time needed (causal attention)."""
        since, flops = self._counted
        return flops + (step - since) * self.step_flops.causal

    def end(self, step: int) -> int:
        """The updates of the whole run, as far as the present structure tells after `step` of them."""
        ahead, steps = self.ahead(step), self._config.train.steps
        return steps if ahead is None else min(steps, ahead.end)

    def ahead(self, step: int) -> Ahead | None:
        """What is ahead after `step` updates, where FLOPs say how long the run is."""
        flops = self._config.train.flops
        return None if flops is None else Ahead(step, self.flops(step), self.step_flops.causal, flops)

    def rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0."""
        train, position, end = self._config.train, float(step), float(self.end(step))
        if train.flops is not None:  # in updates of the present structure
            position = self.flops(step) / self.step_flops.causal
            end += position - step
        return learning_rate(position, end, self._config.optimizer, train.branch_step)


def with_steps(config: Config, needed: int) -> Config:
    """The configuration with as many updates as its FLOPs suffice for, where the first one needs so many."""
    flops = config.train.flops
    assert flops is not None
    if flops < needed:
        raise InputError("train.flops", flops, f"is less than one update needs, {needed:.3g}")
    steps = int(flops) // needed
    if steps >= LARGEST:
        raise InputError("train.flops", flops, f"must be below {float(LARGEST * needed):.3g}, those of 2^63 updates")
    growth = replace(config.growth, steps=steps) if config.growth.policies else config.growth
    return replace(config, train=replace(config.train, steps=steps), growth=growth)


def as_found(config: Config, began: Config) -> Config:
    """A run's configuration with the updates that were found out when it began, where FLOPs say how long it is."""
    if config.train.flops is None:
        return config
    growth = replace(config.growth, steps=began.growth.steps)
    return replace(config, train=replace(config.train, steps=began.train.steps), growth=growth)


def updates_left(state: Mapping[str, Any], step: int, config: Config) -> int:
    """How many updates of a run come after a checkpoint of this state; of one that FLOPs end, as many as it says."""
    left = state.get("left") if config.train.flops is not None else None
    return max(0, config.train.steps - step) if left is None else int(left)
