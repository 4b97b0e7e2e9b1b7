"""Run `meristem train CONFIG --out RUN --continue` again and again, killing it, then let it finish.

    python kill_loop.py CONFIG RUN KILLS SEED

Every attempt is a fork of this process, which has imported torch but not used it: one slow start for many kills.
The kill (SIGKILL) falls at a random moment, after at least one more checkpoint in all but the first two attempts, so
that the run moves on. Prints, as JSON, the newest checkpoint at each kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import meristem.training.loop  # noqa: F401  (imported once for all attempts)
from meristem.cli import main
from meristem.training.checkpoint import list_checkpoints


def attempt(config: str, run: str) -> int:
    """Start the command in a child process and return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        sys.argv = ["meristem", "train", config, "--out", run, "--continue"]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def newest(run: str) -> int:
    found = list_checkpoints(Path(run) / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0


def kill_again_and_again(config: str, run: str, kills: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    reached: list[int] = []
    for number in range(kills):
        before, pid = newest(run), attempt(config, run)
        ended = 0
        if number < 2:
            time.sleep(draw.uniform(0, 0.2))
        else:
            while newest(run) <= before and not ended:
                ended, _ = os.waitpid(pid, os.WNOHANG)
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.04))
        if ended:
            break
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):  # it had finished just before
            break
        reached.append(newest(run))
    _, status = os.waitpid(attempt(config, run), 0)
    if status:
        sys.exit(f"the last attempt failed with status {status}")
    return reached


if __name__ == "__main__":
    print(json.dumps(kill_again_and_again(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
