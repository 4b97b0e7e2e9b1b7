"""One process at a time works on a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from meristem.errors import RunError

LOCK_FILE = ".lock"
KNOWN_LOCKS = Path("/proc/locks")  # of Linux; a line has "MAJOR:MINOR:INODE "


@contextmanager
def run_lock(folder: Path, name: Path | None = None, what: str = "run") -> Iterator[None]:
    """Hold the run in `folder`, or say who does. The system lets go of it when the process ends, however it ends.

    The file stays: removing it would let two processes hold two files of the same name. It may move with its folder
    while it is held; `name` is what the folder is called in messages. Where files cannot be locked, on Windows and on
    some network file systems, nothing is held.
    """
    with _locked(folder, name, what) as file:
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextmanager
def _locked(folder: Path, name: Path | None = None, what: str = "run") -> Iterator[TextIO]:
    """The lock file of `folder`, locked; as it is, so that it still names the process that held it last."""
    with (folder / LOCK_FILE).open("a+", encoding="utf-8", errors="replace") as file:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                holder = file.read(20).strip() or "unknown"
                raise RunError(f"{name or folder}: another process (pid {holder}) is working on this {what}") from error
            except OSError:
                pass
        yield file


def is_held(folder: Path) -> bool:
    """Whether the process that last held the run in `folder` still lives on this machine, and holds it.

    Nothing is locked to find out, so that nobody is kept from it. A holder on another machine is not seen. Where the
    system does not tell of locks, another process with the same id is taken for it; `check_free` is never mistaken.
    """
    if sys.platform == "win32":
        return False
    path = folder / LOCK_FILE
    try:
        pid = int(path.read_text(encoding="utf-8", errors="replace")[:20])
        with suppress(PermissionError):  # somebody else's, and alive
            os.kill(pid, 0)
        return pid > 0 and _is_locked(path)
    except (OSError, ValueError, OverflowError):
        return False


def _is_locked(path: Path) -> bool:
    """Whether the system knows of a lock on a file; True where it does not tell. A dead holder's pid may be reused."""
    try:
        locks = KNOWN_LOCKS.read_text(encoding="ascii")
    except (OSError, ValueError):
        return True
    return f":{path.stat().st_ino} " in locks


def check_free(folder: Path) -> None:
    """Say who works on the run in `folder`, if somebody does; it is locked for a moment to find out."""
    if (folder / LOCK_FILE).is_file():
        with _locked(folder):
            pass
