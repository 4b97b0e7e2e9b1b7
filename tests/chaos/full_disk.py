"""A disk without room, or one that fails: injected errors at a file operation, and a limit on the size of files.

Refused clearly is one line with exit status 1: the machine is at fault, not the input. Then, with room again, the same
command must end as if nothing had happened.
"""

from __future__ import annotations

import errno
import math
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import forks
from .kills import Command
from .operations import FileOperations
from .runs import RUNS, answer, command, contents, differences, names, outcome
from .verdicts import Result, Verdict
from .world import World

MACHINE = 1  # the exit status where the machine is at fault
LARGEST = 200_000  # bytes of a file that is written in an attempt, about


def fill_disk(world: World, number: int, draw: random.Random) -> Result:
    """Let a training run, a preparation, an evaluation or a report meet a full or failing disk."""
    job = ("train", "train", "prepare", "prepare-labelled", "eval", "report")[number % 6]
    if job == "train":
        return fill_while_training(world, draw)
    if job in ("eval", "report"):
        return fill_while_reading(world, job, number, draw)
    what, operations, expected = world.preparation(job == "prepare-labelled")
    out = world.cleared() / "data"

    def wrong() -> list[str]:
        remains = {path.name for path in world.place.iterdir()} - {"data"}
        return [*differences(contents(out), expected), *sorted(remains)]

    return tried(world, what, draw, operations, wrong, between=lambda: wrong() if any(world.place.iterdir()) else [])


def fill_while_training(world: World, draw: random.Random) -> Result:
    kind = RUNS[draw.randrange(len(RUNS))]
    expected = world.reference(kind)
    run = world.cleared() / "run"

    def wrong() -> list[str]:
        others = names(run) ^ names(expected.folder)
        return [*differences(outcome(run), expected.outcome), *sorted(others)]

    return tried(world, world.train(kind, run), draw, expected.operations, wrong)


def fill_while_reading(world: World, verb: str, number: int, draw: random.Random) -> Result:
    """Of what is there, an `eval` or a `report` may change only its own results."""
    kind = RUNS[number // 6 % len(RUNS)]
    expected = world.answer(kind, True, verb)
    run = world.placed(world.halfway(kind, True))
    own = ("eval.json", "loss.svg", "growth.svg", "structure.svg", "report.html")
    before = contents(run)

    def wrong() -> list[str]:
        ended = forks.run(*command(verb, run))
        changed = [name for name in differences(contents(run), before) if name not in own]
        return [*differences(answer(verb, run, ended.out), expected), *changed]

    return tried(world, command(verb, run), draw, 8, wrong)


def tried(
    world: World,
    given: Command,
    draw: random.Random,
    operations: int,
    wrong: Callable[[], list[str]],
    between: Callable[[], list[str]] = list,
) -> Result:
    """Give a command without room and then with room; `wrong` and `between` tell what is not as it should be."""
    at = draw.randint(1, operations)
    limit = round(math.exp(draw.uniform(math.log(100), math.log(LARGEST))))
    ways: dict[str, tuple[str, Callable[[], None]]] = {
        "full": (f"no room from operation {at} on", FileOperations(world.place, partial(full, at)).install),
        "failing": (f"I/O error at operation {at}", FileOperations(world.place, partial(failing, at)).install),
        "limit": (f"no file above {limit:,} bytes", partial(forks.file_limit, limit)),
    }
    told, before = ways[draw.choice(list(ways))]
    ended = forks.run(*given, before=before)
    what = f"{told}: {ended.command}"
    if ended.code == 0:
        differing = wrong()
        seen = f"ended well, but different: {', '.join(differing)}\n{ended}"
        return Result(Verdict.SILENT, what, seen) if differing else Result(Verdict.SURVIVED, what)
    if not ended.is_refusal:
        return Result(Verdict.TRACEBACK, what, str(ended))
    if remains := between():
        return Result(Verdict.LOST, what, f"left behind: {', '.join(remains)}\n{ended}")
    again = forks.run(*given)
    if again.code != 0:
        return Result(Verdict.LOST, what, f"{ended}\nand then, with room again:\n{again}")
    if differing := wrong():
        return Result(Verdict.LOST, what, f"{ended}\nand then, with room again, different: {', '.join(differing)}")
    if ended.code != MACHINE:
        return Result(Verdict.TRACEBACK, what, f"not the exit status {MACHINE}\n{ended}")
    return Result(Verdict.REFUSED, what)


def full(at: int, count: int, name: str, path: Path) -> None:
    """From some operation on there is no room for anything new; removing things still works."""
    if count >= at and name in ("open", "os.mkdir", "os.rename", "os.link", "os.symlink"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def failing(at: int, count: int, name: str, path: Path) -> None:
    """One operation fails, whatever it is."""
    if count == at:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
