"""Running a comparison: what is missing is trained, what was interrupted goes on, what is done stays.

Every run is a process of its own, `meristem train --continue`, so that several can run side by side and a stop is that
of a run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meristem.comparison.file import Comparison
from meristem.comparison.planning import (
    RunKey,
    Waiting,
    configuration,
    count_of_runs,
    data_digest,
    known_keys,
    measuring_keys,
)
from meristem.comparison.results import Result, has_diverged, is_finished, read_result
from meristem.config import Config, check_resumable
from meristem.errors import InputError, Remedy, RunError
from meristem.files import absolute, write_atomically
from meristem.runs.run_folder import RunFolder
from meristem.wording import counted, describe_time

LAUNCHES = "launches.jsonl"
PAUSE = 0.2  # seconds between two looks at the processes

Say = Callable[[str], None]


@dataclass
class Running:
    """A run in progress."""

    key: RunKey
    process: subprocess.Popen[bytes]
    log: Path
    begun: float


def finished_runs(comparison: Comparison, out: Path) -> dict[RunKey, Result]:
    """The results of all runs that are done; one that was trained otherwise than the file says now is refused."""
    results: dict[RunKey, Result] = {}
    while True:
        before = len(results)
        for key in known_keys(comparison, results):
            if key in results or not _is_begun(out, key):
                continue
            with suppress(Waiting):
                if (result := _finished(key, out, configuration(comparison, key, results))) is not None:
                    results[key] = result
        if len(results) == before:  # one that is done may be what others take after
            return results


def _is_begun(out: Path, key: RunKey) -> bool:
    return (out / key.path / "config.toml").is_file()


def _finished(key: RunKey, out: Path, config: Config) -> Result | None:
    """The result of a run that has ended; one that was begun with another configuration is refused by the key."""
    if not _is_begun(out, key):
        return None
    folder = RunFolder.open(out / key.path)
    try:
        check_resumable(folder.config, config)
    except InputError as error:
        began = folder.config[error.field]
        expected = f"{folder.path} was trained with {began!r}; remove it, or compare in another folder"
        raise InputError(error.field, error.value, expected, Remedy(("out=FOLDER",))) from None
    if folder.data_digest != data_digest(config):
        raise InputError("data.path", config.data.path, f"is not the data that {folder.path} was trained on")
    return read_result(key.arm, key.seed, folder) if is_finished(folder) or has_diverged(folder) else None


def run_comparison(comparison: Comparison, out: Path, *, jobs: int = 1, say: Say = print) -> dict[RunKey, Result]:
    """Make all runs that are missing, `jobs` at a time, and return the results of all."""
    out = absolute("out", out)
    out.mkdir(parents=True, exist_ok=True)
    results = finished_runs(comparison, out)
    total, there = count_of_runs(comparison), len(results)
    say(f"{counted(total, 'run')} in {out}; {there} done")
    alone = set(measuring_keys(comparison))
    running: list[Running] = []
    begun, made, changed = time.monotonic(), 0, True
    with _stoppable():
        try:
            while len(results) < total:
                before = len(results)
                for key in _next(comparison, results, running, alone, jobs) if changed else ():
                    config = configuration(comparison, key, results)
                    if (known := _finished(key, out, config)) is not None:  # it had waited for what it takes after
                        results[key] = known
                    else:
                        running.append(_launched(key, config, out, jobs, say))
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    results[run.key] = _ended(run, out)
                    made += 1
                    left = (time.monotonic() - begun) / made * (total - len(results))
                    say(_progress(comparison, run, results, total, left))
                changed = len(results) > before
                if not changed:
                    time.sleep(PAUSE)
        except BaseException:
            _stop(running, say)
            raise
    return results


def _progress(
    comparison: Comparison, run: Running, results: dict[RunKey, Result], total: int, seconds_left: float
) -> str:
    """A line for a run that has ended."""
    score = results[run.key].scores.get(comparison.measure)
    shown = "diverged" if score is None else f"{comparison.measure} {score:.4f}"
    took = describe_time(time.monotonic() - run.begun)
    ahead = f", about {describe_time(seconds_left)} left" if len(results) < total else ""
    return f"[{len(results)}/{total}] {run.key}: {shown}, {took}{ahead}"


def _next(
    comparison: Comparison, results: dict[RunKey, Result], running: list[Running], alone: set[RunKey], jobs: int
) -> list[RunKey]:
    """The runs to begin now. What measures speed has the machine to itself."""
    busy = {run.key for run in running}
    if busy & alone:
        return []
    found: list[RunKey] = []
    for key in (key for key in known_keys(comparison, results) if key not in results and key not in busy):
        if len(busy) + len(found) >= jobs:
            break
        with suppress(Waiting):
            configuration(comparison, key, results)
            if key in alone:  # it comes first, as soon as nothing else is at work
                return [] if busy else [key]
            found.append(key)
    if not found and not running:
        raise RunError("no run can begin, though not all are done: this is a fault of Meristem")
    return found


def _launched(key: RunKey, config: Config, out: Path, jobs: int, say: Say) -> Running:
    """Begin, or go on with, a run."""
    folder = out / key.path
    file = out / "configs" / key.path.with_suffix(".toml")
    log = out / "logs" / key.path.with_suffix(".txt")
    for path in (file, log, folder):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, config.to_toml())
    side_by_side = 1 if key.measuring else jobs
    threads = max(1, _cores() // side_by_side)
    # Threads that wait without spinning: on a busy machine the default is ten times slower.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "meristem", "train", str(file), "--out", str(folder), "--continue"]
    if _is_begun(out, key):
        say(f"going on with {key}")
    with log.open("ab") as output:  # a session of its own: a Ctrl-C reaches it once, through us
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    with (out / LAUNCHES).open("a", encoding="utf-8") as launches:
        line = {"run": str(key.path), "jobs": side_by_side, "threads": threads, "time": time.time()}
        launches.write(json.dumps(line) + "\n")
    return Running(key, process, log, time.monotonic())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ended(run: Running, out: Path) -> Result:
    """The result of a run whose process has ended, or an error with what it said last."""
    if (out / run.key.path / "config.toml").is_file():
        folder = RunFolder.open(out / run.key.path)
        if is_finished(folder) or has_diverged(folder):
            return read_result(run.key.arm, run.key.seed, folder)
    lines = run.log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    raise RunError(f"{run.key}: stopped with status {run.process.returncode} ({said}); see {run.log}")


def _stop(running: list[Running], say: Say) -> None:
    """Let runs in progress save and end."""
    for run in running:
        with suppress(ProcessLookupError):
            run.process.send_signal(signal.SIGTERM)
    if running:
        say(f"stopping {counted(len(running), 'run')}, with which the same command goes on")
    for run in running:
        run.process.wait()


class _stoppable:
    """Within this a request to end, too, is a KeyboardInterrupt."""

    def __enter__(self) -> None:
        self.before = None
        with suppress(ValueError):  # not the main thread
            self.before = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *exception: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)

    @staticmethod
    def _interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt
