"""Signals and kills from outside, to processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meristem.runs.checkpoint import list_checkpoints, load_checkpoint
from meristem.runs.run_folder import RunFolder
from meristem.training.signals import BROKEN_PIPE
from meristem.training.train import resume

from .helpers import assert_equal_runs, events, run_jobs, saves, start, tiny_config, trained

LONG: dict[str, Any] = {"train__steps": 150, "eval__every": 50, "checkpoint__every": 50}
KILLED: dict[str, Any] = {"train__steps": 60, "eval__every": 7, "checkpoint__every": 1, "checkpoint__keep": 2}


@pytest.fixture(scope="session")
def long(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(data, tmp_path_factory.mktemp("long") / "run", **LONG)


def wait_for_lines(log: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while not log.is_file() or log.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, f"{log} does not grow"
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])  # the attack `signals` sends all of them
def test_a_signal_ends_the_command_cleanly_and_it_says_how_to_go_on(
    number: signal.Signals, data: Path, long: RunFolder, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(data, **LONG).to_toml(), encoding="utf-8")
    run = RunFolder(tmp_path / "run")
    process = start("train", config, "--out", run.path)
    wait_for_lines(run.metrics, 5)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert errors == ""
    newest = load_checkpoint(list_checkpoints(run.checkpoints)[-1])
    assert 5 <= newest.step < LONG["train__steps"]
    assert "\nfinishing this step first; press again to stop at once, without saving\n" in output
    assert f"stopped at step {newest.step}" in output
    assert f"go on with: meristem resume {run.path}" in output
    assert events(run)[-1] == "stopped"
    assert (run.path / "loss.svg").is_file()
    resume(run.path)
    assert_equal_runs(run, long)


def long_config(data: Path, tmp_path: Path) -> Path:
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(data, **LONG).to_toml(), encoding="utf-8")
    return config


def test_a_broken_output_pipe_saves_and_stops(data: Path, long: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    process = start("train", long_config(data, tmp_path), "--out", run.path)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    assert process.wait(timeout=300) == 128 + BROKEN_PIPE
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert events(run)[-1] == "stopped"
    resume(run.path)
    assert_equal_runs(run, long)


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(data: Path, tmp_path: Path) -> None:
    """As under nohup, where the terminal may be closed."""
    run = RunFolder(tmp_path / "run")
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    process = start("train", long_config(data, tmp_path), "--out", run.path, preexec_fn=ignore)
    wait_for_lines(run.metrics, 5)
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert events(run)[-1] == "finished"


def test_a_second_signal_stops_at_once_without_saving(data: Path, long: RunFolder, tmp_path: Path) -> None:
    """The first comes while an update is made that never ends by itself; what is said about it does not wait."""
    program = f"""
import sys, time
from meristem.training import loop
def endless(*arguments):
    print("in the update", flush=True)
    while True:
        time.sleep(0.01)
loop.guarded_update = endless
sys.argv = ["meristem", "train", {str(long_config(data, tmp_path))!r}, "--out", {str(tmp_path / "run")!r}]
from meristem.cli import main
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for wanted in ("in the update", "finishing this step first; press again to stop at once, without saving"):
        while wanted not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode in (1, 130)
    assert "Traceback" not in errors
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []


def kill_loop(data: Path, tmp_path: Path, kills: int, seed: int, **changes: Any) -> tuple[RunFolder, list[int]]:
    """A run that was killed again and again, and the newest checkpoint at each kill; see chaos/kill_loop.py."""
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(data, **(changes or KILLED)).to_toml(), encoding="utf-8")
    run_jobs((1, "kill", config, tmp_path / "run", kills, seed))
    return RunFolder.open(tmp_path / "run"), json.loads((tmp_path / "run.json").read_text())


@pytest.fixture(scope="session")
def unkilled(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(data, tmp_path_factory.mktemp("unkilled") / "run", **KILLED)


def check_killed_run(run: RunFolder, reached: list[int], unkilled: RunFolder, progress: int) -> None:
    assert len(set(reached)) >= progress  # the kills fell at different steps
    assert_equal_runs(run, unkilled)
    assert saves(run) == saves(unkilled)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000059", "step-00000060"]


def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(
    data: Path, unkilled: RunFolder, tmp_path: Path
) -> None:
    run, reached = kill_loop(data, tmp_path, kills=8, seed=0)
    check_killed_run(run, reached, unkilled, progress=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_kills(seed: int, data: Path, unkilled: RunFolder, tmp_path: Path) -> None:
    run, reached = kill_loop(data, tmp_path, kills=30, seed=seed)
    check_killed_run(run, reached, unkilled, progress=10)
