"""Reading labelled rows: what is written comes back, and what cannot be read is named by file and line."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from meristem.data.labelled import rows
from meristem.data.labelled.rows import Columns, Row, read_rows, row_files
from meristem.data.text import corpus
from meristem.data.text.corpus import BadPlace
from meristem.errors import InputError, RunError

# No half surrogates, which are not text, and no control characters but those that the format says it can hold.
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).filter(lambda t: t.strip())
WORD = st.text(st.sampled_from("abcXYZ019_"), min_size=1)


def read(path: Path, columns: Columns = Columns()) -> list[tuple[str, str]]:  # noqa: B008  (immutable)
    rows = list(read_rows(path, columns))
    assert all(isinstance(row, Row) for row in rows), rows
    return [(row.text, row.label) for row in rows if isinstance(row, Row)]


def write(path: Path, text: str) -> Path:
    content = text.encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(TEXT | st.just('a "quoted"\nline, and more'), WORD), min_size=1, max_size=6))
def test_csv_comes_back(rows: list[tuple[str, str]], compression: str) -> None:
    buffer = io.StringIO()
    csv.writer(buffer).writerows([("id", "text", "label"), *((str(i), *row) for i, row in enumerate(rows))])
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / f"rows.csv{compression}", buffer.getvalue())
        assert read(path) == [(text.strip(), label) for text, label in rows]


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(TEXT.map(lambda t: t.replace("\t", " ")).filter(str.strip), WORD), min_size=1))
def test_tsv_with_ordinary_quotes_comes_back(rows: list[tuple[str, str]]) -> None:
    with TemporaryDirectory() as folder:
        lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows)]
        path = write(Path(folder) / "rows.tsv", "\n".join(lines) + "\n")
        assert read(path) == [(text.strip(), label) for text, label in rows]


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(TEXT, WORD | st.integers() | st.booleans()), min_size=1))
def test_json_lines_come_back_with_any_label(rows: list[tuple[str, str | int]]) -> None:
    with TemporaryDirectory() as folder:
        lines = [json.dumps({"sequence": text, "label": label}) for text, label in rows]
        path = write(Path(folder) / "rows.jsonl", "\n".join(lines))
        labels = [label if isinstance(label, str) else json.dumps(label) for _, label in rows]
        assert read(path) == list(zip([text.strip() for text, _ in rows], labels, strict=True))


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(WORD, WORD), min_size=1), width=st.integers(1, 9))
def test_fasta_comes_back_however_it_is_wrapped(rows: list[tuple[str, str]], width: int) -> None:
    with TemporaryDirectory() as folder:
        lines: list[str] = []
        for number, (sequence, label) in enumerate(rows):
            lines += [f">id{number} virus|somewhere|{label}"]
            lines += [sequence[i : i + width] for i in range(0, len(sequence), width)] + [""]
        path = write(Path(folder) / "rows.fa", "\n".join(lines))
        assert read(path) == rows


def test_fields_of_fasta_headers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.fasta", ">x|Alpha|2021\nAC\nGT\n>y|Beta|2020\nAC\n")
    assert read(path, Columns(field=2)) == [("ACGT", "Alpha"), ("AC", "Beta")]
    assert read(path, Columns(field=-2)) == [("ACGT", "Alpha"), ("AC", "Beta")]
    assert read(path, Columns(text="ignored", label="clade")) == [("ACGT", "2021"), ("AC", "2020")]
    (bad, _) = read_rows(path, Columns(field=4))
    assert str(bad) == f"{path}:1: the header has no field 4 (3 divided by |)"
    with pytest.raises(InputError, match=r"columns\.field"):
        Columns(field=0)


def test_labels_of_fasta_records_from_a_table(tmp_path: Path) -> None:
    path = write(tmp_path / "a.faa.gz", ">x one\nAC\n>y|two\nGT\n>z\nAA\n")
    table = write(tmp_path / "t.csv", "clade,name\n20A,x\n21B,y\n")
    columns = Columns(label="clade", table=str(table), table_id="name")
    first, second, third = read_rows(path, columns)
    assert first == Row(path, 1, "AC", "20A", None)
    assert second == Row(path, 3, "GT", "21B", None)
    assert str(third) == f"{path}:5: the table of labels has no id 'z'"
    with pytest.raises(InputError, match=r"no column 'id'.*clade"):
        list(read_rows(path, Columns(label="clade", table=str(table))))
    write(table, "clade\n")
    with pytest.raises(InputError, match=r"no column 'name'.*clade"):
        list(read_rows(path, columns))


def test_quotes_as_asked_for(tmp_path: Path) -> None:
    text = 'sentence\tlabel\n"a" b\t1\n"c\td"\t0\n'
    path = write(tmp_path / "a.tsv", text)
    rows = list(read_rows(path, Columns()))
    assert rows[0] == Row(path, 2, '"a" b', "1", None)
    assert str(rows[1]).endswith("a.tsv:3: 3 fields, but the header has 2")
    quoted = list(read_rows(path, Columns(quote="csv")))
    assert isinstance(quoted[0], BadPlace), "text after a closing quote"
    assert quoted[1] == Row(path, 3, "c\td", "0", None)
    plain = write(tmp_path / "a.csv", 'text,label\n"a",1\n')
    assert read(plain) == [("a", "1")]
    assert read(plain, Columns(quote="none")) == [('"a"', "1")]
    with pytest.raises(InputError, match=r"quote.*auto, csv, none"):
        Columns(quote="single")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            Columns(label="lab"),
            r"columns\.text = None: must be named: a\.csv has none of sentence, text, sequence",
        ),
        (
            Columns(text="txt"),
            r"columns\.label = 'label': is not a column of a\.csv, which has \['txt', 'lab'\]",
        ),
        (Columns(text="body", label="lab"), r"columns\.text = 'body': is not a column"),
        (Columns(text="txt", label="lab", split="part"), r"columns\.split = 'part': is not a column"),
    ],
)
def test_a_column_that_is_missing_is_not_a_bad_row(tmp_path: Path, columns: Columns, message: str) -> None:
    for text in ("a b,1\n", ""):  # also where there is nothing but a header
        path = write(tmp_path / "a.csv", f"txt,lab\n{text}")
        with pytest.raises(InputError, match=message):
            list(read_rows(path, columns))


@pytest.mark.parametrize(
    ("name", "content", "line", "reason"),
    [
        ("a.tsv", b"text\tlabel\nx\t1\n\ny\n", 4, "1 field, but the header has 2"),
        ("a.tsv", b"text\tlabel\n \t1\n", 2, "'text' is empty"),
        ("a.tsv", b"text\tlabel\nx\t\n", 2, "'label' is empty"),
        ("a.csv", b'text,label\n"two\nlines",1\nx\n', 4, "1 field,"),
        ("a.csv", b"text,label\nf\xff,1\n", 2, "'text' is not UTF-8 text"),
        ("a.jsonl", b'{"text": "x", "label": 1}\n{"text": "x"}\n', 2, "no 'label' among ['text']"),
        ("a.jsonl", b'{"text": 3, "label": 1}\n', 1, "'text' holds int"),
        ("a.jsonl", b'{"text": "x", "label": null}\n', 1, "'label' holds NoneType"),
        ("a.jsonl", b'{"text": "f\xff", "label": 1}\n', 1, "not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800", "label": 1}\n', 1, "'text' is not UTF-8 text"),
        ("a.jsonl", b"[]\n", 1, "not a JSON object but list"),
        ("a.jsonl", b"{\n", 1, "not JSON"),
        ("a.fasta", b"ACGT\n>a|x\nACGT\n", 1, "a sequence without a header line before it"),
        ("a.fasta", b">a|x\n>b|y\nACGT\n", 1, "'sequence' is empty"),
        ("a.fasta", b">a|\nAC\n", 1, "'label' is empty"),
        ("a.fasta", b">a|caf\xe9\nAC\n", 1, "'label' is not UTF-8 text"),
        ("a.tsv.gz", gzip.compress(b"text\tlabel\nx\t1\n", mtime=0)[:-9], 3, "cannot be read further"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, name: str, content: bytes, line: int, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (place,) = [row for row in read_rows(path, Columns()) if isinstance(row, BadPlace)]
    assert (place.path, place.line) == (path, line)
    assert reason in place.reason


def test_reading_goes_on_after_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na,1\nb\nc,2\n")
    assert [row.line for row in read_rows(path, Columns())] == [2, 3, 4]


def test_columns_of_ones_own_and_splits(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "no", "protein": "MF", "clade": "20A", "part": "dev"}\n')
    columns = Columns(text="protein", label="clade", split="part")
    assert list(read_rows(path, columns)) == [Row(path, 1, "MF", "20A", "dev")]
    with pytest.raises(InputError, match="FASTA records have no columns"):
        list(read_rows(write(tmp_path / "a.fa", ">a|b\nAC\n"), columns))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "text,label\r\nx,1\r\n"),
        ("a.tsv", "text\tlabel\r\nx\t1\r\n"),
        ("a.jsonl", '{"text": "x", "label": 1}\r\n'),
        ("a.fasta", ">a|1\r\nx\r\n"),
    ],
)
def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8-sig"))
    assert read(path) == [("x", "1")]
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):  # the first has a mark
        path.write_bytes(text.encode(encoding))
        with pytest.raises(RunError) as error:
            read(path)
        assert str(error.value) == f"{path}: not UTF-8 text; it looks like UTF-16: save it as UTF-8"


def test_a_file_whose_header_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("straße,label\nx,1\n".encode("latin-1"))
    with pytest.raises(RunError, match=r"a\.csv: not UTF-8 text, by its header: save it as UTF-8$"):
        read(path)


def test_bytes_that_are_no_text_matter_only_where_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("text,label,town\nx,1,Köln\n".encode("latin-1"))
    assert read(path) == [("x", "1")]
    path = tmp_path / "a.fasta"
    path.write_bytes(">Köln\nAC\n>x Köln\nGT\n".encode("latin-1"))
    first, second = read_rows(path, Columns(table=str(write(tmp_path / "t.csv", "id,label\nx,1\n"))))
    assert str(first) == f"{path}:1: the id is not UTF-8 text"
    assert second == Row(path, 3, "GT", "1", None)


def test_columns_of_the_same_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="columns of the same name"):
        list(read_rows(write(tmp_path / "a.csv", "text,text,label\na,b,1\n"), Columns()))


def test_files_that_cannot_be_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        row_files([tmp_path / "absent.csv"])
    with pytest.raises(InputError, match=r"unknown kind of file; must be \.csv"):
        row_files([write(tmp_path / "a.txt", "x")])


# --- what is too long ------------------------------------------------------------------------------------------------


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (corpus, rows):
        monkeypatch.setattr(module, "LARGEST_DOCUMENT", 1 << 16)
    monkeypatch.setattr(corpus, "COMPRESSED_AT_ONCE", 64)
    return 1 << 16


@pytest.mark.parametrize(
    ("name", "begin", "middle", "end", "line", "found"),
    [
        (
            "a.jsonl",
            '{"text": "a", "label": 1}\n{"text": "',
            "x",
            '", "label": 0}\n{"text": "b", "label": 0}\n',
            2,
            "ab",
        ),
        ("a.csv", 'text,label\na,1\n"', "x", '",0\nb,0\n', 3, "a"),
        ("a.tsv", "text\tlabel\na\t1\n", "x", "\t0\nb\t0\n", 3, "a"),
        ("a.csv", 'text,label\na,1\n"', "line\n", '",0\nb,0\n', None, "a"),
        ("a.csv", "text,label\na,1\n", '"\n",', '",0\nb,0\n', None, "a"),
        ("a.fasta", ">1|1\na\n>2|0\n", "x", "\n>3|0\nb\n", 3, "ab"),
        ("a.fasta", ">1|1\na\n>2|0\n", "line\n", "\n>3|0\nb\n", 3, "ab"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_rows_that_are_too_long_are_bad_places(
    name: str, begin: str, middle: str, end: str, line: int | None, found: str, suffix: str, limit: int, tmp_path: Path
) -> None:
    content = (begin + middle * (20 * limit // len(middle)) + end).encode()
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(
        gzip.compress(content) if suffix == ".gz" else zstandard.compress(content) if suffix == ".zst" else content
    )
    tracemalloc.start()
    items = list(read_rows(path, Columns()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    bad = [item for item in items if isinstance(item, BadPlace)]
    assert len(bad) == 1
    assert line is None or bad[0].line == line
    assert "longer than 65,536 bytes" in str(bad[0])
    assert "".join(item.text for item in items if isinstance(item, Row)) == found
    assert peak < 8_000_000


def test_pipes_and_devices_are_no_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(InputError, match="is not a regular file"):
        row_files([tmp_path / "pipe.csv"])
    columns = Columns(table=str(tmp_path / "pipe.csv"))
    (tmp_path / "a.fasta").write_text(">1|1\nACGT\n")
    with pytest.raises(InputError, match=r"columns\.table = .*must be a CSV"):
        list(read_rows(tmp_path / "a.fasta", columns))


def test_no_message_repeats_long_names(tmp_path: Path) -> None:
    names = [f"{'long' * 100}{i}" for i in range(30)]
    (tmp_path / "a.csv").write_text(",".join(names) + "\n" + ",".join("x" * 30) + "\n")
    (tmp_path / "b.csv").write_text(",".join(names[:1] * 2) + "\n1,2\n")
    for name in ("a.csv", "b.csv"):
        with pytest.raises(InputError) as caught:
            list(read_rows(tmp_path / name, Columns()))
        assert len(str(caught.value)) < 600
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(names, 1)) + "\n")
    (place,) = read_rows(tmp_path / "a.jsonl", Columns())
    assert len(str(place)) < 300 + len(str(tmp_path))
