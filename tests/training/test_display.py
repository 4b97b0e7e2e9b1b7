"""What is shown fits the terminal, and plain output does not flood."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meristem.data import TokenData, open_data
from meristem.growth.descriptions import describe_structure
from meristem.plan import Loop, Plan
from meristem.training.display import Lines, Live, make_display, step_line
from meristem.training.distributed import processes
from meristem.training.length import Length
from meristem.training.recorder import Progress, Recorder
from meristem.training.tasks import make_task
from training.helpers import trained

PLAN = Plan.prism(layers=24, width=1536, heads=16)
LONG: dict[str, Any] = {
    "step": 1_234_567, "loss": 10.1234, "held_out": 11.1234, "tokens_per_second": 1_234_567.8, "mfu": 0.4567,
    "skipped": 1234, "epoch": 12.345, "elapsed": 99 * 3600 + 5, "left": 123 * 3600 + 45 * 60 + 6,
}  # fmt: skip
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def live_output(width: int, steps: int, values: dict[str, Any], growing: str = "") -> str:
    console = Console(width=width, force_terminal=True, file=io.StringIO(), _environ={})
    with Live(PLAN, steps, console) as display:
        display.status(growing)
        display.update(values)
    assert isinstance(console.file, io.StringIO)
    return ESCAPES.sub("", console.file.getvalue())


def last_rows(output: str) -> list[str]:
    """What stands at the end: the row with the bar, and what there is below it."""
    rows = [row.rstrip() for row in re.split(r"[\r\n]+", output.rstrip())]
    return rows[max(index for index, row in enumerate(rows) if "━" in row) :]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_bar_and_counter_never_vanish(width: int) -> None:
    rows = last_rows(live_output(width, 2_000_000, LONG))
    assert all(len(row) <= width for row in rows)
    row = rows[0]
    assert re.match(r"[━╸╺ ]{12} 1234567/2000000 ", row)
    assert row.count("━") >= 7
    assert "loss 10" in row


def test_less_important_numbers_go_first() -> None:
    numbers = "loss 10.1234  held-out 11.1234  1.2M tok/s  MFU 45.7%  1234 skipped"
    times = "epoch 12.35  99:00:05 elapsed  123:45:06 left"
    (row,) = last_rows(live_output(160, 2_000_000, LONG))
    assert row.endswith(f"{numbers}  {times}")
    first, second = last_rows(live_output(120, 2_000_000, LONG))
    assert (first.endswith(numbers), second.strip()) == (True, times)
    first, second = last_rows(live_output(80, 2_000_000, LONG))
    assert first.endswith("loss 10.1234  held-out 11.1234  1.2M tok/s")
    assert second.strip() == times
    first, second = last_rows(live_output(60, 2_000_000, LONG))
    assert first.endswith("loss 10.1234  1.2M tok/s")
    assert second.strip() == "123:45:06 left"
    usual = {**LONG, "step": 12_345, "loss": 3.25, "held_out": 3.5, "tokens_per_second": 6123.4}
    usual |= {"mfu": None, "skipped": 0, "epoch": 0.5, "elapsed": 61, "left": 45296}
    first, second = last_rows(live_output(80, 20_000, usual))
    assert first.endswith("12345/20000 loss 3.2500  held-out 3.5000  6.1k tok/s")
    assert second.strip() == "epoch 0.50  1:01 elapsed  12:34:56 left"


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


def test_what_grew_stands_beside_the_times_or_below_them() -> None:
    times = "epoch 12.35  99:00:05 elapsed  123:45:06 left"
    loops, demand = "L10:h3 x1", "heads 1-2-3-4-5-6 demand 0.52 ± 0.01 of 0.10 in L3"
    _, second = last_rows(live_output(90, 2_000_000, LONG, loops))
    assert second.strip() == f"{times}  {loops}"
    _, second, third = last_rows(live_output(90, 2_000_000, LONG, demand))
    assert (second.strip(), third.strip()) == (times, demand)


def test_loops_stay_in_sight_beside_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.uniform(layers=2, width=32, heads=4)
    looped = replace(plan, layers=(plan.layers[0], replace(plan.layers[1], loop=Loop((0, 3), 1))))
    demand = "heads 1-2 demand 0.52 of 0.10 in L0"
    with Lines(plan, 3) as display:
        display.status(demand)
        display.update({"step": 1, "loss": 2.0})
        display.restructured(looped, 3)
        display.update({"step": 3, "loss": 2.0})
        display.status("")
        display.update({"step": 3, "loss": 2.0})
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0] == f"step 1/3  loss 2.0000  {demand}"
    assert lines[1] == f"step 3/3  loss 2.0000  L1:h0,h3 x1  {demand}"
    assert lines[2] == "step 3/3  loss 2.0000  L1:h0,h3 x1"


def test_a_plain_line_tells_epoch_and_times() -> None:
    values = {"step": 20, "loss": 2.5, "epoch": 1.5, "elapsed": 3661.2, "left": 59.0}
    assert step_line(values, 100) == "step  20/100  loss 2.5000  epoch 1.50  1:01:01 elapsed  0:59 left"


def test_a_run_tells_epoch_time_and_why_it_grew(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"train__steps": 8, "growth__policies": ["sgt"], "growth__sgt__start": 2, "growth__sgt__window": 2}
    run = trained(data, tmp_path / "run", **values)
    shown = capsys.readouterr().out
    logged = [entry for entry in run.read(run.metrics) if "loss" in entry]
    stream = open_data(data)
    assert isinstance(stream, TokenData)
    epochs = [entry["tokens"] / len(stream.split("train")) for entry in logged]
    assert [entry["epoch"] for entry in logged] == pytest.approx(epochs, abs=1e-6)
    assert re.search(r"step 8/8  loss .*  epoch \d+\.\d\d  \d+:\d\d elapsed  0:00 left", shown)
    pattern = (
        r"step \d: layer \d now loops heads .*; entropy [01][.\d]*, at least [01][.\d]*, the lowest on the shortlist"
    )
    assert re.search(pattern, shown)


def test_a_gate_that_training_has_opened_above_a_full_pass_is_warned_of_once(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(data, tmp_path / "run", train__steps=2)
    task = make_task(run.config, run.plan, open_data(data), fixed=False)
    with (
        processes("cpu") as peers,
        make_display(run.plan, 2, speaks=True, lost=lambda: None) as display,
        Recorder(
            run, run.config, task, run.plan, peers, display, Progress(), Length(run.config, task, run.plan)
        ) as record,
    ):
        loop = {"layer": 1, "heads": [0], "passes": 1, "update": [0.1]}
        for gates in ([[1.04]], [[1.2]], [[1.3]]):
            record.observation(1, {"loops": [{**loop, "gates": gates}]})
    text = capsys.readouterr().out
    assert text.count("the loop of layer 1 runs at 1.20 of a full pass") == 1
    assert "1.30" not in text
    assert "1.04" not in text
