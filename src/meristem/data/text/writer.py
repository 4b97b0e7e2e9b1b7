"""Writing the token shards of one split."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO

import numpy as np

from meristem.data.text.encoding import Part
from meristem.data.text.shards import STORED_TYPES, Shard, Split


class SplitWriter:
    """Appends documents to shards of `shard_tokens` tokens; a document may run on into the next shard."""

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int) -> None:
        self._folder = folder
        self._name = name
        self._stored = np.dtype(STORED_TYPES[dtype])
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._file: IO[bytes] | None = None
        self.documents = self.tokens = self._text_bytes = 0

    def add(self, part: Part) -> None:
        ids = part.ids.astype(self._stored, copy=False)
        self.documents += part.documents
        self._text_bytes += part.text_bytes
        while len(ids):
            room = self._shard_tokens - self.tokens % self._shard_tokens
            self._append(ids[:room])
            ids = ids[room:]

    def finish(self) -> Split:
        """Close the last shard and describe them all."""
        self.close()
        return Split(self.documents, self.tokens, self._text_bytes, tuple(self._shards))

    def close(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._shards.append(Shard(Path(self._file.name).name, self._in_shard, self._hash.hexdigest()))
        self._file = None

    def _append(self, ids: np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]) -> None:
        if self._file is None:
            self._file = (self._folder / f"{self._name}-{len(self._shards):05}.bin").open("wb")
            self._hash, self._in_shard = hashlib.sha256(), 0
        content = ids.tobytes()
        self._file.write(content)
        self._hash.update(content)
        self._in_shard += len(ids)
        self.tokens += len(ids)
        if self._in_shard == self._shard_tokens:
            self.close()
