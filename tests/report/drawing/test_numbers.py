"""Numbers are written short."""

from __future__ import annotations

import pytest

from meristem.report.drawing.numbers import compact, loss_text, rounded, same_decimals


def test_evenly_spaced_values_share_their_decimals() -> None:
    assert same_decimals([3.0, 3.5, 4.0]) == ["3.0", "3.5", "4.0"]
    assert same_decimals([0.0, 20.0]) == ["0", "20"]
    assert same_decimals([0.0, 20_000.0]) == ["0", "20k"]


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0"), (950, "950"), (1500, "1.5k"), (2e7, "20M"), (2.88e9, "2.88B")]
)
def test_compact(value: float, expected: str) -> None:
    assert compact(value) == expected


def test_rounded() -> None:
    assert (rounded(999_999), rounded(123_456)) == ("1M", "123.5k")


def test_losses() -> None:
    assert [loss_text(loss) for loss in (3.14159, 0.00123, 1e9)] == ["3.142", "0.0012", "1B"]
