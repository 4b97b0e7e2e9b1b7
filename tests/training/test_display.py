"""What is shown fits the terminal, and plain output does not flood."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meristem.data import open_data
from meristem.growth.descriptions import describe_structure
from meristem.plan import Plan
from meristem.training.display import Lines, Live, make_display
from meristem.training.distributed import processes
from meristem.training.recorder import Progress, Recorder
from meristem.training.tasks import make_task
from training.helpers import trained

PLAN = Plan.prism(layers=24, width=1536, heads=16)
LONG: dict[str, Any] = {
    "step": 1_234_567, "loss": 10.1234, "held_out": 11.1234, "tokens_per_second": 1_234_567.8, "mfu": 0.4567,
    "skipped": 1234, "left": 123 * 3600 + 45 * 60 + 6,
}  # fmt: skip
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def live_output(width: int, steps: int, values: dict[str, Any]) -> str:
    console = Console(width=width, force_terminal=True, file=io.StringIO(), _environ={})
    with Live(PLAN, steps, console) as display:
        display.update(values)
    assert isinstance(console.file, io.StringIO)
    return ESCAPES.sub("", console.file.getvalue())


def last_row(output: str) -> str:
    return re.split(r"[\r\n]+", output.rstrip())[-1].rstrip()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_bar_and_counter_never_vanish(width: int) -> None:
    row = last_row(live_output(width, 2_000_000, LONG))
    assert len(row) <= width
    assert re.match(r"[━╸╺ ]{12} 1234567/2000000 ", row)
    assert row.count("━") >= 7
    assert "loss 10" in row


def test_less_important_numbers_go_first() -> None:
    assert last_row(live_output(120, 2_000_000, LONG)).endswith(
        "loss 10.1234  held-out 11.1234  1.2M tok/s  MFU 45.7%  1234 skipped  123:45:06 left"
    )
    assert last_row(live_output(80, 2_000_000, LONG)).endswith("loss 10.1234  1.2M tok/s  123:45:06 left")
    usual = {**LONG, "step": 12_345, "loss": 3.25, "held_out": 3.5, "tokens_per_second": 6123.4, "left": 45296}
    row = last_row(live_output(80, 20_000, {**usual, "mfu": None, "skipped": 0}))
    assert row.endswith("12345/20000 loss 3.2500  held-out 3.5000  6.1k tok/s  12:34:56 left")


def test_the_structure_is_a_note_before_the_first_step() -> None:
    output = live_output(80, 2_000_000, LONG)
    assert " ".join(output.split()).count(describe_structure(PLAN)) == 1


def test_lines_come_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Lines(PLAN, 100) as display:
        for step in range(91, 101):
            display.update({"step": step, "loss": 2.0})
            now += 0.3
    structure, *lines = capsys.readouterr().out.splitlines()
    assert structure == describe_structure(PLAN)
    assert lines == [f"step {step:>3}/100  loss 2.0000" for step in (91, 95, 99, 100)]


def test_a_gate_that_training_has_opened_above_a_full_pass_is_warned_of_once(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(data, tmp_path / "run", train__steps=2)
    task = make_task(run.config, run.plan, open_data(data), fixed=False)
    with (
        processes("cpu") as peers,
        make_display(run.plan, 2, speaks=True, lost=lambda: None) as display,
        Recorder(run, run.config, task, run.plan, peers, display, Progress()) as record,
    ):
        loop = {"layer": 1, "heads": [0], "passes": 1, "update": [0.1]}
        for gates in ([[1.04]], [[1.2]], [[1.3]]):
            record.observation(1, {"loops": [{**loop, "gates": gates}]})
    text = capsys.readouterr().out
    assert text.count("the loop of layer 1 runs at 1.20 of a full pass") == 1
    assert "1.30" not in text
    assert "1.04" not in text
