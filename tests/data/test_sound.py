"""Bad places among rows are refused, or reported, passed over and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from meristem.data.labelled.sound import SoundRows
from meristem.data.text.corpus import BadPlace
from meristem.errors import InputError, RunError

BAD = BadPlace(Path("a.csv"), 3, "1 field")


def test_bad_places_are_passed_over_and_counted() -> None:
    said: list[str] = []
    rows = SoundRows(["x", BAD, "y", BAD], "skip", said.append)
    assert list(rows) == ["x", "y"]
    assert (rows.good, rows.bad) == (2, 2)
    assert said == [f"skipped {BAD}"] * 2


def test_the_first_bad_place_ends_the_reading() -> None:
    rows = iter(SoundRows(["x", BAD, "y"], "refuse", pytest.fail))
    assert next(rows) == "x"
    with pytest.raises(RunError, match=r"a\.csv:3: 1 field; mend it, or pass over such places"):
        next(rows)
    with pytest.raises(InputError, match="on_error = 'ignore': must be one of"):
        SoundRows([], "ignore", pytest.fail)


def test_a_file_of_another_kind_is_not_passed_over_line_by_line() -> None:
    said: list[str] = []
    with pytest.raises(RunError, match="is it the right file"):
        list(SoundRows(["x", *[BAD] * 100_000], "skip", said.append))
    assert len(said) < 20_000
