"""What each of two processes finds, printed as JSON: `python pair.py STORE`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # the first use of an operator would import it, in both processes
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from growth.helpers import FOUR, spread, tiny_plan, tokens_of
from meristem import ranks
from meristem.errors import RunError
from meristem.gauges import entropy as entropy_module
from meristem.gauges.entropy import EntropyGauge, HeadReadings
from meristem.gauges.gauge import Gauge
from meristem.growth import Grower, LoopHeads, Observe, Sgt
from meristem.growth.policy import Change, Decision, Policy, Readings
from meristem.model import Decoder
from meristem.plan import Plan
from meristem.runs.own_loop import restore, save

BATCH = 16


def agreements(rank: int) -> dict[str, Any]:
    """The functions of meristem.ranks, called with something else in each process."""
    found: dict[str, Any] = {
        "rank": ranks.rank(),
        "world": ranks.world(),
        "sum": ranks.sum_over_ranks(torch.tensor([1.0, 10.0]) * (rank + 1)).tolist(),
        "mean": ranks.mean_over_ranks(torch.tensor([1.0, 10.0]) * (rank + 1)).tolist(),
        "first": ranks.from_first_rank({"from": rank}),
    }
    ranks.require_equal("same", "plan")
    return found | {"disagreement": error_of(lambda: ranks.require_equal(f"plan of {rank}", "plan"))}


def error_of(call: Any) -> str | None:
    try:
        call()
    except (RunError, OSError) as error:
        return str(error)
    return None


def looped_model() -> Decoder:
    return Decoder(LoopHeads(2, (0, 3), 2).apply(tiny_plan(FOUR)))


def observed(rank: int, sequences: int = 8) -> dict[str, Any]:
    """Entropies and updates of a batch of which each process has a half."""
    model = looped_model()
    half = tokens_of(model.plan, 0, BATCH).chunk(2)[rank]
    observation = Grower(model, None, [Observe(1, sequences=sequences)]).step(half).observation
    assert observation is not None
    return dict(observation)


def grown(rank: int) -> dict[str, Any]:
    """A decision where each process alone would take another one."""
    policy = Sgt(total_steps=10, start=1, window=5, shortlist=1)
    model = Decoder(policy.prepare(tiny_plan(FOUR)))

    def read(model: Decoder, tokens: Tensor, gauge: EntropyGauge) -> HeadReadings:
        entropy = torch.tensor(spread({3: 0.9} if rank == 0 else {1: 0.8}, FOUR)).flatten()
        return HeadReadings(entropy * len(tokens), {})

    with patch.object(entropy_module, "read_heads", read):
        (event,) = Grower(model, None, [policy]).step(tokens_of(model.plan, 0)).events
    facts = event.to_dict()
    return {"layer": facts["layer"], "layer_entropy": facts["layer_entropy"], "plan": model.plan.digest}


def disagreeing(rank: int) -> str | None:
    """The same without averages and without the first process's word."""
    with patch.multiple(entropy_module, sum_over_ranks=lambda values: values, from_first_rank=lambda value: value):
        return error_of(lambda: grown(rank))


@dataclass(frozen=True)
class FirstGrows(Policy):
    """Heads of a layer are looped in the first process alone."""

    rank: int = 0

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...]:
        return ()

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        edits = (LoopHeads(2, (0, 3), 2),)
        return Decision(state, (Change("add", "it is first", edits, layer=2),) if self.rank == 0 else ())


def one_grows(rank: int) -> str | None:
    """What both are told where one process changes its structure, and the other does not."""
    model = Decoder(tiny_plan(FOUR))
    return error_of(lambda: Grower(model, None, [FirstGrows(rank)]).step(tokens_of(model.plan, 0)))


def saved(rank: int, folder: Path) -> dict[str, Any]:
    """Three saves in a row by both processes, what lies in the folder after each, and one that cannot be written."""
    model = looped_model()
    with torch.no_grad():
        model.embedding.weight.fill_(rank)  # so that it is seen whose weights were written
    optimizer = torch.optim.AdamW(model.parameters())
    paths, lies = [], []
    for step in (1, 2, 3):
        paths.append(save(folder, model, optimizer, step=step).name)
        lies.append(sorted(path.name for path in folder.iterdir()))
        dist.barrier()  # the first process must not go on while the other one looks
    done = restore(folder, model, optimizer)
    (folder / "file").touch()
    refused = error_of(lambda: save(folder / "file", model, optimizer, step=4))
    return {
        "paths": paths, "lies": lies, "done": done, "weight": float(model.embedding.weight.mean()), "refused": refused,
    }  # fmt: skip


def findings(store: str, rank: int) -> dict[str, Any]:
    patience = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=patience)
    found: dict[str, Any] = {"agreements": agreements(rank), "observed": observed(rank), "grown": grown(rank)}
    found |= {"first sequence": observed(rank, sequences=1), "disagreement": disagreeing(rank)}
    found["one grows"] = one_grows(rank)
    found["saved"] = saved(rank, Path(store).parent / "saves")
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    with get_context("fork").Pool(2) as pool:  # forked, so that torch is imported once
        print(json.dumps(pool.starmap(findings, [(sys.argv[1], 0), (sys.argv[1], 1)], chunksize=1)))
