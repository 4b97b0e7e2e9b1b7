"""Run `meristem train CONFIG --out RUN --continue` again and again, killing it, then let it finish.

The kill (SIGKILL) falls at a random moment, after at least one more checkpoint in all but the first two attempts, so
that the run moves on. (The attack `kills` compares all that a run leaves behind, and kills at file operations too; this
one is for tests that look at one run closely.)
"""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

from meristem.runs.checkpoint import list_checkpoints

from . import forks


def newest(run: Path) -> int:
    found = list_checkpoints(run / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0


def kill_again_and_again(config: Path, run: Path, kills: int, seed: int) -> list[int]:
    """The newest checkpoint at each kill."""
    draw = random.Random(seed)
    command = ("train", config, "--out", run, "--continue")
    reached: list[int] = []
    for number in range(kills):
        before, child = newest(run), forks.start(*command)
        if number < 2:
            time.sleep(draw.uniform(0, 0.2))
        else:
            while newest(run) <= before and child.runs:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.04))
        child.send(signal.SIGKILL)
        if child.wait().code != -signal.SIGKILL:  # it had finished just before
            break
        reached.append(newest(run))
    ended = forks.run(*command, patience=300)
    if ended.code != 0:
        sys.exit(f"the last attempt failed\n{ended}")
    return reached
