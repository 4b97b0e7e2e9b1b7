"""Two processes under torchrun are one process that accumulates two micro-batches."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from meristem.runs.checkpoint import list_checkpoints, load_checkpoint
from meristem.runs.run_folder import RunFolder
from meristem.training.train import resume

from .helpers import STEPS, copy_run, environment, final_tensors, metrics, run_jobs, start, tiny_config, trained
from .test_interruptions import wait_for_lines

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "meristem")


def assert_close_runs(actual: RunFolder, expected: RunFolder) -> None:
    """Losses of every step, held-out losses, weights and moments within 1e-6."""
    torch.testing.assert_close(final_tensors(actual), final_tensors(expected), rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(metrics(actual), metrics(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


@pytest.fixture(scope="module")
def pair(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The tiny run, made by two processes."""
    folder = tmp_path_factory.mktemp("pair")
    config = folder / "config.toml"
    config.write_text(tiny_config(data).to_toml(), encoding="utf-8")
    process = start("train", config, "--out", folder / "run", module=TORCHRUN, env=environment(OMP_NUM_THREADS="1"))
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return RunFolder.open(folder / "run")


def test_two_processes_equal_one_with_accumulation(pair: RunFolder, whole: RunFolder) -> None:
    assert whole.config.train.micro_batch == whole.config.train.batch_size // 2
    states = [load_checkpoint(path).state for path in list_checkpoints(pair.checkpoints)]
    assert [state["processes"] for state in states] == [2, 2, 2]
    assert_close_runs(pair, whole)


def test_a_checkpoint_of_two_processes_resumes_on_one(pair: RunFolder, whole: RunFolder, tmp_path: Path) -> None:
    run = copy_run(pair, tmp_path / "run", last=4)
    resume(run.path)
    assert load_checkpoint(list_checkpoints(run.checkpoints)[-1]).state["processes"] == 1
    assert_close_runs(run, whole)


def test_a_checkpoint_of_one_process_resumes_on_two(whole: RunFolder, tmp_path: Path) -> None:
    run = copy_run(whole, tmp_path / "run", last=4)
    run_jobs((2, "resume", run.path))
    newest = load_checkpoint(list_checkpoints(run.checkpoints)[-1])
    assert (newest.step, newest.state["processes"]) == (STEPS, 2)
    assert_close_runs(run, whole)


def test_two_processes_stop_together_on_a_signal(data: Path, tmp_path: Path) -> None:
    steps: dict[str, Any] = {"train__steps": 150, "eval__every": 0, "checkpoint__every": 0}
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(data, **steps).to_toml(), encoding="utf-8")
    run = RunFolder(tmp_path / "run")
    process = start("train", config, "--out", run.path, module=TORCHRUN, env=environment(OMP_NUM_THREADS="1"))
    wait_for_lines(run.metrics, 5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    (stopped,) = list_checkpoints(run.checkpoints)
    assert f"stopped at step {load_checkpoint(stopped).step}" in output
    assert f"go on with: meristem resume {run.path}" in output
    resume(run.path)
    assert_close_runs(run, trained(data, tmp_path / "whole", **steps))


def test_a_process_that_dies_is_started_again_and_the_run_goes_on(data: Path, tmp_path: Path) -> None:
    """`torchrun --max-restarts` with `train --continue`: the second process is killed once, in the middle."""
    sizes: dict[str, Any] = {"train__steps": 60, "eval__every": 0, "checkpoint__every": 10, "checkpoint__keep": 2}
    config, run = tmp_path / "config.toml", RunFolder(tmp_path / "run")
    config.write_text(tiny_config(data, **sizes).to_toml(), encoding="utf-8")
    program = tmp_path / "worker.py"
    program.write_text(DYING.format(marker=str(tmp_path / "died")), encoding="utf-8")
    module = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2", str(program))
    process = start(
        "train", config, "--out", run.path, "--continue", module=module, env=environment(OMP_NUM_THREADS="1")
    )
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    assert (tmp_path / "died").exists()
    kinds = [entry["event"] for entry in run.read(run.events)]
    assert kinds.count("resume") == 1
    assert_close_runs(run, trained(data, tmp_path / "whole", **sizes))


DYING = """
import os, signal, sys
from pathlib import Path
from meristem.training import loop
plain, marker = loop.guarded_update, Path({marker!r})
calls = 0
def dying(*arguments):
    global calls
    calls += 1
    if calls == 35 and os.environ["RANK"] == "1" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments)
loop.guarded_update = dying
from meristem.cli import main
main()
"""


def test_two_processes_go_back_together(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first one is still writing the checkpoint to go back to, which takes a moment."""
    monkeypatch.chdir(tmp_path)
    sizes: dict[str, Any] = {
        "eval__every": 0, "train__max_skipped": 1, "train__on_divergence": "rewind", "checkpoint__every": 3,
    }  # fmt: skip
    config, run, program = tmp_path / "config.toml", RunFolder(tmp_path / "run"), tmp_path / "worker.py"
    config.write_text(tiny_config(data, **sizes).to_toml(), encoding="utf-8")
    program.write_text(DIVERGING, encoding="utf-8")
    run_jobs((2, "program", program, "train", config, "--out", run.path))
    assert [(one.from_step, one.to_step) for one in run.rewinds] == [(5, 3)]
    assert metrics(run)[-1]["step"] == STEPS
    assert [Path(f"rewound-{rank}").read_text(encoding="utf-8") for rank in (0, 1)] == ["3", "3"]


DIVERGING = """
import math, os, time
from pathlib import Path
from meristem.runs import saver
from meristem.training import loop, train
plain_gradients, plain_write, plain_back = loop.Gradients.__call__, saver.write_checkpoint, train.go_back
calls = 0
def diverging(self, tokens, targets):
    global calls
    calls += 1
    loss = plain_gradients(self, tokens, targets)
    return loss * math.nan if calls == 5 else loss
def slow(folder, taken):
    time.sleep(1.0)
    return plain_write(folder, taken)
def told(*arguments):
    good = plain_back(*arguments)
    Path("rewound-" + os.environ["RANK"]).write_text(str(good and good.step))
    return good
loop.Gradients.__call__, saver.write_checkpoint, train.go_back = diverging, slow, told
from meristem.cli import main
main()
"""
