"""AutoTokenizer gives the ids that the run was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from meristem.data import ByteTokenizer, Cut, HfTokenizer, Recipe, Tokenizer
from meristem.data.labelled.rows import Columns
from meristem.export.standalone.tokenization_meristem import MeristemTokenizer
from meristem.export.tokenizer_files import write_recipe, write_tokenizer

TEXTS = [
    "The cat, the hat's brim. ACGTAC",
    "don\u2019t stop \u00fcber 12 \u00b2 na\u0301ive",
    "[CLS] <pad> <|endoftext|>",
]
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40) | st.sampled_from(TEXTS)


def bpe() -> str:
    """A small byte-level BPE whose post-processor puts a special token before every text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "[CLS]"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.post_processor = processors.TemplateProcessing("[CLS] $A", None, [("[CLS]", 1)])
    backend.enable_truncation(5)
    return backend.to_str()


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    made = {}
    tokenizers: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "bpe": HfTokenizer(bpe())}
    for name, tokenizer in tokenizers.items():
        folder = tmp_path_factory.mktemp(name)
        write_tokenizer(folder, tokenizer, 100)
        made[name] = (tokenizer, AutoTokenizer.from_pretrained(folder))
    return made


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@given(text=texts)
def test_ids_of_language_models_are_the_same(name: str, language: dict[str, tuple[Tokenizer, Any]], text: str) -> None:
    own, exported = language[name]
    ids = exported(text)["input_ids"]
    assert ids == own.encode(text).tolist()
    assert exported.decode(ids) == own.decode(ids) == text
    assert exported.eos_token_id == exported.pad_token_id == exported.bos_token_id == own.end_of_text
    assert exported.decode([*ids, own.end_of_text], skip_special_tokens=True) == text


@given(ids=st.lists(st.integers(0, 255), max_size=20))
def test_broken_characters_are_shown_alike(language: dict[str, tuple[Tokenizer, Any]], ids: list[int]) -> None:
    own, exported = language["bytes"]
    assert exported.decode(ids) == own.decode(ids)


CUTS = {
    "words": Cut("words"), "chars": Cut("chars"), "kmers": Cut("kmers", 3, 1), "strides": Cut("kmers", 4, 3),
    "tokenizer": Cut("tokenizer", tokenizer=bpe()),
}  # fmt: skip


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Recipe, MeristemTokenizer, Path]]:
    made = {}
    for name, cut in CUTS.items():
        known = sorted({piece for text in TEXTS for piece in cut.pieces(text)})
        fixed = cut.fixed_vocabulary
        recipe = Recipe(Columns("text"), cut, tuple(known) if fixed is None else fixed, ("a", "b"), 12)
        folder = tmp_path_factory.mktemp(name)
        write_recipe(folder, recipe, 10)
        made[name] = (recipe, MeristemTokenizer.from_pretrained(folder), folder)
    return made


@pytest.mark.parametrize("name", CUTS)
@given(text=texts)
def test_ids_of_classifiers_are_the_same(
    name: str, recipes: dict[str, tuple[Recipe, MeristemTokenizer, Path]], text: str
) -> None:
    recipe, exported, _ = recipes[name]
    assert exported(text, truncation=True)["input_ids"] == recipe.encode(text)[:10].tolist()


@pytest.mark.parametrize("name", CUTS)
def test_rows_are_padded_and_tokenizers_saved_again(
    name: str, recipes: dict[str, tuple[Recipe, MeristemTokenizer, Path]], tmp_path: Path
) -> None:
    recipe, exported, folder = recipes[name]
    short, long = (recipe.encode(text)[:10].tolist() for text in ("T", TEXTS[0]))
    found = exported(["T", TEXTS[0]], truncation=True, padding=True)
    assert found["input_ids"] == [short + [0] * (len(long) - len(short)), long]
    assert found["attention_mask"][0] == [1] * len(short) + [0] * (len(long) - len(short))
    assert len(exported) == recipe.ids
    exported.save_pretrained(tmp_path)
    again = MeristemTokenizer.from_pretrained(tmp_path)
    assert [again(text)["input_ids"] for text in TEXTS] == [exported(text)["input_ids"] for text in TEXTS]
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 10


def test_special_names_are_not_those_of_pieces(tmp_path: Path) -> None:
    recipe = Recipe(Columns("text"), Cut("chars"), ("a", "<pad>"), ("a", "b"), 12)
    write_recipe(tmp_path, recipe, 12)
    exported = MeristemTokenizer.from_pretrained(tmp_path)
    assert (exported.pad_token, exported.pad_token_id, exported.unk_token_id) == ("<<pad>>", 0, 1)
