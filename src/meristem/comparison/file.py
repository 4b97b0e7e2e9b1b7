"""The file of a comparison: arms, seeds and a budget, checked as a whole before anything runs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from meristem.choices import BestBy
from meristem.comparison.search import Range, Search, read_search
from meristem.config import (
    SHAPE,
    WHOLE,
    Config,
    build_config,
    check_keys,
    flatten,
    foreign_tables,
    load_config,
    parse_overrides,
    read_configuration,
    whole_key,
)
from meristem.errors import InputError
from meristem.growth.policy import ENDLESS
from meristem.settings import flat, of_type
from meristem.wording import meant

Kind = Literal["tokens", "flops", "seconds", "parameters"]

KEYS = (
    "config", "arms", "seeds", "budget", "rates", "rate_seeds", "rate_length", "primary", "contrasts", "margin",
    "target_loss", "measure", "sweep", "search", "preset",
)  # fmt: skip
MEASURING_SEED = 10**9  # of runs that only measure speed and FLOPs; those of a file are below it
SPENDS_ALL = "cannot be given: a run that ends early does not spend its budget"
# What a value may say of a run of another arm with the same seed, as "@ARM" or "@ARM.WORD".
REFERENCES = ("run", "plan", "births", "birth_times", "birth_layers", "other_layers")
# What stands for these while nothing is known of that run.
STAND_INS: Mapping[str, Any] = dict(zip(REFERENCES, ("run", "plan.json", 1, [1], [0], [0]), strict=True))
REFERENCE = re.compile(r"@(?P<arm>[^.@]+)(?:\.(?P<what>\w+))?")
NAME = re.compile(r"[\w=+-]+(?: [\w=+-]+)*")


@dataclass(frozen=True)
class Budget:
    """What an arm may spend: an amount of the kind, or as much as another arm (`of`) spends with the same seed.

    Parameters are matched by the feed-forward size, with the updates of the configuration.
    """

    kind: Kind = "tokens"
    amount: float | None = None  # None: what `of` spends, or for tokens the updates of the configuration
    of: str | None = None

    @property
    def table(self) -> dict[str, Any]:
        """As it stands in a file."""
        entries = {"kind": self.kind, self.kind: self.amount, "of": self.of}
        return {key: value for key, value in entries.items() if value is not None}


@dataclass(frozen=True)
class Arm:
    """What one arm changes in the base configuration, as `section.key` values, and its own budget if it has one."""

    name: str
    changes: Mapping[str, Any]
    budget: Budget | None = None
    point: str = ""  # of the grid
    swept: frozenset[str] = frozenset()  # those of the changes that are the point's
    rate_of: str | None = None  # the arm whose best rate it has, instead of trying rates itself

    @property
    def facts(self) -> dict[str, Any]:
        """Its own budget, as it stands in a file, and whose rate it has; None where it has those of all arms."""
        return {"budget": None if self.budget is None else self.budget.table, "rate_of": self.rate_of}


@dataclass(frozen=True)
class Contrast:
    """One arm against another, which is the baseline of the difference."""

    arm: str
    baseline: str


@dataclass(frozen=True)
class Comparison:
    """A comparison as its file has it, with the preset put in and the grid laid out."""

    name: str
    values: Mapping[str, Any]  # of the base configuration
    arms: Mapping[str, Arm]
    seeds: tuple[int, ...]
    primary: tuple[Contrast, ...]  # one; with a grid, one for each of its points
    secondary: tuple[Contrast, ...]
    budget: Budget = field(default_factory=Budget)
    rates: tuple[float, ...] = ()
    rate_seeds: tuple[int, ...] = ()
    rate_length: float = 1.0  # of runs in which rates are tried, as a part of those that are reported
    search: Search | None = None
    margin: float | None = None
    target_loss: float | None = None
    measure: BestBy = "held_out_loss"

    def budget_of(self, arm: str) -> Budget:
        """What an arm may spend; the one that others are matched to has the updates of its configuration."""
        budget = self.arms[arm].budget or self.budget
        if budget.of is None:
            return budget
        of = self.beside(arm, budget.of)
        return Budget() if of == arm else replace(budget, of=of)

    def budget_field(self, arm: str) -> str:
        """The key of the file that has the budget of an arm."""
        return "budget" if self.arms[arm].budget is None else f"arms.{arm}.budget"

    def beside(self, arm: str, other: str) -> str:
        """The arm of this name at the same point of the grid."""
        return _at(other, self.arms[arm].point)

    def references(self, arm: str) -> set[str]:
        """The arms whose runs this one cannot begin without."""
        matches = filter(None, map(_reference, self.arms[arm].changes.values()))
        of = self.budget_of(arm).of
        return {self.beside(arm, match["arm"]) for match in matches} | ({of} if of is not None else set())

    def source(self, arm: str) -> str | None:
        """The arm from whose finished runs this one starts, if there is one."""
        match = _reference(self.arms[arm].changes.get("model.start_from"))
        return None if match is None else self.beside(arm, match["arm"])

    def sources(self, arm: str) -> list[str]:
        """The arms that one starts from, each from the next."""
        found = []
        while (source := self.source(arm)) is not None:
            found.append(arm := source)
        return found

    def follows_run(self, arm: str, other: str) -> bool:
        """Whether an arm takes after what a run of another has written, besides starting from it."""
        matches = (_reference(value) for key, value in self.arms[arm].changes.items() if key != "model.start_from")
        return any(m and self.beside(arm, m["arm"]) == other and m["what"] in (None, "run") for m in matches)

    def tuned_arm(self, arm: str) -> str:
        """The arm on which an arm's rate is chosen: itself, unless it has that of another one."""
        other = self.arms[arm].rate_of
        return arm if other is None else self.beside(arm, other)

    @property
    def lower_is_better(self) -> bool:
        return self.measure == "held_out_loss"

    def may_grow(self, arm: str) -> bool:
        """Whether the structure of an arm may change while it trains."""
        return any(name not in ("static_loops", "block_loop", "observe") for name in self._policies(arm))

    def spends_flops(self, arm: str) -> bool:
        """Whether an arm decides itself, by its FLOPs, in how many updates it spends them."""
        return "depth" in self._policies(arm)

    def length_values(self, arm: str, flops: float | None) -> dict[str, Any]:
        """What an arm's configuration says of its length while that is not known, so that no growth is too late."""
        if self.spends_flops(arm):
            return {"train.flops": flops}
        budget = self.budget_of(arm)
        return {"train.steps": ENDLESS} if budget.kind == "tokens" and budget.amount is not None else {}

    def uses_steps(self, arm: str) -> bool:
        """Whether the updates of the configuration say how long an arm's runs are, be it the first that is measured."""
        kind, amount = self.budget_of(arm).kind, self.budget_of(arm).amount
        if kind == "flops":
            return self.may_grow(arm) and not self.spends_flops(arm)
        return kind != "tokens" or amount is None

    def _policies(self, arm: str) -> Any:
        return self.arms[arm].changes.get("growth.policies", self.values.get("growth.policies", ()))

    def is_searched(self, arm: str) -> bool:
        """Whether an arm is reported with the best settings of a search."""
        return self.search is not None and name_of(arm) in self.search.arms

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """The seeds that rates or settings are chosen on, none of which is reported."""
        return self.rate_seeds if self.search is None else self.search.seeds


