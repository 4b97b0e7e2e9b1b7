"""Exponential moving averages with a short memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ema:
    """An exponential moving average of some numbers, from nothing; `mean` corrects for its short memory."""

    beta: float
    value: tuple[float, ...] = ()
    count: int = 0

    def plus(self, new: Sequence[float]) -> Ema:
        """The average with one reading more."""
        old = self.value or (0.0,) * len(new)
        value = tuple(self.beta * a + (1 - self.beta) * b for a, b in zip(old, new, strict=True))
        return Ema(self.beta, value, self.count + 1)

    @property
    def mean(self) -> list[float]:
        return [value / (1 - self.beta**self.count) for value in self.value]
