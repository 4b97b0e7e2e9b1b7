"""Runs and configurations of 2026-11-16 are still read, and runs go on to where they would have come.

The folders of `fixtures/runs-2026-11-16` are three runs of 24 updates that were killed soon after the checkpoint of
update 12, with growth before and after it; beside each stands what the same run came to that was not killed. They were
written by the code of that day and must never be written again: what is tested is that today's code understands them.
All goes through commands, so that nothing here depends on how growth is built inside.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from commands import Call
from meristem.training.train import resume

OLD = Path(__file__).parent / "fixtures" / "runs-2026-11-16"
DATA = {"loops": "texts", "heads": "texts", "classifier": "rows"}
TOLERANCE = 1e-5  # relative: machines add in different orders
# Births by demand are decided otherwise since 2026-11-17, and heads are born otherwise: such runs go on to another end.
OTHERWISE = ("heads", "classifier")


@pytest.fixture(params=DATA)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path]:
    """The name of a run, a copy of its folder, and a copy of its data."""
    name = request.param
    shutil.copytree(OLD / "data" / DATA[name], tmp_path / "data")
    shutil.copytree(OLD / name, tmp_path / name)
    return name, tmp_path / name, tmp_path / "data"


def last(path: Path, field: str) -> float:
    """The last value of a field in a log."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return float([entry[field] for entry in entries if entry.get(field) is not None][-1])


def structure(run: Path, call: Call) -> dict[str, Any]:
    facts = json.loads(call("plan", "--plan", run, "--json").out)
    return {name: facts[name] for name in ("heads", "loops")}


def test_an_old_run_goes_on_to_its_end(old: tuple[str, Path, Path], call: Call) -> None:
    name, run, data = old
    expected = json.loads((OLD / f"{name}.json").read_text(encoding="utf-8"))
    said = call("resume", run, "--data.path", data)
    assert said.code == 0, said.err
    assert last(run / "metrics.jsonl", "step") == expected["step"]
    found, ended = structure(run, call), resume(run).held_out  # at its end it knows what it was measured at
    assert ended == last(run / "metrics.jsonl", "held_out_loss")
    if name in OTHERWISE:
        assert sum(found["heads"]) >= sum(expected["heads"]) - 1
        assert ended < 1.1 * expected["held_out_loss"]
        return
    assert last(run / "metrics.jsonl", "loss") == pytest.approx(expected["loss"], rel=TOLERANCE)
    assert ended == pytest.approx(expected["held_out_loss"], rel=TOLERANCE)
    assert found == {field: expected[field] for field in ("heads", "loops")}


def test_the_structure_of_an_old_run_has_grown_before_and_grows_after_it_was_killed(
    old: tuple[str, Path, Path], call: Call
) -> None:
    name, run, _ = old
    begun = json.loads((run / "plan.json").read_text(encoding="utf-8"))["layers"]
    killed = structure(run, call)
    ended = json.loads((OLD / f"{name}.json").read_text(encoding="utf-8"))
    if name == "loops":
        assert sum(loop["passes"] for loop in killed["loops"].values()) > 0
        assert killed["loops"] != ended["loops"]
    else:
        assert len(begun) < sum(killed["heads"]) < sum(ended["heads"])


def test_an_old_run_is_measured_drawn_and_continued(old: tuple[str, Path, Path], call: Call, tmp_path: Path) -> None:
    name, run, data = old
    said = call("eval", run, "--data", data, "--device", "cpu", "--json", "--out", tmp_path / "measured")
    assert said.code == 0, said.err
    assert json.loads(said.out)["step"] == 12
    said = call("report", run)
    assert said.code == 0, said.err
    assert (run / "growth.svg").is_file()
    said = call("generate", run, "--prompt", "Page 3", "--tokens", "5", "--temperature", "0", "--device", "cpu")
    if name == "classifier":
        assert said.code == 2  # it answers with classes
    else:
        assert said.code == 0, said.err
        assert said.out.startswith("Page 3")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "flat-sgt",
            {"heads": [2, 2, 2], "loops": {"1": {"heads": [1], "passes": 2}, "2": {"heads": [0], "passes": 2}}},
        ),
        ("flat-incrt", {"heads": [3, 3], "loops": {}}),
    ],
)
def test_an_old_configuration_is_read(name: str, expected: dict[str, Any], call: Call, tmp_path: Path) -> None:
    """Its settings are in sections that later versions divide otherwise; they mean the same."""
    shutil.copytree(OLD / "data" / "texts", tmp_path / "data")
    said = call("train", OLD / f"{name}.toml", "--out", tmp_path / "run", "--data.path", tmp_path / "data")
    assert said.code == 0, said.err
    assert structure(tmp_path / "run", call) == expected
