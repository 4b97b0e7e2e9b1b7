"""Updates that are not finite: when a run has diverged, and which batches it passes over when it goes back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meristem.errors import RunError
from meristem.files import read_json, write_atomically
from meristem.wording import counted

REWINDS_FILE = "rewinds.json"


class Diverged(RunError):
    """Loss or gradient were not finite in the updates `first` to `last` (counted from 1), or `weights` are not."""

    def __init__(self, first: int, last: int, *, weights: bool = False) -> None:
        count = counted(last - first + 1, "update")
        skipped = f"loss or gradient were not finite in {count} in a row (all skipped, weights unchanged)"
        unsaved = "weights, or what the optimizer keeps of them, are not finite, so the end of the run is not saved"
        super().__init__(f"stopped at step {last}: {unsaved if weights else skipped}")
        self.first, self.last, self.weights = first, last, weights


@dataclass(frozen=True)
class Rewind:
    """A return from an update to the checkpoint of a step, with batches `first` to `end` - 1 passed over since."""

    from_step: int
    to_step: int
    first: int
    end: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def load_rewinds(folder: Path) -> tuple[Rewind, ...]:
    """The returns of a run so far."""
    path = folder / REWINDS_FILE
    if not path.exists():
        return ()
    try:
        return tuple(_rewind(entry) for entry in read_json(path)["rewinds"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: not a list of rewinds ({error!r}); restore it from a copy") from error


def write_rewinds(folder: Path, rewinds: Sequence[Rewind]) -> None:
    """Record all returns of a run."""
    content = {"rewinds": [rewind.to_dict() for rewind in rewinds]}
    write_atomically(folder / REWINDS_FILE, json.dumps(content, indent=1) + "\n")


def _rewind(entry: Any) -> Rewind:
    rewind = Rewind(**entry)
    if any(type(value) is not int or not 0 <= value < 2**63 for value in rewind.to_dict().values()):
        raise ValueError("steps must be whole numbers from 0")
    return rewind


def batch_number(step: int, rewinds: Iterable[Rewind]) -> int:
    """Which batch the update `step` (counted from 0) takes: its own, moved on by those before it that are passed over.

    >>> [batch_number(step, [Rewind(5, 2, 3, 5)]) for step in range(5)]
    [0, 1, 2, 5, 6]
    """
    for first, end in _merged(rewinds):
        if step >= first:
            step += end - first
    return step


def _merged(rewinds: Iterable[Rewind]) -> Sequence[tuple[int, int]]:
    """The batches that are passed over, as ranges that do not touch."""
    ranges: list[tuple[int, int]] = []
    for first, end in sorted((rewind.first, rewind.end) for rewind in rewinds):
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((first, end))
    return ranges
