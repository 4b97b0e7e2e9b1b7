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


def encode(tokenizer: Tokenizer, texts: Sequence[str], threshold: int) -> Encoded:
    """Ids of a chunk of documents; those with a hash below `threshold` are held out."""
    hashes, sizes = zip(*map(_hash_and_size, texts), strict=True)
    documents = list(zip(hashes, sizes, tokenizer.encode_batch(texts), strict=True))
    end = np.array([tokenizer.end_of_text], dtype=token_dtype(tokenizer.vocabulary))

    def part(held: bool) -> Part:
        mine = [(size, ids) for value, size, ids in documents if (value < threshold) == held]
        pieces = [piece for _, ids in mine for piece in (ids, end)]
        return Part(np.concatenate([end[:0], *pieces]), len(mine), sum(size for size, _ in mine))

    return Encoded(part(False), part(True), min(hashes), max(hashes))


def encode_chunks(
    chunks: Iterable[list[str]], tokenizer: Tokenizer, folder: Path, threshold: int, workers: int
) -> Generator[Encoded, None, None]:
    """`encode` over chunks, in their order; with several workers, which load the tokenizer from `folder`.

    Only a few chunks per worker are read ahead, so that memory stays bounded.
    """
    if workers == 1:
        for chunk in chunks:
            yield encode(tokenizer, chunk, threshold)
        return
    # Spawned, not forked: a fork would copy the locks of threads that the tokenizer or torch has running.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (str(folder),))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode_in_worker, chunk, threshold))
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


def _encode_in_worker(texts: list[str], threshold: int) -> Encoded:
    return encode(_worker_tokenizer, texts, threshold)


def _hash_and_size(text: str) -> tuple[int, int]:
    """A 64-bit hash of a text, the same everywhere, and the length of its UTF-8."""
    content = text.encode("utf-8")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big"), len(content)
