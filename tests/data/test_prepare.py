from __future__ import annotations

import gzip
import os
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import zstandard

from commands import Call
from meristem.data import (
    ByteTokenizer,
    Index,
    PreparationProgress,
    TokenData,
    Tokenizer,
    held_out_warning,
    load_tokenizer,
    prepare,
    shown_progress,
    verify,
)
from meristem.data.text import corpus
from meristem.data.text.shards import SPLITS, SplitName
from meristem.errors import InputError, Remedy, RunError

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
    assert prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=Wide(), held_out=0).dtype == "uint32"
    assert texts_in(tmp_path / "out", "train") == ["hello"]
    assert (tmp_path / "out/train-00000.bin").stat().st_size == 6 * 4


def test_workers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("meristem.data.text.prepare")  # the package's own name for it is the function
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


@pytest.mark.parametrize(("texts", "held_out"), [(["1"], 0.9), (["2"] * 3, 0.999999), (TEXTS, 0.0)])
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
    with pytest.raises(RunError, match=re.escape(f"{bad}:{line}: ") + ".*pass over such places"):
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
    reports: list[PreparationProgress] = []
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
        with pytest.raises(InputError, match=r"overwrite it"):
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
    def interrupt(progress: PreparationProgress) -> None:
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
    with pytest.raises(InputError, match=rf"^{setting} = "):
        prepare([tmp_path], tmp_path / "out", tokenizer=BYTES, **{setting: value})  # type: ignore[arg-type]


@needs_shared
def test_real_text_with_gpt2(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(SHARED / "tokenizers/gpt2")
    index = prepare([SHARED / "lm_text/val.jsonl.zst"], tmp_path / "out", tokenizer=tokenizer)
    assert index.train.documents + index.held_out.documents == 729
    assert index.held_out.documents > 0
    assert texts_in(tmp_path / "out", "train")[0][:40].isprintable()


# --- a single text ---------------------------------------------------------------------------------------------------

PLAY = "".join(f"Line {i} of a play, {'with more words, ' * (i % 5)}and an end.\n" for i in range(500))


@pytest.mark.parametrize("held_out", [0.005, 0.1, 0.5, 0.99])
def test_the_end_of_a_single_text_is_held_out(held_out: float, tmp_path: Path) -> None:
    path = tmp_path / "play.txt"
    path.write_text(PLAY)
    index = prepare([path], tmp_path / "out", tokenizer=BYTES, held_out=held_out)
    (begin,), (end,) = (texts_in(tmp_path / "out", split) for split in SPLITS)
    assert begin + end == PLAY
    assert begin.endswith("\n"), "no line is torn"
    assert abs(len(end) / len(PLAY) - held_out) < 150 / len(PLAY)
    assert (index.train.documents, index.held_out.documents) == (1, 1)
    assert index.text_bytes == len(PLAY)
    assert verify(tmp_path / "out") == index


@pytest.mark.parametrize("text", ["ab", "a\n", "日本", "no line break " * 100, "x" + "\n" * 50, "a" * 1000 + "\nb"])
@pytest.mark.parametrize("held_out", [1e-9, 0.3, 0.999999])
def test_both_sides_of_a_single_text_have_a_character(text: str, held_out: float, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [text])
    prepare([path], tmp_path / "out", tokenizer=BYTES, held_out=held_out)
    (begin,), (end,) = (texts_in(tmp_path / "out", split) for split in SPLITS)
    assert begin + end == text
    assert begin
    assert end


def test_equal_texts_are_all_cut_at_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("meristem.data.text.prepare"), "CHUNK_CHARACTERS", len(PLAY) + 1)
    path = write_jsonl(tmp_path / "a.jsonl", [PLAY] * 5)
    made = [
        prepare([path], tmp_path / f"out{n}", tokenizer=small_bpe(), held_out=0.2, workers=n, shard_tokens=3000)
        for n in (1, 2)
    ]
    assert made[0] == made[1]
    begins, ends = (set(texts_in(tmp_path / "out1", split)) for split in SPLITS)
    assert len(begins) == len(ends) == 1
    assert begins.pop() + ends.pop() == PLAY
    assert made[0].held_out.documents == 5


