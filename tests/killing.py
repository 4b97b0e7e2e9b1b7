"""Killing a process at each of its file operations, for tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")


def killed_at(operation: int, work: Callable[[], object]) -> int:
    """Do the work in a process that is killed just before its n-th file operation, and say how it ended.

    That is minus the signal, or 0 if the work needed fewer operations, or 1 if it failed.
    """
    process = os.fork()
    if process == 0:
        _work_until(operation, work)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def operations(work: Callable[[], object]) -> int:
    """How many file operations the work needs, found out in another process."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        count = _counted(lambda count: None)
        work()
        os.write(writer, str(count()).encode())
        os._exit(0)
    os.close(writer)
    found = os.read(reader, 20)
    os.close(reader)
    os.waitpid(process, 0)
    return int(found)


def _work_until(operation: int, work: Callable[[], object]) -> None:
    def end(count: int) -> None:
        if count == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    _counted(end)
    try:
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def _counted(notice: Callable[[int], object]) -> Callable[[], int]:
    """Count file operations from now on. A hook can never be removed, which is why this is for processes that end."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in OPERATIONS or event.startswith("shutil."):
            count += 1
            notice(count)

    sys.addaudithook(hook)
    return lambda: count
