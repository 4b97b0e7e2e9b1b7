"""A process from which others are forked, so that torch is imported once for all of them: `python processes.py`.

It reads jobs, a line of JSON each, does them one after the other, and answers each with a line: null, or what went
wrong. A job is `[folder, world, verb, ...]`: in the folder, so many processes work on `"train", CONFIG, RUN`, on
`"resume", RUN, "--section.key", VALUE, ...`, on `"check", NAME`, a function of `shard_checks.py`, or on
`"program", FILE, ARGUMENT, ...`; or one process on `"kill", CONFIG, RUN, KILLS, SEED`, which is `chaos/kill_loop.py`.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from multiprocessing import get_context
from pathlib import Path

import torch._dynamo  # the first use of an operator would import it, in every process
import torch.distributed.tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.kill_loop import kill_again_and_again
from meristem.config import load_config, override
from meristem.runs.run_folder import RunFolder
from meristem.training.distributed import processes
from meristem.training.train import resume, train
from training import shard_checks

PATIENCE = 600  # seconds after which a job counts as hanging


def work(rank: int, port: int, folder: str, world: int, verb: str, *arguments: str) -> None:
    os.dup2(2, 1)  # the output is for answers
    os.chdir(folder)
    torch.set_num_threads(1)
    if verb == "kill":
        kill(*arguments)
        return
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if verb == "check":
        with processes("cpu") as peers:
            getattr(shard_checks, arguments[0])(peers)
    elif verb == "program":
        sys.argv = [*arguments]
        runpy.run_path(arguments[0])
    elif verb == "train":
        train(load_config(Path(arguments[0])), arguments[1])
    else:
        resume(arguments[0], override(RunFolder.open(Path(arguments[0])).config, arguments[1:]))


def kill(config: str, run: str, kills: str, seed: str) -> None:
    """The newest checkpoint at each kill is written down beside the run."""
    reached = kill_again_and_again(Path(config), Path(run), int(kills), int(seed))
    Path(run).with_suffix(".json").write_text(json.dumps(reached), encoding="utf-8")


def run(folder: str, world: int, *arguments: str) -> str | None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    started = [context.Process(target=work, args=(rank, port, folder, world, *arguments)) for rank in range(world)]
    for process in started:
        process.start()
    for process in started:
        process.join(PATIENCE)
        process.kill()  # if it hangs
        process.join()
    codes = [process.exitcode for process in started]
    return f"{arguments} ended with {codes}" if any(codes) else None


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), flush=True)
