"""Words for people."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, name: str, ending: str = "s") -> str:
    """A number of things: 1 row, 2,000 rows."""
    return f"{count:,} {name}{'' if count == 1 else ending}"


def listed(names: Sequence[str], most: int) -> str:
    """Names one after another, and how many there are beyond the first `most`."""
    rest = len(names) - most
    return ", ".join(names) if rest <= 0 else f"{', '.join(names[:most])} and {rest} more"
