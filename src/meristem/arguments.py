"""Arguments of the command line that are more than one value."""

from __future__ import annotations

from meristem.errors import InputError


def integers(field: str, text: str) -> list[int]:
    """Integers that are separated by commas; `field` is what bad ones are called."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(field, text, "must be an integer or integers separated by commas") from None
