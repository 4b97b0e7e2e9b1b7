"""Where attacks happen: data, configurations and undisturbed runs, made once; and a place that is cleared."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from data.helpers import small_bpe
from training.helpers import prepared, prepared_labelled, tiny_config

from . import forks
from .operations import FileOperations
from .runs import HEADS, TRUNK, Kind, answer, command, contents, outcome


class World:
    """A folder with everything in it that attacks need, made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = root / "place"  # of the attempt
        self.reference = cache(self._reference)
        self.halfway = cache(self._halfway)
        self.preparation = cache(self._preparation)
        self.answer = cache(self._answer)
        forks.import_everything(self._warm_up())

    def cleared(self) -> Path:
        """The empty place of a new attempt."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        return self.place

    @cached_property
    def texts(self) -> Path:
        return prepared(self.root / "texts", 40)

    @cached_property
    def rows(self) -> Path:
        folder = self.root / "rows" / "data"
        folder.parent.mkdir()
        prepared_labelled(folder, 60)
        return folder

    @cached_property
    def tokenizer(self) -> str:
        """A small tokenizer of Hugging Face, as JSON; made in a child, for its threads would end the forking."""
        file = self.root / "tokenizer.json"
        if not os.fork():
            small_bpe().save(self.root)
            os._exit(0)
        os.wait()
        return file.read_text(encoding="utf-8")

    def data(self, kind: Kind) -> Path:
        return self.rows if kind.data == "rows" else self.texts

    def config(self, kind: Kind) -> Path:
        path = self.root / f"{kind.name}.toml"
        if not path.is_file():
            settings = kind.all_settings
            if kind.branch_step is not None:
                settings["train__branch_from"] = f"{self._trunk(kind)}@{kind.branch_step}"
            path.write_text(tiny_config(self.data(kind), **settings).to_toml(), encoding="utf-8")
        return path

    def _trunk(self, kind: Kind) -> Path:
        """The run that runs of a kind branch off; not in the place of attempts, where something may be already."""
        config, out = self.root / f"{kind.name}-trunk.toml", self.root / f"{kind.name}-trunk"
        config.write_text(tiny_config(self.data(kind), **{**kind.all_settings, **TRUNK}).to_toml(), encoding="utf-8")
        ended = forks.run("train", config, "--out", out)
        if ended.code != 0:
            raise RuntimeError(f"the trunk of the kind {kind.name} failed\n{ended}")
        return out

    def train(self, kind: Kind, out: Path) -> list[str | Path]:
        """The command that begins a run or goes on with it."""
        return ["train", self.config(kind), "--out", out, "--continue"]

    @contextmanager
    def restored(self, folder: Path) -> Iterator[None]:
        """Put a folder back as it was at the beginning, times and all."""
        kept = folder.with_name(f"{folder.name}.kept")
        if not kept.exists():
            shutil.copytree(folder, kept)
        try:
            yield
        finally:
            shutil.rmtree(folder)
            shutil.copytree(kept, folder)

    def _reference(self, kind: Kind) -> Reference:
        out, operations = self.cleared() / "run", FileOperations(self.place)
        ended = forks.run(*self.train(kind, out), before=operations.install)
        if ended.code != 0:
            raise RuntimeError(f"an undisturbed run of the kind {kind.name} failed\n{ended}")
        kept = self.root / f"{kind.name}-reference"
        self._move(out, kept)
        return Reference(kept, operations.count, outcome(kept))

    def _halfway(self, kind: Kind, stopped: bool) -> Path:
        """A run of which half is done: stopped cleanly, or killed between two checkpoints."""
        half = self.reference(kind).operations // 2
        number = signal.SIGTERM if stopped else signal.SIGKILL

        def end(count: int, name: str, path: Path) -> None:
            if count == half:
                os.kill(os.getpid(), number)

        out = self.cleared() / "run"
        ended = forks.run(*self.train(kind, out), before=FileOperations(self.place, end).install)
        if ended.code not in (128 + number, -number):
            raise RuntimeError(f"a run of the kind {kind.name} could not be stopped halfway\n{ended}")
        kept = self.root / f"{kind.name}-{'stopped' if stopped else 'killed'}"
        self._move(out, kept)
        return kept

    def _preparation(self, labelled: bool) -> tuple[list[str | Path], int, dict[str, bytes]]:
        """A command that prepares data, how many file operations it takes, and what it makes."""
        rows, texts = self.rows.with_suffix(".tsv"), self.texts.parent / "texts"
        source: list[str | Path] = ["prepare-labelled", rows] if labelled else ["prepare", texts]
        command = ["data", *source, "--out", self.cleared() / "data", "--held-out", "0.3"]
        operations = FileOperations(self.place)
        ended = forks.run(*command, before=operations.install)
        if ended.code != 0:
            raise RuntimeError(f"an undisturbed preparation failed\n{ended}")
        made = contents(self.place / "data")
        self.cleared()
        return command, operations.count, made

    def _move(self, run: Path, kept: Path) -> None:
        """Keep what was made, and leave the place empty."""
        shutil.copytree(run, kept)
        self.cleared()

    def begin(self, kind: Kind, verb: str) -> list[str | Path]:
        """A command that uses the data of a kind of run without there being a run."""
        return ["data", "verify", self.data(kind)] if verb == "verify" else self.train(kind, self.place / "run")

    def _answer(self, kind: Kind, stopped: bool, verb: str) -> dict[str, Any]:
        """What an undisturbed command makes of a run of which half is done, or of the data alone."""
        if verb in ("resume", "train"):
            return self.reference(kind).outcome
        run = self.placed(self.halfway(kind, stopped))
        ended = forks.run(*(self.begin(kind, verb) if verb == "verify" else command(verb, run)))
        if ended.code != 0:
            raise RuntimeError(f"an undisturbed command failed\n{ended}")
        found = answer(verb, run, ended.out)
        self.cleared()
        return found

    def placed(self, run: Path) -> Path:
        """A copy of a run in the place of attempts, where all runs were made."""
        return Path(shutil.copytree(run, self.cleared() / "run"))

    def _warm_up(self) -> list[list[str | Path]]:
        """Commands that have imported everything which is imported late."""
        place = self.cleared()
        kind = Kind("warm", settings={"growth__observe": True, "train__steps": 1})
        labelled = Kind("warm-rows", "rows", {**HEADS, "incrt__warm_up": 1})
        return [
            ["plan"],
            self.train(kind, place / "run"),
            ["eval", place / "run"],
            ["generate", place / "run", "--prompt", "a", "--tokens", "2"],
            ["report", place / "run"],
            self.train(labelled, place / "rows"),
            ["eval", place / "rows"],
            ["data", "prepare", self.texts.parent / "texts", "--out", place / "data"],
            ["data", "prepare-labelled", self.rows.with_suffix(".tsv"), "--out", place / "labelled"],
        ]


class Reference:
    """An undisturbed run: its folder, how many file operations it took, and its outcome."""

    def __init__(self, folder: Path, operations: int, outcome: dict[str, Any]) -> None:
        self.folder, self.operations, self.outcome = folder, operations, outcome
        self.contents = contents(folder)
