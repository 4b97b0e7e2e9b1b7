"""What the commands of the documents find where they are run: small data, configurations and runs, by their names.

A page tells a story in which some things are the reader's own, or were made on another page. These are their doubles.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from meristem import Decoder, Plan, Sgt
from training.helpers import prepared, tiny_config, trained, write_labelled, write_texts

# The tracing of an ONNX graph takes seconds a layer.
ONE_LAYER: dict[str, Any] = {"model__layers": 1, "model__schedule": "uniform", "model__dims": []}


class Props:
    """Things that are made once, when they are first asked for, and copied to where they are needed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lent: set[Path] = set()
        # The first pattern that a name fits says what it is.
        self._makers: list[tuple[str, Callable[[Path], object]]] = [
            ("*.tsv.gz", self._packed_rows),
            ("*.tsv", write_labelled),
            ("*.csv", self._unlabelled),
            ("*.jsonl.zst", self._packed_lines),
            ("*.toml", self._configuration),
            ("tokenizer.json", self._tokenizer),
            ("copies", self._tasks),
            ("SmolLM2-135M", self._pretrained),
            ("*texts", write_texts),
            ("runs/sst2-data", self._labelled_data),
            ("runs/labelled-data", self._labelled_data),
            ("*data", self._data),
            ("exported/*", self._exported),
            ("runs/classifier", self._classifier),
            ("runs/*", self._run),
            ("RUN", self._run),
            ("*OTHER", self._run),
        ]

    def provide(self, name: str) -> None:
        """Put what has this name into the present folder, unless it is there or nobody knows what it is."""
        place = Path(name.partition("@")[0])
        if name and not place.exists():
            for pattern, make in self._makers:
                if fnmatchcase(place.as_posix(), pattern):
                    place.parent.mkdir(parents=True, exist_ok=True)
                    make(place)
                    self._lent.add(place.absolute())
                    return

    def take_back(self, name: str) -> None:
        """Make room for what a page makes itself, and was lent until then."""
        if (place := Path(name).absolute()) in self._lent:
            shutil.rmtree(place)
            self._lent.remove(place)

    def provide_names(self, names: dict[str, Any], code: str) -> None:
        """Give a block of Python what its page speaks of without showing it."""
        for name in VALUES:
            if re.search(rf"\b{name}\b", code):
                _value(name, names)

    @cached_property
    def library(self) -> list[Path]:
        """Files in place of those of Python's standard library."""
        return sorted(write_texts(self._root / "library").iterdir())

    @cached_property
    def texts(self) -> Path:
        """Prepared text."""
        return prepared(self._root / "corpus")

    @cached_property
    def rows(self) -> Path:
        """Prepared labelled rows."""
        from meristem.data import prepare_labelled

        folder = self._root / "rows"
        prepare_labelled([write_labelled(self._root / "rows.tsv")], folder, held_out=0.2)
        return folder

    @cached_property
    def run(self) -> Path:
        """A language model's run, with an average and several checkpoints."""
        return trained(self.texts, self._root / "run", train__average=0.9, checkpoint__every=2, **ONE_LAYER).path

    @cached_property
    def classifier(self) -> Path:
        return trained(self.rows, self._root / "classifier").path

    def _data(self, place: Path) -> None:
        shutil.copytree(self.texts, place)

    def _labelled_data(self, place: Path) -> None:
        shutil.copytree(self.rows, place)

    def _run(self, place: Path) -> None:
        shutil.copytree(self.run, place)

    def _classifier(self, place: Path) -> None:
        shutil.copytree(self.classifier, place)

    def _configuration(self, place: Path) -> None:
        if place.parent == Path():  # one in a folder is ours, and there
            place.write_text(tiny_config(self.texts, train__steps=1000).to_toml(), encoding="utf-8")

    def _exported(self, place: Path) -> None:
        from meristem import export_run

        export_run(self.run, place)

    def _packed_rows(self, place: Path) -> None:
        rows = write_labelled(place.with_suffix("")).read_bytes()
        # Held-out rows must be others than those that are trained on.
        place.write_bytes(gzip.compress(rows.replace(b" n", b" m") if place.name.startswith("dev") else rows))
        place.with_suffix("").unlink()

    def _unlabelled(self, place: Path) -> None:
        place.write_text("text\nlow w1 w2\nhigh w3\n", encoding="utf-8")

    def _packed_lines(self, place: Path) -> None:
        import zstandard

        lines = "".join(json.dumps({"text": f"The {n}th of many lines."}) + "\n" for n in range(40))
        place.write_bytes(zstandard.compress(lines.encode()))

    def _tokenizer(self, place: Path) -> None:
        from data.helpers import small_bpe

        small_bpe().save(place.parent)

    def _pretrained(self, place: Path) -> None:
        from pretrained.helpers import random_model, saved

        saved(random_model("Llama", max_position_embeddings=1024), place)

    def _tasks(self, place: Path) -> None:
        from evaluation.harness.helpers import blimp_parts, write_copies

        write_copies(place, blimp_parts())


Of = Callable[[str], Any]
VALUES: dict[str, Callable[[Of], Any]] = {
    "steps": lambda of: 5000,
    "plan": lambda of: Plan.uniform(layers=2, width=16, heads=4, vocabulary=23, context=32),
    "policy": lambda of: Sgt(total_steps=8, start=2, window=2),
    "model": lambda of: Decoder(of("policy").prepare(of("plan"))),
    "optimizer": lambda of: torch.optim.AdamW(of("model").parameters()),
    "tokens": lambda of: torch.randint(23, (2, 8)),
    "classes": lambda of: torch.tensor([0, 2]),
    "batches": lambda of: [(of("tokens"), of("tokens"))] * 2,
}


def _value(name: str, names: dict[str, Any]) -> Any:
    if name not in names:
        names[name] = VALUES[name](lambda other: _value(other, names))
    return names[name]
