"""Checkpoints that are never half there: safetensors and JSON, hashed, written aside, renamed, marked last.

A checkpoint is a folder `step-00001000` with the weights, the optimizer's moments, random-number states, a JSON state,
in some runs what growth has measured, and `manifest.json`, which names every file with its sha256. A folder without a
manifest does not count. Nothing is pickled, so nothing that is loaded can run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meristem.errors import RunError

FORMAT = "meristem-checkpoint/1"
MANIFEST = "manifest.json"
FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json")
GROWTH = "growth.safetensors"  # only in runs whose growth has a large state
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """What was read back: tensors on the CPU, and the JSON state."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    state: dict[str, Any]
    growth: dict[str, Tensor]


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
    growth: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write the checkpoint of `step` under `folder` and delete all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".partial-*"):
        shutil.rmtree(stale)
    final = folder / checkpoint_name(step)
    aside = folder / f".partial-{final.name}"
    aside.mkdir()
    save_file(_on_cpu(model.state_dict()), aside / "model.safetensors")
    save_file(_on_cpu(optimizer_tensors(model, optimizer)), aside / "optimizer.safetensors")
    save_file(rng_tensors(), aside / "rng.safetensors")
    if growth:
        save_file(_on_cpu(growth), aside / GROWTH)
    (aside / "state.json").write_text(json.dumps({"step": step, **state}, indent=1) + "\n", encoding="utf-8")
    files = {path.name: {"sha256": _sha256(path), "bytes": path.stat().st_size} for path in sorted(aside.iterdir())}
    for name in files:
        _flush(aside / name)
    _flush(aside)
    if final.exists():  # the remains of an interrupted save, or the same step again after a resume
        _remove(final)
    aside.rename(final)
    _flush(folder)
    write_atomically(final / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1) + "\n")
    for outdated in _outdated(folder, step, keep):
        _remove(outdated)
    return final


def checkpoint_name(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=_step_of)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint; a missing, truncated or altered file is an error that names it."""
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise RunError(f"{path / MANIFEST}: format is {manifest.get('format')!r}, expected {FORMAT!r}")
    try:
        step, known = manifest["step"], {name: (f["bytes"], f["sha256"]) for name, f in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path / MANIFEST}: not a manifest ({error!r})") from error
    if step != _step_of(path) or set(known) - {GROWTH} != set(FILES):
        raise RunError(f"{path / MANIFEST}: is not of this checkpoint (step {step}, files {sorted(known)})")
    for name, (size, digest) in known.items():
        file = path / name
        if not file.is_file():
            raise RunError(f"{file}: is missing")
        if file.stat().st_size != size:
            raise RunError(f"{file}: has {file.stat().st_size} bytes, {MANIFEST} says {size} (truncated?)")
        if _sha256(file) != digest:
            raise RunError(f"{file}: its content is not what was written (sha256 differs from {MANIFEST})")
    return Checkpoint(
        step=step,
        model=load_file(path / "model.safetensors"),
        optimizer=load_file(path / "optimizer.safetensors"),
        rng=load_file(path / "rng.safetensors"),
        state=read_json(path / "state.json"),
        growth=load_file(path / GROWTH) if GROWTH in known else {},
    )


def load_newest(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; each damaged one on the way is reported and passed over."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return load_checkpoint(path)
        except RunError as error:
            report(f"damaged checkpoint passed over: {error}")
    return None


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments and step counts by parameter name, so that they do not depend on the order of parameters."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`; step counts are put where the fused kernel wants them."""
    for name, parameter in model.named_parameters():
        entries = {
            key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.rpartition(".")[0] == name
        }
        if entries:
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in entries.items()}


def rng_tensors() -> dict[str, Tensor]:
    """The states of torch's random-number generators, as byte tensors."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    _flush(aside)
    aside.replace(path)
    _flush(path.parent)


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _outdated(folder: Path, step: int, keep: int) -> list[Path]:
    """What a save at `step` makes superfluous: all but the newest `keep` up to it, and remains without a manifest.

    A later checkpoint is one that was passed over as damaged; it must not push out those that are whole.
    """
    whole = [path for path in list_checkpoints(folder) if _step_of(path) <= step]
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return whole[:-keep] + [path for path in found if not (path / MANIFEST).exists()]


def _remove(path: Path) -> None:
    """Delete a checkpoint, its marker first, so that an interruption leaves something that does not count."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Make sure a file or folder has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise RunError(f"{path}: is not a JSON object")
    return data
