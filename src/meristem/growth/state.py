"""States of growth on their way to a file: plain values for JSON, and tensors beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from meristem.errors import InputError

MARK = "tensor"  # stands in JSON for a tensor, by its name


def separated(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """A tree of plain values and tensors, as plain values alone, and the tensors by their way through it."""
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value
            return {MARK: path}
        if isinstance(value, Mapping):
            return {key: plain(entry, f"{path}.{key}" if path else str(key)) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(entry, f"{path}.{index}") for index, entry in enumerate(value)]
        return value

    return plain(tree, ""), tensors


def joined(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `separated`; tuples come back as lists."""
    if isinstance(tree, Mapping):
        if tree.keys() == {MARK} and isinstance(tree[MARK], str):
            if tree[MARK] not in tensors:
                raise InputError("tensors", f"{tree[MARK]} missing", "must be all that `tensors` gave")
            return tensors[tree[MARK]]
        return {key: joined(entry, tensors) for key, entry in tree.items()}
    if isinstance(tree, list):
        return [joined(entry, tensors) for entry in tree]
    return tree
