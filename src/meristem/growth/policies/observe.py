"""The entropy of every head, recorded every so many updates; nothing is decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meristem.errors import InputError
from meristem.gauges.entropy import EntropyGauge, EntropyReading, check_causal
from meristem.growth.policy import ENDLESS, Decision, Policy, Readings, check_types
from meristem.limits import check_integer
from meristem.plan import Plan


@dataclass(frozen=True)
class Observe(Policy):
    """Records every head's entropy, and every loop's strength and size; put first, what others decide from.

    >>> growth = Grower(model, optimizer, [Observe(every=1)]).step(tokens)
    >>> [len(layer) for layer in growth.observation["head_entropy"]]
    [4, 4]
    """

    name: ClassVar[str] = "observe"
    exchanges: ClassVar[bool] = False

    every: int = 0  # updates; a hundredth of the run if 0
    probe: Literal["rows", "fused"] = "rows"  # entropy on some rows of a sequence, or fused on its last half
    rows: int = 16
    sequences: int = 8
    total_steps: int = ENDLESS

    def __post_init__(self) -> None:
        check_types(self)
        check_integer("every", self.every, 0)
        EntropyGauge(self.rows, self.probe, self.sequences)  # refuses bad values

    @property
    def gauge(self) -> EntropyGauge:
        """What is recorded."""
        return EntropyGauge(self.rows, self.probe, self.sequences)

    def check(self, plan: Plan) -> None:
        check_causal(plan)
        if not self.every and self.total_steps == ENDLESS:
            raise InputError("every", self.every, "must be given where total_steps, the length of the run, is not")

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[EntropyGauge, ...] | None:
        every = self.every or max(1, self.total_steps // 100)
        return (self.gauge,) if step % every == 0 else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        reading: EntropyReading = readings[self.gauge]
        return Decision(state, observed=reading.facts)
