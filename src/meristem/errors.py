"""Errors that a user can cause and should be able to mend."""

from __future__ import annotations


class InputError(ValueError):
    """A bad value: which field, which value, and what would be right."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field} = {value!r}: {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class RunError(RuntimeError):
    """Something on disk or in a run is not as it should be; the message says what and where."""


def missing_extra(package: str, extra: str) -> RunError:
    """The error for an optional package that is not installed."""
    return RunError(f"{package} is not installed; install it with: pip install 'meristem[{extra}]'")
