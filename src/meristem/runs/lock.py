"""One process at a time works on a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meristem.errors import RunError

LOCK_FILE = ".lock"


@contextmanager
def run_lock(folder: Path, name: Path | None = None) -> Iterator[None]:
    """Hold the run in `folder`, or say who does. The system lets go of it when the process ends, however it ends.

    The file stays: removing it would let two processes hold two files of the same name. It may move with its folder
    while it is held; `name` is what the folder is called in messages. Where files cannot be locked, on Windows and on
    some network file systems, nothing is held.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with (folder / LOCK_FILE).open("a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            raise RunError(f"{name or folder}: another process (pid {holder}) is working on this run") from error
        except OSError:
            pass
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def is_held(folder: Path) -> bool:
    """Whether the process that last held the run in `folder` still lives on this machine.

    Nothing is locked to find out, so that nobody is kept from it. A holder on another machine is not seen.
    """
    if sys.platform == "win32":
        return False
    try:
        pid = int((folder / LOCK_FILE).read_text(encoding="utf-8", errors="replace")[:20])
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return pid > 0


def check_free(folder: Path) -> None:
    """Say who works on the run in `folder`, if somebody does."""
    if (folder / LOCK_FILE).is_file():
        with run_lock(folder):
            pass
