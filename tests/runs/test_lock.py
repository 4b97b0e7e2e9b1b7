"""Two processes do not work on one run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meristem.errors import RunError
from meristem.runs.lock import run_lock
from meristem.runs.run_folder import RunFolder
from training.helpers import events, tiny_config

fcntl = pytest.importorskip("fcntl")
HOLD = """
import sys, time
from pathlib import Path
from meristem.runs.lock import run_lock
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


def test_of_processes_that_begin_one_run_one_wins_and_the_others_say_which(data: Path, tmp_path: Path) -> None:
    """They all come to the last moment before the folder gets its name, and go on together."""
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(data, train__steps=2).to_toml(), encoding="utf-8")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(tmp_path / "go"), str(config), str(tmp_path / "run")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
    (tmp_path / "go").touch()
    ends = [(process.pid, *process.communicate(timeout=600), process.returncode) for process in processes]
    winners = [pid for pid, _, _, code in ends if code == 0]
    assert len(winners) == 1, ends
    for _, _, errors, code in ends:
        if code:
            assert code == 2
            assert errors.count("\n") == 1
            assert f"another process (pid {winners[0]}) is working on this run" in errors or "already holds" in errors
    run = RunFolder.open(tmp_path / "run")
    assert events(run)[-1] == "finished"
    assert (run.path / "tokenizer.json").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


TOGETHER = """
import sys, time
from pathlib import Path
from meristem.runs import run_folder
go, config, out = sys.argv[1:]
plain = run_folder.flush_folder
def waiting(path):
    plain(path)
    print("ready", flush=True)
    while not Path(go).exists():
        time.sleep(0.001)
run_folder.flush_folder = waiting
sys.argv = ["meristem", "train", config, "--out", out]
from meristem.cli import main
main()
"""
