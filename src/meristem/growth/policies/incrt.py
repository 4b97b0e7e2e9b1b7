"""INCRT (arXiv 2604.10703) by demand: heads are born while the task asks for them.

A judgement takes the demand of every layer and the training loss, and gives the next state with at most one birth in
every layer. Up to the number of heads that the first demand lets one expect, a head is born as soon as it is asked for
with certainty. Beyond that number hits in a row, a cool-down, a test that the loss is not falling by itself, and a
threshold that rises with every head, and doubles where one had to go again, keep it from running in circles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from meristem.errors import InputError
from meristem.gauges.demand import Demand, DemandReading, ModelDemand
from meristem.gauges.gauge import Gauge
from meristem.gauges.training_progress import StepTime, TrainingLoss
from meristem.growth.births import (
    FULL,
    SPENT,
    BirthBudget,
    EndingBirths,
    RelativeDemand,
    birth,
    check_limits,
    full_layers,
    head_facts,
    last_step,
)
from meristem.growth.head_surgery import with_head
from meristem.growth.policy import ENDLESS, Decision, Readings, check_types
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.records import finite

ENOUGH_ROWS = 128  # held back at least, as fewer could not show a demand to be certain
BEYOND = 10.0  # by which the threshold rises with each head beyond the number that was predicted


@dataclass(frozen=True)
class LayerDemand:
    """A layer: its largest slope so far, hits in a row, the last slope, how strict it has become, its last change."""

    largest: float = 0.0
    hits: int = 0
    last: float = 0.0
    strictness: float = 1.0  # doubles when a head that was born here is removed
    changed: int = 0  # updates done at the last change of its heads


@dataclass(frozen=True)
class IncrtState:
    """Where the policy stands; `losses` are (updates done, smoothed loss) of decisions from a cool-down ago on.

    `grown` says of every head of every layer whether it was born during the run. `start` is what the model had at the
    first decision of what there is a budget for, with how many heads in all.
    """

    layers: tuple[LayerDemand, ...]
    losses: tuple[tuple[int, float], ...] = ()
    grown: tuple[tuple[bool, ...], ...] = ()
    start: tuple[float, int] | None = None


@dataclass(frozen=True)
class DemandJudgement:
    """The next state; the layers that are given a head; and for every layer why, and what was measured."""

    state: IncrtState
    layers: tuple[int, ...]
    rules: tuple[str, ...]
    relative: tuple[RelativeDemand, ...]


@dataclass(frozen=True)
class Incrt(EndingBirths):
    """When heads are born: where the demand of a layer is certain, large and steady. Times are updates.

    `last_birth` is a part of the run up to 1, updates above. `docs/configuration.md` says what each field means, under
    `[growth.incrt]`.

    >>> Incrt(total_steps=5000, start_heads=1).prepare(plan).heads
    (1, 1)
    """

    name: ClassVar[str] = "incrt"

    total_steps: int = ENDLESS
    start_heads: int = 0  # heads of every layer at the start, those of the plan being the ceiling; 0 for the plan's
    feed_every: int = 5  # updates between two looks at the demand
    decide_every: int = 50
    calibration: int = 20  # updates at the start in which the demand of a model without attention is measured
    cool_down: int = 100  # between two changes of the heads of a layer
    warm_up: int = 300  # before the first
    last_birth: float = 0.7  # none after this, as there would be no time to learn: part of the run up to 1, or updates
    max_heads: int = 0  # of a layer; 0 for no limit
    budget: str | None = None  # for the whole model: heads=24, parameters=1.2 or time=1.1
    certainty: float = 4.0  # the demand must be this many standard errors above zero
    share: float = 0.03  # and this share of its largest value in the layer
    steady: float = 0.8  # and not be falling by itself: at least this share of the value before
    plateau: float = 0.25  # births wait while the loss falls by this share within a cool-down
    hits: int = 2  # decisions in a row
    feeds: int = 10  # that a layer's gauge must have seen since the last change there
    hold_back: float = 0.05  # share of the training rows on which the demand is tested, where a run sees rows again
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_limits(self)
        for name in ("cool_down", "hits", "feeds"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "must be at least 1")
        if self.calibration < 2:
            raise InputError("calibration", self.calibration, "must be at least 2")
        if self.decide_every < self.feed_every:
            raise InputError("decide_every", self.decide_every, f"must be at least feed_every, {self.feed_every}")
        if self.warm_up < 0:
            raise InputError("warm_up", self.warm_up, "must be 0 or above")
        if not self.certainty < math.inf:
            raise InputError("certainty", self.certainty, "must be a number below infinity")
        if not self.steady <= 1:
            raise InputError("steady", self.steady, "must be a number up to 1")
        for name in ("share", "plateau"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(name, getattr(self, name), "must be above 0 and at most 1")
        if not 0 <= self.hold_back < 1:
            raise InputError("hold_back", self.hold_back, "must be from 0 to below 1: a share of the training rows")
        last_step(self.last_birth, self.total_steps)  # refuses bad values
        if self.budget is not None:
            BirthBudget.read(self.budget)

    def check_length(self) -> None:
        """Refuse a run that is over before a head could be born."""
        last = min(self.last_birth_step, self.total_steps)
        if self.first_birth > last:
            raise InputError(
                "last_birth", self.last_birth,
                f"leaves no time to grow: of {self.total_steps} updates births end after {last}, and the first could "
                f"come after {self.first_birth}; take smaller calibration, feed_every, feeds or decide_every",
            )  # fmt: skip

    def held_back(self, rows: int) -> int:
        """A share, but enough to be certain by, if that is not more than a quarter."""
        return min(max(round(self.hold_back * rows), ENOUGH_ROWS), rows // 4) if self.hold_back else 0

    @property
    def gauge(self) -> Demand:
        """What the policy decides by."""
        return Demand(self.calibration, self.seed)

    @property
    def remembers(self) -> tuple[Gauge, ...]:
        return self.gauge, TrainingLoss(), *self._clock

    @property
    def _clock(self) -> tuple[Gauge, ...]:
        return (StepTime(),) if self.budget and self.budget.startswith("time") else ()

    @property
    def first_birth(self) -> int:
        """Updates after which a head can be born at the earliest, however much is asked for: one that was predicted."""
        fed = (self.calibration // self.feed_every + self.feeds) * self.feed_every
        return -(-max(self.calibration + 1, fed) // self.decide_every) * self.decide_every

    def begin(self, plan: Plan) -> IncrtState:
        return IncrtState((LayerDemand(),) * len(plan.layers), grown=tuple((False,) * heads for heads in plan.heads))

    def feeding(self, state: IncrtState, step: int, plan: Plan) -> tuple[Gauge, ...]:
        """At first every batch, in which the model is seen without attention; then every few updates."""
        if step <= self.calibration:
            return (self.gauge,)
        if step % self.feed_every:
            return self._clock
        return () if self._is_spent(state, plan) else self.remembers

    def needs(self, state: IncrtState, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        due = step > self.calibration and step % self.decide_every == 0 and not self._is_spent(state, plan)
        return self.remembers if due else None

    def decide(self, state: IncrtState, step: int, plan: Plan, readings: Readings) -> Decision:
        """At most one birth in every layer."""
        demand: ModelDemand = readings[self.gauge]
        loss = readings[TrainingLoss()]
        if demand.start:
            state = self.calibrated(state, demand.start)
        # Where the first demand was not certain there is nothing to be expected of it.
        certain = [reading.certainty > self.certainty for reading in demand.start] or [True] * len(demand.spectra)
        spectra = [spectrum if sure else () for spectrum, sure in zip(demand.spectra, certain, strict=True)]
        predicted = [self.predicted(spectrum) for spectrum in spectra]
        missing = tuple(map(_missing, predicted, plan.heads))
        judged = self.judge(state, step, demand.layers, loss, full_layers(plan, self.max_heads), missing)
        facts = {
            "loss": finite(loss),
            **head_facts(plan, judged.relative, judged.rules, predicted),
            "worth": [finite(reading.worth) for reading in demand.layers],
            "asymmetry": [finite(form.asymmetry) for form in demand.forms],
            "rank": [finite(form.rank) for form in demand.forms],
        }
        before = state
        state, layers, why_not = self._afforded(judged.state, plan, judged.layers, demand.layers, readings)
        for layer in judged.layers:
            if layer not in layers:
                facts["rules"][layer] += f"; {why_not}"
                state = self._refused(state, before, layer)
        changes, grown = [], plan
        for layer in layers:
            changes.append(birth(grown, step, layer, self.seed, judged.rules, facts, demand.directions[layer]))
            grown = changes[-1].edits[0].apply(grown)
        if changes and self._is_spent(state, grown):
            changes[-1] = replace(changes[-1], rule=f"{changes[-1].rule}; with it {SPENT}")
        return Decision(state, tuple(changes), measured=None if changes else facts)

    def _is_spent(self, state: IncrtState, plan: Plan) -> bool:
        """Whether no layer can be given a head any more, so that nothing need be measured; of time one cannot say."""
        if not self.budget or state.start is None or self._clock:
            return False
        budget = BirthBudget.read(self.budget)
        smallest = min(
            budget.used(plan.with_layer(i, with_head(replace(layer, ceiling=None))), 0.0)
            for i, layer in enumerate(plan.layers)
        )
        return smallest > budget.most(state.start[0])

    def _afforded(
        self, state: IncrtState, plan: Plan, asking: Sequence[int], demand: Sequence[DemandReading], readings: Readings
    ) -> tuple[IncrtState, list[int], str]:
        """The layers that a head can be paid for, those first to which it is worth most, and why not the others.

        Without a budget these are all.
        """
        if not self.budget:
            return state, list(asking), ""
        budget, heads = BirthBudget.read(self.budget), sum(plan.heads)
        seconds = readings[self._clock[0]] if self._clock else 0.0
        if not math.isfinite(seconds):
            return state, [], "no update was timed yet since the last change"
        first, had = state.start or (budget.used(plan, seconds), heads)
        state = replace(state, start=(first, had))
        by_worth, why_not = sorted(asking, key=lambda layer: -demand[layer].worth), ""
        if self._clock and heads == had:
            by_worth, why_not = by_worth[:1], "one head is born first, to tell what time it takes"
        afforded: list[int] = []
        for layer in by_worth:
            larger = plan.with_layer(layer, with_head(plan.layers[layer]))
            # A head is taken to need as much time as those that were born so far.
            later = seconds + (len(afforded) + 1) * (seconds - first) / max(1, heads - had)
            if budget.used(larger, later) <= budget.most(first):
                plan, afforded = larger, [*afforded, layer]
        passed = SPENT if self._is_spent(state, plan) else "another head there would pass the budget"
        return state, sorted(afforded), why_not or passed

    def _refused(self, state: IncrtState, before: IncrtState, layer: int) -> IncrtState:
        """The state after a layer has asked in vain: nothing has changed there, and it goes on asking."""
        own = replace(state.layers[layer], hits=self.hits, changed=before.layers[layer].changed)
        return replace(state, layers=(*state.layers[:layer], own, *state.layers[layer + 1 :]))

    def moved(self, state: IncrtState, step: int, plan: Plan, moves: Moves) -> IncrtState:
        """Where heads came or went the demand is measured anew; a copied block asks for what its source asked for."""
        old = state

        def born(new: int) -> LayerDemand:
            source = moves.copies.get(new)
            return LayerDemand() if source is None else replace(old.layers[source], hits=0, last=0.0)

        layers = moves.of_layers(old.layers, born)
        grown = moves.of_layers(old.grown, lambda new: (False,) * plan.heads[new])
        state = replace(old, layers=layers, grown=grown)
        if None in moves.layers:  # the loss jumps at a copy: what it was before says nothing of now
            state = replace(state, layers=tuple(replace(layer, changed=step) for layer in layers), losses=())
        for layer, heads in moves.heads.items():
            gone = [was for head, was in enumerate(grown[layer]) if head not in heads]
            flags = moves.of_heads(layer, grown[layer], lambda: True)
            state = replace(state, grown=(*state.grown[:layer], flags, *state.grown[layer + 1 :]))
            state = self.removed(state, step, layer, born_here=any(gone)) if gone else self._changed(state, step, layer)
        return state

    def load(self, data: Mapping[str, Any]) -> IncrtState:
        # States of older versions have one last change for all layers.
        layers = tuple(LayerDemand(**{"changed": data.get("last_change", 0), **layer}) for layer in data["layers"])
        losses = tuple((step, loss) for step, loss in data["losses"])
        start = data.get("start")
        return IncrtState(layers, losses, tuple(tuple(layer) for layer in data["grown"]), start and tuple(start))

    def fits(self, state: IncrtState, plan: Plan) -> bool:
        return len(state.layers) == len(plan.layers) and tuple(map(len, state.grown)) == plan.heads

    def predicted(self, spectrum: Sequence[float]) -> dict[str, float]:
        """How many heads the singular values of the first demand, the largest first, let one expect.

        `count` are those above the threshold, `estimate` is their intrinsic dimension times the log of the range. Noise
        has either sign (see `DemandGauge.spectra`): what is less than twice the most negative one counts as such.
        """
        largest, noise = max(spectrum, default=0.0), max(0.0, -2 * min(spectrum, default=0.0))
        if not largest > noise:
            return {"count": 0, "estimate": 0.0}
        clear = [value / largest for value in spectrum if value > noise]
        return {"count": sum(v > self.share for v in clear), "estimate": sum(clear) * math.log(1 / self.share)}

    def calibrated(self, state: IncrtState, readings: Sequence[DemandReading]) -> IncrtState:
        """The state with the demand that was measured while the attention of the model had no output."""
        layers = tuple(
            replace(layer, largest=max(layer.largest, reading.slope if reading.certainty > self.certainty else 0.0))
            for layer, reading in zip(state.layers, readings, strict=True)
        )
        return replace(state, layers=layers)

    def relative(self, state: IncrtState, readings: Sequence[DemandReading]) -> tuple[RelativeDemand, ...]:
        """What is left of the largest demand of every layer."""
        return tuple(self._relative(layer, r) for layer, r in zip(state.layers, readings, strict=True))

    def judge(
        self, state: IncrtState, done: int, readings: Sequence[DemandReading], loss: float,
        full: Set[int] = frozenset(), missing: Sequence[int | None] = (),
    ) -> DemandJudgement:  # fmt: skip
        """Judge after `done` updates; `loss` is smoothed, and `full` layers have all the heads they may have.

        `missing` are the heads that each layer lacks of those that were predicted, below 0 where it has more, None
        where nothing was. A head that was predicted is born as soon as it is asked for; one beyond them needs more.
        """
        missing = missing or (None,) * len(readings)
        state = self.calibrated(state, readings)
        relative = tuple(map(self._relative, state.layers, readings, missing))
        judged = list(map(self._judge, state.layers, readings, missing))
        losses = (*state.losses, (done, loss))
        while len(losses) > 1 and losses[1][0] <= done - self.cool_down:
            losses = losses[1:]
        state = replace(state, layers=tuple(layer for layer, _ in judged), losses=losses)
        rules, born = [], []
        for i, (layer, rule) in enumerate(judged):
            expected = _lacks(missing[i])
            asks = layer.hits >= (1 if expected else self.hits)
            held = self._held(state, done, i, expected=expected) or (FULL if asks and i in full else "")
            rules.append(f"{rule}; {held}" if held else rule)
            if asks and not held:
                born.append(i)
        for i in born:
            state = self._changed(state, done, i)
        return DemandJudgement(state, tuple(born), tuple(rules), relative)

    def removed(self, state: IncrtState, done: int, layer: int, *, born_here: bool) -> IncrtState:
        """The state after a head has been removed; where the policy gave birth to it, the layer becomes stricter."""
        state = self._changed(state, done, layer)
        if not born_here:
            return state
        stricter = replace(state.layers[layer], strictness=2 * state.layers[layer].strictness)
        return replace(state, layers=(*state.layers[:layer], stricter, *state.layers[layer + 1 :]))

    def _relative(self, layer: LayerDemand, reading: DemandReading, missing: int | None = None) -> RelativeDemand:
        scale = layer.largest or math.nan
        noise = reading.slope / reading.certainty if reading.certainty else math.nan
        return RelativeDemand(reading.slope / scale, abs(noise) / scale, self._threshold(layer, missing))

    def _threshold(self, layer: LayerDemand, missing: int | None) -> float:
        """Where births begin, of the layer's largest demand: higher for each head beyond those predicted."""
        beyond = 0 if missing is None or missing > 0 else 1 - missing
        return min(1.0, self.share * BEYOND**beyond) * layer.strictness

    def _judge(self, layer: LayerDemand, reading: DemandReading, missing: int | None) -> tuple[LayerDemand, str]:
        threshold = self._threshold(layer, missing) * layer.largest
        if not math.isfinite(reading.slope) or not math.isfinite(reading.certainty):
            return replace(layer, hits=0), "the demand is not finite"
        if reading.feeds < self.feeds:
            rule = "too little has been seen since the last change"
        elif reading.certainty <= self.certainty:
            rule = "the demand is not certain"
        elif reading.slope <= threshold:
            rule = "the demand is small"
        elif reading.slope <= self.steady * layer.last and not _lacks(missing):
            rule = "the demand is falling by itself"
        else:
            return replace(layer, hits=layer.hits + 1, last=reading.slope), "the demand is certain, large and steady"
        return replace(layer, hits=0, last=reading.slope), rule

    def _held(self, state: IncrtState, done: int, layer: int, *, expected: bool) -> str:
        """Why a layer can be given no head now; empty if it can. An expected one need not wait for the loss."""
        if done > self.last_birth_step:
            return "the run is near its end"
        if expected:
            return ""
        if done < self.warm_up:
            return "the run has just begun"
        first, last = state.losses[0], state.losses[-1]
        if first[0] > done - self.cool_down:
            return "the loss is not known for long enough"
        if last[1] < (1 - self.plateau) * first[1]:
            return "the loss is still falling"
        if done - state.layers[layer].changed < self.cool_down:
            return "the last change was not long ago"
        return ""

    def _changed(self, state: IncrtState, done: int, layer: int) -> IncrtState:
        new = replace(state.layers[layer], hits=0, last=0.0, changed=done)
        return replace(state, layers=(*state.layers[:layer], new, *state.layers[layer + 1 :]))


def _missing(predicted: Mapping[str, float], heads: int) -> int | None:
    """The heads that a layer lacks of those that were predicted; None if none were."""
    return int(predicted["count"]) - heads if predicted["count"] else None


def _lacks(missing: int | None) -> bool:
    """Whether a layer has fewer heads than were predicted."""
    return missing is not None and missing > 0
