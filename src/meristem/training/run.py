"""The run folder: what a run is made of, what it recorded, and how to open it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meristem.data import LabelledData, Recipe, TokenData, Tokenizer, load_tokenizer
from meristem.errors import InputError, RunError
from meristem.model import Decoder, Transformer, build_model
from meristem.plan import Plan
from meristem.training.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    read_json,
    write_atomically,
)
from meristem.training.config import Config, load_config
from meristem.training.devices import choose_device


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run, and its logs, which are lines of JSON.

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

    @classmethod
    def create(cls, path: Path, config: Config, plan: Plan, data: TokenData | LabelledData) -> RunFolder:
        """Begin a run in a new or empty folder."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(
                "out",
                str(path),
                "already holds something; take another folder, or: meristem resume " + str(path),
            )
        path = path.resolve()  # through a link to an empty folder, which could not be renamed over
        aside = path.with_name(f".{path.name}.partial")  # renamed when it is whole: there are no half-begun runs
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if isinstance(data, TokenData):
            load_tokenizer(data.folder).save(aside)
        else:
            data.recipe.save(aside)
        write_atomically(aside / "plan.json", plan.to_json())
        write_atomically(aside / "data.json", json.dumps({"digest": data.index.digest}) + "\n")
        write_atomically(aside / "config.toml", config.to_toml())
        aside.rename(path)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        if not (path / "config.toml").is_file():
            raise RunError(f"{path}: not a run (it has no config.toml)")
        return cls(path)

    @property
    def config(self) -> Config:
        return load_config(self.path / "config.toml")

    @property
    def plan(self) -> Plan:
        """The plan that the run began with."""
        return Plan.load(self.path / "plan.json")

    @property
    def newest_plan(self) -> Plan:
        """The plan of the newest readable checkpoint, with what has grown until then."""
        for checkpoint in reversed(list_checkpoints(self.checkpoints)):
            with suppress(RunError, InputError, KeyError):
                return Plan.from_dict(read_json(checkpoint / "state.json")["plan"])
        return self.plan

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        checkpoints = list_checkpoints(self.checkpoints)
        return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0

    def check_data(self, data: TokenData | LabelledData) -> None:
        """Refuse to go on with other data than the run began with."""
        if data.index.digest != read_json(self.path / "data.json").get("digest"):
            raise InputError("data.path", str(data.folder), "is not the data this run began with (its tokens differ)")

    def append(self, log: Path, entry: dict[str, Any]) -> None:
        """Add a line to a log."""
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def read(self, log: Path) -> Iterator[dict[str, Any]]:
        """The entries of a log; what is no entry, such as a line that was cut off, is passed over."""
        if log.is_file():
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(json.JSONDecodeError):
                    entry = json.loads(line)
                    if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                        yield entry

    def rewind(self, step: int) -> None:
        """Forget metrics and events recorded after the checkpoint that the run goes on from."""
        for log in (self.metrics, self.events, self.entropy):
            if not log.is_file():
                continue
            kept = [json.dumps(entry) + "\n" for entry in self.read(log) if entry["step"] <= step]
            write_atomically(log, "".join(kept))


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with what is needed to use it."""

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
        """That of a language model."""
        assert self.decoder
        return load_tokenizer(self.folder.path)

    @property
    def recipe(self) -> Recipe:
        """That of a classifier: from rows to ids and classes."""
        if isinstance(self.model, Decoder):
            raise InputError("run", str(self.folder.path), "is of a language model, and this needs a classifier")
        return Recipe.load(self.folder.path)


def load_run(
    path: str | Path, *, step: int | None = None, device: str = "auto", report: Callable[[str], None] = print
) -> LoadedRun:
    """Open a run with the weights of its newest checkpoint, or of the one at `step`."""
    folder = RunFolder.open(Path(path))
    checkpoint: Checkpoint | None
    if step is None:
        checkpoint = load_newest(folder.checkpoints, report)
        if checkpoint is None:
            raise RunError(f"{folder.checkpoints}: holds no whole checkpoint yet")
    else:
        names = {int(p.name.removeprefix("step-")): p for p in list_checkpoints(folder.checkpoints)}
        if step not in names:
            raise InputError("step", step, f"has no checkpoint; there are {sorted(names)}")
        checkpoint = load_checkpoint(names[step])
    place = choose_device(device)
    model = build_model(Plan.from_dict(checkpoint.state["plan"]))
    model.load_state_dict(checkpoint.model)
    model.to(place).eval()
    return LoadedRun(folder, folder.config, model, checkpoint.step, place)
