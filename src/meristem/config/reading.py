"""The configuration of a run: read from TOML, overridden from the command line, written back."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from meristem.choices import TrackerName
from meristem.config.former import former_first, translated
from meristem.config.growth import GrowthConfig, is_foreign, policy_keys, table_name
from meristem.config.sections import (
    SHAPE,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from meristem.errors import InputError, Remedy, RunError
from meristem.files import read_toml
from meristem.growth import Policy
from meristem.growth.policies import POLICIES
from meristem.growth.policy import ENDLESS
from meristem.settings import from_text, is_list, of_type
from meristem.wording import alike, meant

# What may change when a run is resumed: the result does not depend on it, or (device, compile, recompute,
# parallel, micro_batch) only in the rounding of sums.
RESUMABLE = (
    "data.path", "train.device", "train.compile", "train.recompute", "train.parallel", "train.micro_batch",
    "train.max_skipped", "train.on_divergence", "train.max_rewinds", "eval.batch", "checkpoint.every",
    "checkpoint.keep", "checkpoint.keep_best", "eval.best_by", "eval.patience", "log.every", "log.trackers",
    "growth.static_loops.like", "growth.block_loop.like",
)  # fmt: skip
# What else may be another one in a run that branches off: its decay, and what is measured on the way.
BRANCHED = (
    "train.steps", "train.branch_from", "train.average", "optimizer.final", "growth.steps",
    "eval.every", "eval.windows", "eval.rows",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Everything a run depends on.

    >>> Config().model.layers, Config().optimizer.kind
    (12, 'adamw')
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        minimums = {
            "train.steps": 1, "train.batch_size": 1, "train.max_skipped": 1, "train.max_rewinds": 1,
            "data.held_back": 0, "eval.every": 0, "eval.windows": 1, "eval.patience": 0,
            "eval.rows": 0, "eval.batch": 1, "checkpoint.every": 0, "checkpoint.keep": 1, "log.every": 1,
        }  # fmt: skip
        for name, minimum in minimums.items():
            value = self[name]
            if value < minimum:
                raise InputError(name, value, f"must be at least {minimum}")
        if self.growth.steps is not None and self.growth.steps < 1:
            raise InputError("growth.steps", self.growth.steps, "must be at least 1")
        self.growth.check(self.clock)
        self._check_branch()
        self._check_depth()
        for name in (key for key in known_values(self) if key.endswith("seed") and key in _known_keys()):
            if not 0 <= self[name] < 2**63:
                raise InputError(name, self[name], "must be from 0 to 2^63 - 1")
        for name in ("data.class_weights", "train.on_divergence"):
            of_type(name, self[name], _known_keys()[name])
        micro = self.train.micro_batch
        if micro is not None and (micro < 1 or self.train.batch_size % micro):
            raise InputError("train.micro_batch", micro, f"must divide train.batch_size = {self.train.batch_size}")
        for name in self.log.trackers:
            of_type("log.trackers", name, TrackerName)

    def _check_branch(self) -> None:
        """Refuse to branch off where there is nothing left to do, or with a curve that has no decay of its own."""
        train, curve = self.train, self.optimizer.curve
        if train.branch_step is None:
            return
        if train.flops is not None:
            expected = "cannot be given with train.branch_from: branches have train.steps"
            raise InputError("train.flops", train.flops, expected)
        if train.branch_step >= train.steps:
            raise InputError(
                "train.branch_from", train.branch_from, f"must be a step before train.steps = {train.steps}"
            )
        if curve != "wsd":
            expected = "must be wsd with train.branch_from: a branch is the decay that follows a constant rate"
            raise InputError("optimizer.curve", curve, expected)

    def _check_depth(self) -> None:
        """Refuse a number of blocks that means nothing where a run starts from another."""
        if not self.growth.has("depth"):
            return
        first = self["growth.depth.start_layers"]
        if self.model.start_from is not None and first is not None:
            expected = "cannot be given with model.start_from, whose blocks all stay; layers says what they become"
            raise InputError("growth.depth.start_layers", first, expected)

    @property
    def clock(self) -> int:
        """The updates that growth takes for the whole run: a branch goes on by the clock of its trunk.

        Of a branch, or a run of so many FLOPs, that is only described yet they are not known.
        """
        known = self.train.branch_from is None and self.train.flops is None
        return self.growth.steps or (self.train.steps if known else ENDLESS)

    def policy(self, name: str) -> Any:
        """One of the run's policies that come with Meristem; None if it is not among them."""
        return self.growth.policy(name, self.clock) if self.growth.has(name) else None

    def build_policies(self) -> list[Policy]:
        """The policies of the run in their order; imports those that are somebody's own."""
        return self.growth.build(self.clock)

    @property
    def tolerance(self) -> float | None:
        """The share by which a trial without a head lets the loss rise; None where there are no such trials."""
        return self["growth.prune.tolerance"] if self.growth.has("prune") else None

    def __getitem__(self, key: str) -> Any:
        section, _, name = key.partition(".")
        if section == "growth" and "." in name:
            policy, _, name = name.partition(".")
            return self.growth.settings(policy).get(name)
        return getattr(getattr(self, section), name)

    def to_toml(self) -> str:
        """TOML text that reads back as the same configuration."""
        tables: dict[str, dict[str, Any]] = {}
        for section in fields(self):
            values = getattr(self, section.name)
            names = [entry.name for entry in fields(values) if entry.name != "tables"]
            tables[section.name] = {name: getattr(values, name) for name in names}
        tables |= {f"growth.{name}": dict(table) for name, table in self.growth.tables.items()}
        lines: list[str] = []
        for title, table in tables.items():
            lines.append(f"[{title}]")
            lines += [f"{name} = {_toml_value(value)}" for name, value in table.items() if value is not None]
            lines.append("")
        return "\n".join(lines)


