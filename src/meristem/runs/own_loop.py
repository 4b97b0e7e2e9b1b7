"""Saving and going on in a training loop of one's own: model, optimizer and grower in one call each."""

from __future__ import annotations

from pathlib import Path

import torch

from meristem.errors import InputError, RunError
from meristem.growth import Grower
from meristem.limits import check_integer
from meristem.model import Transformer
from meristem.model.inputs import check_model
from meristem.ranks import by_first_rank, rank
from meristem.runs.checkpoint import (
    drop_old_checkpoints,
    load_newest,
    restore_model,
    restore_rng,
    snapshot,
    write_checkpoint,
)


def save(
    folder: str | Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    grower: Grower | None = None,
    *,
    step: int,
    keep: int = 2,
) -> Path:
    """Save everything that training goes on from after `step` updates; of older saves the newest `keep` stay.

    A save appears under `folder` when it is whole: one that is interrupted leaves those before it as they were. Where
    several processes train together all of them call this: the first one writes, and the others wait for it.

    >>> save("runs/mine", model, optimizer, step=100).name
    'step-00000100'
    """
    check_model(model)
    check_integer("step", step, 0)
    check_integer("keep", keep, 1)
    growth = None if grower is None else grower.state_dict()
    taken = snapshot(
        step, model=model, optimizer=optimizer, growth=None if grower is None else grower.tensors(),
        state={"plan": model.plan.to_dict(), "growth": growth}, keep=rank() == 0,
    )  # fmt: skip

    def write() -> Path:
        path = write_checkpoint(Path(folder), taken)
        drop_old_checkpoints(Path(folder), step, keep)
        return path

    return by_first_rank(write)


def restore(
    folder: str | Path, model: Transformer, optimizer: torch.optim.Optimizer, grower: Grower | None = None
) -> int:
    """Go on from the newest whole save in a folder: returns the updates done, 0 if there is none yet.

    The model, built as at the start of training, is given the structure and the weights of that time, the optimizer its
    moments, the grower its state, and torch its random numbers.

    >>> saved = save("runs/other", model, optimizer, step=100)
    >>> restore("runs/other", model, optimizer)
    100
    """
    check_model(model)
    found = load_newest(Path(folder), report=lambda text: None)
    if found is None:
        return 0
    growth = found.state.get("growth")
    if (grower is None) != (growth is None):
        expected = "must be given, as the save has the state of one" if growth else "must be None, as when it was saved"
        raise InputError("grower", grower, expected)
    try:
        restore_model(found, model, optimizer)
        if grower is not None and growth is not None:
            grower.load_state_dict(growth, found.growth)
    except KeyError as error:
        raise RunError(f"{folder}: the save of step {found.step} has no {error}") from error
    restore_rng(found.rng)
    return found.step
