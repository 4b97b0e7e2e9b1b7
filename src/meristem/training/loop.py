"""The training loop."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meristem import __version__
from meristem.config import Config, idle_settings
from meristem.data import LabelledData, TokenData
from meristem.devices import autocast, compute_dtype, describe_device, keep_freed_memory
from meristem.errors import RunError, shortened
from meristem.gauges.probe import HeldBack
from meristem.growth import Grower
from meristem.growth.policies import POLICIES
from meristem.limits import check_integer
from meristem.plan import Plan
from meristem.ranks import from_first_rank, mean_over_ranks
from meristem.runs.best import Best, best_of
from meristem.runs.checkpoint import Checkpoint, checkpoint_name, restore_model, restore_rng, snapshot
from meristem.runs.divergence import Diverged, batch_number
from meristem.runs.entries import check_alike, sound_metrics
from meristem.runs.first_depth import describe_first_depth
from meristem.runs.former_state import state_of_today
from meristem.runs.run_folder import RunFolder, binding
from meristem.runs.saver import Saver
from meristem.training.averaging import averaged, update_average
from meristem.training.display import make_display
from meristem.training.distributed import Processes
from meristem.training.going_on import finished_facts
from meristem.training.gradients import Gradients
from meristem.training.growth_from_config import idle_depth, make_grower, uneven_depth
from meristem.training.length import Length
from meristem.training.meter import Clock, PendingReadings, StepReading, TimeSpent
from meristem.training.optimizer import guarded_update, make_optimizer
from meristem.training.recorder import Progress, Recorder, due
from meristem.training.sharding import Sharded
from meristem.training.signals import BROKEN_PIPE, StopSignals
from meristem.training.tasks import Ids, Task, make_task
from meristem.wording import counted


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` or `resume` ended: the updates done and the last held-out loss, a mean in nats.

    `signal` is set when it was asked to stop early.
    """

    folder: Path
    step: int
    held_out: float | None
    signal: int | None


