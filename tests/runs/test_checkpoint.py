"""Checkpoints are whole or do not count, and nothing in them can run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from meristem import files
from meristem.errors import RunError
from meristem.files import sha256_of
from meristem.runs import checkpoint
from meristem.runs.checkpoint import (
    FILES,
    MANIFEST,
    drop_old_checkpoints,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    optimizer_states,
    restore_rng,
    snapshot,
    write_checkpoint,
)
from meristem.runs.run_folder import RunFolder, load_run
from meristem.runs.tensor_file import save_tensors
from meristem.training.train import resume
from training.helpers import STEPS, assert_equal_runs, copy_run

ALL_FILES = (*FILES, MANIFEST)


def small_state(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model and an optimizer with moments."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int, keep: int = 100, seed: int = 0) -> Path:
    model, optimizer = small_state(seed)
    path = write_checkpoint(folder, snapshot(step, model=model, optimizer=optimizer, state={"note": "é"}))
    drop_old_checkpoints(folder, step, keep)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_middle_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {"truncated": halve, "flipped": flip_middle_byte, "missing": Path.unlink}


def test_a_checkpoint_gives_back_what_was_saved(tmp_path: Path) -> None:
    model, optimizer = small_state()
    torch.manual_seed(5)
    path = write_checkpoint(tmp_path, snapshot(3, model=model, optimizer=optimizer, state={"note": "é"}))
    expected_draw = torch.rand(3)
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.state) == (3, {"step": 3, "note": "é"})
    torch.testing.assert_close(loaded.model, dict(model.state_dict()), rtol=0, atol=0)
    restore_rng(loaded.rng)
    assert torch.equal(torch.rand(3), expected_draw)
    states = optimizer_states(loaded.optimizer, torch.device("cpu"))
    assert states.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert set(optimizer.state[parameter]) == set(states[name]) == {"step", "exp_avg", "exp_avg_sq"}
        torch.testing.assert_close(states[name], dict(optimizer.state[parameter]), rtol=0, atol=0)


def test_a_checkpoint_is_safetensors_and_json_with_hashes(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert names(path) == sorted(ALL_FILES)
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    assert set(manifest["files"]) == set(FILES)
    assert all(len(facts["sha256"]) == 64 for facts in manifest["files"].values())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100_000_000, 200_000_000):  # beyond eight digits the order is still that of the steps
        save(tmp_path, step, keep=3)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000010", "step-100000000", "step-200000000"]
    assert len(names(tmp_path)) == 3


def test_a_snapshot_holds_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what is on the CPU already where a GPU has no room for them."""
    for place in (None, torch.device("cpu")):
        monkeypatch.setattr(checkpoint, "_place_for_copies", lambda tensors, place=place: place)
        model, optimizer = small_state()
        taken = snapshot(1, model=model, optimizer=optimizer, state={})
        before = {name: tensor.clone() for name, tensor in taken.tensors["optimizer.safetensors"].items()}
        optimizer.step()
        torch.testing.assert_close(dict(taken.tensors["optimizer.safetensors"]), before, rtol=0, atol=0)


def test_a_full_disk_is_said_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, tensors: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")  # as file.write does, without a name

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with pytest.raises(OSError, match="No space left") as refused:
        save(tmp_path, 1)
    assert refused.value.filename == str(tmp_path / "step-00000001")
    assert names(tmp_path) == []


def test_no_pickle_is_ever_opened(whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = copy_run(whole, tmp_path / "run", last=8)
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self) -> tuple[Callable[..., None], tuple[str, int]]:
            return os.mknod, (str(trap), 0o600)

    newest = list_checkpoints(run.checkpoints)[-1]
    for name in ("model.pt", "optimizer.pt", "state.pkl", "pytorch_model.bin"):
        (newest / name).write_bytes(pickle.dumps(Trap()))
    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("something was unpickled"))
    load_run(run.path, device="cpu")
    resume(run.path)
    assert_equal_runs(run, whole)
    assert not trap.exists()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    name: str, damage: str, whole: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = copy_run(whole, tmp_path / "run")
    newest = list_checkpoints(run.checkpoints)[-1]
    DAMAGES[damage](newest / name)
    said: list[str] = []
    found = load_newest(run.checkpoints, said.append)
    assert found is not None
    assert found.step == STEPS - 4
    assert len(said) == 1
    assert newest.name in said[0]
    assert name in said[0]
    caplog.clear()
    resume(run.path)
    assert all(text in caplog.text for text in said)
    assert_equal_runs(run, whole)


def test_any_flipped_bit_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, 12)
    content = (path / MANIFEST).read_bytes()
    original = json.loads(content)
    for place in range(len(content)):
        for bit in (1, 4, 32):
            changed = bytearray(content)
            changed[place] ^= bit
            try:
                if json.loads(changed) == original:
                    continue
            except ValueError:
                pass
            (path / MANIFEST).write_bytes(changed)
            with pytest.raises(RunError, match=r"manifest\.json|is missing"):
                load_checkpoint(path)
    (path / MANIFEST).write_bytes(content)
    load_checkpoint(path)


