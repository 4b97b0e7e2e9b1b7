from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meristem.data import BadPlace, Document, find_files, read_documents, stdlib_files
from meristem.data.text import corpus
from meristem.errors import InputError, RunError

from .helpers import SHARED, TEXTS, needs_shared, write_jsonl


def texts_of(path: Path, field: str = "text") -> list[str]:
    return [item.text if isinstance(item, Document) else f"BAD {item.line}" for item in read_documents(path, field)]


def only_bad(path: Path) -> BadPlace:
    (item,) = (item for item in read_documents(path) if isinstance(item, BadPlace))
    return item


def test_find_files_is_sorted_and_knows_suffixes(tmp_path: Path) -> None:
    for name in (
        "b.txt",
        "a/z.jsonl.gz",
        "a/x.py",
        "c.MD.zst",
        "d.parquet",
        "e.bin",
        "f.parquet.gz",
        ".git/g.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [path.relative_to(tmp_path).as_posix() for path in find_files([tmp_path, tmp_path / "b.txt"])]
    assert names == ["a/x.py", "a/z.jsonl.gz", "b.txt", "c.MD.zst", "d.parquet"]


def test_find_files_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "e.bin").touch()
    with pytest.raises(InputError, match=r"e\.bin.*\.txt, \.md, \.py, \.jsonl.*\.parquet"):
        find_files([tmp_path / "e.bin"])
    with pytest.raises(InputError, match="no files to read"):
        find_files([tmp_path])
    with pytest.raises(InputError, match="no such file"):
        find_files([tmp_path / "none.txt"])


def test_all_forms_give_the_same_documents(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    plain = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    content = plain.read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    half = len(content) // 2
    frames = [zstandard.compress(part) for part in (content[:half], content[half:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    pq.write_table(pa.table({"text": TEXTS, "n": range(len(TEXTS))}), tmp_path / "a.parquet", row_group_size=7)
    for path in find_files([tmp_path]):
        assert texts_of(path) == TEXTS, path


def test_text_files_are_one_document(tmp_path: Path) -> None:
    import zstandard

    content = "\ufeffone\r\ntwo\n".encode()
    (tmp_path / "a.md").write_bytes(content)
    (tmp_path / "a.md.gz").write_bytes(gzip.compress(content))
    (tmp_path / "a.md.zst").write_bytes(zstandard.compress(content))
    (tmp_path / "empty.txt").touch()
    assert [texts_of(path) for path in find_files([tmp_path])] == [["one\r\ntwo\n"]] * 3 + [[]]


def test_bad_lines_are_named_and_passed_over(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": "\xff"}',
        b'{"text": "cut',
        b'{"body": "no text"}',
        b'{"text": 3}',
        b"[1]",
        b"",
        b'{"text": ""}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    items = list(read_documents(path))
    assert [item.text for item in items if isinstance(item, Document)] == ["good", "last"]
    bad = [str(item) for item in items if isinstance(item, BadPlace)]
    expected = [
        "2: not UTF-8", "3: not JSON", "4: no field 'text' among ['body']", "5: field 'text' holds int",
        "6: not a JSON object but list", "9: field 'text' is not Unicode", "10: not JSON",
    ]  # fmt: skip
    assert [place.removeprefix(f"{path}:")[: len(want)] for place, want in zip(bad, expected, strict=True)] == expected


def test_the_text_field_can_be_named(tmp_path: Path) -> None:
    assert texts_of(write_jsonl(tmp_path / "a.jsonl", TEXTS, "content"), "content") == TEXTS


def test_bad_text_file_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xffee\n")
    assert str(only_bad(tmp_path / "a.txt")) == f"{tmp_path / 'a.txt'}:3: not UTF-8 (invalid start byte)"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_damaged_compression(suffix: str, damage: str, tmp_path: Path) -> None:
    import zstandard

    lines = "".join(json.dumps({"text": f"{i} {hash(str(i))}"}) + "\n" for i in range(50_000)).encode()
    packed = gzip.compress(lines, 1) if suffix == ".gz" else zstandard.compress(lines)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed[: len(packed) // 2] if damage == "cut" else b"garbage" * 9)
    items = list(read_documents(path))
    assert isinstance(items[-1], BadPlace)
    assert items[-1].line == len(items)
    assert (len(items) > 10_000) == (damage == "cut")
    path.rename(tmp_path / f"a.txt{suffix}")
    assert only_bad(tmp_path / f"a.txt{suffix}").line == 1


def test_bad_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "b"], "n": [1, 2, 3]}), path)
    assert texts_of(path) == ["a", "BAD 2", "b"]
    assert "no column 'body' among ['text', 'n']" in str(next(iter(read_documents(path, "body"))))
    path.write_bytes(path.read_bytes()[:-10])
    assert only_bad(path).line == 1


def test_stdlib_is_sorted_capped_and_source_only() -> None:
    files = stdlib_files(500_000)
    assert files == sorted(files) == stdlib_files(500_000)
    assert 400_000 < sum(path.stat().st_size for path in files) <= 500_000
    assert not any({"test", "tests", "site-packages", "idlelib"} & set(path.parts[-3:]) for path in files)
    assert all(isinstance(item, Document) for path in files for item in read_documents(path))


@needs_shared
def test_real_documents() -> None:
    documents = [d for d in read_documents(SHARED / "lm_text/val.jsonl.zst") if isinstance(d, Document)]
    assert len(documents) == 729
    assert [d.line for d in documents[:3]] == [1, 2, 3]
    assert all(d.text for d in documents)


@pytest.mark.parametrize(("package", "suffix"), [("zstandard", ".jsonl.zst"), ("pyarrow", ".parquet")])
def test_a_missing_package_is_named(package: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / f"a{suffix}"
    path.touch()
    with pytest.raises(RunError, match=rf"{package}.*meristem\[data\]"):
        list(read_documents(path))


@given(st.lists(st.integers(0, 40), max_size=8), st.booleans(), st.integers(1, 9), st.integers(1, 30))
def test_lines_are_whole_or_too_long(sizes: list[int], ends: bool, piece: int, longest: int) -> None:
    lines = [bytes([97 + i]) * size + b"\n" for i, size in enumerate(sizes)]
    content = b"".join(lines) if ends else b"".join(lines).removesuffix(b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "AT_ONCE", piece)
        patch.setattr(corpus, "LARGEST_DOCUMENT", longest)
        found = list(corpus.lines_of(io.BytesIO(content)))
    assert found == [line if len(line) <= longest else None for line in io.BytesIO(content)]
