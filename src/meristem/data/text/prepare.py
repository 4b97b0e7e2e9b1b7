"""From files to token shards, once: `prepare` reads, encodes, divides and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from meristem.choices import OnError
from meristem.cores import usable_cores
from meristem.data.folder import already_made, fingerprint
from meristem.data.progress import PreparationProgress, Report
from meristem.data.sampler import evaluation_windows
from meristem.data.text.corpus import BadPlace, find_files, read_documents
from meristem.data.text.encoding import Division, encode_chunks
from meristem.data.text.shards import Index, Split, TokenizerFacts
from meristem.data.text.writer import SplitWriter
from meristem.data.tokenizer import Tokenizer, token_dtype
from meristem.errors import InputError, Remedy, RunError
from meristem.files import new_folder, recover, staged
from meristem.limits import check_integer
from meristem.wording import Notice, counted

CHUNK_CHARACTERS = 1 << 20
SMALL_INPUT = 4_000_000  # bytes; below it, starting processes takes longer than the work
MOST_WORKERS = 1 << 10
HASHES = 1 << 64
WINDOW = 1024  # tokens of the default context
FEW_WINDOWS = 100  # with fewer held out, the loss is rough

MANY_BAD = 10_000  # places


def prepare(
    paths: Iterable[str | Path],
    out: str | Path,
    *,
    tokenizer: Tokenizer,
    held_out: float = 0.005,
    on_error: OnError = "refuse",
    text_field: str = "text",
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    overwrite: bool = False,
    source: str | None = None,
    report: Report | None = None,
) -> Index:
    """Write the documents of files and folders as token shards into the folder `out`, and return its index.

    The result depends on the files and settings only, not on the number of workers. A folder already made
    from the same is returned at once; another is replaced only with `overwrite`. The folder appears when it
    is complete: until then the work lies beside it under another name.

    A document is held out if the hash of its text, as a fraction, is below `held_out`, so equal texts are
    never divided. If that leaves a split empty, only the lowest hash is held out, or only the highest trained
    on. Of a single text, which may be there several times, the last `held_out` share of its characters is held out,
    up to a line break near by, and the text counts as a document of both splits. With `held_out` 0 all goes to
    training.

    A place that cannot be read ends the work with an error that names it, or is skipped and counted, as
    `on_error` says. `source` describes the data in the index. With more than one worker, a script that calls
    this must guard its own start with `if __name__ == "__main__"`, as always when Python starts processes.

    >>> from meristem.data import load_tokenizer, prepare
    >>> Path("poems").mkdir()
    >>> _ = Path("poems/one.txt").write_text("A rose is a rose.\\n" * 20)
    >>> prepare(["poems"], "poems-data", tokenizer=load_tokenizer("bytes"), held_out=0.1).train.documents
    1
    """
    out = new_folder("out", Path(out))
    recover(out)  # whatever else may be wrong
    _check_settings(held_out, on_error, shard_tokens, workers)
    named = [Path(path) for path in paths]
    files = find_files(named)
    wanted = fingerprint(files, [held_out, on_error, text_field, shard_tokens, tokenizer.digest])
    if already_made(out, wanted, overwrite):
        return Index.load(out)
    reader = _TextReader(files, text_field, on_error)
    workers = workers or _default_workers(tokenizer, reader.size)
    with staged(out) as staging:
        tokenizer.save(staging)
        division = Division(round(held_out * HASHES))
        written = _write(reader, tokenizer, staging, division, shard_tokens, workers, report)
        mended = _mended(division, written, held_out)
        if mended != division:  # there are few documents then, so a second pass costs little
            for shard in staging.glob("*.bin"):
                shard.unlink()
            written = _write(reader, tokenizer, staging, mended, shard_tokens, workers, None)
        index = Index(
            tokenizer=TokenizerFacts(tokenizer.kind, tokenizer.digest, tokenizer.vocabulary, tokenizer.end_of_text),
            dtype=_dtype_name(tokenizer),
            train=written.train,
            held_out=written.held_out,
            skipped=reader.skipped,
            fingerprint=wanted,
            source=source or ", ".join(str(path) for path in named),
        )
        index.save(staging)
    return index


class _TextReader:
    """Streams chunks of texts from files, counting the bytes it reads and the bad places it meets."""

    def __init__(self, files: Sequence[Path], text_field: str, on_error: OnError) -> None:
        self._files = files
        self._text_field = text_field
        self._on_error = on_error
        self._bad: list[BadPlace] = []
        self.size = sum(file.stat().st_size for file in files)
        self.read = self.skipped = self._good = 0

    def chunks(self) -> Iterator[list[str]]:
        """All documents in order, about `CHUNK_CHARACTERS` of text at a time."""
        self.read = self.skipped = self._good = finished = characters = 0
        chunk: list[str] = []
        for path in self._files:
            for item in read_documents(path, self._text_field):
                if isinstance(item, BadPlace):
                    self._note(item)
                    continue
                self.read = finished + item.read
                self._good += 1
                chunk.append(item.text)
                characters += len(item.text)
                if characters >= CHUNK_CHARACTERS:
                    yield chunk
                    chunk, characters = [], 0
            finished += path.stat().st_size
        if chunk:
            yield chunk

    def take_bad(self) -> tuple[BadPlace, ...]:
        """The bad places met since the last call."""
        bad, self._bad = tuple(self._bad), []
        return bad

    def _note(self, place: BadPlace) -> None:
        if self._on_error == "refuse":
            raise refusal(place)
        self.skipped += 1
        check_mostly_good(place, self.skipped, self._good)
        self._bad.append(place)


class _Written(NamedTuple):
    train: Split
    held_out: Split
    lowest: int
    highest: int


def _write(
    reader: _TextReader,
    tokenizer: Tokenizer,
    folder: Path,
    division: Division,
    shard_tokens: int,
    workers: int,
    report: Report | None,
) -> _Written:
    """Write the shards of both splits."""
    train = SplitWriter(folder, "train", _dtype_name(tokenizer), shard_tokens)
    held_out = SplitWriter(folder, "held-out", _dtype_name(tokenizer), shard_tokens)
    lowest, highest = HASHES, -1

    def tell(done: bool) -> None:
        if report is not None:
            documents, tokens = train.documents + held_out.documents, train.tokens + held_out.tokens
            read = reader.size if done else reader.read
            report(PreparationProgress(read, reader.size, documents, tokens, reader.take_bad(), done))

    encodings = encode_chunks(reader.chunks(), tokenizer, folder, division, workers)
    with closing(train), closing(held_out), closing(encodings):
        for encoded in encodings:
            train.add(encoded.train)
            held_out.add(encoded.held_out)
            lowest, highest = min(lowest, encoded.lowest), max(highest, encoded.highest)
            tell(done=False)
    tell(done=True)
    if highest < 0:
        raise RunError(f"no documents in {reader.size} bytes of input, {reader.skipped} places skipped")
    return _Written(train.finish(), held_out.finish(), lowest, highest)


def _mended(division: Division, written: _Written, held_out: float) -> Division:
    """The division that leaves something in both splits, if anything is to be held out."""
    if held_out == 0 or (written.train.documents and written.held_out.documents):
        return division
    if written.lowest == written.highest:
        return Division(0, held_out)
    return Division(written.highest if written.held_out.documents else written.lowest + 1)


def held_out_warning(index: Index) -> Notice | None:
    """What to say about held-out data that are too few to measure anything; None if they are not."""
    windows = len(evaluation_windows(index.held_out.tokens, WINDOW, FEW_WINDOWS))
    if windows == FEW_WINDOWS:
        return None
    text = (
        f"only {counted(windows, 'window')} of {WINDOW:,} tokens held out; losses measured on fewer than "
        f"{FEW_WINDOWS} are rough: prepare again with a larger share or more text"
    )
    return Notice(text, Remedy(("held_out",)))


def _check_settings(held_out: float, on_error: str, shard_tokens: int, workers: int | None) -> None:
    if not 0 <= held_out < 1:
        raise InputError("held_out", held_out, "must be a fraction, at least 0 and below 1")
    check_on_error(on_error)
    check_integer("shard_tokens", shard_tokens, 1)
    if workers is not None:
        check_integer("workers", workers, 1, MOST_WORKERS)


def check_on_error(on_error: str) -> None:
    if on_error not in get_args(OnError):
        raise InputError("on_error", on_error, f"must be one of {list(get_args(OnError))}")


def refusal(place: BadPlace) -> RunError:
    """The error for a bad place that ends the work."""
    return RunError(f"{place}; mend it, or pass over such places", Remedy(("on_error=skip",)))


def check_mostly_good(place: BadPlace, bad: int, good: int) -> None:
    """Refuse to pass over ever more bad places where there is hardly anything else: it is another kind of file."""
    if bad > MANY_BAD and bad > 10 * good:
        raise RunError(f"{place}; this is one of {bad:,} bad places beside {good:,} good ones: is it the right file?")


def _default_workers(tokenizer: Tokenizer, size: int) -> int:
    """One process per core, but one for bytes (which are only copied) and for small inputs."""
    if tokenizer.kind == "bytes" or size < SMALL_INPUT:
        return 1
    return usable_cores()


def _dtype_name(tokenizer: Tokenizer) -> str:
    return np.dtype(token_dtype(tokenizer.vocabulary)).name
