"""What a person sees while a student grows: a few live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from meristem.growth.events import Event
from meristem.report.drawing.numbers import loss_text
from meristem.wording import describe_time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAR = 30  # characters
LEAST = 1e-3  # left end of the bar of the demand, whose scale is logarithmic
LINES = 20  # plain lines of a run


class Standing:
    """Where a run stands: the last loss, heads, and what was measured of the only layer."""

    def __init__(self, steps: int, name: str) -> None:
        self.steps, self.name = steps, name
        self.step, self.loss, self.heads = 0, math.nan, 1
        self.demand: float | None = None
        self.threshold: float | None = None
        self.began = time.monotonic()

    def move(self, step: int, loss: float, heads: int, events: list[Event]) -> None:
        self.step, self.loss, self.heads = step, loss, heads
        for facts in (event.facts for event in events if "demand" in event.facts):
            self.demand, self.threshold = facts["demand"][0], facts["threshold"][0]

    @property
    def measured(self) -> str:
        if self.demand is None or self.threshold is None:
            return "not known yet"
        return f"{max(0.0, self.demand):.3f}, heads are born above {self.threshold:.2f}"

    @property
    def left(self) -> str:
        seconds = (time.monotonic() - self.began) / max(1, self.step) * (self.steps - self.step)
        return f"{describe_time(seconds)} left"


class StudentView(Protocol):
    """Shows where a run stands after every update, and notes in between."""

    def __enter__(self) -> StudentView: ...

    def __exit__(self, *exception: Any) -> None: ...

    def show(self, standing: Standing) -> None: ...

    def note(self, text: str) -> None: ...


class PlainView:
    """A line every so many updates."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def show(self, standing: Standing) -> None:
        now = standing
        if now.step % max(1, now.steps // LINES) and now.step < now.steps:
            return
        place = f"step {now.step:>{len(str(now.steps))}}/{now.steps}"
        self.note(f"{place}  loss {loss_text(now.loss)}  heads {now.heads}  {now.name} {now.measured}  {now.left}")

    def note(self, text: str) -> None:
        print(text, flush=True)


class LiveView:
    """Bars that stay at the bottom; notes scroll above them."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.live import Live as Screen

        self.screen = Screen(console=console, refresh_per_second=8)

    def __enter__(self) -> LiveView:
        self.screen.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.screen.stop()

    def show(self, standing: Standing) -> None:
        if standing.step % 10 == 0 or standing.step == standing.steps:
            self.screen.update(table(standing))

    def note(self, text: str) -> None:
        self.screen.console.print(text, highlight=False, markup=False)


def table(standing: Standing) -> Table:
    """Four rows: updates, heads, demand and loss."""
    from rich.table import Table
    from rich.text import Text

    rows = Table.grid(padding=(0, 2))
    above = standing.demand is not None and standing.threshold is not None and standing.demand > standing.threshold
    shown = {
        "updates": (
            _bar(standing.step / standing.steps),
            "blue",
            f"{standing.step:,} of {standing.steps:,}, {standing.left}",
        ),
        "heads": ("●" * min(standing.heads, BAR), "blue", f"{standing.heads}"),
        standing.name: (_marked(standing), "red" if above else "green", standing.measured),
        "loss": (_bar(min(1.0, standing.loss)), "magenta", loss_text(standing.loss)),
    }
    for name, (bar, colour, number) in shown.items():
        rows.add_row(name, Text(bar.ljust(BAR), style=colour), number)
    return rows


def _bar(share: float) -> str:
    return "█" * round(BAR * share) if math.isfinite(share) else ""


def _place(value: float) -> int:
    """The place of a demand on its bar, which goes from LEAST to 1."""
    share = 1 - math.log10(max(value, LEAST)) / math.log10(LEAST)
    return round(BAR * min(1.0, share))


def _marked(standing: Standing) -> str:
    """The bar of the demand with a mark where births begin."""
    if standing.demand is None or standing.threshold is None:
        return ""
    bar = "█" * _place(standing.demand)
    mark = min(_place(standing.threshold), BAR - 1)
    cells = list(bar.ljust(BAR))
    cells[mark] = "┃" if len(bar) <= mark else "▓"
    return "".join(cells)


def make_view() -> AbstractContextManager[StudentView]:
    """The one that suits the place."""
    return LiveView() if sys.stdout.isatty() else PlainView()
