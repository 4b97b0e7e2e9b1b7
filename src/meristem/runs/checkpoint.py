"""Checkpoints that are never half there: safetensors and JSON, hashed, written aside, then renamed.

A checkpoint is a folder `step-00001000` with the weights, the optimizer's moments, random-number states, a JSON state,
in some runs what growth has measured, and `manifest.json`, which names every file with its sha256. It gets its name
when all of it has reached the disk. Nothing is pickled, so nothing that is loaded can run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meristem.errors import InputError, Remedy, RunError, shown
from meristem.files import beside, flush, read_json, sha256_of, staged
from meristem.growth.apply import adopt
from meristem.growth.edits import AVERAGE, AVERAGED
from meristem.model import Transformer
from meristem.plan import Plan
from meristem.ranks import whole_tensor
from meristem.runs.tensor_file import load_tensors, save_tensors
from meristem.wording import listed

FORMAT = "meristem-checkpoint/1"
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL, OPTIMIZER, RNG = "model.safetensors", "optimizer.safetensors", "rng.safetensors"
FILES = (MODEL, OPTIMIZER, RNG, STATE)
GROWTH = "growth.safetensors"  # only in runs whose growth has a large state
_NAME = re.compile(r"step-(\d{8,18})")


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will hold. The tensors are copies, which training on does not change."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # by file name
    state: Mapping[str, Any]
    logs: Sequence[Path] = ()  # that the state vouches for, and that must be on the disk before it


@dataclass(frozen=True)
class Checkpoint:
    """What was read back: tensors on the CPU, and the JSON state."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    state: dict[str, Any]
    growth: dict[str, Tensor]

    @property
    def plan(self) -> Plan:
        """The structure at that step."""
        return Plan.from_dict(self.state.get("plan"))

    def averaged(self) -> Checkpoint:
        """The checkpoint with the average of the weights in their place; one that has none is an error."""
        averages = {name: self.optimizer[key] for name in self.model if (key := f"{name}.{AVERAGE}") in self.optimizer}
        if not averages:
            raise InputError("average", True, f"was not kept: the checkpoint of step {self.step} has none")
        return replace(self, model={**self.model, **averages})

    def without_average(self) -> Checkpoint:
        """The checkpoint without an average of the weights."""
        kept = {
            name: held for name, held in self.optimizer.items() if not name.endswith((f".{AVERAGE}", f".{AVERAGED}"))
        }
        return replace(self, optimizer=kept)

    def with_state(self, state: Mapping[str, Any], logs: Sequence[Path]) -> Snapshot:
        """The same tensors with another state, ready to be written as a checkpoint of another run."""
        tensors = {MODEL: self.model, OPTIMIZER: self.optimizer, RNG: self.rng, GROWTH: self.growth}
        held = {file: tensors[file] for file in tensors if file != GROWTH or self.growth}
        return Snapshot(self.step, held, state, logs)


# --- saving ----------------------------------------------------------------------------------------------------------


def snapshot(
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    growth: Mapping[str, Tensor] | None = None,
    logs: Sequence[Path] = (),
    keep: bool = True,
) -> Snapshot:
    """Everything that training goes on from, copied aside.

    Where every process has its part of a tensor all of them must come here; those that do not `keep` it only help.
    """
    tensors = {MODEL: model.state_dict(), OPTIMIZER: optimizer_tensors(model, optimizer), RNG: rng_tensors()}
    if growth:
        tensors[GROWTH] = dict(growth)
    place = _place_for_copies([tensor for values in tensors.values() for tensor in values.values()])
    copies: dict[str, dict[str, Tensor]] = {file: {} for file in tensors}
    for file, values in tensors.items():
        for name, tensor in values.items():
            whole = whole_tensor(tensor.detach())
            if keep:
                copies[file][name] = whole.to(place or tensor.device, copy=True)
    return Snapshot(step, copies, {"step": step, **state}, logs)


