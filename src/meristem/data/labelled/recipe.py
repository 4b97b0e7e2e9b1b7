"""The recipe of labelled data: all that is needed to make ids and class numbers of another file in the same way.

It lies in the data folder and, as a copy, in the folder of every run on that data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meristem.data.fields import Fields
from meristem.data.find_tokenizer import TOKENIZER_FILE
from meristem.data.labelled.pieces import KINDS, RESERVED, UNKNOWN, Cut
from meristem.data.labelled.rows import Columns
from meristem.errors import RunError
from meristem.files import read_json, read_text
from meristem.limits import LARGEST_COUNT, MOST_CONTEXT

FORMAT = "meristem-recipe/1"
RECIPE_FILE = "recipe.json"


@dataclass(frozen=True)
class Recipe:
    """Where a row's parts stand, how its text is cut, which id a piece has, and which class a label is.

    Ids 0 and 1 are padding and unknown pieces; `vocabulary` has the others in order. Of a text, `length` ids are kept.
    """

    columns: Columns
    cut: Cut
    vocabulary: tuple[str, ...]
    classes: tuple[str, ...]
    length: int

    @property
    def ids(self) -> int:
        """The number of ids, the reserved ones among them."""
        return RESERVED + len(self.vocabulary)

    @cached_property
    def class_numbers(self) -> dict[str, int]:
        return {label: number for number, label in enumerate(self.classes)}

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids of a text, shape (at most length,)."""
        return self.encode_pieces(self.cut.pieces(text))

    def encode_pieces(self, pieces: Sequence[str]) -> NDArray[np.int64]:
        return np.array([self._piece_ids.get(piece, UNKNOWN) for piece in pieces[: self.length]], dtype=np.int64)

    @cached_property
    def _piece_ids(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.vocabulary, start=RESERVED)}

    @property
    def digest(self) -> str:
        """A hash of all that ids and class numbers depend on."""
        content = {**self._content(), "columns": None, "tokenizer": self.cut.tokenizer}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        cut = {"kind": self.cut.kind, "k": self.cut.k, "stride": self.cut.stride}
        vocabulary = None if self.cut.tokenizer is not None else list(self.vocabulary)  # the tokenizer knows it
        return {
            "format": FORMAT, "columns": asdict(self.columns), "cut": cut, "length": self.length,
            "classes": list(self.classes), "vocabulary": vocabulary,
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write `recipe.json`, and a tokenizer beside it if there is one."""
        (folder / RECIPE_FILE).write_text(json.dumps(self._content(), indent=1) + "\n", encoding="utf-8")
        if self.cut.tokenizer is not None:
            (folder / TOKENIZER_FILE).write_text(self.cut.tokenizer, encoding="utf-8", newline="")

    @classmethod
    def load(cls, folder: Path) -> Recipe:
        """Read the recipe of a data or run folder."""
        path = folder / RECIPE_FILE
        content = read_json(path)
        try:
            return _recipe_from(Fields(content), folder)
        except ValueError as error:
            raise RunError(f"{path}: not a recipe of labelled data ({error})") from error


def _recipe_from(content: Fields, folder: Path) -> Recipe:
    content.text("format", [FORMAT])
    cut = _cut_from(content.object("cut"), folder)
    vocabulary = cut.fixed_vocabulary
    vocabulary = content.texts("vocabulary") if vocabulary is None else vocabulary
    classes, length = content.texts("classes"), content.integer("length", 1, MOST_CONTEXT)
    return Recipe(_columns_from(content.object("columns")), cut, vocabulary, classes, length)


def _cut_from(content: Fields, folder: Path) -> Cut:
    kind = content.text("kind", KINDS)
    tokenizer = read_text(folder / TOKENIZER_FILE) if kind == "tokenizer" else None
    return Cut(kind, content.integer("k", 1), content.integer("stride", 1), tokenizer)


def _columns_from(content: Fields) -> Columns:
    return Columns(
        content.text_or_none("text"),
        content.text("label"),
        content.text_or_none("split"),
        content.text("quote"),
        content.integer("field", -LARGEST_COUNT),
        content.text_or_none("table"),
        content.text("table_id"),
    )
