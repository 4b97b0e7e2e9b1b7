"""Signals that ask a run to stop, and an output that nobody reads any more: saved, and gone on with to the same end."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

from . import forks
from .operations import FileOperations
from .runs import RUNS, Kind, differences, outcome
from .verdicts import Result, Verdict
from .world import World

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
SENT = {**{number.name: number for number in STOPPING}, "nohup": signal.SIGHUP}
CASES = (*SENT, "closed pipe")
# Runs that save only at their end.
UNSAVED = tuple(Kind(f"{kind.name}-unsaved", kind.data, {**kind.settings, "checkpoint__every": 0}) for kind in RUNS)
BROKEN_PIPE = 128 + signal.SIGPIPE


def send_signal(world: World, number: int, draw: random.Random) -> Result:
    """Send a signal while a run works, close its output, or send what it was told to ignore.

    A checkpoint before the end of the run is one that was made in order to stop.
    """
    kind, case = UNSAVED[number // len(CASES) % len(UNSAVED)], CASES[number % len(CASES)]
    expected = world.reference(kind)
    run = world.cleared() / "run"
    at = draw.randint(1, kind.steps - 5)  # updates that are recorded by then; it may take a few more to stop
    what = f"{kind.name}: {case} when update {at} is recorded"
    recorded = 0

    def act(count: int, name: str, path: Path) -> None:
        nonlocal recorded
        recorded += path.name == "metrics.jsonl"
        if path.name == "metrics.jsonl" and recorded == at:
            close_pipe() if case == "closed pipe" else os.kill(os.getpid(), SENT[case])

    def before() -> None:
        for one in STOPPING:  # whatever the process that forks was told: in the background it has to ignore SIGINT
            signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)
        if case == "nohup":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        FileOperations(world.place, act).install()

    ended = forks.run(*world.train(kind, run), before=before)
    status = {"closed pipe": BROKEN_PIPE, "nohup": 0}.get(case, 128 + SENT.get(case, 0))
    if ended.code != status:
        verdict = Verdict.TRACEBACK if ended.is_traceback and ended.code > 0 else Verdict.LOST
        return Result(verdict, what, f"not the exit status {status}\n{ended}")
    if case != "nohup":
        steps = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")]
        if not steps or max(steps) >= kind.steps:
            return Result(Verdict.LOST, what, f"it did not stop and save on the way: checkpoints {steps}\n{ended}")
        ended = forks.run("resume", run)
        if ended.code != 0:
            return Result(Verdict.TRACEBACK if ended.is_traceback else Verdict.LOST, what, str(ended))
    if differing := differences(without_saves(outcome(run)), without_saves(expected.outcome)):
        return Result(Verdict.LOST, what, f"different from the undisturbed: {', '.join(differing)}\n{ended}")
    return Result(Verdict.SURVIVED, what)


def close_pipe() -> None:
    """From now on the command's output goes to a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    os.close(write)


def without_saves(outcome: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a run without the events that tell when it was saved."""
    return {**outcome, "events": [event for event in outcome["events"] if event["event"] != "checkpoint"]}
