"""Labelled data on disk: the index, the memory-mapped rows of ids, and their classes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meristem.data.fields import Fields, agree, wrong
from meristem.data.labelled.pieces import RESERVED
from meristem.data.labelled.recipe import RECIPE_FILE, Recipe
from meristem.data.text.shards import INDEX_FILE, SPLITS, STORED_TYPES, SplitName, mapped, read_index, write_index
from meristem.data.tokenizer import token_dtype
from meristem.errors import InputError, RunError
from meristem.limits import MOST_CONTEXT, MOST_TOKEN_IDS
from meristem.plan import PADDING

FORMAT = "meristem-labelled/1"
KIND = "labelled"
TYPES = {**STORED_TYPES, "uint64": "<u8"}
PARTS = {"tokens": tuple(STORED_TYPES), "ends": ("uint64",), "labels": ("uint32",)}  # files of a split, and their types


@dataclass(frozen=True)
class Stored:
    """One file of little-endian numbers."""

    file: str
    dtype: str
    count: int
    sha256: str


@dataclass(frozen=True)
class LabelledSplit:
    """Rows of one split: all their ids one after the other, where each row ends, and the class of each."""

    rows: int
    tokens: int
    class_rows: tuple[int, ...]
    files: Mapping[str, Stored]


@dataclass(frozen=True)
class Findings:
    """What the preparation met on its way; nothing is lost without being counted here.

    `duplicates` are rows of the training split whose text and label occurred before, `conflicts` are its texts that
    have more than one label, `repeated` are held-out rows whose text is in the training split; these are removed.
    """

    rows: int  # read, without the bad ones
    bad: int
    duplicates: int
    duplicates_dropped: bool
    conflicts: int
    repeated: int
    cut: int  # rows longer than the length
    unknown: float  # share of the held-out pieces that the vocabulary does not have
    small_classes: Mapping[str, int] = field(default_factory=dict)  # rows of classes with too few training rows
    untrained_classes: Mapping[str, int] = field(default_factory=dict)  # held-out rows of classes without any
    other_splits: Mapping[str, int] = field(default_factory=dict)  # rows that belong to neither split


@dataclass(frozen=True)
class LabelledIndex:
    """What a folder of labelled data holds. `fingerprint` stands for the files and settings it was made from."""

    classes: tuple[str, ...]
    ids: int
    length: int
    recipe: str  # its digest
    train: LabelledSplit
    held_out: LabelledSplit
    findings: Findings
    fingerprint: str
    source: str

    def split(self, name: SplitName) -> LabelledSplit:
        if name not in SPLITS:
            raise InputError("split", name, f"must be one of {list(SPLITS)}")
        return self.train if name == "train" else self.held_out

    @property
    def digest(self) -> str:
        """A hash of rows, classes and recipe: equal for equal data, wherever and whenever it was made."""
        files = [split.files[name].sha256 for split in (self.train, self.held_out) for name in sorted(split.files)]
        return hashlib.sha256("\n".join([self.recipe, *files]).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write `index.json` into a folder."""
        content = asdict(self)
        splits = {name: content.pop(name) for name in SPLITS}
        write_index(folder, {"format": FORMAT, "kind": KIND, **content, "splits": splits})

    @classmethod
    def load(cls, folder: Path) -> LabelledIndex:
        """Read the `index.json` of a folder."""
        path = folder / INDEX_FILE
        content = read_index(path)
        try:
            return _index_from(Fields(content))
        except ValueError as error:
            raise RunError(f"{path}: not an index of labelled data ({error})") from error


