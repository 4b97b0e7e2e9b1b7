"""The best checkpoint stays, and a run without patience left ends: alone, interrupted, and by several processes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meristem.config import build_config
from meristem.errors import InputError
from meristem.runs.best import Best, best_of
from meristem.runs.checkpoint import list_checkpoints, step_of
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training import tasks
from meristem.training.train import resume

from .helpers import assert_equal_runs, copy_run, metrics, prepared_labelled, tiny_config, trained
from .test_loop import poison

LOSSES = [3.0, 2.0, 2.5, math.nan, 1.5, 1.6, 1.7, 1.4]  # as evaluations find them, at every second step


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let evaluations find the losses of the script, whatever the weights are."""
    trainer = tasks.LanguageTask.measure

    def measure(self: tasks.LanguageTask, model: Any, device: Any) -> dict[str, float]:
        found = trainer(self, model, device)
        step = measure.calls  # type: ignore[attr-defined]
        measure.calls += 1  # type: ignore[attr-defined]
        return {**found, "held_out_loss": LOSSES[step % len(LOSSES)]}

    measure.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(tasks.LanguageTask, "measure", measure)


def last_event(run: RunFolder) -> dict[str, Any]:
    return list(run.read(run.events))[-1]


def steps_of(run: RunFolder) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run.checkpoints)]


@given(st.lists(st.one_of(st.none(), st.just(math.nan), st.floats(-5, 5)), max_size=20), st.booleans())
def test_the_best_is_the_first_extreme_one(values: list[float | None], higher: bool) -> None:
    by = "accuracy" if higher else "held_out_loss"
    lines = [{"step": 10 * n, "held_out_loss": 1.0, by: value} for n, value in enumerate(values)]
    best = best_of([*lines, {"step": 999, "loss": 0.0}], by)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        assert best == Best(by, None, None, len(values))
        return
    extreme = max(finite) if higher else min(finite)
    place = next(n for n, value in enumerate(values) if value == extreme)
    assert best == Best(by, 10 * place, values[place], len(values) - 1 - place)
    assert best_of(lines[: place + 1], by).since == 0


@pytest.mark.usefixtures("scripted")
def test_the_best_checkpoint_stays_beside_the_newest(data: Path, tmp_path: Path) -> None:
    run = trained(
        data, tmp_path / "run", train__steps=14, eval__every=2, checkpoint__every=7, checkpoint__keep=1,
        checkpoint__keep_best=True,
    )  # fmt: skip
    assert steps_of(run) == [10, 14]  # 1.5 at the fifth evaluation
    assert load_run(run.path, step="best", device="cpu").step == 10
    assert load_run(run.path, step="14", device="cpu").step == 14
    with pytest.raises(InputError, match=r"step = 'x': has no checkpoint; there are \[10, 14\], and best"):
        load_run(run.path, step="x")


@pytest.mark.usefixtures("scripted")
def test_the_best_checkpoint_stays_where_a_better_one_cannot_be_saved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While updates are being skipped nothing is saved, be it the best."""
    poison(monkeypatch, {10}, "loss")
    run = trained(
        data, tmp_path / "run", train__steps=14, eval__every=2, checkpoint__every=7, checkpoint__keep=1,
        checkpoint__keep_best=True,
    )  # fmt: skip
    assert steps_of(run) == [4, 14]  # 2.0; there is no checkpoint of 1.5, at step 10
    assert load_run(run.path, step="best", device="cpu").step == 14  # 1.7


@pytest.mark.usefixtures("scripted")
def test_without_it_the_best_of_those_that_there_are_is_taken(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", train__steps=14, eval__every=2, checkpoint__every=4, checkpoint__keep=2)
    assert steps_of(run) == [12, 14]
    assert load_run(run.path, step="best", device="cpu").step == 12  # 1.6 against 1.7


@pytest.mark.usefixtures("scripted")
def test_a_run_ends_when_its_patience_does_and_stays_ended(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(data, tmp_path / "run", train__steps=40, eval__every=2, eval__patience=2, checkpoint__every=0)
    said = "step 8: ends here, as held_out_loss was not better than at step 4 in 2 evaluations"
    assert said in capsys.readouterr().out
    assert metrics(run)[-1]["step"] == 8  # 2.0, then 2.5 and NaN
    assert steps_of(run) == [8]
    last = last_event(run)
    assert (last["event"], last["step"], last["early"]) == ("finished", 8, True)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert resume(run.path).step == 8
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    # Killed before it could say so, it says so when it is resumed.
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join(lines[:-1]))
    assert resume(run.path).signal is None
    assert last_event(run) == last
    # With more patience it goes on.
    outcome = resume(run.path, tiny_config(data, train__steps=40, eval__every=2, eval__patience=5, checkpoint__every=0))
    assert outcome.step > 8


def test_an_interrupted_run_ends_where_the_whole_one_does(tmp_path: Path) -> None:
    """How many evaluations were not better is in the log: a run that is resumed has not forgotten them."""
    prepared_labelled(tmp_path / "data")
    settings: dict[str, Any] = {
        "train__steps": 60, "eval__every": 3, "eval__patience": 2, "eval__best_by": "accuracy", "optimizer__lr": 1e-2,
        "checkpoint__every": 1, "checkpoint__keep_best": True,
    }  # fmt: skip
    whole = trained(tmp_path / "data", tmp_path / "whole", **settings)
    end = metrics(whole)[-1]["step"]
    assert end < 60
    for step in (end - 1, end - 3):
        part = copy_run(whole, tmp_path / f"part{step}", last=step)
        assert resume(part.path).step == end
        assert_equal_runs(whole, part)


def test_what_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"eval\.patience = 3: needs evaluations to go by"):
        build_config({"eval.patience": 3, "eval.every": 0})
    with pytest.raises(InputError, match=r"eval\.best_by = 'accuracy': is of classifiers"):
        trained(data, tmp_path / "run", eval__best_by="accuracy")
    run = trained(data, tmp_path / "other", train__steps=2, eval__every=0)
    shutil.rmtree(run.checkpoints / "step-00000002", ignore_errors=True)
    run.metrics.write_text("")
    with pytest.raises(InputError, match="step = 'best': cannot be told"):
        load_run(run.path, step="best")
