"""The kinds of runs that are attacked, and what of a run must not depend on what it has been through."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meristem.config import all_settings
from training.helpers import EAGER_BIRTHS, EAGER_HEADS, EAGER_PRUNING, TIMING

# Seconds at most, with a checkpoint after every update, and evaluations.
SMALL: dict[str, Any] = {
    "model__context": 16, "model__feed_forward": 16, "train__steps": 10, "eval__every": 4, "checkpoint__every": 1,
    "checkpoint__keep": 2,
}  # fmt: skip
SGT: dict[str, Any] = {
    "model__layers": 3, "model__head_list": [2, 4, 4], "growth__policy": "sgt", "growth__start": 2, "growth__window": 2,
}  # fmt: skip
BLOCKS: dict[str, Any] = {**SGT, "growth__unit": "block", "growth__layers": [1], "growth__passes": 2}
del BLOCKS["growth__start"], BLOCKS["growth__window"]
OBSERVED: dict[str, Any] = {"growth__observe": True, "growth__observe_every": 2}
HEADS: dict[str, Any] = {
    **EAGER_HEADS, "train__steps": 16, "train__batch_size": 32, "train__micro_batch": 16, "incrt__calibration": 2,
    "incrt__decide_every": 1, "incrt__cool_down": 1, "incrt__last_birth": 14,
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    **HEADS, "train__steps": 22, "incrt__last_birth": 20, "incrt__criterion": "published", "incrt__share": 1e-3,
    "incrt__seed": 1,
}  # fmt: skip
RANDOM: dict[str, Any] = {**HEADS, "incrt__criterion": "random", "incrt__births": 3}
STACK: dict[str, Any] = {
    "model__layers": 4, "model__head_list": [2, 2, 4, 4], "growth__policies": ["stack"],
    "growth__stack__start_layers": 1, "growth__stack__at": [3, 6],
}  # fmt: skip
# Blocks are stacked after 3 updates; heads come and go before and after; then loops grow, and still heads leave.
TOGETHER: dict[str, Any] = {
    "model__layers": 4, "model__head_list": [2, 2, 4, 4], "train__steps": 20, "train__batch_size": 32,
    "train__micro_batch": 16, "growth__policies": ["stack", "incrt", "prune", "sgt", "observe"],
    "growth__stack__at": [3], "growth__sgt__start": 6, "growth__sgt__window": 3, "growth__sgt__beta": 0.0,
    "growth__sgt__heads_per_layer": 1, "growth__sgt__max_layers": 2, "growth__observe__every": 4,
    **EAGER_BIRTHS, **EAGER_PRUNING,
}  # fmt: skip


@dataclass(frozen=True, eq=False)  # a kind is itself, and can be looked up
class Kind:
    """A kind of run: on `texts` or on labelled `rows`, with these settings besides the small ones."""

    name: str
    data: str = "texts"
    settings: Mapping[str, Any] = field(default_factory=dict)
    branch_step: int | None = None  # where it branches off a run with the same settings, but for its length

    @property
    def all_settings(self) -> dict[str, Any]:
        return {**SMALL, **self.settings}

    @property
    def steps(self) -> int:
        return int(self.all_settings["train__steps"])


# Blocks are stacked before and after the branch. All checkpoints stay, so that there is one to branch off.
BRANCH: dict[str, Any] = {**STACK, "optimizer__curve": "wsd", "growth__stack__at": [3, 8]}
TRUNK: dict[str, Any] = {"train__steps": 16, "checkpoint__keep": 100, "eval__every": 0}

# A new growth policy joins by a line here.
RUNS = (
    Kind("prism"),
    Kind("sgt", settings=SGT),
    Kind("blocks", settings=BLOCKS),
    Kind("observed", settings=OBSERVED),
    Kind("incrt", settings=HEADS),
    Kind("published", settings=PUBLISHED),
    Kind("random", settings=RANDOM),
    Kind("stack", settings=STACK),
    Kind("together", settings=TOGETHER),
    Kind("branch", settings=BRANCH, branch_step=5),
    Kind("classifier", "rows"),
    Kind("classifier-incrt", "rows", {**HEADS, "optimizer__lr": 1e-2}),
)
ON_TEXTS, ON_ROWS = (next(kind for kind in RUNS if kind.data == data) for data in ("texts", "rows"))

# Of a configuration, as they are written on the command line.
KEYS = [setting.key for setting in all_settings()]
REMEMBERED = "checked.json"  # in prepared data: which files have been checked, by their sizes and times
RECORDED = ("growth", "measured", "checkpoint", "finished", "skipped")  # events that a broken run must have alike


def outcome(run: Path) -> dict[str, Any]:
    """All that two runs must have in common to be called equal, by name.

    Tensors by the hash of their files, logs line by line without what depends on the clock. A log that cannot be read
    as such is taken as it is, and so differs.
    """
    newest = max((run / "checkpoints").glob("step-*"), default=run)
    files = ("model", "optimizer", "rng", "growth")
    tensors = {name: newest / f"{name}.safetensors" for name in files}
    return {
        "checkpoint": newest.name,
        **{name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in tensors.items() if path.is_file()},
        "state": _state(newest / "state.json"),
        "metrics": _log(run / "metrics.jsonl"),
        "events": _events(run / "events.jsonl"),
        "entropy": _log(run / "entropy.jsonl"),
    }


def command(verb: str, run: Path) -> list[str | Path]:
    options = {"generate": ["--prompt", "Page", "--tokens", "4", "--device", "cpu"], "eval": ["--device", "cpu"]}
    return [verb, run, *options.get(verb, [])]


def answer(verb: str, run: Path, printed: str) -> dict[str, Any]:
    """What a command is for: a run that went on, numbers and pictures, or a text."""
    if verb in ("resume", "train"):
        return outcome(run)
    files = {"report": ("loss.svg", "growth.svg"), "eval": ("eval.json",)}.get(verb, ())
    made = {name: (run / name).read_bytes() for name in files if (run / name).is_file()}
    return {"printed": [line for line in printed.splitlines() if "passed over" not in line], **made}


def names(folder: Path) -> set[str]:
    """All files of a folder but its lock."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != ".lock"}


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder with what is in them, but its lock, and what it remembers of the times of its files."""
    found = (name for name in names(folder) if (folder / name).is_file() and Path(name).name != REMEMBERED)
    return {name: (folder / name).read_bytes() for name in found}


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """The names of what differs between two outcomes or folders."""
    return sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))


def _state(path: Path) -> Any:
    """The state of a checkpoint without the hashes of the logs, in which it stands how often a run was resumed.

    Nor the seconds that things took.
    """
    state = _parsed(path.read_text(encoding="utf-8")) if path.is_file() else None
    return (
        {key: value for key, value in state.items() if key not in ("logs", "seconds")}
        if isinstance(state, dict)
        else state
    )


def _events(path: Path) -> list[Any]:
    """What a broken run must have alike, by step.

    The event of a checkpoint comes when it has been written, which may be after those of later steps.
    """
    entries = [entry for entry in _log(path) if not isinstance(entry, dict) or entry.get("event") in RECORDED]
    if all(isinstance(entry, dict) and isinstance(entry.get("step"), int) for entry in entries):
        entries.sort(key=lambda entry: (entry["step"], entry["event"] == "checkpoint"))
    return entries


def _log(path: Path) -> list[Any]:
    if not path.is_file():
        return []
    entries = [_parsed(line) for line in path.read_bytes().decode("utf-8", "replace").splitlines()]
    return [{k: v for k, v in e.items() if k not in TIMING} if isinstance(e, dict) else e for e in entries]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
