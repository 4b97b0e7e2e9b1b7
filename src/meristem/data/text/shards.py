"""Prepared data on disk: the index and the memory-mapped token shards."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meristem.data.fields import Fields, agree, wrong
from meristem.data.tokenizer import TOKENIZER_KINDS
from meristem.errors import InputError, RunError
from meristem.files import read_json, unreadable
from meristem.limits import MOST_TOKEN_IDS

FORMAT = "meristem-data/1"
INDEX_FILE = "index.json"
STORED_TYPES = {"uint16": "<u2", "uint32": "<u4"}

SplitName = Literal["train", "held_out"]
SPLITS: tuple[SplitName, ...] = ("train", "held_out")


@dataclass(frozen=True)
class Shard:
    """One file of raw little-endian ids."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """A stream of documents, each followed by end-of-text; `text_bytes` counts their UTF-8."""

    documents: int
    tokens: int
    text_bytes: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class TokenizerFacts:
    """What the ids mean; the tokenizer itself lies beside the index."""

    kind: str
    digest: str
    vocabulary: int
    end_of_text: int


@dataclass(frozen=True)
class Index:
    """What a data folder holds. `fingerprint` stands for the input files and settings it was made from."""

    tokenizer: TokenizerFacts
    dtype: str
    train: Split
    held_out: Split
    skipped: int
    fingerprint: str
    source: str

    def split(self, name: SplitName) -> Split:
        if name not in SPLITS:
            raise InputError("split", name, f"must be one of {list(SPLITS)}")
        return self.train if name == "train" else self.held_out

    @property
    def text_bytes(self) -> int:
        return self.train.text_bytes + self.held_out.text_bytes

    @property
    def digest(self) -> str:
        """A hash of the tokens themselves: equal for equal data, wherever and whenever it was made."""
        parts = [
            self.tokenizer.digest,
            *(shard.sha256 for shard in (*self.train.shards, *self.held_out.shards)),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write `index.json` into a folder."""
        content = asdict(self)
        splits = {name: content.pop(name) for name in SPLITS}
        write_index(Path(folder), {"format": FORMAT, **content, "text_bytes": self.text_bytes, "splits": splits})

    @classmethod
    def load(cls, folder: str | Path) -> Index:
        """Read the `index.json` of a folder."""
        path = Path(folder) / INDEX_FILE
        content = read_index(path)
        try:
            return _index_from(Fields(content))
        except ValueError as error:
            raise RunError(f"{path}: not an index of prepared data ({error})") from error


class TokenStream:
    """The tokens of one split, in order, as if all shards were one array."""

    def __init__(self, shards: list[NDArray[Any]]) -> None:
        self._shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._shards else 0

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        """Tokens start to start + length, shape (length,)."""
        return self.windows(np.array([start]), length).reshape(length)

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """One row of `length` tokens from each start, shape (starts, length)."""
        if length < 0 or (len(starts) and not 0 <= starts.min() <= starts.max() <= len(self) - length):
            raise InputError("starts", starts, f"must leave windows of {length} inside {len(self)} tokens")
        rows = np.empty((len(starts), length), dtype=np.int64)
        first_shards = np.searchsorted(self._ends, starts, side="right")
        for row, start, first in zip(rows, starts.tolist(), first_shards.tolist(), strict=True):
            filled, shard = 0, first
            while filled < length:
                here = self._shards[shard]
                offset = start + filled - (int(self._ends[shard]) - len(here))
                piece = here[offset : offset + length - filled]
                row[filled : filled + len(piece)] = piece
                filled, shard = filled + len(piece), shard + 1
        return rows


class TokenData:
    """A prepared folder, open for reading."""

    def __init__(self, folder: Path, index: Index, streams: dict[SplitName, TokenStream]) -> None:
        self.folder = folder
        self.index = index
        self._streams = streams

    @classmethod
    def open(cls, folder: str | Path) -> TokenData:
        """Map the shards of a folder; a missing file or one of the wrong size is an error that names it.

        What the files hold is not looked at: `meristem.data.open_data` does that too.
        """
        folder = Path(folder)
        index = Index.load(folder)
        stored = np.dtype(STORED_TYPES[index.dtype])
        streams = {
            name: TokenStream([mapped(folder / shard.file, shard.tokens, stored) for shard in index.split(name).shards])
            for name in SPLITS
        }
        return cls(folder, index, streams)

    def split(self, name: SplitName) -> TokenStream:
        if name not in self._streams:
            raise InputError("split", name, f"must be one of {list(SPLITS)}")
        return self._streams[name]


def write_index(folder: Path, content: dict[str, Any]) -> None:
    """Write `index.json`, with a digest of its own content."""
    content = {**content, "digest": index_digest(content)}
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def index_digest(content: dict[str, Any]) -> str:
    """A hash of all that an index says, but for this hash."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_index(path: Path) -> dict[str, Any]:
    """What an `index.json` says, of either kind of data."""
    if not os.path.exists(path):  # that of Path raises where a folder must not be looked into
        raise RunError(f"{path}: cannot be read, so this is no prepared data (there is no such file)")
    return read_json(path)


def mapped(path: Path, count: int, stored: np.dtype[Any]) -> NDArray[Any]:
    """The `count` numbers of a file; if it has another size, an error that names it."""
    expected = count * stored.itemsize
    try:
        found = path.stat()
        if not S_ISREG(found.st_mode):
            raise wrong(path, "is not a regular file")
        if found.st_size != expected:
            raise wrong(path, f"has {found.st_size} bytes, the index says {expected}")
        return np.memmap(path, dtype=stored, mode="r") if count else np.empty(0, stored)  # nothing cannot be mapped
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _index_from(content: Fields) -> Index:
    content.text("format", [FORMAT])
    facts, splits = content.object("tokenizer"), content.object("splits")
    kind, digest = facts.text("kind", TOKENIZER_KINDS), facts.sha256("digest")
    vocabulary = facts.integer("vocabulary", 1, MOST_TOKEN_IDS)
    index = Index(
        tokenizer=TokenizerFacts(kind, digest, vocabulary, facts.integer("end_of_text", 0, vocabulary - 1)),
        dtype=content.text("dtype", list(STORED_TYPES)),
        train=_split_from(splits.object("train")),
        held_out=_split_from(splits.object("held_out")),
        skipped=content.integer("skipped"),
        fingerprint=content.text("fingerprint"),
        source=content.text("source"),
    )
    agree("text_bytes", content.integer("text_bytes"), index.text_bytes, "its splits have")
    names = [shard.file for name in SPLITS for shard in index.split(name).shards]
    agree("the number of shards", len(names), len(set(names)), "that of their files is")
    return index


def _split_from(content: Fields) -> Split:
    shards = tuple(
        Shard(shard.file_name("file"), shard.integer("tokens"), shard.sha256("sha256"))
        for shard in content.objects("shards")
    )
    split = Split(content.integer("documents"), content.integer("tokens"), content.integer("text_bytes"), shards)
    agree("tokens", split.tokens, sum(shard.tokens for shard in shards), "the shards have")
    return split
