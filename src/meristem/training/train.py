"""`train` and `resume`: what is checked, opened and made before the loop runs, and going back where it diverges."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from meristem.config import Config, check_resumable
from meristem.data import LabelledData, TokenData, open_data
from meristem.devices import compute_dtype, memory_of
from meristem.errors import InputError
from meristem.files import absolute, new_folder, write_atomically
from meristem.model.backends import choose_backends
from meristem.plan import Plan
from meristem.ranks import from_first_rank
from meristem.runs.best import best_of
from meristem.runs.checkpoint import Checkpoint, drop_old_checkpoints
from meristem.runs.divergence import Diverged
from meristem.runs.lock import run_lock
from meristem.runs.log import Log
from meristem.runs.origin import Origin
from meristem.runs.run_folder import RunFolder
from meristem.runs.start import write_start
from meristem.training.branching import Trunk, begin_anew
from meristem.training.distributed import Processes, processes
from meristem.training.going_on import check_bound, go_back, load_agreed, restore_logs
from meristem.training.growth_from_config import starting_plan
from meristem.training.length import as_found, updates_left, with_steps
from meristem.training.loop import Outcome, Trainer, evaluations_of, last_measured, micro_batch, task_of
from meristem.training.signals import StopSignals
from meristem.training.starting import Start
from meristem.training.tasks import initial_plan, make_task
from meristem.training.trackers import check_trackers

logger = logging.getLogger(__name__)

LIKE = ("static_loops", "block_loop")  # policies that may name another run


def train(config: Config, out: str | Path) -> Outcome:
    """Train a new model in the folder `out`.

    >>> config = load_config("tiny.toml", ["--data.path", "data", "--train.steps", "2"])
    >>> train(config, "runs/second").step
    heads 2x1 4x1
    ...
    2
    """
    if not isinstance(config, Config):
        raise InputError("config", config, "must be a Config, such as load_config reads from a file")
    with processes(config.train.device) as peers:
        config = _with_absolute_paths(config)
        _check_batch(config, peers)
        data = _opened(config, peers)
        trunk = Trunk.of(config)
        if trunk is not None:
            config = trunk.followed(config, data)
        plan = starting_plan(config, initial_plan(config, data))
        if config.train.flops is not None:
            config = with_steps(config, task_of(config, plan, data, peers).step_flops(plan).causal)
        if trunk is not None:
            trunk.check_plan(plan)
        _check(config, plan, data, peers)
        with _begun(Path(out), config, plan, data, peers, trunk) as folder:
            begun = trunk is not None or config.model.start_from is not None
            checkpoint = load_agreed(folder, peers, logger.warning) if begun else None
            return _trained(folder, config, data, checkpoint, peers)


def resume(out: str | Path, config: Config | None = None, *, from_start: bool = False) -> Outcome:
    """Go on with the run in `out` from its newest whole checkpoint, or from the start if it has none yet.

    `config` may differ from the run's own in what its result does not depend on; it is then stored in its place. Where
    checkpoints were written and none can be read nothing is touched and an error says why; `from_start` begins anew on
    purpose, and keeps logs and checkpoints aside.

    >>> resume("runs/first").step
    12
    """
    folder = RunFolder.open(Path(out))
    folder.check_trained()
    config = folder.config if config is None else _with_absolute_paths(config)
    if config.train.branch_from is not None and config.growth.steps is None:  # it was not given, but found out
        config = replace(config, growth=replace(config.growth, steps=folder.config.growth.steps))
    config = as_found(config, folder.config)
    check_resumable(folder.config, config)
    with processes(config.train.device) as peers, _held(folder, peers):
        say: Callable[[str], None] = logger.warning if peers.first else lambda text: None
        _check_batch(config, peers)
        data = _opened(config, peers)
        folder.check_data(data)
        check_memory(config, folder.plan, peers.device, peers.world)
        check_trackers(config.log.trackers)
        if from_start:
            begin_anew(folder, config, data, peers, say)
        peers.wait()
        checkpoint = load_agreed(folder, peers, say)
        check_bound(folder, config, checkpoint, say)
        evaluations = evaluations_of(folder, 0 if checkpoint is None else checkpoint.step)
        best = best_of(evaluations, config.eval.best_by)
        peers.wait()  # nothing is changed before all have read it
        full = checkpoint is not None and updates_left(checkpoint.state, checkpoint.step, config) == 0
        early = not full and best.exhausted(config.eval.patience)
        ended = full or early
        if peers.first:
            restore_logs(folder, checkpoint, say, early=early)
            if config != folder.config:
                write_atomically(folder.path / "config.toml", config.to_toml())
            if checkpoint is not None and ended and checkpoint.state.get("good"):  # killed before it had tidied up
                spared = best.step if config.checkpoint.keep_best else None
                drop_old_checkpoints(folder.checkpoints, checkpoint.step, config.checkpoint.keep, spared)
            if folder.origin is None:  # of an older version; from now on it is bound
                Origin.of(folder.path, config, folder.plan, data.index.digest).save(folder.path)
        peers.wait()
        if checkpoint is not None and ended:
            return Outcome(folder.path, checkpoint.step, last_measured(evaluations).get("held_out_loss"), None)
        return _trained(folder, config, data, checkpoint, peers)


def _trained(
    folder: RunFolder, config: Config, data: TokenData | LabelledData, checkpoint: Checkpoint | None, peers: Processes
) -> Outcome:
    """Train to the end, going back over updates that are not finite where the configuration says so."""
    with StopSignals() as stop:
        while True:
            try:
                return Trainer(folder, config, data, checkpoint, peers).run(stop)
            except Diverged as error:
                diverged = error.with_traceback(None)  # which would hold on to the model
            gc.collect()
            checkpoint = go_back(folder, config, diverged, peers)
            stop.say = logger.warning
            if number := from_first_rank(stop.number):  # asked while the streak was on
                step = 0 if checkpoint is None else checkpoint.step
                if peers.first:
                    Log(folder.events).append({"step": step, "event": "stopped", "signal": number})
                return Outcome(folder.path, step, None, number)


@contextmanager
def _begun(
    out: Path, config: Config, plan: Plan, data: TokenData | LabelledData, peers: Processes, trunk: Trunk | None
) -> Iterator[RunFolder]:
    """The folder of a new run, made and held by the process that writes."""

    def fill(folder: RunFolder) -> None:
        start = Start.of(config)
        if trunk is not None:
            trunk.fill(folder, config, trunk.load())
        elif start is not None:
            start.check_order(config, data)
            write_start(folder, config, plan, start.tensors(plan))

    if peers.first:
        with RunFolder.created(out, config, plan, data, fill) as folder:
            peers.wait()
            yield folder
    else:
        peers.wait()
        yield RunFolder.open(new_folder("out", out))


def _held(folder: RunFolder, peers: Processes) -> AbstractContextManager[None]:
    """The run locked against other commands, by the process that writes."""
    return run_lock(folder.path) if peers.first else nullcontext()


def _with_absolute_paths(config: Config) -> Config:
    """The configuration with paths that hold from any folder."""
    tables = {
        name: {**table, "like": str(absolute(f"growth.{name}.like", table["like"]))}
        if name in LIKE and table.get("like")
        else table
        for name, table in config.growth.tables.items()
    }
    data = replace(config.data, path=str(absolute("data.path", config.data.path)))
    train = config.train
    if train.branch_run is not None:
        trunk = absolute("train.branch_from", train.branch_run)
        train = replace(train, branch_from=f"{trunk}@{train.branch_step}")
    model = config.model
    if model.start_from is not None:
        model = replace(model, start_from=str(absolute("model.start_from", model.start_from)))
    return replace(config, model=model, data=data, train=train, growth=replace(config.growth, tables=tables))


def _check(config: Config, plan: Plan, data: TokenData | LabelledData, peers: Processes) -> None:
    """Refuse what cannot be trained before anything is written."""
    check_memory(config, plan, peers.device, peers.world)
    check_trackers(config.log.trackers)
    make_task(config, plan, data, fixed=False)
    wanted, masked = config.train.attention, plan.classes is not None
    choose_backends(plan.target or plan.layers, peers.device, compute_dtype(peers.device), wanted, masked=masked)


def _check_batch(config: Config, peers: Processes) -> None:
    size, micro = config.train.batch_size, micro_batch(config, peers.world)
    if size % peers.world or (size // peers.world) % micro:
        raise InputError(
            "train.batch_size",
            size,
            f"must be a multiple of {peers.world} processes times micro-batch {micro}",
        )


def check_memory(config: Config, plan: Plan, device: torch.device, world: int = 1, sharing: int = 1) -> None:
    """Refuse what cannot fit by the plan's own estimate, with the blocks that are still to come, before it is made.

    `sharing` is how many runs like this one share the device.
    """
    plan = replace(plan, layers=plan.target or plan.layers, target=())
    micro = micro_batch(config, world)
    try:
        plan.check_memory(
            micro * plan.context, config.train.batch_size, memory_of(device) // sharing,
            optimizer=config.optimizer.kind, parallel=config.train.parallel, world=world,
            average=config.train.average > 0, recompute=config.train.recompute,
        )  # fmt: skip
    except InputError as error:
        names = {"batch_size": "train.batch_size", "batch_tokens": "train.micro_batch", "parameters": "[model]"}
        value = micro if error.field == "batch_tokens" else error.value
        less = " or train.recompute" if error.field == "batch_tokens" and not config.train.recompute else ""
        raise InputError(names[error.field], value, f"{error.expected}; take a smaller model or batch{less}") from None


def _opened(config: Config, peers: Processes) -> TokenData | LabelledData:
    """The data, which the first process checks for all."""
    return peers.first_alone(lambda: open_data(config.data.path, logger.info, check=peers.first))
