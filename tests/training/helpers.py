"""Tiny data, tiny runs, and ways to compare and to interrupt them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meristem.config import Config, build_config
from meristem.data import ByteTokenizer, LabelledIndex, prepare, prepare_labelled
from meristem.runs.checkpoint import list_checkpoints, load_checkpoint, step_of
from meristem.runs.run_folder import RunFolder
from meristem.training.train import train

CPU = torch.device("cpu")
Job = tuple[int | str | Path, ...]
STEPS = 12
# Two layers of 2 and 4 heads, and something of everything: evaluations, checkpoints and a micro-batch.
TINY: dict[str, Any] = {
    "model.layers": 2, "model.width": 32, "model.heads": 4, "model.dims": [16], "model.context": 32,
    "model.feed_forward": 48, "train.steps": STEPS, "train.batch_size": 4, "train.micro_batch": 2,
    "train.device": "cpu", "optimizer.lr": 3e-3, "eval.every": 4, "eval.windows": 6, "eval.batch": 4,
    "checkpoint.every": 4, "checkpoint.keep": 100, "log.every": 1,
}  # fmt: skip
# Layers that start with one head of 8; a decision every 3 updates, at which next to everything is let through.
EAGER_HEADS: dict[str, Any] = {
    "model__schedule": "uniform", "model__heads": 1, "model__head_dim": 8, "growth__policy": "incrt",
    "incrt__feed_every": 1, "incrt__decide_every": 3, "incrt__calibration": 4, "incrt__cool_down": 3,
    "incrt__warm_up": 1, "incrt__certainty": -1e9, "incrt__share": 1e-9, "incrt__steady": -1e9, "incrt__plateau": 1.0,
    "incrt__hits": 1, "incrt__feeds": 1, "incrt__max_heads": 3, "incrt__grace": 2, "incrt__redundant": 1.0,
    "incrt__tolerance": 1.0,
}  # fmt: skip
# The same in a model whose head counts are those of its plan, from two heads of a layer on.
EAGER_BIRTHS: dict[str, Any] = {
    "growth__incrt__start_heads": 1, "growth__incrt__feed_every": 1, "growth__incrt__decide_every": 2,
    "growth__incrt__calibration": 2, "growth__incrt__cool_down": 2, "growth__incrt__warm_up": 1,
    "growth__incrt__certainty": -1e9, "growth__incrt__share": 1e-9, "growth__incrt__steady": -1e9,
    "growth__incrt__plateau": 1.0, "growth__incrt__hits": 1, "growth__incrt__feeds": 1, "growth__incrt__last_birth": 16,
}  # fmt: skip
EAGER_PRUNING: dict[str, Any] = {
    "growth__prune__decide_every": 3, "growth__prune__cool_down": 1, "growth__prune__grace": 4,
    "growth__prune__patience": 1, "growth__prune__redundant": 1.0, "growth__prune__tolerance": 1.0,
    "growth__prune__sequences": 32,
}  # fmt: skip
TIMING = (
    "tokens_per_second", "mfu", "training_seconds", "compilation_seconds", "evaluation_seconds", "saving_seconds",
    "peak_memory",
)  # fmt: skip


def write_texts(folder: Path, count: int = 80) -> Path:
    """A folder of different short texts."""
    folder.mkdir(parents=True)
    for i in range(count):
        words = " ".join(f"{(i * k) % 97} times {k}" for k in range(1, 12))
        (folder / f"{i:03d}.txt").write_text(f"Page {i}: {words}.\n", encoding="utf-8")
    return folder


def prepared(folder: Path, count: int = 80) -> Path:
    """Byte data made from such texts."""
    prepare([write_texts(folder / "texts", count)], folder / "data", tokenizer=ByteTokenizer(), held_out=0.2)
    return folder / "data"


def write_labelled(path: Path, count: int = 90) -> Path:
    """Rows of 3 to 20 words in three classes, of which one is rare; a word of each row tells its class."""
    names = ["low", "high", "odd"]
    lines = ["sentence\tlabel"]
    for i in range(count):
        label = 2 if i % 9 == 0 else i % 2
        words = [f"w{(i * k + k) % 23}" for k in range(2 + (7 * i) % 18)]
        words.insert(i % len(words), names[label])
        lines.append(f"{' '.join(words)} n{i}\t{names[label]}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def prepared_labelled(folder: Path, count: int = 90, **options: Any) -> LabelledIndex:
    """Labelled data made from such rows, in `folder`."""
    source = write_labelled(folder.with_suffix(".tsv"), count)
    return prepare_labelled([source], folder, **{"held_out": 0.2, **options})


def tiny_config(data: Path, **changes: Any) -> Config:
    """The tiny configuration; changes are written `train__steps=3`, and `growth__sgt__start=2` in a policy's table."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return build_config({**TINY, "data.path": str(data), **named})


