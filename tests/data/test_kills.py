"""Preparations that are killed at any moment: the next one makes the same data, and nothing lies about."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from killing import killed_at, operations
from meristem.data import ByteTokenizer, open_data, prepare, prepare_labelled, verify
from meristem.errors import InputError, RunError

from .helpers import TEXTS, write_jsonl

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

Prepare = Callable[[Path, float, bool], object]


def tokens(folder: Path, held_out: float, overwrite: bool) -> object:
    files = [folder / "a.jsonl"]
    return prepare(
        files, folder / "out", tokenizer=ByteTokenizer(), held_out=held_out, shard_tokens=2000, overwrite=overwrite
    )


def labelled(folder: Path, held_out: float, overwrite: bool) -> object:
    return prepare_labelled([folder / "rows.csv"], folder / "out", held_out=held_out, overwrite=overwrite)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    rows = "".join(f"word{i % 7} and {i},{'ab'[i % 2]}\n" for i in range(40))
    (tmp_path / "rows.csv").write_text("text,label\n" + rows)
    return tmp_path


def content(out: Path) -> dict[str, bytes]:
    """All files but what is remembered of having read them, which has times in it."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "checked.json"}


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("work", [tokens, labelled])
def test_a_killed_preparation_is_made_again(work: Prepare, inputs: Path) -> None:
    names = beside(inputs)
    work(inputs, 0.2, False)
    wanted = content(inputs / "out")

    def begin_anew() -> None:
        for path in (inputs / "out").iterdir():
            path.unlink()
        (inputs / "out").rmdir()

    begin_anew()
    count = operations(lambda: work(inputs, 0.2, False))
    begin_anew()
    assert count > 10
    for at in range(1, count + 1):
        assert killed_at(at, lambda: work(inputs, 0.2, False)) == -signal.SIGKILL
        work(inputs, 0.2, False)
        assert content(inputs / "out") == wanted
        assert beside(inputs) == sorted([*names, "out"])
        begin_anew()


@pytest.mark.parametrize("work", [tokens, labelled])
def test_older_data_are_there_until_the_new_ones_are(work: Prepare, inputs: Path) -> None:
    names = sorted([*beside(inputs), "out"])
    work(inputs, 0.5, False)
    new = content(inputs / "out")
    work(inputs, 0.2, True)
    old = content(inputs / "out")
    assert old != new
    count = operations(lambda: work(inputs, 0.5, True))
    work(inputs, 0.2, True)
    for at in range(1, count + 1):
        assert killed_at(at, lambda: work(inputs, 0.5, True)) == -signal.SIGKILL
        if at % 2:
            open_data(inputs / "out")
        else:
            with pytest.raises(InputError, match="held_out"):
                work(inputs, 2.0, True)  # a second attempt that fails by itself
            assert beside(inputs) == names
        found = content(inputs / "out")
        assert found in (old, new)
        verify(inputs / "out")
        work(inputs, 0.5, True)
        assert content(inputs / "out") == new
        work(inputs, 0.2, True)
        assert content(inputs / "out") == old
        assert beside(inputs) == names


@pytest.mark.parametrize("work", [tokens, labelled])
def test_a_bad_input_brings_back_the_older_data(work: Prepare, inputs: Path) -> None:
    work(inputs, 0.2, False)
    old = content(inputs / "out")
    count = operations(lambda: work(inputs, 0.5, True))
    work(inputs, 0.2, True)
    sources = {path: path.read_bytes() for path in (inputs / "a.jsonl", inputs / "rows.csv")}
    for at in range(count // 2, count + 1):  # the moving is at the end
        killed_at(at, lambda: work(inputs, 0.5, True))
        for path in sources:
            path.write_bytes(b"neither\xff\n")
        with pytest.raises((InputError, RunError)):
            work(inputs, 0.5, True)
        assert (inputs / "out/index.json").exists()
        verify(inputs / "out")
        for path, source in sources.items():
            path.write_bytes(source)
        work(inputs, 0.2, True)
        assert set(content(inputs / "out")) == set(old)


# --- overwriting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", [tokens, labelled])
@pytest.mark.parametrize("broken", ["", "{", "[" * 100_000, "{}", '{"format": "meristem-data/1"}'])
def test_a_broken_index_can_be_overwritten(work: Prepare, broken: str, inputs: Path) -> None:
    work(inputs, 0.2, False)
    wanted = content(inputs / "out")
    (inputs / "out/index.json").write_text(broken)
    with pytest.raises(InputError, match=r"is damaged \(.*index\.json.*overwrite it"):
        work(inputs, 0.2, False)
    (inputs / "out/notes.txt").touch()
    with pytest.raises(RunError, match=r"index\.json"):
        work(inputs, 0.2, True)
    (inputs / "out/notes.txt").unlink()
    work(inputs, 0.2, True)
    assert content(inputs / "out") == wanted


@pytest.mark.parametrize("work", [tokens, labelled])
def test_damaged_data_can_be_overwritten(work: Prepare, inputs: Path) -> None:
    work(inputs, 0.2, False)
    wanted = content(inputs / "out")
    damaged = next((inputs / "out").glob("train-*.bin"))
    damaged.write_bytes(bytes([wanted[damaged.name][0] ^ 1]) + wanted[damaged.name][1:])
    with pytest.raises(InputError, match=r"is damaged \(.*overwrite it"):
        work(inputs, 0.2, False)
    work(inputs, 0.2, True)
    assert content(inputs / "out") == wanted


@pytest.mark.parametrize("work", [tokens, labelled])
def test_files_of_others_are_never_lost(work: Prepare, inputs: Path) -> None:
    work(inputs, 0.2, False)
    (inputs / "out/notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"out = .*other files too \(notes\.txt\)"):
        work(inputs, 0.5, True)
    assert (inputs / "out/notes.txt").read_text() == "mine"
    assert json.loads((inputs / "out/index.json").read_text())


def test_what_is_remembered_is_no_file_of_others(inputs: Path) -> None:
    tokens(inputs, 0.2, False)
    tokens(inputs, 0.2, False)  # which reads it
    assert (inputs / "out/checked.json").exists()
    (inputs / "out/.checked.json.1@elsewhere.partial").touch()
    tokens(inputs, 0.5, True)
    assert not (inputs / "out/checked.json").exists()
