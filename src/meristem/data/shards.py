"""Prepared data on disk: the index, the memory-mapped token shards, and their check."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meristem.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from meristem.errors import InputError, RunError

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
        content = {"format": FORMAT, **content, "text_bytes": self.text_bytes, "splits": splits}
        (Path(folder) / INDEX_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Index:
        """Read the `index.json` of a folder."""
        path = Path(folder) / INDEX_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RunError(f"{path}: cannot be read, so this is no prepared data ({error.strerror})") from error
        except ValueError as error:
            raise RunError(f"{path}: not a JSON file ({error})") from error
        try:
            return _index_from(content)
        except (KeyError, TypeError, ValueError) as error:
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
        """Map the shards of a folder; a missing file or one of the wrong size is an error that names it."""
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


def verify_tokens(folder: Path) -> Index:
    """Read all of a folder of tokens and compare it with its index; what differs is an error that names it."""
    index = TokenData.open(folder).index
    for name in SPLITS:
        for shard in index.split(name).shards:
            with (folder / shard.file).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                raise RunError(f"{folder / shard.file}: does not have the sha256 in the index; prepare it again")
    if load_tokenizer(folder).digest != index.tokenizer.digest:
        raise RunError(f"{folder / TOKENIZER_FILE}: is not the tokenizer that made this data; prepare it again")
    return index


def mapped(path: Path, count: int, stored: np.dtype[Any]) -> NDArray[Any]:
    """The `count` numbers of a file; if it has another size, an error that names it."""
    expected = count * stored.itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error
    if size != expected:
        raise RunError(f"{path}: has {size} bytes, the index says {expected}; prepare it again")
    return np.memmap(path, dtype=stored, mode="r") if count else np.empty(0, stored)  # nothing cannot be mapped


def _index_from(content: Any) -> Index:
    if content["format"] != FORMAT:
        raise ValueError(f"format is {content['format']!r}, expected {FORMAT!r}")
    if content["dtype"] not in STORED_TYPES:
        raise ValueError(f"dtype is {content['dtype']!r}, expected one of {list(STORED_TYPES)}")
    return Index(
        tokenizer=TokenizerFacts(**content["tokenizer"]),
        dtype=content["dtype"],
        train=_split_from(content["splits"]["train"]),
        held_out=_split_from(content["splits"]["held_out"]),
        skipped=content["skipped"],
        fingerprint=content["fingerprint"],
        source=content["source"],
    )


def _split_from(content: dict[str, Any]) -> Split:
    shards = tuple(Shard(**shard) for shard in content["shards"])
    for shard in shards:
        if Path(shard.file).name != shard.file:
            raise ValueError(f"shard {shard.file!r} is not a plain file name")
    return Split(content["documents"], content["tokens"], content["text_bytes"], shards)
