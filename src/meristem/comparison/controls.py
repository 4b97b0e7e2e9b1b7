"""The control for births by demand, a policy that configurations name as `meristem.comparison.controls:BirthsAt`."""

from __future__ import annotations

from dataclasses import dataclass

from meristem.errors import InputError
from meristem.gauges.gauge import Gauge
from meristem.growth.births import FULL, Births, birth, check_limits, full_layers, head_facts
from meristem.growth.policy import Change, Decision, Readings, check_types
from meristem.moves import Moves
from meristem.plan import Plan

LAID_DOWN = "a birth was laid down for now"


@dataclass(frozen=True)
class BirthsAt(Births):
    """Heads are born after so many updates in the layers named, and are drawn at random.

    With the births of another run that tells what the directions were worth that its heads began with; with the same
    times and other layers, what its choice of layers was worth. Several may be born after the same update.
    """

    times: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    start_heads: int = 0  # heads of every layer at the start, those of the plan being the ceiling; 0 for the plan's
    max_heads: int = 0  # of a layer; 0 for no limit
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_limits(self)
        if len(self.times) != len(self.layers):
            raise InputError("layers", self.layers, f"must be one for each of the {len(self.times)} times")
        if list(self.times) != sorted(self.times) or any(time < 1 for time in self.times):
            raise InputError("times", self.times, "must be updates in their order, from 1 on")

    def begin(self, plan: Plan) -> list[int]:
        """The layers of all births, as they are numbered now."""
        count = len(plan.target or plan.layers)
        for layer in self.layers:
            if not 0 <= layer < count:
                raise InputError("layers", layer, f"must be from 0 to {count - 1}, the layers of the model")
        return list(self.layers)

    def needs(self, state: list[int], step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return () if step in self.times else None

    def decide(self, state: list[int], step: int, plan: Plan, readings: Readings) -> Decision:
        """The births of this update, each in the layer named or, where it is full, the next one that is not."""
        changes: list[Change] = []
        grown, count = plan, len(plan.layers)
        for named in (layer for time, layer in zip(self.times, state, strict=True) if time == step):
            order = [(named + offset) % count for offset in range(count)]
            chosen = next((layer for layer in order if layer not in full_layers(grown, self.max_heads)), None)
            if chosen is None:
                break
            rules = [LAID_DOWN if layer == chosen else "none was laid down" for layer in range(count)]
            twins = sum(change.layer == chosen for change in changes)  # which would otherwise begin with its weights
            facts = head_facts(grown, (), rules, ())
            changes.append(birth(grown, step, chosen, self.seed + twins, rules, facts))
            grown = changes[-1].edits[0].apply(grown)
        if not changes:
            return Decision(state, measured=head_facts(plan, (), [FULL] * count, ()))
        return Decision(state, tuple(changes))

    def moved(self, state: list[int], step: int, plan: Plan, moves: Moves) -> list[int]:
        return [moves.layer(layer) or 0 for layer in state]
