"""Reading documents from files: text, JSON lines and Parquet, plain or compressed."""

from __future__ import annotations

import gzip
import hashlib
import io
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from meristem.errors import InputError, RunError, missing_extra, shortened, shown
from meristem.files import parsed_json
from meristem.limits import LARGEST_DOCUMENT

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")

# Tests and tables would crowd out ordinary code; the rest is not part of the library proper.
STDLIB_SKIPPED = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo",
    "ensurepip", "encodings", "pydoc_data", "__pycache__",
}  # fmt: skip
STDLIB_BYTES = 8_000_000

AT_ONCE = 1 << 20  # bytes read at a time

# A zstd block is at least 4 bytes and becomes at most 128 KiB, so that no more than 64 MiB come at once.
COMPRESSED_AT_ONCE = 1 << 11

Stream = IO[bytes] | io.BufferedReader | gzip.GzipFile


@dataclass(frozen=True)
class Document:
    """One text, where it stands, and how many bytes of its file had been read by then."""

    path: Path
    line: int
    text: str
    read: int


@dataclass(frozen=True)
class BadPlace:
    """A place that holds no readable document, and why. For Parquet the line is the row."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        path = str(self.path).encode("utf-8", "backslashreplace").decode()  # a name need not be UTF-8
        return f"{path}:{self.line}: {shortened(self.reason)}"


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """The readable files among `paths` and, recursively, in the folders among them; sorted, each once.

    In folders, names that start with a dot and unknown suffixes are passed over.
    """
    found: dict[Path, Path] = {}
    named = [Path(path) for path in paths]
    for path in named:
        if path.is_dir():
            files = [file for file in path.rglob("*") if _is_visible(file.relative_to(path)) and _kind(file)]
            found.update((file.resolve(), file) for file in files if file.is_file())
        elif not path.exists():
            raise InputError("paths", str(path), "no such file or folder")
        elif not path.is_file():
            raise InputError("paths", str(path), "is neither a regular file nor a folder")
        elif _kind(path) is None:
            raise InputError("paths", str(path), f"unknown kind of file; {_allowed()}")
        else:
            found[path.resolve()] = path
    if not found:
        raise InputError("paths", [str(path) for path in named], f"no files to read; {_allowed()}")
    return sorted(found.values(), key=lambda path: path.as_posix())


def read_documents(path: Path, text_field: str = "text") -> Iterator[Document | BadPlace]:
    """The documents of a file in order, and the places where there should be one but is not.

    Text files are one document each, JSON lines and Parquet rows hold theirs in `text_field`. Empty texts
    are not documents.
    """
    kind = _kind(path)
    if kind == ".parquet":
        return _read_parquet(path, text_field)
    return _read_lines(path, text_field) if kind == ".jsonl" else _read_whole(path)


def stdlib_files(limit: int = STDLIB_BYTES) -> list[Path]:
    """Source files of this Python's standard library, `limit` bytes or a little less: the built-in corpus.

    The files are chosen by a hash of their names, so that the choice is fixed and favours no letter.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in root.rglob("*.py") if STDLIB_SKIPPED.isdisjoint(p.relative_to(root).parts)]
    chosen: list[Path] = []
    for path in sorted(files, key=lambda p: _name_hash(p.relative_to(root))):
        size = path.stat().st_size
        if 0 < size <= limit and _is_utf8(path):
            chosen.append(path)
            limit -= size
    if not chosen:
        raise RunError(f"{root}: this Python has no source files of its standard library")
    return sorted(chosen)


def _kind(path: Path) -> str | None:
    """The suffix that says how to read a file, without the compression; none if unknown."""
    suffix = plain_suffix(path)
    compressed = path.suffix.lower() in COMPRESSIONS
    return suffix if suffix in SUFFIXES and not (compressed and suffix == ".parquet") else None


def plain_suffix(path: Path) -> str:
    """The suffix in small letters, without the compression."""
    name = path.name.lower()
    return Path(name.removesuffix(next((c for c in COMPRESSIONS if name.endswith(c)), ""))).suffix


def _allowed() -> str:
    plain = ", ".join(suffix for suffix in SUFFIXES if suffix != ".parquet")
    return f"must be {plain} (each also with {' or '.join(COMPRESSIONS)}) or .parquet"


def _is_visible(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)


