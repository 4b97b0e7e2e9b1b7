"""Settings of every policy are of the types of their fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_origin, get_type_hints

import pytest

from meristem.errors import InputError
from meristem.growth.policies import POLICIES
from meristem.settings import of_type

REQUIRED: dict[str, dict[str, Any]] = {
    "stack": {"total_steps": 1000}, "depth": {"total_steps": 1000}, "sgt": {"total_steps": 1000},
    "random_births": {"births": 2},
    "static_loops": {"layers": (1,), "heads": "all"}, "block_loop": {"layers": (1,)},
}  # fmt: skip
WRONG: dict[Any, tuple[Any, ...]] = {
    int: ("5", 2.5, True, None, [1]), float: ("0.5", True, None, (0.5,)), bool: (1, "true", None),
    str | None: (3, True), int | None: (2.5, "3", True), tuple[int, ...]: (0, "1", (1.5,), ("1",), None),
    tuple[float, ...]: (0.3, "0.3", ("0.3",), (True,)),
}  # fmt: skip
SETTINGS = [
    (name, entry.name, get_type_hints(policy)[entry.name])
    for name, policy in POLICIES.items()
    for entry in fields(policy)
]


@pytest.mark.parametrize(("name", "field", "kind"), SETTINGS)
def test_a_setting_of_another_type_is_refused_by_name(name: str, field: str, kind: Any) -> None:
    for value in ("other", 1, None) if get_origin(kind) is Literal else WRONG[kind]:
        with pytest.raises(InputError) as error:
            POLICIES[name](**{**REQUIRED.get(name, {}), field: value})
        assert (error.value.field, error.value.value) == (field, value)
        word = "must be one of" if get_origin(kind) is Literal else "must be "
        assert error.value.expected.startswith(word)


@pytest.mark.parametrize(("name", "field", "kind"), [entry for entry in SETTINGS if get_origin(entry[2]) is tuple])
def test_lists_become_tuples(name: str, field: str, kind: Any) -> None:
    policy = POLICIES[name]
    given = {**REQUIRED.get(name, {}), field: [1]}
    if field == "excluded" and name != "sgt":
        given = {"like": "run", field: [1]}
    assert getattr(policy(**given), field) == (1,)
    hash(policy(**given))


def test_types_of_ones_own_are_known_or_let_be() -> None:
    assert of_type("a", 2, int | str) == 2
    assert of_type("a", "b", int | str) == "b"
    assert of_type("a", [[1], []], tuple[tuple[int, ...], ...]) == ((1,), ())
    assert of_type("a", (1, "b"), tuple[int, str]) == (1, "b")
    assert of_type("a", {"b": 1}, dict[str, int]) == {"b": 1}
    assert of_type("a", 1, Any) == 1
    with pytest.raises(InputError, match=r"a = 3: must be a list of tuple\[int, \.\.\.\]"):
        of_type("a", 3, tuple[tuple[int, ...], ...])
    assert of_type("a", None, int | None) is None
