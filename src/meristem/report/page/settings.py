"""The configuration of a run for its page: every setting, and what differs from its default or from other runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from meristem.config import Config, known_values
from meristem.growth.policies import POLICIES

UNKNOWN = "?"  # the default of a setting of somebody's own policy


def settings_table(config: Config) -> list[dict[str, Any]]:
    """Every setting as text, with its default."""
    defaults = {**known_values(Config()), **_policy_defaults(config.growth.policies)}
    return [
        {
            "key": key,
            "value": value_text(value),
            "default": value_text(defaults[key]) if key in defaults else UNKNOWN,
            "differs": key not in defaults or value != defaults[key],
        }
        for key, value in known_values(config).items()
    ]


def _policy_defaults(policies: Sequence[str]) -> dict[str, Any]:
    return {
        f"growth.{name}.{entry.name}": entry.default
        for name in policies
        if name in POLICIES
        for entry in dataclasses.fields(POLICIES[name])
        if entry.default is not dataclasses.MISSING
    }


def value_text(value: Any) -> str:
    """A value as a configuration file has it."""
    if value is None:
        return "not given"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(value_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def setting_differences(tables: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The settings that are not the same in all of several runs, with the value in each.

    Where a run does not have the policy that a setting is of, it has none, and others only count if not the default.
    """
    values = [{row["key"]: row["value"] for row in table} for table in tables]
    changed = {row["key"] for table in tables for row in table if row["differs"]}
    keys = dict.fromkeys(key for table in values for key in table)
    rows = [{"key": key, "values": [table.get(key) for table in values]} for key in keys]
    differ = [row for row in rows if len({*row["values"]}) > 1]
    return [row for row in differ if row["key"] in changed or None not in row["values"]]
