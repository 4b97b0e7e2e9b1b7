"""What a command does to files, counted by Python's own audit, so that something can happen at the k-th operation."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What Python tells of before it does it; those that change files. The path comes first, `dir_fd` somewhere behind.
CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod")


class FileOperations:
    """Counts what is about to be done to files below a folder, in this process and all its threads, and acts on it.

    `install` is for the child, `count` for the process that forked it: the number lies in memory that they share.
    Opening a file counts if it is for writing, and also, under the name `os.open`, if it is by descriptor only: this is
    how files are flushed to the disk.
    """

    def __init__(self, below: Path, act: Callable[[int, str, Path], None] = lambda count, name, path: None) -> None:
        self._below, self._act = str(below), act
        self._shared = mmap.mmap(-1, 8)

    @property
    def count(self) -> int:
        return int.from_bytes(self._shared[:8], "little")

    def install(self) -> None:
        sys.addaudithook(self._audit)

    def _audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            path, mode, flags = arguments
            if isinstance(path, int) or not (mode is None or set(mode) & set("wax+")):
                return
            if not flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                name = "os.open"
        elif name in CHANGES:
            path = arguments[0]
        else:
            return
        # A relative name is one within an open folder: this is how trees are removed.
        text = os.fsdecode(path)
        if text.startswith(self._below) or not os.path.isabs(text):
            count = self.count + 1
            self._shared[:8] = count.to_bytes(8, "little")
            self._act(count, name, Path(text))
