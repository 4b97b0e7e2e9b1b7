"""Runs made by several processes each, one after the other: `python processes.py JOBS`, a JSON list of jobs.

A job is `[world, "train", CONFIG.toml, RUN]` or `[world, "resume", RUN, "--section.key", VALUE, ...]`. The processes are
forked, so that torch is imported once for all of them.
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

from meristem.config import load_config, override
from meristem.runs.run_folder import RunFolder
from meristem.training.loop import resume, train


def work(rank: int, port: int, world: int, verb: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if verb == "train":
        train(load_config(Path(arguments[0])), arguments[1])
    else:
        resume(arguments[0], override(RunFolder.open(Path(arguments[0])).config, arguments[1:]))


def run(world: int, *arguments: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    processes = [context.Process(target=work, args=(rank, port, world, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"{arguments} ended with {[process.exitcode for process in processes]}")


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        run(*job)
