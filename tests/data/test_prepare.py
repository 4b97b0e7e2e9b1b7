from __future__ import annotations

import gzip
import os
import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from meristem.data import (
    ByteTokenizer,
    Index,
    Progress,
    TokenData,
    Tokenizer,
    load_tokenizer,
    prepare,
    shown_progress,
    verify,
)
from meristem.data.shards import SPLITS, SplitName
from meristem.errors import InputError, RunError

from .helpers import SHARED, TEXTS, documents_in, needs_shared, shard_bytes, small_bpe, write_jsonl

BYTES = ByteTokenizer()


def texts_in(folder: Path, split: SplitName) -> list[str]:
    stream, tokenizer = TokenData.open(folder).split(split), load_tokenizer(folder)
    tokens = stream.window(0, len(stream)).tolist()
    return [tokenizer.decode(ids) for ids in documents_in(tokens, tokenizer.end_of_text)]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "partial" in path.name or "old" in path.name)


@pytest.mark.parametrize("kind", ["bytes", "hf"])
def test_round_trip(kind: str, tmp_path: Path) -> None:
    tokenizer: Tokenizer = BYTES if kind == "bytes" else small_bpe()
    index = prepare([write_jsonl(tmp_path / "a.jsonl", TEXTS)], tmp_path / "out", tokenizer=tokenizer, held_out=0.1)
    train, held_out = (texts_in(tmp_path / "out", split) for split in SPLITS)
    assert train == [text for text in TEXTS if text in train]
    assert Counter(train) + Counter(held_out) == Counter(TEXTS)
    assert (index.train.documents, index.held_out.documents) == (len(train), len(held_out))
    assert index.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert index.held_out.text_bytes == sum(len(text.encode()) for text in held_out)
    assert index.dtype == "uint16"
    assert index == Index.load(tmp_path / "out") == verify(tmp_path / "out")
    assert not leftovers(tmp_path)


def test_large_vocabularies_are_stored_in_four_bytes(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        vocabulary = 65537

    (tmp_path / "a.txt").write_text("hello")
    assert prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=Wide()).dtype == "uint32"
    assert texts_in(tmp_path / "out", "train") == ["hello"]
    assert (tmp_path / "out/train-00000.bin").stat().st_size == 6 * 4


def test_workers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("meristem.data.prepare")  # the package's own name for it is the function
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 300)  # many chunks
    files = [write_jsonl(tmp_path / f"{i}.jsonl", [f"{i} {text}" for text in TEXTS]) for i in range(2)]
    tokenizer = small_bpe()
    made = [
        prepare(
            files,
            tmp_path / f"out{workers}",
            tokenizer=tokenizer,
            held_out=0.1,
            shard_tokens=777,
            workers=workers,
        )
        for workers in (1, 2)
    ]
    assert made[0] == made[1]
    assert len(made[0].train.shards) > 1
    for split in SPLITS:
        one, two = (shard_bytes(tmp_path / f"out{w}", made[0].split(split)) for w in (1, 2))
        assert one == two


def test_held_out_depends_on_the_text_alone(tmp_path: Path) -> None:
    prepare([write_jsonl(tmp_path / "a.jsonl", TEXTS)], tmp_path / "a", tokenizer=BYTES, held_out=0.3)
    repeated = [*reversed(TEXTS), *TEXTS[:30]]
    prepare([write_jsonl(tmp_path / "b.jsonl", repeated)], tmp_path / "b", tokenizer=BYTES, held_out=0.3)
    assert set(texts_in(tmp_path / "a", "held_out")) == set(texts_in(tmp_path / "b", "held_out"))
    assert set(texts_in(tmp_path / "b", "held_out")).isdisjoint(texts_in(tmp_path / "b", "train"))
    assert 8 < len(texts_in(tmp_path / "a", "held_out")) < 30