def load_comparison(path: str | Path, preset: str | None = None, overrides: Sequence[str] = ()) -> Comparison:
    """Read the file of a comparison, with one of its presets; overrides are of the base configuration."""
    path = Path(path)
    return read_comparison(read_configuration(path), path, preset, overrides)


def read_comparison(
    data: Mapping[str, Any], path: Path, preset: str | None = None, overrides: Sequence[str] = ()
) -> Comparison:
    """The comparison that the tables of a file describe; `path` is the file, beside which its configuration lies."""
    sections = {entry.name for entry in fields(Config)}
    if sections & {*data} and not {*KEYS} & {*data}:
        instead = f"a comparison is a file of its own, with config = {path.name!r} and arms"
        raise InputError("arms", None, f"must be tables [arms.NAME]: {path.name} is a configuration; {instead}")
    for key in data:
        if key in sections:
            raise InputError(key, data[key], "belongs in an arm, a preset, or the configuration that config names")
        if key not in KEYS:
            raise InputError(key, data[key], f"unknown key of a comparison; {meant(key, KEYS)}")
    data, config_changes = _with_preset(data, preset)
    if not isinstance(data.get("config"), str):
        raise InputError("config", data.get("config"), "must name a configuration, relative to this file")
    base = flatten(load_config(path.parent / data["config"]))
    given = parse_overrides(overrides)
    changes = {**config_changes, **given}
    for key, value in changes.items():
        _check_said_once(key, value, rates=bool(data.get("rates")))
    values = {**base, **changes}
    arms = _laid_out(_arms(data.get("arms")), _grid(data.get("sweep", {})))
    names = {name_of(arm): None for arm in arms}
    points = list(dict.fromkeys(arm.point for arm in arms.values()))
    pair = _pair("primary", data.get("primary"), names)
    others = [_pair("contrasts", entry, names) for entry in _list("contrasts", data.get("contrasts", []))]
    if "contrasts" not in data:
        others = [Contrast(name, pair.baseline) for name in names if name != pair.baseline]
    others = [other for other in dict.fromkeys(others) if other != pair]

    def at_points(contrasts: Sequence[Contrast]) -> tuple[Contrast, ...]:
        return tuple(
            Contrast(_at(each.arm, point), _at(each.baseline, point)) for point in points for each in contrasts
        )

    found = Comparison(
        name=path.stem, values=values, arms=arms, seeds=_seeds("seeds", data.get("seeds"), 2),
        primary=at_points([pair]), secondary=at_points(others), budget=_budget("budget", data.get("budget", {})),
        rates=_rates(data.get("rates", [])), rate_seeds=_seeds("rate_seeds", data.get("rate_seeds", []), 0),
        rate_length=_part("rate_length", data.get("rate_length", 1.0)),
        search=read_search(data["search"], names) if data.get("search") else None,
        margin=_positive("margin", data.get("margin")), target_loss=_positive("target_loss", data.get("target_loss")),
        measure=of_type("measure", data.get("measure", "held_out_loss"), BestBy),
    )  # fmt: skip
    _check(found)
    if "train.steps" in changes and not any(map(found.uses_steps, arms)):
        expected = "does nothing: the budget says what every arm may spend, so give it another amount"
        raise InputError("train.steps", changes["train.steps"], expected)
    return found


