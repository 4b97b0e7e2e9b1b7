"""Texts cut into pieces for classifiers: words, characters, k-mers, or the tokens of a Hugging Face tokenizer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from meristem.data.find_tokenizer import find_definition
from meristem.data.tokenizer import backend_ids, encoded, load_backend
from meristem.errors import InputError
from meristem.limits import check_integer
from meristem.plan import PADDING
from meristem.wording import counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

KINDS = ("words", "chars", "kmers", "tokenizer")
UNKNOWN = PADDING + 1
RESERVED = UNKNOWN + 1  # ids below have a meaning of their own; the first piece of a vocabulary has this one

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")  # a run of letters and digits, or one mark of punctuation


@dataclass(frozen=True)
class Cut:
    """How a text becomes pieces.

    `words` are in small letters, `kmers` in capitals: every k letters of a sequence, from each `stride`-th place. A
    `tokenizer` is the content of a tokenizer.json; the special tokens that it adds by itself, such as [CLS], stay.
    """

    kind: str = "words"
    k: int = 3
    stride: int = 1
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("tokens", self.kind, f"must be one of {', '.join(KINDS)}")
        for field in ("k", "stride"):
            check_integer(field, getattr(self, field), 1)
        if (self.kind == "tokenizer") != (self.tokenizer is not None):
            raise InputError("tokens", self.kind, "goes with a tokenizer.json, and nothing else does")

    @classmethod
    def named(cls, name: str, k: int = 3, stride: int = 1) -> Cut:
        """The cut called words, chars or kmers, or that of a tokenizer (see `find_definition`)."""
        named = [kind for kind in KINDS if kind != "tokenizer"]
        if name in named:
            return cls(name, k, stride)
        return cls("tokenizer", k, stride, find_definition("tokens", name, ", ".join(named)).text)

    def __str__(self) -> str:
        if self.kind == "kmers":
            return f"k-mers of {counted(self.k, 'letter')}, {counted(self.stride, 'letter')} apart"
        return {"words": "words", "chars": "characters", "tokenizer": "the tokens of a tokenizer.json"}[self.kind]

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text that is not empty; always at least one."""
        if self.kind == "tokenizer":
            return self._tokens(text) or [text]
        if self.kind == "words":
            return _WORD.findall(text.lower()) or [text]
        if self.kind == "chars":
            return list(text)
        capitals = text.upper()
        stop = max(1, len(capitals) - self.k + self.stride)  # the last piece may be shorter, so that no end is lost
        return [capitals[start : start + self.k] for start in range(0, stop, self.stride)]

    @property
    def fixed_vocabulary(self) -> tuple[str, ...] | None:
        """The pieces that a tokenizer knows, by its ids; None where the training rows decide."""
        if self.kind != "tokenizer":
            return None
        names = {number: piece for piece, number in backend_ids("tokens", self._backend).items()}
        return tuple(names.get(number, "") for number in range(max(names) + 1))

    def _tokens(self, text: str) -> list[str]:
        tokens: list[str] = encoded(self._backend.encode, text).tokens
        return tokens

    @cached_property
    def _backend(self) -> Backend:
        assert self.tokenizer is not None
        return load_backend("tokens", self.tokenizer)


def learnt_vocabulary(texts: Iterable[Sequence[str]], min_count: int, max_size: int) -> tuple[str, ...]:
    """The pieces of the texts that occur at least `min_count` times, the most frequent ones first."""
    counts = Counter(piece for pieces in texts for piece in pieces)
    known = sorted((piece for piece, count in counts.items() if count >= min_count), key=lambda p: (-counts[p], p))
    return tuple(known[:max_size])