def load_config(path: str | Path, overrides: Sequence[str] = (), note: Callable[[str], None] | None = None) -> Config:
    """Read a TOML file and apply `--section.key value` overrides; `note` is told of keys as they were before.

    >>> load_config("tiny.toml", ["--train.steps", "100"]).train.steps
    100
    """
    data = read_configuration(Path(path))
    values: dict[str, Any] = {}
    sections = [entry.name for entry in fields(Config)]
    for section, entries in data.items():
        if not isinstance(entries, dict):
            raise InputError(section, entries, f"must stand in one of the sections {sections}")
        former = section == "incrt"
        if section not in sections and not former and not entries:  # one with keys is answered with the nearest key
            raise InputError(f"[{section}]", entries, f"unknown section; {meant(section, sections, '[{}]')}")
        for key, value in entries.items():
            if section == "growth" and isinstance(value, dict) and (value or key in POLICIES):
                values |= {f"growth.{key}.{name}": entry for name, entry in value.items()}
            else:
                values[f"{section}.{key}"] = value
    return build_config(_overridden(former_first(values), overrides), note)


def read_configuration(path: Path) -> dict[str, Any]:
    """The tables of a file of configs/, or one like it; where there is none, the error says how to get them."""
    try:
        return read_toml(path)
    except RunError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise RunError(f"{error}; the ready ones can be written here", Remedy(call="configs")) from error
        raise