def test_few_held_out_windows_are_said(tmp_path: Path) -> None:
    path = tmp_path / "play.txt"
    for size, windows in ((100_000, 9), (1_024 * 200 + 3, 20), (1_024 * 1_010, None)):
        path.write_text((PLAY * (1 + size // len(PLAY)))[:size])
        warning = held_out_warning(prepare([path], tmp_path / str(size), tokenizer=BYTES, held_out=0.1))
        if windows is None:
            assert warning is None
        else:
            assert warning is not None
            assert f"only {windows} windows of 1,024 tokens" in warning.text
            assert warning.remedy == Remedy(("held_out",))


# --- inputs that are no files, or too large --------------------------------------------------------------------------


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path / "pipe.txt", Path("/dev/zero")):
        with pytest.raises(InputError, match=r"paths = .*neither a regular file nor a folder"):
            prepare([path], tmp_path / "out", tokenizer=BYTES)
    (tmp_path / "a.txt").write_text("text")
    prepare([tmp_path], tmp_path / "out", tokenizer=BYTES)  # in a folder they are passed over


@pytest.mark.parametrize("compression", [gzip.compress, zstandard.compress])
def test_a_file_that_grows_without_end_is_a_bad_place(
    compression: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, suffix = 1 << 20, "gz" if compression is gzip.compress else "zst"
    monkeypatch.setattr(corpus, "LARGEST_DOCUMENT", limit)
    monkeypatch.setattr(corpus, "COMPRESSED_AT_ONCE", 64)
    (tmp_path / f"a.txt.{suffix}").write_bytes(compression(b"a" * (100 * limit)))
    line, fine = b'{"text": "' + b"a" * (100 * limit) + b'"}\n', b'{"text": "fine"}\n'
    (tmp_path / f"b.jsonl.{suffix}").write_bytes(compression(fine + line + fine))
    tracemalloc.start()
    for name, number in (("a.txt", 1), ("b.jsonl", 2)):
        path = tmp_path / f"{name}.{suffix}"
        assert path.stat().st_size < 200_000
        with pytest.raises(RunError, match=re.escape(f"{path}:{number}: a ") + ".* longer than 1,048,576 bytes"):
            prepare([path], tmp_path / "out", tokenizer=BYTES)
    places = list(corpus.read_documents(tmp_path / f"b.jsonl.{suffix}"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [getattr(place, "text", None) for place in places] == ["fine", None, "fine"]
    assert peak < 20 * limit


@pytest.mark.parametrize(("setting", "value"), [("workers", 10**9), ("shard_tokens", True), ("held_out", float("nan"))])
def test_settings_that_cannot_be_are_named(setting: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{setting} = "):
        prepare([tmp_path], tmp_path / "out", tokenizer=BYTES, **{setting: value})  # type: ignore[arg-type]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_warns_of_few_held_out_windows(call: Call, tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text(PLAY)
    said = call("data", "prepare", tmp_path / "play.txt", "--out", tmp_path / "out")
    assert said.code == 0
    assert said.err.startswith("warning: only 0 windows of 1,024 tokens held out")
    said = call("data", "prepare", tmp_path / "play.txt", "--out", tmp_path / "all", "--held-out", "0")
    assert (said.code, said.err) == (0, "")


def test_the_command_refuses_bad_folders_and_files(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "play.txt").write_text(PLAY)
    os.mkfifo(tmp_path / "tokenizer.json")
    os.mkfifo(tmp_path / "pipe.md")
    bad = [
        (["play.txt", "--out", "."], "out = '.'"),
        (["play.txt", "--out", "out\udcff"], "must be valid UTF-8"),
        (["play.txt", "--out", "play.txt/x"], "play.txt/x: Not a directory"),
        (["play.txt", "--out", "x", "--tokenizer", "tokenizer.json"], "tokenizer.json: cannot be read"),
        (["pipe.md", "--out", "x"], "paths = 'pipe.md'"),
    ]
    for arguments, words in bad:
        said = call("data", "prepare", *arguments)
        assert said.code == 2
        assert words in said.err
        assert said.err.count("\n") == 1
    assert call("data", "prepare", "play.txt", "--out", "missing/../x").code == 0
    assert sorted(os.listdir(tmp_path)) == ["pipe.md", "play.txt", "tokenizer.json", "x"]


def test_names_that_are_not_utf_8_can_be_read_and_shown(call: Call, tmp_path: Path) -> None:
    (tmp_path / "good \udcff.txt").write_text("some text\n" * 9)
    (tmp_path / "bad \udcff.txt").write_bytes(b"\xff")
    said = call("data", "prepare", tmp_path, "--out", tmp_path / "out", "--on-error", "skip")
    assert said.code == 0
    assert "bad \\udcff.txt:1: not UTF-8" in said.out
    assert call("data", "verify", tmp_path / "out").code == 0