def write_checkpoint(folder: Path, taken: Snapshot) -> Path:
    """Write the checkpoint of a step under `folder`, which nobody else works on; it appears when it is whole.

    Weights and moments that are not finite are an error, and nothing is written.
    """
    final = folder / checkpoint_name(taken.step)
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    with staged(final) as aside:
        for log in taken.logs:
            if log.exists():
                flush(log)
        digests = {
            name: save_tensors(aside / name, tensors, finite=name in (MODEL, OPTIMIZER))
            for name, tensors in taken.tensors.items()
        }
        (aside / STATE).write_text(json.dumps(taken.state, indent=1) + "\n", encoding="utf-8")
        digests[STATE] = sha256_of(aside / STATE)
        files = {name: {"sha256": digests[name], "bytes": (aside / name).stat().st_size} for name in sorted(digests)}
        manifest = {"format": FORMAT, "step": taken.step, "files": files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return final


def drop_old_checkpoints(folder: Path, step: int, keep: int, best: int | None = None) -> None:
    """Delete all checkpoints up to `step` but the newest `keep`, and the one of the step that was `best`.

    Those that are known to be damaged must not push out whole ones: later ones, which were passed over when the run
    was resumed, and those without a manifest, which count for nothing.
    """
    _sweep(folder)
    known = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    whole = [path for path in known if (path / MANIFEST).is_file()]
    for path in known:
        if path not in whole[-keep:] and step_of(path) != best:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, its name first, so that an interruption leaves something that does not count."""
    old = beside(path, "old")
    path.rename(old)
    shutil.rmtree(old)


def _place_for_copies(tensors: Sequence[Tensor]) -> torch.device | None:
    """Where copies are made: on the same device (None), which takes no time, or on the CPU if they might be in the way.

    They would be if a GPU could not hold them beside all that it had reserved at its fullest: the next update needs
    that again, while they are still there.
    """
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    if not on_gpu:
        return None
    device = on_gpu[0].device
    free = torch.cuda.mem_get_info(device)[0]
    free -= torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    return None if sum(tensor.nbytes for tensor in on_gpu) < free else torch.device("cpu")


def _sweep(folder: Path) -> None:
    """Remove what killed processes have left of checkpoints of any step; whoever works on a run holds its lock."""
    for pattern in (".step-*", ".partial-*"):  # the second as older versions named them
        for stale in folder.glob(pattern):
            shutil.rmtree(stale)


# --- loading ---------------------------------------------------------------------------------------------------------


def checkpoint_name(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by their names, oldest first; whether they are whole is seen when they are loaded."""
    try:
        found = [Path(entry) for entry in os.scandir(folder)]  # a glob would take a folder it may not read for empty
    except FileNotFoundError:
        return []
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint; a missing, truncated or altered file is an error that names it."""
    step, known = _manifest(path)
    for name, facts in known.items():
        _check_file(path / name, *facts)
    return Checkpoint(
        step=step,
        model=load_tensors(path / MODEL),
        optimizer=load_tensors(path / OPTIMIZER),
        rng=load_tensors(path / RNG),
        state=read_json(path / STATE),
        growth=load_tensors(path / GROWTH) if GROWTH in known else {},
    )


def load_state(path: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint alone, checked against its manifest."""
    _check_file(path / STATE, *_manifest(path)[1][STATE])
    return read_json(path / STATE)


def load_newest(
    folder: Path, report: Callable[[str], None], wanted: Callable[[Path], bool] = lambda path: True
) -> Checkpoint | None:
    """The newest checkpoint that is whole, of those `wanted`; each damaged one on the way is reported and passed over.

    None if there is no checkpoint at all; if there are some but none can be read, an error that says why of each. One
    that vanishes meanwhile, because a run goes on and deletes it, has made room for newer ones, which are tried next.
    """
    refused: dict[Path, str] = {}
    while untried := [path for path in list_checkpoints(folder) if path not in refused and wanted(path)]:
        try:
            found = load_checkpoint(untried[-1])
        except (RunError, OSError) as error:
            refused[untried[-1]] = str(error)
        else:
            for reason in refused.values():
                report(f"damaged checkpoint passed over: {reason}")
            return found
    if refused:
        raise RunError(
            f"{folder}: none of its checkpoints can be read: {listed(list(refused.values()), 4)}; bring one back, or "
            "begin anew",
            Remedy(("from_start",), "resume", str(folder.parent)),
        )
    return None


def _manifest(path: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """The step, and size and sha256 of every file."""
    if not (path / MANIFEST).exists():
        raise RunError(f"{path / MANIFEST}: is missing")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise RunError(f"{path / MANIFEST}: format is {shown(manifest.get('format'))}, expected {FORMAT!r}")
    try:
        step, known = manifest["step"], {name: (f["bytes"], f["sha256"]) for name, f in manifest["files"].items()}
        if any(type(size) is not int or not isinstance(digest, str) for size, digest in known.values()):
            raise TypeError("every file has a number of bytes and a sha256")
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path / MANIFEST}: not a manifest ({error!r})") from error
    if step != step_of(path) or set(known) - {GROWTH} != set(FILES):
        raise RunError(
            f"{path / MANIFEST}: is not of this checkpoint (step {shown(step)}, files {shown(sorted(known))})"
        )
    return step, known


def _check_file(file: Path, size: int, digest: str) -> None:
    if not file.is_file():
        raise RunError(f"{file}: is missing")
    if file.stat().st_size != size:
        raise RunError(f"{file}: has {file.stat().st_size} bytes, {MANIFEST} says {shown(size)} (truncated?)")
    if sha256_of(file) != digest:
        raise RunError(f"{file}: its content is not what was written (sha256 differs from {MANIFEST})")


# --- what tensors go by ----------------------------------------------------------------------------------------------


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments and step counts by parameter name, so that they do not depend on the order of parameters."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def optimizer_states(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """The inverse of `optimizer_tensors`: by the parameter's name, where the fused kernel wants them."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition(".")
        states.setdefault(parameter, {})[key] = tensor.to(device)
    return states


def restore_model(
    checkpoint: Checkpoint,
    model: Transformer,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device | None = None,
) -> None:
    """Give a model the structure and the weights of a checkpoint, and its optimizer the moments.

    These are put where the model is, or on another `device` if they are to be shared out first.
    """
    states = optimizer_states(checkpoint.optimizer, device or model.embedding.weight.device)
    adopt(model, optimizer, checkpoint.plan, checkpoint.model, states)


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
