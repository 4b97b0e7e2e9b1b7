"""Two processes do not work on one run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meristem.errors import RunError
from meristem.training.lock import run_lock

fcntl = pytest.importorskip("fcntl")
HOLD = """
import sys, time
from pathlib import Path
from meristem.training.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_held_run_is_refused_until_it_is_let_go(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        for _ in range(2):  # being refused does not disturb the holder
            with pytest.raises(RunError) as refused, run_lock(tmp_path):
                pass
            assert str(refused.value) == f"{tmp_path}: another process (pid {os.getpid()}) is working on this run"
    with pytest.raises(KeyError), run_lock(tmp_path):
        raise KeyError
    with run_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(RunError, match=rf"another process \(pid {holder.pid}\)"), run_lock(tmp_path):
                pass
        finally:
            holder.kill()
    with run_lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with run_lock(tmp_path):
        pass
