"""`meristem demo incrt`: what it says, what it writes, what it refuses, and what it shows on a terminal."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from commands import Call
from meristem.growth import Incrt, Prune, Published
from meristem.growth.events import Measurement, event_from_dict
from meristem.report.head_history import HeadHistory
from meristem.synthetic import Found
from meristem.synthetic.demo import Demo, verdict
from meristem.synthetic.live_view import BAR, LiveView, Standing, table
from report.helpers import SVG, assert_labels_are_inside_and_apart, number, parsed, texts


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


# --- the command --------------------------------------------------------------------------------------------------


def test_a_short_demo(tmp_path: Path, call: Call) -> None:
    out, threads = tmp_path / "new" / "demo", torch.get_num_threads()
    said = call("demo", "incrt", "--heads", 2, "--steps", 60, "--out", out)
    assert said.code == 0, said.err
    assert torch.get_num_threads() == threads
    title, *lines, result, files = said.out.splitlines()
    assert title == "A teacher with 2 heads, and a model that starts with 1."
    assert len(lines) == 20
    pattern = r"step 60/60  loss [\d.]+  heads 1  demand [\d.]+, heads are born above 0\.03  0:00 left"
    assert re.fullmatch(pattern, lines[-1])
    assert "demand not known yet" in lines[0]
    assert re.match(
        r"The task needs 2 heads; the model found 1 \(predicted from the first measurement: [23]\)\.", result
    )
    assert files == f"picture: {out / 'growth.svg'}, events: {out / 'events.jsonl'}"
    start, measured, end = events(out)
    assert start == {
        "step": 0, "event": "start", "demo": "incrt", "task": "teacher", "heads": 2, "criterion": "demand", "seed": 0,
        "steps": 60,
    }  # fmt: skip
    assert (measured["step"], measured["event"], measured["heads"]) == (50, "measured", [1])
    assert (end["step"], end["event"], end["heads"]) == (60, "finished", 1)
    assert_labels_are_inside_and_apart(parsed((out / "growth.svg").read_text(encoding="utf-8")))


def test_births_are_told_with_their_reason_and_drawn(tmp_path: Path, call: Call) -> None:
    """The published rule is in a hurry."""
    said = call("demo", "incrt", "--criterion", "published", "--steps", 350, "--out", tmp_path)
    born = [event for event in events(tmp_path) if event.get("action") == "birth"]
    assert born
    for event in born:
        begin = f"step {event['step']}: a head is born: layer 0 now has {event['heads'][0]} heads"
        reason = "(the energy is large and the trackers have settled); energy"
        assert f"{begin} {reason}" in said.out
    found = events(tmp_path)[-1]["heads"]
    assert found == 1 + len(born)
    assert f"The task needs 4 heads; the model found {found}" in said.out
    root = parsed((tmp_path / "growth.svg").read_text(encoding="utf-8"))
    assert "A teacher with 4 heads, and a model that starts with 1; births by the published rule" in texts(root)
    rings = [number(n, "cx") for n in root.iter(f"{SVG}circle") if n.get("stroke-width") == "2" and number(n, "r") == 8]
    assert rings == pytest.approx([76 + 700 * event["step"] / 350 for event in born], abs=0.01)


def test_a_demo_may_be_repeated_but_replaces_nothing_else(tmp_path: Path, call: Call) -> None:
    mine = ("demo", "incrt", "--task", "noise", "--steps", 1, "--out", tmp_path / "demo")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "notes.txt").write_text("mine")
    assert call(*mine).code == 0
    assert call(*mine).code == 0
    assert (tmp_path / "demo" / "notes.txt").read_text() == "mine"
    for name, content in (("events.jsonl", '{"step": 0, "event": "start"}\n'), ("growth.svg", "<svg/>")):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text(content)
        said = call("demo", "incrt", "--steps", 1, "--out", folder)
        assert said.code == 2
        assert f"error: out = '{folder}': holds {name} of something else; take another folder" in said.err
        assert (folder / name).read_text() == content
    file = tmp_path / "demo" / "notes.txt"
    assert "must be a folder" in call("demo", "incrt", "--steps", 1, "--out", file).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heads", 0), "heads = 0: must be from 1 to 8"),
        (("--heads", 9), "heads = 9: must be from 1 to 8"),
        (("--task", "riddle"), "'riddle' is not one of 'teacher', 'bag', 'noise'"),
        (("--criterion", "random"), "'random' is not one of 'demand', 'published'"),
        (("--seed", -1), "seed = -1: must be from 0 to 2^31 - 1"),
        (("--seed", 2**31), f"seed = {2**31}: must be"),
        (("--steps", -5), "steps = -5: must be at least 1"),
    ],
)
def test_bad_values_are_refused_by_name(
    arguments: tuple[str, Any], message: str, tmp_path: Path, call: Call
) -> None:  # fmt: skip
    said = call("demo", "incrt", *arguments, "--out", tmp_path / "demo")
    assert said.code == 2
    assert message in said.err
    assert not (tmp_path / "demo").exists()


def test_help(call: Call) -> None:
    said = call("demo", "incrt", "--help")
    assert said.code == 0
    assert {"--heads", "--seed", "--task", "--criterion", "--steps", "--out"} <= set(re.findall(r"--\w+", said.out))


# --- its parts ----------------------------------------------------------------------------------------------------


def test_what_is_run() -> None:
    assert Demo().policies == [Incrt(seed=0), Prune()]
    assert Demo(seed=3).policies == [Incrt(seed=3), Prune()]
    assert Demo(criterion="published").policies == [Published(max_heads=33)]
    assert [Demo(heads=heads).updates for heads in (1, 6, 7, 8)] == [1000, 1000, 1500, 1500]
    assert Demo(task="bag", heads=8).updates == 1000
    assert Demo(criterion="published").updates == 3000
    assert Demo(heads=8, steps=50).updates == 50


def measured(predicted: int | None) -> HeadHistory:
    demand = None if predicted is None else 0.5
    entry = {
        "step": 50, "event": "demand", "heads": [1], "demand": [demand], "noise": [0.1], "threshold": [0.1],
        "rules": [""], "predicted_heads": [{"count": predicted or 8, "estimate": 1.0}],
    }  # fmt: skip
    return HeadHistory((1,), 100, [event_from_dict(entry)])


def test_verdicts() -> None:
    def told(demo: Demo, heads: int, predicted: int | None = 4) -> str:
        return verdict(demo, Found(demo.teacher, heads, 0.5, []), measured(predicted))

    loss = "Loss 0.5, where an answer of zero has 1."
    found = "The task needs 4 heads; the model found"
    assert told(Demo(), 4) == f"{found} 4 (predicted from the first measurement: 4). {loss}"
    assert told(Demo(), 5, None) == f"{found} 5. {loss}"
    assert told(Demo(task="noise"), 1, None) == f"There is nothing to learn here; the model has 1 head. {loss}"
    runaway = told(Demo(criterion="published"), 30)
    assert runaway.startswith(f"{found} 30")
    assert "does not see that it is solved" in runaway


def standing(demand: float | None, heads: int = 3) -> Standing:
    now = Standing(400, "demand")
    event = Measurement(100, "incrt", {"demand": [demand], "threshold": [0.1]})
    now.move(100, 0.25, heads, [event])
    return now


def shown(now: Standing) -> list[str]:
    console = Console(file=StringIO(), width=100)
    console.print(table(now))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_live_rows() -> None:
    updates, heads, demand, loss = shown(standing(0.5))
    assert updates.count("█") == round(BAR / 4)
    assert "100 of 400" in updates
    assert re.search(r"^heads +●●● +3 *$", heads)
    assert "0.500, heads are born above 0.10" in demand
    assert demand.index("▓") == 9 + 20  # a tenth is two thirds of the way from a thousandth to one
    assert loss.count("█") == round(BAR / 4)
    assert "0.250" in loss


def test_the_live_rows_of_what_is_small_or_not_known() -> None:
    _, _, demand, _ = shown(standing(0.01))
    assert "┃" in demand
    assert demand.index("┃") > demand.rindex("█")
    _, _, below, _ = shown(standing(-0.2))
    assert "█" not in below
    assert "0.000" in below
    _, many, unknown, _ = shown(standing(None, heads=33))
    assert "not known yet" in unknown
    assert many.count("●") == BAR
    assert "33" in many


def test_notes_scroll_above_the_live_rows() -> None:
    console = Console(file=StringIO(), width=100, force_terminal=True)
    with LiveView(console) as view:
        view.note("step 5: [a head] is born")
        view.show(standing(0.5))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 5: [a head] is born" in written
    assert written.index("[a head]") < written.rindex("heads are born above")