def test_if_all_are_damaged_each_is_named_with_its_reason(tmp_path: Path) -> None:
    assert load_newest(tmp_path, pytest.fail) is None  # none at all is no error
    for step in (1, 2):
        halve(save(tmp_path, step) / "model.safetensors")
    expected = r"none of its checkpoints.*step-00000002.*truncated.*step-00000001.*truncated.*begin anew"
    with pytest.raises(RunError, match=expected):
        load_newest(tmp_path, pytest.fail)  # nothing is passed over


def test_a_checkpoint_that_vanishes_while_it_is_read_makes_room_for_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def vanishing(path: Path) -> str:
        monkeypatch.undo()
        save(tmp_path, 2, keep=1)  # a run that goes on, and deletes the first
        return sha256_of(path)

    monkeypatch.setattr(checkpoint, "sha256_of", vanishing)
    newest = load_newest(tmp_path, lambda _: None)
    assert newest is not None
    assert newest.step == 2


def test_a_bad_header_with_a_valid_hash_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    file = newest / "model.safetensors"
    file.write_bytes(b"\x10" + bytes(7) + b"x" * 100)
    manifest = json.loads((newest / MANIFEST).read_text())
    facts = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    manifest["files"]["model.safetensors"] = facts
    (newest / MANIFEST).write_text(json.dumps(manifest))
    said: list[str] = []
    found = load_newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert "model.safetensors: not a safetensors file" in said[0]


def test_a_manifest_nested_too_deeply_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / MANIFEST).write_text("[" * 100_000)
    said: list[str] = []
    found = load_newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert "manifest.json: not a JSON file (nested too deeply)" in said[0]


def test_weights_and_json_have_the_same_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


def test_tensors_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    dtypes = [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    ]
    tensors = {f"{dtype}": torch.arange(5).to(dtype) for dtype in dtypes}
    tensors |= {"é": torch.tensor(2.5), "empty": torch.zeros(0, 3), "turned": torch.arange(6.0).view(2, 3).T}
    digest = save_tensors(tmp_path / "ours", tensors)
    assert digest == sha256_of(tmp_path / "ours")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").stat().st_size == (tmp_path / "theirs").stat().st_size
    torch.testing.assert_close(load_file(tmp_path / "ours"), load_file(tmp_path / "theirs"), rtol=0, atol=0)
    torch.testing.assert_close(load_file(tmp_path / "ours"), tensors, rtol=0, atol=0)


def test_remains_of_interrupted_saves_do_not_count_and_are_cleaned(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with subprocess.Popen(["true"]) as dead:
        pass
    killed = f"{dead.pid}-00000000@{socket.gethostname()}"
    for name in (f".step-00000002.{killed}.partial", f".step-00000003.{killed}.old", ".partial-step-00000002"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    (tmp_path / ".step-00000009.17-00000000@elsewhere.partial").mkdir()  # the lock of the run is held, so it is dead
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000001"]
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert load_checkpoint(tmp_path / "step-00000002").step == 2


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_later_checkpoint_does_not_push_out_whole_ones(keep: int, tmp_path: Path) -> None:
    halve(save(tmp_path, 20) / "model.safetensors")
    for step in (5, 10, 15):
        save(tmp_path, step, keep=keep)
        newest = load_newest(tmp_path, lambda _: None)
        assert newest is not None
        assert newest.step == step
    save(tmp_path, 20, keep=keep)
    assert load_checkpoint(tmp_path / "step-00000020").step == 20
    assert len(names(tmp_path)) == keep


@pytest.mark.parametrize("keep", [1, 2])
def test_one_without_a_manifest_does_not_push_out_whole_ones(keep: int, tmp_path: Path) -> None:
    for step in (5, 10, 15):
        path = save(tmp_path, step)
    (path / MANIFEST).unlink()
    save(tmp_path, 20, keep=keep)
    assert names(tmp_path) == ["step-00000010", "step-00000020"][-keep:]


class Stop(BaseException):
    """Stands for the end of the process."""


def test_a_save_cut_short_anywhere_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is ended before each of its operations on the disk in turn, and then done again."""
    operations = [
        (checkpoint, "save_tensors"), (files, "flush"), (Path, "rename"), (Path, "replace"), (Path, "write_text"),
        (Path, "mkdir"), (Path, "unlink"), (shutil, "rmtree"),
    ]  # fmt: skip
    for ends in range(1, 100):
        folder = tmp_path / str(ends)
        save(folder, 1, keep=1)
        left = ends
        with monkeypatch.context() as patch:
            for owner, name in operations:
                plain = getattr(owner, name)

                def counted(*arguments: object, plain: Callable[..., object] = plain, **options: object) -> object:
                    nonlocal left
                    left -= 1
                    if left == 0:
                        raise Stop
                    return plain(*arguments, **options)

                patch.setattr(owner, name, counted)
            try:
                save(folder, 2, keep=1, seed=1)
            except Stop:
                pass
            else:
                break
        newest = load_newest(folder, lambda text: pytest.fail(text))
        assert newest is not None
        with monkeypatch.context() as patch:
            patch.setattr(files, "_TOKEN", "00000000")  # another process of the same number
            save(folder, 2 + newest.step % 2, keep=1, seed=1)
        assert len(names(folder)) == 1
    assert ends > 15
