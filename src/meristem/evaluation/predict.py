"""Predictions for the rows of a file, and these as a table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from meristem.data.labelled.rows import TextRow
from meristem.errors import InputError
from meristem.runs.predictions import Prediction

TABLES = (".csv", ".tsv", ".jsonl")


def check_table(out: Path, source: Path | None) -> str:
    """The kind of table that a file's name asks for; refused if it is none, or the file that is read."""
    kind = out.suffix.lower()
    if kind not in TABLES:
        raise InputError("out", str(out), f"must end with {', '.join(TABLES)}")
    if out.is_dir():
        raise InputError("out", str(out), "must be a file, and is a folder")
    if source is not None and out.exists() and out.samefile(source):
        raise InputError("out", str(out), "is the file that is read")
    return kind


def prediction_table(
    rows: Sequence[TextRow], found: Sequence[Prediction], classes: Sequence[str], kind: str = ".csv"
) -> str:
    """A line for each row: where it stands, its name if it has one, its label, and the probability of each class.

    The probabilities of CSV and TSV are in columns that are called p_ and the class, also where there are no rows.
    """
    named = any(row.name is not None for row in rows)
    text = io.StringIO()
    if kind == ".jsonl":
        for row, one in zip(rows, found, strict=True):
            name = {"name": row.name} if named else {}
            entry = {"line": row.line, **name, "label": one.label, "probabilities": one.probabilities}
            text.write(json.dumps(entry, ensure_ascii=False) + "\n")
        return text.getvalue()
    table = csv.writer(text, delimiter="\t" if kind == ".tsv" else ",", lineterminator="\n")
    table.writerow(["line", *["name"] * named, "label", *(f"p_{name}" for name in classes)])
    for row, one in zip(rows, found, strict=True):
        shares = (f"{share:.6g}" for share in one.probabilities.values())
        table.writerow([row.line, *[row.name] * named, one.label, *shares])
    return text.getvalue()