def build_config(values: Mapping[str, Any], note: Callable[[str], None] | None = None) -> Config:
    """A configuration from `section.key` values; what is not named keeps its default.

    >>> build_config({"data.path": "data", "model.layers": 4, "train.steps": 100}).model.layers
    4
    """
    values, known = translated(values, note), _known_keys()
    sections: dict[str, dict[str, Any]] = {entry.name: {} for entry in fields(Config)}
    tables: dict[str, dict[str, Any]] = {}
    foreign = foreign_tables(values)
    for key, value in values.items():
        section, _, name = key.partition(".")
        table, _, own = name.partition(".")
        if section == "growth" and not own and (table in foreign or table in POLICIES):
            if not isinstance(value, dict):
                raise InputError(key, value, f"is a table of settings, [{key}]; growth.policies names policies")
        elif section == "growth" and table in foreign:
            tables.setdefault(table, {})[own] = _plain(key, value)
        elif section == "growth" and not own and isinstance(value, dict):
            raise InputError(f"[{key}]", value, f"unknown table; {meant(table, POLICIES, '[growth.{}]')}")
        elif key not in known:
            raise _unknown(key, value)
        elif own:
            tables.setdefault(table, {})[own] = of_type(key, value, known[key])
        else:
            sections[section][name] = of_type(key, value, known[key])
    if tables:
        sections["growth"]["tables"] = tables
    hints = get_type_hints(Config)
    return Config(**{name: hints[name](**entries) for name, entries in sections.items()})


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, (list, tuple)) else []


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`--section.key value` or `--section.key=value` pairs; values are TOML, or else plain text."""
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, text = argument[2:].partition("=")
        if not argument.startswith("--") or "." not in key:
            near = _nearest_key(key) if argument.startswith("--") else None
            instead = ", such as --train.steps 100" if near is None else f"; did you mean --{near}?"
            raise InputError("argument", argument, f"expected --section.key value{instead}")
        if not equals:
            if not rest:
                raise InputError(key, None, "needs a value")
            text = rest.pop(0)
        values.pop(key, None)  # the last one holds, and in its own place
        values[key] = from_text(text, _known_keys().get(key))
    return values


def override(config: Config, arguments: Sequence[str]) -> Config:
    """The configuration with `--section.key value` overrides applied."""
    return build_config(_overridden(flatten(config), arguments))


def _overridden(values: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The values with overrides, which come last: the order tells what holds where keys of before are among them."""
    given = parse_overrides(arguments)
    return {key: value for key, value in values.items() if key not in given} | given


def check_resumable(config: Config, changed: Config) -> None:
    """Refuse a change of anything that the result of a run depends on."""
    if key := _first_change(config, changed, RESUMABLE):
        raise InputError(
            key, changed[key],
            f"the run began with {config[key]!r}; when it is resumed, only {', '.join(RESUMABLE)} can change",
        )  # fmt: skip


def check_branch(trunk: Config, branch: Config) -> None:
    """Refuse to branch off a run with other settings than it has where its updates depend on them."""
    if key := _first_change(trunk, branch, (*RESUMABLE, *BRANCHED)):
        free = ", ".join((*BRANCHED, *RESUMABLE))
        wanted = "must not be given" if trunk[key] is None else f"must be {trunk[key]!r}"
        raise InputError(key, branch[key], f"{wanted}, as in {branch.train.branch_run}; free are {free}")


def _first_change(config: Config, changed: Config, free: Sequence[str]) -> str | None:
    """The first key with other values in two configurations, but for those that are free or have no effect."""
    keys = {**known_values(config), **known_values(changed)}
    free = (*free, *(SHAPE if config.model.whole and changed.model.whole else ()))
    return next((key for key in keys if key not in free and changed[key] != config[key]), None)


def flatten(config: Config) -> dict[str, Any]:
    """All values as `section.key`, those that are not given left out."""
    tables = {f"growth.{name}.{key}": v for name, table in config.growth.tables.items() for key, v in table.items()}
    return {key: value for key, value in {**known_values(config), **tables}.items() if value is not None}


def known_values(config: Config) -> dict[str, Any]:
    """All values as `section.key`; of policies, those of the ones that the run has."""
    growth = config.growth
    tables = {f"growth.{table_name(n)}.{key}": v for n in growth.policies for key, v in growth.settings(n).items()}
    return {key: config[key] for key in _known_keys() if key.count(".") == 1} | tables


