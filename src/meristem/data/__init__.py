"""Data: files to token shards or labelled rows (`prepare`, `prepare_labelled`), and these to batches."""

from meristem.data.folder import open_data, verify
from meristem.data.labelled.labelled_data import Findings, LabelledData, LabelledIndex, LabelledRows
from meristem.data.labelled.pieces import Cut
from meristem.data.labelled.prepare_labelled import default_cut, findings_notes, findings_warnings, prepare_labelled
from meristem.data.labelled.recipe import Recipe
from meristem.data.labelled.rows import Columns, read_rows, read_texts
from meristem.data.progress import PreparationProgress, shown_progress
from meristem.data.sampler import (
    RowSampler,
    Sampler,
    batch,
    evaluation_windows,
    held_apart,
    padded_length,
    row_batch,
)
from meristem.data.text.corpus import BadPlace, Document, find_files, read_documents, stdlib_files
from meristem.data.text.prepare import held_out_warning, prepare
from meristem.data.text.shards import Index, Shard, Split, TokenData, TokenizerFacts, TokenStream
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
    "Columns",
    "Cut",
    "Document",
    "Findings",
    "HfTokenizer",
    "Index",
    "LabelledData",
    "LabelledIndex",
    "LabelledRows",
    "PreparationProgress",
    "Recipe",
    "RowSampler",
    "Sampler",
    "Shard",
    "Split",
    "StreamDecoder",
    "TokenData",
    "TokenStream",
    "Tokenizer",
    "TokenizerFacts",
    "batch",
    "default_cut",
    "evaluation_windows",
    "find_files",
    "findings_notes",
    "findings_warnings",
    "held_apart",
    "held_out_warning",
    "load_tokenizer",
    "open_data",
    "padded_length",
    "padded_vocabulary",
    "prepare",
    "prepare_labelled",
    "read_documents",
    "read_rows",
    "read_texts",
    "row_batch",
    "shown_progress",
    "stdlib_files",
    "verify",
]
