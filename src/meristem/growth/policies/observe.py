"""The entropy of every head, recorded every so many updates; nothing is decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meristem.errors import InputError
from meristem.gauges.entropy import EntropyGauge, EntropyReading, check_causal
from meristem.growth.policy import Decision, Policy, Readings
from meristem.plan import Plan


@dataclass(frozen=True)
class Observe(Policy):
    """Records every head's entropy, and every loop's strength and size; put first, what others decide from."""

    name: ClassVar[str] = "observe"
    exchanges: ClassVar[bool] = False

    every: int  # updates
    probe: Literal["rows", "fused"] = "rows"  # entropy on some rows of a sequence, or fused on its last half
    rows: int = 16
    sequences: int = 8

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise InputError("every", self.every, "must be an integer of at least 1")
        EntropyGauge(self.rows, self.probe, self.sequences)  # refuses bad values

    @property
    def gauge(self) -> EntropyGauge:
        """What is recorded."""
        return EntropyGauge(self.rows, self.probe, self.sequences)

    def check(self, plan: Plan) -> None:
        check_causal(plan)

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[EntropyGauge, ...] | None:
        return (self.gauge,) if step % self.every == 0 else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        reading: EntropyReading = readings[self.gauge]
        return Decision(state, observed=reading.facts)
