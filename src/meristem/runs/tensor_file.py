"""Tensors in safetensors files, written in the background of a training run.

The library's own writer holds up all of Python while it writes, makes files that only their owner can read, and does
not say which file is at fault. This one writes the same format through an ordinary file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from meristem.errors import RunError

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ALIGNMENT = 8  # bytes, of the data behind the header


class NotFinite(ValueError):
    """A tensor that should be finite is not; its name."""


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, finite: bool = False, metadata: Mapping[str, str] | None = None
) -> str:
    """Write tensors, from whichever device they are on, one after another; the sha256 of the file, in hex.

    Those that have to be `finite` are looked at on the way. `metadata` are texts for the head of the file.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each one is aligned
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    begin = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(begin)
    with path.open("wb") as file:
        file.write(begin)
        for name in names:
            tensor = tensors[name].detach().cpu().contiguous().reshape(-1)
            if finite and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise NotFinite(name)
            content = tensor.view(torch.uint8).numpy().data
            file.write(content)
            digest.update(content)
    return digest.hexdigest()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU, or an error that names the file."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:  # the last if the file is gone meanwhile
        raise RunError(f"{path}: not a safetensors file ({error})") from error
