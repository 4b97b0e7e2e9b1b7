"""The verb `compare`: what it prints and writes, and what it says to mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Call
from comparison.helpers import base_file
from meristem.training.train import train
from training.helpers import prepared, tiny_config

FILE = """
config = "base.toml"
seeds = [0, 1]
primary = ["prism", "uniform"]
target_loss = 9.0

[arms.uniform]
model.schedule = "uniform"

[arms.prism]
model.schedule = "prism"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison whose runs were made by hand, as `compare` would make them."""
    folder = tmp_path_factory.mktemp("command")
    data = prepared(folder, 30)
    base_file(folder, data).write_text(FILE)
    for arm in ("uniform", "prism"):
        for seed in (0, 1):
            config = tiny_config(data, model__schedule=arm, train__seed=seed, data__seed=seed, checkpoint__keep=1)
            train(config, folder / f"out/runs/{arm}/seed-{seed}")
    return folder


def test_nothing_is_shown_where_no_folder_is(call: Call, folder: Path, tmp_path: Path) -> None:
    said = call("compare", folder / "question.toml", "--out", tmp_path / "nowhere", "--show")
    assert said.code == 2
    assert "is no folder, so no run is there to be shown" in said.err
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "begun").mkdir()  # its first runs are under way
    said = call("compare", folder / "question.toml", "--out", tmp_path / "begun", "--show")
    assert said.code == 0
    assert said.out == f"no run of question has ended yet in {tmp_path / 'begun'}\n"
    assert not [*(tmp_path / "begun").iterdir()]


def test_what_is_done_is_shown(call: Call, folder: Path) -> None:
    said = call("compare", folder / "question.toml", "--out", folder / "out", "--show")
    assert said.code == 0
    assert said.out.startswith("# question\n")
    assert "| prism minus uniform | primary |" in said.out
    assert "seconds to loss 9" in said.out
    *_, result, last = said.out.rstrip().splitlines()
    assert result.startswith("prism minus uniform: ")
    assert last.endswith("comparison.html")
    assert "<title>question</title>" in (folder / "out/comparison.html").read_text()
    record = json.loads((folder / "out/comparison.json").read_text())
    assert {(run["arm"], run["seed"]) for run in record["runs"]} == {
        (a, s) for a in ("uniform", "prism") for s in (0, 1)
    }
    for run in record["runs"]:
        lines = (folder / "out" / run["path"] / "metrics.jsonl").read_text().splitlines()
        measured = [json.loads(line) for line in lines if "held_out_loss" in line]
        assert run["scores"]["held_out_loss"] == measured[-1]["held_out_loss"]


def test_lines_that_were_read_are_told_of(call: Call, folder: Path) -> None:
    """And a file that has none is refused."""
    call("compare", folder / "question.toml", "--out", folder / "out")
    elsewhere = ["--out", folder / "elsewhere", "--show", "--lines", folder / "out/lines.jsonl"]
    said = call("compare", folder / "question.toml", *elsewhere)
    assert (said.code, said.err) == (0, "lines of 4 runs read\n")
    said = call("compare", folder / "question.toml", *elsewhere, "--lines", folder / "question.toml")
    assert said.code == 2
    assert "question.toml:2: is no line of a finished run" in said.err


def test_nothing_is_trained_where_all_is_done(call: Call, folder: Path) -> None:
    said = call("compare", folder / "question.toml", "--out", folder / "out")
    assert said.code == 0
    assert "4 runs in" in said.err
    assert "; 4 done" in said.err
    assert not (folder / "out/launches.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "tiny"], "preset = 'tiny': cannot be given: the file has no presets"),
        (["--optimizer.weight_decay", "0.3"], "optimizer.weight_decay = 0.3: "),
        (["--model.widht", "64"], "did you mean model.width?"),
        (["--jobs", "0"], "jobs"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(call: Call, folder: Path, arguments: list[str], said: str) -> None:
    found = call("compare", folder / "question.toml", "--out", folder / "out", *arguments)
    assert found.code == 2
    assert said in found.err
    assert found.err.count("\n") == 1