def _name_hash(path: Path) -> bytes:
    return hashlib.sha256(path.as_posix().encode()).digest()


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _read_whole(path: Path) -> Iterator[Document | BadPlace]:
    content = bytearray()
    try:
        with path.open("rb") as raw, decompressed(raw, path) as stream:
            content = _limited(stream)
            text = content.decode("utf-8-sig")
            size = raw.tell()
    except TooLongError as error:
        yield BadPlace(path, 1, str(error))
    except UnicodeDecodeError as error:
        yield BadPlace(path, content.count(b"\n", 0, error.start) + 1, f"not UTF-8 ({error.reason})")
    except (OSError, EOFError, zlib.error) as error:
        yield BadPlace(path, 1, f"cannot be read ({error})")
    else:
        if text:
            yield Document(path, 1, text, size)


def _read_lines(path: Path, text_field: str) -> Iterator[Document | BadPlace]:
    number = 0
    try:
        with path.open("rb") as raw, decompressed(raw, path) as stream:
            for number, line in enumerate(lines_of(stream), start=1):
                if line is not None and not line.strip():
                    continue
                try:
                    text = _text_of(parsed_line(line), text_field)
                except ValueError as error:
                    yield BadPlace(path, number, str(error))
                    continue
                if text:
                    yield Document(path, number, text, raw.tell())
    except (OSError, EOFError, zlib.error) as error:
        yield BadPlace(path, number + 1, f"cannot be read further ({error})")


class TooLongError(ValueError):
    """A document or line that is longer than any should be; perhaps few bytes of a compressed file that grow so."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} longer than {LARGEST_DOCUMENT:,} bytes")


def _limited(stream: Stream) -> bytearray:
    """All of a file, which is taken piece by piece, so that no more is held than is there or allowed."""
    content = bytearray()
    while piece := stream.read(AT_ONCE):
        content += piece
        if len(content) > LARGEST_DOCUMENT:
            raise TooLongError("a text")
    return content


def lines_of(stream: Stream) -> Iterator[bytes | None]:
    """The lines of a file; None stands for one that is too long, which is passed over."""
    while piece := stream.readline(AT_ONCE):
        line = bytearray()  # for those that have more than one piece
        while len(piece) == AT_ONCE and not piece.endswith(b"\n") and len(line) <= LARGEST_DOCUMENT:
            line += piece
            piece = stream.readline(AT_ONCE)
        if len(line) + len(piece) <= LARGEST_DOCUMENT:
            yield bytes(line + piece) if line else piece
            continue
        yield None
        while piece and not piece.endswith(b"\n"):
            piece = stream.readline(AT_ONCE)


def parsed_line(line: bytes | None) -> Any:
    """The JSON value of a line; a ValueError says why there is none."""
    if line is None:
        raise TooLongError("a line")
    try:
        return parsed_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    except MemoryError as error:
        raise ValueError("does not fit into memory") from error


def _text_of(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {type(record).__name__}")
    if field not in record:
        raise ValueError(f"no field {field!r} among {shown(sorted(record)[:20])}")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} holds {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise ValueError(f"field {field!r} is not Unicode text ({error.reason})") from error
    return text


def _read_parquet(path: Path, text_field: str) -> Iterator[Document | BadPlace]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_extra("pyarrow", "data") from error
    row, size = 0, path.stat().st_size
    try:
        with pq.ParquetFile(path) as file:
            columns, rows = file.schema_arrow.names, file.metadata.num_rows
            if text_field not in columns:
                yield BadPlace(path, 1, f"no column {text_field!r} among {shown(columns[:20])}")
                return
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for value in batch.column(0):
                    row += 1
                    try:
                        text = _text_of({text_field: value.as_py()}, text_field)
                    except ValueError as error:  # also broken UTF-8, which Arrow finds on conversion
                        yield BadPlace(path, row, str(error))
                        continue
                    if text:
                        yield Document(path, row, text, size * row // rows)
    except (OSError, ValueError, pa.ArrowException) as error:  # a ValueError: names that are not UTF-8
        yield BadPlace(path, row + 1, f"cannot be read further ({error})")


def decompressed(raw: IO[bytes], path: Path) -> Stream:
    """The content of an open file; reading fails with EOFError where a compressed file is cut short."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    return io.BufferedReader(_ZstdReader(raw), 1 << 20) if suffix == ".zst" else raw


class _ZstdReader(io.RawIOBase):
    """Reads a zstd file of one or more frames. The library's own reader takes a cut file for a whole one."""

    def __init__(self, raw: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise missing_extra("zstandard", "data") from error
        self._raw = raw
        self._library = zstandard
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")  # whose rest is not copied with every piece that is taken

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._raw.read(COMPRESSED_AT_ONCE)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            if self._frame is None:
                decompressor = self._library.ZstdDecompressor(max_window_size=1 << 31)
                self._frame = decompressor.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(self._compressed))
            except self._library.ZstdError as error:
                raise OSError(str(error)) from error
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        view = memoryview(buffer)
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
