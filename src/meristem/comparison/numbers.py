"""Numbers of a comparison as tables show them."""

from __future__ import annotations

from collections.abc import Sequence

from meristem.comparison.analysis import ArmRow
from meristem.comparison.paired import PairedDifference
from meristem.wording import describe_time

UNITS = ("", " K", " M", " G", " T", " P", " E")


def short(value: float | None, digits: int = 3) -> str:
    """A number with a unit of thousands, such as `1.23 M`; a dash where there is none."""
    if value is None:
        return "-"
    step = 0
    while abs(value) >= 999.5 and step < len(UNITS) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.{digits}g}{UNITS[step]}"


def score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def signed(value: float) -> str:
    return f"{value:+.4f}"


def interval(difference: PairedDifference) -> str:
    """A difference with its interval, which it has not where all pairs differ alike."""
    if not difference.has_spread:
        return f"{signed(difference.mean)} in all {difference.pairs} pairs"
    return f"{signed(difference.mean)} [{signed(difference.low)}, {signed(difference.high)}]"


def seconds(value: float | None) -> str:
    """A duration: with a decimal up to a hundred seconds, then as minutes and hours."""
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 99.95 else describe_time(value)


def gibibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**30:.2f} GiB"


def parts(values: Sequence[float]) -> str:
    """By how much runs are off, as the least and the most of them; a dash where there are none."""
    if not values:
        return "-"
    ends = list(dict.fromkeys(f"{100 * end:+.2f}" for end in (min(values), max(values))))
    return " to ".join(ends) + " %"


def p_value(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def structures(row: ArmRow, most: int = 3) -> str:
    """The structures that seeds ended with, the most frequent first."""
    ordered = sorted(row.structures.items(), key=lambda entry: -entry[1])
    named = [text if len(ordered) == 1 else f"{text} ({count})" for text, count in ordered[:most]]
    return "; ".join(named) + (f"; {len(ordered) - most} others" if len(ordered) > most else "")


def target(row: ArmRow) -> str:
    """Seconds to the target loss, and how many seeds reached it where not all did."""
    if row.seconds_to_target is None:
        return "not reached"
    return seconds(row.seconds_to_target) + ("" if row.reached == row.seeds else f" ({row.reached} of {row.seeds})")
