"""The speed of `meristem train` itself, with its data and logs, beside that of the bare step."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from meristem.bench.step import StepResult, Timing, forget_peak, peak_gib
from meristem.choices import Attention
from meristem.config import CheckpointConfig, Config, DataConfig, EvalConfig, LogConfig, ModelConfig, TrainConfig
from meristem.data import HfTokenizer, open_data, prepare
from meristem.devices import peak_flops
from meristem.files import write_atomically
from meristem.plan import Plan
from meristem.runs.run_folder import RunFolder
from meristem.settings import of_type
from meristem.training.distributed import processes
from meristem.training.growth_from_config import starting_plan
from meristem.training.loop import Trainer
from meristem.training.meter import Clock, StepReading
from meristem.training.signals import StopSignals
from meristem.training.tasks import initial_plan

TOKENS = 1 << 20  # of random data


def measure_train(
    name: str, plan: Plan, device: torch.device, timing: Timing, *, attention: str, compile: bool
) -> StepResult:
    """Train a plan on random tokens, and read the speed of its timed updates, at most 50, where users read it.

    Before them are as many as `measure` makes, the first of which is recorded on a GPU.
    """
    batch, steps, before = timing.batch, min(timing.steps, Clock.WINDOW), 1 + timing.warmup
    unseen = io.StringIO()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as place,
        contextlib.redirect_stdout(unseen),
        contextlib.redirect_stderr(unseen),
    ):
        folder = Path(place)
        random_data(folder / "text", plan)
        write_atomically(folder / "plan.json", plan.to_json())
        config = Config(
            model=ModelConfig(plan=str(folder / "plan.json")), data=DataConfig(path=str(folder / "text" / "data")),
            train=TrainConfig(
                steps=before + steps + 1, batch_size=batch, device=str(device), compile=compile,
                attention=of_type("attention", attention, Attention),
            ),
            eval=EvalConfig(every=0), checkpoint=CheckpointConfig(every=0), log=LogConfig(every=1),
        )  # fmt: skip
        memory = _train(config, folder / "run", before)
        lines = map(json.loads, RunFolder.open(folder / "run").metrics.read_text().splitlines())
        last = [line for line in lines if line.get("tokens_per_second")][-1]
    rate = float(last["tokens_per_second"])
    peak = peak_flops(device)
    return StepResult(
        name=name, milliseconds=1e3 * batch * plan.context / rate, spread=0.0, tokens_per_second=rate,
        peak_gib=memory,
        mfu=None if peak is None else rate * plan.cost.training.full / peak, attention=None, steps=steps,
        compile_seconds=0.0, last_loss=float(last["loss"]),
    )  # fmt: skip


class _TimedTrainer(Trainer):
    """A run whose clock counts from an update on; so does the most memory held, until the last update."""

    timed_from = 0
    peak: float | None = None  # in GiB

    def update(self, asked_to_stop: bool) -> StepReading | None:
        if self.progress.step == self.timed_from:
            forget_peak(self.peers.device)
            self.clock = Clock()  # which the first of these updates starts
        reading = super().update(asked_to_stop)
        if self.progress.step == self.config.train.steps:  # the last checkpoint is still to come
            self.peak = peak_gib(self.peers.device)
        return reading


def _train(config: Config, out: Path, timed_from: int) -> float | None:
    """What `meristem train` does in a new folder; the memory of the timed updates."""
    data = open_data(config.data.path)
    plan = starting_plan(config, initial_plan(config, data))
    with processes(config.train.device) as peers, RunFolder.created(out, config, plan, data) as folder:
        trainer = _TimedTrainer(folder, config, data, None, peers)
        trainer.timed_from = timed_from
        with StopSignals() as stop:
            trainer.run(stop)
        return trainer.peak


def random_data(folder: Path, plan: Plan) -> None:
    """A data folder of random tokens, any of a plan's vocabulary, made as users make theirs."""
    words = {str(number): number for number in range(plan.vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    folder.mkdir()
    ids = np.random.default_rng(0).integers(1, plan.vocabulary, max(TOKENS, 8 * plan.context))
    (folder / "text.txt").write_text(" ".join(map(str, ids.tolist())))
    own = HfTokenizer(tokenizer.to_str(), eot_token="0")
    prepare([folder / "text.txt"], folder / "data", tokenizer=own, held_out=0.25, workers=1)
