"""Amounts as people write them in budgets."""

from __future__ import annotations

import re
from typing import NamedTuple

NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e\+?\d{1,2})?", re.IGNORECASE)


class Amount(NamedTuple):
    """So much, or so many times what there is."""

    value: float
    relative: bool


def read_amount(text: str) -> Amount | None:
    """The amount that a text says; relative if it has a point and no exponent, and None if it is no such number.

    >>> read_amount("0.7"), read_amount("1.5e6")
    (Amount(value=0.7, relative=True), Amount(value=1500000.0, relative=False))
    """
    number = NUMBER.fullmatch(text)
    return None if number is None else Amount(float(text), "." in text and number[2] is None)
