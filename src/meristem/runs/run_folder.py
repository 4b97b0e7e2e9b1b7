"""The run folder: what a run is made of, what it recorded, and how to open it again."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meristem.config import RESUMABLE, Config, load_config
from meristem.data import LabelledData, Recipe, TokenData, Tokenizer, load_tokenizer, open_data
from meristem.devices import choose_device
from meristem.errors import InputError, Remedy, RunError, shortened
from meristem.files import beside, flush, flush_folder, new_folder, read_json, remove_remains, write_atomically
from meristem.growth import LoopHeads
from meristem.growth.apply import apply_edit
from meristem.model import Decoder, Transformer, build_model
from meristem.plan import Plan
from meristem.runs.best import best_of
from meristem.runs.checkpoint import (
    Checkpoint,
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    load_state,
    restore_model,
    step_of,
)
from meristem.runs.divergence import REWINDS_FILE, Rewind, load_rewinds
from meristem.runs.entries import sound_metrics
from meristem.runs.lock import check_free, run_lock
from meristem.runs.log import aside_name, damage, positions, read_log
from meristem.runs.origin import NO_DATA, OLDER_FILE, Origin
from meristem.runs.predictions import Prediction, class_logits, encoded_rows, predictions
from meristem.wording import listed

logger = logging.getLogger(__name__)

PRUNE_FILE = "prune.json"  # of a run that begins with a pruned model: how it was pruned


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run, and what its files say.

    `metrics.jsonl` has a line per logged step, `events.jsonl` one per happening, `entropy.jsonl` one per observation.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def entropy(self) -> Path:
        return self.path / "entropy.jsonl"

    @property
    def logs(self) -> tuple[Path, ...]:
        return self.metrics, self.events, self.entropy

    @classmethod
    @contextmanager
    def created(
        cls, path: Path, config: Config, plan: Plan, data: TokenData | LabelledData | Tokenizer,
        fill: Callable[[RunFolder], None] = lambda folder: None,
    ) -> Iterator[RunFolder]:  # fmt: skip
        """Begin a run in a new or empty folder, and hold it; `fill` puts into it what it begins with besides.

        One that will not be trained has no data, but a tokenizer alone.

        The folder is filled and locked under another name, and gets its own when it is whole: there are no half-begun
        runs, and of two processes that begin one at the same time, one finds the other at work.
        """
        path = new_folder("out", path)
        check_empty(path)
        remove_remains(path)
        aside = beside(path, "partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            with run_lock(aside, path):
                if isinstance(data, LabelledData):
                    data.recipe.save(aside)
                else:
                    (load_tokenizer(data.folder) if isinstance(data, TokenData) else data).save(aside)
                (aside / "plan.json").write_text(plan.to_json(), encoding="utf-8")
                (aside / "config.toml").write_text(config.to_toml(), encoding="utf-8")
                digest = data.index.digest if isinstance(data, TokenData | LabelledData) else NO_DATA
                Origin.of(aside, config, plan, digest).save(aside)
                fill(cls(aside))
                flush_folder(aside)
                try:
                    aside.rename(path)
                except OSError:
                    check_empty(path)
                    raise
                flush(path.parent)
                yield cls(path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run, whose configuration, plan and tokenizer must be those that it began with."""
        if not (path / "config.toml").is_file():
            raise RunError(f"{path}: not a run (it has no config.toml)")
        folder = cls(path)
        if (origin := folder.origin) is not None:
            origin.check(path, folder.config, folder.plan)
        return folder

    @property
    def origin(self) -> Origin | None:
        """What the run began with; None of runs of older versions."""
        return Origin.load(self.path)

    @property
    def config(self) -> Config:
        return load_config(self.path / "config.toml")

    @property
    def plan(self) -> Plan:
        """The plan that the run began with."""
        return Plan.load(self.path / "plan.json")

    @property
    def rewinds(self) -> tuple[Rewind, ...]:
        """The returns to an earlier step, after updates that were not finite."""
        return load_rewinds(self.path)

    @property
    def newest_state(self) -> dict[str, Any] | None:
        """The state of the newest checkpoint whose state can be read; None if there is none."""
        return self._newest_state()[0]

    def _newest_state(self) -> tuple[dict[str, Any] | None, list[str]]:
        """The state of the newest checkpoint that can be read, and what is wrong with newer ones."""
        refused: list[str] = []
        for checkpoint in reversed(list_checkpoints(self.checkpoints)):
            try:
                return load_state(checkpoint), refused
            except (RunError, OSError) as error:
                refused.append(str(error))
        return None, refused

    @property
    def newest_plan(self) -> Plan:
        """The plan of the newest readable checkpoint, with what has grown until then."""
        state = self.newest_state
        return self.plan if state is None else Plan.from_dict(state.get("plan"))

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        checkpoints = list_checkpoints(self.checkpoints)
        return step_of(checkpoints[-1]) if checkpoints else 0

    @property
    def data_digest(self) -> Any:
        """The digest of the data that the run began with."""
        origin = self.origin
        return read_json(self.path / OLDER_FILE).get("digest") if origin is None else origin.data

    def check_trained(self) -> None:
        """Refuse to go on with what was never trained here."""
        if self.data_digest == NO_DATA:
            expected = "was imported and has no data; train on in a new run, with model.start_from"
            raise InputError("run", str(self.path), expected)

    def check_data(self, data: TokenData | LabelledData) -> None:
        """Refuse to go on with other data than the run began with."""
        if data.index.digest != self.data_digest:
            raise InputError("data.path", str(data.folder), "is not the data this run began with (its tokens differ)")

    def open_alike(self, path: Path) -> TokenData | LabelledData:
        """Prepared data that were made as the run's own: text by its tokenizer, or rows with its classes and pieces."""
        data = open_data(path)
        self.check_alike(data, "data")
        return data

    def check_alike(self, data: TokenData | LabelledData, field: str) -> None:
        """Refuse data that were not made as the run's own, by the name of the `field` that they were given in."""
        classifies, value = self.plan.classes is not None, str(data.folder)
        if isinstance(data, TokenData) == classifies:
            kinds = ("text", "a classifier") if classifies else ("labelled rows", "a language model")
            raise InputError(field, value, f"is {kinds[0]}, and {self.path} is the run of {kinds[1]}")
        if isinstance(data, TokenData):
            if data.index.tokenizer.digest != load_tokenizer(self.path).digest:
                mend = Remedy((f"tokenizer={self.path}",), "data prepare")
                raise InputError(field, value, f"was made with another tokenizer than {self.path}", mend)
        elif data.recipe.digest != Recipe.load(self.path).digest:
            raise InputError(field, value, f"was made with other classes or another vocabulary than {self.path}")

    def read(self, log: Path) -> Iterator[dict[str, Any]]:
        """The entries of a log; what is no entry, such as a line that was cut off, is passed over."""
        return read_log(log)

    def damages(self) -> list[str]:
        """What is wrong with states of checkpoints, and with logs: they cannot be read, or are not what they were."""
        state, refused = self._newest_state()
        known = positions(state or {})
        return [*refused, *(said for log in self.logs if (said := damage(log, known.get(log.name))))]

    def write(self, name: str, text: str, out: Path | None = None) -> Path | None:
        """Write a result beside the run's files, or into another folder; None if the run's own cannot be written."""
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically((out or self.path) / name, text)
        except OSError as error:
            if out is not None or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return None
        return (out or self.path) / name

    def set_aside(self) -> Path:
        """Move logs, checkpoints, rewinds and results into a folder of their own, to begin anew; that folder."""
        aside = aside_name(self.path / "before")
        aside.mkdir()
        results = (path for pattern in ("eval*.json", "audit.json") for path in self.path.glob(pattern))
        for path in (*self.logs, self.checkpoints, self.path / REWINDS_FILE, *results):
            if path.exists():
                path.rename(aside / path.name)
        flush(self.path)
        return aside


