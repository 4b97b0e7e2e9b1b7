"""Text to token ids and back: raw bytes, or a Hugging Face tokenizer.

Both kinds save themselves under the same file names, so a data or run folder carries its tokenizer and
`load_tokenizer(folder)` brings either back.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from meristem.data.find_tokenizer import CONFIG_FILE, TOKENIZER_FILE, find_definition
from meristem.errors import InputError, RunError, shortened, shown
from meristem.files import parsed_json
from meristem.limits import MOST_TOKEN_IDS

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

BYTES_FORMAT = "meristem-bytes/1"
END_OF_TEXT_NAMES = ("<|endoftext|>", "</s>", "<eos>", "[SEP]")

Kind = Literal["bytes", "hf"]
TOKENIZER_KINDS: tuple[Kind, ...] = get_args(Kind)

Ids = NDArray[np.int64]
StoredIds = NDArray[Any]  # of uint16 or uint32, see `token_dtype`


class Tokenizer(Protocol):
    """What the rest of Meristem asks of a tokenizer."""

    @property
    def kind(self) -> Kind: ...

    @property
    def vocabulary(self) -> int:
        """Number of ids; every id is below it."""

    @property
    def end_of_text(self) -> int:
        """The id that ends a document; no text encodes to it."""

    @property
    def digest(self) -> str:
        """sha256 of the definition, in hex."""

    def encode(self, text: str) -> Ids:
        """Ids of a text, without special tokens, shape (tokens,)."""

    def encode_batch(self, texts: Sequence[str]) -> list[StoredIds]:
        """Ids of many texts in the narrow type that shards store."""

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Text of ids; special and unknown ids give nothing, broken UTF-8 gives U+FFFD."""

    def save(self, folder: str | Path) -> None:
        """Write the definition into a folder, for `load_tokenizer(folder)`."""


def token_dtype(vocabulary: int) -> type[np.uint16] | type[np.uint32]:
    """The narrowest type that shards use for ids below `vocabulary`."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def padded_vocabulary(ids: int) -> int:
    """`ids` rounded up to a multiple of 64, the size matrix products like: 50257 becomes 50304."""
    return -(-ids // 64) * 64


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is end-of-text."""

    kind: Literal["bytes"] = "bytes"
    vocabulary = 257
    end_of_text = 256
    _definition = json.dumps({"format": BYTES_FORMAT}) + "\n"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._definition.encode()).hexdigest()

    def encode(self, text: str) -> Ids:
        return _bytes(text).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[StoredIds]:
        return [_bytes(text).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        array = np.asarray(ids, dtype=np.int64)
        return array[array < self.end_of_text].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, folder: str | Path) -> None:
        (Path(folder) / TOKENIZER_FILE).write_text(self._definition, encoding="utf-8")


class HfTokenizer:
    """A Hugging Face tokenizer, from the content of a `tokenizer.json`."""

    kind: Literal["hf"] = "hf"

    def __init__(self, definition: str, eot_token: str | None = None) -> None:
        self._backend = load_backend("tokenizer", definition)
        # Text that spells a special token stays text, so that no document can hold an end-of-text inside.
        self._backend.encode_special_tokens = True
        self._definition = definition
        ids = backend_ids("tokenizer", self._backend)
        self.eot_token = _end_of_text_token(ids, eot_token)
        self.end_of_text = ids[self.eot_token]
        self.vocabulary = max(ids.values()) + 1
        self._dtype = token_dtype(self.vocabulary)

    @property
    def definition(self) -> str:
        """The content of its `tokenizer.json`."""
        return self._definition

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self._definition}\0{self.eot_token}".encode()).hexdigest()

    def encode(self, text: str) -> Ids:
        return np.array(encoded(self._backend.encode, text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[StoredIds]:
        encodings = encoded(self._backend.encode_batch_fast, list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        text: str = self._backend.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def save(self, folder: str | Path) -> None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eot_token}
        (Path(folder) / TOKENIZER_FILE).write_bytes(self._definition.encode())
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(config) + "\n", encoding="utf-8")


class StreamDecoder:
    """Turns ids that come one at a time into pieces of text that never split a character.

    The pieces and the last `flush()` joined are the text of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # already out; some decoders treat the first token of a text differently
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """The text that this id completes, possibly none."""
        self._pending.append(token)
        piece = self._piece()
        if not piece or piece.endswith("\ufffd"):  # perhaps the first bytes of a character
            return ""
        self._context, self._pending = self._pending, []
        return piece

    def flush(self) -> str:
        """The text still held back, with U+FFFD for characters that never came whole."""
        piece = self._piece()
        self._context, self._pending = [], []
        return piece

    def _piece(self) -> str:
        shown = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(shown) :]


def load_tokenizer(source: str | Path, eot_token: str | None = None) -> Tokenizer:
    """The tokenizer named "bytes", or one that `find_definition` finds.

    `eot_token` names the end-of-text token of a Hugging Face tokenizer; without it the `eos_token` of a
    `tokenizer_config.json` beside the file decides, then the usual names.

    >>> load_tokenizer("bytes").encode("leaf").tolist()
    [108, 101, 97, 102]
    """
    if source == "bytes":
        return ByteTokenizer()
    text, configured = find_definition("tokenizer", source, '"bytes"')
    try:
        content = parsed_json(text)
    except ValueError as error:
        raise InputError("tokenizer", str(source), f"must be a {TOKENIZER_FILE} ({error})") from error
    if isinstance(content, dict) and content.get("format") == BYTES_FORMAT:
        return ByteTokenizer()
    return HfTokenizer(text, eot_token or configured)


def load_backend(field: str, definition: str) -> Backend:
    """The Hugging Face tokenizer of a definition, without truncation and padding; `field` is what asked for it."""
    from tokenizers import Tokenizer as Backend

    try:
        with _without_errors():
            backend = Backend.from_str(definition)
    except BaseException as error:
        if not _of_library(error):
            raise
        expected = f"must be a Hugging Face tokenizer.json ({shortened(str(error))})"
        raise InputError(field, definition[:40], expected) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def backend_ids(field: str, backend: Backend) -> dict[str, int]:
    """The id of every token, the added ones among them."""
    ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    highest = max(ids.values(), default=-1)
    if not 0 <= highest < MOST_TOKEN_IDS:
        expected = f"must be a tokenizer whose highest id is from 0 to {MOST_TOKEN_IDS - 1:,}"
        raise InputError(field, highest, expected)
    return ids


def encoded(encode: Callable[..., Any], texts: str | list[str], **options: Any) -> Any:
    """What a method of a Hugging Face tokenizer makes of texts; some definitions fail only then."""
    try:
        return encode(texts, **options)
    except BaseException as error:
        if not _of_library(error):
            raise
        raise RunError(f"{TOKENIZER_FILE}: cannot encode the text ({shortened(str(error))})") from error


@contextmanager
def _without_errors() -> Iterator[None]:
    """Nothing is written to the standard error: a panic of the library fills it with a trace before it is raised."""
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _of_library(error: BaseException) -> bool:
    """Whether this may come from the library: it raises nothing narrower than Exception, and its panics are none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def _end_of_text_token(ids: dict[str, int], wanted: str | None) -> str:
    found = [name for name in (END_OF_TEXT_NAMES if wanted is None else (wanted,)) if name in ids]
    if not found:
        special = sorted(name for name in ids if name[:1] in "<[" and name[-1:] in ">]" and len(name) > 2)
        expected = f"the tokenizer has no such token; name one, perhaps one of {shown(special[:20])}"
        raise InputError("end_of_text", wanted or " or ".join(END_OF_TEXT_NAMES), expected)
    return found[0]
