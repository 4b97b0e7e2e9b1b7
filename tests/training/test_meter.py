"""The clock counts training steps only, and readings come one step later."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from meristem.runs.checkpoint import Snapshot, snapshot
from meristem.runs.run_folder import RunFolder
from meristem.training import loop, tasks
from meristem.training.held_out import held_out_loss
from meristem.training.meter import Clock, PendingReadings, StepReading, TimeSpent
from meristem.training.optimizer import guarded_update

from .helpers import trained


class FakeTime:
    """A clock that only moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def test_the_clock_leaves_out_the_first_step_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, clock = FakeTime(monkeypatch), Clock()
    for seconds in (50.0, 2.0, 4.0):  # the first step compiles
        fake.now += seconds
        clock.tick()
    assert clock.seconds_per_step == 3.0
    clock.pause()
    for seconds in (1000.0, 6.0):  # an evaluation, and the first step after it
        fake.now += seconds
        clock.tick()
    assert clock.seconds_per_step == 4.0


def test_a_slow_phase_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, clock = FakeTime(monkeypatch), Clock()
    for seconds in (0.0, *[100.0] * 10, *[2.0] * (Clock.WINDOW - 1)):
        fake.now += seconds
        clock.tick()
    assert clock.seconds_per_step == pytest.approx((100.0 + 2.0 * (Clock.WINDOW - 1)) / Clock.WINDOW)
    clock.pause()
    for seconds in (1000.0, 2.0):
        fake.now += seconds
        clock.tick()
    assert clock.seconds_per_step == 2.0


def test_one_step_alone_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTime(monkeypatch)
    clock = Clock()
    clock.tick()
    assert clock.seconds_per_step is None


def test_tokens_per_second_are_those_of_the_steps_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTime(monkeypatch)
    updates = 0

    def slow_update(*arguments: object) -> object:
        nonlocal updates
        updates += 1
        fake.now += 100.0 if updates == 1 else 2.0
        return guarded_update(*arguments)  # type: ignore[arg-type]

    def slow_loss(*arguments: object, **options: object) -> float:
        fake.now += 1000.0
        return held_out_loss(*arguments, **options)  # type: ignore[arg-type]

    def slow_snapshot(*arguments: object, **options: object) -> Snapshot:
        fake.now += 5000.0
        return snapshot(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "guarded_update", slow_update)
    monkeypatch.setattr(tasks, "held_out_loss", slow_loss)
    monkeypatch.setattr(loop, "snapshot", slow_snapshot)
    run = trained(data, tmp_path / "run", eval__every=4, checkpoint__every=6)
    rates = [entry["tokens_per_second"] for entry in run.read(run.metrics) if "loss" in entry]
    assert len(rates) == 12
    assert rates[0] is None
    assert rates[2:] == [pytest.approx(4 * 32 / 2.0)] * 10
    last = [entry for entry in run.read(run.metrics) if "loss" in entry][-1]  # before the last evaluation and save
    spent = {name: last[f"{name}_seconds"] for name in ("training", "compilation", "evaluation", "saving")}
    assert spent == pytest.approx({"training": 24.0, "compilation": 98.0, "evaluation": 2000.0, "saving": 5000.0})
    assert last["peak_memory"] > 2**20


def test_time_spent_goes_on_after_a_stop_and_compiles_anew_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)

    def updates(spent: TimeSpent, *seconds: float) -> None:
        for each in seconds:
            fake.now += each
            spent.lap("update")

    spent = TimeSpent()
    updates(spent, 9.0, 1.0, 1.0, 1.0)
    fake.now += 0.5
    spent.lap("growth")
    spent.restructured()
    updates(spent, 4.0, 1.0, 1.0)
    assert spent.columns["training_seconds"] == pytest.approx(7.5)
    assert spent.columns["compilation_seconds"] == pytest.approx(8.0 + 3.0)
    later = TimeSpent(spent.parts)
    updates(later, 6.0, 1.0, 1.0)
    assert later.columns["training_seconds"] == pytest.approx(10.5)
    assert later.columns["compilation_seconds"] == pytest.approx(8.0 + 3.0 + 5.0)


def test_metrics_hold_finite_numbers(whole: RunFolder) -> None:
    entries = list(whole.read(whole.metrics))
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 13))
    for entry in steps:
        assert all(math.isfinite(entry[key]) for key in ("loss", "gradient_norm", "lr"))
        assert entry["tokens"] == entry["step"] * 4 * 32
    assert all(math.isfinite(entry["tokens_per_second"]) for entry in steps[2:])
    assert [entry["step"] for entry in entries if "held_out_loss" in entry] == [4, 8, 12]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5


def test_readings_come_one_step_later() -> None:
    readings = PendingReadings()
    assert readings.flush() is None
    assert readings.push(1, torch.tensor([2.5, 1.0, 0.0, 0.0])) is None
    assert readings.push(2, torch.tensor([1.5, 0.5, 1.0, 0.0])) == StepReading(1, 2.5, 1.0, skipped=False, stop=False)
    assert readings.push(3, torch.tensor([0.5, 0.25, 0.0, 0.5])) == StepReading(2, 1.5, 0.5, skipped=True, stop=False)
    assert readings.flush() == StepReading(3, 0.5, 0.25, skipped=False, stop=True)
    assert readings.flush() is None
