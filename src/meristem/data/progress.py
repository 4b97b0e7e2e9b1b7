"""How far a preparation has come, and showing it: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meristem.data.text.corpus import BadPlace

LINE_SECONDS = 5.0


@dataclass(frozen=True)
class PreparationProgress:
    """Bytes of input read so far and in all, what came of them, and the places skipped since last time."""

    read: int
    size: int
    documents: int
    tokens: int
    bad: tuple[BadPlace, ...]
    done: bool

    def __str__(self) -> str:
        share = self.read / max(1, self.size)
        return f"{share:.0%} of {self.size / 1e6:,.1f} MB, {self.documents:,} documents, {self.tokens:,} tokens"


Report = Callable[[PreparationProgress], None]


@contextmanager
def shown_progress() -> Iterator[Report]:
    """A `report` for `prepare` that writes to the standard output."""
    if sys.stdout.isatty():
        with _bar() as report:
            yield report
    else:
        yield _lines()


def _lines() -> Report:
    last = time.monotonic()

    def report(progress: PreparationProgress) -> None:
        nonlocal last
        for place in progress.bad:
            print(f"skipped {place}", flush=True)
        if progress.done or time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"prepared {progress}", flush=True)

    return report


@contextmanager
def _bar() -> Iterator[Report]:
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    with Bar(BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=None)

        def report(progress: PreparationProgress) -> None:
            for place in progress.bad:
                bar.console.print(f"skipped {place}", markup=False, highlight=False)
            bar.update(task, total=progress.size, completed=progress.read, description=str(progress))

        yield report