def binding(folder: RunFolder, config: Config) -> dict[str, Any]:
    """What a checkpoint's state says of the run it belongs to: its origin, and the settings that may change."""
    origin = folder.origin
    settings = {key: config[key] for key in RESUMABLE}
    return {"origin": None if origin is None else origin.digest, "settings": json.loads(json.dumps(settings))}


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, and not of files that a run could be made of."""
    return all((path / name).is_file() for name in ("config.toml", "plan.json"))


def check_empty(path: Path) -> None:
    """Refuse to begin a run where there is something, and say who is at work there if somebody is."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not path.is_dir():
            raise InputError("out", str(path), "is a file; name a folder")
        check_free(path)
        if not is_run(path):
            raise InputError("out", str(path), "already holds something; take another folder")
        expected = "already holds something; take another folder, or go on with the run"
        raise InputError("out", str(path), expected, Remedy(call="resume", target=str(path)))


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with what is needed to use it.

    >>> run = load_run("runs/first")
    >>> prompt = run.tokenizer.encode("Page 1").tolist()
    >>> [ids] = generate(run.decoder, [prompt], max_tokens=5)
    >>> text = run.tokenizer.decode(ids)
    """

    folder: RunFolder
    config: Config
    model: Transformer
    step: int
    device: torch.device

    @property
    def decoder(self) -> Decoder:
        """The language model; if the run is of a classifier, an error that says so."""
        if not isinstance(self.model, Decoder):
            raise InputError("run", str(self.folder.path), "is of a classifier, and this needs a language model")
        return self.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a language model."""
        assert self.decoder
        return load_tokenizer(self.folder.path)

    @property
    def recipe(self) -> Recipe:
        """The recipe of a classifier: from rows to ids and classes.

        >>> load_run("runs/classifier").recipe.classes
        ('high', 'low', 'odd')
        """
        if isinstance(self.model, Decoder):
            raise InputError("run", str(self.folder.path), "is of a language model, and this needs a classifier")
        return Recipe.load(self.folder.path)

    def predict(self, texts: Sequence[str], *, temperature: float = 1.0) -> list[Prediction]:
        """What the classifier says of n texts: for each the label, and the probability of each class.

        Logits are divided by `temperature`; `meristem.evaluation.calibration` finds the one that suits held-out rows,
        as `meristem predict` does.

        >>> [found] = load_run("runs/classifier").predict(["w1 w2 high"])
        >>> found.label in found.probabilities
        True
        """
        recipe = self.recipe
        logits = class_logits(self.model, encoded_rows(recipe, texts), batch=self.config.eval.batch, device=self.device)
        return predictions(logits, recipe.classes, temperature)


