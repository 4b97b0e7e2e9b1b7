"""Saving beside the training: a thread writes, hashes and renames while the next updates are made."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from meristem.runs.checkpoint import Snapshot, drop_old_checkpoints, write_checkpoint
from meristem.runs.divergence import Diverged
from meristem.runs.tensor_file import NotFinite


@dataclass(frozen=True)
class Saved:
    """How a save ended: the checkpoint, or the tensor for which it was not written, as it was not finite."""

    step: int
    path: Path | None
    bad: str | None = None


class Saver:
    """Writes checkpoints into a folder, one at a time, and deletes those that newer ones have made superfluous.

    A checkpoint only counts as good when an update from it was seen to be finite (`proven`); until then it pushes out
    none of the older ones, of which `keep` stay, and the one of the step that is `best`.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.best: int | None = None
        self._thread = ThreadPoolExecutor(1, "meristem-saver")
        self._saving: Future[Saved] | None = None
        self._dropping: Future[None] | None = None
        self._unproven: int | None = None  # the newest step saved, if nothing was seen of it yet

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._thread.shutdown(wait=False, cancel_futures=True)
            return
        self._thread.shutdown()
        if kind is not None and issubclass(kind, Diverged):  # which must not hide that the disk is full
            self.finished(wait=True)

    def save(self, taken: Snapshot) -> None:
        """Begin to write a snapshot. The one before must have been waited for."""
        assert self._saving is None
        ready = None
        if any(tensor.is_cuda for tensors in taken.tensors.values() for tensor in tensors.values()):
            ready = torch.cuda.Event()
            ready.record()
        self._unproven = taken.step
        self._saving = self._thread.submit(_save, self.folder, taken, ready)

    def finished(self, *, wait: bool = False) -> Sequence[Saved]:
        """The save that has ended since the last call, if one has; what went wrong in the thread is raised here."""
        if self._dropping is not None and (wait or self._dropping.done()):
            dropping, self._dropping = self._dropping, None
            dropping.result()
        if self._saving is None or not (wait or self._saving.done()):
            return ()
        saving, self._saving = self._saving, None
        return (saving.result(),)

    def proven(self, step: int) -> None:
        """An update that ended with this step was finite; so the checkpoint it began from, or an older one, is good."""
        if self._unproven is not None and step > self._unproven:
            self._dropping = self._thread.submit(
                drop_old_checkpoints, self.folder, self._unproven, self.keep, self.best
            )
            self._unproven = None


def _save(folder: Path, taken: Snapshot, ready: torch.cuda.Event | None) -> Saved:
    if ready is None:
        return _written(folder, taken)
    stream = torch.cuda.Stream()  # so that copies to the host need not wait for the updates that go on
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        return _written(folder, taken)


def _written(folder: Path, taken: Snapshot) -> Saved:
    try:
        return Saved(taken.step, write_checkpoint(folder, taken))
    except NotFinite as error:
        return Saved(taken.step, None, str(error))
