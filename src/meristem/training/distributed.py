"""One process or many: the few places where they have to agree."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from meristem.choices import Parallel
from meristem.devices import choose_device
from meristem.errors import InputError
from meristem.model import Transformer
from meristem.training.sharding import Sharded

T = TypeVar("T")
USUAL, TO_CONNECT, ATTEMPTS = timedelta(minutes=30), timedelta(seconds=20), 2


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

    def wrap(self, model: Transformer, optimizer: torch.optim.Optimizer, parallel: Parallel = "ddp") -> nn.Module:
        """The model with gradients averaged over processes, and shared out with its optimizer's moments if "fsdp".

        In a single process the model itself.
        """
        if self.world == 1:
            return model
        if parallel == "fsdp":
            return Sharded(model, optimizer, init_device_mesh(self.device.type, (self.world,)))
        # Buffers are tables and schedules, the same everywhere.
        return DistributedDataParallel(model, broadcast_buffers=False)

    def first_alone(self, work: Callable[[], T]) -> T:
        """What `work` gives, done by the first process before the others, which may find what it has left."""
        if not self.first:
            self.wait()
        result = work()
        if self.first:
            self.wait()
        return result

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The process group that torchrun asks for through the environment, or a single process."""
    world = _number("WORLD_SIZE", 1)
    if world == 1:
        yield Processes(0, 1, choose_device(device))
        return
    local = choose_device(device)
    if local.type == "cuda":
        local = torch.device("cuda", _number("LOCAL_RANK", 0))
        torch.cuda.set_device(local)
    _join("nccl" if local.type == "cuda" else "gloo", own_rank(), world)
    try:
        yield Processes(dist.get_rank(), world, local)
        dist.barrier()  # nobody leaves while others still need an answer
    finally:
        gc.collect()  # wrapped models must go before the group they speak through
        dist.destroy_process_group()


def _join(backend: str, rank: int, world: int) -> None:
    """Make the process group. All processes are waited for as long as usual; connecting them then takes no time.

    When torchrun starts processes again, gloo may find the addresses of those that have died, and wait for them for
    half an hour; so every start has names of its own. Where connecting fails all the same, it is tried once more.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, _, _ = next(rendezvous("env://", rank, world))
    except ValueError as error:
        expected = f"is set, but not all that belongs to it ({error}); start several processes with torchrun"
        raise InputError("WORLD_SIZE", world, expected) from error
    for attempt in range(ATTEMPTS):
        own = PrefixStore(f"restart {restarts}, attempt {attempt}", store)
        own.set(f"here {rank}", "")
        own.wait([f"here {other}" for other in range(world)], USUAL)
        try:
            dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=TO_CONNECT)
        except RuntimeError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            _set_pg_timeout(USUAL)  # others may have to wait for one that evaluates
            return


def own_rank() -> int:
    """The number of this process among those that torchrun has started; 0 if it is alone."""
    return _number("RANK", 0) if _number("WORLD_SIZE", 1) > 1 else 0


def _number(name: str, default: int) -> int:
    """A number that torchrun sets in the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or len(text) > 9 or (name == "WORLD_SIZE" and int(text) < 1):
        raise InputError(name, text, "must be a whole number, as torchrun sets it, or not be in the environment")
    return int(text)