def settle(model: Transformer) -> None:
    """Take the heads that fade out of a model's loops: it is used as it will be when they have left."""
    for layer, loop in model.plan.loops.items():
        if loop.fading:
            apply_edit(model, None, LoopHeads(layer, loop.chosen, loop.passes))
            assert model.gate_ramp is not None
            model.gate_ramp[layer, : loop.passes, : len(loop.chosen)] = 1


def _wanted(folder: RunFolder, step: int | str) -> Path:
    """The checkpoint at a step, or the best one."""
    names = {step_of(path): path for path in list_checkpoints(folder.checkpoints)}
    wanted: int | str | None = step
    if step == "best":
        measured = sound_metrics(folder.read(folder.metrics), folder.config.train.steps)
        wanted = best_of((entry for entry in measured if entry["step"] in names), folder.config.eval.best_by).step
        if wanted is None:
            raise InputError("step", step, f"cannot be told: {folder.path} has no checkpoint that was evaluated")
    elif isinstance(step, str) and step.isdecimal():
        wanted = int(step)
    if not isinstance(wanted, int) or wanted not in names:
        raise InputError(
            "step", wanted, f"has no checkpoint; there are [{listed(list(map(str, names)), 20)}], and best"
        )
    return names[wanted]


def open_checkpoint(
    folder: RunFolder, *, step: int | str | None = None, average: bool = False,
    report: Callable[[str], None] = logger.warning,
) -> Checkpoint:  # fmt: skip
    """The newest whole checkpoint of a run, or that of a step, or the best.

    With `average`, its weights are the average that the run kept of them.
    """
    checkpoint: Checkpoint | None
    if step is None:
        checkpoint = load_newest(folder.checkpoints, report)
        if checkpoint is None:
            raise RunError(f"{folder.checkpoints}: holds no whole checkpoint yet")
    else:
        checkpoint = load_checkpoint(_wanted(folder, step))
    if not average:
        return checkpoint
    try:
        return checkpoint.averaged()
    except InputError as error:
        expected = f"{error.expected}; {folder.path} was trained with train.average = {folder.config.train.average}"
        raise InputError("average", True, expected) from None


def load_run(
    path: str | Path, *, step: int | str | None = None, average: bool = False, device: str = "auto",
    report: Callable[[str], None] = logger.warning,
) -> LoadedRun:  # fmt: skip
    """Open a run with the weights of its newest checkpoint, or of the one at `step`.

    "best" is the checkpoint whose `eval.best_by` was best, of those that there are (see `checkpoint.keep_best`). With
    `average` these are the average that the run has kept of them (`train.average`).

    >>> run = load_run("runs/first")
    >>> run.step, run.model.plan.heads
    (12, (2, 4))
    """
    folder = RunFolder.open(Path(path))
    checkpoint = open_checkpoint(folder, step=step, average=average, report=report)
    place = choose_device(device)
    model = build_model(checkpoint.plan)
    try:
        restore_model(checkpoint, model, None)
        settle(model)
    except InputError as error:
        path = folder.checkpoints / checkpoint_name(checkpoint.step)
        raise RunError(f"{path}: its weights do not fit its plan ({shortened(str(error))})") from error
    model.to(place).eval()
    return LoadedRun(folder, folder.config, model, checkpoint.step, place)
