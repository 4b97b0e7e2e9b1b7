"""Rows of tasks from local copies of the data sets; the task files beside this module say which and how.

The harness calls `rows` and `pages` (`custom_dataset`) with a task's `dataset_kwargs` and with the folder `data`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meristem.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset


def rows(
    *, data: str, file: str, split: str, fields: Sequence[str], where: dict[str, str] | None = None, **_: Any
) -> dict[str, Dataset]:
    """A split of the rows of a file, one JSON object a line, with these fields; with `where`, of some rows only."""
    found = _rows(data, file, (*fields, *(where or {})))
    chosen = [row for row in found if all(row[field] == value for field, value in (where or {}).items())]
    if not chosen:
        raise InputError("data", data, f"{file} there has no rows{f' with {where}' if where else ''}")
    from datasets import Dataset

    return {split: Dataset.from_list(chosen)}


def pages(*, data: str, file: str, split: str, **_: Any) -> dict[str, Dataset]:
    """A split of the pages of a WikiText file."""
    from datasets import Dataset

    return {split: Dataset.from_list([{"page": page} for page in pages_of(_text(data, file))])}


def pages_of(text: str) -> list[str]:
    """The pages of a WikiText file, cut as in EleutherAI's wikitext_document_level: before each ` = Title = `.

    >>> pages_of(" \\n = One = \\n \\n Text . \\n = = Part = = \\n \\n = Two = \\n")
    [' = One = \\n \\n Text . \\n = = Part = = \\n ', ' = Two = \\n']
    """
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if _is_title(line.strip()):
            found.append([])
        found[-1].append(line)
    return [page for lines in found if (page := "\n".join(lines)).strip()]


def _is_title(line: str) -> bool:
    """Whether it is a heading of the first order: one equals sign at each end, and not `= = Part = =`."""
    return line.startswith("= ") and line.endswith(" =") and not line.startswith("= =") and not line.endswith("= =")


def forget() -> None:
    """Forget the file that was read last, which may change."""
    _rows.cache_clear()


@lru_cache(maxsize=1)  # the 67 parts of BLiMP are in one file
def _rows(data: str, file: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(_text(data, file).split("\n"), 1):  # a row may hold other ends of lines
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found.append({field: row[field] for field in fields})
        except (ValueError, KeyError, TypeError) as error:
            expected = f"line {number} of {file} there must be a JSON object with the fields {', '.join(fields)}"
            raise InputError("data", data, expected) from error
    return found


def _text(data: str, file: str) -> str:
    """The content of a file, which may also lie there unpacked."""
    packed = Path(data) / file
    plain = packed.with_suffix("")
    try:
        if packed.is_file():
            return gzip.decompress(packed.read_bytes()).decode("utf-8")
        if plain.is_file():
            return plain.read_bytes().decode("utf-8")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError("data", data, f"{file} there cannot be read ({error})") from error
    raise InputError("data", data, f"holds no {file}, nor one that is not packed")
