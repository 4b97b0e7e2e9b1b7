"""The tokenizer of a run as files that AutoTokenizer loads, with the same ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from meristem.data import ByteTokenizer, HfTokenizer, Recipe, Tokenizer
from meristem.data.find_tokenizer import CONFIG_FILE, TOKENIZER_FILE
from meristem.data.labelled.pieces import UNKNOWN
from meristem.plan import PADDING

STANDALONE = Path(__file__).parent / "standalone"
PIECES_FILE, PIECES_TOKENIZER_FILE, PIECES_CODE = "pieces.json", "pieces-tokenizer.json", "tokenization_meristem.py"
END_OF_TEXT = "<|endoftext|>"  # as byte data calls it


class SpecialTokens(NamedTuple):
    """Ids of special tokens: language models begin and end texts with the same one, classifiers have padding."""

    end_of_text: int | None
    padding: int

    @property
    def fields(self) -> dict[str, int]:
        """The ids by the names of transformers."""
        ends = {} if self.end_of_text is None else {"bos_token_id": self.end_of_text, "eos_token_id": self.end_of_text}
        return {**ends, "pad_token_id": self.padding}


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int) -> SpecialTokens:
    """Write the tokenizer of a language model.

    Texts get no special tokens, as in training; one that spells the end of text stays text.
    """
    definition, end = definition_of(tokenizer), end_of_text_name(tokenizer)
    (folder / TOKENIZER_FILE).write_text(json.dumps(definition, ensure_ascii=False), encoding="utf-8")
    _write_config(
        folder,
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end, "pad_token": end,
            "padding_side": "left", "split_special_tokens": True, "clean_up_tokenization_spaces": False,
            "model_max_length": context, "model_input_names": ["input_ids", "attention_mask"],
        },
    )  # fmt: skip
    return SpecialTokens(tokenizer.end_of_text, tokenizer.end_of_text)


def definition_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a tokenizer.json that encodes as the tokenizer does."""
    if isinstance(tokenizer, ByteTokenizer):
        return _byte_definition()
    assert isinstance(tokenizer, HfTokenizer)
    content: dict[str, Any] = json.loads(tokenizer.definition)
    return {**content, "post_processor": None, "truncation": None, "padding": None}


def end_of_text_name(tokenizer: Tokenizer) -> str:
    """What the token that ends a document is called."""
    return tokenizer.eot_token if isinstance(tokenizer, HfTokenizer) else END_OF_TEXT


def _byte_definition() -> dict[str, Any]:
    """A byte-level BPE of 256 tokens and no merges, whose ids are the bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {
        "id": ByteTokenizer.end_of_text, "content": END_OF_TEXT, "single_word": False, "lstrip": False,
        "rstrip": False, "normalized": False, "special": True,
    }  # fmt: skip
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(byte_characters())}, "merges": [],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip


def byte_characters() -> list[str]:
    """The visible character that stands for each byte in byte-level vocabularies: itself, or one from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def write_recipe(folder: Path, recipe: Recipe, context: int) -> SpecialTokens:
    """Write the tokenizer of a classifier, which needs code of its own: k-mers overlap."""
    pieces = set(recipe.vocabulary)
    names = {name: _free_name(name, pieces) for name in ("pad", "unk")}
    (folder / PIECES_FILE).write_text(json.dumps(recipe.vocabulary, ensure_ascii=False), encoding="utf-8")
    if recipe.cut.tokenizer is not None:
        (folder / PIECES_TOKENIZER_FILE).write_text(recipe.cut.tokenizer, encoding="utf-8", newline="")
    shutil.copyfile(STANDALONE / PIECES_CODE, folder / PIECES_CODE)
    _write_config(
        folder,
        {
            "tokenizer_class": "MeristemTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_meristem.MeristemTokenizer", None]},
            "pad_token": names["pad"], "unk_token": names["unk"], "padding_side": "right", "truncation_side": "right",
            "cut": recipe.cut.kind, "k": recipe.cut.k, "stride": recipe.cut.stride,
            "clean_up_tokenization_spaces": False, "model_max_length": min(recipe.length, context),
        },
    )  # fmt: skip
    assert (PADDING, UNKNOWN) == (0, 1)
    return SpecialTokens(None, PADDING)


def _free_name(name: str, taken: set[str]) -> str:
    """A name for a special token that no piece has."""
    found = f"<{name}>"
    while found in taken:
        found = f"<{found}>"
    return found


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
