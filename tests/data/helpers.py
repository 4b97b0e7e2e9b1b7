"""Small inputs shared by the data tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from meristem.data import HfTokenizer, Split

SHARED = Path(__file__).resolve().parents[2].parent / "shared/data"
TEXTS = [f"Document {i}: naïve café, 日本語 and {'words ' * (i % 7)}😀\n" for i in range(60)]

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the data in {SHARED.parent.name}/data")


def write_jsonl(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return path


def documents_in(tokens: Sequence[int], end_of_text: int) -> list[list[int]]:
    """The documents of a stream, without their end-of-text."""
    found: list[list[int]] = [[]]
    for token in tokens:
        if token == end_of_text:
            found.append([])
        else:
            found[-1].append(token)
    assert not found.pop(), "a stream ends with end-of-text"
    return found


def shard_bytes(folder: Path, split: Split) -> list[bytes]:
    return [(folder / shard.file).read_bytes() for shard in split.shards]


def small_bpe(special: str = "<|endoftext|>") -> HfTokenizer:
    """A byte-level BPE trained on a few lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[special], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return HfTokenizer(backend.to_str())
