"""Runs that are looked at while they go on: what their files say, read again only when these have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meristem.errors import InputError, MachineError, RunError, shortened
from meristem.report.page.data import page_of, points_of, run_data
from meristem.runs.lock import is_held
from meristem.runs.run_folder import RunFolder

PAUSE = 1.0  # seconds between two looks at the files
SHARE = 9  # a pause is at least so many times what the last reading took
# A run that no process here holds is taken to be cut off when no line has come for so many seconds, and for so long
# as so many usually take: it may be at work on another machine.
QUIET, LINES = 60.0, 5
TOLD = (".toml", ".json", ".jsonl")  # endings of files that a page tells of

Marks = frozenset[tuple[str, int, int, int]]


@dataclass(frozen=True)
class State:
    """What a run is doing, in a word and a sentence, and when its logs were last written (seconds since 1970)."""

    path: str
    word: str
    text: str
    written: float | None = None


def check_watchable(path: Path) -> None:
    """Refuse what is no run and will not become one; a folder that is empty or not there yet may."""
    if path.exists() and not path.is_dir():
        raise InputError("run", str(path), "is a file; name the folder of a run, which need not be there yet")
    if path.is_dir() and not (path / "config.toml").is_file() and any(path.iterdir()):
        raise InputError("run", str(path), "holds other things and no run (it has no config.toml)")


class WatchedRun:
    """A run, or the place where one will be. `data` is what `run_data` last told of it, None if there was nothing."""

    def __init__(self, path: Path, points: int) -> None:
        self.path, self.points = path, points
        self.data: dict[str, Any] | None = None
        self._marks: Marks | None = None  # None: there is no such folder
        self._seen: tuple[Marks | None, str] | None = None  # at the last look, with what kept from looking
        self._problem = ""

    def look(self) -> bool:
        """Read the run if its files are not what they were; whether they were not.

        A run that is gone, or cannot be read, leaves behind what was last known of it.
        """
        seen = _looked_at(self.path)  # before the reading: what is written meanwhile is seen the next time
        if seen == self._seen:
            return False
        self._seen = seen
        self._marks, self._problem = seen
        if self.there:
            try:
                self.data = run_data(self.path, self.points)
            except (RunError, InputError, MachineError, OSError) as error:
                if self.path.exists():  # it may just have been deleted
                    self._problem = shortened(str(error))
        return True

    @property
    def there(self) -> bool:
        """Whether there was a run at the last look."""
        return any(name == "config.toml" for name, *_ in self._marks or ())

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.there and self.data is not None and self.data["status"]["word"] == "finished"

    @property
    def written(self) -> float | None:
        """When the logs were last written, as of the last look; None if there are none."""
        logs = {log.name for log in RunFolder(self.path).logs}
        return max((time / 1e9 for name, time, *_ in self._marks or () if name in logs), default=None)

    def state(self, now: float | None = None) -> State:
        """What the run is doing; `now` is the time by the system's clock."""
        path = str(self.path)
        if self._problem:
            return State(path, "unreadable", f"It cannot be read: {self._problem}.")
        if not self.there and self.data is not None:
            return State(path, "gone", f"{path} is gone. What is shown is the last that was seen of it.")
        if self.data is None:
            what = "is not there yet" if self._marks is None else "holds no run yet"
            return State(path, "waiting", f"{path} {what}. This goes on when the run begins.")
        status, steps = self.data["status"], f"step {self.data['last_step']:,} of {self.data['steps']:,}"
        written = self.written
        if status["word"] != "not finished":
            return State(path, status["word"], status["text"], written)
        age = (time.time() if now is None else now) - (written or 0.0)
        if age > max(QUIET, LINES * (self.data["now"]["between"] or 0.0)) and not is_held(self.path):
            text = f"Cut off at {steps}, it seems: no process here holds the run. `meristem resume` goes on with it."
            return State(path, "cut off", text, written)
        return State(path, "at work", f"At work: {steps}.", written)


def file_marks(path: Path) -> Marks | None:
    """What tells whether the files of a run have changed, without reading them; None if there is no such folder."""
    marks = set()
    try:
        for entry in path.iterdir():
            if entry.suffix in TOLD or entry.name == "checkpoints":
                try:
                    facts = entry.stat()
                except FileNotFoundError:  # gone meanwhile
                    continue
                marks.add((entry.name, facts.st_mtime_ns, facts.st_size, facts.st_ino))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return frozenset(marks)


def _looked_at(path: Path) -> tuple[Marks | None, str]:
    """The marks of a run's files, and what keeps one from looking at them; empty if nothing does."""
    try:
        return file_marks(path), ""
    except OSError as error:
        return None, f"{path}: {error.strerror}"


class Watch:
    """Runs that are watched together, at a pace that takes no more than a small share of one core."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        for path in paths:
            check_watchable(path)
        self.runs = [WatchedRun(path, points_of(len(paths))) for path in paths]
        self._clock, self._next = clock, float("-inf")

    def look(self) -> bool:
        """Read what has changed, unless that was done just now; whether there is anything new."""
        begin = self._clock()
        if begin < self._next:
            return False
        new = [run.look() for run in self.runs]
        end = self._clock()
        self._next = end + max(PAUSE, SHARE * (end - begin))
        return any(new)

    @property
    def states(self) -> list[State]:
        """What each of the runs is doing."""
        return [run.state() for run in self.runs]

    @property
    def told(self) -> list[dict[str, Any]]:
        """What is known of the runs that are there, or were."""
        return [run.data for run in self.runs if run.data is not None]

    def page(self, states: Sequence[State]) -> dict[str, Any]:
        """What a page shows of the runs, with their states."""
        return {**page_of(self.told), "watch": [asdict(state) for state in states]}
