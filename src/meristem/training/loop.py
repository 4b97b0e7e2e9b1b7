"""The training loop."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from meristem import __version__
from meristem.data import LabelledData, TokenData, open_data
from meristem.errors import InputError, RunError
from meristem.model.backends import choose_backends
from meristem.plan import Plan
from meristem.ranks import mean_over_ranks
from meristem.training.checkpoint import (
    Checkpoint,
    checkpoint_name,
    load_newest,
    restore_optimizer,
    restore_rng,
    save_checkpoint,
    write_atomically,
)
from meristem.training.config import Config, check_resumable
from meristem.training.devices import autocast, compute_dtype, describe_device
from meristem.training.display import make_display
from meristem.training.distributed import Processes, processes
from meristem.training.gradients import Gradients
from meristem.training.growing import make_grower, starting_plan
from meristem.training.lock import run_lock
from meristem.training.meter import Clock, Reading, Readings
from meristem.training.optimizer import guarded_update, learning_rate, make_optimizer
from meristem.training.recorder import Progress, Recorder, due
from meristem.training.run import RunFolder
from meristem.training.signals import StopSignals
from meristem.training.tasks import initial_plan, make_task
from meristem.training.trackers import check_trackers


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` or `resume` ended; `signal` is set when it was asked to stop early."""

    folder: Path
    step: int
    held_out: float | None
    signal: int | None


def train(config: Config, out: str | Path) -> Outcome:
    """Train a new model in the folder `out`."""
    with processes(config.train.device) as peers:
        config = _at_home(config)
        data = open_data(config.data.path)
        plan = starting_plan(config, initial_plan(config, data))
        _check(config, plan, data, peers)
        if peers.first:
            RunFolder.create(Path(out), config, plan, data)
        peers.wait()
        folder = RunFolder.open(Path(out))
        with _held(folder, peers):
            return Trainer(folder, config, plan, data, None, peers).run()


def resume(out: str | Path, config: Config | None = None) -> Outcome:
    """Go on with the run in `out` from its newest whole checkpoint, or from the start if it has none yet.

    `config` may differ from the run's own in what its result does not depend on; it is then stored in its place.
    """
    folder = RunFolder.open(Path(out))
    config = folder.config if config is None else _at_home(config)
    check_resumable(folder.config, config)
    with processes(config.train.device) as peers, _held(folder, peers):
        data = open_data(config.data.path)
        folder.check_data(data)
        _check_batch(config, peers)
        check_trackers(config.log.trackers)
        checkpoint = load_newest(folder.checkpoints, print if peers.first else lambda text: None)
        if peers.first:
            folder.rewind(0 if checkpoint is None else checkpoint.step)
            write_atomically(folder.path / "config.toml", config.to_toml())
        peers.wait()
        if checkpoint is not None and checkpoint.step >= config.train.steps:
            return Outcome(folder.path, checkpoint.step, _last_measured(folder).get("held_out_loss"), None)
        plan = folder.plan if checkpoint is None else Plan.from_dict(checkpoint.state["plan"])
        return Trainer(folder, config, plan, data, checkpoint, peers).run()


