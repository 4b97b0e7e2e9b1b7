"""How many cores of the machine this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that the system lets this process run on; all of the machine where it cannot be asked."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
