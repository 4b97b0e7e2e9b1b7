"""Finished runs as lines of a file, some kB each: with these a comparison goes on where the folders of runs are not.

A line has the result of a run and what it began with, so that it is checked like a folder. `compare` writes one for
every run that has ended, and reads those of other machines from the files that it is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meristem.comparison.results import CARRIED, CarriedResult, Result
from meristem.config import Config, build_config, flatten
from meristem.errors import InputError, Remedy, RunError
from meristem.files import errors_of, parsed_json, read_bytes
from meristem.plan import Plan
from meristem.runs.run_folder import RunFolder

LINES = "lines.jsonl"


@dataclass(frozen=True)
class Begun:
    """What a run began with, and where that is written: in its folder, or in a file that has a line of it."""

    place: Path
    config: Config
    plan: Plan
    data: Any  # the digest
    run: str | None = None  # whose line it is

    @classmethod
    def at(cls, path: Path) -> Begun:
        """What the run in a folder began with."""
        folder = RunFolder.open(path)
        return cls(path, folder.config, folder.plan, folder.data_digest)

    def refused(self, field: str, value: object, why: str) -> InputError:
        """The error for a run that cannot be taken for one of a comparison, by the key that says so."""
        if self.run is None:
            expected = f"{self.place} {why}; remove it, or compare in another folder"
            return InputError(field, value, expected, Remedy(("out=FOLDER",)))
        remedy = "leave out that file, or remove the line of that run"
        return InputError(field, value, f"{self.run} in {self.place} {why}; {remedy}")


@dataclass(frozen=True)
class Line:
    """A run that has ended: what it began with, its result, and how many runs there were side by side at most."""

    begun: Begun
    result: Result
    jobs: int


def read_lines(paths: Sequence[Path], out: Path) -> dict[str, Line]:
    """The lines of files, by the paths of their runs below the folder `out` of the comparison.

    A last line that was cut off is passed over. A run may be there twice if both say the same.
    """
    found: dict[str, Line] = {}
    results: dict[str, Any] = {}
    for file, number, entry in ((path, *numbered) for path in paths for numbered in _entries(path)):
        try:
            run = entry["run"]
            found[run] = _line(file, out, entry)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{file}:{number}: is no line of a finished run ({error!r})") from error
        if results.setdefault(run, entry["result"]) != entry["result"]:
            raise RunError(f"{file}:{number}: has another result of {run} than a line before it; remove one of them")
    return found


def written_runs(out: Path) -> set[str]:
    """The runs of which there are lines in the folder of a comparison; what is no line is passed over."""
    path, runs = out / LINES, set()
    for text in _texts(path) if path.is_file() else ():
        with suppress(KeyError, TypeError, ValueError):
            runs.add(str(parsed_json(text)["run"]))
    return runs


def _entries(path: Path) -> Iterator[tuple[int, Any]]:
    """The JSON values of a file, with the numbers of their lines; only the last of several may be cut off."""
    numbered = [(number, text) for number, text in enumerate(_texts(path), start=1) if text.strip()]
    for place, (number, text) in enumerate(numbered):
        try:
            entry = parsed_json(text)
        except ValueError as error:
            if 0 < place == len(numbered) - 1:
                return
            raise RunError(f"{path}:{number}: is no line of a finished run (not JSON)") from error
        yield number, entry


def _texts(path: Path) -> list[str]:
    return read_bytes(path).decode("utf-8", errors="replace").split("\n")


def add_line(out: Path, run: Path, begun: Begun, result: Result, jobs: int) -> None:
    """Write down a run that has ended."""
    entry = {
        "run": str(run), "jobs": jobs, "data": begun.data, "config": flatten(begun.config),
        "plan": begun.plan.to_dict(), "result": result.to_dict(),
    }  # fmt: skip
    append_line(out / LINES, entry)


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Add an entry to a file of lines, also if its last one was cut off."""
    with errors_of(path), path.open("ab+") as file:
        _end_line(file)
        file.write(json.dumps(entry).encode() + b"\n")


def _end_line(file: BinaryIO) -> None:
    """End the last line of a file; one that was cut off goes, as nothing can be read from it."""
    file.seek(0)
    last = file.read().rpartition(b"\n")[2]
    if not last:
        return
    try:
        parsed_json(last.decode("utf-8", errors="replace"))
        file.write(b"\n")
    except ValueError:
        file.truncate(file.tell() - len(last))


def _line(path: Path, out: Path, entry: dict[str, Any]) -> Line:
    """What a line says; of the folder that its run had, the place for files that others take after."""
    begun = Begun(path, build_config(entry["config"]), Plan.from_dict(entry["plan"]), entry["data"], entry["run"])
    values = {**entry["result"], "folder": str(out / CARRIED / entry["run"])}
    for name in ("births", "loss", "held_out", "seconds"):
        values[name] = [tuple(point) for point in values[name]]
    return Line(begun, CarriedResult(**values), entry["jobs"])