def trained(data: Path, out: Path, **changes: Any) -> RunFolder:
    train(tiny_config(data, **changes), out)
    return RunFolder.open(out)


def copy_run(run: RunFolder, to: Path, last: int | None = None) -> RunFolder:
    """A copy of a run; with `last` as if it had been killed before the first checkpoint after that step."""
    shutil.copytree(run.path, to)
    copy = RunFolder.open(to)
    late = [path for path in list_checkpoints(copy.checkpoints) if last is not None and step_of(path) > last]
    for path in late:
        shutil.rmtree(path)
    if late:
        lines = copy.events.read_text(encoding="utf-8").partition(f'"path": "{late[0].name}"')[0]
        copy.events.write_text(lines.rpartition("\n")[0] + "\n", encoding="utf-8")
    return copy


def final_tensors(run: RunFolder) -> dict[str, Tensor]:
    """Weights, moments and step counts of the newest checkpoint."""
    newest = load_checkpoint(list_checkpoints(run.checkpoints)[-1])
    return {"step": torch.tensor(newest.step), **newest.model, **newest.optimizer}


def assert_nearly_equal_weights(actual: RunFolder, expected: RunFolder, share: float = 0.03) -> None:
    """Every tensor of the model within a share of its norm.

    Where a head is born by demand its values are those of a scout, also along directions in which nothing is asked
    for: there rounding decides, and single entries differ more than all of them together.
    """
    mine, other = (load_checkpoint(list_checkpoints(run.checkpoints)[-1]).model for run in (actual, expected))
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        ratio = float((mine[name] - tensor).norm()) / float(tensor.norm())
        assert ratio <= share, (name, ratio)


def metrics(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock; every line must be whole."""
    entries = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in entry.items() if key not in TIMING} for entry in entries]


def final_state(run: RunFolder) -> dict[str, Any]:
    """The JSON state of the newest checkpoint, without clock times, and the hashes of logs, which have them."""
    state = load_checkpoint(list_checkpoints(run.checkpoints)[-1]).state
    return {name: value for name, value in state.items() if name not in ("logs", "seconds")}


def saves(run: RunFolder) -> list[dict[str, Any]]:
    """The events of the kind checkpoint and finished."""
    return [entry for entry in run.read(run.events) if entry["event"] in ("checkpoint", "finished")]


def events(run: RunFolder) -> list[str]:
    return [entry["event"] for entry in run.read(run.events)]


def assert_equal_runs(actual: RunFolder, expected: RunFolder) -> None:
    """Bit-equal weights and moments, and equal metrics."""
    torch.testing.assert_close(final_tensors(actual), final_tensors(expected), rtol=0, atol=0)
    assert metrics(actual) == metrics(expected)


def start(*arguments: str | Path, module: Sequence[str] = ("meristem",), **options: Any) -> subprocess.Popen[str]:
    """`python -m meristem ...` as a process of its own, which ignores no signal though this one may."""
    command = [sys.executable, "-m", *module, *map(str, arguments)]
    options = {"preexec_fn": _hear_signals, **options}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def _hear_signals() -> None:
    """Undo what nohup, or a shell that starts something in the background, has told this process to ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@cache
def _processes() -> subprocess.Popen[str]:
    """`processes.py`, which ends with this process, when its input does."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    settings: dict[str, Any] = {"env": environment(OMP_NUM_THREADS="1"), "preexec_fn": _hear_signals}
    return subprocess.Popen([sys.executable, str(Path(__file__).with_name("processes.py"))], **pipes, **settings)


def run_jobs(*jobs: Job) -> None:
    """Let several processes work on every job in the present folder; see `processes.py`.

    They are forked, and start in a tenth of the time that torchrun takes. What they print is in the test's output.
    """
    server = _processes()
    assert server.stdin is not None
    assert server.stdout is not None
    for job in jobs:
        print(json.dumps([os.getcwd(), *job], default=str), file=server.stdin, flush=True)
        problem = json.loads(server.stdout.readline() or '"processes.py has ended"')
        assert problem is None, problem


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **changes}
