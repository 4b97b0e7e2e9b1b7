"""Words for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meristem.errors import Remedy


class Notice(NamedTuple):
    """Something that a person should know, and perhaps what would mend it."""

    text: str
    remedy: Remedy | None = None


def counted(count: int, name: str, ending: str = "s") -> str:
    """A number of things: 1 row, 2,000 rows."""
    return f"{count:,} {name}{'' if count == 1 else ending}"


def listed(names: Sequence[str], most: int) -> str:
    """Names one after another, and how many there are beyond the first `most`."""
    rest = len(names) - most
    return ", ".join(names) if rest <= 0 else f"{', '.join(names[:most])} and {rest} more"


def describe_time(seconds: float) -> str:
    """A duration such as `1:02:03` or `4:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