def arm_values(comparison: Comparison, arm: str, resolve: Callable[[str, str], Any]) -> dict[str, Any]:
    """All values of an arm's configuration but those of seed, rate and length; tables of policies it has no use for go.

    `resolve` gives what is known of another arm: its name and one of `REFERENCES`.
    """
    changes = {}
    for key, value in comparison.arms[arm].changes.items():
        match = _reference(value)
        changes[key] = value
        if match is not None:
            changes[key] = resolve(comparison.beside(arm, match["arm"]), match["what"] or "run")
    values = {**comparison.values, **changes}
    tables = {name.rpartition(":")[2].lower() for name in values.get("growth.policies", ())}
    return {key: value for key, value in values.items() if key.count(".") == 1 or key.split(".")[1] in tables}


def folder_name(arm: str) -> str:
    """What the folder of an arm is called."""
    return re.sub(r"[^\w=.+-]+", "-", arm.replace("@", "at"))


# --- parts of the file -----------------------------------------------------------------------------------------------


def _with_preset(data: Mapping[str, Any], preset: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables of a file with a preset's own keys in their places, and the preset's changes of the configuration."""
    presets = data.get("preset", {})
    if not isinstance(presets, dict) or not all(isinstance(entry, dict) for entry in presets.values()):
        raise InputError("preset", presets, "must be tables [preset.NAME]")
    rest = {key: value for key, value in data.items() if key != "preset"}
    if preset is None:
        return rest, {}
    if preset not in presets:
        known = f"must be one of {', '.join(presets)}" if presets else "cannot be given: the file has no presets"
        raise InputError("preset", preset, known)
    changes, arms = flat(presets[preset]), rest.get("arms", {})
    arms = dict(arms) if isinstance(arms, dict) else {}
    own = {key: presets[preset][key] for key in presets[preset] if key in KEYS and key != "arms"}
    for name, entry in presets[preset].get("arms", {}).items():
        if name not in arms:
            raise InputError(f"preset.{preset}.arms.{name}", entry, f"must be one of the arms {', '.join(arms)}")
        own_changes = _flat_arm(entry)
        before = _flat_arm(arms[name])
        if (whole := whole_key(own_changes)) is not None:
            others = {*SHAPE, *WHOLE} - {whole}
            before = {key: value for key, value in before.items() if key not in others}
        arms[name] = {**before, **own_changes}
    kept = {key: value for key, value in changes.items() if key.partition(".")[0] not in KEYS}
    return {**rest, **own, "arms": arms}, kept


def _arms(tables: Any) -> dict[str, Arm]:
    if not isinstance(tables, dict) or not tables:
        raise InputError("arms", tables, "must be tables [arms.NAME] with what each arm changes")
    arms = {}
    for name, table in tables.items():
        if not NAME.fullmatch(name):
            raise InputError("arms", name, "must be a name of letters, digits, _, =, +, - and single spaces")
        own = _flat_arm(table)
        budget = _budget(f"arms.{name}.budget", own.pop("budget")) if "budget" in own else None
        rate_of = own.pop("rate_of", None)
        arms[name] = Arm(name, own, budget, rate_of=rate_of)
    return arms


def _grid(sweep: Any) -> list[dict[str, Any]]:
    """Every combination of the values of a sweep; one that changes nothing if there is none."""
    if not isinstance(sweep, dict):
        raise InputError("sweep", sweep, "must be a table of section.key = [values]")
    lists = {key: _list(f"sweep.{key}", values) for key, values in flat(sweep).items()}
    for key, values in lists.items():
        if not values:
            raise InputError(f"sweep.{key}", values, "must have one value or more")
    return [dict(zip(lists, point, strict=True)) for point in itertools.product(*lists.values())]


def _laid_out(arms: Mapping[str, Arm], points: Sequence[Mapping[str, Any]]) -> dict[str, Arm]:
    """Every arm at every point of the grid."""
    laid: dict[str, Arm] = {}
    for point in points:
        name = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in point.items())
        for arm in arms.values():
            for key in (key for key in point if key in arm.changes):
                raise InputError(f"arms.{arm.name}.{key}", arm.changes[key], "is what sweep says, for all arms alike")
            laid[_at(arm.name, name)] = replace(
                arm,
                name=_at(arm.name, name),
                changes={**point, **arm.changes},
                point=name,
                swept=frozenset(point),
            )
    return laid


def _at(arm: str, point: str) -> str:
    return f"{arm} @ {point}" if point else arm


def name_of(arm: str) -> str:
    """The name of an arm without its point of the grid."""
    return arm.partition(" @ ")[0]


def _reference(value: Any) -> re.Match[str] | None:
    return REFERENCE.fullmatch(value) if isinstance(value, str) else None


def _flat_arm(table: Any) -> dict[str, Any]:
    """The values of an arm by their keys with dots; its budget stays a table."""
    if not isinstance(table, dict):
        raise InputError("arms", table, "must be tables of section.key values")
    return {**flat({k: v for k, v in table.items() if k != "budget"}), **{k: table[k] for k in table if k == "budget"}}


def _budget(field: str, table: Any) -> Budget:
    if not isinstance(table, dict):
        raise InputError(field, table, 'must be a table such as { kind = "flops", flops = 1e15 }')
    kind: Kind = of_type(f"{field}.kind", table.get("kind", "tokens"), Kind)
    for key in table:
        if key not in ("kind", kind, "of"):
            raise InputError(f"{field}.{key}", table[key], f"unknown key; a budget of {kind} has kind and {kind} or of")
    amount, of = _positive(f"{field}.{kind}", table.get(kind)), table.get("of")
    if of is not None and not isinstance(of, str):
        raise InputError(f"{field}.of", of, "must name an arm")
    if of is not None and kind == "tokens":
        raise InputError(f"{field}.of", of, "is for other kinds: without it, all arms have the same tokens")
    if (amount is None) == (of is None) and kind != "tokens":
        raise InputError(field, table, f"must have either {kind} or of, the arm that others are matched to")
    return Budget(kind, amount, of)


def _positive(field: str, value: Any) -> float | None:
    if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
        raise InputError(field, value, "must be a number above 0")
    return value


def _part(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise InputError(field, value, "must be a part of the length, above 0 and at most 1")
    return float(value)


def _list(field: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(field, value, "must be a list")
    return value


def _rates(value: Any) -> tuple[float, ...]:
    rates = tuple(_positive("rates", rate) or 0.0 for rate in _list("rates", value))
    if len(set(rates)) < len(rates) or len(rates) == 1:
        raise InputError("rates", value, "must be two or more different learning rates, or none")
    return tuple(sorted(rates))


def _seeds(field: str, value: Any, least: int) -> tuple[int, ...]:
    seeds = _list(field, value)
    if not all(type(seed) is int and 0 <= seed < MEASURING_SEED for seed in seeds) or len(set(seeds)) < len(seeds):
        raise InputError(field, value, f"must be different integers from 0 to {MEASURING_SEED - 1:,}")
    if len(seeds) < least:
        raise InputError(field, value, f"must be at least {least}: a difference needs pairs")
    return tuple(seeds)


def _pair(field: str, value: Any, names: Collection[str]) -> Contrast:
    if not isinstance(value, list) or len(value) != 2 or value[0] == value[1]:
        raise InputError(field, value, "must be two different arms, the second of which is the baseline")
    for name in value:
        if name not in names:
            raise InputError(field, name, f"must be one of the arms {', '.join(names)}")
    return Contrast(*value)


# --- the whole -------------------------------------------------------------------------------------------------------


def _check(comparison: Comparison) -> None:
    """Refuse what cannot be run, or would not be a fair comparison, by the key that says it."""
    if bool(comparison.rates) != bool(comparison.rate_seeds):
        expected = "must be given together with rates: rates are chosen on seeds of their own"
        raise InputError("rate_seeds", list(comparison.rate_seeds), expected)
    if comparison.rate_length < 1 and not comparison.rates:
        raise InputError("rate_length", comparison.rate_length, "is for rates, which are not given")
    if shared := sorted({*comparison.seeds} & {*comparison.tuning_seeds}):
        field = "rate_seeds" if comparison.search is None else "search.seeds"
        expected = f"must share no seed with seeds ({shared[0]}): what is chosen on the reported seeds looks too good"
        raise InputError(field, list(comparison.tuning_seeds), expected)
    if (trunk := comparison.values.get("train.branch_from")) is not None:
        raise InputError("train.branch_from", trunk, "cannot be given: the runs of a comparison begin by themselves")
    if patience := comparison.values.get("eval.patience"):
        raise InputError("eval.patience", patience, SPENDS_ALL)
    if flops := comparison.values.get("train.flops"):
        raise InputError("train.flops", flops, "is what the budget says")
    _check_keys(comparison)
    folders: dict[str, str] = {}
    for name in comparison.arms:
        other = folders.setdefault(folder_name(name), name)
        if other != name:
            raise InputError("arms", name, f"must differ from {other!r} by more than spaces and signs")
    for arm in comparison.arms.values():
        with of_arm(comparison, arm.name):
            for key, value in arm.changes.items():
                _check_change(comparison, arm.name, key, value)
        _check_rate_of(comparison, arm)
        if comparison.spends_flops(arm.name):
            _check_flops(comparison, arm)
        of = comparison.budget_of(arm.name).of
        if of is not None and of not in comparison.arms:
            raise InputError(f"arms.{arm.name}.budget.of", of, f"must be one of the arms {', '.join(comparison.arms)}")
    _check_order(comparison)
    _check_search(comparison)
    for arm in comparison.arms.values():
        with of_arm(comparison, arm.name):
            _check_values(comparison, arm)


def _check_change(comparison: Comparison, arm: str, key: str, value: Any) -> None:
    """Refuse what an arm, or a sweep, must not change."""
    _check_reference(comparison, arm, key, value)
    _check_said_once(key, value, rates=bool(comparison.rates))
    if key == "eval.patience":
        raise InputError(key, value, SPENDS_ALL)
    if key in ("eval.windows", "eval.rows"):
        expected = "must be that of the configuration, so that all arms are measured on the same held-out data"
        raise InputError(key, value, expected)
    if key in ("train.steps", "train.flops"):
        raise InputError(key, value, "is what the budget says; give the arm one of its own")


def _check_said_once(key: str, value: Any, *, rates: bool) -> None:
    """Refuse to change what keys of the file itself say for all runs, and policies that are no list."""
    if key in ("train.seed", "data.seed") or (key == "optimizer.lr" and rates):
        said = "rates" if key == "optimizer.lr" else "seeds"
        raise InputError(key, value, f"is what the {said} of the file say, for all arms alike")
    if key == "growth.policies" and not isinstance(value, list | tuple):
        raise InputError(key, value, "must be a list of policies")


def _check_keys(comparison: Comparison) -> None:
    """Refuse keys that no configuration has, wherever they stand; those of policies not in use would go unseen."""
    arms = comparison.arms.values()
    foreign = {table for arm in arms for table in foreign_tables({**comparison.values, **arm.changes})}
    check_keys(comparison.values, foreign)
    for arm in arms:
        with of_arm(comparison, arm.name):
            check_keys(arm.changes, foreign)


def _check_values(comparison: Comparison, arm: Arm) -> None:
    """Refuse what no configuration can have, in the arm itself or at the ends of its search.

    What it takes after other arms is not known yet: something of the kind stands for it, in a run of any length.
    """
    values = arm_values(comparison, arm.name, lambda other, what: STAND_INS[what])
    for key in (key for key in arm.changes if key not in values and key not in arm.swept):
        named = ", ".join(values.get("growth.policies", ())) or "none"
        raise InputError(key, arm.changes[key], f"does nothing: the policies of {arm.name} are {named}")
    whole = whole_key(values)
    if whole == "model.plan" and values.get("model.start_from") is not None:
        expected = "has a plan, so model.plan cannot be given besides"
        raise InputError("model.start_from", values["model.start_from"], expected)
    for key in (key for key in arm.changes if whole and key in SHAPE and key not in arm.swept):
        raise InputError(key, arm.changes[key], f"does nothing: {whole} of {arm.name} brings a whole plan along")
    values |= {"train.steps": ENDLESS} if comparison.references(arm.name) else {}
    values |= comparison.length_values(arm.name, comparison.budget_of(arm.name).amount)
    build_config(values)
    for key, part in comparison.search.space if comparison.search and comparison.is_searched(arm.name) else ():
        for value in part.ends if isinstance(part, Range) else part:
            build_config({**values, key: value})


@contextmanager
def of_arm(comparison: Comparison, arm: str) -> Iterator[None]:
    """Errors about what an arm changes, within this, name the arm."""
    try:
        yield
    except InputError as error:
        changes, swept = comparison.arms[arm].changes, comparison.arms[arm].swept
        if error.field == "train.flops" and "train.flops" not in changes:  # what the budget says
            budget, field = comparison.budget_of(arm), comparison.budget_field(arm)
            key, value = ("of", budget.of) if budget.amount is None else (budget.kind, budget.amount)
            expected = error.expected if budget.amount is not None else f"gives {error.value:g} FLOPs: {error.expected}"
            raise InputError(f"{field}.{key}", value, f"{expected} (arm {arm})", error.remedy) from None
        place = "sweep." if error.field in swept else f"arms.{arm}." if error.field in changes else ""
        expected = error.expected if place else f"{error.expected} (arm {arm})"
        raise InputError(place + error.field, error.value, expected, error.remedy) from None


def _check_flops(comparison: Comparison, arm: Arm) -> None:
    """Refuse a budget that says no FLOPs to an arm that decides what these are best spent on."""
    budget, field = arm.budget or comparison.budget, comparison.budget_field(arm.name)
    if budget.kind != "flops":
        expected = f"must be flops for {arm.name}, named or of another arm: depth decides what they are best spent on"
        raise InputError(f"{field}.kind", budget.kind, expected)
    if budget.of is not None and comparison.beside(arm.name, budget.of) == arm.name:
        expected = f"leaves open what {arm.name} itself may spend; give it an amount, arms.{arm.name}.budget.flops"
        raise InputError(f"{field}.of", budget.of, expected)


def _check_rate_of(comparison: Comparison, arm: Arm) -> None:
    """Refuse a rate that would never be chosen, and rates that would be tried with runs that are not made."""
    if arm.rate_of is not None:
        tuned = [other.name for other in comparison.arms.values() if other.rate_of is None and comparison.rates]
        if not isinstance(arm.rate_of, str) or comparison.tuned_arm(arm.name) not in tuned:
            why = "none, as every arm has that of another" if comparison.rates else "none, as there are no rates"
            names = ", ".join(dict.fromkeys(map(name_of, tuned))) or why
            raise InputError(f"arms.{arm.name}.rate_of", arm.rate_of, f"must be an arm with rates of its own: {names}")
    elif comparison.rates:
        for other in comparison.references(arm.name):
            if other in comparison.arms and (of := comparison.arms[other].rate_of) is not None:
                expected = f"cannot be given: {arm.name} takes after it, also while rates are tried"
                raise InputError(f"arms.{other}.rate_of", of, expected)


def _check_reference(comparison: Comparison, arm: str, key: str, value: Any) -> None:
    match = _reference(value)
    if match is None:
        return
    if comparison.beside(arm, match["arm"]) not in comparison.arms:
        raise InputError(key, value, f"must name one of the arms {', '.join(comparison.arms)}")
    what = match["what"] or "run"
    if what not in REFERENCES:
        raise InputError(key, value, f"must end in one of .{', .'.join(REFERENCES)}")
    if key == "model.start_from" and what != "run":
        raise InputError(key, value, f"must be @{match['arm']}: a run starts from a whole run")


def _check_search(comparison: Comparison) -> None:
    """Refuse a search that could not be run, or would choose by what is not matched."""
    search = comparison.search
    if search is None:
        return
    if comparison.rates:
        raise InputError("rates", list(comparison.rates), "cannot be given with search; put optimizer.lr in its space")
    for arm in filter(comparison.is_searched, comparison.arms):
        for key in (key for key, _ in search.space if key in comparison.arms[arm].changes):
            expected = "is what search.space says; leave it out, or the arm out of search.arms"
            raise InputError(f"arms.{arm}.{key}", comparison.arms[arm].changes[key], expected)
        if missing := [other for other in comparison.references(arm) if not comparison.is_searched(other)]:
            expected = f"must have {missing[0]} too, which {arm} takes after with the same seeds"
            raise InputError("search.arms", list(search.arms), expected)
        kind = comparison.budget_of(arm).kind
        if kind == "seconds" or (kind == "flops" and comparison.may_grow(arm)):
            for key in (key for key, _ in search.space if not key.startswith("optimizer.")):
                expected = f"would change the {kind} of an update of {arm}, measured before the search; use optimizer.*"
                raise InputError("search.space", key, expected)


def _check_order(comparison: Comparison) -> None:
    """Refuse arms that wait for one another."""
    done: set[str] = set()
    while ready := [arm for arm in comparison.arms if arm not in done and comparison.references(arm) <= done]:
        done |= {*ready}
    if waiting := [arm for arm in comparison.arms if arm not in done]:
        raise InputError("arms", waiting, "wait for one another: what they take after goes in a circle")
