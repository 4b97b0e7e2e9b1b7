"""`meristem data prepare-labelled`: what it takes FASTA for, and data that it refuses or warns of."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from commands import Call
from meristem.data import Cut, LabelledData, prepare_labelled

ROWS = [(f"{'good' if i % 2 else 'bad'} film number {i % 17}", str(i % 2)) for i in range(60)]


def write_tsv(path: Path, rows: Sequence[tuple[str, str]]) -> Path:
    path.write_text("\n".join(["text\tlabel", *("\t".join(row) for row in rows)]) + "\n")
    return path


def write_fasta(path: Path, header: Callable[[int], str], count: int = 30) -> Path:
    draw = random.Random(0)
    path.write_text("".join(f">{header(i)}\n{''.join(draw.choices('ACGT', k=60))}\n" for i in range(count)))
    return path


def cut_of(data: Path) -> Cut:
    return LabelledData.open(data).recipe.cut


# --- the pieces that are chosen if nobody says ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.fasta", "a.FA", "a.faa"])
def test_sequences_are_cut_into_k_mers(call: Call, tmp_path: Path, name: str) -> None:
    source, data = write_fasta(tmp_path / name, lambda i: f"s{i}|{'AB'[i % 2]}"), tmp_path / "data"
    said = call("data", "prepare-labelled", source, "--out", data)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("texts are cut into k-mers of 3 letters, 1 letter apart (--tokens for other pieces)\n")
    assert "66 token ids, rows of up to 58 tokens" in said.out
    assert cut_of(data) == Cut("kmers", 3, 1)
    prepare_labelled([source], tmp_path / "other")
    assert cut_of(tmp_path / "other") == Cut("kmers", 3, 1)


def test_what_is_said_about_pieces_wins(call: Call, tmp_path: Path) -> None:
    source = write_fasta(tmp_path / "a.fasta", lambda i: f"s{i}|{'AB'[i % 2]}")
    said = call("data", "prepare-labelled", source, "--out", tmp_path / "k", "--k", "4", "--stride", "2")
    assert "cut into k-mers of 4 letters, 2 letters apart" in said.out
    assert cut_of(tmp_path / "k") == Cut("kmers", 4, 2)
    said = call("data", "prepare-labelled", source, "--out", tmp_path / "chars", "--tokens", "chars")
    assert said.out.startswith("texts are cut into characters\n")
    assert cut_of(tmp_path / "chars").kind == "chars"
    call("data", "prepare-labelled", source, "--out", tmp_path / "words", "--tokens", "words")
    assert cut_of(tmp_path / "words").kind == "words"


def test_other_texts_are_cut_into_words(call: Call, tmp_path: Path) -> None:
    said = call("data", "prepare-labelled", write_tsv(tmp_path / "a.tsv", ROWS), "--out", tmp_path / "data")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("texts are cut into words (--tokens for other pieces)\n")
    assert cut_of(tmp_path / "data") == Cut("words")


def test_one_fasta_file_is_enough(call: Call, tmp_path: Path) -> None:
    """A table beside it holds sequences too: both are cut in the same way."""
    train = write_tsv(tmp_path / "a.tsv", [(text * 5, label) for text, label in [("ACGT", "A"), ("GGCA", "B")] * 9])
    test = write_fasta(tmp_path / "b.fna", lambda i: f"s{i}|{'AB'[i % 2]}")
    call("data", "prepare-labelled", train, "--validation", test, "--out", tmp_path / "data")
    assert cut_of(tmp_path / "data").kind == "kmers"


# --- data that cannot be meant ----------------------------------------------------------------------------------------


def test_rows_that_are_all_classes_of_their_own_are_refused(call: Call, tmp_path: Path) -> None:
    source = write_fasta(tmp_path / "a.fasta", lambda i: f"sample{i:02}")
    said = call("data", "prepare-labelled", source, "--out", tmp_path / "data", "--held-out", "0")
    assert said.code == 2
    assert said.err == (
        "error: --label-field = -1: gives each of the 30 training rows a label of its own (sample00, sample01, "
        "sample02, ...), and no held-out row one of these; it must be the field of the header that holds the label, or "
        "labels come from a table (--label-table)\n"
    )
    assert call("data", "prepare-labelled", source, "--out", tmp_path / "data").code == 2, "held-out rows do not help"
    assert not (tmp_path / "data").exists()

    table = tmp_path / "table.tsv"
    table.write_text("id\tclade\n" + "".join(f"sample{i:02}\tclade {i % 2}\n" for i in range(30)))
    said = call("data", "prepare-labelled", source, "--out", tmp_path / "data", "--label-table", table,
                "--label-column", "clade")  # fmt: skip
    assert (said.code, said.err) == (0, "")

    source = write_tsv(tmp_path / "a.tsv", [(text, f"id{i}") for i, (text, _) in enumerate(ROWS[:17])])
    said = call("data", "prepare-labelled", source, "--out", tmp_path / "other")
    assert said.code == 2
    assert "--label-column = 'label': gives each of the " in said.err
    assert said.err.endswith("it must be the column that holds the label\n")


def test_one_row_of_each_class_is_enough_if_others_are_held_out(call: Call, tmp_path: Path) -> None:
    train = write_tsv(tmp_path / "a.tsv", [(f"word {label} and {label}", label) for label in "abcd"])
    test = write_tsv(tmp_path / "b.tsv", [(f"and a word {label}", label) for label in "abcd"])
    said = call("data", "prepare-labelled", train, "--validation", test, "--out", tmp_path / "data")
    assert said.code == 0
    assert said.err.startswith("warning: 4 classes have only 4 training rows; is the label where the settings say? ")
    assert said.err.count("\n") == 1


def test_a_class_for_every_other_row_is_warned_of(call: Call, tmp_path: Path) -> None:
    rows = [(f"word number {i} of all", f"class {i // 2}") for i in range(20)]
    train, test = write_tsv(tmp_path / "a.tsv", rows), write_tsv(tmp_path / "b.tsv", [("number of words", "class 1")])
    arguments = ("data", "prepare-labelled", train, "--validation", test, "--out", tmp_path / "data")
    assert call(*arguments).err == "", "two rows each"
    write_tsv(train, rows[:-1])
    said = call(*arguments, "--overwrite")
    assert said.code == 0
    assert said.err.startswith("warning: 10 classes have only 19 training rows; ")
    assert call(*arguments).err == said.err, "found as it was left, and said again"


def test_no_held_out_rows_are_warned_of_if_some_were_wanted(call: Call, tmp_path: Path) -> None:
    train = write_tsv(tmp_path / "a.tsv", ROWS)
    test = write_tsv(tmp_path / "b.tsv", [("a good film", "unheard of")])
    said = call("data", "prepare-labelled", train, "--validation", test, "--out", tmp_path / "data")
    assert said.code == 0
    assert said.err == (
        "warning: no held-out rows are left, so nothing can be measured (--held-out, --validation, --split-column)\n"
    )
    assert "1 held-out row of classes without training rows left out: unheard of 1" in said.out
    said = call("data", "prepare-labelled", train, "--held-out", "0", "--out", tmp_path / "other")
    assert (said.code, said.err) == (0, "")


def test_mostly_unknown_pieces_are_warned_of(call: Call, tmp_path: Path) -> None:
    source = write_fasta(tmp_path / "a.fasta", lambda i: f"s{i}|{'AB'[i % 2]}")
    said = call("data", "prepare-labelled", source, "--out", tmp_path / "data", "--tokens", "words")
    assert said.code == 0
    assert "rows of up to 1 token (" in said.out
    assert said.err.startswith("warning: 100% of the held-out pieces are not in the vocabulary")
    assert "(--tokens, --k, --min-count)" in said.err
    train = write_tsv(tmp_path / "a.tsv", ROWS)
    for text, warned in (("good film unheard of", False), ("film quite unheard of", True)):
        test = write_tsv(tmp_path / "b.tsv", [(text, "1")])
        said = call("data", "prepare-labelled", train, "--validation", test, "--out", tmp_path / str(warned))
        assert (said.code, bool(said.err)) == (0, warned), text


def test_utf_16_is_one_clear_line(call: Call, tmp_path: Path) -> None:
    source = write_tsv(tmp_path / "a.tsv", ROWS)
    source.write_bytes(source.read_text().encode("utf-16"))
    said = call("data", "prepare-labelled", source, "--out", tmp_path / "data", "--on-error", "skip")
    assert said.code == 2
    assert said.err == f"error: {source}: not UTF-8 text; it looks like UTF-16: save it as UTF-8\n"
