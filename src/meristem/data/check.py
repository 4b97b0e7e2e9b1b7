"""Whether the files of prepared data hold what their index says: read once per folder, and remembered there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meristem.data.fields import wrong
from meristem.data.find_tokenizer import CONFIG_FILE, TOKENIZER_FILE
from meristem.data.labelled.labelled_data import TYPES, LabelledData, LabelledSplit
from meristem.data.labelled.recipe import RECIPE_FILE
from meristem.data.text.shards import INDEX_FILE, SPLITS, STORED_TYPES, TokenData, index_digest
from meristem.data.tokenizer import load_tokenizer
from meristem.errors import InputError, RunError
from meristem.files import read_json, sha256_of, unreadable, write_atomically

CHECKED_FILE = "checked.json"
FORMAT = "meristem-checked/1"
BLOCK = 1 << 22  # bytes read at a time

Numbers = NDArray[Any]


def check_once(data: TokenData | LabelledData, report: Callable[[str], None] | None = None) -> None:
    """`check_all`, unless that has been done before and no file has changed since.

    `report` is told when there is something to read, which may take a while.
    """
    state = _state(data)
    if _remembered(data.folder) == state:
        return
    if report is not None:
        size = sum(size for size, *_ in state["files"].values())
        report(f"checking {data.folder} ({size / 1e6:,.1f} MB) against its index")
    check_all(data)
    with suppress(OSError, RunError):  # a folder that cannot be written is checked every time
        write_atomically(data.folder / CHECKED_FILE, json.dumps(state, indent=1) + "\n")


def check_all(data: TokenData | LabelledData) -> None:
    """Read all files and compare them with the index; what differs is an error that names it."""
    if isinstance(data, TokenData):
        _check_tokens(data)
    else:
        for name in SPLITS:
            _check_split(data, data.index.split(name))
    path = data.folder / INDEX_FILE
    content = read_json(path)
    if content.get("digest", index_digest(content)) != index_digest(content):  # older ones have none
        raise wrong(path, "is not what was written")


def _state(data: TokenData | LabelledData) -> dict[str, Any]:
    """What changes if any file does: size and times of each, and the content of the index."""
    files = {}
    for name in [INDEX_FILE, TOKENIZER_FILE, CONFIG_FILE, RECIPE_FILE, *_stored_names(data)]:
        try:
            found = (data.folder / name).stat()
        except FileNotFoundError:
            continue  # not all folders have all of these; the files of the index have been opened
        except OSError as error:
            raise unreadable(data.folder / name, error) from error
        files[name] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return {"format": FORMAT, "index": sha256_of(data.folder / INDEX_FILE), "files": files}


def _stored_names(data: TokenData | LabelledData) -> list[str]:
    if isinstance(data, TokenData):
        return [shard.file for name in SPLITS for shard in data.index.split(name).shards]
    return [stored.file for name in SPLITS for stored in data.index.split(name).files.values()]


def _remembered(folder: Path) -> dict[str, Any] | None:
    try:
        return read_json(folder / CHECKED_FILE)
    except RunError:
        return None


# --- the content of the files ----------------------------------------------------------------------------------------


def _check_tokens(data: TokenData) -> None:
    facts, stored = data.index.tokenizer, np.dtype(STORED_TYPES[data.index.dtype])
    for name in SPLITS:
        for shard in data.index.split(name).shards:
            path = data.folder / shard.file
            _check_ids(path, _blocks(path, stored, shard.sha256), facts.vocabulary)
    path = data.folder / TOKENIZER_FILE
    try:
        tokenizer = load_tokenizer(data.folder)
    except (InputError, RunError) as error:
        raise wrong(path, f"cannot be read ({error})") from error
    if tokenizer.digest != facts.digest:
        raise wrong(path, "is not the tokenizer that made this data")
    if (tokenizer.kind, tokenizer.vocabulary, tokenizer.end_of_text) != (
        facts.kind, facts.vocabulary, facts.end_of_text,
    ):  # fmt: skip
        raise wrong(data.folder / INDEX_FILE, f"differs from {TOKENIZER_FILE} in vocabulary or end_of_text")


def _check_split(data: LabelledData, split: LabelledSplit) -> None:
    classes = len(data.index.classes)
    paths = {part: data.folder / stored.file for part, stored in split.files.items()}
    parts = {
        part: _blocks(paths[part], np.dtype(TYPES[stored.dtype]), stored.sha256) for part, stored in split.files.items()
    }
    _check_ids(paths["tokens"], parts["tokens"], data.index.ids)
    counts = np.zeros(classes + 1, dtype=np.int64)  # the last one is of labels that no class has
    for labels in parts["labels"]:
        counts += np.bincount(np.minimum(labels, classes), minlength=classes + 1)
    if counts[classes]:
        raise wrong(paths["labels"], f"holds labels above {classes - 1:,}, but there are {classes:,} classes")
    if tuple(counts[:classes].tolist()) != split.class_rows:
        raise wrong(paths["labels"], "does not have as many rows of each class as the index says")
    rising, last = True, 0
    for ends in parts["ends"]:
        rising = rising and ends[0] > last and bool((ends[1:] > ends[:-1]).all())
        last = int(ends[-1])
    if not rising:
        raise wrong(paths["ends"], "has rows that end before they begin, or are empty")
    if last != split.tokens:
        raise wrong(paths["ends"], f"ends the last row at {last:,}, but there are {split.tokens:,} tokens")


def _check_ids(path: Path, blocks: Iterator[Numbers], limit: int) -> None:
    highest = max((int(ids.max()) for ids in blocks), default=0)
    if highest >= limit:
        raise wrong(path, f"holds id {highest:,}, but there are {limit:,} token ids")


def _blocks(path: Path, stored: np.dtype[Any], sha256: str) -> Iterator[Numbers]:
    """The numbers of a file, some at a time; at its end an error if the file is not the one that was made.

    So what the numbers say counts only when all have been read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                if count := len(block) // stored.itemsize:
                    yield np.frombuffer(block, stored, count)
    except OSError as error:
        raise unreadable(path, error) from error
    if digest.hexdigest() != sha256:
        raise wrong(path, "does not have the sha256 in the index")
