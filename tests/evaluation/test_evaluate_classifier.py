"""`evaluate_classifier` on held-out rows, on raw files, and what it refuses."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from meristem.errors import InputError, RunError
from meristem.evaluation.evaluate import EVALUATION_FILE, evaluate_run
from meristem.evaluation.evaluate_classifier import ClassEvaluation, evaluate_classifier
from meristem.plan import Plan
from meristem.report.classification_text import classification_text
from meristem.runs.run_folder import RunFolder
from meristem.training.classification import Scores
from training.helpers import copy_run, metrics, prepared_labelled, trained, write_labelled


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("classifier")
    prepared_labelled(folder / "data")
    return trained(folder / "data", folder / "run", train__steps=30, eval__every=0, optimizer__lr=1e-2)


def test_held_out_rows_of_the_run(run: RunFolder) -> None:
    result = evaluate_classifier(run.path, device="cpu")
    last = metrics(run)[-1]
    assert result.scores.accuracy == last["accuracy"]
    assert result.scores.macro_f1 == last["macro_f1"]
    assert result.scores.loss == pytest.approx(last["held_out_loss"], rel=1e-6)
    stored = json.loads((run.path / EVALUATION_FILE).read_text())
    assert stored == json.loads(json.dumps(result.to_dict()))
    assert stored["accuracy"] == pytest.approx(
        sum(stored["confusion"][i][i] for i in range(3)) / sum(map(sum, stored["confusion"]))
    )
    assert [entry["label"] for entry in stored["classes"]] == list(result.classes) == ["high", "low", "odd"]
    assert sum(entry["support"] for entry in stored["classes"]) == stored["rows"] == result.scores.rows


def test_a_raw_file_is_the_prepared_folder_again(run: RunFolder, tmp_path: Path) -> None:
    """All rows of the source, scored as a file, are the rows of a folder that holds all of them out."""
    source = write_labelled(tmp_path / "rows.tsv")
    whole = evaluate_classifier(run.path, data=source, device="cpu")
    assert whole.scores.rows == 90
    packed = tmp_path / "rows.csv.gz"
    lines = source.read_text().replace(",", " ").replace("\t", ",").replace("sentence,label", "words,class")
    packed.write_bytes(gzip.compress(lines.encode()))
    changed = evaluate_classifier(run.path, data=packed, columns={"text": "words", "label": "class"}, device="cpu")
    assert changed.scores.confusion.tolist() == whole.scores.confusion.tolist()
    jsonl = tmp_path / "rows.jsonl"
    rows = [line.split("\t") for line in source.read_text().splitlines()[1:]]
    jsonl.write_text(
        "\n".join(json.dumps({"sentence": t, "label": c, "part": str(i % 3)}) for i, (t, c) in enumerate(rows))
    )
    parts = [
        evaluate_classifier(run.path, data=jsonl, split=name, columns={"split": "part"}, device="cpu") for name in "012"
    ]
    total = np.sum([part.scores.confusion for part in parts], axis=0)
    assert total.tolist() == whole.scores.confusion.tolist()


def test_fasta(run: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "rows.fasta"
    path.write_text(">a|low\nlow w1\n>b|high\nhigh\nw2\n")
    result = evaluate_classifier(run.path, data=path, device="cpu")
    assert result.scores.support.tolist() == [1, 1, 0]


def test_labels_that_the_run_does_not_know(run: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("sentence,label\nlow w1,low\nw2,new\nw3,new\nw4,other\n")
    with pytest.raises(InputError, match=r"does not know: new \(2\), other \(1\); they can be counted apart"):
        evaluate_classifier(run.path, data=path, other_labels="refuse", device="cpu")
    result = evaluate_classifier(run.path, data=path, device="cpu")
    assert result.scores.rows == 1
    assert result.other_labels == {"new": 2, "other": 1}
    assert result.to_dict()["accuracy_of_all"] == result.accuracy_of_all == result.scores.accuracy / 4
    said = f"new (2), other (1); counted as wrong, the accuracy is {result.scores.accuracy / 4:.4f}"
    assert f"left out: 3 rows with labels that the run does not know, {said}" in classification_text(result)
    path.write_text("sentence,label\n" + "".join(f"w1,new{number}\n" for number in range(25)))
    with pytest.raises(InputError, match=r"does not know and no others: new0 \(1\).* and 5 more; it knows high, low"):
        evaluate_classifier(run.path, data=path, device="cpu")
    with pytest.raises(InputError, match="other_labels"):
        evaluate_classifier(run.path, data=path, other_labels="ignore", device="cpu")


def test_bad_rows_and_long_rows_are_counted(run: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"sentence,label\nlow w1,low\nw2\n{'w1 ' * 100},odd\n")
    with pytest.raises(RunError, match=r"rows\.csv:3: 1 field,"):
        evaluate_classifier(run.path, data=path, device="cpu")
    result = evaluate_classifier(run.path, data=path, on_error="skip", device="cpu")
    assert (result.scores.rows, result.bad, result.cut) == (2, 1, 1)
    assert f"skipped {path}:3" in caplog.text
    text = classification_text(result)
    assert "1 row longer than the model reads" in text
    assert "1 bad place skipped" in text


def test_what_cannot_be_scored(run: RunFolder, tmp_path: Path) -> None:
    prepared_labelled(tmp_path / "other", count=40)
    with pytest.raises(InputError, match="other classes or another vocabulary"):
        evaluate_classifier(run.path, data=tmp_path / "other", device="cpu")
    with pytest.raises(InputError, match=r"prepared folder; label, split are for files"):
        evaluate_classifier(run.path, columns={"label": "x"}, split="y", device="cpu")
    empty = tmp_path / "rows.csv"
    empty.write_text("sentence,label\n")
    with pytest.raises(RunError, match="no rows to score"):
        evaluate_classifier(run.path, data=empty, device="cpu")
    with pytest.raises(InputError, match="no such file"):
        evaluate_classifier(run.path, data=tmp_path / "absent.csv", device="cpu")


def test_the_two_kinds_of_runs_are_told_apart(run: RunFolder) -> None:
    with pytest.raises(InputError, match="is of a classifier, and this needs a language model"):
        evaluate_run(run.path, device="cpu")


def test_a_run_carries_its_recipe(run: RunFolder, tmp_path: Path) -> None:
    """With the prepared folder gone, a raw file can still be scored."""
    copy = copy_run(run, tmp_path / "run")
    source = write_labelled(tmp_path / "rows.tsv")
    text = (copy.path / "config.toml").read_text()
    (copy.path / "config.toml").write_text(text.replace(run.config.data.path, str(tmp_path / "gone")))
    expected = evaluate_classifier(run.path, data=source, device="cpu").scores
    assert evaluate_classifier(copy.path, data=source, device="cpu").scores.confusion.tolist() == (
        expected.confusion.tolist()
    )
    with pytest.raises(RunError, match="gone"):
        evaluate_classifier(copy.path, device="cpu")
    shutil.rmtree(copy.path)


def test_text_of_many_classes() -> None:
    confusion = np.diag(np.arange(20))
    confusion[3, 4] = 7
    plan = Plan.uniform(layers=1, width=8, heads=1, classes=20)
    result = ClassEvaluation(
        "run", 5, "data", tuple(f"c{i}" for i in range(20)), Scores(0.5, confusion), 0, 0.0, 0, {}, plan, "cpu"
    )
    text = classification_text(result)
    assert "c3 taken for c4: 7 of 10" in text
    assert text.count("taken for") == 1
    assert [line.split()[0] for line in text.splitlines()[3:23]] == list(result.classes)
    row = next(line for line in text.splitlines() if line.startswith("c0 "))
    assert row.split() == ["c0", "0", "-", "-", "-"]


def test_each_evaluated_file_has_its_own_result(run: RunFolder, tmp_path: Path) -> None:
    evaluate_classifier(run.path, device="cpu")
    own = (run.path / EVALUATION_FILE).read_bytes()
    before = set(run.path.glob("eval*.json"))
    first = write_labelled(tmp_path / "rows.tsv", 30)
    (tmp_path / "other").mkdir()
    second = write_labelled(tmp_path / "other" / "rows.tsv", 40)  # of the same name
    for source in (first, second, first):
        evaluate_classifier(run.path, data=source, device="cpu")
    new = set(run.path.glob("eval*.json")) - before
    assert {json.loads(path.read_text())["rows"] for path in new} == {30, 40}
    assert len(new) == 2
    assert all(path.name.startswith("eval-rows.tsv-") for path in new)
    assert (run.path / EVALUATION_FILE).read_bytes() == own
    evaluate_classifier(run.path, data=first, device="cpu", out=tmp_path / "elsewhere")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
