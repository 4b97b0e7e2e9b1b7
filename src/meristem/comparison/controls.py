"""The control for births by demand, a policy that configurations name as `meristem.comparison.controls:BirthsAt`."""

from __future__ import annotations

from dataclasses import dataclass

from meristem.errors import InputError
from meristem.gauges.gauge import Gauge
from meristem.growth.births import Births, birth, full_layers, head_facts
from meristem.growth.policy import ENDLESS, Decision, Readings, check_types
from meristem.moves import Moves
from meristem.plan import Plan


@dataclass(frozen=True)
class BirthsAt(Births):
    """Heads are born after so many updates in the layers named, and are drawn at random.

    With the births of another run that tells what the directions were worth that its heads began with; with the same
    times and other layers, what its choice of layers was worth.
    """

    times: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    start_heads: int = 0  # heads of every layer at the start, those of the plan being the ceiling; 0 for the plan's
    last_birth: float = 1.0
    total_steps: int = ENDLESS
    max_heads: int = 0  # of a layer; 0 for no limit
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if len(self.times) != len(self.layers):
            raise InputError("layers", self.layers, f"must be one for each of the {len(self.times)} times")
        if list(self.times) != sorted(self.times) or any(time < 1 for time in self.times):
            raise InputError("times", self.times, "must be updates in their order, from 1 on")

    def begin(self, plan: Plan) -> list[int]:
        """The layers of the births to come."""
        return list(self.layers)

    def needs(self, state: list[int], step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return () if step in self.times else None

    def decide(self, state: list[int], step: int, plan: Plan, readings: Readings) -> Decision:
        """One birth, in the layer named or, where it is full, the next one that is not."""
        number, count = self.times.index(step), len(plan.layers)
        full = full_layers(plan, self.max_heads)
        order = [(state[number] + offset) % count for offset in range(count)]
        chosen = next((layer for layer in order if layer not in full), None)
        rules = ["a birth was laid down for now" if layer == chosen else "none was laid down" for layer in range(count)]
        facts = head_facts(plan, (), rules, ())
        if chosen is None:
            return Decision(state, measured=facts)
        return Decision(state, (birth(plan, step, chosen, self.seed, rules, facts),))

    def moved(self, state: list[int], step: int, plan: Plan, moves: Moves) -> list[int]:
        return [moves.layer(layer) or 0 for layer in state]
