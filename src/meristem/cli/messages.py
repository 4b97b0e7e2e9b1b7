"""What the library says, as a command line says it: flags for names of arguments, and logs as plain lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meristem.errors import Remedy
    from meristem.wording import Notice

LINE_SECONDS = 5.0  # between two lines that say how far something is

# What the library names otherwise than the command line does; other names differ by their hyphens only.
FLAGS = {
    "columns.text": "--text-column", "columns.label": "--label-column", "columns.split": "--split-column",
    "columns.quote": "--quote", "columns.field": "--label-field", "columns.table": "--label-table",
    "end_of_text": "--end-of-text",
}  # fmt: skip


def remedy_text(remedy: Remedy | None) -> str:
    """How a remedy is asked for on the command line, in brackets."""
    if remedy is None:
        return ""
    names = (argument.partition("=") for argument in remedy.arguments)
    flags = ", ".join(f"{FLAGS.get(name, _flag(name))} {value}".strip() for name, _, value in names)
    command = ["meristem", remedy.call, remedy.target] if remedy.call else []
    return f" ({' '.join(part for part in (*command, flags) if part)})"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def notice_text(notice: Notice) -> str:
    return f"{notice.text}{remedy_text(notice.remedy)}"


class _PlainLines(logging.Handler):
    """Shows what the library logs as plain lines."""

    stream = "stdout"

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=getattr(sys, self.stream), flush=True)


LINES = _PlainLines(logging.INFO)


def show_log(stream: str = "stdout") -> None:
    """Show what is logged on the standard output, or on the standard error where the output is for results."""
    LINES.stream = stream
    logger = logging.getLogger("meristem")
    logger.setLevel(logging.INFO)
    logger.addHandler(LINES)  # the same one is not added twice


def paced(say: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """A report of long work: when a part of it begins, then every few seconds, with what is left where it counts up."""
    from meristem.wording import describe_time

    part, first, begun, said = "", 0, 0.0, 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal part, first, begun, said
        now = time.monotonic()
        if what != part:
            part, first, begun, said = what, done, now, now
            say(f"{what}: {done} of {total}")
        elif now - said >= LINE_SECONDS:
            said = now
            left = (now - begun) / (done - first) * (total - done) if done > first else None
            say(f"{what}: {done} of {total}" + ("" if left is None else f", {describe_time(left)} left of this part"))

    return report
