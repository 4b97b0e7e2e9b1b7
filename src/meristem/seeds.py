"""Seeds for parts of a run, each of its own."""

from __future__ import annotations

import random


def own_seed(purpose: str) -> int:
    """A seed for what the text says; other texts have others, not the next number."""
    return random.Random(purpose).getrandbits(32)
