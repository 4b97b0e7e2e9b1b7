"""A pruned model as a run: a branch of its source that begins with fewer heads, and is perhaps repaired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meristem.config import Config, GrowthConfig
from meristem.growth.apply import apply_edit
from meristem.model import build_model
from meristem.pruning.search import Change
from meristem.pruning.settings import PruneSettings
from meristem.pruning.source import Source
from meristem.runs.checkpoint import Checkpoint, optimizer_tensors, restore_model
from meristem.runs.log import Log
from meristem.runs.run_folder import RunFolder, settle
from meristem.training.branching import Trunk
from meristem.training.length import updates_left
from meristem.training.optimizer import make_optimizer


def pruned_checkpoint(source: Source, changes: Sequence[Change]) -> Checkpoint:
    """The checkpoint of a run without some heads: weights and moments are those of the others."""
    checkpoint = source.checkpoint
    model = build_model(checkpoint.plan)
    optimizer = make_optimizer(model, source.config.optimizer)
    restore_model(checkpoint, model, optimizer)
    settle(model)
    for change in changes:
        apply_edit(model, optimizer, change.edit)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    state = {**checkpoint.state, "plan": model.plan.to_dict(), "growth": None}
    moments = optimizer_tensors(model, optimizer)
    return replace(checkpoint, model=weights, optimizer=moments, state=state, growth={})


def pruned_config(source: Source, settings: PruneSettings) -> Config:
    """The configuration of a pruned run: that of its source, without growth; a repair is a branch whose rate falls."""
    config, step = source.config, source.step
    config = replace(
        config, growth=GrowthConfig(), eval=replace(config.eval, patience=0), log=replace(config.log, trackers=())
    )
    if not settings.repair:
        return config
    rate = settings.repair_rate * config.optimizer.rate
    optimizer = replace(config.optimizer, curve="wsd", lr=rate, final=0.0)
    branch = f"{source.folder.path.resolve()}@{step}"
    train = replace(config.train, steps=step + settings.repair, flops=None, branch_from=branch)
    return replace(config, optimizer=optimizer, train=train)


def write_run(
    out: Path, source: Source, settings: PruneSettings, checkpoint: Checkpoint, changes: Sequence[Change],
    measured: Mapping[str, float],
) -> RunFolder:  # fmt: skip
    """Begin a run with a pruned model; `measured` is what its held-out data say of it, by names of metrics.jsonl."""
    config = pruned_config(source, settings)
    trunk = Trunk(source.folder, source.step)

    def add(run: RunFolder) -> None:
        events = Log(run.events)
        for change in changes:
            events.append(change.event.to_dict())
        if measured:
            Log(run.metrics).append({"step": source.step, **measured})
        if not settings.repair and updates_left(checkpoint.state, source.step, config) == 0:
            events.append({"step": source.step, "event": "finished"})

    data = source.data if settings.repair else source.kept
    with RunFolder.created(
        out, config, source.folder.plan, data, lambda run: trunk.fill(run, config, checkpoint, add)
    ) as run:
        return run
