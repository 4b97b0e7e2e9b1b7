"""Labelled data: splits that share no text, vocabularies of training rows only, and folders that are whole."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meristem.data import (
    ByteTokenizer,
    Columns,
    Cut,
    LabelledData,
    LabelledIndex,
    LabelledRows,
    Recipe,
    TokenData,
    findings_notes,
    open_data,
    prepare,
    prepare_labelled,
    verify,
)
from meristem.data.labelled.pieces import RESERVED, UNKNOWN, learnt_vocabulary
from meristem.errors import InputError, RunError

from .helpers import SHARED, needs_shared, small_bpe

ROWS = [(f"{'good' if i % 2 else 'bad'} film number {i % 37} of {i % 11}", str(i % 2)) for i in range(80)]


def write_rows(path: Path, rows: Sequence[Sequence[str]], header: Sequence[str] = ("text", "label")) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def texts_of(data: LabelledData, split: Any) -> list[tuple[str, str]]:
    """Words and label of every row, read back from the ids."""
    rows, recipe = data.split(split), data.recipe
    names = ["<padding>", "<unknown>", *recipe.vocabulary]
    tokens = rows.padded(np.arange(len(rows)), int(rows.lengths.max(initial=1)))
    return [
        (" ".join(names[i] for i in ids[:size]), recipe.classes[label])
        for ids, size, label in zip(tokens.tolist(), rows.lengths.tolist(), rows.labels.tolist(), strict=True)
    ]


def test_rows_come_back_from_the_folder(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", ROWS)
    index = prepare_labelled([path], tmp_path / "data", held_out=0.3, min_count=1)
    data = LabelledData.open(tmp_path / "data")
    found = Counter(texts_of(data, "train") + texts_of(data, "held_out"))
    known = set(data.recipe.vocabulary)
    expected = Counter((" ".join(w if w in known else "<unknown>" for w in t.split()), label) for t, label in ROWS)
    assert found == expected
    assert 0 < index.held_out.rows < 40
    assert index == data.index == verify(tmp_path / "data")
    assert isinstance(open_data(tmp_path / "data"), LabelledData)
    assert index.train.class_rows == tuple(np.bincount(data.split("train").labels))
    assert json.loads((tmp_path / "data/index.json").read_text())["kind"] == "labelled"


# --- splits ----------------------------------------------------------------------------------------------------------

FEW_WORDS = st.lists(st.sampled_from(["a", "B", "b", "c", "d e"]), min_size=1, max_size=4).map(" ".join)


@settings(max_examples=60, deadline=None)
@example(rows=[("B", "x", "train")] * 4, mode="hash", length=1, drop=False, min_rows=1)  # one text: it stays in train
@given(
    rows=st.lists(
        st.tuples(FEW_WORDS, st.sampled_from("xyz"), st.sampled_from(["train", "val", "test", "Dev"])), min_size=4
    ),
    mode=st.sampled_from(["hash", "column", "files"]),
    length=st.integers(1, 4),
    drop=st.booleans(),
    min_rows=st.integers(1, 3),
)
def test_no_text_is_in_both_splits_and_every_row_is_accounted_for(
    rows: list[tuple[str, str, str]], mode: str, length: int, drop: bool, min_rows: int
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        first = write_rows(folder / "a.csv", rows, ("text", "label", "part"))
        second = write_rows(folder / "b.csv", rows[:3], ("text", "label", "part"))
        apart = [second] if mode == "files" else []
        columns = Columns(split="part") if mode == "column" else Columns()
        try:
            index = prepare_labelled(
                [first], folder / "data", validation=apart, columns=columns, length=length, held_out=0.4,
                drop_duplicates=drop, min_rows=min_rows, min_count=1,
            )  # fmt: skip
        except InputError as error:
            if error.field not in ("columns.label", "columns.split"):
                raise
            return
        data, found = LabelledData.open(folder / "data"), index.findings
        # Unknown pieces hide differences, so what is held out is compared as far as it can be told apart.
        train = {text for text, _ in texts_of(data, "train")}
        held = [text for text, _ in texts_of(data, "held_out") if "<unknown>" not in text]
        assert not train & set(held)
        dropped = found.duplicates if drop else 0
        left_out = sum(sum(c.values()) for c in (found.small_classes, found.untrained_classes, found.other_splits))
        assert index.train.rows + index.held_out.rows + dropped + found.repeated + left_out == found.rows
        assert found.rows == len(rows) + (3 if apart else 0)
        assert all(count >= min_rows for count in index.train.class_rows)
        seen = " ".join(train).split()
        assert set(seen) == set(data.recipe.vocabulary), "of training rows, and of these all"
        if drop:
            assert len(set(texts_of(data, "train"))) == index.train.rows


def test_what_is_found_is_counted(tmp_path: Path) -> None:
    train = write_rows(
        tmp_path / "train.csv",
        [("Good film", "1"), ("good  film", "1"), ("good film", "0"), ("bad film", "0"), ("one two three four", "0"),
         ("rare", "2"), ("fine", "1"), ("poor", "0")],
    )  # fmt: skip
    dev = write_rows(
        tmp_path / "dev.csv", [("GOOD FILM", "0"), ("new words here", "1"), ("what", "7"), ("rare", "2"), ("bad", "0")]
    )
    index = prepare_labelled(
        [train], tmp_path / "data", validation=[dev], length=3, drop_duplicates=True, min_rows=2, min_count=1
    )
    found = index.findings
    assert (index.train.rows, index.held_out.rows, index.classes) == (6, 2, ("0", "1"))
    assert (found.rows, found.bad, found.duplicates, found.conflicts, found.repeated, found.cut) == (13, 0, 1, 1, 1, 1)
    assert found.small_classes == {"2": 2}
    assert found.untrained_classes == {"7": 1}
    assert found.unknown == pytest.approx(3 / 4), "new, words and here are unknown, bad is not"
    text = "\n".join(note.text for note in findings_notes(index))
    for words in ("1 training row with text and label of an earlier one: dropped",
                  "1 training text with more than one label", "1 held-out row removed", "1 row cut to 3 tokens",
                  "\n2 rows of classes with too few training rows left out: 2 2",
                  "\n1 held-out row of classes without training rows left out: 7 1"):  # fmt: skip
        assert words in text


def test_splits_by_column(tmp_path: Path) -> None:
    rows = [("a b", "x", "train"), ("c d", "y", "train"), ("e f", "x", "VALIDATION"), ("g h", "y", "test")]
    path = write_rows(tmp_path / "rows.csv", rows, ("text", "label", "part"))
    index = prepare_labelled([path], tmp_path / "data", columns=Columns(split="part"))
    assert (index.train.rows, index.held_out.rows, index.findings.other_splits) == (2, 1, {"test": 1})
    with pytest.raises(InputError, match=r"columns\.split.*validation files"):
        prepare_labelled([path], tmp_path / "other", validation=[path], columns=Columns(split="part"))
    with pytest.raises(InputError, match=r"no rows of train, only \['x', 'y'\]"):
        prepare_labelled([path], tmp_path / "other", columns=Columns(split="label"))


def test_the_hash_split_does_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    one = prepare_labelled([write_rows(tmp_path / "a.csv", ROWS)], tmp_path / "a", held_out=0.3)
    other = prepare_labelled([write_rows(tmp_path / "b.csv", ROWS[::-1])], tmp_path / "b", held_out=0.3)
    sides = [Counter(texts_of(LabelledData.open(tmp_path / name), "held_out")) for name in ("a", "b")]
    assert sides[0] == sides[1]
    assert one.held_out.rows == other.held_out.rows == sum(sides[0].values())


def test_both_splits_have_rows_if_there_are_two_texts(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", [("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")])
    for share in (1e-9, 0.999):
        index = prepare_labelled([path], tmp_path / f"data{share}", held_out=share)
        assert (index.train.rows, index.held_out.rows) == (2, 2)
    assert prepare_labelled([path], tmp_path / "all", held_out=0).held_out.rows == 0
    assert len(LabelledData.open(tmp_path / "all").split("held_out")) == 0


# --- pieces and vocabularies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "text", "pieces"),
    [
        (Cut("words"), "It's NOT bad, really!", ["it's", "not", "bad", ",", "really", "!"]),
        (Cut("words"), "do n't\u00a0go", ["do", "n't", "go"]),
        (Cut("words"), "日本 café", ["日本", "café"]),
        (Cut("chars"), "aB c", ["a", "B", " ", "c"]),
        (Cut("kmers", 3, 1), "acgta", ["ACG", "CGT", "GTA"]),
        (Cut("kmers", 3, 3), "acgtacg", ["ACG", "TAC", "G"]),
        (Cut("kmers", 4, 2), "acgtac", ["ACGT", "GTAC"]),
        (Cut("kmers", 6, 1), "acg", ["ACG"]),
    ],
)
def test_pieces(cut: Cut, text: str, pieces: list[str]) -> None:
    assert cut.pieces(text) == pieces


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.sampled_from("ACGT"), min_size=1), k=st.integers(1, 6), data=st.data())
def test_k_mers_cover_the_sequence(text: str, k: int, data: Any) -> None:
    stride = data.draw(st.integers(1, k))
    pieces = Cut("kmers", k, stride).pieces(text)
    rebuilt = pieces[0] + "".join(piece[k - stride :] for piece in pieces[1:])
    assert rebuilt == text
    assert all(len(piece) == k for piece in pieces[:-1])


def test_the_vocabulary_has_frequent_pieces_first_and_no_rare_ones() -> None:
    texts = [["b", "a", "a"], ["c", "b", "a"], ["d"]]
    assert learnt_vocabulary(texts, min_count=1, max_size=10) == ("a", "b", "c", "d")
    assert learnt_vocabulary(texts, min_count=2, max_size=10) == ("a", "b")
    assert learnt_vocabulary(texts, min_count=1, max_size=1) == ("a",)


def test_ids_of_pieces(tmp_path: Path) -> None:
    recipe = Recipe(Columns(), Cut(), ("film", "good"), ("no", "yes"), 3)
    assert recipe.encode("Good film zzz film").tolist() == [RESERVED + 1, RESERVED, UNKNOWN]
    assert recipe.ids == 4
    assert recipe.class_numbers == {"no": 0, "yes": 1}


def test_a_tokenizer_keeps_its_own_ids_after_the_reserved_ones(tmp_path: Path) -> None:
    small_bpe().save(tmp_path)
    tokenizer = small_bpe()
    cut = Cut.named(str(tmp_path / "tokenizer.json"))
    path = write_rows(tmp_path / "rows.csv", ROWS)
    index = prepare_labelled([path], tmp_path / "data", cut=cut, held_out=0.2)
    data = LabelledData.open(tmp_path / "data")
    assert index.ids == tokenizer.vocabulary + RESERVED
    text = "Document 3: naïve café"
    assert data.recipe.encode(text).tolist() == (tokenizer.encode(text) + RESERVED).tolist()
    assert index.findings.unknown == 0
    (tmp_path / "data/tokenizer.json").unlink()
    with pytest.raises(RunError, match=r"tokenizer\.json: cannot be read"):
        LabelledData.open(tmp_path / "data")


def test_recipes_come_back(tmp_path: Path) -> None:
    for number, cut in enumerate((Cut(), Cut("chars"), Cut("kmers", 5, 2))):
        columns = Columns("t", "l", "s", "none", 2, "table.csv", "name")
        recipe = Recipe(columns, cut, ("a", "b"), ("x", "y"), 9)
        (tmp_path / str(number)).mkdir()
        recipe.save(tmp_path / str(number))
        assert Recipe.load(tmp_path / str(number)) == recipe
        assert Recipe.load(tmp_path / str(number)).digest == recipe.digest


def test_digests_tell_recipes_apart() -> None:
    base = Recipe(Columns(), Cut(), ("a", "b"), ("x", "y"), 9)
    others = [
        Recipe(Columns(), Cut("chars"), ("a", "b"), ("x", "y"), 9),
        Recipe(Columns(), Cut(), ("b", "a"), ("x", "y"), 9),
        Recipe(Columns(), Cut(), ("a", "b"), ("y", "x"), 9),
        Recipe(Columns(), Cut(), ("a", "b"), ("x", "y"), 8),
    ]
    assert len({recipe.digest for recipe in (base, *others)}) == 5
    assert Recipe(Columns("t"), Cut(), ("a", "b"), ("x", "y"), 9).digest == base.digest, "where it stands is no matter"


def test_classes_are_in_order(tmp_path: Path) -> None:
    rows = [(f"text {label} {i}", label) for label in ("10", "2", "-1") for i in range(2)]
    index = prepare_labelled([write_rows(tmp_path / "n.csv", rows)], tmp_path / "n", held_out=0)
    assert index.classes == ("-1", "2", "10")
    rows = [(f"text {label} {i}", label) for label in ("b10", "2", "a") for i in range(2)]
    index = prepare_labelled([write_rows(tmp_path / "w.csv", rows)], tmp_path / "w", held_out=0)
    assert index.classes == ("2", "a", "b10")


# --- rows in batches --------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1), data=st.data())
def test_padded_rows(rows: list[list[int]], data: Any) -> None:
    stored = LabelledRows.of([np.array(row) for row in rows], [0] * len(rows))
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5))
    length = data.draw(st.integers(1, 12))
    padded = stored.padded(np.array(chosen, dtype=np.int64), length)
    expected = [(rows[i] + [0] * length)[:length] for i in chosen]
    assert padded.tolist() == expected
    assert stored.lengths.tolist() == [len(row) for row in rows]


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare_labelled([write_rows(tmp_path / "rows.csv", ROWS)], tmp_path / "data", held_out=0.2)
    return tmp_path / "data"


def test_the_same_again_is_found_and_another_is_refused(folder: Path) -> None:
    source = folder.parent / "rows.csv"
    before = (folder / "index.json").stat()
    assert prepare_labelled([source], folder, held_out=0.2) == LabelledIndex.load(folder)
    assert (folder / "index.json").stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(InputError, match=r"other files or settings.*overwrite"):
        prepare_labelled([source], folder, held_out=0.2, min_count=1)
    assert prepare_labelled([source], folder, held_out=0.2, min_count=1, overwrite=True) == LabelledIndex.load(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["data", "rows.csv"]


def test_which_file_is_held_out_matters(tmp_path: Path) -> None:
    one, other = write_rows(tmp_path / "a.csv", ROWS[:40]), write_rows(tmp_path / "b.csv", ROWS[40:])
    prepare_labelled([one], tmp_path / "data", validation=[other])
    with pytest.raises(InputError, match="other files or settings"):
        prepare_labelled([other], tmp_path / "data", validation=[one])
    with pytest.raises(InputError, match="other files or settings"):
        prepare_labelled([one, other], tmp_path / "data")


def test_digests_depend_on_the_rows_only(folder: Path, tmp_path: Path) -> None:
    copy = write_rows(tmp_path / "copy.csv", [(text.upper(), label) for text, label in ROWS])
    again = prepare_labelled([copy], tmp_path / "again", held_out=0.2)
    assert again.digest == LabelledIndex.load(folder).digest
    other = [(text, label) for text, label in ROWS[:-1]] + [("something else", "1")]
    assert (
        prepare_labelled([write_rows(tmp_path / "o.csv", other)], tmp_path / "other", held_out=0.2).digest
        != again.digest
    )


def test_damage_is_noticed_and_named(folder: Path, tmp_path: Path) -> None:
    for path in sorted(folder.glob("*.bin")):
        copy = tmp_path / f"copy-{path.name}"
        shutil.copytree(folder, copy)
        content = bytearray(path.read_bytes())
        (copy / path.name).write_bytes(content[:-1])
        with pytest.raises(RunError, match=rf"{path.name}: has {len(content) - 1} bytes"):
            LabelledData.open(copy)
        content[0] ^= 1
        (copy / path.name).write_bytes(content)
        with pytest.raises(RunError, match=rf"{path.name}: .*sha256"):
            verify(copy)
    recipe = json.loads((folder / "recipe.json").read_text())
    recipe["classes"] = recipe["classes"][::-1]
    (folder / "recipe.json").write_text(json.dumps(recipe))
    with pytest.raises(RunError, match=r"recipe\.json: is not the recipe"):
        LabelledData.open(folder)


def test_the_two_kinds_of_data_do_not_mix(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="meristem-labelled"):
        TokenData.open(folder)
    text = tmp_path / "text.txt"
    text.write_text("some text")
    prepare([text], tmp_path / "tokens", tokenizer=ByteTokenizer())
    assert isinstance(open_data(tmp_path / "tokens"), TokenData)
    with pytest.raises(RunError, match="not an index of labelled data"):
        LabelledData.open(tmp_path / "tokens")
    with pytest.raises(RunError, match="cannot be read, so this is no prepared data"):
        open_data(tmp_path)


def test_bad_rows_stop_the_work_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,1\nb\nc,0\nd,0\n")
    with pytest.raises(RunError, match=r"rows\.csv:3: 1 field,.*pass over such places"):
        prepare_labelled([path], tmp_path / "data")
    assert not (tmp_path / "data").exists()
    said: list[str] = []
    index = prepare_labelled([path], tmp_path / "data", on_error="skip", held_out=0, report=said.append)
    assert (index.train.rows, index.findings.bad) == (3, 1)
    assert said == [f"skipped {path}:3: 1 field, but the header has 2"]
    assert "3 rows read, 1 bad place skipped" in [note.text for note in findings_notes(index)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"length": 0}, "length = 0"),
        ({"held_out": 1.0}, "held_out = 1.0"),
        ({"min_rows": 0}, "min_rows = 0"),
        (
            {"min_rows": 1000},
            r"has 2 labels in all and 0 with at least 1000 training rows; two such classes are needed",
        ),
        ({"min_count": 0}, "min_count = 0"),
        ({"max_vocabulary": 0}, "max_vocabulary = 0"),
        ({"on_error": "stop"}, "on_error"),
    ],
)
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        prepare_labelled([write_rows(tmp_path / "rows.csv", ROWS)], tmp_path / "data", **settings)


@pytest.mark.parametrize(("arguments", "words"), [(("words", 0), "k = 0"), (("syllables",), "words, chars, kmers")])
def test_bad_cuts(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Cut.named(*arguments)


# --- real data --------------------------------------------------------------------------------------------------------


@needs_shared
def test_sst2(tmp_path: Path) -> None:
    """As counted in the data's README: 67,349 and 872 rows, 66,978 distinct phrases, none shared."""
    index = prepare_labelled([SHARED / "sst2/train.tsv.gz"], tmp_path / "data", validation=[SHARED / "sst2/dev.tsv.gz"])
    assert (index.train.rows, index.held_out.rows, index.findings.repeated) == (67_349, 872, 0)
    assert index.train.class_rows == (29_780, 37_569)
    assert index.held_out.class_rows == (428, 444)


