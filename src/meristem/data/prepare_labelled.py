"""From files of labelled rows to a folder of ids and classes, with splits that do not share a text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from meristem.data.corpus import BadPlace
from meristem.data.folder import already_made, fingerprint, staged
from meristem.data.labelled import Findings, LabelledIndex, LabelledRows, write_split
from meristem.data.pieces import UNKNOWN, Cut, learnt_vocabulary
from meristem.data.prepare import HASHES, check_on_error, refusal
from meristem.data.recipe import Recipe
from meristem.data.rows import Columns, Row, read_rows, row_files
from meristem.errors import InputError, RunError

LONGEST = 512  # ids of a row, if no length is given
HELD_OUT_NAMES = ("val", "valid", "validation", "dev", "held_out", "held-out")  # what a split column may call it


def prepare_labelled(
    paths: Iterable[str | Path],
    out: str | Path,
    *,
    validation: Iterable[str | Path] = (),
    columns: Columns = Columns(),  # noqa: B008  (immutable)
    cut: Cut = Cut(),  # noqa: B008  (immutable)
    length: int | None = None,
    held_out: float = 0.1,
    drop_duplicates: bool = False,
    min_rows: int = 1,
    min_count: int = 2,
    max_vocabulary: int = 50_000,
    on_error: str = "refuse",
    overwrite: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> LabelledIndex:
    """Write the rows of files into the folder `out`, and return its index, which says what was found on the way.

    The held-out rows are those of the `validation` files, or those that `columns.split` names, or else a share of all
    texts, chosen by a hash, so that equal texts are never divided. In any case a held-out row whose text is in the
    training split is removed. Two texts are equal if the model could not tell them apart: their pieces are equal up
    to `length` (if that is not given: of the longest training row, 512 at most).

    Classes with fewer than `min_rows` training rows are left out. The vocabulary has the pieces that occur at least
    `min_count` times in the training rows. The result depends on the files and settings only; the folder appears when
    it is complete.
    """
    _check_settings(length, held_out, min_rows, min_count, max_vocabulary, on_error)
    named, apart, out = [Path(path) for path in paths], [Path(path) for path in validation], Path(out)
    files = row_files([*named, *apart])
    if not named:
        raise InputError("paths", [], "give at least one file of labelled rows")
    if apart and columns.split is not None:
        raise InputError("split (--split-column)", columns.split, "cannot be given together with validation files")
    order = [[path.resolve().as_posix() for path in part] for part in (named, apart)]
    settings = [
        order, asdict(columns), asdict(cut), length, held_out, drop_duplicates, min_rows, min_count, max_vocabulary,
        on_error,
    ]  # fmt: skip
    tables = [] if columns.table is None else [Path(columns.table)]
    wanted = fingerprint([*files, *(table for table in tables if table.is_file())], settings)
    if already_made(out, wanted, overwrite):
        return LabelledIndex.load(out)

    reader = _Reader(columns, cut, LONGEST if length is None else length, on_error, report)
    rows, checked = reader.read(named), reader.read(apart)
    others: Counter[str] = Counter()
    if columns.split is not None:
        train, held, others = _by_column(rows, columns.split)
    else:
        train, held = (rows, checked) if apart else _by_hash(rows, held_out)
    if not train:
        raise RunError(f"no training rows in {', '.join(map(str, named))} ({reader.bad} bad places skipped)")
    chosen = _choose(train, held, columns.label, drop_duplicates, min_rows)

    size = length or min(LONGEST, max(item.pieces for item in chosen.train))
    vocabulary = cut.fixed_vocabulary
    if vocabulary is None:
        pieces = (cut.pieces(item.row.text)[:size] for item in chosen.train)
        vocabulary = learnt_vocabulary(pieces, min_count, max_vocabulary)
    recipe = Recipe(columns, cut, vocabulary, chosen.classes, size)
    encoded, unseen = _encoded(chosen.train, recipe), _encoded(chosen.held_out, recipe)
    findings = Findings(
        rows=len(rows) + len(checked),
        bad=reader.bad,
        duplicates=chosen.duplicates,
        duplicates_dropped=drop_duplicates,
        conflicts=_conflicts(chosen.train),
        repeated=chosen.repeated,
        cut=sum(item.pieces > size for item in (*chosen.train, *chosen.held_out)),
        unknown=float((unseen.tokens == UNKNOWN).mean()) if len(unseen) else 0.0,
        small_classes=dict(sorted(chosen.small.items())),
        untrained_classes=dict(sorted(chosen.untrained.items())),
        other_splits=dict(sorted(others.items())),
    )
    with staged(out) as staging:
        recipe.save(staging)
        index = LabelledIndex(
            classes=recipe.classes,
            ids=recipe.ids,
            length=size,
            recipe=recipe.digest,
            train=write_split(staging, "train", encoded, recipe),
            held_out=write_split(staging, "held_out", unseen, recipe),
            findings=findings,
            fingerprint=wanted,
            source=", ".join(str(path) for path in files),
        )
        index.save(staging)
    return index


class _Item(NamedTuple):
    """A row, a hash of what the model may see of it, and the number of its pieces before it is cut."""

    row: Row
    key: bytes
    pieces: int


class _Reader:
    """Reads rows and counts the bad places."""

    def __init__(self, columns: Columns, cut: Cut, length: int, on_error: str, report: Callable[[str], None]) -> None:
        self._columns, self._cut, self._length = columns, cut, length
        self._on_error, self._report = on_error, report
        self.bad = 0

    def read(self, files: Sequence[Path]) -> list[_Item]:
        items = []
        for row in (row for file in files for row in read_rows(file, self._columns)):
            if isinstance(row, BadPlace):
                if self._on_error == "refuse":
                    raise refusal(row)
                self._report(f"skipped {row}")
                self.bad += 1
            else:
                pieces = self._cut.pieces(row.text)
                content = "\x1f".join(pieces[: self._length])
                items.append(_Item(row, hashlib.sha256(content.encode()).digest(), len(pieces)))
        return items


def _by_column(rows: Sequence[_Item], column: str) -> tuple[list[_Item], list[_Item], Counter[str]]:
    """Training rows, held-out rows, and how many there are with another name."""
    parts: dict[str, list[_Item]] = {"train": [], "held_out": []}
    others: Counter[str] = Counter()
    for item in rows:
        name = (item.row.split or "").lower()
        if name == "train" or name in HELD_OUT_NAMES:
            parts["train" if name == "train" else "held_out"].append(item)
        else:
            others[item.row.split or ""] += 1
    if rows and not parts["train"]:
        raise InputError("split (--split-column)", column, f"has no rows of train, only {sorted(others)[:20]}")
    return parts["train"], parts["held_out"], others


def _by_hash(rows: Sequence[_Item], share: float) -> tuple[list[_Item], list[_Item]]:
    """A share of the texts held out; if some are wanted at least one, but never all."""
    keys = sorted({item.key for item in rows})
    limit = round(share * HASHES)
    count = sum(int.from_bytes(key[:8], "big") < limit for key in keys)
    if share > 0:
        count = min(max(1, count), max(0, len(keys) - 1))
    held = set(keys[:count])
    return [item for item in rows if item.key not in held], [item for item in rows if item.key in held]


class _Chosen(NamedTuple):
    """Rows that stay, their classes, and how many did not."""

    train: list[_Item]
    held_out: list[_Item]
    classes: tuple[str, ...]
    duplicates: int
    repeated: int
    small: Counter[str]
    untrained: Counter[str]


def _choose(train: list[_Item], held: list[_Item], column: str, drop_duplicates: bool, min_rows: int) -> _Chosen:
    """Classes with enough training rows, and held-out rows whose text is not among these."""
    repeats = _duplicates(train)
    if drop_duplicates:
        train = [item for item, repeat in zip(train, repeats, strict=True) if not repeat]
    counts = Counter(item.row.label for item in train)
    classes = _ordered(label for label, count in counts.items() if count >= min_rows)
    if len(classes) < 2:
        raise InputError(
            "label (--label-column)", column,
            f"has {len(counts)} labels, of which {len(classes)} have {min_rows} training rows or more; at least two "
            "classes are needed",
        )  # fmt: skip
    small = Counter(item.row.label for item in (*train, *held) if 0 < counts[item.row.label] < min_rows)
    untrained = Counter(item.row.label for item in held if not counts[item.row.label])
    wanted = set(classes)
    train, held = ([item for item in part if item.row.label in wanted] for part in (train, held))
    texts = {item.key for item in train}
    kept = [item for item in held if item.key not in texts]
    return _Chosen(train, kept, classes, sum(repeats), len(held) - len(kept), small, untrained)


def _duplicates(rows: Sequence[_Item]) -> list[bool]:
    """Whether text and label of each row occurred before it."""
    seen: set[tuple[bytes, str]] = set()
    found = []
    for item in rows:
        content = (item.key, item.row.label)
        found.append(content in seen)
        seen.add(content)
    return found


def _conflicts(rows: Sequence[_Item]) -> int:
    """How many texts have more than one label."""
    texts = Counter(key for key, _ in {(item.key, item.row.label) for item in rows})
    return sum(count > 1 for count in texts.values())


def _ordered(labels: Iterable[str]) -> tuple[str, ...]:
    """Sorted as numbers where all are numbers."""
    found = list(labels)
    whole = all(label.removeprefix("-").isdecimal() for label in found)
    return tuple(sorted(found, key=lambda label: (int(label) if whole else 0, label)))


def _encoded(items: Sequence[_Item], recipe: Recipe) -> LabelledRows:
    return LabelledRows.of(
        [recipe.encode(item.row.text) for item in items], [recipe.class_numbers[item.row.label] for item in items]
    )


def _check_settings(
    length: int | None, held_out: float, min_rows: int, min_count: int, max_vocabulary: int, on_error: str
) -> None:
    if not 0 <= held_out < 1:
        raise InputError("held_out", held_out, "must be a fraction, at least 0 and below 1")
    sizes = {"length": length, "min_rows": min_rows, "min_count": min_count, "max_vocabulary": max_vocabulary}
    for field, value in sizes.items():
        if value is not None and value < 1:
            raise InputError(field, value, "must be at least 1")
    check_on_error(on_error)


def findings_text(index: LabelledIndex) -> str:
    """What a preparation made and met, for the terminal."""
    found = index.findings
    lines = [
        f"{index.train.rows:,} training rows, {index.held_out.rows:,} held out; {len(index.classes)} classes, "
        f"{index.ids:,} token ids, rows of up to {index.length} tokens ({index.train.tokens / index.train.rows:.1f} "
        "on average)",
        f"{found.rows:,} rows read" + (f", {found.bad} bad places skipped" if found.bad else ""),
    ]
    if found.duplicates:
        lines.append(
            f"{found.duplicates:,} training rows repeat an earlier text with its label"
            + (": dropped" if found.duplicates_dropped else " (--drop-duplicates leaves them out)")
        )
    notes = {
        "training texts have more than one label": found.conflicts,
        "held-out rows removed, their text is in the training rows": found.repeated,
        f"rows cut to {index.length} tokens": found.cut,
    }
    lines += [f"{count:,} {words}" for words, count in notes.items() if count]
    counted = {
        "rows of classes with too few training rows left out": found.small_classes,
        "held-out rows of classes without training rows left out": found.untrained_classes,
        "rows of other splits left out": found.other_splits,
    }
    for words, counts in counted.items():
        if counts:
            named = ", ".join(f"{label} {count}" for label, count in list(counts.items())[:20])
            lines.append(f"{sum(counts.values()):,} {words}: {named}{', ...' if len(counts) > 20 else ''}")
    if index.held_out.rows:
        majority = max(index.held_out.class_rows) / index.held_out.rows
        lines.append(
            f"{found.unknown:.2%} of the held-out pieces are not in the vocabulary; "
            f"the largest class is {majority:.1%} of the held-out rows"
        )
    return "\n".join(lines)
