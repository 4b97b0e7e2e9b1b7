"""Data are checked when they are opened: once, unless something changes; what is wrong is one line that names it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meristem.data import (
    ByteTokenizer,
    Cut,
    LabelledData,
    TokenData,
    findings_notes,
    findings_warnings,
    open_data,
    prepare,
    prepare_labelled,
    verify,
)
from meristem.data import check as module
from meristem.errors import InputError, RunError

from .helpers import TEXTS, small_bpe, write_jsonl

KINDS = ("bytes", "hf", "words", "tokenizer")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind of data."""
    root = tmp_path_factory.mktemp("data")
    text = write_jsonl(root / "a.jsonl", TEXTS)
    prepare([text], root / "bytes", tokenizer=ByteTokenizer(), held_out=0.2, shard_tokens=500)
    prepare([text], root / "hf", tokenizer=small_bpe(), held_out=0.2)
    rows = root / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"word{i % 7} and {i},{'ab'[i % 2]}\n" for i in range(60)))
    prepare_labelled([rows], root / "words", held_out=0.3)
    small_bpe().save(root)
    prepare_labelled([rows], root / "tokenizer", held_out=0.3, cut=Cut.named(str(root / "tokenizer.json")))
    return root


@pytest.fixture
def folder(originals: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of one of them, which a test may spoil."""
    return Path(shutil.copytree(originals / getattr(request, "param", "bytes"), tmp_path / "data"))


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def put(folder: Path, split: str, part: str, array: np.ndarray[Any, Any]) -> None:
    """Write another array into a file of labelled data, with a hash in the index that agrees."""

    def describe(index: dict[str, Any]) -> None:
        stored = index["splits"][split]["files"][part]
        data = array.astype(stored["dtype"]).tobytes()
        (folder / stored["file"]).write_bytes(data)
        stored["sha256"] = hashlib.sha256(data).hexdigest()

    change_index(folder, describe)


# --- once per folder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_a_folder_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = open_data(folder, said.append)
    assert len(said) == 1
    assert str(folder) in said[0]
    monkeypatch.setattr(module, "check_all", lambda data: pytest.fail("read again"))
    again = open_data(folder, said.append)
    assert len(said) == 1
    assert again.index == first.index
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_every_file_that_changes_is_read_again(folder: Path) -> None:
    open_data(folder)
    for name in [path.name for path in folder.iterdir() if path.name != "checked.json"]:
        path = folder / name
        times = (path.stat().st_atime_ns, path.stat().st_mtime_ns + 1)
        os.utime(path, ns=times)
        said: list[str] = []
        open_data(folder, said.append)
        assert said, name


def test_a_byte_that_changes_is_found_although_the_time_is_set_back(folder: Path) -> None:
    open_data(folder)
    path = folder / "train-00001.bin"
    before, good = path.stat(), path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(RunError, match=r"train-00001\.bin: does not have the sha256.*prepare it again"):
            open_data(folder)
    path.write_bytes(good)
    open_data(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"files": {}}', "null"])
def test_what_is_remembered_may_be_anything(folder: Path, content: str) -> None:
    (folder / "checked.json").write_text(content)
    said: list[str] = []
    open_data(folder, said.append)
    open_data(folder, said.append)
    assert len(said) == 1


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), RunError("a pipe")])
def test_a_folder_that_cannot_be_written_is_checked_every_time(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise error

    monkeypatch.setattr(module, "write_atomically", refuse)
    said: list[str] = []
    for _ in range(2):
        open_data(folder, said.append)
    assert len(said) == 2


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_verify_always_reads_everything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_data(folder)
    read: list[str] = []
    blocks = module._blocks

    def noticed(path: Path, *rest: Any) -> Iterator[module.Numbers]:
        read.append(path.name)
        return blocks(path, *rest)

    monkeypatch.setattr(module, "_blocks", noticed)
    verify(folder)
    assert sorted(read) == sorted(path.name for path in folder.glob("*.bin"))


def test_memory_does_not_grow_with_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 10)  # bytes, many of which make up a shard
    verify(folder)
    path = folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[-1] = 255
    path.write_bytes(content)
    with pytest.raises(RunError, match="train-00000"):
        verify(folder)


# --- what is wrong ---------------------------------------------------------------------------------------------------


def test_ids_must_be_below_the_vocabulary(folder: Path) -> None:
    path = folder / "train-00000.bin"
    ids = np.fromfile(path, "<u2")
    ids[7] = 257
    ids.tofile(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    change_index(folder, lambda index: index["splits"]["train"]["shards"][0].update(sha256=digest))
    TokenData.open(folder)
    for opening in (open_data, verify):
        with pytest.raises(
            RunError, match=r"train-00000\.bin: holds id 257, but there are 257 token ids; prepare it again"
        ):
            opening(folder)


@pytest.mark.parametrize("folder", ["words"], indirect=True)
@pytest.mark.parametrize("opening", [open_data, verify])
def test_labels_ids_and_row_ends_must_be_in_range(folder: Path, opening: Callable[[Path], object]) -> None:
    rows = LabelledData.open(folder).split("train")
    ids = LabelledData.open(folder).index.ids
    tokens, ends, labels = rows.tokens.copy(), rows.ends.copy(), rows.labels.copy()
    wrong: list[tuple[str, np.ndarray[Any, Any], str]] = [
        ("labels", np.where(np.arange(len(labels)) == 3, 2, labels), "holds labels above 1, but there are 2 classes"),
        ("labels", np.zeros_like(labels), "as many rows of each class"),
        ("tokens", np.where(np.arange(len(tokens)) == 3, ids, tokens), f"holds id {ids}, but there are {ids} token"),
        ("ends", np.concatenate([ends[1:2], ends[:1], ends[2:]]), "rows that end before they begin"),
        ("ends", np.concatenate([ends[:-1], ends[-1:] + 1]), r"ends the last row at \d+, but there are \d+ tokens"),
        ("ends", np.concatenate([ends[:-1], ends[-2:-1]]), "or are empty"),
        ("ends", np.concatenate([ends[:5] + 2**40, ends[5:]]), "rows that end before they begin"),
    ]
    for part, array, reason in wrong:
        put(folder, "train", part, array)
        with pytest.raises(RunError, match=rf"train-{part}\.bin: .*{reason}.*; prepare it again"):
            opening(folder)
        for name, good in {"tokens": tokens, "ends": ends, "labels": labels}.items():
            put(folder, "train", name, good)
    opening(folder)


@pytest.mark.parametrize(
    ("folder", "change", "reason"),
    [
        ("bytes", lambda i: i["splits"]["train"].update(tokens=1), "tokens is 1, but the shards have"),
        ("bytes", lambda i: i.update(text_bytes=1), "text_bytes is 1, but its splits have"),
        ("bytes", lambda i: i["splits"]["train"]["shards"].append(i["splits"]["train"]["shards"][0]), "but"),
        ("bytes", lambda i: i["tokenizer"].update(end_of_text=257), "end_of_text = 257: must be at most 256"),
        ("bytes", lambda i: i["tokenizer"].update(vocabulary=10**400), "vocabulary = 1000"),
        ("bytes", lambda i: i["tokenizer"].update(vocabulary=300), "differs from tokenizer.json"),
        ("bytes", lambda i: i["splits"]["train"]["shards"][0].update(tokens=True), "tokens = True: must be an integer"),
        ("bytes", lambda i: i["splits"]["train"]["shards"][0].update(tokens=-1), "tokens = -1: must be at least 0"),
        ("bytes", lambda i: i.update(skipped=float("nan")), "skipped = nan: must be an integer"),
        ("bytes", lambda i: i.update(source=["x"]), "source is \\['x'\\], expected text"),
        ("words", lambda i: i["splits"]["train"].update(rows=1), "rows is 1, but the file of labels has"),
        ("words", lambda i: i["splits"]["train"].update(tokens=1), "tokens is 1, but their file has"),
        ("words", lambda i: i["splits"]["train"].update(class_rows=[1, 2]), "but the classes have 3"),
        ("words", lambda i: i.update(ids=99), "differs from recipe.json"),
        ("words", lambda i: i.update(classes=["a", "a"]), "the number of classes is 2, but"),
        ("words", lambda i: i["findings"].update(unknown=float("inf")), "unknown is inf, expected a number"),
    ],
    indirect=["folder"],
)
def test_an_index_that_contradicts_itself_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    change_index(folder, change)
    with pytest.raises(RunError, match=rf"index\.json: .*{reason}"):
        open_data(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "nul\0", "half \ud800", "x" * 300, "line\n", 7])
@pytest.mark.parametrize("folder", ["bytes", "words"], indirect=True)
def test_files_have_plain_names(folder: Path, name: object) -> None:
    def rename(index: dict[str, Any]) -> None:
        train = index["splits"]["train"]
        (train["shards"][0] if "shards" in train else train["files"]["ends"])["file"] = name

    change_index(folder, rename)
    with pytest.raises(RunError, match=r"index\.json.*expected (a plain file name|text)") as caught:
        open_data(folder)
    assert len(str(caught.value)) < 500


def test_a_pipe_in_place_of_a_shard_is_refused(folder: Path) -> None:
    (folder / "train-00000.bin").unlink()
    os.mkfifo(folder / "train-00000.bin")
    with pytest.raises(RunError, match=r"train-00000\.bin: is not a regular file"):
        open_data(folder)


@pytest.mark.parametrize("folder", KINDS, indirect=True)
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "", "null", "NaN"])
def test_no_content_of_a_json_file_is_a_traceback(folder: Path, content: str) -> None:
    for path in folder.glob("*.json"):
        before = path.read_bytes()
        path.write_text(content)
        with pytest.raises(RunError, match=re.escape(path.name)):
            open_data(folder)
        path.write_bytes(before)


# --- anything may be wrong -------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**64, 10**400, -(10**400), 0.5, float("nan"), float("inf"), "", "x", "a/b", "\0",
    "\ud800", "y" * 5000, [], {}, [1], [[1]], {"a": 1}, "7", 1e308,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a JSON value something could be put instead."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))][0 if path else 1 :]


def changed(content: bytes, name: str, chance: random.Random) -> bytes:
    """The content of a file, changed in a value or in some bytes, or cut off."""
    if name.endswith(".json") and chance.random() < 0.6:
        value = json.loads(content)
        *path, last = chance.choice(places(value))
        inner = value
        for key in path:
            inner = inner[key]
        if chance.random() < 0.2:
            del inner[last]
        else:
            inner[last] = json.loads(json.dumps(chance.choice(VALUES)))
        return json.dumps(value).encode()
    if chance.random() < 0.2:
        return content[: chance.randrange(len(content))]
    spoiled = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
    return bytes(spoiled)


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_no_change_is_a_traceback_and_none_of_the_tokens_is_silent(folder: Path) -> None:
    chance = random.Random(folder.parent.name)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "checked.json"}
    for _ in range(150):
        name = chance.choice([*files, "index.json", "recipe.json" if "recipe.json" in files else "index.json"])
        content = changed(files[name], name, chance)
        (folder / name).write_bytes(content)
        try:
            data = open_data(folder)
            assert not name.endswith(".bin") or content == files[name], f"{name} was changed, and nobody has noticed"
            for split in ("train", "held_out"):
                if isinstance(data, TokenData):
                    data.split(split).window(0, len(data.split(split)))
                else:
                    data.split(split).padded(np.arange(len(data.split(split))), 5)
            if isinstance(data, LabelledData):
                findings_notes(data.index)
                findings_warnings(data.index)
        except (InputError, RunError) as error:
            assert len(str(error)) < 1000  # noqa: PT017
        (folder / name).write_bytes(files[name])


def test_an_index_that_says_something_else_is_noticed(folder: Path) -> None:
    """Also where nothing else depends on it: here on what the data were made from."""
    content = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**content, "fingerprint": "0" * 64}))
    with pytest.raises(RunError, match=r"index\.json: is not what was written"):
        verify(folder)
    older = {name: value for name, value in content.items() if name != "digest"}  # as they were before
    (folder / "index.json").write_text(json.dumps(older))
    verify(folder)
