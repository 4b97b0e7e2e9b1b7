"""Reading labelled rows: CSV and TSV, JSON lines and FASTA, plain or compressed."""

from __future__ import annotations

import codecs
import csv
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, get_args

from meristem.choices import Quote
from meristem.data.text.corpus import (
    COMPRESSIONS,
    BadPlace,
    TooLongError,
    decompressed,
    lines_of,
    parsed_line,
    plain_suffix,
)
from meristem.errors import InputError, RunError, shown
from meristem.limits import LARGEST_COUNT, LARGEST_DOCUMENT, check_integer
from meristem.wording import counted

TEXT_COLUMNS = ("sentence", "text", "sequence")
QUOTES: tuple[str, ...] = get_args(Quote)
DELIMITERS = {".csv": ",", ".tsv": "\t"}
FASTA = (".fasta", ".fa", ".faa", ".fna")
SUFFIXES = (*DELIMITERS, ".jsonl", *FASTA)
TEXT_SUFFIXES = (*SUFFIXES, ".txt")  # of texts without labels

csv.field_size_limit(LARGEST_DOCUMENT // 4)  # it takes 4 bytes a letter; the library's own limit is below a genome


@dataclass(frozen=True)
class Columns:
    """Where the parts of a row stand.

    FASTA records have no columns: their text is the sequence, their label a field of the header, or what a table says
    about their id, which is the header up to the first blank or bar.
    """

    text: str | None = None  # the first that there is of sentence, text, sequence
    label: str = "label"
    split: str | None = None
    quote: str = "auto"  # of CSV and TSV: as CSV has it, or none, where quotes are ordinary characters; none for TSV
    field: int = -1  # of a FASTA header that is divided by bars: from 1, or backwards from -1
    table: str | None = None  # a CSV or TSV file with the labels of FASTA records
    table_id: str = "id"  # its column of ids

    def __post_init__(self) -> None:
        if self.quote not in QUOTES:
            raise InputError("columns.quote", self.quote, f"must be one of {', '.join(QUOTES)}")
        check_integer("columns.field", self.field, -LARGEST_COUNT)
        if self.field == 0:
            raise InputError("columns.field", 0, "must be 1 or above, or -1 or below to count from the end")


class Row(NamedTuple):
    """A labelled text and where it stands; `split` where a column names one."""

    path: Path
    line: int
    text: str
    label: str
    split: str | None


class TextRow(NamedTuple):
    """A text without a label, and where it stands; `name` is the id of a FASTA record."""

    path: Path
    line: int
    text: str
    name: str | None


class _Record(NamedTuple):
    line: int
    values: Mapping[str, Any]
    name: str | None = None


def row_files(paths: list[Path]) -> list[Path]:
    """The same paths, or an error that names the one that cannot be read as labelled rows."""
    for path in paths:
        _check_file("paths", path, SUFFIXES)
    return paths


def text_file(path: Path) -> Path:
    """The same path, or an error that says why texts cannot be read from it."""
    _check_file("file", path, TEXT_SUFFIXES)
    return path


def _check_file(field: str, path: Path, suffixes: Sequence[str]) -> None:
    if not path.is_file():
        raise InputError(field, str(path), "is not a regular file" if path.exists() else "no such file")
    if plain_suffix(path) not in suffixes:
        allowed = f"must be {', '.join(suffixes)}, each also with {' or '.join(COMPRESSIONS)}"
        raise InputError(field, str(path), f"unknown kind of file; {allowed}")


def is_fasta(path: Path) -> bool:
    return plain_suffix(path) in FASTA


def read_rows(path: Path, columns: Columns) -> Iterator[Row | BadPlace]:
    """The rows of a file in order, and the places where there should be one but is not."""
    for record in _records(path, columns, labelled=True):
        yield record if isinstance(record, BadPlace) else _row(path, record, columns)


def read_texts(path: Path, columns: Columns) -> Iterator[TextRow | BadPlace]:
    """The texts of a file in order, whose labels are not asked for, and the places where there should be one.

    Besides the kinds of files with labelled rows it may be a .txt, every line of which is a text.
    """
    if plain_suffix(path) == ".txt":
        yield from _line_texts(path, _lines(path))
        return
    for record in _records(path, columns, labelled=False):
        yield record if isinstance(record, BadPlace) else _text_row(path, record, columns)


def stream_texts(stream: BinaryIO, path: Path = Path("-")) -> Iterator[TextRow | BadPlace]:
    """The lines of a stream such as stdin, each a text; blank ones are passed over."""
    return _line_texts(path, lines_of(stream))


def _line_texts(path: Path, lines: Iterator[bytes | BadPlace | None]) -> Iterator[TextRow | BadPlace]:
    for number, line in enumerate(lines, start=1):
        if isinstance(line, BadPlace):
            yield line
        elif line is None:
            yield BadPlace(path, number, str(TooLongError("a line")))
        elif line.strip():
            try:
                yield TextRow(path, number, line.decode("utf-8").strip(), None)
            except UnicodeDecodeError:
                yield BadPlace(path, number, "not UTF-8 text")


def _records(path: Path, columns: Columns, *, labelled: bool) -> Iterator[_Record | BadPlace]:
    suffix = plain_suffix(path)
    if is_fasta(path):
        return _fasta(path, columns, labelled=labelled)
    if suffix in DELIMITERS:
        return _separated(path, columns.quote, lambda names: _check_columns(path, names, columns, labelled=labelled))
    return _json_lines(path)


def _check_columns(path: Path, names: Sequence[str], columns: Columns, *, labelled: bool) -> None:
    """Refuse, by name, a header without a column that was asked for: no row could be read without it."""
    for part in ("text", "label", "split") if labelled else ("text",):
        name = getattr(columns, part)
        if name is not None and name not in names:
            expected = f"is not a column of {path.name}, which has {shown(names[:20])}"
            raise InputError(f"columns.{part}", name, expected)
    if columns.text is None and not set(TEXT_COLUMNS) & set(names):
        expected = f"must be named: {path.name} has none of {', '.join(TEXT_COLUMNS)}, only {shown(names[:20])}"
        raise InputError("columns.text", None, expected)


def _row(path: Path, record: _Record, columns: Columns) -> Row | BadPlace:
    values = record.values
    try:
        split = None if columns.split is None else _value(values, columns.split)
        return Row(path, record.line, _text(path, values, columns), _value(values, columns.label), split)
    except ValueError as error:
        return BadPlace(path, record.line, str(error))


def _text_row(path: Path, record: _Record, columns: Columns) -> TextRow | BadPlace:
    try:
        if record.name is not None and not _is_text(record.name):
            raise ValueError("the id is not UTF-8 text")
        return TextRow(path, record.line, _text(path, record.values, columns), record.name)
    except ValueError as error:
        return BadPlace(path, record.line, str(error))


def _text(path: Path, values: Mapping[str, Any], columns: Columns) -> str:
    column = "sequence" if is_fasta(path) else columns.text
    if column is None:
        column = next((name for name in TEXT_COLUMNS if name in values), TEXT_COLUMNS[0])
    text = _value(values, column)
    if not isinstance(values[column], str):
        raise ValueError(f"{column!r} holds {type(values[column]).__name__}, not text")
    return text


def _value(values: Mapping[str, Any], column: str) -> str:
    """A value as text: labels may also be numbers or booleans in JSON."""
    if column not in values:
        raise ValueError(f"no {column!r} among {shown(sorted(values)[:20])}")
    value = values[column]
    if not isinstance(value, (str, int)):
        raise ValueError(f"{column!r} holds {type(value).__name__}, not text or a whole number")
    text = value if isinstance(value, str) else json.dumps(value)
    if not text.strip():
        raise ValueError(f"{column!r} is empty")
    if not _is_text(text):
        raise ValueError(f"{column!r} is not UTF-8 text")
    return text.strip()


def _is_text(text: str) -> bool:
    """Whether there is no half surrogate, which stands for a byte that is not UTF-8, or which JSON has spelt."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


# --- the kinds of files ----------------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[bytes | BadPlace | None]:
    """The lines of a file, without a byte order mark; None is one that is too long, a BadPlace says it breaks off."""
    number = 0
    try:
        with path.open("rb") as raw, decompressed(raw, path) as stream:
            for line in lines_of(stream):
                number += 1
                if number == 1 and line is not None:
                    _check_start(path, line)
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield line
    except (OSError, EOFError, zlib.error) as error:
        yield BadPlace(path, number + 1, f"cannot be read further ({error})")


def _check_start(path: Path, line: bytes) -> None:
    """Refuse a file in UTF-16, by its mark or a zero byte: none of its lines could be read, and each would be bad."""
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line:
        raise RunError(f"{path}: not UTF-8 text; it looks like UTF-16: save it as UTF-8")


def _json_lines(path: Path) -> Iterator[_Record | BadPlace]:
    for number, line in enumerate(_lines(path), start=1):
        if isinstance(line, BadPlace):
            yield line
        elif line is None or line.strip():
            try:
                values = parsed_line(line)
            except ValueError as error:
                yield BadPlace(path, number, str(error))
                continue
            if isinstance(values, dict):
                yield _Record(number, values)
            else:
                yield BadPlace(path, number, f"not a JSON object but {type(values).__name__}")


def _separated(path: Path, quote: str, check: Callable[[list[str]], None]) -> Iterator[_Record | BadPlace]:
    """CSV or TSV with a header line, which `check` may refuse.

    A record begins in the line that is given, and may end in a later one.
    """
    delimiter = DELIMITERS[plain_suffix(path)]
    plain = quote == "none" or (quote == "auto" and delimiter == "\t")
    broken: list[BadPlace] = []
    size = 0  # of a record so far

    def texts() -> Iterator[str]:
        nonlocal size
        for number, line in enumerate(_lines(path), start=1):
            if isinstance(line, BadPlace):
                broken.append(line)
                return
            size += 0 if line is None else len(line)
            if line is None or size > LARGEST_DOCUMENT:  # where the next record begins nobody knows
                broken.append(BadPlace(path, number, f"cannot be read further ({TooLongError('a row')})"))
                return
            # Bytes that are no text become half surrogates, which are found again in the value that has them.
            yield line.decode("utf-8", errors="surrogateescape")

    reader = csv.reader(
        texts(), delimiter=delimiter, quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL, strict=True
    )
    header: list[str] | None = None
    while True:
        line, size = reader.line_num + 1, 0
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            if broken:  # which is why
                break
            yield BadPlace(path, line, str(error))
            continue
        if not cells:
            continue
        if header is None:
            header = [name.strip() for name in cells]
            if not all(map(_is_text, header)):
                raise RunError(f"{path}: not UTF-8 text, by its header: save it as UTF-8")
            if len(set(header)) < len(header):
                raise InputError("paths", str(path), f"has columns of the same name: {shown(header)}")
            check(header)
        elif len(cells) != len(header):
            yield BadPlace(path, line, f"{counted(len(cells), 'field')}, but the header has {len(header)}")
        else:
            yield _Record(line, dict(zip(header, cells, strict=True)))
    yield from broken


def _fasta(path: Path, columns: Columns, *, labelled: bool) -> Iterator[_Record | BadPlace]:
    if labelled and columns.split is not None:
        raise InputError("columns.split", columns.split, f"{path.name}: FASTA records have no columns")
    table = _table(Path(columns.table), columns) if labelled and columns.table is not None else None
    start, header, pieces, size = 0, "", [""], 0

    def record() -> _Record | BadPlace:
        if size > LARGEST_DOCUMENT:
            return BadPlace(path, start, str(TooLongError("a record")))
        values: dict[str, Any] = {"sequence": "".join(pieces)}
        if not labelled:
            return _Record(start, values, _record_name(header))
        try:
            values[columns.label] = _header_label(header, columns) if table is None else _table_label(header, table)
        except ValueError as error:
            return BadPlace(path, start, str(error))
        return _Record(start, values)

    for number, line in enumerate(_lines(path), start=1):
        if isinstance(line, BadPlace):  # the record before it may be cut short
            yield line
            return
        if line is None:
            size, text = LARGEST_DOCUMENT + 1, ""
        else:
            text = line.decode("utf-8", errors="surrogateescape").strip()
        if text.startswith(">"):
            if start:
                yield record()
            start, header, pieces, size = number, text[1:].strip(), [], 0
        elif text and not start:
            yield BadPlace(path, number, "a sequence without a header line before it")
        else:
            size += len(text)
            if size <= LARGEST_DOCUMENT:
                pieces.append(text)
    if start:
        yield record()


def _header_label(header: str, columns: Columns) -> str:
    fields = [field.strip() for field in header.split("|")]
    position = columns.field - 1 if columns.field > 0 else columns.field + len(fields)
    if not 0 <= position < len(fields):
        raise ValueError(f"the header has no field {columns.field} ({len(fields)} divided by |)")
    return fields[position]


def _record_name(header: str) -> str:
    """The id of a FASTA record: its header up to the first blank or bar."""
    return (header.replace("|", " ").split() or [""])[0]


def _table_label(header: str, table: Mapping[str, str]) -> str:
    name = _record_name(header)
    if not _is_text(name):
        raise ValueError("the id is not UTF-8 text")
    if name not in table:
        raise ValueError(f"the table of labels has no id {name!r}")
    return table[name]


def _table(path: Path, columns: Columns) -> dict[str, str]:
    """Labels by id. A bad place is an error: it might be any record's."""
    if not path.is_file() or plain_suffix(path) not in DELIMITERS:
        raise InputError("columns.table", str(path), "must be a CSV or TSV file")

    def check(names: list[str]) -> None:
        for column in (columns.table_id, columns.label):
            if column not in names:
                raise InputError("columns.table", str(path), f"has no column {shown(column)}: {shown(names)}")

    labels: dict[str, str] = {}
    for record in _separated(path, columns.quote, check):
        if isinstance(record, BadPlace):
            raise InputError("columns.table", str(path), str(record))
        labels[record.values[columns.table_id].strip()] = record.values[columns.label]
    return labels
