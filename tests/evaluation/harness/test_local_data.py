"""Rows of local copies: how files are cut, and what is said of those that are not as they should be."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from meristem.errors import InputError
from meristem.evaluation.harness.local_data import forget, pages_of, rows

FILE = "zeroshot/rows.jsonl.gz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "zeroshot").mkdir()
    forget()
    return tmp_path


def read(folder: Path, **options: object) -> list[dict[str, object]]:
    found = rows(data=str(folder), file=FILE, split="test", fields=["a"], version=1.0, **options)  # type: ignore[arg-type]
    return list(found["test"])


def test_pages_begin_at_titles_of_the_first_order() -> None:
    text = " \n = One = \n \n x = y \n = = Part = = \n = = = Small = = = \n z \n = Two ( = ) = \n \n end \n"
    assert pages_of(text) == [
        " = One = \n \n x = y \n = = Part = = \n = = = Small = = = \n z ", " = Two ( = ) = \n \n end \n",
    ]  # fmt: skip
    assert pages_of("no title\n") == ["no title\n"]


def test_rows_may_be_packed_or_not_and_hold_any_character(folder: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra eval (make test-eval)")
    lines = '{"a": "one\u2028two", "b": 1}\n\n{"a": "x", "b": 2}\n'
    (folder / "zeroshot/rows.jsonl").write_text(lines, encoding="utf-8")
    assert read(folder) == [{"a": "one\u2028two"}, {"a": "x"}]
    (folder / FILE).write_bytes(gzip.compress(b'{"a": "packed", "b": 3}\n'))
    forget()
    assert read(folder) == [{"a": "packed"}]
    assert read(folder, where={"b": 3}) == [{"a": "packed", "b": 3}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"data = '.*': holds no zeroshot/rows\.jsonl\.gz, nor one that is not packed"),
        (b"not packed", r"zeroshot/rows\.jsonl\.gz there cannot be read"),
        (gzip.compress(b'{"a": 1}')[:-9], r"zeroshot/rows\.jsonl\.gz there cannot be read"),
        (gzip.compress(b"\xff"), r"zeroshot/rows\.jsonl\.gz there cannot be read"),
        (gzip.compress(b'{"a": 1}\n{"b": 1}\n'), r"line 2 of zeroshot/rows\.jsonl\.gz .* with the fields a$"),
        (gzip.compress(b'{"a": 1}\n{"a": \n'), r"line 2 of zeroshot/rows\.jsonl\.gz there must be a JSON object"),
        (gzip.compress(b"[1]\n"), "line 1 of"),
        (gzip.compress(b"\n"), r"zeroshot/rows\.jsonl\.gz there has no rows"),
    ],
    ids=[
        "missing",
        "not packed",
        "cut off",
        "no text",
        "no field",
        "no JSON",
        "no object",
        "empty",
    ],  # packed has a time
)
def test_what_is_wrong_with_a_file_is_said(folder: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (folder / FILE).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(folder)
