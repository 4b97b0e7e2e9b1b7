"""Going on with a run: what binds a checkpoint to it, its logs taken back, and the return from a divergence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meristem.config import Config
from meristem.errors import InputError, Remedy, RunError, shown
from meristem.ranks import from_first_rank
from meristem.runs.checkpoint import (
    Checkpoint,
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    load_state,
    remove_checkpoint,
    step_of,
)
from meristem.runs.divergence import REWINDS_FILE, Diverged, Rewind, batch_number, write_rewinds
from meristem.runs.log import Log, positions, rewind_log
from meristem.runs.origin import ORIGIN_FILE
from meristem.runs.run_folder import RunFolder, binding
from meristem.training.distributed import Processes
from meristem.training.length import updates_left

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


def load_agreed(
    folder: RunFolder, peers: Processes, say: Say, wanted: Callable[[Path], bool] = lambda path: True
) -> Checkpoint | None:
    """The newest whole checkpoint, chosen by the first process for all."""
    chosen = load_newest(folder.checkpoints, say, wanted) if peers.first else None
    step = from_first_rank(None if chosen is None else chosen.step)
    return chosen if peers.first or step is None else load_checkpoint(folder.checkpoints / checkpoint_name(step))


def check_bound(folder: RunFolder, config: Config, checkpoint: Checkpoint | None, say: Say) -> None:
    """Refuse to go on where a checkpoint is not of this run, or where there should be one; note changed settings."""
    if checkpoint is None:
        saved = [entry["step"] for entry in folder.read(folder.events) if entry.get("event") == "checkpoint"]
        if config.train.branch_step is not None:  # without a checkpoint it would not be a branch
            saved = [*saved, config.train.branch_step]
        if saved:
            raise RunError(
                f"{folder.checkpoints}: holds no checkpoint, though one of step {max(saved)} was written; bring it "
                "back, or begin anew",
                Remedy(("from_start",), "resume", str(folder.path)),
            )
        if any(folder.read(folder.metrics)):
            say("no checkpoint had been written yet: beginning from the start")
        return
    state, path = checkpoint.state, folder.checkpoints / checkpoint_name(checkpoint.step)
    origin, bound = folder.origin, state.get("origin")
    if bound is None:
        say(f"{path}: of an older version of Meristem, so nothing in it vouches for configuration and logs")
    elif origin is None or origin.digest != bound:
        raise RunError(f"{folder.path / ORIGIN_FILE}: is not that of the run that {path.name} belongs to")
    if state.get("rewinds", 0) not in range(len(folder.rewinds) + 1):
        raise RunError(f"{folder.path / REWINDS_FILE}: lacks rewinds that {path.name} knows; restore it from a copy")
    now = binding(folder, config)["settings"]
    settings = state.get("settings")
    for key, before in settings.items() if isinstance(settings, dict) else ():
        if key in now and now[key] != before:
            say(f"{key} is {shown(now[key])} from here on; it was {shown(before)}")


def restore_logs(folder: RunFolder, checkpoint: Checkpoint | None, say: Say, *, early: bool = False) -> None:
    """Take the logs back to a checkpoint, and add what a process that was killed had no time to write.

    That the run has ended is part of it, also if it did so `early`.
    """
    step, state = (0, {}) if checkpoint is None else (checkpoint.step, checkpoint.state)
    known = positions(state)
    for log in folder.logs:
        if said := rewind_log(log, step, known.get(log.name), ("checkpoint", "finished", "rewind")):
            say(said)
    told = list(folder.read(folder.events))
    wanted: list[dict[str, Any]] = []
    if checkpoint is not None:
        wanted.append({"step": step, "event": "checkpoint", "path": checkpoint_name(step)})
    wanted += [rewind_event(rewind) for rewind in folder.rewinds if rewind.to_step <= step]
    if early or (checkpoint is not None and updates_left(checkpoint.state, checkpoint.step, folder.config) == 0):
        wanted.append({"step": step, "event": "finished", **finished_facts(early)})
    events = Log(folder.events)
    for event in wanted:
        if event not in told:
            events.append(event)


def finished_facts(early: bool) -> dict[str, bool]:
    """What the last event of a run tells besides its step."""
    return {"early": True} if early else {}


def go_back(folder: RunFolder, config: Config, diverged: Diverged, peers: Processes) -> Checkpoint | None:
    """Return to the last good checkpoint, or to the start, if the configuration says so; otherwise stop there.

    Later checkpoints, of which no finite update was seen, are removed. The batches since are passed over from now on.
    """
    good = load_agreed(folder, peers, lambda text: None, lambda path: _is_good(path, diverged.first))
    step, rewinds = 0 if good is None else good.step, folder.rewinds
    lost = good is None and config.train.branch_from is not None  # there is no start to go back to
    if config.train.on_divergence == "stop" or len(rewinds) >= config.train.max_rewinds or lost:
        found = "there is no good checkpoint" if lost else "no checkpoint had been written yet"
        if good is not None:
            found = f"the last good checkpoint is {folder.checkpoints / checkpoint_name(step)}"
        if peers.first:
            what = "weights" if diverged.weights else "updates"
            event = {"step": diverged.last, "event": "diverged", "first": diverged.first, "not_finite": what}
            Log(folder.events).append(event)
        tried = (
            f" after {len(rewinds)} rewinds"
            if rewinds
            else "; train.on_divergence = rewind would pass over these batches"
        )
        raise RunError(f"{diverged}{tried}; {found}") from None
    first, last = (batch_number(update - 1, rewinds) for update in (diverged.first, diverged.last))
    rewind = Rewind(diverged.last, step, first, last + 1)
    peers.wait()  # until all have read the files
    if peers.first:
        for path in list_checkpoints(folder.checkpoints):
            if step_of(path) > step:
                remove_checkpoint(path)
        write_rewinds(folder.path, (*rewinds, rewind))
        restore_logs(folder, good, logger.warning)
        logger.warning("%s: back to step %d, passing over batches %d to %d", diverged, step, first, last)
    peers.wait()
    return good


def _is_good(path: Path, first: int) -> bool:
    """Whether an update, or held-out data, showed a checkpoint to be good before update `first` was not finite."""
    if step_of(path) <= first - 2:
        return True
    try:
        return step_of(path) == first - 1 and load_state(path).get("good") is True
    except (RunError, InputError, OSError):
        return False


def rewind_event(rewind: Rewind) -> dict[str, Any]:
    """A return as events.jsonl tells of it."""
    return {
        "step": rewind.to_step, "event": "rewind", "from_step": rewind.from_step,
        "batches": [rewind.first, rewind.end],
    }  # fmt: skip
