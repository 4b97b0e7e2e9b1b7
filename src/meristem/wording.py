"""Words for people."""

from __future__ import annotations


def counted(count: int, name: str, ending: str = "s") -> str:
    """A number of things: 1 row, 2,000 rows."""
    return f"{count:,} {name}{'' if count == 1 else ending}"
