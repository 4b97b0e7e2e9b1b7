"""The training loop."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from meristem import __version__
from meristem.data import Sampler, TokenData, TokenStream, batch, padded_vocabulary
from meristem.errors import InputError, RunError
from meristem.evaluation.held_out import held_out_loss, held_out_windows
from meristem.model import Decoder
from meristem.model.backends import choose_backends
from meristem.plan import Plan
from meristem.training.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_newest,
    restore_optimizer,
    restore_rng,
    save_checkpoint,
)
from meristem.training.config import Config, flatten, override
from meristem.training.devices import compute_dtype, describe_device, peak_flops
from meristem.training.display import Display, make_display
from meristem.training.distributed import Processes, processes
from meristem.training.gradients import Gradients
from meristem.training.meter import Clock, Reading, Readings
from meristem.training.optimizer import guarded_update, learning_rate, make_optimizer
from meristem.training.run import RunFolder
from meristem.training.trackers import make_trackers


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
        config = replace(config, data=replace(config.data, path=str(Path(config.data.path).resolve())))
        data = TokenData.open(config.data.path)
        plan = config.model.build(padded_vocabulary(data.index.tokenizer.vocabulary))
        _check(config, plan, data, peers)
        if peers.first:
            RunFolder.create(Path(out), config, plan, data)
        peers.wait()
        return _run(RunFolder.open(Path(out)), config, plan, data, None, peers)


def resume(out: str | Path, changes: Sequence[str] = ()) -> Outcome:
    """Go on with the run in `out` from its newest whole checkpoint, or from the start if it has none yet."""
    folder = RunFolder.open(Path(out))
    config = override(folder.config, changes)
    with processes(config.train.device) as peers:
        data = TokenData.open(config.data.path)
        folder.check_data(data)
        _check_batch(config, peers)
        checkpoint = load_newest(folder.checkpoints, print if peers.first else lambda text: None)
        if peers.first:
            folder.rewind(0 if checkpoint is None else checkpoint.step)
        peers.wait()
        if checkpoint is not None and checkpoint.step >= config.train.steps:
            return Outcome(folder.path, checkpoint.step, _last_held_out(folder), None)
        plan = folder.plan if checkpoint is None else Plan.from_dict(checkpoint.state["plan"])
        return _run(folder, config, plan, data, checkpoint, peers)


def _run(
    folder: RunFolder,
    config: Config,
    plan: Plan,
    data: TokenData,
    checkpoint: Checkpoint | None,
    peers: Processes,
) -> Outcome:
    """Build everything, then train to the end of the run or to the first request to stop."""
    torch.manual_seed(config.train.seed)
    model = Decoder(plan, seed=config.train.seed).to(peers.device)
    kernels = model.use_attention(peers.device, compute_dtype(peers.device), config.train.attention)
    optimizer = make_optimizer(model, config.optimizer)
    state = _State()
    if checkpoint is not None:
        model.load_state_dict(checkpoint.model)
        restore_optimizer(model, optimizer, checkpoint.optimizer)
        restore_rng(checkpoint.rng)
        skipped, in_a_row = checkpoint.state["skipped"], checkpoint.state["skipped_in_a_row"]
        state = _State(checkpoint.step, skipped, in_a_row, _last_held_out(folder))
    steps = config.train.steps
    use_compile = peers.device.type == "cuda" if config.train.compile is None else config.train.compile
    gradients = Gradients(peers.wrap(model), compile=use_compile, device=peers.device)
    stream, sampler, windows = _inputs(config, plan, data)

    with (
        make_display(plan, steps, speaks=peers.first) as display,
        StopSignals() as stop,
        _Log(folder, config, plan, peers, display) as log,
    ):
        log.event(
            "start" if checkpoint is None else "resume", state.step,
            device=describe_device(peers.device), processes=peers.world, attention=kernels, compile=use_compile,
            torch=torch.__version__, meristem=__version__, plan=plan.digest,
        )  # fmt: skip
        readings, clock = Readings(), Clock()

        def settle(reading: Reading | None) -> bool:
            """Record a finished step; whether a stop was asked for by then."""
            if reading is None:
                return False
            state.count(reading)
            log.step(reading, state, clock)
            if state.skipped_in_a_row >= config.train.max_skipped:
                raise RunError(_too_many_skipped(state, folder))
            return reading.stop

        def pause_for(step: int, stopping: bool) -> bool:
            """Evaluate and save, each when it is due, or save to stop; whether a stop was asked for by then."""
            due_eval, due_save = (_due(step, steps, every) for every in (config.eval.every, config.checkpoint.every))
            if not (due_eval or due_save or stopping):
                return False
            stopping = settle(readings.flush()) or stopping
            if due_eval and windows is not None and peers.first:
                state.held_out = held_out_loss(model, windows, batch=config.eval.batch, device=peers.device)
                log.held_out(step, state.held_out)
            if due_save or stopping:
                save(step)
            clock.pause()
            return stopping

        def save(step: int) -> None:
            if peers.first:
                path = save_checkpoint(
                    folder.checkpoints, step, model=model, optimizer=optimizer, keep=config.checkpoint.keep,
                    state={
                        "plan": plan.to_dict(), "skipped": state.skipped, "skipped_in_a_row": state.skipped_in_a_row,
                        "seeds": {"weights": config.train.seed, "data": config.data.seed}, "processes": peers.world,
                        "meristem": __version__, "torch": torch.__version__,
                    },
                )  # fmt: skip
                log.event("checkpoint", step, path=path.name)
            peers.wait()

        stopped = False
        while state.step < steps and not stopped:
            tokens, labels = _batch(stream, sampler, state.step, config, peers)
            loss = gradients(tokens, labels)
            loss, asked = peers.mean(torch.stack((loss, torch.full_like(loss, float(stop.asked))))).unbind()
            lr = learning_rate(state.step, steps, config.optimizer)
            norm, skipped = guarded_update(optimizer, lr, loss, config.optimizer.clip)
            state.step += 1
            reading = readings.push(state.step, torch.stack((loss, norm, skipped, asked)))
            if reading is not None:  # not when readings are flushed: on a CPU no time passes between the last two
                clock.tick()
            stopped = pause_for(state.step, settle(reading))
        if stopped and state.step < steps:
            number = stop.number or int(signal.SIGTERM)  # none here if only another process was asked to stop
            log.event("stopped", state.step, signal=number)
            display.note(f"stopped at step {state.step}; go on with: meristem resume {folder.path}")
            return Outcome(folder.path, state.step, state.held_out, number)
        log.event("finished", state.step)
        return Outcome(folder.path, state.step, state.held_out, None)


@dataclass
class _State:
    """What changes from step to step besides weights and moments."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    held_out: float | None = None

    def count(self, reading: Reading) -> None:
        self.skipped += reading.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if reading.skipped else 0


