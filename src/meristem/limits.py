"""How large things may be: far above all that is built today, and small enough that asking for more is an answer.

A size is checked before anything of that size is made, so that a slip of the finger is one line instead of a machine
without memory.
"""

from __future__ import annotations

from meristem.errors import InputError

MOST_LAYERS = 2**14  # the deepest Transformers that were trained have about 1,000
MOST_WIDTH = 2**20  # 50 times the widest
MOST_FEED_FORWARD = 2**24
MOST_HEADS = 2**20  # as many as the width can be divided into
MOST_TOKEN_IDS = 2**24  # vocabularies have up to 2**20
MOST_CONTEXT = 2**30
MOST_CLASSES = 2**24
MOST_BATCH_TOKENS = 2**40
MOST_PASSES = 2**14  # times that a loop or block is run again
MOST_PROCESSES = 2**20
MOST_SEED = 2**63 - 1
LARGEST_COUNT = 2**62  # of rows, tokens, bytes: sums of two still fit into 64 bits
LARGEST_DOCUMENT = 2**30  # bytes of one document, or of one line of a file: four human chromosomes


def check_integer(field: str, value: object, least: int, most: int = LARGEST_COUNT) -> None:
    """Raise unless a value is an integer from `least` to `most`; true and false are none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(field, value, f"must be an integer of at least {least}")
    if value < least:
        raise InputError(field, value, f"must be at least {least}")
    if value > most:
        raise InputError(field, value, f"must be at most {most:,}")
