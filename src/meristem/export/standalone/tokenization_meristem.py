"""The tokenizer of a Meristem classifier: words, characters, k-mers, or the tokens of another tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizer

WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")  # a run of letters and digits, or one mark of punctuation


class MeristemTokenizer(PreTrainedTokenizer):
    """Ids 0 and 1 are padding and unknown pieces; the file of the vocabulary has the others in order.

    Pieces are words in small letters, `chars`, `kmers` in capitals (every `k` letters, from each `stride`-th place), or
    those of the tokenizer in `pieces_file`, with the special tokens that it adds by itself.
    """

    vocab_files_names = {"vocab_file": "pieces.json", "pieces_file": "pieces-tokenizer.json"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        vocab_file: str,
        pieces_file: str | None = None,
        cut: str = "words",
        k: int = 3,
        stride: int = 1,
        **kwargs: Any,
    ) -> None:
        self.cut, self.k, self.stride = cut, k, stride
        self.vocab_file, self.pieces_file = vocab_file, pieces_file
        pieces: list[str] = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        self.pieces = dict(enumerate(pieces, start=2))
        self.numbers = {piece: number for number, piece in self.pieces.items()}
        self.tokenizer_of_pieces: Tokenizer | None = None
        if cut == "tokenizer":
            assert pieces_file is not None, "a tokenizer's pieces need its file, pieces-tokenizer.json"
            self.tokenizer_of_pieces = Tokenizer.from_file(pieces_file)
            self.tokenizer_of_pieces.no_truncation()
            self.tokenizer_of_pieces.no_padding()
        kwargs = {"pad_token": "<pad>", "unk_token": "<unk>", **kwargs}
        self.reserved = {number: str(kwargs[name]) for number, name in enumerate(("pad_token", "unk_token"))}
        super().__init__(cut=cut, k=k, stride=stride, **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self.reserved) + len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        return {name: number for number, name in self.reserved.items()} | self.numbers

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """The pieces of a text; one that spells a special token is text like any other."""
        if self.tokenizer_of_pieces is not None:
            return self.tokenizer_of_pieces.encode(text).tokens or [text]
        if self.cut == "words":
            return WORD.findall(text.lower()) or [text]
        if self.cut == "chars":
            return list(text)
        capitals = text.upper()
        stop = max(1, len(capitals) - self.k + self.stride)  # the last piece may be shorter, so that no end is lost
        return [capitals[start : start + self.k] for start in range(0, stop, self.stride)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.numbers.get(token, 1)

    def _convert_id_to_token(self, index: int) -> str:
        return self.reserved.get(index) or self.pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return ("" if self.cut == "chars" else " ").join(tokens)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Copy the files that say what the pieces are."""
        written = []
        for key, name in self.vocab_files_names.items():
            source = getattr(self, key)
            if source is not None and Path(source).is_file():
                target = Path(save_directory) / (f"{filename_prefix}-{name}" if filename_prefix else name)
                if target.resolve() != Path(source).resolve():
                    shutil.copyfile(source, target)
                written.append(str(target))
        return tuple(written)
