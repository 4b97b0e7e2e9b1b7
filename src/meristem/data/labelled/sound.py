"""The sound ones among rows that were read, and what is done about the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from meristem.data.text.corpus import BadPlace
from meristem.data.text.prepare import check_mostly_good, check_on_error, refusal

R = TypeVar("R")


class SoundRows(Generic[R]):
    """The rows among what was read, one after the other; a bad place is refused, or reported, passed over and counted.

    `good` and `bad` say how many of either have been met so far.
    """

    def __init__(self, found: Iterable[R | BadPlace], on_error: str, report: Callable[[str], None]) -> None:
        check_on_error(on_error)
        self._found, self._on_error, self._report = found, on_error, report
        self.good = self.bad = 0

    def __iter__(self) -> Iterator[R]:
        for row in self._found:
            if not isinstance(row, BadPlace):
                self.good += 1
                yield row
            elif self._on_error == "refuse":
                raise refusal(row)
            else:
                self._report(f"skipped {row}")
                self.bad += 1
                check_mostly_good(row, self.bad, self.good)