class Trainer:
    """A run in progress: everything it needs, built from a plan and, if there is one, a checkpoint."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        data: TokenData | LabelledData,
        checkpoint: Checkpoint | None,
        peers: Processes,
    ) -> None:
        torch.manual_seed(config.train.seed)
        keep_freed_memory(peers.device)
        device, plan = peers.device, folder.plan  # as at the start: a checkpoint brings its own structure
        self.folder, self.config, self.peers = folder, config, peers
        self.task = task_of(config, plan, data, peers)
        self.model = self.task.model(plan).to(device)
        self.kernels = self.model.use_attention(device, compute_dtype(device), config.train.attention)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.grower = make_grower(config, self.model, self.optimizer)
        self.progress = Progress(best=Best(config.eval.best_by))
        self.begins = checkpoint is None or checkpoint.step in (0, config.train.branch_step)
        self.rewinds = folder.rewinds
        self.bound = binding(folder, config)
        self.overdue = False  # whether a save waits for an update that is finite
        if checkpoint is not None:
            self.restore(checkpoint, self.task.step_flops(checkpoint.plan).causal)
        wrapped = peers.wrap(self.model, self.optimizer, config.train.parallel)
        self.sharded = wrapped if isinstance(wrapped, Sharded) else None
        if self.grower is not None:
            self.grower.whole = self.whole
        self.gradients = Gradients(
            wrapped, device=device, compile=config.train.compile, recompute=config.train.recompute
        )
        self.length = Length(config, self.task, self.plan, self.progress.step, self.progress.flops)
        self.tell_length()
        self.readings, self.clock = PendingReadings(), Clock()
        self.spent = TimeSpent(self.progress.seconds)
        self.saver = Saver(folder.checkpoints, config.checkpoint.keep)
        self.saver.best = self.progress.best.step if config.checkpoint.keep_best else None
        self.tokens = self.targets = torch.empty(0)  # of the last update, (micro-batches, b, ...)
        self.loss = torch.empty(0)  # of the last update, over all processes

    def restore(self, checkpoint: Checkpoint, step_flops: int) -> None:
        """Take up what a checkpoint holds; one that does not fit is an error that names it."""
        state = checkpoint.state
        try:
            sharded = self.config.train.parallel == "fsdp" and self.peers.world > 1  # no GPU need hold all moments
            restore_model(checkpoint, self.model, self.optimizer, torch.device("cpu") if sharded else None)
            restore_rng(checkpoint.rng)
            for name in ("skipped", "skipped_in_a_row"):
                check_integer(name, state[name], 0)
            evaluations = evaluations_of(self.folder, checkpoint.step)
            self.progress = Progress(
                checkpoint.step, state["skipped"], state["skipped_in_a_row"], last_measured(evaluations),
                state.get("flops", checkpoint.step * step_flops), checkpoint.step,
                {part: float(seconds) for part, seconds in state.get("seconds", {}).items()},
                best_of(evaluations, self.config.eval.best_by),
            )  # fmt: skip
            if self.grower is not None and checkpoint.step > 0:  # at 0 there are weights alone
                check_alike("growth", state["growth"], _known_state(self.grower))
                growth = state_of_today(state["growth"], checkpoint.growth, self.grower)
                self.grower.load_state_dict(growth, checkpoint.growth)
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            path = self.folder.checkpoints / checkpoint_name(checkpoint.step)
            raise RunError(f"{path}: does not fit this run ({shortened(str(error))})") from error

    @property
    def warnings(self) -> list[str]:
        """Settings that have no effect in this run."""
        policies = {} if self.grower is None else self.grower.policies
        idle = [f"growth.{name}.{text}" for name, policy in policies.items() for text in policy.warnings]
        idle += idle_depth(self.config, self.folder.plan) + uneven_depth(self.config, self.folder.plan)
        return idle_settings(self.config, classifier=self.plan.classes is not None) + idle

    @property
    def plan(self) -> Plan:
        """The present structure."""
        return self.model.plan

    @property
    def end(self) -> int:
        """The updates of the whole run, as far as the present structure tells."""
        return self.length.end(self.progress.step)

    def run(self, stop: StopSignals) -> Outcome:
        """Train to the end of the run, or to the first request to stop."""
        progress = self.progress
        with (
            make_display(self.plan, self.end, speaks=self.peers.first, lost=lambda: stop.ask(BROKEN_PIPE)) as display,
            self.saver,
            Recorder(
                self.folder, self.config, self.task, self.plan, self.peers, display, progress, self.length
            ) as record,
        ):
            stop.say = display.note
            record.event(
                "start" if self.begins else "resume", progress.step,
                device=describe_device(self.peers.device), processes=self.peers.world, attention=self.kernels,
                compile=self.config.train.compile, torch=torch.__version__, meristem=__version__, plan=self.plan.digest,
            )  # fmt: skip
            kinds = " and ".join(dict.fromkeys(self.kernels))
            compiled = ", compiled" if self.config.train.compile else ""
            display.note(f"{describe_device(self.peers.device)}; {kinds} attention{compiled}")
            if self.task.unmeasured is not None:
                display.note(self.task.unmeasured)
            if self.begins and self.config.growth.has("depth") and self.folder.plan.target:
                display.note(f"depth: {describe_first_depth(self.config, self.folder.plan)}")
            for text in self.warnings:
                display.note(text)
            stopping = False
            while progress.step < self.end and not stopping:
                reading = self.update(stop.asked)
                stopping = self.settle(reading, record)
                self.spent.lap("update")
                stopping = self.grow(record) or stopping
                self.spent.lap("growth")
                stopping = stopping or (stop.asked and self.peers.world == 1)  # alone there is nobody to agree with
                stopping = self.evaluate_and_save(stopping, record)
                self.note_saved(record)
                self.spent.lap("saving")
            refused = self.note_saved(record, wait=True)
            ended = progress.step == self.end or progress.ended_early
            if from_first_rank(refused and ended):  # all wait here until the last checkpoint is whole
                raise Diverged(progress.step, progress.step, weights=True)
            if ended:
                record.event("finished", progress.step, **finished_facts(progress.ended_early))
                return Outcome(self.folder.path, progress.step, progress.held_out, None)
            number = stop.number or int(signal.SIGTERM)  # none here if only another process was asked to stop
            record.event("stopped", progress.step, signal=number)
            unsaved = ", not saved as updates were being skipped" if self.overdue else ""
            display.note(f"stopped at step {progress.step}{unsaved}")
            return Outcome(self.folder.path, progress.step, progress.held_out, number)

    def update(self, asked_to_stop: bool) -> StepReading | None:
        """One step. Its numbers are still on their way; what comes back are those of the step before."""
        step = self.progress.step
        self.tokens, self.targets = self.batch(step)
        loss = self.gradients(self.tokens, self.targets)
        shared = torch.stack((loss, torch.full_like(loss, float(asked_to_stop))))
        loss, asked = mean_over_ranks(shared).unbind()  # all processes decide from the same numbers
        self.loss = loss
        norm, skipped = guarded_update(self.optimizer, self.length.rate(step), loss, self.config.optimizer.clip)
        if self.config.train.average:
            update_average(self.optimizer, self.config.train.average, skipped)
        self.progress.step = step + 1
        reading = self.readings.push(step + 1, torch.stack((loss, norm, skipped, asked)))
        if reading is not None:  # not when readings are flushed: on a CPU no time passes between the last two
            self.clock.tick()
        return reading

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step, this process's share of them, (micro-batches, b, ...), on their way to it."""
        return self.placed(self.task.batch(batch_number(step, self.rewinds), self.peers.rank, self.peers.world))

    def placed(self, arrays: tuple[Ids, Ids]) -> tuple[Tensor, Tensor]:
        """A batch in micro-batches, on its way to the device."""
        peers, micro = self.peers, micro_batch(self.config, self.peers.world)
        tokens, targets = (torch.from_numpy(array).unflatten(0, (-1, micro)) for array in arrays)
        if peers.device.type == "cuda":
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        return tokens.to(peers.device, non_blocking=True), targets.to(peers.device, non_blocking=True)

    def fresh(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batches (b, T) that will be trained on next or, where rows are held back, micro-batches of those."""
        batch = self.held_back_batch if self.task.held_back else self.batch
        for step in itertools.count(self.progress.step):
            yield from zip(*batch(step), strict=True)

    def held_back_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows that are held back, in turn, as `batch` gives those that are trained on."""
        return self.placed(self.task.held_back_batch(step, self.peers.rank, self.peers.world))

    @property
    def held_back(self) -> HeldBack | None:
        """The rows that are held back, if some are."""
        if not self.task.held_back:
            return None

        def batch() -> tuple[Tensor, Tensor]:
            tokens, targets = self.held_back_batch(self.progress.step)
            return tokens.flatten(0, 1), targets.flatten(0, 1)

        return HeldBack(self.task.held_back, batch)

    def settle(self, reading: StepReading | None, record: Recorder) -> bool:
        """Record a finished step; whether a stop was asked for by then."""
        if reading is None:
            return False
        self.progress.count(reading)
        record.step(reading, self.progress, self.clock, self.spent)
        if self.progress.skipped_in_a_row >= self.config.train.max_skipped:
            raise Diverged(self.progress.streak, reading.step)
        if not reading.skipped:
            self.saver.proven(reading.step)
        return reading.stop

    def grow(self, record: Recorder) -> bool:
        """Let the model grow if it is time; whether a stop was asked for by then."""
        if self.grower is None:
            return False
        step = self.progress.step
        with autocast(self.peers.device):
            tokens, targets = self.tokens.flatten(0, 1), self.targets.flatten(0, 1)
            growth = self.grower.step(tokens, targets, self.fresh, self.held_back, self.loss)
        stopping = False
        if growth.changed or growth.events:
            self.spent.lap("growth")
            stopping = self.settle(self.readings.flush(), record)
            self.clock.pause()
        if growth.changed:
            self.spent.restructured()
            self.gradients.restructured(self.rewrapped() if growth.exchanged else None)
            record.restructured(step, self.plan)
            self.tell_length()
        for event in growth.events:
            record.growth(event)
        if growth.observation is not None:
            record.observation(step, growth.observation)
        return stopping

    def tell_length(self) -> None:
        """Where FLOPs end the run, parts of it are parts of these, and a larger model comes to them sooner."""
        ahead = self.length.ahead(self.progress.step)
        if self.grower is not None and ahead is not None:
            self.grower.lasts(ahead)

    def whole(self) -> AbstractContextManager[None]:
        """Within this the model has its whole weights on every process; all of them must come here."""
        return nullcontext() if self.sharded is None else self.sharded.whole()

    def rewrapped(self) -> nn.Module:
        """The model for several processes after its parameters were exchanged; a sharded one is already made anew."""
        return self.sharded or self.peers.wrap(self.model, self.optimizer)

    def evaluate_and_save(self, stopping: bool, record: Recorder) -> bool:
        """Evaluate and save, each when it is due, or save to stop; whether to stop."""
        step, config = self.progress.step, self.config
        evaluates = due(step, self.end, config.eval.every) and self.task.unmeasured is None
        saves = due(step, self.end, config.checkpoint.every) or self.overdue
        if not (evaluates or saves or stopping):
            return False
        last = self.readings.flush()
        self.spent.wait()
        stopping = self.settle(last, record) or stopping
        if evaluates:
            found = self.measure()
            self.spent.lap("evaluation")
            if self.peers.first:
                self.progress.measured = found
                record.measured(step, found)
            improved = self.compare(step, found)
            saves = saves or (improved and config.checkpoint.keep_best)
            stopping = self.ends_early(record) or stopping
        if saves or stopping:
            self.save(record, good=evaluates and from_first_rank(math.isfinite(self.progress.held_out or 0.0)))
        self.clock.pause()
        return stopping

    def compare(self, step: int, measured: Mapping[str, float]) -> bool:
        """Take what was measured into the best so far; whether it is the best."""
        best = from_first_rank(self.progress.best.after(step, measured.get(self.progress.best.by)))
        self.progress.best = best
        improved = best.step == step
        if improved and self.config.checkpoint.keep_best and not self.progress.skipped_in_a_row:
            self.saver.best = step  # not while nothing is saved: the former one would leave for nothing
        return improved

    def ends_early(self, record: Recorder) -> bool:
        """Whether the run's patience is at an end, and the weights can be saved."""
        progress, patience = self.progress, self.config.eval.patience
        last = progress.step == self.end
        if last or progress.skipped_in_a_row or not progress.best.exhausted(patience):
            return False
        progress.ended_early = True
        best = progress.best
        than = "" if best.step is None else f" than at step {best.step}"
        record.display.note(
            f"step {progress.step}: ends here, as {best.by} was not better{than} in {counted(best.since, 'evaluation')}"
        )
        return True

    def measure(self) -> dict[str, float]:
        """Numbers about held-out data, by the weights and, under names of their own, by their average.

        The first process finds them; on the others there are none.
        """
        found = self._measured()
        if self.config.train.average:
            with averaged(self.optimizer):  # before weights are gathered: of each its own part
                found |= {f"{name}_average": value for name, value in self._measured().items()}
        return found

    def _measured(self) -> dict[str, float]:
        with self.whole():
            return self.task.measure(self.model, self.peers.device) if self.peers.first else {}

    def save(self, record: Recorder, *, good: bool) -> None:
        """Begin to write a checkpoint, which is good already if the loss from these weights was seen to be finite.

        While updates are being skipped nothing is saved: what is wrong may be the weights.
        """
        config, progress = self.config, self.progress
        last = progress.step == self.end  # then they are the best there is, if they are finite
        self.overdue = progress.skipped_in_a_row > 0 and not last
        if self.overdue or (self.sharded is None and not self.peers.first):
            return
        self.note_saved(record, wait=True)
        taken = snapshot(
            progress.step, model=self.model, optimizer=self.optimizer,
            growth=None if self.grower is None else self.grower.tensors(), logs=self.folder.logs,
            state={
                "plan": self.plan.to_dict(), "skipped": progress.skipped, "flops": self.length.flops(progress.step),
                "left": self.end - progress.step,
                "seconds": dict(self.spent.parts), "growth": None if self.grower is None else self.grower.state_dict(),
                "skipped_in_a_row": progress.skipped_in_a_row, "good": good, "rewinds": len(self.rewinds),
                "logs": record.positions(), **self.bound,
                "processes": self.peers.world, "seeds": {"weights": config.train.seed, "data": config.data.seed},
                "meristem": __version__, "torch": torch.__version__,
            },
            keep=self.peers.first,
        )  # fmt: skip
        if not self.peers.first:
            return
        self.saver.save(taken)
        if good:
            self.saver.proven(progress.step + 1)  # a finite held-out loss proves it as the next update would

    def note_saved(self, record: Recorder, *, wait: bool = False) -> bool:
        """Record the checkpoint that has been written meanwhile, if there is one; whether it was refused instead."""
        refused = False
        for saved in self.saver.finished(wait=wait):
            if saved.path is not None:
                record.event("checkpoint", saved.step, path=saved.path.name)
            else:
                refused = True
                record.event("not_saved", saved.step, tensor=saved.bad)
                record.display.note(f"step {saved.step}: not saved, as {saved.bad} is not finite")
        return refused


def task_of(config: Config, plan: Plan, data: TokenData | LabelledData, peers: Processes) -> Task:
    return make_task(config, plan, data, fixed=peers.device.type == "cuda" or config.train.compile)


def micro_batch(config: Config, world: int) -> int:
    share = config.train.batch_size // world
    return min(config.train.micro_batch or share, share)


def _known_state(grower: Grower) -> dict[str, Any]:
    """The form of a grower's state, but of policies that are somebody's own: their own `load` judges those."""
    state = grower.state_dict()
    for name in state["policies"].keys() - POLICIES.keys():
        state["policies"][name]["state"] = None
    return state


def evaluations_of(folder: RunFolder, step: int) -> list[Mapping[str, Any]]:
    """The lines of metrics that are about held-out data, until a step."""
    entries = sound_metrics(folder.read(folder.metrics), folder.config.train.steps)
    return [entry for entry in entries if "held_out_loss" in entry and entry["step"] <= step]


def last_measured(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The last evaluation without its step; empty if there is none."""
    return {name: value for name, value in evaluations[-1].items() if name != "step"} if evaluations else {}
