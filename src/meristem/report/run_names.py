"""What runs are called beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Names of runs that tell them apart: of their folders, with those above where two are called the same."""
    whole = [path.resolve() for path in paths]
    names, depth = [path.name for path in whole], 1
    while len({*names}) < len({*whole}):
        depth += 1
        names = [str(Path(*path.parts[-depth:])) for path in whole]
    earlier = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(names, earlier, strict=True)]
