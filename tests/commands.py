"""How a command ended, for tests that call the command line (see the fixture `call`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Said(NamedTuple):
    """Exit status and what was printed."""

    code: int
    out: str
    err: str


Call = Callable[..., Said]
