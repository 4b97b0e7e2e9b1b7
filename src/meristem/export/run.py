"""A run made ready to be taken elsewhere: written aside, checked, and then put in place as a whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import get_args

from meristem.choices import ExportFormat
from meristem.errors import InputError, Remedy
from meristem.export.card import write_card
from meristem.export.hf import Written
from meristem.files import new_folder, read_json, sha256_of, staged
from meristem.runs.run_folder import LoadedRun, load_run

logger = logging.getLogger(__name__)

MANIFEST_FILE = "export.json"
FORMAT = "meristem-export/1"
FORMATS: tuple[str, ...] = get_args(ExportFormat)


@dataclass(frozen=True)
class Export:
    """A folder that was exported, from which step, and what is to be said of it.

    `difference` is the largest one between a logit of the exported model and the run's; None where what it takes to
    load the result is not installed.
    """

    folder: Path
    format: str
    step: int
    architecture: str
    difference: float | None
    notes: tuple[str, ...]  # the last one says whether it was checked

    def __str__(self) -> str:
        return "\n".join([f"{self.folder}: {self.architecture} of step {self.step:,}", *self.notes])


def export_run(
    run: str | Path, out: str | Path, to: str = "hf", *, step: int | str | None = None, average: bool = False,
    overwrite: bool = False, report: Callable[[str], None] = logger.warning,
) -> Export:  # fmt: skip
    """Write the model of a run into a folder of another format, and check that it gives the same logits.

    It is that of the newest checkpoint, or the one at `step`; with `average` the average that the run has kept of its
    weights. An earlier export is replaced with `overwrite` only, and anything else never.

    >>> export_run("runs/first", "exported/first").architecture
    'MeristemForCausalLM'
    """
    if to not in FORMATS:
        raise InputError("to", to, f"must be one of {', '.join(FORMATS)}")
    folder = new_folder("out", Path(out))
    _check_place(folder, overwrite)
    loaded = load_run(run, step=step, average=average, device="cpu", report=report)
    with staged(folder) as aside:
        written = _writer(to)(loaded, aside)
        write_card(aside, loaded, to, written, average=average)
        _write_manifest(aside, loaded, to, average=average)
        _check_place(folder, overwrite)  # somebody may have been faster
    return Export(folder, to, loaded.step, written.architecture, written.difference, (*written.notes, written.verdict))


def _writer(to: str) -> Callable[[LoadedRun, Path], Written]:
    """What writes a format; packages that only this one needs are imported with it."""
    writer: Callable[[LoadedRun, Path], Written] = getattr(import_module(f"meristem.export.{to}"), f"write_{to}")
    return writer


def _check_place(folder: Path, overwrite: bool) -> None:
    """Refuse to write where there is something, unless it is an earlier export that shall be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MANIFEST_FILE).is_file():
        raise InputError("out", str(folder), "already holds something else; take another folder")
    others = sorted({path.name for path in folder.iterdir()} - {MANIFEST_FILE, *_files_of(folder)})
    if others:
        raise InputError("out", str(folder), f"holds an earlier export and other files ({others[0]}); take another one")
    if not overwrite:
        raise InputError("out", str(folder), "holds an earlier export", Remedy(("overwrite",)))


def _files_of(folder: Path) -> list[str]:
    manifest = read_json(folder / MANIFEST_FILE)
    files = manifest.get("files") if manifest.get("format") == FORMAT else None
    return list(files) if isinstance(files, dict) else []


def _write_manifest(folder: Path, loaded: LoadedRun, to: str, *, average: bool) -> None:
    """Write down what was exported, with the sha256 of each file."""
    files = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    content = {
        "format": FORMAT, "to": to, "run": loaded.folder.path.resolve().name, "step": loaded.step, "average": average,
        "plan": loaded.model.plan.digest, "files": files,
    }  # fmt: skip
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
