"""Commands of `meristem` in forked processes: torch is imported once, and an attempt costs hundredths of a second.

The process that forks imports everything and starts no thread, so that its children are as good as fresh processes.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NoReturn, TextIO

import torch
import typer.main

import meristem
from meristem.cli import app, main

PATIENCE = 300.0  # seconds after which a command counts as hanging; a safety net, far above what any of them needs
LONGEST_MESSAGE = 2000  # characters of what is printed with an error
NOTES = ("note: ", "warning: ", "damaged checkpoint passed over: ")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status (minus the number of the signal that killed it) and what it printed."""

    command: str
    code: int
    out: str
    err: str
    hung: bool = False

    @property
    def said(self) -> str:
        return self.out + self.err

    @property
    def is_traceback(self) -> bool:
        """Whether Python, the memory limit or our patience ended it, and not the software itself."""
        return self.hung or "Traceback" in self.said or (self.code < 0 and self.code != -signal.SIGKILL)

    @property
    def is_refusal(self) -> bool:
        """Whether it said no as promised: exit status 1 or 2, and one line of sensible length that is an error.

        Before it, there may be notes: on stdout, or, where that is for the answer of a command, on stderr.
        """
        *notes, error = self.err.splitlines() or [""]
        clear = error.startswith("error: ") and all(note.startswith(NOTES) for note in notes)
        return self.code in (1, 2) and clear and len(self.err) <= LONGEST_MESSAGE and not self.is_traceback

    def __str__(self) -> str:
        """For a list of failures: the command, its status, and the last of what it printed."""
        tail = "\n".join(line[:300] for line in self.said.strip().splitlines()[-6:])
        return f"$ {self.command}\n[{'hangs' if self.hung else f'exit status {self.code}'}]\n{tail}"


@dataclass
class Child:
    """A command that is running in a process of its own, which leads a group of its own."""

    command: str
    pid: int
    _pipes: dict[int, bytearray] = field(default_factory=dict)

    def wait(self, patience: float = PATIENCE) -> Ended:
        """Until it ends, or until our patience does, which ends it."""
        hung = True
        try:
            hung = not self._read_until_the_end(patience)
        finally:
            if hung:  # or we were interrupted
                self.send(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its own children, if it was killed before it could end them
        for pipe, content in self._pipes.items():
            _drain(pipe, content)
            os.close(pipe)
        out, err = (bytes(content).decode("utf-8", "replace") for content in self._pipes.values())
        return Ended(self.command, os.waitstatus_to_exitcode(status), out, err, hung)

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet; a child that has ended is still there until somebody waits for it."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def send(self, number: int) -> None:
        """A signal to the process alone, not to its group. It is still there: nobody has waited for it yet."""
        os.kill(self.pid, number)

    def _read_until_the_end(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        ends = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            for descriptor in (ends, *self._pipes):
                poll.register(descriptor, select.POLLIN)
            while (left := deadline - time.monotonic()) > 0:
                ready = {descriptor for descriptor, _ in poll.poll(left * 1000)}
                for pipe in ready & self._pipes.keys():
                    if not _drain(pipe, self._pipes[pipe]):
                        poll.unregister(pipe)
                if ends in ready:
                    return True
            return False
        finally:
            os.close(ends)


def start(*arguments: str | Path, before: Callable[[], None] | None = None, cwd: Path | None = None) -> Child:
    """`meristem ARGUMENTS` in a child, which calls `before` first: there limits and hooks are set."""
    given = [os.fspath(argument) for argument in arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = [os.pipe(), os.pipe()]
    pid = os.fork()
    if not pid:
        _become(given, [write for _, write in pipes], before, cwd)
    for read, write in pipes:
        os.close(write)
        os.set_blocking(read, False)
    with suppress(OSError):  # the child does the same; whoever comes first
        os.setpgid(pid, pid)
    return Child(" ".join(("meristem", *given)), pid, {read: bytearray() for read, _ in pipes})


def run(
    *arguments: str | Path,
    before: Callable[[], None] | None = None,
    cwd: Path | None = None,
    patience: float = PATIENCE,
) -> Ended:
    """Start such a command and wait for its end."""
    return start(*arguments, before=before, cwd=cwd).wait(patience)


def memory_limit(room: int = 2 << 30) -> None:
    """Leave this process so many bytes of address space beyond what it has; for `before`."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def file_limit(size: int) -> None:
    """Let no file grow beyond so many bytes; for `before`. Python ignores the signal, so that writing fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def import_everything(warm_up: Sequence[Sequence[str | Path]]) -> None:
    """Import in this process what commands import, those of `warm_up` also late, so that no child has to."""
    torch.set_num_threads(1)
    vars(typer.main)["get_command"] = cache(
        typer.main.get_command
    )  # the commands' options are read once, not each time
    typer.main.get_command(app)
    for module in pkgutil.walk_packages(meristem.__path__, "meristem."):
        with suppress(ImportError):  # what only runs on a GPU
            importlib.import_module(module.name)
    for arguments in warm_up:
        read, write = os.pipe()
        known = set(sys.modules)
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            sys.argv = ["meristem", *map(str, arguments)]
            with suppress(BaseException):
                main()
            new = [name for name in sys.modules if name not in known and "__main__" not in name]
            with os.fdopen(write, "w") as pipe:
                json.dump(new, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            names = json.load(pipe)
        os.waitpid(pid, 0)
        for name in names:
            with suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared stays shared
    assert threading.active_count() == 1, "a process with threads must not fork"


def _become(arguments: list[str], outputs: list[int], before: Callable[[], None] | None, cwd: Path | None) -> NoReturn:
    """What the child does: turn into the command, and end as Python does at the end of a program."""
    code = 1
    try:
        os.setpgid(0, 0)
        for descriptor, pipe in enumerate(outputs, start=1):
            os.dup2(pipe, descriptor)
            os.close(pipe)
        sys.stdout, sys.stderr = output(1), output(2)
        if cwd is not None:
            os.chdir(cwd)
        if before is not None:
            before()
        sys.argv = ["meristem", *arguments]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as it is where the descriptor was closed
                stream.flush()
    except BaseException:
        traceback.print_exc()
        code = 120  # as of Python
    finally:
        os._exit(code)


def output(descriptor: int, encoding: str = "utf-8") -> TextIO:
    """A stream as Python opens it for a new process whose output goes to a pipe."""
    errors = "strict" if descriptor == 1 else "backslashreplace"
    return open(descriptor, "w", 1 if descriptor == 2 else -1, encoding, errors, closefd=False)


def _drain(pipe: int, content: bytearray) -> bool:
    """Read what is there; whether there may be more to come."""
    while True:
        try:
            piece = os.read(pipe, 1 << 16)
        except OSError as error:
            return error.errno == errno.EAGAIN
        if not piece:
            return False
        content += piece
