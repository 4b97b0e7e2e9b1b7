"""Runs made by several processes each, one after the other: `python processes.py JOBS`, a JSON list of jobs.

A job is `[world, "train", CONFIG, RUN]` or `[world, "resume", RUN, "--section.key", VALUE, ...]`; or `[world, "check",
NAME]`, for a function of `shard_checks.py`. The processes are forked, so that torch is imported once for all of them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from multiprocessing import get_context
from pathlib import Path

import torch._dynamo  # the first use of an operator would import it, in every process
import torch.distributed.tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from meristem.config import load_config, override
from meristem.runs.run_folder import RunFolder
from meristem.training.distributed import processes
from meristem.training.loop import resume, train
from training import shard_checks


def work(rank: int, port: int, world: int, verb: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if verb == "check":
        with processes("cpu") as peers:
            getattr(shard_checks, arguments[0])(peers)
    elif verb == "train":
        train(load_config(Path(arguments[0])), arguments[1])
    else:
        resume(arguments[0], override(RunFolder.open(Path(arguments[0])).config, arguments[1:]))


def run(world: int, *arguments: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    started = [context.Process(target=work, args=(rank, port, world, *arguments)) for rank in range(world)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        sys.exit(f"{arguments} ended with {[process.exitcode for process in started]}")


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        run(*job)
