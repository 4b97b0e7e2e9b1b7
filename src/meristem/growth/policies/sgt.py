"""SGT (arXiv 2603.23998): loops over a few high-entropy heads, born one at a time, deep layers first.

`judge` takes a state and the entropies, and gives the next state with the rule that led there; which loops exist, and
how strong they are, follows from a state and the number of updates done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

from meristem.errors import InputError
from meristem.gauges.entropy import EntropyGauge, EntropyReading, check_causal
from meristem.growth.edits import LoopHeads, SetStrengths
from meristem.growth.ema import Ema
from meristem.growth.looping import check_rule, chosen_heads
from meristem.growth.policy import Change, Decision, Policy, Readings, check_types
from meristem.limits import MOST_SEED, check_integer
from meristem.moves import Moves
from meristem.plan import Gates, Loop, Plan
from meristem.records import finite
from meristem.wording import counted

FORGOTTEN = 2.0**-16  # weight of a reading that an average of entropies need not remember
SHORTEST_WINDOW = 50  # updates, for windows given as a part of the run


@dataclass(frozen=True)
class Grown:
    """A layer that has grown: its looped heads, and the number of updates done when each of its passes was born.

    `others` are the heads that were there at a birth by "paper" and were not chosen: they fade.
    """

    layer: int
    heads: tuple[int, ...]
    births: tuple[int, ...]
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class SgtState:
    """Where the policy stands. `phase` is vanilla, grow or fixed; `grown` is in order of selection.

    >>> Sgt(total_steps=5000).begin(plan).phase
    'vanilla'
    """

    phase: str = "vanilla"
    window_end: int = 0
    grown: tuple[Grown, ...] = ()
    average: Ema = field(default_factory=partial(Ema, 0.0))  # of the entropies of all heads of all layers in a row
    not_before: int = 0  # updates done at the next decision, at least: blocks were born and have to be seen first
    heads: tuple[int, ...] = ()  # of every layer, that the average is of


@dataclass(frozen=True)
class Judgement:
    """The next state, and why: what was done (add, deepen, fix or wait), to which layer, from which shortlist."""

    state: SgtState
    action: str
    rule: str
    layer: int | None = None
    shortlist: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sgt(Policy):
    """When, where and how much extra depth grows.

    `start` and `window` are parts of the run below 1, and updates from 1 on. With birth "gate" a new pass begins with
    strength 0, so that nothing changes at its birth, and reaches 1 within a window; trained gates are added to that.
    With birth "paper" all heads of the layer begin at full strength and those not chosen fade within a window.
    `docs/configuration.md` says what each field means, under `[growth.sgt]`.

    >>> Sgt(total_steps=5000, passes=3).prepare(plan).gates
    Gates(passes=3, heads=2, trained=True)
    """

    name: ClassVar[str] = "sgt"
    exchanges: ClassVar[bool] = False

    total_steps: int
    passes: int = 1  # extra passes of a layer at most (K)
    heads_per_layer: int = 2  # looped heads of a layer (h)
    max_layers: int = 3  # grown layers at most
    shortlist: int = 3  # layers of highest entropy that may grow
    excluded: tuple[int, ...] = (0,)  # layers that never grow
    start: float = 0.05  # first decision
    window: float = 0.05  # between two decisions, and the time in which a new pass becomes strong
    beta: float = 0.5  # memory of the entropies' average
    order: Literal["deep_first", "shallow_first"] = "deep_first"
    # Which heads of a layer are looped: those of high or low entropy, random ones, or all.
    heads: Literal["high", "low", "random", "all"] = "high"
    birth: Literal["gate", "paper"] = "gate"
    train_gates: bool = True  # with birth "gate"; the published operator has none
    seed: int = 0  # of random heads
    probe: Literal["rows", "fused"] = "rows"  # entropy on some rows of a sequence, or fused on its last half
    rows: int = 16
    sequences: int = 8  # of a batch, over all processes, on which entropy is measured

    def __post_init__(self) -> None:
        check_types(self)
        check_integer("total_steps", self.total_steps, 1)
        check_rule(self)
        check_integer("seed", self.seed, 0, MOST_SEED)
        EntropyGauge(self.rows, self.probe, self.sequences)  # refuses bad values
        for name in ("start", "window"):
            value = getattr(self, name)
            if not 0 < value < math.inf or (value > 1 and value != round(value)):
                raise InputError(name, value, "must be a part of the run above 0 and below 1, or whole updates")
        if not 0 <= self.beta < 1:
            raise InputError("beta", self.beta, "must be from 0 to below 1")
        if self.birth == "paper" and self.heads == "all":
            raise InputError("birth", "paper", "fades the heads that are not chosen, but heads = 'all' leaves none")
        if self.first_decision + self.window_steps > self.total_steps:
            raise InputError(
                "start", self.start,
                f"leaves no time to grow: the first decision comes after {counted(self.first_decision, 'update')}, a "
                f"new pass needs {self.window_steps} to settle, and the run has {self.total_steps}",
            )  # fmt: skip

    @property
    def first_decision(self) -> int:
        """Updates done at the first decision."""
        return max(1, round(self.start * self.total_steps if self.start < 1 else self.start))

    @property
    def window_steps(self) -> int:
        """Updates between two decisions."""
        return max(SHORTEST_WINDOW, round(self.window * self.total_steps)) if self.window < 1 else round(self.window)

    @property
    def gauge(self) -> EntropyGauge:
        """What the policy decides by."""
        return EntropyGauge(self.rows, self.probe, self.sequences)

    @property
    def warnings(self) -> list[str]:
        """Settings that cannot have their effect in a run of this length."""
        decisions = 1 + (self.total_steps - self.window_steps - self.first_decision) // self.window_steps
        if self.passes > decisions:
            return [f"passes = {self.passes} cannot be reached: the run has time for {counted(decisions, 'decision')}"]
        return []

    # --- structure --------------------------------------------------------------------------------------------------

    def prepare(self, plan: Plan) -> Plan:
        """The plan with the gates that growth will need; the model is built from this one."""
        layers = plan.target or plan.layers
        for layer in self.excluded:
            if not 0 <= layer < len(layers):
                raise InputError("excluded", layer, f"must be in 0..{len(layers) - 1}")
        most_heads = [max(layer.heads, layer.ceiling or 0) for layer in layers]
        candidates = [heads for index, heads in enumerate(most_heads) if index not in self.excluded]
        if not candidates:
            raise InputError("excluded", self.excluded, "leaves no layer to grow")
        if not any(self.has_enough(heads) for heads in candidates):
            limit = f"must be at most {max(candidates)}, the heads of the layer that has most"
            raise InputError("heads_per_layer", self.heads_per_layer, limit)
        most = max(most_heads) if self.heads == "all" or self.birth == "paper" else self.heads_per_layer
        return replace(plan, gates=Gates(self.passes, most, self.train_gates and self.birth == "gate"))

    def check(self, plan: Plan) -> None:
        """Refuse a plan without the gates that growth will need, or without entropies; it may have grown already."""
        check_causal(plan)
        gates, trained = plan.gates, self.train_gates and self.birth == "gate"
        fewest = 1 if self.heads == "all" else self.heads_per_layer
        if gates is None or gates.passes < self.passes or gates.heads < fewest or gates.trained != trained:
            raise InputError("model.plan.gates", gates, "build the model from policy.prepare(plan)")

    def has_enough(self, heads: int) -> bool:
        """Whether a layer with this many heads can have a loop; others never grow."""
        return self.heads == "all" or heads >= self.heads_per_layer

    def edits(self, plan: Plan, state: SgtState, done: int) -> list[LoopHeads]:
        """What has to change in `plan` to be the structure after `done` updates."""
        edits = []
        for grown in state.grown:
            heads = self._running_heads(grown, done)
            fading = tuple(head for head in heads if head not in grown.heads)
            if plan.layer(grown.layer).loop != Loop(heads, len(grown.births), fading):
                edits.append(LoopHeads(grown.layer, heads, len(grown.births), fading))
        return edits

    def ramps(self, plan: Plan, state: SgtState, done: int) -> dict[int, list[list[float]]]:
        """Strengths after `done` updates without the trained part: by layer, (passes, looped heads)."""
        ramps = {}
        for grown in state.grown:
            heads = self._running_heads(grown, done)
            ages = [min(1.0, (done - birth) / self.window_steps) for birth in grown.births]
            if self.birth == "gate":
                ramps[grown.layer] = [[age] * len(heads) for age in ages]
            else:
                ramps[grown.layer] = [[1.0 if head in grown.heads else 1 - age for head in heads] for age in ages]
        return ramps

    def is_ramping(self, state: SgtState, done: int) -> bool:
        """Whether strengths still change."""
        return any(done <= grown.births[-1] + self.window_steps for grown in state.grown)

    def _running_heads(self, grown: Grown, done: int) -> tuple[int, ...]:
        fading = done < grown.births[0] + self.window_steps
        return tuple(sorted((*grown.heads, *grown.others))) if fading else grown.heads

    # --- decisions --------------------------------------------------------------------------------------------------

    def next_decision(self, state: SgtState) -> int | None:
        """Updates done at the next decision; None when the structure is fixed, or the run ends before it."""
        decision = {"vanilla": self.first_decision, "grow": state.window_end}.get(state.phase)
        if decision is None:
            return None
        decision = max(decision, state.not_before)
        return decision if decision < self.total_steps else None

    def probes(self, state: SgtState, done: int) -> bool:
        """Whether entropy has to be measured after `done` updates: near enough to a decision to be remembered."""
        decision = self.next_decision(state)
        return decision is not None and decision - self.probed_steps < done

    @property
    def probed_steps(self) -> int:
        """Updates before a decision in which entropy is measured; 16 with the published memory of 0.5."""
        return 1 if self.beta == 0 else math.ceil(math.log(FORGOTTEN) / math.log(self.beta))

    def decides(self, state: SgtState, done: int) -> bool:
        """Whether a decision is due after `done` updates."""
        decision = self.next_decision(state)
        return decision is not None and done >= decision

    def begin(self, plan: Plan) -> SgtState:
        return SgtState(average=Ema(self.beta))

    def needs(self, state: SgtState, step: int, plan: Plan) -> tuple[EntropyGauge, ...] | None:
        """Entropies near a decision; nothing but a look at the strengths while these change."""
        if plan.target:  # blocks are still to come
            return None
        if self.probes(state, step):
            return (self.gauge,)
        return () if self.is_ramping(state, step) else None

    def decide(self, state: SgtState, step: int, plan: Plan, readings: Readings) -> Decision:
        """Remember the entropies, judge when it is time, and let loops follow from the state."""
        reading: EntropyReading | None = readings.get(self.gauge)
        changes: list[Change] = []
        if reading is not None:
            average = state.average.plus([e for layer in reading.entropy for e in layer])
            state = replace(state, average=average, heads=plan.heads)
            if self.decides(state, step):
                judgement = self._judged(state, step, plan)
                changes.append(self._change(judgement, state, step, plan, reading))
                state = judgement.state
        for edit in self.edits(plan, state, step):
            if not any(change.layer == edit.layer for change in changes):
                changes.append(_faded(edit))
        ramps = self.is_ramping(state, step)
        quiet = (SetStrengths(self.ramps(plan, state, step)),) if ramps else ()
        return Decision(state, tuple(changes), quiet=quiet)

    def _judged(self, state: SgtState, step: int, plan: Plan) -> Judgement:
        judgement = self.judge(state, step, _by_layer(plan.heads, state.average.mean), plan.gates)
        able = any(self.has_enough(heads) for layer, heads in enumerate(plan.heads) if layer not in self.excluded)
        if not able and (window_end := step + self.window_steps) <= self.total_steps:  # heads may be born yet
            going = replace(state, phase="grow", window_end=window_end)
            judgement = Judgement(going, "wait", "no layer has heads enough: no decision in this window")
        # Where windows are shorter than its memory the average goes on, unless a reading has spoiled it for good.
        goes_on = self.window_steps < self.probed_steps and judgement.action != "wait"
        average = state.average if goes_on else Ema(self.beta)
        return replace(judgement, state=replace(judgement.state, average=average))

    def _change(self, judgement: Judgement, before: SgtState, step: int, plan: Plan, reading: EntropyReading) -> Change:
        entropies = _by_layer(plan.heads, before.average.mean)
        grown = next((g for g in judgement.state.grown if g.layer == judgement.layer), None)
        facts = {
            "heads": None if grown is None else list(grown.heads),
            "passes": None if grown is None else len(grown.births),
            "birth": self.birth,
            "shortlist": list(judgement.shortlist),
            "layer_entropy": [finite(sum(layer) / len(layer)) for layer in entropies],
            "head_entropy": [[finite(value) for value in layer] for layer in entropies],
            "next_decision": self.next_decision(judgement.state),
            **({"loops": [loop.facts for loop in reading.loops]} if reading.loops else {}),
        }
        edits = tuple(edit for edit in self.edits(plan, judgement.state, step) if edit.layer == judgement.layer)
        return Change(judgement.action, judgement.rule, edits, judgement.layer, facts)

    def moved(self, state: SgtState, step: int, plan: Plan, moves: Moves) -> SgtState:
        """Loops and entropies follow their layers and heads; a copy of a looped layer is looped as well.

        What is born is taken for the mean of its layer until it is seen. Blocks that come before anything was measured
        have to be seen for as long as any decision looks back.
        """
        if moves.stays:
            return state
        grown = []
        for entry in state.grown:
            copies = [new for new, source in moves.copies.items() if source == entry.layer]
            for layer in [new for new, old in enumerate(moves.layers) if old == entry.layer] + copies:
                heads, others = (_moved(moves, layer, heads) for heads in (entry.heads, entry.others))
                if heads and plan.layers[layer].loop is not None:
                    grown.append(Grown(layer, heads, entry.births, others))
        average = self._moved_average(state, plan, moves)
        wait = None in moves.layers and not average.count
        not_before = step + self.probed_steps if wait else state.not_before
        return replace(state, grown=tuple(grown), average=average, not_before=not_before, heads=plan.heads)

    def _moved_average(self, state: SgtState, plan: Plan, moves: Moves) -> Ema:
        """The average of the heads that there are now."""
        if sum(state.heads) != len(state.average.value) or not state.average.value:
            return Ema(self.beta)
        before = _by_layer(state.heads, state.average.value)
        means = [sum(layer) / len(layer) for layer in before]
        values: list[float] = []
        for new, old in enumerate(moves.layers):
            source = moves.copies.get(new, old)
            mean = sum(means) / len(means) if source is None else means[source]
            kept = [] if source is None else before[source]
            heads = moves.heads.get(new, tuple(range(plan.heads[new])))  # a copy may have other heads than its source
            values += [mean if head is None or head >= len(kept) else kept[head] for head in heads]
        return replace(state.average, value=tuple(values))

    def load(self, data: Mapping[str, Any]) -> SgtState:
        grown = tuple(
            Grown(g["layer"], tuple(g["heads"]), tuple(g["births"]), tuple(g.get("others", ()))) for g in data["grown"]
        )
        average = Ema(self.beta, tuple(data["average"]["value"]), data["average"]["count"])
        heads = tuple(data.get("heads", ()))
        return SgtState(data["phase"], data["window_end"], grown, average, data["not_before"], heads)

    def fits(self, state: SgtState, plan: Plan) -> bool:
        known = all(g.layer in range(len(plan.layers)) and g.births for g in state.grown)
        inside = known and all(h in range(plan.heads[g.layer]) for g in state.grown for h in (*g.heads, *g.others))
        return inside and len(state.average.value) in (0, sum(plan.heads))

    def judge(
        self, state: SgtState, done: int, entropies: Sequence[Sequence[float]], gates: Gates | None = None
    ) -> Judgement:
        """Take the decision that is due, from the entropies of all heads of all layers.

        No more heads are looped than there are `gates` for, where heads were born beyond those of the plan.
        """
        window_end = done + self.window_steps
        going = replace(state, phase="grow", window_end=window_end)
        if not all(math.isfinite(value) for layer in entropies for value in layer):
            return Judgement(going, "wait", "an entropy is not finite: no decision in this window")
        if window_end > self.total_steps:
            rule = "a new pass would not have settled before the end of the run"
            return Judgement(replace(state, phase="fixed"), "fix", rule)
        means = [sum(layer) / len(layer) for layer in entropies]
        eligible = [i for i, layer in enumerate(entropies) if i not in self.excluded and self.has_enough(len(layer))]
        ranked = sorted(eligible, key=lambda i: (-means[i], -i))
        listed = tuple(ranked[: self.shortlist])
        for index, grown in enumerate(state.grown):
            if grown.layer in listed and len(grown.births) < self.passes:
                deeper = replace(grown, births=(*grown.births, done))
                entries = (*state.grown[:index], deeper, *state.grown[index + 1 :])
                rule = "first grown layer that is on the shortlist and has fewer passes than allowed"
                return Judgement(
                    replace(state, phase="grow", window_end=window_end, grown=entries),
                    "deepen",
                    rule,
                    grown.layer,
                    listed,
                )
        selected = [grown.layer for grown in state.grown]
        deep = self.order == "deep_first"
        if len(selected) < self.max_layers:
            bound = (min if deep else max)(selected, default=None)
            new = [i for i in listed if bound is None or (i < bound if deep else i > bound)]
            if new:
                layer = max(new) if deep else min(new)
                born = self._born(layer, entropies[layer], done, gates)
                rule = f"{'deepest' if deep else 'shallowest'} layer of the shortlist"
                if bound is not None:
                    rule += f" that is {'shallower' if deep else 'deeper'} than all grown ones"
                return Judgement(
                    replace(state, phase="grow", window_end=window_end, grown=(*state.grown, born)),
                    "add",
                    rule,
                    layer,
                    listed,
                )
            rule = f"no layer of the shortlist is {'shallower' if deep else 'deeper'} than all grown ones"
        else:
            rule = f"{self.max_layers} layer{'s have' if self.max_layers > 1 else ' has'} grown"
        if state.grown:
            rule += f", and none of these that is on the shortlist has fewer than {self.passes} passes"
        return Judgement(replace(state, phase="fixed"), "fix", rule, shortlist=listed)

    def _born(self, layer: int, entropies: Sequence[float], done: int, gates: Gates | None) -> Grown:
        most = len(entropies) if gates is None else gates.heads
        heads = self.chosen_heads(layer, entropies)[:most]
        others = [head for head in range(len(entropies)) if self.birth == "paper" and head not in heads]
        return Grown(layer, heads, (done,), tuple(others[: most - len(heads)]))

    def chosen_heads(self, layer: int, entropies: Sequence[float]) -> tuple[int, ...]:
        """The heads of a layer that are looped, given the entropies of them all."""
        return chosen_heads(self.heads, self.heads_per_layer, entropies, layer, self.seed)


def _by_layer(heads: Sequence[int], values: Sequence[float]) -> list[list[float]]:
    """Values of all heads in a row, layer by layer."""
    return [list(values[a:b]) for a, b in pairwise(accumulate(heads, initial=0))]


def _moved(moves: Moves, layer: int, heads: Sequence[int]) -> tuple[int, ...]:
    """Where heads of a layer, by its new number, are now; those that have left are left out."""
    return tuple(new for new in (moves.head(layer, head) for head in heads) if new is not None)


def _faded(edit: LoopHeads) -> Change:
    """The end of a published birth: the heads that were not chosen have left."""
    facts = {"heads": list(edit.heads), "passes": edit.passes, "shortlist": []}
    return Change("fade", "a window has passed since the birth", (edit,), edit.layer, facts)
