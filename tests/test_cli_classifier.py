"""A classifier from the command line: rows to data, data to a run, a run to scores."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from commands import Call
from meristem.runs.run_folder import RunFolder
from training.helpers import write_labelled

SIZE = ["--model.layers", "1", "--model.width", "32", "--model.heads", "2", "--model.schedule", "uniform"]
SHORT = ["--train.steps", "60", "--train.batch_size", "16", "--optimizer.lr", "1e-2", "--eval.every", "30",
         "--train.device", "cpu"]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text("")
    return path


def test_tsv_from_rows_to_scores(call: Call, config: Path, tmp_path: Path) -> None:
    source = write_labelled(tmp_path / "rows.tsv", 160)
    data, run = tmp_path / "data", tmp_path / "run"
    said = call("data", "prepare-labelled", source, "--out", data, "--held-out", "0.25", "--drop-duplicates")
    assert said.code == 0, said.err
    assert "3 classes" in said.out
    assert "160 rows read" in said.out
    assert "whole" in call("data", "verify", data).out

    said = call("train", config, "--out", run, "--data.path", data, *SIZE, *SHORT)
    assert said.code == 0, said.err
    assert "accuracy" in said.out
    assert "finished at step 60" in said.out
    assert call("resume", run).code == 0

    said = call("eval", run, "--device", "cpu")
    assert said.code == 0, said.err
    assert "macro-F1" in said.out
    assert "taken for (across)" in said.out
    for picture in ("structure.svg", "loss.svg"):
        assert (run / picture).is_file()
    own = json.loads((run / "eval.json").read_text())
    assert own["accuracy"] > 0.6

    said = call("eval", run, "--data", source, "--json", "--device", "cpu")
    scores = json.loads(said.out)
    assert scores["rows"] == 160
    assert sum(map(sum, scores["confusion"])) == 160
    assert {entry["label"] for entry in scores["classes"]} == {"low", "high", "odd"}

    said = call("plan", "--plan", run)
    assert "3 classes read from all tokens" in said.out


def test_fasta_from_rows_to_scores(call: Call, config: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    records = []
    for number in range(80):
        label = "AT" if number % 2 else "GC"
        letters = "AATTAC" if label == "AT" else "GGCCAG"
        sequence = "".join(draw.choice(letters) for _ in range(draw.randint(20, 40)))
        records.append(f">id{number}|{label}\n{sequence[:15]}\n{sequence[15:]}\n")
    train, test = tmp_path / "train.fasta", tmp_path / "test.fa"
    train.write_text("".join(records[:60]))
    test.write_text("".join(records[60:]))
    data, run = tmp_path / "data", tmp_path / "run"
    said = call(
        "data", "prepare-labelled", train, "--validation", test, "--out", data, "--tokens", "kmers", "--k", "2",
        "--stride", "2", "--min-count", "1",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "60 training rows, 20 held out; 2 classes" in said.out
    said = call("train", config, "--out", run, "--data.path", data, "--data.class_weights", "balanced", *SIZE, *SHORT)
    assert said.code == 0, said.err
    assert call("eval", run, "--device", "cpu").code == 0
    held_out = json.loads((run / "eval.json").read_text())
    said = call("eval", run, "--data", test, "--json", "--device", "cpu")
    assert json.loads(said.out)["confusion"] == held_out["confusion"]
    assert held_out["accuracy"] > 0.9
    said = call("eval", run, "--data", test, "--label-field", "1", "--device", "cpu")
    assert said.code == 2
    assert "labels that the run does not know and no others: id60 (1)" in said.err


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    from training.helpers import prepared_labelled, trained

    folder = tmp_path_factory.mktemp("run")
    prepared_labelled(folder / "data")
    return trained(folder / "data", folder / "run", train__steps=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "RUN", "--prompt", "x"], "is of a classifier, and this needs a language model"),
        (["eval", "RUN", "--windows", "5"], "windows = 5: means nothing here"),
        (["eval", "RUN", "--data", "absent.tsv"], "no such file"),
        (["eval", "RUN", "--split", "val"], "is a prepared folder; split are for files of rows"),
        (["resume", "RUN", "--data.class_weights", "balanced"], "data.class_weights"),
    ],
)
def test_refusals_are_one_clear_line(call: Call, classifier: RunFolder, arguments: list[str], words: str) -> None:
    said = call(*[str(classifier.path) if argument == "RUN" else argument for argument in arguments])
    assert said.code == 2
    assert words in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1


def test_plans_of_classifiers(call: Call) -> None:
    said = call("plan", "--layers", "1", "--heads", "1", "--head-dim", "64", "--schedule", "uniform", "--classes", "28",
                "--json")  # fmt: skip
    facts = json.loads(said.out)
    assert (facts["heads"], facts["head_dims"], facts["classes"], facts["pooling"]) == ([1], [64], 28, "mean")
    assert facts["flops_per_answer"] == 2 * 28 * 768
    assert call("plan", "--head-dim", "64").code == 2