@pytest.mark.parametrize("held_out", [1e-9, 0.999999999])
def test_both_splits_get_a_document(held_out: float, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    index = prepare([path], tmp_path / "out", tokenizer=BYTES, held_out=held_out, shard_tokens=500)
    assert sorted((index.train.documents, index.held_out.documents)) == [1, 59]
    assert Counter(texts_in(tmp_path / "out", "train") + texts_in(tmp_path / "out", "held_out")) == Counter(TEXTS)
    named = {shard.file for split in SPLITS for shard in index.split(split).shards}
    assert {path.name for path in (tmp_path / "out").glob("*.bin")} == named


@pytest.mark.parametrize(("texts", "held_out"), [(["one"], 0.9), (["same"] * 3, 0.999999), (TEXTS, 0.0)])
def test_all_goes_to_training_where_there_is_nothing_to_divide(
    texts: list[str], held_out: float, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    index = prepare([path], tmp_path / "out", tokenizer=BYTES, held_out=held_out)
    assert (index.train.documents, index.held_out.documents) == (len(texts), 0)
    assert len(TokenData.open(tmp_path / "out").split("held_out")) == 0
    assert not list((tmp_path / "out").glob("held-out*"))


def spoiled(folder: Path, damage: str) -> tuple[Path, int]:
    """A folder of two files with one bad place, and its line."""
    write_jsonl(folder / "a.jsonl", TEXTS[:5])
    bad = folder / "b.jsonl"
    if damage == "gzip":
        bad = folder / "b.jsonl.gz"
        bad.write_bytes(gzip.compress(b'{"text": "fine"}\n')[:-9])
        return bad, 2
    line = {"utf-8": b'{"text": "\xff"}', "json": b'{"text": ', "field": b'{"body": "x"}'}[damage]
    bad.write_bytes(b'{"text": "fine"}\n' + line + b'\n{"text": "after"}\n')
    return bad, 2


@pytest.mark.parametrize(("damage", "workers"), [("utf-8", 1), ("json", 1), ("field", 1), ("gzip", 1), ("json", 2)])
def test_bad_places_are_refused_with_their_place(damage: str, workers: int, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    bad, line = spoiled(tmp_path / "in", damage)
    with pytest.raises(RunError, match=re.escape(f"{bad}:{line}: ") + ".*--on-error skip"):
        prepare([tmp_path / "in"], tmp_path / "out", tokenizer=BYTES, workers=workers)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("damage", ["utf-8", "json", "field", "gzip"])
def test_bad_places_are_skipped_and_counted(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    bad, line = spoiled(tmp_path / "in", damage)
    with shown_progress() as report:
        index = prepare(
            [tmp_path / "in"],
            tmp_path / "out",
            tokenizer=BYTES,
            on_error="skip",
            held_out=1e-9,
            report=report,
        )
    assert index.skipped == 1
    texts = texts_in(tmp_path / "out", "train") + texts_in(tmp_path / "out", "held_out")
    assert sorted(texts) == sorted([*TEXTS[:5], "fine"] + (["after"] if damage != "gzip" else []))
    shown = capsys.readouterr().out
    assert shown.count(f"skipped {bad}:{line}: ") == 1
    assert f"prepared 100% of 0.0 MB, {len(texts)} documents" in shown


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("oops\n")
    with pytest.raises(RunError, match=r"no documents.*1 places skipped"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=BYTES, on_error="skip")
    assert not (tmp_path / "out").exists()


def test_preparing_again_returns_at_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    reports: list[Progress] = []
    first = prepare([path], tmp_path / "out", tokenizer=BYTES, report=reports.append)
    assert reports[-1].done
    assert reports[-1].tokens == first.train.tokens + first.held_out.tokens
    reports.clear()
    assert prepare([path], tmp_path / "out", tokenizer=BYTES, report=reports.append) == first
    assert not reports


def test_other_data_is_kept_unless_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    prepare([path], tmp_path / "out", tokenizer=BYTES, shard_tokens=500)
    write_jsonl(path, TEXTS[:9])
    for held_out in (0.005, 0.5):
        with pytest.raises(InputError, match=r"overwrite \(--overwrite\)"):
            prepare([path], tmp_path / "out", tokenizer=BYTES, held_out=held_out, shard_tokens=500)
    assert Index.load(tmp_path / "out").train.documents > 50
    index = prepare([path], tmp_path / "out", tokenizer=BYTES, overwrite=True)
    assert index.train.documents + index.held_out.documents == 9
    assert verify(tmp_path / "out") == index
    assert not leftovers(tmp_path)


def test_foreign_folders_are_never_replaced(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.doc").touch()
    with pytest.raises(InputError, match="not prepared data"):
        prepare([path], tmp_path / "out", tokenizer=BYTES, overwrite=True)
    (tmp_path / "out/index.json").write_text("{}")
    with pytest.raises(RunError, match=r"index\.json"):
        prepare([path], tmp_path / "out", tokenizer=BYTES, overwrite=True)
    assert (tmp_path / "out/mine.doc").exists()


def test_interruption_leaves_the_old_data(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(KeyboardInterrupt):
        prepare([path], tmp_path / "out", tokenizer=BYTES, report=interrupt)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    old = prepare([path], tmp_path / "out", tokenizer=BYTES)
    with pytest.raises(KeyboardInterrupt):
        prepare([path], tmp_path / "out", tokenizer=BYTES, held_out=0.5, overwrite=True, report=interrupt)
    assert verify(tmp_path / "out") == old


@pytest.mark.parametrize(
    ("setting", "value"), [("held_out", 1.0), ("on_error", "ignore"), ("shard_tokens", 0), ("workers", 0)]
)
def test_bad_settings_are_named(setting: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^{setting}( \(--on-error\))? = "):
        prepare([tmp_path], tmp_path / "out", tokenizer=BYTES, **{setting: value})  # type: ignore[arg-type]


@needs_shared
def test_real_text_with_gpt2(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(SHARED / "tokenizers/gpt2")
    index = prepare([SHARED / "lm_text/val.jsonl.zst"], tmp_path / "out", tokenizer=tokenizer)
    assert index.train.documents + index.held_out.documents == 729
    assert index.held_out.documents > 0
    assert texts_in(tmp_path / "out", "train")[0][:40].isprintable()
