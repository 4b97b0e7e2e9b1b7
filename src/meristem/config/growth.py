"""The growth section of a configuration: which policies there are, in their order, and the settings of each.

A policy's table, `[growth.NAME]`, has the fields of its dataclass. Policies of somebody's own are named as
`module:Class`; their modules are imported only where a run is trained, and their tables are kept as they are.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from meristem.errors import InputError
from meristem.growth import Policy
from meristem.growth.policies import POLICIES
from meristem.growth.policy import ENDLESS

LENGTH = "total_steps"  # the field of a policy that is told how long the run is


@dataclass(frozen=True)
class GrowthConfig:
    """What changes the structure during training: policies in their order, and tables with the settings of each."""

    policies: tuple[str, ...] = ()  # none: the structure stays as it is
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what was given, by policy

    def __post_init__(self) -> None:
        for number, name in enumerate(self.policies):
            if name in self.policies[:number]:
                raise InputError("growth.policies", name, "must be named once")
            if name not in POLICIES and not is_foreign(name):
                expected = f"must be among {', '.join(POLICIES)}, or a class of your own as module:Class"
                raise InputError("growth.policies", name, expected)
        for name in {*self.tables, *self.policies} & POLICIES.keys():
            self.policy(name)  # refuses bad values

    def has(self, *names: str) -> bool:
        """Whether one of these policies is among them."""
        return any(name in self.policies for name in names)

    def settings(self, name: str) -> dict[str, Any]:
        """All settings of a policy that comes with Meristem; of another one, those that were given."""
        given = dict(self.tables.get(table_name(name), {}))
        if name not in POLICIES:
            return given
        entries = [entry for entry in dataclasses.fields(POLICIES[name]) if entry.name != LENGTH]
        values = {entry.name: given.get(entry.name, entry.default) for entry in entries}
        return {key: value for key, value in values.items() if value is not dataclasses.MISSING}

    def policy(self, name: str, steps: int = ENDLESS) -> Any:
        """A policy that comes with Meristem, as its table has it, for a run of so many updates."""
        return _made(name, POLICIES[name], self.settings(name), steps)

    def build(self, steps: int) -> list[Policy]:
        """All policies in their order, for a run of so many updates; imports those that are somebody's own."""
        return [
            _made(table_name(name), POLICIES.get(name) or _imported(name), self.settings(name), steps)
            for name in self.policies
        ]


def is_foreign(name: str) -> bool:
    """Whether a policy is named as somebody's own."""
    module, colon, own = name.partition(":")
    return bool(colon) and own.isidentifier() and all(part.isidentifier() for part in module.split("."))


def table_name(name: str) -> str:
    """The name of a policy's table: of a class of one's own, the class in small letters."""
    return name.rpartition(":")[2].lower() if is_foreign(name) else name


def policy_keys() -> dict[str, Any]:
    """Every key of a policy's table, as `growth.NAME.KEY`, with its type."""
    return {
        f"growth.{name}.{key}": kind
        for name, policy in POLICIES.items()
        for key, kind in get_type_hints(policy).items()
        if key in {entry.name for entry in dataclasses.fields(policy)} - {LENGTH}
    }


def _made(name: str, policy: Any, settings: Mapping[str, Any], steps: int) -> Any:
    known = {entry.name: entry for entry in dataclasses.fields(policy)} if dataclasses.is_dataclass(policy) else {}
    length = {LENGTH: steps} if LENGTH in known else {}
    for key in known.keys() - {*settings, *length}:
        if known[key].default is known[key].default_factory is dataclasses.MISSING:
            raise InputError(f"growth.{name}.{key}", None, "must be given")
    try:
        return policy(**settings, **length)
    except TypeError as error:  # a setting that a class of one's own does not know
        raise InputError(f"growth.{name}", dict(settings), f"does not fit: {error}") from None
    except InputError as error:
        raise InputError(f"growth.{name}.{error.field}", error.value, error.expected) from None


def _imported(name: str) -> Any:
    """A class of one's own, by `module:Class`; modules of the present folder are found too."""
    module, _, own = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), own)
    except (ImportError, AttributeError) as error:
        expected = f"cannot be imported ({error}); its module must be in the present folder or installed"
        raise InputError("growth.policies", name, expected) from None
    finally:
        sys.path.remove(here)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise InputError("growth.policies", name, "must be a class that derives from meristem.Policy")
    return found
