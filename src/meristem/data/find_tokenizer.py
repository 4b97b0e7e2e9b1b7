"""Where a Hugging Face tokenizer is found: a file, a folder, or a model's name in Hugging Face's cache.

Nothing is downloaded. A folder without a `tokenizer.json`, such as one with the word lists of an older model, is left
to transformers, which can make one of them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from meristem.errors import InputError, RunError, shortened
from meristem.files import read_json, read_text

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"  # Hugging Face's place for the name of the end-of-text token
OLDER_FILES = ("vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)  # of a model, perhaps with that of its owner


class Definition(NamedTuple):
    """The content of a tokenizer.json, and the end-of-text token that stands beside it, if one does."""

    text: str
    end_of_text: str | None


def find_definition(field: str, source: str | Path, others: str) -> Definition:
    """The tokenizer of a file, of a folder, or of a model that Hugging Face's tools have downloaded, by its name.

    `field` is what asked for it, and `others` are what else that may be, for the message.
    """
    path = Path(source)
    try:
        if not path.exists() and _NAME.fullmatch(str(source)):
            path = _cached(str(source))
        if path.is_dir():
            return _read(path / TOKENIZER_FILE) if (path / TOKENIZER_FILE).exists() else _made(path)
        return _read(path)
    except (RunError, OSError, ValueError) as error:
        folder = path if path.is_dir() else path.parent
        reason = shortened(str(error).replace(f"{folder}{os.sep}", ""))  # which is named already, and may be long
        expected = (
            f"must be {others}, a {TOKENIZER_FILE} file, a folder with one, or the name of a model in Hugging Face's "
            f"cache ({reason})"
        )
        raise InputError(field, str(source), expected) from error


def _read(path: Path) -> Definition:
    text, config = read_text(path), path.with_name(CONFIG_FILE)
    token = read_json(config).get("eos_token") if config.exists() else None
    if isinstance(token, dict):  # older files describe the token in full
        token = token.get("content")
    return Definition(text, token if isinstance(token, str) else None)


def _cached(name: str) -> Path:
    """The folder in the cache with the files of a model, as `hf download` and transformers leave them there."""
    from huggingface_hub import constants, try_to_load_from_cache

    for file in (TOKENIZER_FILE, *OLDER_FILES):
        found = try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return Path(found).parent
    raise RunError(f"{name}: no such file, nor a model of this name in {constants.HF_HUB_CACHE}")


def _made(folder: Path) -> Definition:
    """The tokenizer that transformers makes of the files in a folder."""
    if not any((folder / file).exists() for file in OLDER_FILES):  # of less it would make one without words
        raise RunError(f"it has no {TOKENIZER_FILE}")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        extra = "pip install 'meristem[hf]'"
        raise RunError(f"it has no {TOKENIZER_FILE}; transformers may be able to make one: {extra}") from error
    try:
        made = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind, by what the files hold
        raise RunError(f"it has no {TOKENIZER_FILE}, nor files that transformers can read ({error})") from error
    if not made.is_fast:
        raise RunError(f"it is of a kind of tokenizer that has no {TOKENIZER_FILE} ({type(made).__name__})")
    return Definition(made.backend_tokenizer.to_str(), made.eos_token)
