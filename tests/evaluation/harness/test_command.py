"""What `meristem eval --tasks` refuses, with or without lm-evaluation-harness."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commands import Call
from export.helpers import FIXTURES
from meristem.errors import InputError, RunError
from meristem.evaluation.harness import evaluate
from meristem.evaluation.harness.evaluate import evaluate_tasks

from .helpers import needs_harness


def test_without_the_extra_its_name_is_said(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr(evaluate, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"lm-evaluation-harness is not installed; .*'meristem\[eval\]'"):
        evaluate_tasks(FIXTURES / "loops", ["piqa"])
    assert "meristem[eval]" in call("eval", FIXTURES / "loops", "--tasks", "piqa").err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "piqa", "--windows", "3"], "windows = 3: means nothing together with tasks"),
        (["--tasks", "piqa", "--split", "test"], "split = 'test': means nothing together with tasks"),
        (["--limit", "3"], "limit = 3: means nothing without tasks (--tasks NAMES)"),
        (["--batch", "3"], "batch = 3: means nothing without tasks"),
        (["--task-folder", "own"], "task_folder = "),
    ],
)
def test_options_that_mean_nothing_are_named(options: list[str], message: str, call: Call) -> None:
    said = call("eval", FIXTURES / "loops", *options)
    assert (said.code, message in said.err) == (2, True), said.err


@needs_harness
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": []}, "tasks = "),
        ({"tasks": ["piqa", ""]}, "tasks = "),
        ({"limit": 0}, "limit = 0"),
        ({"batch": 0}, "batch = 0"),
        ({"model": FIXTURES / "classifier"}, "is of a classifier"),
    ],
)
def test_bad_values_are_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    settings = {"model": FIXTURES / "loops", "tasks": ["piqa"], "data": tmp_path, "device": "cpu", **options}
    with pytest.raises(InputError, match=message):
        evaluate_tasks(**settings)  # type: ignore[arg-type]


def test_help_stays_light(call: Call) -> None:
    before = set(sys.modules)
    assert "--tasks" in call("eval", "--help").out
    assert not {"lm_eval", "datasets"} & (set(sys.modules) - before)
