"""Running a comparison: what is missing is trained, what was interrupted goes on, what is done stays.

Every run is a process of its own, `meristem train --continue`, so that several can run side by side and a stop is that
of a run.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch

from meristem.comparison.file import Comparison, of_arm
from meristem.comparison.lines import Begun, Line, add_line, append_line, written_runs
from meristem.comparison.numbers import short
from meristem.comparison.planning import (
    Lost,
    Results,
    RunKey,
    Waiting,
    check_measure,
    configuration,
    count_of_runs,
    data_digest,
    known_keys,
    possible_keys,
    starting_plan_of,
    timed_arms,
    updates_of,
)
from meristem.comparison.results import Result, has_diverged, is_finished, lost_result, read_result
from meristem.comparison.tables import MEASURES
from meristem.config import Config, check_resumable, known_values
from meristem.cores import usable_cores
from meristem.devices import choose_device, describe_device
from meristem.errors import InputError, RunError
from meristem.files import absolute, parsed_json, write_atomically
from meristem.runs.origin import first_difference
from meristem.runs.run_folder import RunFolder
from meristem.training.length import as_found
from meristem.training.train import check_memory
from meristem.wording import counted, describe_time

LAUNCHES = "launches.jsonl"
PAUSE = 0.2  # seconds between two looks at the processes

Say = Callable[[str], None]
Lines = Mapping[str, Line]  # by the path of the run below the folder of the comparison
NO_LINES: Lines = {}


@dataclass
class Running:
    """A run in progress."""

    key: RunKey
    process: subprocess.Popen[bytes]
    log: Path
    begun: float
    gpu: str | None = None  # as CUDA_VISIBLE_DEVICES names it, where it was given one
    jobs: int = 1  # so many were allowed side by side


@dataclass(frozen=True)
class Slowest:
    """The slowest so far: seconds for an update, and of a run outside its updates (start, evaluation, saving)."""

    update: float = 0.0
    besides: float = 0.0

    @classmethod
    def of_earlier(cls, results: Results, side_by_side: Mapping[str, int], jobs: int, device: str) -> Slowest:
        """By runs of earlier calls on such a device, as many side by side or fewer, which are no slower.

        How long they took to start is unknown. Devices are told apart by name alone: threads on a CPU follow from
        those side by side, unless limited.
        """
        alike = (
            result
            for key, result in results.items()
            if side_by_side.get(str(key.path), 1) <= jobs
            and result.device.partition(",")[0] == device.partition(",")[0]
        )
        return reduce(lambda slowest, result: slowest.with_run(result.all_seconds, result), alike, cls())

    def with_run(self, seconds: float, result: Result) -> Slowest:
        """With a run that has ended, after so many seconds in all."""
        update = result.training_seconds / max(1, result.steps)
        return Slowest(max(self.update, update), max(self.besides, seconds - result.training_seconds))

    def seconds(self, updates: int) -> float:
        """What a run of so many updates would take."""
        return self.besides + updates * self.update


def finished_runs(comparison: Comparison, out: Path, lines: Lines = NO_LINES) -> dict[RunKey, Result]:
    """The results of all runs that are done, here or, by their lines, elsewhere.

    One that was trained otherwise than the file says now is refused.
    """
    check_measure(comparison)
    results: dict[RunKey, Result] = {}
    while True:
        before = len(results)
        some_diverged = any(result.diverged for result in results.values())
        for key in known_keys(comparison, results):
            if key in results or not (_is_begun(out, key) or str(key.path) in lines or some_diverged):
                continue
            with suppress(Waiting):
                if (result := _ended_before(comparison, key, out, results, lines)) is not None:
                    results[key] = result
        if len(results) == before:  # one that is done may be what others take after
            return results


def describe_lines(comparison: Comparison, lines: Lines) -> str:
    """How many runs lines were read of, and how many of these are of no use, as the comparison does not have them."""
    possible = {str(key.path) for key in possible_keys(comparison)}
    others = [run for run in lines if run not in possible]
    told = f"; {len(others)} of them not of this comparison, such as {others[0]}" if others else ""
    return f"lines of {counted(len(lines), 'run')} read{told}"


def _ended_before(
    comparison: Comparison, key: RunKey, out: Path, results: dict[RunKey, Result], lines: Lines
) -> Result | None:
    """The result of a run that is done, or can never be; None of one that is to be made."""
    try:
        return _finished(key, out, configuration(comparison, key, results), lines.get(str(key.path)))
    except Lost:
        return lost_result(key.arm, key.seed)


def _is_begun(out: Path, key: RunKey) -> bool:
    return (out / key.path / "config.toml").is_file()


def _finished(key: RunKey, out: Path, config: Config, line: Line | None) -> Result | None:
    """The result of a run that has ended; one that was begun with another configuration is refused by the key."""
    if _is_begun(out, key):
        folder = RunFolder.open(out / key.path)
        _check_alike(Begun.at(folder.path), config)
        if is_finished(folder) or has_diverged(folder):
            return read_result(key.arm, key.seed, folder)
    if line is None:
        return None
    _check_alike(line.begun, config)
    return line.result


def _check_alike(begun: Begun, config: Config) -> None:
    """Refuse a run that began otherwise than the file says now; other data first, from which more may follow."""
    if begun.data != data_digest(config):
        raise begun.refused("data.path", config.data.path, "was trained on other data")
    _check_structure(begun, config)
    try:
        check_resumable(begun.config, as_begun(begun.config, config))
    except InputError as error:
        why = f"was trained with {begun.config[error.field]!r}"
        raise begun.refused(error.field, error.value, why) from None


def _check_structure(begun: Begun, config: Config) -> None:
    """Refuse a run that began with another structure; where the file that names it lies does not matter."""
    if (field := first_difference(starting_plan_of(config), begun.plan)) is not None:
        if config.growth.has("depth") and config["growth.depth.start_layers"] is None:
            blocks = counted(len(begun.plan.layers), "block")
            raise begun.refused("growth.depth.start_layers", None, f"began with {blocks}, which can be named")
        named = [key for key, value in known_values(config).items() if key.endswith((".plan", ".like")) and value]
        key = named[0] if named else f"plan.{field}"
        raise begun.refused(key, config[key] if named else None, f"began with another structure ({field})")


def as_begun(began: Config, config: Config) -> Config:
    """The configuration with the plan file that a run began with: its structure has been compared, not its place.

    Likewise with the updates that it found out its FLOPs to suffice for.
    """
    config = as_found(config, began)
    if began.model.plan is None or config.model.plan is None:
        return config
    return replace(config, model=replace(config.model, plan=began.model.plan))


def run_comparison(
    comparison: Comparison, out: Path, *, jobs: int = 1, limit: float = math.inf, lines: Lines = NO_LINES,
    say: Say = print,
) -> dict[RunKey, Result]:  # fmt: skip
    """Make all runs that are missing, `jobs` at a time, and return the results of all; `lines` are of runs elsewhere.

    None is begun that would end more than `limit` seconds from now, going by the slowest one that has ended, also in
    an earlier call.
    """
    out = absolute("out", out)
    out.mkdir(parents=True, exist_ok=True)
    results = finished_runs(comparison, out, lines)
    gpus = visible_gpus()
    _check_first(comparison, results, jobs, gpus)
    _catch_up(out, results)
    say(f"{counted(count_of_runs(comparison, results), 'run')} in {out}; {len(results)} done")
    if lines:
        say(describe_lines(comparison, lines))
    timed = {*timed_arms(comparison)}
    running: list[Running] = []
    begun, made, changed = time.monotonic(), 0, True
    slowest = Slowest()
    if limit < math.inf:
        device = choose_device(str(comparison.values.get("train.device", "auto")))
        slowest = Slowest.of_earlier(results, jobs_of_runs(out, lines), jobs, describe_device(device))
    with _stoppable():
        try:
            while len(results) < (total := count_of_runs(comparison, results)):
                before = len(results)
                for key in _next(comparison, results, running, timed, jobs) if changed else ():
                    # One that waited for what it takes after may be done, or impossible.
                    if (known := _ended_before(comparison, key, out, results, lines)) is not None:
                        results[key] = known
                        continue
                    config = configuration(comparison, key, results)
                    if limit < math.inf and time.monotonic() - begun + slowest.seconds(updates_of(config)) > limit:
                        continue
                    side_by_side = 1 if _is_timed(key, timed) else jobs
                    check_room(key, config, side_by_side, gpus)
                    gpu = free_gpu(config.train.device, gpus, [run.gpu for run in running])
                    running.append(_launched(key, config, out, Share(side_by_side, gpu), say))
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    results[run.key] = _ended(run, out)
                    add_line(out, run.key.path, Begun.at(out / run.key.path), results[run.key], run.jobs)
                    made += 1
                    slowest = slowest.with_run(time.monotonic() - run.begun, results[run.key])
                    total = count_of_runs(comparison, results)
                    left = (time.monotonic() - begun) / made * (total - len(results))
                    say(_progress(comparison, run, results, total, left))
                changed = len(results) > before
                if not changed and not running:
                    missing = counted(total - len(results), "run")
                    say(f"no time is left for {missing}; the same command goes on from there")
                    break
                if not changed:
                    time.sleep(PAUSE)
        except BaseException:
            _stop(running, say)
            for run in running:  # one may have come to its end
                with suppress(RunError):
                    add_line(out, run.key.path, Begun.at(out / run.key.path), _ended(run, out), run.jobs)
            raise
    return results


def _check_first(comparison: Comparison, results: Results, jobs: int, gpus: Sequence[str]) -> None:
    """Refuse, before hours of other runs, what a run would be refused for: one of each arm and length known by now."""
    seen: set[tuple[str, bool]] = set()
    for key in known_keys(comparison, results):
        kind = key.arm, key.seed in comparison.tuning_seeds
        if kind not in seen and key not in results:
            seen.add(kind)
            with suppress(Waiting, Lost), of_arm(comparison, key.arm):
                check_room(key, configuration(comparison, key, results), jobs, gpus)


def _catch_up(out: Path, results: Mapping[RunKey, Result]) -> None:
    """Write down runs that are done here, of which there is no line yet: their end was not seen."""
    written, jobs = written_runs(out), launched_jobs(out)
    for key, result in results.items():
        if _is_begun(out, key) and str(key.path) not in written:
            add_line(out, key.path, Begun.at(out / key.path), result, jobs.get(str(key.path), 1))


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


def _progress(
    comparison: Comparison, run: Running, results: dict[RunKey, Result], total: int, seconds_left: float
) -> str:
    """A line for a run that has ended."""
    found = results[run.key]
    score = found.scores.get(comparison.measure)
    shown = "diverged" if score is None else f"{MEASURES[comparison.measure]} {score:.4f}"
    if run.key.measuring and not found.diverged:
        shown = f"{found.steps:,} updates, {short(found.flops)}FLOPs, {found.training_seconds:.1f} s"
    took = describe_time(time.monotonic() - run.begun)
    ahead = f", about {describe_time(seconds_left)} left" if len(results) < total else ""
    return f"[{len(results)}/{total}] {run.key}: {shown}, {took}{ahead}"


def _is_timed(key: RunKey, timed: Collection[str]) -> bool:
    """Whether a run measures speed, for which it has the machine to itself."""
    return key.measuring > 0 and key.arm in timed


def _next(
    comparison: Comparison, results: dict[RunKey, Result], running: list[Running], timed: Collection[str], jobs: int
) -> list[RunKey]:
    """The runs to begin now."""
    busy = {run.key for run in running}
    if any(_is_timed(key, timed) for key in busy):
        return []
    found: list[RunKey] = []
    for key in (key for key in known_keys(comparison, results) if key not in results and key not in busy):
        if len(busy) + len(found) >= jobs:
            break
        with suppress(Waiting):
            with suppress(Lost):
                configuration(comparison, key, results)
            if _is_timed(key, timed):  # it comes first, as soon as nothing else is at work
                return [] if busy else [key]
            found.append(key)
    if not found and not running:
        raise RunError("no run can begin, though not all are done: this is a fault of Meristem")
    return found


@dataclass(frozen=True)
class Share:
    """What a run gets of the machine: it is one of so many side by side, on this GPU if there are several."""

    side_by_side: int
    gpu: str | None


def visible_gpus() -> list[str]:
    """The GPUs that runs can have, by their names in CUDA_VISIBLE_DEVICES."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in named.split(",")][:count] if named else [str(number) for number in range(count)]


