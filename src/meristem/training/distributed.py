"""One process or many: the few places where they have to agree."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meristem.training.devices import choose_device


@dataclass(frozen=True)
class Processes:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with gradients averaged over processes; itself if there is only one."""
        # Buffers are tables and schedules, the same everywhere.
        return model if self.world == 1 else DistributedDataParallel(model, broadcast_buffers=False)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The process group that torchrun asks for through the environment, or a single process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes(0, 1, choose_device(device))
        return
    local = choose_device(device)
    if local.type == "cuda":
        local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if local.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), world, local)
        dist.barrier()  # nobody leaves while others still need an answer
    finally:
        gc.collect()  # wrapped models must go before the group they speak through
        dist.destroy_process_group()
