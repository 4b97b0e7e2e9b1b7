"""A run of a comparison as a process of its own: what it gets of the machine, its start and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from meristem.comparison.ended import Lines, is_begun, result_of
from meristem.comparison.lines import append_line
from meristem.comparison.planning import RunKey
from meristem.comparison.results import Result
from meristem.config import Config
from meristem.cores import usable_cores
from meristem.errors import RunError
from meristem.files import parsed_json, write_atomically
from meristem.runs.lock import check_free
from meristem.runs.run_folder import RunFolder
from meristem.wording import counted

LAUNCHES = "launches.jsonl"
PAUSE = 0.2  # seconds between two looks at processes

Say = Callable[[str], None]


@dataclass(frozen=True)
class Share:
    """What a run gets of the machine: it is one of so many side by side, on this GPU if there are several."""

    side_by_side: int
    gpu: str | None


@dataclass(frozen=True)
class Running:
    """A run in progress."""

    key: RunKey
    process: subprocess.Popen[bytes]
    log: Path
    before: int  # bytes of the log that are of earlier processes
    begun: float
    share: Share


def visible_gpus() -> list[str]:
    """The GPUs that runs can have, by their names in CUDA_VISIBLE_DEVICES."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in named.split(",")][:count] if named else [str(number) for number in range(count)]


def free_gpu(device: str, gpus: Sequence[str], taken: Sequence[str | None]) -> str | None:
    """The GPU that the fewest runs are on; None where there is no choice, or the configuration has made it."""
    if len(gpus) < 2 or device not in ("auto", "cuda"):
        return None
    return min(gpus, key=taken.count)


def launched(key: RunKey, config: Config, out: Path, share: Share, say: Say) -> Running:
    """Begin a run, or go on with it."""
    folder = out / key.path
    file = out / "configs" / key.path.with_suffix(".toml")
    log = out / "logs" / key.path.with_suffix(".txt")
    for path in (file, log, folder):
        path.parent.mkdir(parents=True, exist_ok=True)
    if is_begun(out, key):
        say(f"going on with {key}")
    write_atomically(file, config.to_toml())
    threads = threads_of(share.side_by_side)
    # Threads that wait without spinning: on a busy machine the default is ten times slower.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OMP_NUM_THREADS": str(threads)}
    environment |= {} if share.gpu is None else {"CUDA_VISIBLE_DEVICES": share.gpu}
    command = [sys.executable, "-m", "meristem", "train", str(file), "--out", str(folder), "--continue"]
    launch = {"run": str(key.path), "jobs": share.side_by_side, "threads": threads, "gpu": share.gpu}
    append_line(out / LAUNCHES, launch | {"time": time.time()})  # first: a process that nobody knows would go on alone
    with log.open("ab") as output:  # a session of its own: a Ctrl-C reaches it once, through us
        before = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    return Running(key, process, log, before, time.monotonic(), share)


def threads_of(side_by_side: int) -> int:
    """The threads of one of so many runs: its share of the cores, or fewer if the environment says so."""
    share = max(1, usable_cores() // side_by_side)
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(share, max(1, int(given))) if given.isdecimal() else share


def ended(run: Running, out: Path) -> Result:
    """The result of a run whose process has ended, or an error with what it said last."""
    if is_begun(out, run.key):
        result = result_of(run.key, RunFolder.open(out / run.key.path))
        if result is not None:
            return result
    lines = run.log.read_bytes()[run.before :].decode("utf-8", errors="replace").split("\n")
    errors = [line for line in lines if line.startswith("error:")]
    said = next((line for line in reversed(errors or lines) if line.strip()), "it said nothing")
    raise RunError(f"{run.key}: stopped with status {run.process.returncode} ({said}); see {run.log}")


def stop(running: list[Running], say: Say) -> None:
    """Let runs in progress save and end.

    No further request to end keeps them from being told, and waited for; a second Ctrl-C leaves them to end alone.
    """
    with _deaf():
        for run in running:
            with suppress(ProcessLookupError):
                run.process.send_signal(signal.SIGTERM)
        if running:
            with suppress(OSError):  # a closed terminal
                say(f"stopping {counted(len(running), 'run')}; the same command goes on from there")
        for run in running:
            run.process.wait()


@contextmanager
def _deaf() -> Iterator[None]:
    """Within this requests to end are ignored; a terminal that is closed often says so twice."""
    with _handling(signal.SIG_IGN):
        yield


class AskedToStop(KeyboardInterrupt):
    """A signal asked for the end; its number is the argument."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Within this a request to end and a closed terminal, too, are a KeyboardInterrupt.

    A signal that is ignored, as a closed terminal is under nohup, stays so.
    """

    def interrupt(number: int, frame: object) -> None:
        raise AskedToStop(number)

    with _handling(interrupt):
        yield


@contextmanager
def _handling(handler: Callable[[int, object], None] | signal.Handlers) -> Iterator[None]:
    """Let something else happen at a request to end, or a closed terminal, unless that is ignored already."""
    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # not all of them are there on every system
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            with suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            if former is not None:  # None: it was not Python that had set it, so it cannot be set again
                signal.signal(number, former)


def wait_for_others(out: Path, keys: Iterable[RunKey], say: Say, until: float) -> None:
    """Wait for runs that processes of an earlier call still train, as its end was not its own, `until` some time."""
    for key in filter(lambda key: is_begun(out, key), keys):
        told = False
        while time.monotonic() < until:
            try:
                check_free(out / key.path)
                break
            except RunError as error:
                if not told:
                    say(f"waiting for {key}: {error}")
                told = True
                time.sleep(PAUSE)


def launched_jobs(out: Path) -> dict[str, int]:
    """How many runs were allowed side by side with each, at the most, by the paths of all that were begun here."""
    jobs: dict[str, int] = {}
    launches = out / LAUNCHES
    for line in launches.read_text(encoding="utf-8", errors="replace").splitlines() if launches.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # a line that was cut off
            entry = parsed_json(line)
            jobs[entry["run"]] = max(jobs.get(entry["run"], 1), entry["jobs"])
    return jobs


def jobs_of_runs(out: Path, lines: Lines) -> dict[str, int]:
    """How many runs were allowed side by side with each, by the paths of all that were begun here or have a line."""
    return {**{run: line.jobs for run, line in lines.items()}, **launched_jobs(out)}