def free_gpu(device: str, gpus: Sequence[str], taken: Sequence[str | None]) -> str | None:
    """The GPU that the fewest runs are on; None where there is no choice, or the configuration has made it."""
    if len(gpus) < 2 or device not in ("auto", "cuda"):
        return None
    return min(gpus, key=taken.count)


def check_room(key: RunKey, config: Config, side_by_side: int, gpus: Sequence[str]) -> None:
    """Refuse more runs side by side than a device has memory for, by the plan's own estimate."""
    device = choose_device(config.train.device)
    spread = len(gpus) if device.type == "cuda" and device.index is None else 1
    sharing = math.ceil(side_by_side / max(1, spread))
    try:
        check_memory(config, starting_plan_of(config), device, sharing=sharing)
    except InputError as error:
        if sharing == 1:
            raise
        expected = f"must be fewer: {key} does not fit {sharing} times on {describe_device(device)} ({error})"
        raise InputError("jobs", side_by_side, expected) from None


def _launched(key: RunKey, config: Config, out: Path, share: Share, say: Say) -> Running:
    """Begin, or go on with, a run."""
    folder = out / key.path
    file = out / "configs" / key.path.with_suffix(".toml")
    log = out / "logs" / key.path.with_suffix(".txt")
    for path in (file, log, folder):
        path.parent.mkdir(parents=True, exist_ok=True)
    if _is_begun(out, key):
        say(f"going on with {key}")
        config = as_begun(RunFolder.open(folder).config, config)
    write_atomically(file, config.to_toml())
    threads = threads_of(share.side_by_side)
    # Threads that wait without spinning: on a busy machine the default is ten times slower.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OMP_NUM_THREADS": str(threads)}
    environment |= {} if share.gpu is None else {"CUDA_VISIBLE_DEVICES": share.gpu}
    command = [sys.executable, "-m", "meristem", "train", str(file), "--out", str(folder), "--continue"]
    with log.open("ab") as output:  # a session of its own: a Ctrl-C reaches it once, through us
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    launch = {"run": str(key.path), "jobs": share.side_by_side, "threads": threads, "gpu": share.gpu}
    append_line(out / LAUNCHES, launch | {"time": time.time()})
    return Running(key, process, log, time.monotonic(), share.gpu, share.side_by_side)


def threads_of(side_by_side: int) -> int:
    """The threads of one of so many runs: its share of the cores, or fewer if the environment says so."""
    share = max(1, usable_cores() // side_by_side)
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(share, max(1, int(given))) if given.isdecimal() else share


def _ended(run: Running, out: Path) -> Result:
    """The result of a run whose process has ended, or an error with what it said last."""
    if _is_begun(out, run.key):
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
        say(f"stopping {counted(len(running), 'run')}; the same command goes on from there")
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