class _Log:
    """Where numbers go: the run's files, trackers and the display. Only the first process writes."""

    def __init__(self, folder: RunFolder, config: Config, plan: Plan, peers: Processes, display: Display) -> None:
        self.folder, self.config, self.peers, self.display = folder, config, peers, display
        self.tokens_per_step = config.train.batch_size * plan.context
        peak = peak_flops(peers.device)
        self.flops_share = None if peak is None else plan.cost.training.full / (peak * peers.world)
        self.trackers = make_trackers(config.log.trackers, folder.path, flatten(config)) if peers.first else []

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *exception: Any) -> None:
        for tracker in self.trackers:
            tracker.close()

    def step(self, reading: Reading, state: _State, clock: Clock) -> None:
        if not self.peers.first:
            return
        if reading.skipped:
            self.event("skipped", reading.step, loss=str(reading.loss), gradient_norm=str(reading.gradient_norm))
        steps = self.config.train.steps
        if not _due(reading.step, steps, self.config.log.every):
            return
        pace = clock.seconds_per_step
        rate = None if pace is None else self.tokens_per_step / pace
        entry = {
            "step": reading.step,
            "loss": _finite(reading.loss),
            "gradient_norm": _finite(reading.gradient_norm),
            "lr": learning_rate(reading.step - 1, steps, self.config.optimizer),
            "tokens": reading.step * self.tokens_per_step,
            "tokens_per_second": rate,
            "mfu": None if rate is None or self.flops_share is None else rate * self.flops_share,
            "skipped": state.skipped,
        }
        self._write(entry)
        left = None if pace is None else (steps - reading.step) * pace
        self.display.update({**entry, "held_out": state.held_out, "left": left})

    def held_out(self, step: int, loss: float) -> None:
        self._write({"step": step, "held_out_loss": loss, "perplexity": math.exp(min(loss, 700.0))})
        self.display.note(f"step {step}: held-out loss {loss:.4f}")

    def event(self, kind: str, step: int, **facts: Any) -> None:
        if self.peers.first:
            self.folder.append(self.folder.events, {"step": step, "event": kind, **facts})

    def _write(self, entry: dict[str, Any]) -> None:
        self.folder.append(self.folder.metrics, entry)
        numbers = {k: float(v) for k, v in entry.items() if k != "step" and v is not None}
        for tracker in self.trackers:
            tracker.log(entry["step"], numbers)


