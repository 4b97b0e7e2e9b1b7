"""From files of labelled rows to a folder of ids and classes, with splits that do not share a text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from meristem.data.folder import already_made, fingerprint
from meristem.data.labelled.labelled_data import Findings, LabelledIndex, LabelledRows, write_split
from meristem.data.labelled.pieces import UNKNOWN, Cut, learnt_vocabulary
from meristem.data.labelled.recipe import Recipe
from meristem.data.labelled.rows import Columns, Row, is_fasta, read_rows, row_files
from meristem.data.labelled.sound import SoundRows
from meristem.data.text.prepare import HASHES, check_on_error
from meristem.errors import InputError, Remedy, RunError, shortened, shown
from meristem.files import new_folder, recover, staged
from meristem.limits import MOST_CONTEXT, MOST_TOKEN_IDS, check_integer
from meristem.wording import Notice, counted

LONGEST = 512  # ids of a row, if no length is given
HELD_OUT_NAMES = ("val", "valid", "validation", "dev", "held_out", "held-out")  # what a split column may call it


def prepare_labelled(
    paths: Iterable[str | Path],
    out: str | Path,
    *,
    validation: Iterable[str | Path] = (),
    columns: Columns = Columns(),  # noqa: B008  (immutable)
    cut: Cut | None = None,
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
    to `length` (if that is not given: of the longest training row, 512 at most). Pieces are made by `cut`, or else by
    `default_cut`.

    Classes with fewer than `min_rows` training rows are left out. The vocabulary has the pieces that occur at least
    `min_count` times in the training rows. The result depends on the files and settings only; the folder appears when
    it is complete.

    >>> from meristem.data import prepare_labelled
    >>> rows = [f"a {word} film, number {number}\\t{word}" for number in range(20) for word in ("good", "bad")]
    >>> _ = Path("films.tsv").write_text("\\n".join(["text\\tlabel", *rows]))
    >>> list(prepare_labelled(["films.tsv"], "films-data").classes)
    ['bad', 'good']
    """
    out = new_folder("out", Path(out))
    recover(out)  # whatever else may be wrong
    _check_settings(length, held_out, min_rows, min_count, max_vocabulary, on_error)
    named, apart = [Path(path) for path in paths], [Path(path) for path in validation]
    files = row_files([*named, *apart])
    if not named:
        raise InputError("paths", [], "give at least one file of labelled rows")
    if apart and columns.split is not None:
        raise InputError("columns.split", columns.split, "cannot be given together with validation files")
    cut = default_cut(files) if cut is None else cut
    order = [[path.resolve().as_posix() for path in part] for part in (named, apart)]
    settings = [
        order, asdict(columns), asdict(cut), length, held_out, drop_duplicates, min_rows, min_count, max_vocabulary,
        on_error,
    ]  # fmt: skip
    tables = [] if columns.table is None else [Path(columns.table)]
    wanted = fingerprint([*files, *(table for table in tables if table.is_file())], settings)
    if already_made(out, wanted, overwrite):
        return LabelledIndex.load(out)

    read = [
        SoundRows(chain.from_iterable(read_rows(file, columns) for file in part), on_error, report)
        for part in (named, apart)
    ]
    rows, checked = (_items(part, cut, LONGEST if length is None else length) for part in read)
    bad = sum(part.bad for part in read)
    others: Counter[str] = Counter()
    if columns.split is not None:
        train, held, others = _by_column(rows, columns.split)
    else:
        train, held = (rows, checked) if apart else _by_hash(rows, held_out)
    if not train:
        raise RunError(f"no training rows in {', '.join(map(str, named))} ({counted(bad, 'bad place')} skipped)")
    chosen = _choose(train, held, drop_duplicates, min_rows, _label_place(columns, files))

    size = length or min(LONGEST, max(item.pieces for item in chosen.train))
    vocabulary = cut.fixed_vocabulary
    if vocabulary is None:
        pieces = (cut.pieces(item.row.text)[:size] for item in chosen.train)
        vocabulary = learnt_vocabulary(pieces, min_count, max_vocabulary)
    recipe = Recipe(columns, cut, vocabulary, chosen.classes, size)
    encoded, unseen = _encoded(chosen.train, recipe), _encoded(chosen.held_out, recipe)
    findings = Findings(
        rows=len(rows) + len(checked),
        bad=bad,
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


def default_cut(paths: Iterable[Path], k: int = 3, stride: int = 1) -> Cut:
    """How the texts of files are cut if nobody says: into k-mers if there are FASTA files, otherwise into words.

    A sequence has no blanks, so it would be one word, and no word of another row. Three letters are few enough that the
    k-mers of proteins (8,000 at most) come again in other rows, and those of DNA (64) still differ.
    """
    return Cut("kmers" if any(map(is_fasta, paths)) else "words", k, stride)


class _Item(NamedTuple):
    """A row, a hash of what the model may see of it, and the number of its pieces before it is cut."""

    row: Row
    key: bytes
    pieces: int


def _items(rows: Iterable[Row], cut: Cut, length: int) -> list[_Item]:
    items = []
    for row in rows:
        pieces = cut.pieces(row.text)
        content = "\x1f".join(pieces[:length])
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
        raise InputError("columns.split", column, f"has no rows of train, only {shown(sorted(others)[:20])}")
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


class _LabelPlace(NamedTuple):
    """The setting that says where labels stand, and what it must be."""

    field: str
    value: Any
    right: str
    remedy: Remedy | None = None


def _label_place(columns: Columns, files: Iterable[Path]) -> _LabelPlace:
    if columns.table is None and any(map(is_fasta, files)):
        right = "must be the field of the header that holds the label, or labels come from a table"
        return _LabelPlace("columns.field", columns.field, right, Remedy(("columns.table",)))
    return _LabelPlace("columns.label", columns.label, "must be the column that holds the label")


def _choose(train: list[_Item], held: list[_Item], drop_duplicates: bool, min_rows: int, place: _LabelPlace) -> _Chosen:
    """Classes with enough training rows, and held-out rows whose text is not among these."""
    repeats = _duplicates(train)
    if drop_duplicates:
        train = [item for item, repeat in zip(train, repeats, strict=True) if not repeat]
    counts = Counter(item.row.label for item in train)
    classes = _ordered(label for label, count in counts.items() if count >= min_rows)
    if len(classes) < 2:
        raise InputError(
            place.field, place.value,
            f"has {counted(len(counts), 'label')} in all and {len(classes)} with at least {min_rows} training rows; "
            "two such classes are needed",
            Remedy(("min_rows",)),
        )  # fmt: skip
    small = Counter(item.row.label for item in (*train, *held) if 0 < counts[item.row.label] < min_rows)
    untrained = Counter(item.row.label for item in held if not counts[item.row.label])
    wanted = set(classes)
    train, held = ([item for item in part if item.row.label in wanted] for part in (train, held))
    texts = {item.key for item in train}
    kept = [item for item in held if item.key not in texts]
    if len(classes) == len(train) and not kept:  # nothing that rows have in common could be learnt, nor be checked
        named = shortened(", ".join(classes[:3])) + (", ..." if len(classes) > 3 else "")
        raise InputError(
            place.field, place.value,
            f"gives each of the {len(train):,} training rows a label of its own ({named}), and no held-out row one of "
            f"these; it {place.right}",
            place.remedy,
        )  # fmt: skip
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
    """Sorted as numbers where all are numbers, of a length that a person may have meant as one."""
    found = list(labels)
    whole = all(label.removeprefix("-").isdecimal() and len(label) <= 100 for label in found)
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
    if length is not None:
        check_integer("length", length, 1, MOST_CONTEXT)
    check_integer("min_rows", min_rows, 1)
    check_integer("min_count", min_count, 1)
    check_integer("max_vocabulary", max_vocabulary, 1, MOST_TOKEN_IDS)
    check_on_error(on_error)


def findings_notes(index: LabelledIndex) -> list[Notice]:
    """What a preparation made and met."""
    found = index.findings
    made = (
        f"{counted(index.train.rows, 'training row')}, {index.held_out.rows:,} held out; {len(index.classes)} classes, "
        f"{index.ids:,} token ids, rows of up to {counted(index.length, 'token')} "
        f"({index.train.tokens / index.train.rows:.1f} on average)"
    )
    read = f"{counted(found.rows, 'row')} read" + (f", {counted(found.bad, 'bad place')} skipped" if found.bad else "")
    dropped, drop = (": dropped", None) if found.duplicates_dropped else ("", Remedy(("drop_duplicates",)))
    notes = [
        (found.duplicates, "training row", f"with text and label of an earlier one{dropped}", drop),
        (found.conflicts, "training text", "with more than one label", None),
        (found.repeated, "held-out row", "removed, the text being in the training rows", None),
        (found.cut, "row", f"cut to {counted(index.length, 'token')}", Remedy(("length",))),
    ]
    lines = [Notice(made), Notice(read)]
    lines += [Notice(f"{counted(count, name)} {words}", remedy) for count, name, words, remedy in notes if count]
    left_out = [
        (found.small_classes, "row", "of classes with too few training rows"),
        (found.untrained_classes, "held-out row", "of classes without training rows"),
        (found.other_splits, "row", "of other splits"),
    ]
    for counts, name, words in left_out:
        if counts:
            named = ", ".join(f"{shortened(label)} {count}" for label, count in list(counts.items())[:20])
            more = ", ..." if len(counts) > 20 else ""
            lines.append(Notice(f"{counted(sum(counts.values()), name)} {words} left out: {named}{more}"))
    if index.held_out.rows:
        majority = max(index.held_out.class_rows) / index.held_out.rows
        unknown = f"{found.unknown:.2%} of the held-out pieces are not in the vocabulary"
        lines.append(Notice(f"{unknown}; the largest class is {majority:.1%} of the held-out rows"))
    return lines


def findings_warnings(index: LabelledIndex, *, held_out: bool = True) -> list[Notice]:
    """What about the data is hardly meant so; `held_out` says whether rows to be held out were asked for."""
    said = []
    if 2 * len(index.classes) > index.train.rows:
        text = (
            f"{len(index.classes):,} classes have only {index.train.rows:,} training rows; is the label where the "
            "settings say? Small classes can be left out"
        )
        said.append(Notice(text, Remedy(("columns.label", "columns.field", "columns.table", "min_rows"))))
    if held_out and not index.held_out.rows:
        text = "no held-out rows are left, so nothing can be measured"
        said.append(Notice(text, Remedy(("held_out", "validation", "columns.split"))))
    if index.held_out.rows and index.findings.unknown > 0.5:
        text = (
            f"{index.findings.unknown:.0%} of the held-out pieces are not in the vocabulary, and all look alike to the "
            "model; other pieces, or keeping rarer ones, may mend this"
        )
        said.append(Notice(text, Remedy(("tokens", "k", "min_count"))))
    return said
