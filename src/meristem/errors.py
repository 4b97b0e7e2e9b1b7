"""Errors that a user, or the machine, can cause, and what a person is told of them."""

from __future__ import annotations

from typing import NamedTuple

LONGEST = 200  # characters of a value that a message repeats


class Remedy(NamedTuple):
    """What would mend something: another `call` with its target, or the same one with other `arguments`.

    A message says it in words. Whoever shows the message adds how it is asked for there: the command line its flags.
    An argument is named as in the library, with its value if it must be a certain one: `overwrite`, `on_error=skip`.
    """

    arguments: tuple[str, ...] = ()
    call: str = ""
    target: str = ""


class InputError(ValueError):
    """A bad value: which field, which value, what would be right, and perhaps what would mend it.

    >>> Plan.uniform(layers=2, width=30, heads=4)
    Traceback (most recent call last):
        ...
    meristem.errors.InputError: heads = 4: must divide width 30 into even head dims: one of [1, 3, 5, 15]
    """

    def __init__(self, field: str, value: object, expected: str, remedy: Remedy | None = None) -> None:
        super().__init__(f"{shortened(field)} = {shown(value)}: {expected}")
        self.field = field
        self.value = value
        self.expected = expected
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str, Remedy | None]]:
        """How it travels from a worker process to its parent."""
        return type(self), (self.field, self.value, self.expected, self.remedy)


class RunError(RuntimeError):
    """Something on disk or in a run is not as it should be; the message says what and where.

    >>> load_run("runs/none")
    Traceback (most recent call last):
        ...
    meristem.errors.RunError: runs/none: not a run (it has no config.toml)
    """

    def __init__(self, message: str, remedy: Remedy | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


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
