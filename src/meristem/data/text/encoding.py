"""Turning chunks of documents into ids, in this process or in several, always in order."""

from __future__ import annotations

import hashlib
import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meristem.data.tokenizer import Tokenizer, load_tokenizer, token_dtype
from meristem.errors import RunError

NEAR = 400  # characters from the wanted place within which a document is rather cut at a line break


@dataclass(frozen=True)
class Division:
    """What is held out: documents with a hash below `threshold`, or, where `share` is given, the end of each."""

    threshold: int
    share: float | None = None

    def of(self, text: str, hash_: int) -> tuple[str, str]:
        """What of a document is trained on and what is held out; either may be empty."""
        if self.share is not None:
            cut = cut_at(text, self.share)
            return text[:cut], text[cut:]
        return ("", text) if hash_ < self.threshold else (text, "")


@dataclass(frozen=True)
class Part:
    """Some documents of one split: their ids, each document followed by end-of-text."""

    ids: NDArray[Any]
    documents: int
    text_bytes: int


@dataclass(frozen=True)
class Encoded:
    """A chunk of documents, divided, with the lowest and highest hash of their texts."""

    train: Part
    held_out: Part
    lowest: int
    highest: int


def encode(tokenizer: Tokenizer, texts: Sequence[str], division: Division) -> Encoded:
    """Ids of a chunk of documents, divided."""
    hashes = [_hash(text) for text in texts]
    divided = [division.of(text, value) for text, value in zip(texts, hashes, strict=True)]
    train, held_out = ([text for text in side if text] for side in zip(*divided, strict=True))
    return Encoded(_part(tokenizer, train), _part(tokenizer, held_out), min(hashes), max(hashes))


def _part(tokenizer: Tokenizer, texts: Sequence[str]) -> Part:
    end = np.array([tokenizer.end_of_text], dtype=token_dtype(tokenizer.vocabulary))
    pieces = [piece for ids in tokenizer.encode_batch(texts) for piece in (ids, end)]
    return Part(np.concatenate([end[:0], *pieces]), len(texts), sum(len(text.encode("utf-8")) for text in texts))


def cut_at(text: str, share: float) -> int:
    """Where the last `share` of a text begins: after the nearest line break, if one is near.

    There is a character on each side, if there are two.
    """
    cut = min(max(1, round(len(text) * (1 - share))), max(1, len(text) - 1))
    before = text.rfind("\n", max(0, cut - NEAR), cut) + 1
    after = text.find("\n", cut, min(cut + NEAR, len(text) - 1)) + 1
    breaks = [place for place in (before, after) if place]
    return min(breaks, key=lambda place: abs(place - cut), default=cut)


def encode_chunks(
    chunks: Iterable[list[str]], tokenizer: Tokenizer, folder: Path, division: Division, workers: int
) -> Generator[Encoded, None, None]:
    """`encode` over chunks, in their order; with several workers, which load the tokenizer from `folder`.

    Only a few chunks per worker are read ahead, so that memory stays bounded.
    """
    if workers == 1:
        for chunk in chunks:
            yield encode(tokenizer, chunk, division)
        return
    # Spawned, not forked: a fork would copy the locks of threads that the tokenizer or torch has running.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (str(folder),))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode_in_worker, chunk, division))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RunError("a worker process died, perhaps out of memory; try fewer workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: Tokenizer


def _start_worker(folder: str) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    Thread(target=_leave_with_parent, daemon=True).start()
    _worker_tokenizer = load_tokenizer(folder)


def _leave_with_parent() -> None:
    """A pool's workers outlive a killed parent for ever unless they look after it themselves."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(texts: list[str], division: Division) -> Encoded:
    return encode(_worker_tokenizer, texts, division)


def _hash(text: str) -> int:
    """A 64-bit hash of a text, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")
