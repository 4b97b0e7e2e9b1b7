"""Scales: where a value lies on an axis, and the round values that the axis names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meristem.report.drawing.numbers import compact, same_decimals

Tick = tuple[float, str]  # a value and how it is written


@dataclass(frozen=True)
class Scale:
    """An even scale from `low` to `high`, which may also be the smaller one: then values run the other way."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """How far along the axis a value lies: 0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[Tick]:
        """About `count` round values with their labels."""
        values = self._values(count)
        return list(zip(values, same_decimals(values), strict=True))

    def _values(self, count: int) -> list[float]:
        return nice_ticks(min(self.low, self.high), max(self.low, self.high), count)


class CountScale(Scale):
    """An even scale of steps, tokens or heads: only whole numbers are named."""

    def ticks(self, count: int) -> list[Tick]:
        return [(value, compact(value)) for value in self._values(count) if value.is_integer()]


class LogScale(Scale):
    """A logarithmic scale; what is below it, or not above zero, lies on its low end."""

    def share(self, value: float) -> float:
        if math.isnan(value):
            return math.nan
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)

    def ticks(self, count: int) -> list[Tick]:
        """The powers of ten, however many they are, and some values between them where there are few."""
        return [(value, f"{value:g}") for value in log_ticks(self.low, self.high)]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers within `low` and `high`: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(math.log(factor * power / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within `low` and `high`, and their double and fivefold where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
    ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
