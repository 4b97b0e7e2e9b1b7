"""Errors that a user, or the machine, can cause, and what a person is told of them."""

from __future__ import annotations

LONGEST = 200  # characters of a value that a message repeats


class InputError(ValueError):
    """A bad value: which field, which value, and what would be right."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{shortened(field)} = {shown(value)}: {expected}")
        self.field = field
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str]]:
        """How it travels from a worker process to its parent."""
        return type(self), (self.field, self.value, self.expected)


class RunError(RuntimeError):
    """Something on disk or in a run is not as it should be; the message says what and where."""


class MachineError(RuntimeError):
    """The machine cannot do what was asked: its disk, its memory. The input may be right."""


def missing_extra(package: str, extra: str) -> RunError:
    """The error for an optional package that is not installed."""
    return RunError(f"{package} is not installed; install it with: pip install 'meristem[{extra}]'")


def shown(value: object) -> str:
    """A value as messages show it: its repr, with the middle left out if it is long."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python does not write out integers of thousands of digits
        return f"an integer of {value.bit_length():,} bits" if isinstance(value, int) else type(value).__name__


def shortened(text: str) -> str:
    """A text of at most `LONGEST` characters, with the middle left out if it is longer."""
    if len(text) <= LONGEST:
        return text
    half = (LONGEST - len(" ... ")) // 2
    return f"{text[:half]} ... {text[-half:]}"
