"""Arguments of the command line that are more than one value."""

from __future__ import annotations

import math

from meristem.errors import InputError


def positive_numbers(field: str, text: str) -> list[float]:
    """Positive numbers that are separated by commas; `field` is what bad ones are called."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < math.inf for number in found):
        raise InputError(field, text, "must be a positive number or several separated by commas")
    return found


def integers(field: str, text: str) -> list[int]:
    """Integers that are separated by commas; `field` is what bad ones are called."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(field, text, "must be an integer or integers separated by commas") from None
