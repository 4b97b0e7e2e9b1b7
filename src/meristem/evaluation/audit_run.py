"""Everything that `meristem audit` measures about a run."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meristem.data import LabelledData, TokenData, padded_length
from meristem.devices import autocast, describe_device
from meristem.errors import InputError
from meristem.evaluation.audit import Audit, AuditSettings
from meristem.evaluation.audit_model import Report, Training, audit_model
from meristem.evaluation.audit_text import audit_text, verdict
from meristem.gauges.probe import Batch, Batches
from meristem.growth.policies.incrt import Incrt, IncrtState
from meristem.model import Classifier
from meristem.runs.checkpoint import checkpoint_name, load_state
from meristem.runs.entries import predicted_heads, sound_head_growth
from meristem.runs.former_state import incrt_state
from meristem.runs.layer_numbers import read_growth
from meristem.runs.run_folder import LoadedRun, load_run
from meristem.training.classification import spread_rows
from meristem.training.held_out import held_out_windows
from meristem.training.tasks import class_weights, make_task

logger = logging.getLogger(__name__)

AUDIT_FILE = "audit.json"


@dataclass(frozen=True)
class RunAudit:
    """The audit of a run's newest checkpoint."""

    run: str
    step: int
    data: str
    device: str
    audit: Audit

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, which has no NaN: None stands for a number that is not finite."""
        return {
            "run": self.run, "step": self.step, "data": self.data, "device": self.device, **self.audit.to_dict(),
            "verdict": verdict(self.audit),
        }  # fmt: skip

    def __str__(self) -> str:
        facts = f"held-out loss {self.audit.loss:.4f} over {self.audit.sequences} sequences of {self.data}"
        return f"{self.run}, step {self.step}: {facts}\n{audit_text(self.audit)}"


def audit_run(
    run: str | Path,
    settings: AuditSettings = AuditSettings(),  # noqa: B008  (immutable)
    *,
    sequences: int = 256,
    data: Path | None = None,
    device: str = "auto",
    out: Path | None = None,
    report: Report = lambda what, done, total: None,
) -> RunAudit:
    """Audit a run on `sequences` held-out windows or rows of its own data, or of other data that was made alike.

    Nothing of the run changes; what was found is written to `audit.json` beside its other files, or in `out`.
    """
    if sequences < 2:
        raise InputError("sequences", sequences, "must be at least 2")
    loaded = load_run(run, device=device, report=logger.warning)
    source = Path(loaded.config.data.path) if data is None else data
    opened = loaded.folder.open_alike(source)
    if isinstance(loaded.model, Classifier) and isinstance(opened, LabelledData):
        weights = class_weights(opened.split("train"), loaded.config.data.class_weights, len(opened.index.classes))
        loaded.model.class_weights = None if weights is None else weights.to(loaded.device)
    policy, start = _policy(loaded)
    held_out = _held_out(loaded, opened, sequences)
    with autocast(loaded.device):
        training, seen = _training(loaded, opened)
        audit = audit_model(
            loaded.model, training, held_out, settings, policy=policy, start=start, seen=seen, report=report
        )
    predicted = _predicted(loaded)
    layers = tuple(replace(layer, predicted=heads) for layer, heads in zip(audit.layers, predicted, strict=True))
    place = describe_device(loaded.device)
    result = RunAudit(str(run), loaded.step, str(source), place, replace(audit, layers=layers))
    text = json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n"
    loaded.folder.write(AUDIT_FILE, text, out)
    return result


def _training(loaded: LoadedRun, data: TokenData | LabelledData) -> tuple[Training, bool]:
    """What the run would go on with, in batches that fit; and whether it has been through all of its rows before."""
    config = loaded.config
    size = config.train.micro_batch or config.train.batch_size
    steps = config.train.steps * config.train.batch_size // size  # of the same rows in all
    smaller = replace(config, train=replace(config.train, batch_size=size, micro_batch=None, steps=steps))
    task = make_task(smaller, loaded.model.plan, data, fixed=False)
    first = loaded.step * config.train.batch_size // size

    def batches() -> Batches:
        for step in itertools.count(first):
            tokens, targets = task.batch(step, 0, 1)
            yield torch.from_numpy(tokens).to(loaded.device), torch.from_numpy(targets).to(loaded.device)

    return batches, loaded.step * config.train.batch_size >= task.steps_per_epoch * size


def _held_out(loaded: LoadedRun, data: TokenData | LabelledData, sequences: int) -> list[Batch]:
    """The first held-out windows or rows, as many as wanted or all if there are fewer."""
    context, size, device = loaded.model.plan.context, loaded.config.eval.batch, loaded.device
    if isinstance(data, TokenData):
        windows = held_out_windows(data.split("held_out"), context, sequences).to(device)
        return [(part[:, :-1], part[:, 1:]) for part in windows.split(size)]
    rows = data.split("held_out")
    chosen = spread_rows(len(rows), sequences)
    chosen = chosen[np.argsort(rows.lengths[chosen], kind="stable")]  # those of about the same length share a batch
    parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    return [
        (
            torch.from_numpy(rows.padded(part, padded_length(rows.lengths[part], context))).to(device),
            torch.from_numpy(rows.labels[part]).to(device),
        )
        for part in parts
    ]


def _policy(loaded: LoadedRun) -> tuple[Incrt, IncrtState | None]:
    """The policy that says when a demand is certain and large; if the run grew by demand, also its largest by layer."""
    config = loaded.config
    policy: Incrt | None = config.policy("incrt")
    if policy is None:
        return Incrt(), None
    state = load_state(loaded.folder.checkpoints / checkpoint_name(loaded.step))
    return policy, policy.load(incrt_state(state["growth"]))


def _predicted(loaded: LoadedRun) -> list[dict[str, float] | None]:
    """How many heads the run let one expect when it first knew, of every layer; None if it did not say."""
    growth = read_growth(loaded.folder, loaded.step)  # later events are of a structure that is not the model's
    events = sound_head_growth(growth.events, growth.start_heads(loaded.folder.plan))
    return predicted_heads(events, len(loaded.model.plan.layers))
