"""Runs in a terminal while they go on: a view that stays in its place, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meristem.training.display import step_line
from meristem.watch.runs import PAUSE, State, Watch, WatchedRun
from meristem.wording import describe_time

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Told = Mapping[str, Any]  # of a run, by `run_data`
LAST_EVENTS = 5  # in the view
FIRST_EVENTS = 10  # in lines, of a run that is seen for the first time


def run_facts(run: Told, state: State, now: float) -> list[tuple[str, str]]:
    """What is shown of a run, as pairs of a name and a text; `now` is the time by the system's clock."""
    numbers = run["now"]
    told = {
        "loss": _joined(
            _number("", numbers["smooth"], ".4f", " (smoothed)"),
            _number("last ", numbers["loss"], ".4f"),
            _number("held-out ", numbers["held_out"], ".4f"),
            _number("accuracy ", numbers["accuracy"], ".4f"),
        ),
        "rate": _number("", numbers["lr"], ".3g"),
        "speed": _joined(
            _number("", numbers["tokens_per_second"], ",.0f", " tokens/s"),
            _number("MFU ", numbers["mfu"], ".1%"),
            _number("", numbers["skipped"] or None, ",", " skipped"),
        ),
        "time": _joined(
            "" if numbers["elapsed"] is None else f"{describe_time(numbers['elapsed'])} elapsed",
            "" if not numbers["left"] else f"{describe_time(numbers['left'])} left",
            _number("epoch ", numbers["epoch"], ".2f"),
            "" if state.written is None else f"last line {describe_time(max(0.0, now - state.written))} ago",
        ),
        "structure": run["heads"],
    }  # fmt: skip
    events = [f"step {row['step']:,}: {row['text']}" for row in told_events(run)]
    shown = [("events" if not place else "", text) for place, text in enumerate(events[-LAST_EVENTS:])]
    if len(events) > LAST_EVENTS:
        shown[0] = (f"events ({LAST_EVENTS} of {len(events)})", shown[0][1])
    return [*((name, text) for name, text in told.items() if text), *shown]


def told_events(run: Told) -> list[Told]:
    """What happened in a run by its steps: decisions about the structure, and stops, returns and ends of the run."""
    return sorted((*run["events"], *run["lifetime"]), key=lambda row: row["step"])


def new_lines(before: Told | None, run: Told) -> list[str]:
    """What there is to say of a run that was told `before`, a line for each event and one for the last step.

    A run that has gone back is told from there.
    """
    rows = []
    for kind in ("events", "lifetime"):
        known = [] if before is None else before[kind]
        same = next((i for i, (a, b) in enumerate(zip(known, run[kind], strict=False)) if a != b), len(known))
        rows += run[kind][same:]
    rows.sort(key=lambda row: row["step"])
    lines = [f"step {row['step']}: {row['text']}" for row in rows]
    if before is None and len(lines) > FIRST_EVENTS:
        lines = [f"({len(lines) - FIRST_EVENTS} earlier events are not shown)", *lines[-FIRST_EVENTS:]]
    if before is None or run["heads"] != before["heads"]:
        lines.append(run["heads"])
    if run["now"]["step"] and (before is None or run["now"] != before["now"]):
        lines.append(step_line(run["now"], run["steps"]))
    return lines


def _number(before: str, value: float | None, form: str, after: str = "") -> str:
    return "" if value is None else f"{before}{value:{form}}{after}"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


class PlainText:
    """Lines that are appended: one for each event, one for each change of the numbers, one for each state."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._known: dict[Path, Told | None] = {}
        self._states: dict[Path, str] = {}

    def __enter__(self) -> PlainText:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def show(self, runs: Sequence[WatchedRun], now: float) -> None:
        for run in runs:
            begin = f"{run.path}: " if len(runs) > 1 else ""
            state, known = run.state(now), self._known.get(run.path)
            if run.data is not None and run.data is not known:
                for line in new_lines(known, run.data):
                    self._say(f"{begin}{line}")
                self._known[run.path] = run.data
            if state.word != self._states.get(run.path):
                self._states[run.path] = state.word
                self._say(f"{begin}{state.text}")


class LiveText:
    """A view that stays in its place and tells of every run what it is doing now."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.live import Live

        self._screen = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> LiveText:
        self._screen.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._screen.stop()

    def show(self, runs: Sequence[WatchedRun], now: float) -> None:
        from rich.console import Group

        self._screen.update(Group(*(part for run in runs for part in _view(run, now))), refresh=True)


STYLES = {"at work": "green", "finished": "green", "gone": "red", "unreadable": "red", "cut off": "red"}


def _view(run: WatchedRun, now: float) -> list[RenderableType]:
    """A run: its name and state, a bar, and its numbers and last events."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    state = run.state(now)
    name = "" if state.text.startswith(state.path) else f"{run.path}  "
    title = Text.assemble((name, "bold"), (state.text, STYLES.get(state.word, "yellow")))
    if run.data is None:
        return [title]
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True, style="dim")
    rows.add_column()
    rows.add_row("steps", ProgressBar(total=max(1, run.data["steps"]), completed=run.data["last_step"], width=40))
    for fact, text in run_facts(run.data, state, now):
        rows.add_row(fact, Text(text))
    return [title, rows]


def follow(watch: Watch) -> None:
    """Show runs in the terminal, or in plain lines, until all of them have finished, and say so."""

    def say(text: str) -> None:
        print(text, flush=True)

    with LiveText() if sys.stdout.isatty() else PlainText(say) as view:
        while True:
            watch.look()
            view.show(watch.runs, time.time())
            if all(run.finished for run in watch.runs):
                break
            time.sleep(PAUSE)
    for run in watch.runs:
        assert run.data is not None
        held_out = _number(", held-out loss ", run.data["now"]["held_out"], ".4f")
        say(f"finished at step {run.data['last_step']}{held_out}: {run.path}")