class LabelledRows:
    """The rows of one split: `tokens` has the ids of all, row after row, which end at `ends` (rows,).

    `labels` (rows,) number the classes, `lengths` (rows,) count the ids.
    """

    def __init__(self, tokens: NDArray[Any], ends: NDArray[Any], labels: NDArray[Any]) -> None:
        self.tokens = tokens
        self.ends = ends.astype(np.int64)
        self.labels = labels.astype(np.int64)
        self.lengths = np.diff(self.ends, prepend=0)

    @classmethod
    def of(cls, rows: Sequence[NDArray[np.int64]], labels: Sequence[int]) -> LabelledRows:
        """Rows that are at hand."""
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, np.int64), *rows]), ends, np.array(labels, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def padded(self, rows: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """The ids of some rows, (rows, length): cut off, or filled up with padding on the right."""
        result = np.full((len(rows), length), PADDING, dtype=np.int64)
        for target, row in zip(result, rows.tolist(), strict=True):
            size = min(int(self.lengths[row]), length)
            start = int(self.ends[row] - self.lengths[row])
            target[:size] = self.tokens[start : start + size]
        return result


class LabelledData:
    """A folder of labelled data, open for reading."""

    def __init__(self, folder: Path, index: LabelledIndex, recipe: Recipe, splits: dict[SplitName, LabelledRows]):
        self.folder = folder
        self.index = index
        self.recipe = recipe
        self._splits = splits

    @classmethod
    def open(cls, folder: str | Path) -> LabelledData:
        """Map the files of a folder; a missing file or one of the wrong size is an error that names it.

        What the files hold is not looked at: `meristem.data.open_data` does that too.
        """
        folder = Path(folder)
        index = LabelledIndex.load(folder)
        recipe = Recipe.load(folder)
        if recipe.digest != index.recipe:
            raise wrong(folder / RECIPE_FILE, "is not the recipe that made this data")
        if (recipe.ids, recipe.classes, recipe.length) != (index.ids, index.classes, index.length):
            raise wrong(folder / INDEX_FILE, f"differs from {RECIPE_FILE} in ids, classes or length")
        splits = {name: _open_split(folder, index.split(name)) for name in SPLITS}
        return cls(folder, index, recipe, splits)

    def split(self, name: SplitName) -> LabelledRows:
        if name not in self._splits:
            raise InputError("split", name, f"must be one of {list(SPLITS)}")
        return self._splits[name]


def write_split(folder: Path, name: SplitName, rows: LabelledRows, recipe: Recipe) -> LabelledSplit:
    """Write the rows of a split and describe them."""
    ids = np.dtype(token_dtype(recipe.ids)).name
    arrays = {"tokens": (rows.tokens, ids), "ends": (rows.ends, "uint64"), "labels": (rows.labels, "uint32")}
    files = {
        part: _write(folder / f"{name.replace('_', '-')}-{part}.bin", array, dtype)
        for part, (array, dtype) in arrays.items()
    }
    counts = np.bincount(rows.labels, minlength=len(recipe.classes))
    return LabelledSplit(len(rows), len(rows.tokens), tuple(counts.tolist()), files)


def _open_split(folder: Path, split: LabelledSplit) -> LabelledRows:
    arrays = {
        part: mapped(folder / stored.file, stored.count, np.dtype(TYPES[stored.dtype]))
        for part, stored in split.files.items()
    }
    return LabelledRows(arrays["tokens"], arrays["ends"], arrays["labels"])


def _write(path: Path, array: NDArray[Any], dtype: str) -> Stored:
    content = array.astype(TYPES[dtype]).tobytes()
    path.write_bytes(content)
    return Stored(path.name, dtype, len(array), hashlib.sha256(content).hexdigest())


def _index_from(content: Fields) -> LabelledIndex:
    content.text("format", [FORMAT])
    splits = content.object("splits")
    classes = content.texts("classes")
    agree("the number of classes", len(classes), len(set(classes)), "that of their names is")
    return LabelledIndex(
        classes=classes,
        ids=content.integer("ids", RESERVED, RESERVED + MOST_TOKEN_IDS),
        length=content.integer("length", 1, MOST_CONTEXT),
        recipe=content.sha256("recipe"),
        train=_split_from(splits.object("train"), len(classes)),
        held_out=_split_from(splits.object("held_out"), len(classes)),
        findings=_findings_from(content.object("findings")),
        fingerprint=content.text("fingerprint"),
        source=content.text("source"),
    )


def _split_from(content: Fields, classes: int) -> LabelledSplit:
    parts = content.object("files")
    files = {part: _stored_from(parts.object(part), types) for part, types in PARTS.items()}
    split = LabelledSplit(content.integer("rows"), content.integer("tokens"), content.integers("class_rows"), files)
    agree("tokens", split.tokens, files["tokens"].count, "their file has")
    agree("rows", split.rows, files["labels"].count, "the file of labels has")
    agree("rows", split.rows, files["ends"].count, "the file of row ends has")
    agree("rows", split.rows, sum(split.class_rows), "the classes have")
    agree("the number of class_rows", len(split.class_rows), classes, "that of classes is")
    return split


def _stored_from(content: Fields, types: Sequence[str]) -> Stored:
    return Stored(
        content.file_name("file"), content.text("dtype", types), content.integer("count"), content.sha256("sha256")
    )


def _findings_from(content: Fields) -> Findings:
    return Findings(
        rows=content.integer("rows"),
        bad=content.integer("bad"),
        duplicates=content.integer("duplicates"),
        duplicates_dropped=content.flag("duplicates_dropped"),
        conflicts=content.integer("conflicts"),
        repeated=content.integer("repeated"),
        cut=content.integer("cut"),
        unknown=content.number("unknown", 0, 1),
        small_classes=content.counts("small_classes"),
        untrained_classes=content.counts("untrained_classes"),
        other_splits=content.counts("other_splits"),
    )
