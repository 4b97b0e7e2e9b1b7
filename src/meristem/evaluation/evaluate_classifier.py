"""Everything that `meristem eval` measures about a classifier's run."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from meristem.choices import OtherLabels
from meristem.data import Columns, LabelledData, LabelledRows, Recipe, read_rows
from meristem.data.labelled.pieces import UNKNOWN
from meristem.data.labelled.rows import row_files
from meristem.data.labelled.sound import SoundRows
from meristem.data.text.prepare import check_on_error
from meristem.devices import describe_device
from meristem.errors import InputError, Remedy, RunError
from meristem.evaluation.evaluate import result_file
from meristem.plan import Plan
from meristem.records import finite
from meristem.runs.run_folder import load_run
from meristem.training.classification import Scores, classify
from meristem.wording import listed

logger = logging.getLogger(__name__)

OTHER_LABELS: tuple[str, ...] = get_args(OtherLabels)


@dataclass(frozen=True, eq=False)
class ClassEvaluation:
    """Results of one checkpoint on rows that it was not trained on, and what was met on the way to them."""

    run: str
    step: int
    data: str
    classes: tuple[str, ...]
    scores: Scores
    cut: int  # rows longer than the model's context
    unknown: float  # share of the pieces that the vocabulary does not have
    bad: int  # places that could not be read
    other_labels: dict[str, int]  # rows of classes that the run does not know
    plan: Plan
    device: str
    average: bool = False  # whether of the average of the weights
    file: Path | None = None  # that it was written to

    @property
    def accuracy_of_all(self) -> float:
        """The accuracy over all rows, with those of classes that the run does not know counted as wrong."""
        return self.scores.accuracy * self.scores.rows / (self.scores.rows + sum(self.other_labels.values()))

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, which has no NaN: None stands for a number that is not finite."""
        scores = self.scores
        columns = {"precision": scores.precision, "recall": scores.recall, "f1": scores.f1}
        classes = [
            {
                "label": label,
                "support": int(scores.support[number]),
                "predicted": int(scores.predicted[number]),
                **{name: finite(float(values[number])) for name, values in columns.items()},
            }
            for number, label in enumerate(self.classes)
        ]
        return {
            "run": self.run,
            "step": self.step,
            "data": self.data,
            "rows": scores.rows,
            "loss": finite(scores.loss),
            "accuracy": finite(scores.accuracy),
            "accuracy_of_all": finite(self.accuracy_of_all),
            "macro_f1": finite(scores.macro_f1),
            "classes": classes,
            "confusion": scores.confusion.tolist(),
            "cut": self.cut,
            "unknown": self.unknown,
            "bad": self.bad,
            "other_labels": self.other_labels,
            "plan": self.plan.to_dict(),
            "device": self.device,
            "average": self.average,
        }


@dataclass(frozen=True, eq=False)
class _Read:
    """Rows to be scored, and what could not be."""

    rows: LabelledRows
    cut: int
    bad: int = 0
    other_labels: dict[str, int] = field(default_factory=dict)


def evaluate_classifier(
    run: str | Path, *, step: int | str | None = None, average: bool = False, data: Path | None = None,
    split: str | None = None, columns: dict[str, Any] | None = None, other_labels: str = "count",
    on_error: str = "refuse", device: str = "auto", out: Path | None = None,
) -> ClassEvaluation:  # fmt: skip
    """Score a checkpoint on the held-out rows of its own data, of another folder made alike, or on a file of rows.

    A file is read as the run's own data was, except for what `columns` changes, and in all its rows or in those whose
    split column holds `split`. Rows with labels that the run does not know are counted apart, or an error that names
    these labels. The result is also written beside the run's files, or into the folder `out`; see `result_file`.

    >>> found = evaluate_classifier("runs/classifier")
    >>> found.step, found.classes
    (12, ('high', 'low', 'odd'))
    """
    if other_labels not in OTHER_LABELS:
        raise InputError("other_labels", other_labels, f"must be one of {', '.join(OTHER_LABELS)}")
    check_on_error(on_error)
    loaded = load_run(run, step=step, average=average, device=device, report=logger.warning)
    recipe, context = loaded.recipe, loaded.model.plan.context
    source = Path(loaded.config.data.path) if data is None else data
    if source.is_dir() or data is None:
        given = {**(columns or {}), **({} if split is None else {"split": split})}
        if given:
            raise InputError("data", str(source), f"is a prepared folder; {', '.join(given)} are for files of rows")
        prepared = loaded.folder.open_alike(source)
        assert isinstance(prepared, LabelledData)
        held_out = prepared.split("held_out")
        read = _Read(held_out, int((held_out.lengths > context).sum()))
    else:
        wanted = replace(recipe.columns, split=None if split is None else recipe.columns.split or "split")
        wanted = replace(wanted, **(columns or {}))
        read = _read_file(
            source, replace(recipe, length=min(recipe.length, context)), wanted, split, other_labels, on_error
        )
    rows = read.rows
    if not len(rows):
        if read.other_labels:
            strange = f"{label_counts(read.other_labels)}; it knows {', '.join(recipe.classes[:20])}"
            raise InputError("data", str(source), f"has labels that the run does not know and no others: {strange}")
        raise RunError(f"{source}: no rows to score")
    scores = classify(loaded.model, rows, batch=loaded.config.eval.batch, device=loaded.device)
    result = ClassEvaluation(
        run=str(run),
        step=loaded.step,
        data=str(source),
        classes=recipe.classes,
        scores=scores,
        cut=read.cut,
        unknown=float((np.asarray(rows.tokens) == UNKNOWN).mean()),
        bad=read.bad,
        other_labels=read.other_labels,
        plan=loaded.model.plan,
        device=describe_device(loaded.device),
        average=average,
    )
    text = json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n"
    return replace(result, file=loaded.folder.write(result_file(data, split, columns, average=average), text, out))


def _read_file(
    path: Path, recipe: Recipe, columns: Columns, split: str | None, other_labels: str, on_error: str
) -> _Read:
    tokens, labels, strange, cut = [], [], Counter[str](), 0
    row_files([path])
    rows = SoundRows(read_rows(path, columns), on_error, logger.warning)
    for row in rows:
        if split is None or row.split == split:
            number = recipe.class_numbers.get(row.label)
            if number is None:
                strange[row.label] += 1
            else:
                pieces = recipe.cut.pieces(row.text)
                cut += len(pieces) > recipe.length
                tokens.append(recipe.encode_pieces(pieces))
                labels.append(number)
    others = dict(sorted(strange.items()))
    if others and other_labels == "refuse":
        expected = f"has labels that the run does not know: {label_counts(others)}; they can be counted apart"
        raise InputError("data", str(path), expected, Remedy(("other_labels=count",)))
    return _Read(LabelledRows.of(tokens, labels), cut, rows.bad, others)


def label_counts(labels: Mapping[str, int]) -> str:
    """Rows by label, for people."""
    return listed([f"{label} ({count})" for label, count in labels.items()], most=20)
