"""What runs are called beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Names of runs that tell them apart: of their folders, with those above where two are called the same."""
    parts = [path.resolve().parts for path in paths]
    names: list[str] = []
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len({*names}) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]  # the same run more than once
