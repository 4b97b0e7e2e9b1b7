"""What JSON files say, taken field by field, each with its type; a ValueError names the field and what is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, TypeVar

from meristem.errors import Remedy, RunError, shown
from meristem.files import LONGEST_NAME
from meristem.limits import LARGEST_COUNT, check_integer

_SHA256 = re.compile(r"[0-9a-f]{64}")

Kind = TypeVar("Kind")


class Fields:
    """The fields of a JSON object; `name` says which one it is of those in a file."""

    def __init__(self, content: Any, name: str = "") -> None:
        if not isinstance(content, dict):
            raise ValueError(f"{name or 'the content'} is {shown(content)}, expected an object")
        self._content, self._name = content, name

    def integer(self, field: str, least: int = 0, most: int = LARGEST_COUNT) -> int:
        value: int = self._value(field)
        check_integer(self._named(field), value, least, most)
        return value

    def number(self, field: str, least: float, most: float) -> float:
        value = self._value(field)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise self._wrong(field, f"a number from {least} to {most}")
        return float(value)

    def flag(self, field: str) -> bool:
        return self._typed(field, bool, "true or false")

    def text(self, field: str, allowed: Sequence[str] | None = None) -> str:
        value = self._typed(field, str, "text")
        if allowed is not None and value not in allowed:
            raise self._wrong(field, f"one of {', '.join(allowed)}")
        return value

    def text_or_none(self, field: str) -> str | None:
        return None if self._value(field) is None else self.text(field)

    def sha256(self, field: str) -> str:
        value = self.text(field)
        if not _SHA256.fullmatch(value):
            raise self._wrong(field, "a sha256 in hex")
        return value

    def file_name(self, field: str) -> str:
        """The name of a file in the same folder, never the path to another place."""
        value = self.text(field)
        printable = value.isprintable()  # a half surrogate is not
        if not printable or value in ("", "..") or PurePath(value).name != value or len(value.encode()) > LONGEST_NAME:
            raise self._wrong(field, "a plain file name")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        values = self._typed(field, list, "a list of texts")
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(field, "a list of texts")
        return tuple(values)

    def counts(self, field: str) -> dict[str, int]:
        """An object whose values are all counts."""
        inner = self.object(field)
        return {name: inner.integer(name) for name in inner._content}

    def integers(self, field: str) -> tuple[int, ...]:
        values = self._typed(field, list, "a list of integers")
        for number, value in enumerate(values):
            check_integer(f"{self._named(field)}[{number}]", value, 0)
        return tuple(values)

    def objects(self, field: str) -> list[Fields]:
        values = self._typed(field, list, "a list of objects")
        return [Fields(value, f"{self._named(field)}[{number}]") for number, value in enumerate(values)]

    def object(self, field: str) -> Fields:
        return Fields(self._value(field), self._named(field))

    def _value(self, field: str) -> Any:
        if field not in self._content:
            raise ValueError(f"{self._named(field)} is missing")
        return self._content[field]

    def _typed(self, field: str, kind: type[Kind], expected: str) -> Kind:
        value = self._value(field)
        if not isinstance(value, kind):
            raise self._wrong(field, expected)
        return value

    def _named(self, field: str) -> str:
        return f"{self._name}.{field}" if self._name else field

    def _wrong(self, field: str, expected: str) -> ValueError:
        return ValueError(f"{self._named(field)} is {shown(self._value(field))}, expected {expected}")


def agree(what: str, found: int, expected: int, where: str) -> None:
    """A ValueError unless two counts that a file states are the same."""
    if found != expected:
        raise ValueError(f"{what} is {found:,}, but {where} {expected:,}")


def wrong(path: PurePath, what: str) -> RunError:
    """The error for a file of prepared data that is not as it was made."""
    return RunError(f"{path}: {what}; prepare it again", Remedy(("overwrite",)))
