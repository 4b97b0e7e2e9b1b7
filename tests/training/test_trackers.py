"""Trackers get the numbers of metrics.jsonl."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meristem.errors import RunError
from meristem.training.run import RunFolder
from meristem.training.trackers import TRACKERS, make_trackers

from .helpers import trained


def numbers(run: RunFolder, name: str) -> list[tuple[int, float]]:
    return [(e["step"], e[name]) for e in run.read(run.metrics) if e.get(name) is not None]


def test_tensorboard_files_hold_the_metrics(data: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained(data, tmp_path / "run", log__trackers=["tensorboard"])
    assert list((run.path / "tensorboard").glob("events.out.tfevents.*"))
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    for name in ("loss", "held_out_loss", "lr", "tokens_per_second"):
        expected = numbers(run, name)
        assert expected
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-5)


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_wandb_and_trackio_are_started_fed_and_finished(
    package: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    fake = SimpleNamespace(
        init=lambda **options: calls.append(("init", options)),
        log=lambda values, step: calls.append(("log", (step, values))),
        finish=lambda: calls.append(("finish", None)),
    )
    monkeypatch.setitem(sys.modules, package, fake)
    run = trained(data, tmp_path / "run", train__steps=3, log__trackers=[package])
    assert [kind for kind, _ in calls] == ["init", "log", "log", "log", "log", "finish"]
    assert calls[0][1]["project"] == "meristem"
    assert calls[0][1]["name"] == "run"
    assert calls[0][1]["config"]["train.steps"] == 3
    logged = [(step, values["loss"]) for kind, (step, values) in calls[1:-1] if "loss" in values]
    assert logged == numbers(run, "loss")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RunError, match=rf"{name} is not installed; install it with: pip install 'meristem\[track\]'"):
        make_trackers((name,), tmp_path, {})
