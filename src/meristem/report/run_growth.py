"""What the files of a run say of its growth, read once for pictures and text."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

from meristem.growth.descriptions import describe_change, describe_structure
from meristem.growth.events import Event, GrowthEvent
from meristem.growth.policies import POLICIES
from meristem.plan import Plan
from meristem.report.depth_text import depth_text
from meristem.report.head_history import HeadHistory
from meristem.report.loop_history import LoopHistory
from meristem.runs.entries import (
    other_growth,
    sound_head_growth,
    sound_loop_growth,
    sound_metrics,
    sound_observations,
    tells_of_loops,
)
from meristem.runs.layer_numbers import read_growth
from meristem.runs.run_folder import RunFolder


class RunGrowth:
    """The growth of a run so far, in the numbers that its layers have at the end."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.config = folder, folder.config
        self.start, self.newest = folder.plan, folder.newest_plan
        self.numbers = read_growth(folder, self.config.train.steps)
        self.metrics = sound_metrics(folder.read(folder.metrics), self.config.train.steps)

    @cached_property
    def heads(self) -> HeadHistory:
        """How the heads have come and gone."""
        start = self.numbers.start_heads(self.start)
        decisions = sound_head_growth(self.numbers.events, start, self._end)
        losses = [(e["step"], math.nan if e["loss"] is None else e["loss"]) for e in self.metrics if "loss" in e]
        told = [decision.step for decision in decisions] + [entry["step"] for entry in self.metrics]
        criterion = "published" if self.config.growth.has("published") else "demand"
        left = len(self.numbers.taken_out)
        return HeadHistory(start, max(told, default=0), decisions, losses, criterion, left)

    @cached_property
    def loops(self) -> LoopHistory:
        """How the loops have grown; where heads or blocks come and go, in the structure of the end."""
        plan, steps, layers = self.start, self.config.train.steps, self.numbers.layers
        observed = self.numbers.observations(self.folder.read(self.folder.entropy))
        observations = sound_observations(observed, self._all_layers, steps, varying=self._varies)
        if self._varies:
            plan = replace(self._all_layers, layers=self._all_layers.layers[:layers])
        decisions = [one for one in self._loop_growth if one.layer is None or one.layer < layers]
        told = [decision.step for decision in decisions] + [entry["step"] for entry in (*observations, *self.metrics)]
        return LoopHistory(plan, max(told, default=0), decisions, observations, self.config.policy("sgt"))

    @property
    def depth_text(self) -> str:
        """How a run whose depth is chosen came to its blocks."""
        return depth_text(self.config, self.start, self.numbers)

    def text_of(self, event: GrowthEvent) -> str:
        """A decision and its reason, in the words that were shown while the run was at work."""
        return describe_change(event, self.config.tolerance)

    def lines(self) -> list[str]:
        """What grew, when and why, in plain words, and what came of it."""
        others = [*self._loop_growth, *other_growth(self.numbers.events, self.numbers.all_layers)]
        changes = [event for event in self.heads.growth if not tells_of_loops(event)]  # which are told above
        places = {_identity(event): place for place, event in enumerate(self.numbers.events)}
        last = len(places)
        told = sorted((*changes, *others), key=lambda event: (event.step, places.get(_identity(event), last)))
        lines = [self.numbers.named(event, f"step {event.step:,}: {self.text_of(event)}") for event in told]
        if self.config.growth.has("depth"):
            lines.insert(0, f"depth: {self.depth_text}")
        if self.heads.decisions:
            lines += self.heads.summary()
        return lines if self.heads.decisions and not self.loops.decisions else [*lines, describe_structure(self.newest)]

    @cached_property
    def _loop_growth(self) -> list[GrowthEvent]:
        """What was decided about loops, in layers that were taken out as well."""
        return sound_loop_growth(self.numbers.events, self._all_layers, varying=self._varies, end=self._end)

    @property
    def _varies(self) -> bool:
        """Whether heads or blocks may come and go; policies of somebody's own may do anything, and are not asked."""
        return any(name not in POLICIES or POLICIES[name].exchanges for name in self.config.growth.policies)

    @property
    def _end(self) -> Plan | None:
        """The structure after the last event, if there is a checkpoint of it."""
        digests = [event.plan for event in self.numbers.events if event.plan is not None]
        return self.newest if digests and digests[-1] == self.newest.digest else None

    @cached_property
    def _all_layers(self) -> Plan:
        """All layers that there have been, without loops, where these are not the same all the time.

        Layers that are newer than the newest checkpoint are as they will be, and those that were taken out as any.
        """
        if not self._varies:
            return self.start
        newest, count = self.newest.bare, self.numbers.all_layers
        known = newest.layers if len(newest.layers) >= count or not newest.target else newest.target
        layers = tuple(known[min(layer, len(known) - 1)] for layer in range(count))
        return replace(newest, layers=layers, target=())


def _identity(event: Event) -> tuple[Any, ...]:
    """By what an event is found again after facts that cannot be were dropped: step, action, layer and plan."""
    known = (event.action, event.layer, event.plan) if isinstance(event, GrowthEvent) else ()
    return event.step, *known
