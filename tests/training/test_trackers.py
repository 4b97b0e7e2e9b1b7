"""Trackers get the numbers of metrics.jsonl."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meristem.errors import InputError, RunError
from meristem.runs.run_folder import RunFolder
from meristem.training.trackers import TRACKERS, check_trackers, make_trackers

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


def test_tensorboard_forgets_what_came_after_the_step_it_goes_on_from(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, value in ((0, 1.0), (0, 2.0), (3, 3.0)):
        (tracker,) = make_trackers(("tensorboard",), tmp_path, {}, first_step)
        for step in range(first_step + 1, 6):
            tracker.log(step, {"loss": value})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 3.0), (5, 3.0)]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_run_keeps_its_identity(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(init=lambda **options: calls.append(options)))
    for place in ("one", "two"):
        (tmp_path / place / "run").mkdir(parents=True)
        for first_step in (0, 4):
            make_trackers((package,), tmp_path / place / "run", {}, first_step)
    key = "id" if package == "wandb" else "name"
    one, one_again, two, two_again = (call[key] for call in calls)
    assert one == one_again != two == two_again
    assert {call["resume"] for call in calls} == {"allow"}


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_wandb_and_trackio_are_started_fed_and_finished(
    package: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    fake = SimpleNamespace(
        __spec__=ModuleSpec(package, None),
        init=lambda **options: calls.append(("init", options)),
        log=lambda values, step: calls.append(("log", (step, values))),
        finish=lambda: calls.append(("finish", None)),
    )
    monkeypatch.setitem(sys.modules, package, fake)
    run = trained(data, tmp_path / "run", train__steps=3, log__trackers=[package])
    assert [kind for kind, _ in calls] == ["init", "log", "log", "log", "log", "finish"]
    assert calls[0][1]["project"] == "meristem"
    identity = (run.path / "tracker-id").read_text().strip()
    assert calls[0][1]["name"] == ("run" if package == "wandb" else f"run-{identity}")
    assert calls[0][1]["config"]["train.steps"] == 3
    logged = [(step, values["loss"]) for kind, (step, values) in calls[1:-1] if "loss" in values]
    assert logged == numbers(run, "loss")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RunError, match=rf"{name} is not installed; install it with: pip install 'meristem\[track\]'"):
        make_trackers((name,), tmp_path, {}, 0)


@pytest.mark.parametrize("name", TRACKERS)
def test_trackers_are_checked_without_loading_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__spec__=ModuleSpec(name, None)))
    check_trackers((name,))
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RunError, match=rf"{name} is not installed; install it with: pip install 'meristem\[track\]'"):
        check_trackers((name,))
    with pytest.raises(InputError, match=r"log\.trackers = 'paper': must be one of tensorboard, trackio, wandb"):
        check_trackers(("paper",))
