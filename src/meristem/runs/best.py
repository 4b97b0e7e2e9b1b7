"""The best of a run's evaluations, by one of the numbers that are measured on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

HIGHER = ("accuracy", "macro_f1")  # the numbers of which more is better


@dataclass(frozen=True)
class Best:
    """The step at which the number `by` was best so far, if any, and how many evaluations since then were not better.

    >>> Best("held_out_loss").after(100, 2.5).after(200, 2.1).after(300, 2.2)
    Best(by='held_out_loss', step=200, value=2.1, since=1)
    """

    by: str
    step: int | None = None
    value: float | None = None
    since: int = 0

    def after(self, step: int, value: float | None) -> Best:
        """The best after one more evaluation; a number that is missing or not finite is never better."""
        if value is None or not math.isfinite(value):
            better = False
        elif self.value is None:
            better = True
        else:
            better = value > self.value if self.by in HIGHER else value < self.value
        return replace(self, step=step, value=value, since=0) if better else replace(self, since=self.since + 1)

    def exhausted(self, patience: int) -> bool:
        """Whether a run with this patience ends here; 0 is without end."""
        return 0 < patience <= self.since


def best_of(metrics: Iterable[Mapping[str, Any]], by: str) -> Best:
    """The best of the evaluations among lines of metrics.jsonl."""
    best = Best(by)
    for entry in metrics:
        if "held_out_loss" in entry:
            best = best.after(entry["step"], entry.get(by))
    return best
