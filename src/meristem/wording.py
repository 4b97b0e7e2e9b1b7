"""Words for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meristem.errors import Remedy

CLOSE = 0.65  # of difflib's measure: from here on a name is taken for another one that was misspelt


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


def alike(name: str, known: Sequence[str]) -> str | None:
    """The known name that is much like this one, or has its letters in another order: that may be a slip."""
    turned = [other for other in known if sorted(other) == sorted(name)]
    found = difflib.get_close_matches(name, known, n=1, cutoff=CLOSE) or turned
    return found[0] if found else None


def meant(name: str, known: Iterable[str], form: str = "{}") -> str:
    """What else to write than an unknown name: the known one that is much like it or, if none is, all there are.

    >>> meant("sgd", ["sgt", "stack"]), meant("adam", ["sgt", "stack"])
    ('did you mean sgt?', 'there are sgt, stack')
    """
    known = list(known)
    if (near := alike(name, known)) is not None:
        return f"did you mean {form.format(near)}?"
    return f"there are {', '.join(map(form.format, known))}"


def describe_time(seconds: float) -> str:
    """A duration such as `1:02:03` or `4:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