@cache
def _known_keys() -> dict[str, Any]:
    """Every `section.key` with its type."""
    keys = {
        f"{section}.{name}": kind
        for section, hint in get_type_hints(Config).items()
        for name, kind in get_type_hints(hint).items()
        if name != "tables"
    }
    return keys | policy_keys()


class Setting(NamedTuple):
    """A key of the configuration as `--help` lists it: what it takes, and its value if it is not given."""

    key: str
    takes: str
    default: str


def all_settings() -> list[Setting]:
    """Every setting of a configuration, section by section."""
    defaults = Config()
    takes = {key: _kind_text(kind) for key, kind in _known_keys().items()}
    takes["growth.policies"] = f"any of {', '.join(POLICIES)}, MODULE:CLASS"
    return [Setting(key, kinds, _default_text(defaults[key])) for key, kinds in takes.items()]


def _kind_text(kind: Any) -> str:
    """What a setting takes, in a word, or the words that it can be."""
    if get_origin(kind) in (Union, types.UnionType):
        return _kind_text(next(k for k in get_args(kind) if k is not type(None)))
    if is_list(kind):
        return f"{_kind_text(get_args(kind)[0])},..."
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {str: "TEXT", bool: "true|false", int: "INTEGER", float: "NUMBER"}[kind]


def _default_text(value: Any) -> str:
    if value is None or value == ():
        return "not given"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def foreign_tables(values: Mapping[str, Any]) -> set[str]:
    """The names of the tables that policies of somebody's own have in a configuration of these values."""
    return {table_name(name) for name in _names(values.get("growth.policies", ())) if is_foreign(name)}


def check_keys(values: Mapping[str, Any], foreign: Collection[str]) -> None:
    """Refuse a key that no configuration has, also for a policy that is not in use; `foreign` tables may have any."""
    for key, value in translated(values, None).items():
        section, _, name = key.partition(".")
        if key not in _known_keys() and not (section == "growth" and name.partition(".")[0] in foreign):
            raise _unknown(key, value)


def _unknown(key: str, value: Any) -> InputError:
    if (near := _nearest_key(key)) is not None:
        return InputError(key, value, f"unknown key; did you mean {near}?")
    table = key.rpartition(".")[0]
    if names := _names_in(table):
        return InputError(key, value, f"unknown key; [{table}] has {', '.join(names)}")
    tables = dict.fromkeys(other.rpartition(".")[0] for other in _known_keys())
    beside = [f"[{other}]" for other in tables if other.partition(".")[0] == key.partition(".")[0]]
    there = ", ".join(beside or (f"[{other}]" for other in tables if "." not in other))
    return InputError(key, value, f"unknown key; there are {there}")


def _nearest_key(key: str) -> str | None:
    """The key that was meant: one like it in its table, or the only one there that begins so.

    Otherwise one of its name, or of a name like it, in another table, `train` before the others.
    """
    table, _, name = key.rpartition(".")
    if table in _known_keys():
        return table
    names = _names_in(table)
    longer = [other for other in names if other.startswith(name)]
    if near := alike(name, names) or (longer[0] if len(longer) == 1 else None):
        return f"{table}.{near}"
    if not table and f"train.{name}" in _known_keys():
        return f"train.{name}"
    all_names = [other.rpartition(".")[2] for other in _known_keys()]
    wanted = name if name in all_names or names else alike(name, all_names)
    namesakes = [other for other in _known_keys() if other.rpartition(".")[2] == wanted]
    return next(iter(difflib.get_close_matches(key, namesakes, n=1, cutoff=0.0)), None)


def _names_in(table: str) -> list[str]:
    """The keys of a table, without its name."""
    return [key.rpartition(".")[2] for key in _known_keys() if key.rpartition(".")[0] == table]


def _plain(key: str, value: Any) -> Any:
    """A setting of somebody's own policy, of which no type is known."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(key, entry) for entry in value)
    if type(value) not in (str, int, float, bool):
        raise InputError(key, value, "must be text, a number, true or false, or a list of these")
    return value


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)  # strings, integers and booleans are written alike in JSON and TOML
