"""Several processes at the same place at the same moment: one wins, the others say who or where, and all is whole."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import forks
from .kills import Command
from .runs import ON_ROWS, ON_TEXTS, Kind, contents, differences, names, outcome
from .verdicts import Result, Verdict
from .world import World

KEEPS_ONE = Kind("keeps-one", settings={"checkpoint__keep": 1})
LATE = 0.05  # seconds that a command may start after the first


def race(world: World, number: int, draw: random.Random) -> Result:
    """One of the races, in turn."""
    return RACES[number % len(RACES)](world, number // len(RACES), draw)


def begin_together(processes: int, world: World, number: int, draw: random.Random) -> Result:
    """Several `train` into one new folder."""
    kind = (ON_TEXTS, ON_ROWS)[number % 2]
    expected, run = world.reference(kind), world.cleared() / "run"
    ended = together([["train", world.config(kind), "--out", run]] * processes, draw)

    def wrong() -> list[str]:
        return [*differences(outcome(run), expected.outcome), *sorted(names(run) ^ names(expected.folder))]

    return one_wins(f"{processes} times train, {kind.name}", ended, run, wrong, winners=1)


def go_on_together(world: World, number: int, draw: random.Random) -> Result:
    """`resume` and `train --continue` on one run; who comes when it is finished has nothing to do, which is fine."""
    kind = (ON_TEXTS, ON_ROWS)[number % 2]
    expected, run = world.reference(kind), world.placed(world.halfway(kind, True))
    ended = together([["resume", run], ["resume", run], world.train(kind, run)], draw)
    return one_wins(f"resume and train, {kind.name}", ended, run, lambda: differences(outcome(run), expected.outcome))


def prepare_together(processes: int, world: World, number: int, draw: random.Random) -> Result:
    """Several preparations of the same data into one folder; who comes when it is there has nothing to do."""
    labelled = bool(number % 2)
    given, _, expected = world.preparation(labelled)
    data = world.cleared() / "data"
    ended = together([given] * processes, draw)
    what = f"{processes} times prepare{'-labelled' * labelled}"
    return one_wins(what, ended, data, lambda: differences(contents(data), expected))


def read_while_training(world: World, number: int, draw: random.Random) -> Result:
    """`eval`, `report` and `generate` while a run saves and deletes checkpoints under them."""
    what = "reading while training with keep = 1"
    expected, run = world.reference(KEEPS_ONE), world.cleared() / "run"
    training = forks.start(*world.train(KEEPS_ONE, run))
    while training.runs and not any((run / "checkpoints").glob("step-*/manifest.json")):
        time.sleep(0.001)
    ways: list[Command] = [["eval", run], ["report", run], ["generate", run, "--prompt", "a", "--tokens", "2"]]
    ended = [forks.run(*draw.choice(ways)) for _ in range(3)]
    for one in (training.wait(), *ended):
        if one.code != 0:
            return Result(Verdict.LOST if one.is_refusal else Verdict.TRACEBACK, what, str(one))
    differing = differences(outcome(run), expected.outcome)
    if differing:
        return Result(Verdict.LOST, what, f"the run is different: {', '.join(differing)}")
    return Result(Verdict.SURVIVED, what)


RACES: tuple[Callable[[World, int, random.Random], Result], ...] = (
    partial(begin_together, 2),
    partial(begin_together, 4),
    go_on_together,
    read_while_training,
    partial(prepare_together, 2),
    partial(prepare_together, 4),
)


def together(commands: list[Command], draw: random.Random) -> list[forks.Ended]:
    """Start commands, let them go at the same moment or a little later, and wait for all."""
    gate, opened = os.pipe()

    def before(late: float) -> None:
        os.close(opened)
        os.read(gate, 1)  # until all others have closed the other end, the forking process last
        time.sleep(late)

    delays = [0.0, *(draw.choice([0.0, draw.uniform(0, LATE)]) for _ in commands[1:])]
    children = [forks.start(*given, before=partial(before, late)) for given, late in zip(commands, delays, strict=True)]
    os.close(opened)
    ended = [child.wait() for child in children]
    os.close(gate)
    return ended


def one_wins(
    what: str, ended: list[forks.Ended], folder: Path, wrong: Callable[[], list[str]], winners: int | None = None
) -> Result:
    """The verdict on commands that wanted the same folder: at least one has won, or as many as given."""
    seen = "\n".join(map(str, ended))
    losers = [one for one in ended if one.code != 0]
    clear = [one.is_refusal and one.code == 2 and (str(folder) in one.err or "process" in one.err) for one in losers]
    if not all(clear):
        return Result(Verdict.TRACEBACK, what, f"not one line that names a process or the folder\n{seen}")
    won = len(ended) - len(losers)
    if not won or won != (winners or won):
        return Result(Verdict.LOST, what, f"{won} have won\n{seen}")
    remains = {path.name for path in folder.parent.iterdir()} - {folder.name}
    if differing := [*wrong(), *sorted(remains)]:
        return Result(Verdict.LOST, what, f"the folder is not whole: {', '.join(differing)}\n{seen}")
    return Result(Verdict.REFUSED if losers else Verdict.SURVIVED, what)
