"""Folders of prepared data: which kind one is, opening and checking it, and whether one may be written."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meristem.data.check import CHECKED_FILE, check_all, check_once
from meristem.data.find_tokenizer import CONFIG_FILE, TOKENIZER_FILE
from meristem.data.labelled.labelled_data import KIND, PARTS, LabelledData, LabelledIndex
from meristem.data.labelled.recipe import RECIPE_FILE
from meristem.data.text.shards import INDEX_FILE, Index, TokenData
from meristem.errors import InputError, Remedy, RunError, shortened
from meristem.files import read_json, recover
from meristem.wording import listed

_NAMED = "|".join(map(re.escape, (INDEX_FILE, TOKENIZER_FILE, CONFIG_FILE, RECIPE_FILE, CHECKED_FILE)))
_OWN = re.compile(rf"{_NAMED}|(train|held-out)-(\d+|{'|'.join(PARTS)})\.bin|\.{re.escape(CHECKED_FILE)}\..*\.partial")


def open_data(
    folder: str | Path, report: Callable[[str], None] | None = None, *, check: bool = True
) -> TokenData | LabelledData:
    """The data of a folder, of either kind, checked against its index.

    All files are read for that the first time; as long as none changes, not again. `report` is told when they are.
    Where another process has just done so, `check` need not be done again.
    """
    data = _opened(Path(folder))
    if check:
        check_once(data, report)
    return data


def verify(folder: str | Path) -> Index | LabelledIndex:
    """Read all of a folder and compare it with its index; what differs is an error that names it."""
    data = _opened(Path(folder))
    check_all(data)
    return data.index


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
    foreign, reason = _foreign(out), "holds data from other files or settings"
    try:
        if _index(out).fingerprint == wanted and not overwrite:
            open_data(out)
            return True
    except RunError as error:
        if foreign:  # perhaps something else has made it
            raise
        reason = f"is damaged ({shortened(str(error))})"
    if not overwrite:
        expected = f"{reason}; overwrite it, or choose another folder"
        raise InputError("out", str(out), expected, Remedy(("overwrite",)))
    if foreign:
        expected = f"holds other files too ({shortened(listed(foreign, 5))}), which would be lost; move them away"
        raise InputError("out", str(out), expected)
    return False


def _opened(folder: Path) -> TokenData | LabelledData:
    if not os.path.exists(folder):  # a killed process may have been about to replace it
        recover(folder)
    return LabelledData.open(folder) if _is_labelled(folder) else TokenData.open(folder)


def _index(folder: Path) -> Index | LabelledIndex:
    return LabelledIndex.load(folder) if _is_labelled(folder) else Index.load(folder)


def _foreign(folder: Path) -> list[str]:
    """The names of the files that preparing does not make."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() or not _OWN.fullmatch(path.name))


def _is_labelled(folder: Path) -> bool:
    """Whether the index says so; what is wrong with an index is said by those who read it."""
    try:
        return read_json(folder / INDEX_FILE).get("kind") == KIND
    except RunError:
        return False