@needs_shared
def test_spikes(tmp_path: Path) -> None:
    """28 clades have at least 40 training rows."""
    columns = Columns("spike_aa", "clade", "split")
    source = SHARED / "sars_cov_2/spike_variants.jsonl.zst"
    index = prepare_labelled([source], tmp_path / "data", columns=columns, cut=Cut("kmers", 9, 9), min_rows=40)
    assert len(index.classes) == 28
    assert index.findings.rows == 11_635
    assert index.findings.repeated == 0


def test_labels_of_thousands_of_digits_are_sorted_as_text(tmp_path: Path) -> None:
    labels = ["9" * 5000, "10", "2"]
    path = write_rows(tmp_path / "rows.csv", [(f"word {i}", labels[i % 3]) for i in range(30)])
    assert prepare_labelled([path], tmp_path / "data").classes == ("10", "2", "9" * 5000)


@pytest.mark.parametrize(
    ("setting", "value"), [("length", 10**400), ("min_rows", True), ("min_count", 0.5), ("max_vocabulary", 10**9)]
)
def test_settings_that_cannot_be_are_named(setting: str, value: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", ROWS)
    with pytest.raises(InputError, match=f"^{setting} = ") as caught:
        prepare_labelled([path], tmp_path / "data", **{setting: value})
    assert len(str(caught.value)) < 300
