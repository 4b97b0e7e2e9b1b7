"""Files and folders: errors name them, writing is whole or not at all, and killed processes leave nothing for long."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from killing import killed_at, operations
from meristem.errors import InputError, RunError
from meristem.files import (
    beside,
    new_folder,
    parsed_json,
    read_bytes,
    read_json,
    read_text,
    read_toml,
    recover,
    remains_of,
    staged,
    write_atomically,
)


def dead_process() -> int:
    """The number of a process that has ended."""
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    return process


def left_by(process: int, path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}.{process}-00000000@{socket.gethostname()}.{ending}")


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [read_text, read_bytes, read_json, read_toml])
def test_what_is_not_a_regular_file_is_refused_and_named(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    for path in (tmp_path / "pipe", tmp_path / "socket", Path("/dev/zero"), tmp_path):
        with pytest.raises(RunError, match=f"{path}: cannot be read"):
            read(path)
    listener.close()
    for name in ("absent", "nul\0", "half \ud800", "x" * 300):
        with pytest.raises(RunError, match="cannot be read"):
            read(tmp_path / name)


def test_what_cannot_be_parsed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, reason in (
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "5000 digits"),
        ("[]", "not a JSON object"),
    ):
        path.write_text(text)
        with pytest.raises(RunError, match=rf"a\.json: .*{reason}"):
            read_json(path)
    with pytest.raises(ValueError, match="nested too deeply"):
        parsed_json('{"a":' * 100_000)
    path.write_text("a = " + "[" * 100_000)
    with pytest.raises(RunError, match="nested too deeply"):
        read_toml(path)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole_and_remains_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for process in (dead_process(), os.getpid()):  # in a container the number may come again
        left_by(process, path, "partial").write_text("half")
        os.utime(left_by(process, path, "partial"), (0, 0))
        write_atomically(path, "new")
        assert content(tmp_path) == {"a.json": "new"}
    other = left_by(os.getppid(), path, "partial")  # that one is alive
    other.touch()
    write_atomically(path, "newer")
    assert content(tmp_path) == {"a.json": "newer", other.name: ""}


def test_errors_of_writing_name_the_path_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no/a\.json'"):
        write_atomically(tmp_path / "no/a.json", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="/folder'"):
        write_atomically(tmp_path / "folder", "x")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="/file/out'"), staged(tmp_path / "file/out"):
        pass
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="pipe: cannot be written"):
        write_atomically(tmp_path / "pipe", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "pipe"]


def test_new_folders_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert new_folder("out", Path("missing/../x")) == tmp_path / "x"
    assert new_folder("out", Path("a/b/")) == tmp_path / "a/b"
    (tmp_path / "circle").symlink_to("circle")
    for bad in (".", "/", "missing/..", "not utf-8 \udcff", "half \ud800", "nul \0", "x" * 250, "circle/x"):
        with pytest.raises(InputError, match=r"^out = "):
            new_folder("out", Path(bad))


def test_a_folder_appears_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep/out"

    def make(text: str, interrupted: bool) -> None:
        with staged(out) as folder:
            (folder / "a").write_text(text)
            if interrupted:
                raise KeyboardInterrupt

    for text in ("one", "two"):
        with pytest.raises(KeyboardInterrupt):
            make("half", interrupted=True)
        make(text, interrupted=False)
        assert content(out) == {"a": text}
        assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_folder_that_was_moved_away_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for process in (dead_process(), os.getpid()):
        for ending in ("old", "partial"):
            left_by(process, out, ending).mkdir()
            (left_by(process, out, ending) / "a").write_text(ending)
        if process == os.getpid():  # of a process that may live in another container, until it is old
            assert remains_of(out) == []
            for path in tmp_path.rglob("*"):
                os.utime(path, (0, 0))
        recover(out)
        assert content(out) == {"a": "old"}
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        (out / "a").unlink()
        out.rmdir()


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with staged(out) as folder:
        (folder / "a").write_text("old")
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(5, "Input/output error", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"), staged(out) as folder:
        (folder / "a").write_text("new")
    assert content(out) == {"a": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_two_processes_one_makes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename = tmp_path / "out", Path.rename

    def overtaken(path: Path, target: Path) -> Path:
        """Another process is a moment faster, as far as one can play two."""
        out.mkdir()
        (out / "a").write_text("theirs")
        return rename(path, target)

    def make() -> None:
        with staged(out) as folder:
            (folder / "a").write_text("mine")
            monkeypatch.setattr(Path, "rename", overtaken)

    with pytest.raises(RunError, match="another process has made it"):
        make()
    assert content(out) == {"a": "theirs"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_remains_of_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for name in (
        ".out.1@elsewhere.partial",
        ".out.x@y.partial",
        f".other.{dead_process()}-00000000@{socket.gethostname()}.old",
    ):
        (tmp_path / name).touch()
    assert remains_of(path) == []
    assert beside(path, "old").name.startswith(".out.")


# --- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "a.json"

    def write(text: str) -> None:
        with staged(out) as folder:
            for name in ("a", "b"):
                (folder / name).write_text(text)
        write_atomically(file, json.dumps(text))

    write("old")
    count = operations(lambda: write("old"))
    assert count > 10
    for at in range(1, count + 1):
        assert killed_at(at, lambda: write("new")) == -signal.SIGKILL
        recover(out)
        assert content(out) in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"})
        assert json.loads(file.read_text()) in ("old", "new")
        write("old")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "out"]
        assert content(out) == {"a": "old", "b": "old"}
