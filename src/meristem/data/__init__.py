"""Data: files to token shards (`prepare`), and token shards to batches (`TokenData`, `Sampler`, `batch`)."""

from meristem.data.corpus import BadPlace, Document, find_files, read_documents, stdlib_files
from meristem.data.prepare import prepare
from meristem.data.progress import Progress, shown_progress
from meristem.data.sampler import Sampler, batch, evaluation_windows
from meristem.data.shards import Index, Shard, Split, TokenData, TokenizerFacts, TokenStream, verify
from meristem.data.tokenizer import (
    ByteTokenizer,
    HfTokenizer,
    StreamDecoder,
    Tokenizer,
    load_tokenizer,
    padded_vocabulary,
)

__all__ = [
    "BadPlace",
    "ByteTokenizer",
    "Document",
    "HfTokenizer",
    "Index",
    "Progress",
    "Sampler",
    "Shard",
    "Split",
    "StreamDecoder",
    "TokenData",
    "TokenStream",
    "Tokenizer",
    "TokenizerFacts",
    "batch",
    "evaluation_windows",
    "find_files",
    "load_tokenizer",
    "padded_vocabulary",
    "prepare",
    "read_documents",
    "shown_progress",
    "stdlib_files",
    "verify",
]
