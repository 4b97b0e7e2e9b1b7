"""Predictions for texts without labels: in Python, and from files and stdin by `meristem predict`."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from commands import Call
from meristem.data.labelled.rows import Columns, TextRow, read_texts, stream_texts
from meristem.data.text.corpus import BadPlace
from meristem.errors import InputError
from meristem.evaluation.calibration import Calibration, calibrate_run
from meristem.evaluation.evaluate_classifier import evaluate_classifier
from meristem.runs.run_folder import RunFolder, load_run
from training.helpers import prepared, prepared_labelled, trained, write_labelled


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("predicting")
    prepared_labelled(folder / "data", 200, held_out=0.3)
    return trained(folder / "data", folder / "run", train__steps=30, eval__every=0, optimizer__lr=1e-2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_labelled(tmp_path / "rows.tsv")


def texts_of(source: Path) -> list[str]:
    return [line.split("\t")[0] for line in source.read_text().splitlines()[1:]]


def labels_of(table: str, delimiter: str = ",") -> list[str]:
    return [row["label"] for row in csv.DictReader(io.StringIO(table), delimiter=delimiter)]


def test_predictions_are_softmax_of_the_models_logits(run: RunFolder, source: Path) -> None:
    loaded, texts = load_run(run.path, device="cpu"), texts_of(source)
    found = loaded.predict(texts, temperature=2.0)
    for text, one in zip(texts[:20], found, strict=False):
        ids = torch.from_numpy(loaded.recipe.encode(text))[None]
        with torch.no_grad():
            logits = loaded.model(ids).logits[0].double()
        expected = dict(zip(loaded.recipe.classes, (logits / 2).softmax(-1).tolist(), strict=True))
        assert one.probabilities == pytest.approx(expected, abs=1e-5)
        assert one.label == loaded.recipe.classes[int(logits.argmax())]
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"temperature = .*: must be above 0"):
            loaded.predict(texts[:1], temperature=wrong)
    with pytest.raises(InputError, match=r"texts\[1\] = ' ': must be a text that is not empty"):
        loaded.predict(["good", " "])
    assert loaded.predict([]) == []


def test_labels_agree_with_the_scores_of_eval(run: RunFolder, source: Path) -> None:
    scores = evaluate_classifier(run.path, data=source, device="cpu").scores
    found = load_run(run.path, device="cpu").predict(texts_of(source))
    labels = [line.split("\t")[1] for line in source.read_text().splitlines()[1:]]
    right = sum(one.label == label for one, label in zip(found, labels, strict=True))
    assert right == scores.confusion.trace()


def test_a_language_model_does_not_predict(tmp_path: Path) -> None:
    run = trained(prepared(tmp_path), tmp_path / "run", train__steps=1, eval__every=0)
    with pytest.raises(InputError, match="is of a language model, and this needs a classifier"):
        load_run(run.path, device="cpu").predict(["text"])


def test_files_of_all_kinds_and_stdin_give_the_same_labels(
    call: Call, run: RunFolder, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = texts_of(source)
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "texts.csv.gz").write_bytes(gzip.compress(("words\n" + "\n".join(f'"{t}"' for t in texts)).encode()))
    said = call("predict", run.path, source, "--device", "cpu")
    assert said.code == 0, said.err
    labels = labels_of(said.out)
    assert len(labels) == len(texts)
    assert "held-out rows: loss" in said.err
    assert f"{len(texts)} rows: " in said.err
    for name, more in (("texts.txt", ()), ("texts.jsonl", ()), ("texts.csv.gz", ("--text-column", "words"))):
        said = call("predict", run.path, tmp_path / name, *more, "--temperature", "1", "--device", "cpu")
        assert labels_of(said.out) == labels, said.err
        assert "fitted" not in said.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "texts.txt").read_bytes())))
    assert labels_of(call("predict", run.path, "--device", "cpu").out) == labels


def test_tables(call: Call, run: RunFolder, source: Path, tmp_path: Path) -> None:
    for kind, delimiter in (("csv", ","), ("tsv", "\t")):
        out = tmp_path / f"new/found.{kind}"
        assert call("predict", run.path, source, "--out", out, "--device", "cpu").code == 0
        first = next(csv.DictReader(io.StringIO(out.read_text()), delimiter=delimiter))
        assert list(first) == ["line", "label", "p_high", "p_low", "p_odd"]
        assert first["line"] == "2"  # after the header
        assert sum(float(first[name]) for name in ("p_high", "p_low", "p_odd")) == pytest.approx(1, abs=1e-4)
    out = tmp_path / "found.jsonl"
    call("predict", run.path, source, "--out", out, "--device", "cpu")
    entry = json.loads(out.read_text().splitlines()[0])
    assert max(entry["probabilities"], key=entry["probabilities"].get) == entry["label"] == first["label"]


def test_a_file_without_rows_has_the_columns_of_others(call: Call, run: RunFolder, tmp_path: Path) -> None:
    source = tmp_path / "none.csv"
    source.write_text("text\n")
    assert call("predict", run.path, source, "--device", "cpu").out == "line,label,p_high,p_low,p_odd\n"
    source.write_text("words\n")
    said = call("predict", run.path, source, "--device", "cpu")
    assert (said.code, said.out, "none.csv has none of sentence, text, sequence" in said.err) == (2, "", True)


def test_what_is_refused(call: Call, run: RunFolder, source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    said = call("predict", run.path, source, "--out", source)
    assert (said.code, "is the file that is read" in said.err) == (2, True)
    assert source.read_bytes() == before
    assert "must end with .csv, .tsv, .jsonl" in call("predict", run.path, source, "--out", tmp_path / "x.pdf").err
    assert "no such file" in call("predict", run.path, tmp_path / "none.csv").err
    assert "unknown kind of file; must be .csv, .tsv" in call("predict", run.path, __file__).err
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"words": "x"}\n')
    said = call("predict", run.path, bad, "--device", "cpu")
    assert (said.code, "bad.jsonl:2" in said.err, "on-error skip" in said.err) == (2, True, True)
    said = call("predict", run.path, bad, "--on-error", "skip", "--device", "cpu")
    assert (said.code, len(labels_of(said.out))) == (0, 1)
    assert "bad.jsonl:2" in said.err
    assert "1 row: " in said.err
    assert ", 1 bad place skipped" in said.err


def test_a_run_whose_data_is_gone_predicts_without_calibration(
    call: Call, run: RunFolder, source: Path, tmp_path: Path
) -> None:
    assert isinstance(calibrate_run(load_run(run.path, device="cpu")), Calibration)
    data = Path(run.config.data.path)
    aside = shutil.move(data, tmp_path / "aside")
    try:
        said = call("predict", run.path, source, "--device", "cpu")
    finally:
        shutil.move(aside, data)
    assert said.code == 0
    assert "not calibrated: the run's own data cannot be used" in said.err
    assert len(labels_of(said.out)) == len(texts_of(source))


def test_texts_are_read_without_their_labels(tmp_path: Path) -> None:
    fasta = tmp_path / "s.fasta"
    fasta.write_text(">one|x|y first\nAC\nGT\n\n>two\nTT\n")
    assert list(read_texts(fasta, Columns(field=9, table="none.csv"))) == [
        TextRow(fasta, 1, "ACGT", "one"),
        TextRow(fasta, 5, "TT", "two"),
    ]
    fasta.write_bytes(b">\xff\nAC\n>two\nTT\n")  # an id that no table could be written with
    assert list(read_texts(fasta, Columns())) == [
        BadPlace(fasta, 1, "the id is not UTF-8 text"),
        TextRow(fasta, 3, "TT", "two"),
    ]
    lines = io.BytesIO(b"a b\n\n \nc\xff\nlast")
    first, bad, last = stream_texts(lines)
    assert (first, last) == (TextRow(Path("-"), 1, "a b", None), TextRow(Path("-"), 5, "last", None))
    assert bad == BadPlace(Path("-"), 4, "not UTF-8 text")
