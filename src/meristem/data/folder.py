"""Folders of prepared data: which kind one is, and how it comes into being as a whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meristem.data.labelled import KIND, LabelledData, LabelledIndex, verify_labelled
from meristem.data.shards import INDEX_FILE, Index, TokenData, verify_tokens
from meristem.errors import InputError


def open_data(folder: str | Path) -> TokenData | LabelledData:
    """The data of a folder, of either kind."""
    return LabelledData.open(folder) if _is_labelled(Path(folder)) else TokenData.open(folder)


def load_index(folder: str | Path) -> Index | LabelledIndex:
    """The index of a folder, of either kind."""
    return LabelledIndex.load(Path(folder)) if _is_labelled(Path(folder)) else Index.load(folder)


def verify(folder: str | Path) -> Index | LabelledIndex:
    """Read all of a folder and compare it with its index; what differs is an error that names it."""
    return verify_labelled(Path(folder)) if _is_labelled(Path(folder)) else verify_tokens(Path(folder))


def fingerprint(files: Sequence[Path], settings: list[Any]) -> str:
    """A hash of the input files, by name, size and time, and of the settings."""
    stats = [(file.resolve().as_posix(), file.stat()) for file in files]
    content = [sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats), settings]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def already_made(out: Path, wanted: str, overwrite: bool) -> bool:
    """Whether `out` holds what the fingerprint `wanted` stands for; if not, it may be written."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / INDEX_FILE).is_file():
        raise InputError("out", str(out), "exists and is not prepared data; choose another folder")
    if overwrite:
        load_index(out)  # never replace a folder that something else made
        return False
    if open_data(out).index.fingerprint != wanted:
        raise InputError(
            "out",
            str(out),
            "holds data from other files or settings; use overwrite (--overwrite), or choose another folder",
        )
    return True


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` when all has gone well, and leaves nothing behind when not."""
    staging = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.partial")
    try:
        staging.mkdir(parents=True)
        yield staging
        _put_in_place(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, out: Path) -> None:
    """Give the finished folder its name, moving an older one out of the way first."""
    if (out / INDEX_FILE).exists():
        old = staging.with_suffix(".old")
        out.rename(old)
        staging.rename(out)
        shutil.rmtree(old)
    else:
        staging.rename(out)


def _is_labelled(folder: Path) -> bool:
    """Whether the index says so; what is wrong with an index is said by those who read it."""
    try:
        content = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("kind") == KIND
