"""Everything that `meristem prune` does: a trained run in, a smaller one out."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meristem.devices import choose_device
from meristem.errors import InputError, RunError
from meristem.files import beside, flush, new_folder, remove_remains, write_atomically
from meristem.pruning.attempts import Attempts, held_out_numbers
from meristem.pruning.result import PruneResult
from meristem.pruning.rows import Rows, pruning_rows
from meristem.pruning.search import LIMIT, Report, Search
from meristem.pruning.settings import PruneSettings
from meristem.pruning.source import Source, open_source
from meristem.runs.run_folder import PRUNE_FILE, check_empty

CURVE_FILE, PICTURE_FILE = "prune.csv", "prune.svg"


def prune_run(
    run: str | Path,
    out: str | Path,
    settings: PruneSettings = PruneSettings(),  # noqa: B008  (immutable)
    *,
    data: str | Path | None = None,
    step: int | str | None = None,
    average: bool = False,
    device: str = "auto",
    report: Report = lambda what, done, total: None,
) -> PruneResult:
    """Make a smaller model of a trained one, as a new run; the old one is only read.

    It is that of the newest checkpoint, or the one at `step`; with `average` the average of its weights. The data are
    the run's own, unless others, made alike, are named; an imported model has none of its own.

    >>> result = prune_run("runs/first", "runs/small", PruneSettings(keep=0.5, tolerance=1.0))
    >>> result.rise <= 1.0
    True
    >>> sum(load_run("runs/small").model.plan.heads) < sum(load_run("runs/first").model.plan.heads)
    True
    """
    folder, place = new_folder("out", Path(out)), choose_device(device)
    check_empty(folder)
    source = open_source(run, data=data, step=step, average=average, device=device)
    if source.folder.path.resolve() in folder.parents:
        raise InputError("out", str(out), f"lies inside the run that is pruned, {run}; name a folder elsewhere")
    target = settings.target(source.checkpoint.plan)
    settings.check_change(target, source.checkpoint.plan)
    rows = pruning_rows(source, settings, place)
    search = Search(source.model(place), rows, settings, source.step, place, report)
    if not math.isfinite(search.start):
        raise RunError(f"{run}: its loss is not finite, so nothing can be told about its heads")
    before = held_out_numbers(source, search.model, place).get("held_out_loss")
    repaired_later = settings.repair > 0 and target is not None  # whether it was too much is seen afterwards
    ended = search.to(target, math.inf if repaired_later else settings.tolerance)
    with _workplace(folder) as work:
        attempts = Attempts(source, search, settings, work, place)
        best = attempts.best()
        result = PruneResult(
            folder, source.folder.path, source.step, settings, best.plan, tuple(search.points), best.kept, best.loss,
            (before, best.held_out), best.repaired, ended if best.kept == len(search.points) - 1 else LIMIT,
            (*_notes(source, rows, search, ended, settings), *attempts.notes),
        )  # fmt: skip
        write_atomically(best.path / PRUNE_FILE, json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n")
        write_atomically(best.path / CURVE_FILE, result.to_csv())
        write_atomically(best.path / PICTURE_FILE, result.to_svg())
        check_empty(folder)  # somebody may have been faster
        best.path.rename(folder)
        flush(folder.parent)
    return result


def _notes(source: Source, rows: Rows, search: Search, ended: str, settings: PruneSettings) -> Iterator[str]:
    """What a user has to know of how it went."""
    if source.config.model.start_from is not None:
        yield "The run started from another; which of the rows set aside that one was trained on is not known."
    if rows.trained:
        yield (
            f"The run was trained on {rows.trained} of the rows set aside, so their loss may rise less than that of "
            "others. One that is trained with data.held_back = 256 keeps rows apart."
        )
    if ended == LIMIT and (settings.keep is not None or settings.budget is not None) and math.isfinite(search.refused):
        yield (
            f"Not as small as asked for: without another head the loss would rise by {search.refused:.4f} at least; "
            f"the tolerance is {settings.tolerance:g}."
        )


@contextmanager
def _workplace(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` for what is not whole yet; it is gone afterwards, and so are those of the killed."""
    remove_remains(out)
    work = beside(out, "partial")
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
