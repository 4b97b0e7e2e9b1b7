"""The logs of a run: lines of JSON, and how much of them a checkpoint vouches for."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meristem.errors import RunError
from meristem.files import errors_of, parsed_json, read_bytes, write_atomically
from meristem.wording import counted

Entry = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """How long a log was, and the sha256 of what it held."""

    size: int  # in bytes
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Position:
        return cls(len(content), hashlib.sha256(content).hexdigest())

    def __post_init__(self) -> None:
        if type(self.size) is not int or not isinstance(self.sha256, str):
            raise TypeError("a position has a size and a hash")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def positions(state: Mapping[str, Any]) -> dict[str, Position]:
    """How far each log had come when a checkpoint with this state was written, by its name."""
    try:
        return {name: Position(facts["size"], facts["sha256"]) for name, facts in state.get("logs", {}).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"state.json of a checkpoint: logs are not what they should be ({error!r})") from error


class Log:
    """A log that is being written. It knows its position without reading itself again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = read_bytes(path) if path.exists() else b""
        self._bytes, self._hash = len(content), hashlib.sha256(content)

    @property
    def position(self) -> Position:
        return Position(self._bytes, self._hash.hexdigest())

    def append(self, entry: Entry) -> None:
        """Add a line."""
        line = (json.dumps(entry) + "\n").encode()
        with errors_of(self.path), self.path.open("ab") as file:
            file.write(line)
        self._bytes += len(line)
        self._hash.update(line)


def read_log(path: Path) -> Iterator[Entry]:
    """The entries of a log; what is no entry, such as a line that was cut off, is passed over."""
    for line in _lines(read_bytes(path)) if path.is_file() else ():
        if (entry := _entry(line)) is not None:
            yield entry


def damage(path: Path, position: Position | None) -> str:
    """What is wrong with a log that held this much when it was last vouched for; empty if nothing is."""
    content = read_bytes(path) if path.is_file() else b""
    if position is not None and Position.of(content[: position.size]) != position:
        return f"{path}: is not what was recorded (changed, cut off or missing)"
    damaged = sum(_entry(line) is None for line in _lines(content)[:-1])
    return f"{path}: {counted(damaged, 'line')} cannot be read" if damaged else ""


def rewind_log(path: Path, step: int, position: Position | None, known: Collection[str] = ()) -> str:
    """Take a log back to where it was at a step; what a person should know about it, or nothing.

    A log that is not what it was is kept aside as it is. What stays, and which entries are `known`, says `log_until`.
    """
    content = read_bytes(path) if path.is_file() else b""
    kept, said = log_until(content, step, position, known)
    if said:
        said = f"{path}: is not what was recorded until step {step} ({said})"
        if path.is_file():
            aside = aside_name(path)
            shutil.copyfile(path, aside)
            said += f"; what can be read is kept, the file as it was is {aside.name}"
    if kept != content:
        write_atomically(path, kept.decode("utf-8"))
    return said


def log_until(content: bytes, step: int, position: Position | None, known: Collection[str] = ()) -> tuple[bytes, str]:
    """What a log held at a step, and what is wrong with it, or nothing.

    What it held at the position stays as it is, of what follows the entries up to the step, but for those that are
    `known` to be written again. Of a log that is not what it was all entries are chosen by their step; so are those of
    a checkpoint of an older version, which knows no position.
    """
    begin, said = content[: 0 if position is None else position.size], ""
    if position is not None and Position.of(begin) != position:
        cut = len(begin) < position.size
        begin, said = b"", f"it has {len(content):,} bytes, and had {position.size:,}" if cut else "changed"
    damaged = sum(_entry(line) is None for line in _lines(content[len(begin) :])[:-1])  # the last may be cut off
    said = said or (counted(damaged, "damaged line") if damaged else "")
    rest = [entry for line in _lines(content[len(begin) :]) if (entry := _entry(line)) and entry["step"] <= step]
    if begin:
        rest = [entry for entry in rest if entry.get("event") not in known]
    return begin + "".join(json.dumps(entry) + "\n" for entry in rest).encode(), said


def aside_name(path: Path) -> Path:
    """A name that is not taken yet, for what is put aside."""
    names = (path.with_name(f"{path.name}.aside-{number}") for number in range(1, 1000))
    for name in names:
        if not name.exists():
            return name
    raise RunError(f"{path}: has been put aside a thousand times; remove some of {path.name}.aside-*")


def _lines(content: bytes) -> list[str]:
    """The lines, the last of which is empty unless it was cut off."""
    return content.decode("utf-8", errors="replace").split("\n")


def _entry(line: str) -> Entry | None:
    try:
        entry = parsed_json(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None
