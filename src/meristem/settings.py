"""Settings as the types of their fields say: what configurations and policies share.

Known are int, float, bool, str, a `Literal` of words, a `tuple[T, ...]`, and several of these or none. Of any other
type nothing is checked here.
"""

from __future__ import annotations

import json
import math
import tomllib
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin

from meristem.errors import InputError

LARGEST = 2**63  # whole numbers are below
PLAIN = (int, float, bool, str)


def of_type(name: str, value: Any, kind: Any) -> Any:
    """The value as the type of its field, or an error that says which type that is; true and false are no numbers."""
    if get_origin(kind) in (Union, types.UnionType):
        *options, last = (option for option in get_args(kind) if option is not type(None))
        if value is None and type(None) in get_args(kind):
            return None
        for option in options:
            with suppress(InputError):
                return of_type(name, value, option)
        return of_type(name, value, last)
    if is_list(kind):
        return _of_list(name, value, get_args(kind)[0])
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InputError(name, value, f"must be one of {', '.join(map(str, get_args(kind)))}")
        return value
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < LARGEST else math.inf
    if kind in PLAIN and type(value) is not kind:
        raise InputError(name, value, f"must be of type {kind.__name__}")
    if kind is int and abs(value) >= LARGEST:
        raise InputError(name, value, "must be below 2^63")
    return value


def is_list(kind: Any) -> bool:
    """Whether a type is that of any number of values, `tuple[T, ...]`."""
    return get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,)


def _of_list(name: str, value: Any, inner: Any) -> tuple[Any, ...]:
    simple = str if get_origin(inner) is Literal else inner
    allowed = (int, float) if simple is float else (simple,)
    plain = simple in PLAIN
    if not isinstance(value, (list, tuple)) or (plain and not all(type(entry) in allowed for entry in value)):
        raise InputError(name, value, f"must be a list of {simple.__name__ if plain else simple}")
    return tuple(of_type(name, entry, inner) for entry in value)


def from_text(text: str, kind: Any) -> Any:
    """A setting of the command line: TOML, or else plain text; of a list, what stands between commas."""
    if kind in (str, str | None) or get_origin(kind) is Literal:
        return text
    written = text
    if is_list(kind) and not text.startswith("["):
        written = f"[{text}]"
        if get_args(kind)[0] not in (int, float):  # words
            written = json.dumps([part.strip() for part in text.split(",") if part.strip()])
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except (ValueError, RecursionError):  # integers of thousands of digits are a ValueError
        return text


def flat(
    table: Mapping[str, Any], is_value: Callable[[Mapping[str, Any]], bool] = lambda table: False, before: str = ""
) -> dict[str, Any]:
    """The values of tables within tables by their keys with dots; a table that `is_value` is one of them.

    `flat({"model": {"width": 64}})` is `{"model.width": 64}`.
    """
    values: dict[str, Any] = {}
    for key, value in table.items():
        inner = isinstance(value, dict) and not is_value(value)
        values |= flat(value, is_value, f"{before}{key}.") if inner else {f"{before}{key}": value}
    return values
