"""SIGKILL at random moments and at random file operations; the command that was killed is then given again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import forks
from .operations import FileOperations
from .runs import RUNS, contents, differences, names, outcome
from .verdicts import Result, Verdict
from .world import World

Command = Sequence[str | Path]


def kill_training(world: World, number: int, draw: random.Random) -> Result:
    """Several kills of one run, until it finishes; its end must be that of the run that was never killed."""
    kind = RUNS[number % len(RUNS)]
    expected = world.reference(kind)
    run = world.cleared() / "run"
    told, ended = killed(world, world.train(kind, run), draw, draw.randint(1, 4), expected.operations // 3)

    def wrong() -> list[str]:
        remains = {path.name for path in world.place.iterdir()} - {"run"}
        others = names(run) ^ names(expected.folder)
        return [*differences(outcome(run), expected.outcome), *sorted(remains | others)]

    return judged(f"{kind.name}: {', '.join(told)}", len(told), ended, wrong)


def kill_preparation(world: World, number: int, draw: random.Random) -> Result:
    """Kills of `data prepare` and `prepare-labelled`, into a new folder or over an older one."""
    labelled, over = bool(number % 2), bool(number // 2 % 2)
    command, operations, expected = world.preparation(labelled)
    out = world.cleared() / "data"
    if over:
        older = shutil.copytree(world.rows if labelled else world.texts, out)
        assert contents(Path(older)) != expected
        command = [*command, "--overwrite"]
    told, ended = killed(world, command, draw, draw.randint(1, 3), operations)

    def wrong() -> list[str]:
        remains = {path.name for path in world.place.iterdir()} - {"data"}
        return [*differences(contents(out), expected), *sorted(remains)]

    return judged(f"{'rows' if labelled else 'texts'}{' over' * over}: {', '.join(told)}", len(told), ended, wrong)


def killed(
    world: World, command: Command, draw: random.Random, kills: int, operations: int
) -> tuple[list[str], forks.Ended]:
    """Give a command again and again, killing it up to so many times; the kills in words, and how the last one ended.

    A kill falls at one of the next `operations` on files, or at a moment of about as long a time.
    """
    told: list[str] = []
    for _ in range(kills):
        at = draw.randint(1, operations)
        if draw.random() < 0.6:
            hook = FileOperations(world.place, kill_at(at))
            child = forks.start(*command, before=hook.install)
            told.append(f"at operation {at}")
        else:
            child = forks.start(*command)
            pause = 0.02 + at / 400  # seconds; an operation takes some thousandths
            time.sleep(pause)
            child.send(signal.SIGKILL)
            told.append(f"after {pause:.3f} s")
        ended = child.wait()
        if ended.code != -signal.SIGKILL:
            told.pop()
            if ended.code != 0:
                return told, ended
            break
    return told, forks.run(*command)


def kill_at(number: int) -> Callable[[int, str, Path], None]:
    def act(count: int, name: str, path: Path) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def judged(what: str, kills: int, ended: forks.Ended, wrong: Callable[[], list[str]]) -> Result:
    """The verdict on a command that has been killed and given again."""
    if ended.is_traceback:
        return Result(Verdict.TRACEBACK, what, str(ended), kills)
    if ended.code != 0:
        return Result(Verdict.LOST, what, str(ended), kills)
    if differing := wrong():
        return Result(Verdict.LOST, what, f"different from the undisturbed: {', '.join(differing)}", kills)
    return Result(Verdict.SURVIVED, what, weight=kills)
