"""Files and folders: read with errors that name them, written as a whole or not at all.

What is being written lies beside its place under a hidden name that says which process writes it. A process that was
killed leaves such remains behind; whoever writes to the same place next removes them.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meristem.errors import InputError, MachineError, RunError, shortened

LONGEST_NAME = 255  # bytes, on all usual file systems

# --- reading ---------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The text of a file, or an error that names the file."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: not a UTF-8 text file ({error.reason} at byte {error.start})") from error


def read_bytes(path: Path) -> bytes:
    """The content of a file, or an error that names the file. Pipes and devices, which may never end, are refused."""
    try:
        if path.exists() and not path.is_file():
            raise RunError(f"{path}: cannot be read (is not a regular file)")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        raise unreadable(path, error) from error
    except MemoryError as error:
        raise MachineError(f"{path}: does not fit into memory") from error


def unreadable(path: Path, error: OSError | ValueError) -> RunError:
    """The error for a file that cannot be read."""
    return RunError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        content = parsed_json(read_text(path))
    except ValueError as error:
        raise RunError(f"{path}: not a JSON file ({error})") from error
    if not isinstance(content, dict):
        raise RunError(f"{path}: is not a JSON object")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, or an error that names the file."""
    try:
        return tomllib.loads(read_text(path))
    except RecursionError as error:
        raise RunError(f"{path}: not a TOML file (nested too deeply)") from error
    except ValueError as error:
        raise RunError(f"{path}: not a TOML file ({shortened(str(error))})") from error


def parsed_json(text: str) -> Any:
    """The value of a JSON text; a ValueError says why there is none."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- writing ---------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the new, never a part."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise RunError(f"{path}: cannot be written (a device or pipe, which a file would replace)")
    if not path.name:
        raise RunError(f"{path}: cannot be written (a file needs a name)")
    remove_remains(path)
    aside = beside(path, "partial")
    try:
        with errors_of(path, aside):
            aside.write_text(text, encoding="utf-8")
            flush(aside)
            aside.replace(path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    flush(path.parent)


@contextmanager
def errors_of(path: Path, hidden: Path | None = None) -> Iterator[None]:
    """What goes wrong without a name, as when a disk is full, or under a hidden one, is said of the path."""
    try:
        yield
    except OSError as error:
        name = error.filename
        if name is None or (hidden is not None and str(name).startswith(str(hidden))):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def flush(path: Path) -> None:
    """Make sure a file or folder has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def absolute(field: str, path: str | Path) -> Path:
    """The path of a folder that holds from any other, without links and dots; `field` is what a bad one is called."""
    try:
        str(path).encode("utf-8")
        return Path(path).resolve()
    except UnicodeEncodeError:
        raise InputError(field, str(path), "must be valid UTF-8") from None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, links in a circle
        raise InputError(field, str(path), f"must be the path of a folder ({shortened(str(error))})") from None


def new_folder(field: str, path: Path) -> Path:
    """The path of a folder that can be made, without links and dots; `field` is what a bad one is called."""
    resolved = absolute(field, path)
    if resolved == Path.cwd() or not resolved.name:
        raise InputError(field, str(path), "is the folder you are in, or has no name; name a new one")
    if len(beside(resolved, "partial").name.encode()) > LONGEST_NAME:
        raise InputError(field, str(path), "must have a shorter name")
    return resolved


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when all has gone well, and leaves nothing behind when not.

    An older `out` is replaced; a killed process leaves either the older one or the new one there, or the older one
    aside, from where the next attempt brings it back.
    """
    recover(out)
    staging = beside(out, "partial")
    try:
        with errors_of(out, staging):
            staging.mkdir(parents=True)
            yield staging
            flush_folder(staging)
            _put_in_place(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, out: Path) -> None:
    """Give the finished folder its name, moving an older one out of the way first."""
    old = beside(out, "old")
    if out.is_dir() and any(out.iterdir()):
        out.rename(old)
    try:
        staging.rename(out)
    except OSError as error:
        if out.exists():
            raise RunError(f"{out}: another process has made it in the meantime") from error
        raise
    finally:
        if not out.exists():  # the older one comes back
            recover(out)
    flush(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    """Make sure a folder with all its files has reached the disk."""
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


# --- remains of killed processes -------------------------------------------------------------------------------------

_REMAINS = re.compile(r".*\.(\d+)-([0-9a-f]{8})@(.+)\.(partial|old)", re.DOTALL)
_TOKEN = secrets.token_hex(4)  # tells processes of the same number apart, as there are in containers
LONG_AGO = 3600.0  # seconds


def beside(path: Path, ending: str) -> Path:
    """A hidden name beside a path that belongs to this process: `partial` is being written, `old` is replaced by it."""
    return path.with_name(f".{path.name}.{os.getpid()}-{_TOKEN}@{socket.gethostname()}.{ending}")


def remains_of(path: Path) -> list[Path]:
    """What killed processes of this machine have left beside a path, and what this process has not cleared away."""
    found = path.parent.glob(f".{glob.escape(path.name)}.*@*")
    return [remains for remains in found if _is_left(remains)]


def remove_remains(path: Path) -> None:
    for remains in remains_of(path):
        if remains.is_dir():
            shutil.rmtree(remains, ignore_errors=True)
        else:
            remains.unlink(missing_ok=True)


def recover(out: Path) -> None:
    """Remove what killed processes have left beside a folder; one that was moved out of the way comes back."""
    olds = [remains for remains in remains_of(out) if remains.name.endswith(".old")]
    if olds and not out.exists():
        max(olds, key=lambda old: old.stat().st_mtime_ns).rename(out)
    remove_remains(out)


def _is_left(path: Path) -> bool:
    match = _REMAINS.fullmatch(path.name)
    if match is None or match[3] != socket.gethostname() or sys.platform == "win32":
        return False
    if int(match[1]) == os.getpid():  # of this process, or of one before it or beside it, in another container
        return match[2] == _TOKEN or _age(path) > LONG_AGO
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


def _age(path: Path) -> float:
    """Seconds since anything in a folder, or a file, was last changed."""
    times = []
    for found in (path, *path.rglob("*")):
        with suppress(OSError):
            times.append(found.stat().st_mtime)
    return time.time() - max(times, default=time.time())
