"""Running a comparison: what is missing is trained, what was interrupted goes on, what is done stays.

Every run is a process of its own, `meristem train --continue`, so that several can run side by side and a stop is that
of a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from meristem.comparison.ended import NO_LINES, Lines, as_begun, describe_lines, ended_before, finished_runs, is_begun
from meristem.comparison.file import Comparison, of_arm
from meristem.comparison.foreseen import foreseen_configuration
from meristem.comparison.lines import Begun, add_line, written_runs
from meristem.comparison.numbers import short
from meristem.comparison.planning import (
    Lost,
    Results,
    RunKey,
    Waiting,
    configuration,
    count_of_runs,
    known_keys,
    possible_keys,
    source_key,
    starting_plan_of,
    task_for,
    timed_arms,
    updates_of,
)
from meristem.comparison.processes import (
    PAUSE,
    Running,
    Say,
    Share,
    ended,
    free_gpu,
    jobs_of_runs,
    launched,
    launched_jobs,
    stop,
    stoppable,
    visible_gpus,
    wait_for_others,
)
from meristem.comparison.results import CarriedResult, Result
from meristem.comparison.tables import MEASURES
from meristem.config import Config
from meristem.devices import choose_device, describe_device
from meristem.errors import InputError, RunError
from meristem.files import absolute
from meristem.runs.lock import run_lock
from meristem.runs.run_folder import is_run
from meristem.training.train import check_memory
from meristem.wording import counted, describe_time


def run_comparison(
    comparison: Comparison, out: Path, *, jobs: int = 1, limit: float = math.inf, lines: Lines = NO_LINES,
    say: Say = print,
) -> dict[RunKey, Result]:  # fmt: skip
    """Make all runs that are missing, `jobs` at a time, and return the results of all; `lines` are of runs elsewhere.

    None is begun that would end more than `limit` seconds from now, going by the slowest one that has ended, also in
    an earlier call.
    """
    out = absolute("out", out)
    check_place(out)
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + limit
    with run_lock(out, what="comparison"), stoppable():
        wait_for_others(out, possible_keys(comparison), say, until)
        runner = Runner(comparison, out, jobs, until, lines, say)
        _catch_up(out, runner.results)
        say(f"{counted(runner.total, 'run')} in {out}; {len(runner.results)} done")
        if lines:
            say(describe_lines(comparison, lines))
        try:
            runner.run()
        except BaseException:
            runner.give_up()
            raise
    return runner.results


def check_place(out: Path) -> None:
    """Refuse to put a comparison into the folder of a run."""
    if is_run(out):
        raise InputError("out", str(out), "is the folder of a run; a comparison needs one of its own")


class Runner:
    """The runs of a comparison that have ended and those in progress, of which it keeps so many side by side."""

    def __init__(
        self, comparison: Comparison, out: Path, jobs: int, until: float, lines: Lines, say: Say
    ) -> None:  # fmt: skip
        self.comparison, self.out, self.jobs, self.lines, self.say = comparison, out, jobs, lines, say
        self.results = finished_runs(comparison, out, lines)
        self.running: list[Running] = []
        self.gpus, self.timed = visible_gpus(), {*timed_arms(comparison)}
        self.check_first()
        self.begun, self.made, self.until = time.monotonic(), 0, until
        self.slowest = Slowest()
        if until < math.inf:
            device = choose_device(str(comparison.values.get("train.device", "auto")))
            self.slowest = Slowest.of_earlier(self.results, jobs_of_runs(out, lines), jobs, describe_device(device))

    def check_first(self) -> None:
        """Refuse, before hours of other runs, what a run would be refused for, as far as runs are known by now.

        Of each arm and length one is looked at, of runs that start from others every one.
        """
        seen: set[tuple[str, bool]] = set()
        missing_keys = [key for key in known_keys(self.comparison, self.results) if key not in self.results]
        # Sources come first: what is wrong with them is not a fault of those that start from them.
        for key in sorted(missing_keys, key=lambda key: len(self.comparison.sources(key.arm))):
            kind = key.arm, key.seed in self.comparison.tuning_seeds
            with suppress(Waiting, Lost):
                if (missing := self.missing_source(key)) is not None:
                    raise _source_missing(key, missing)
            with suppress(Waiting, Lost), of_arm(self.comparison, key.arm):
                if kind not in seen:
                    with foreseen_configuration(self.comparison, key, self.results) as config:
                        task_for(config)
                        check_room(key, config, self.jobs, self.gpus)
            seen.add(kind)

    def missing_source(self, key: RunKey) -> Path | None:
        """Where the folder should be of the run that one is to start from, if only a line of that is here."""
        source = None if is_begun(self.out, key) else source_key(self.comparison, key, self.results)
        known = None if source is None else self.results.get(source)
        carried = isinstance(known, CarriedResult) and not known.diverged
        return self.out / source.path if source is not None and carried else None

    def configuration(self, key: RunKey) -> Config:
        """What a run is trained with; errors name the arm."""
        with of_arm(self.comparison, key.arm):
            return configuration(self.comparison, key, self.results)

    @property
    def total(self) -> int:
        """All runs that are known by now."""
        return count_of_runs(self.comparison, self.results)

    def run(self) -> None:
        """Begin runs and wait for them until all are done, or no time is left for another."""
        changed = True
        while (left := self.total - len(self.results)) > 0:
            before = len(self.results)
            if changed:
                self.begin()
            self.collect()
            changed = len(self.results) > before
            if not changed and not self.running:
                self.say(f"no time is left for {counted(left, 'run')}; the same command goes on from there")
                return
            if not changed:
                time.sleep(PAUSE)

    def begin(self) -> None:
        """Begin what can begin now, as far as there is room and time."""
        for key in self.next():
            # One that waited for what it takes after may be done, or impossible.
            known = ended_before(self.comparison, key, self.out, self.results, self.lines)
            if known is not None:
                self.results[key] = known
                continue
            config = self.configuration(key)
            if not self.has_time(config):
                continue
            side_by_side = 1 if self.is_timed(key) else self.jobs
            check_room(key, config, side_by_side, self.gpus)
            if is_begun(self.out, key):
                source = source_key(self.comparison, key, self.results)
                config = as_begun(Begun.at(self.out / key.path), config, source)
            gpu = free_gpu(config.train.device, self.gpus, [run.share.gpu for run in self.running])
            self.running.append(launched(key, config, self.out, Share(side_by_side, gpu), self.say))

    def has_time(self, config: Config) -> bool:
        """Whether a run would end within the limit."""
        return self.until == math.inf or time.monotonic() + self.slowest.seconds(updates_of(config)) <= self.until

    def collect(self) -> None:
        """Take the results of runs that have ended since, and say so."""
        for run in [run for run in self.running if run.process.poll() is not None]:
            self.running.remove(run)
            result = self.results[run.key] = self.written(run)
            self.made += 1
            self.slowest = self.slowest.with_run(time.monotonic() - run.begun, result)
            self.say(self.progress(run, result))

    def written(self, run: Running) -> Result:
        """The result of a run whose process has ended, of which a line is kept."""
        result = ended(run, self.out)
        add_line(self.out, run.key.path, Begun.at(self.out / run.key.path), result, run.share.side_by_side)
        return result

    def give_up(self) -> None:
        """Let the runs in progress save and end; one may have come to its end."""
        stop(self.running, self.say)
        for run in self.running:
            with suppress(RunError):
                self.written(run)

    def progress(self, run: Running, result: Result) -> str:
        """A line for a run that has ended."""
        score = result.scores.get(self.comparison.measure)
        shown = "diverged" if score is None else f"{MEASURES[self.comparison.measure]} {score:.4f}"
        if run.key.measuring and not result.diverged:
            shown = f"{result.steps:,} updates, {short(result.flops)}FLOPs, {result.training_seconds:.1f} s"
        took = describe_time(time.monotonic() - run.begun)
        done, total = len(self.results), self.total
        left = (time.monotonic() - self.begun) / self.made * (total - done)
        ahead = f", about {describe_time(left)} left" if done < total else ""
        return f"[{done}/{total}] {run.key}: {shown}, {took}{ahead}"

    def is_timed(self, key: RunKey) -> bool:
        """Whether a run measures speed, for which it has the machine to itself."""
        return key.measuring > 0 and key.arm in self.timed

    def next(self) -> list[RunKey]:
        """The runs to begin now."""
        busy = {run.key for run in self.running}
        if any(map(self.is_timed, busy)):
            return []
        found: list[RunKey] = []
        stuck: dict[RunKey, Path] = {}  # left for the end, so that nothing else waits for them
        known = known_keys(self.comparison, self.results)
        for key in (key for key in known if key not in self.results and key not in busy):
            if len(busy) + len(found) >= self.jobs:
                break
            with suppress(Waiting):
                with suppress(Lost):
                    self.configuration(key)
                if (missing := self.missing_source(key)) is not None:
                    stuck[key] = missing
                    continue
                if self.is_timed(key):  # it comes first, as soon as nothing else is at work
                    return [] if busy else [key]
                found.append(key)
        if not found and not self.running:
            for key, missing in stuck.items():
                raise _source_missing(key, missing)
            raise RunError("no run can begin, though not all are done: this is a fault of Meristem")
        return found


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


def _source_missing(key: RunKey, missing: Path) -> InputError:
    """The error for a run that starts from one whose weights are not here."""
    expected = "must be the folder of a run, but only a line of it is here; bring the folder, or leave out the line"
    return InputError(f"arms.{key.arm}.model.start_from", str(missing), expected)


def _catch_up(out: Path, results: Mapping[RunKey, Result]) -> None:
    """Write down runs that are done here, of which there is no line yet: their end was not seen."""
    written, jobs = written_runs(out), launched_jobs(out)
    for key, result in results.items():
        if is_begun(out, key) and str(key.path) not in written:
            add_line(out, key.path, Begun.at(out / key.path), result, jobs.get(str(key.path), 1))


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
