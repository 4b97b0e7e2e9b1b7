"""What a run began with: its data, its settings and its plan, so that they cannot change under it unnoticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meristem.config import RESUMABLE, Config, build_config, known_values
from meristem.data.find_tokenizer import CONFIG_FILE, TOKENIZER_FILE
from meristem.data.labelled.recipe import RECIPE_FILE
from meristem.errors import InputError, RunError, shown
from meristem.files import read_json, sha256_of, write_atomically
from meristem.plan import Plan

FORMAT = "meristem-origin/1"
ORIGIN_FILE = "origin.json"
OLDER_FILE = "data.json"  # of runs before there was an origin; it has the digest of the data alone
NO_DATA = ""  # instead of a digest, of a run that was imported
READERS = (TOKENIZER_FILE, CONFIG_FILE, RECIPE_FILE)  # how texts or rows become ids; a run has one or two of these


@dataclass(frozen=True)
class Origin:
    """Digest of the data, sha256 of the tokenizer's or recipe's files, settings that never change, and the plan.

    `digest` stands for all of it; checkpoints carry it.
    """

    data: str
    readers: Mapping[str, str]
    settings: Mapping[str, Any]
    plan: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path, config: Config, plan: Plan, data: str) -> Origin:
        """The origin of a run whose tokenizer or recipe lies in `folder` already."""
        readers = {name: sha256_of(folder / name) for name in READERS if (folder / name).is_file()}
        return cls(data, readers, _lasting(config), _as_json(plan.to_dict()))

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        content = {"format": FORMAT, **self._content(), "digest": self.digest}
        write_atomically(folder / ORIGIN_FILE, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Origin | None:
        """The origin of a run, None if it is an older one; a changed file is an error that names it."""
        path = folder / ORIGIN_FILE
        if not path.exists() and (folder / OLDER_FILE).is_file():
            return None
        content = read_json(path)
        parts = {name: content.get(name) for name in ("data", "readers", "settings", "plan")}
        try:
            origin = cls(**parts)  # type: ignore[arg-type]  # whatever they are, their digest tells
            whole = content.get("format") == FORMAT and content.get("digest") == origin.digest
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise RunError(f"{path}: its content is not what was written when the run began; restore it from a copy")
        return origin

    def _content(self) -> dict[str, Any]:
        return {
            "data": self.data, "readers": dict(self.readers), "settings": dict(self.settings), "plan": dict(self.plan)
        }  # fmt: skip

    def check(self, folder: Path, config: Config, plan: Plan) -> None:
        """Refuse a run whose settings, plan, tokenizer or recipe are not those that it began with."""
        first = _lasting(self._began_with(config))
        now = _lasting(config)
        for name in {**first, **now}:
            value, began = now.get(name), first.get(name)
            if value != began:
                raise InputError(
                    name, value,
                    f"the run began with {shown(began)}, but {folder / 'config.toml'} says otherwise; set it back, "
                    "or begin a new run",
                )  # fmt: skip
        if (field := _difference(_as_json(plan.to_dict()), self.plan)) is not None:
            raise RunError(f"{folder / 'plan.json'}: {field} is not what the run began with; restore it from a copy")
        for name, digest in self.readers.items():
            if not (folder / name).is_file() or sha256_of(folder / name) != digest:
                raise RunError(f"{folder / name}: is not the file that the run began with; restore it from a copy")

    def _began_with(self, config: Config) -> Config:
        """The configuration at the start, with what may have changed since as it is now."""
        present = {key: value for key, value in known_values(config).items() if key in RESUMABLE}
        if "growth.policy" in self.settings:  # before policies had tables one key named another run
            likes = [present.pop(key) for key in [*present] if key.endswith(".like")]
            present["growth.like"] = likes[0] if likes else None
        values = {**present, **self.settings}
        return build_config({key: value for key, value in values.items() if value is not None})


def _lasting(config: Config) -> dict[str, Any]:
    """The settings that a run's result depends on, as JSON has them."""
    values = {name: value for name, value in known_values(config).items() if name not in RESUMABLE}
    return _as_json(values)


def _as_json(value: Any) -> Any:
    """A value as it comes back from JSON, which knows no tuples."""
    return json.loads(json.dumps(value))


def first_difference(mine: Plan, other: Plan) -> str | None:
    """Where two plans differ first, such as `layers[1].heads`; None if they are equal."""
    return _difference(_as_json(mine.to_dict()), _as_json(other.to_dict()))


def _difference(mine: Any, other: Any, name: str = "") -> str | None:
    """Where two JSON values differ first, such as `layers[1].heads`; None if they are equal."""
    if isinstance(mine, dict) and isinstance(other, dict):
        pairs = [(f"{name}.{key}".lstrip("."), mine.get(key), other.get(key)) for key in (mine | other)]
    elif isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
        pairs = [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(mine, other, strict=True))]
    else:
        return None if mine == other else name
    return next((found for field, a, b in pairs if (found := _difference(a, b, field)) is not None), None)
