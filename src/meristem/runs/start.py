"""A run that begins with weights it is given, instead of those that are drawn: its checkpoint of step 0."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meristem.config import Config
from meristem.plan import Plan
from meristem.runs.checkpoint import MODEL, OPTIMIZER, RNG, Snapshot, checkpoint_name, write_checkpoint
from meristem.runs.log import Log
from meristem.runs.run_folder import RunFolder, binding


def write_start(run: RunFolder, config: Config, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Give a run that has an origin, and nothing more, the weights that it goes on from.

    The checkpoint knows nothing of growth: its policies begin as in any new run.
    """
    random = {"cpu": torch.Generator().manual_seed(config.train.seed).get_state()}
    logs = {log.name: Log(log).position.to_dict() for log in run.logs}
    state = {
        "step": 0, "plan": plan.to_dict(), "skipped": 0, "skipped_in_a_row": 0, **binding(run, config), "logs": logs,
        "rewinds": 0, "good": True,  # there is nothing before it to go back to
    }  # fmt: skip
    write_checkpoint(run.checkpoints, Snapshot(0, {MODEL: tensors, OPTIMIZER: {}, RNG: random}, state, run.logs))
    Log(run.events).append({"step": 0, "event": "checkpoint", "path": checkpoint_name(0)})