class StopSignals:
    """SIGINT and SIGTERM ask for a clean stop after the current step; a second one ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.number is not None

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.number = number


def _inputs(config: Config, plan: Plan, data: TokenData) -> tuple[TokenStream, Sampler, Tensor | None]:
    """What the run reads: the training stream, the order of its windows, and the held-out windows if there are any."""
    stream, held_out = data.split("train"), data.split("held_out")
    sampler = Sampler(len(stream), plan.context, config.train.batch_size, config.data.seed)
    windows = held_out_windows(held_out, plan.context, config.eval.windows) if len(held_out) else None
    return stream, sampler, windows


def _batch(stream: TokenStream, sampler: Sampler, step: int, config: Config, peers: Processes) -> tuple[Tensor, Tensor]:
    """Tokens and labels of this process, (micro-batches, b, T), on their way to the device."""
    micro = _micro_batch(config, peers)
    arrays = batch(stream, sampler, step, peers.rank, peers.world)
    tokens, labels = (torch.from_numpy(array).unflatten(0, (-1, micro)) for array in arrays)
    if peers.device.type == "cuda":
        tokens, labels = tokens.pin_memory(), labels.pin_memory()
    return tokens.to(peers.device, non_blocking=True), labels.to(peers.device, non_blocking=True)


def _micro_batch(config: Config, peers: Processes) -> int:
    share = config.train.batch_size // peers.world
    return min(config.train.micro_batch or share, share)


def _check(config: Config, plan: Plan, data: TokenData, peers: Processes) -> None:
    """Refuse what cannot be trained before anything is written."""
    _check_batch(config, peers)
    _inputs(config, plan, data)
    choose_backends(plan.layers, peers.device, compute_dtype(peers.device), config.train.attention)


def _check_batch(config: Config, peers: Processes) -> None:
    size, micro = config.train.batch_size, _micro_batch(config, peers)
    if size % peers.world or (size // peers.world) % micro:
        raise InputError(
            "train.batch_size",
            size,
            f"must be a multiple of {peers.world} processes times micro-batch {micro}",
        )


def _last_held_out(folder: RunFolder) -> float | None:
    losses = [entry["held_out_loss"] for entry in folder.read(folder.metrics) if "held_out_loss" in entry]
    return losses[-1] if losses else None


def _due(step: int, steps: int, every: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _too_many_skipped(state: _State, folder: RunFolder) -> str:
    whole = list_checkpoints(folder.checkpoints)
    last = f"the last good checkpoint is {whole[-1]}" if whole else "no checkpoint had been written yet"
    return (
        f"stopped at step {state.step}: loss or gradient were not finite in {state.skipped_in_a_row} updates in a row "
        f"(all skipped, weights unchanged); {last}"
    )