class Trainer:
    """A run in progress: everything it needs, built from a plan and, if there is one, a checkpoint."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        plan: Plan,
        data: TokenData | LabelledData,
        checkpoint: Checkpoint | None,
        peers: Processes,
    ) -> None:
        torch.manual_seed(config.train.seed)
        device = peers.device
        self.folder, self.config, self.peers = folder, config, peers
        self.compiled = device.type == "cuda" if config.train.compile is None else config.train.compile
        self.task = make_task(config, plan, data, fixed=self.compiled)
        self.model = self.task.model(plan).to(device)
        self.kernels = self.model.use_attention(device, compute_dtype(device), config.train.attention)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.grower = make_grower(config, self.model, self.optimizer, folder.plan)
        self.progress = Progress()
        self.begins = checkpoint is None
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint.model)
            restore_optimizer(self.model, self.optimizer, checkpoint.optimizer)
            restore_rng(checkpoint.rng)
            skipped, in_a_row = checkpoint.state["skipped"], checkpoint.state["skipped_in_a_row"]
            flops = checkpoint.state.get("flops", checkpoint.step * self.task.step_flops(plan).causal)
            self.progress = Progress(checkpoint.step, skipped, in_a_row, _last_measured(folder), flops)
            if self.grower is not None:
                self.grower.load_state_dict(checkpoint.state["growth"], checkpoint.growth)
        self.gradients = Gradients(peers.wrap(self.model), compile=self.compiled, device=device)
        self.readings, self.clock = Readings(), Clock()

    @property
    def plan(self) -> Plan:
        """The present structure."""
        return self.model.plan

    def run(self) -> Outcome:
        """Train to the end of the run, or to the first request to stop."""
        steps, progress = self.config.train.steps, self.progress
        with (
            make_display(self.plan, steps, speaks=self.peers.first) as display,
            StopSignals() as stop,
            Recorder(self.folder, self.config, self.task, self.plan, self.peers, display, progress) as record,
        ):
            record.event(
                "start" if self.begins else "resume", progress.step,
                device=describe_device(self.peers.device), processes=self.peers.world, attention=self.kernels,
                compile=self.compiled, torch=torch.__version__, meristem=__version__, plan=self.plan.digest,
            )  # fmt: skip
            kinds = " and ".join(dict.fromkeys(self.kernels))
            compiled = ", compiled" if self.compiled else ""
            display.note(f"{describe_device(self.peers.device)}; {kinds} attention{compiled}")
            if self.task.unmeasured is not None:
                display.note(self.task.unmeasured)
            if unused := self.config.incrt.unused(self.config.growth.policy):
                display.note(unused)
            stopping = False
            while progress.step < steps and not stopping:
                reading = self.update(stop.asked)
                stopping = self.settle(reading, record)
                stopping = self.grow(record) or stopping
                stopping = self.pause(stopping, record)
            if not stopping or progress.step == steps:
                record.event("finished", progress.step)
                return Outcome(self.folder.path, progress.step, progress.held_out, None)
            number = stop.number or int(signal.SIGTERM)  # none here if only another process was asked to stop
            record.event("stopped", progress.step, signal=number)
            display.note(f"stopped at step {progress.step}; go on with: meristem resume {self.folder.path}")
            return Outcome(self.folder.path, progress.step, progress.held_out, number)

    def update(self, asked_to_stop: bool) -> Reading | None:
        """One step. Its numbers are still on their way; what comes back are those of the step before."""
        step = self.progress.step
        self.tokens, self.labels = self.batch(step)
        loss = self.gradients(self.tokens, self.labels)
        shared = torch.stack((loss, torch.full_like(loss, float(asked_to_stop))))
        loss, asked = mean_over_ranks(shared).unbind()  # all processes decide from the same numbers
        lr = learning_rate(step, self.config.train.steps, self.config.optimizer)
        norm, skipped = guarded_update(self.optimizer, lr, loss, self.config.optimizer.clip)
        self.progress.step = step + 1
        reading = self.readings.push(step + 1, torch.stack((loss, norm, skipped, asked)))
        if reading is not None:  # not when readings are flushed: on a CPU no time passes between the last two
            self.clock.tick()
        return reading

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of a step, this process's share of them, (micro-batches, b, ...), on their way to it."""
        peers, micro = self.peers, _micro_batch(self.config, self.peers)
        arrays = self.task.batch(step, peers.rank, peers.world)
        tokens, labels = (torch.from_numpy(array).unflatten(0, (-1, micro)) for array in arrays)
        if peers.device.type == "cuda":
            tokens, labels = tokens.pin_memory(), labels.pin_memory()
        return tokens.to(peers.device, non_blocking=True), labels.to(peers.device, non_blocking=True)

    def fresh(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What will be trained on next, sequence by sequence of micro-batches."""
        for step in itertools.count(self.progress.step):
            yield from zip(*self.batch(step), strict=True)

    def settle(self, reading: Reading | None, record: Recorder) -> bool:
        """Record a finished step; whether a stop was asked for by then."""
        if reading is None:
            return False
        self.progress.count(reading)
        record.step(reading, self.progress, self.clock)
        if self.progress.skipped_in_a_row >= self.config.train.max_skipped:
            raise RunError(_too_many_skipped(self.progress, self.folder))
        return reading.stop

    def grow(self, record: Recorder) -> bool:
        """Let the model grow if it is time; whether a stop was asked for by then."""
        if self.grower is None:
            return False
        step = self.progress.step
        with autocast(self.peers.device):
            growth = self.grower.step(self.tokens.flatten(0, 1), self.labels.flatten(0, 1), self.fresh)
        stopping = False
        if growth.changed or growth.events:
            stopping = self.settle(self.readings.flush(), record)
            self.clock.pause()
        if growth.changed:
            self.gradients.restructured(self.peers.wrap(self.model) if growth.exchanged else None)
            record.restructured(step, self.plan)
        for event in growth.events:
            record.growth(step, event)
        if growth.observation is not None:
            record.observation(step, growth.observation)
        return stopping

    def pause(self, stopping: bool, record: Recorder) -> bool:
        """Evaluate and save, each when it is due, or save to stop; whether to stop."""
        step, steps, config = self.progress.step, self.config.train.steps, self.config
        evaluates, saves = due(step, steps, config.eval.every), due(step, steps, config.checkpoint.every)
        if not (evaluates or saves or stopping):
            return False
        stopping = self.settle(self.readings.flush(), record) or stopping
        if evaluates and self.task.unmeasured is None and self.peers.first:
            self.progress.measured = self.task.measure(self.model, self.peers.device)
            record.measured(step, self.progress.measured)
        if saves or stopping:
            self.save(record)
        self.clock.pause()
        return stopping

    def save(self, record: Recorder) -> None:
        """Write a checkpoint; the other processes wait until it is whole."""
        config, progress = self.config, self.progress
        if self.peers.first:
            path = save_checkpoint(
                self.folder.checkpoints, progress.step, model=self.model, optimizer=self.optimizer,
                keep=config.checkpoint.keep, growth=None if self.grower is None else self.grower.tensors(),
                state={
                    "plan": self.plan.to_dict(), "skipped": progress.skipped, "flops": record.flops(progress.step),
                    "growth": None if self.grower is None else self.grower.state_dict(),
                    "skipped_in_a_row": progress.skipped_in_a_row, "processes": self.peers.world,
                    "seeds": {"weights": config.train.seed, "data": config.data.seed},
                    "meristem": __version__, "torch": torch.__version__,
                },
            )  # fmt: skip
            record.event("checkpoint", progress.step, path=path.name)
        self.peers.wait()


def _held(folder: RunFolder, peers: Processes) -> AbstractContextManager[None]:
    """The run locked against other commands, by the process that writes."""
    return run_lock(folder.path) if peers.first else nullcontext()


def _at_home(config: Config) -> Config:
    """The configuration with paths that hold from any folder."""
    growth = config.growth
    if growth.like is not None:
        growth = replace(growth, like=str(Path(growth.like).resolve()))
    return replace(config, data=replace(config.data, path=str(Path(config.data.path).resolve())), growth=growth)


def _micro_batch(config: Config, peers: Processes) -> int:
    share = config.train.batch_size // peers.world
    return min(config.train.micro_batch or share, share)


def _check(config: Config, plan: Plan, data: TokenData | LabelledData, peers: Processes) -> None:
    """Refuse what cannot be trained before anything is written."""
    _check_batch(config, peers)
    check_trackers(config.log.trackers)
    make_task(config, plan, data, fixed=False)
    wanted, masked = config.train.attention, plan.classes is not None
    choose_backends(plan.layers, peers.device, compute_dtype(peers.device), wanted, masked=masked)


def _check_batch(config: Config, peers: Processes) -> None:
    size, micro = config.train.batch_size, _micro_batch(config, peers)
    if size % peers.world or (size // peers.world) % micro:
        raise InputError(
            "train.batch_size",
            size,
            f"must be a multiple of {peers.world} processes times micro-batch {micro}",
        )


def _last_measured(folder: RunFolder) -> dict[str, float | None]:
    """The last line of metrics that is about held-out data, without its step; empty if there is none."""
    found = [entry for entry in folder.read(folder.metrics) if "held_out_loss" in entry]
    return {name: value for name, value in found[-1].items() if name != "step"} if found else {}


def _too_many_skipped(progress: Progress, folder: RunFolder) -> str:
    newest = load_newest(folder.checkpoints, lambda text: None)
    last = "no checkpoint had been written yet"
    if newest is not None:
        last = f"the last good checkpoint is {folder.checkpoints / checkpoint_name(newest.step)}"
    return (
        f"stopped at step {progress.step}: loss or gradient were not finite in {progress.skipped_in_a_row} updates "
        f"in a row (all skipped, weights unchanged); {last}"
    )
