"""The configuration of a run: frozen dataclasses, read from TOML, overridden from the command line."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from meristem.choices import (
    Attention,
    Birth,
    ClassWeights,
    Criterion,
    GrowthOrder,
    GrowthPolicy,
    LoopedHeads,
    Numerics,
    OnDivergence,
    Pooling,
    Probe,
    Schedule,
    TrackerName,
    Unit,
)
from meristem.errors import InputError
from meristem.files import read_toml
from meristem.gauges.energy import check_numerics
from meristem.gauges.entropy import FORMS
from meristem.growth import Incrt, Observe, Policy, Prune, Published, RandomBirths
from meristem.growth.policies.sgt import ENDLESS, Sgt
from meristem.plan import Plan
from meristem.schedules import PREFERRED_DIMS

LARGEST = 2**63  # whole numbers of a configuration are below

# What may change when a run is resumed: the result does not depend on it, or (device, compile, micro_batch) only in the
# rounding of sums.
RESUMABLE = (
    "data.path", "train.device", "train.compile", "train.micro_batch", "train.max_skipped", "train.on_divergence",
    "train.max_rewinds", "eval.batch", "checkpoint.every", "checkpoint.keep", "log.every", "log.trackers",
    "growth.like",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model: a schedule, an explicit list of head counts, or a plan file."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    schedule: Schedule = "prism"
    head_list: tuple[int, ...] = ()  # explicit head counts, instead of a schedule
    dims: tuple[int, ...] = PREFERRED_DIMS
    shuffle_seed: int = 0
    kv_group: int = 1
    context: int = 1024
    feed_forward: int | None = None  # 8/3 of the width if not given
    head_dim: int | None = None  # width / heads if not given; for the uniform schedule and lists
    pooling: Pooling = "mean"  # what a classifier's answer is read from: all tokens, or the first
    plan: str | None = None  # a plan file, instead of all of the above

    def build(self, vocabulary: int, classes: int | None = None, longest: int | None = None) -> Plan:
        """The plan for a vocabulary, and, of a classifier, for so many classes of rows up to a length."""
        if self.plan is not None:
            plan = Plan.load(self.plan)
            if plan.vocabulary < vocabulary:
                raise InputError("model.plan", plan.vocabulary, f"vocabulary is smaller than the data's {vocabulary}")
            if plan.classes != classes:
                raise InputError("model.plan", plan.classes, f"classes must be those of the data, {classes}")
            return plan
        shape: dict[str, Any] = {
            "vocabulary": vocabulary, "context": min(self.context, longest or self.context),
            "feed_forward": self.feed_forward, "kv_group": self.kv_group, "head_dim": self.head_dim,
            "classes": classes, "pooling": self.pooling,
        }  # fmt: skip
        try:
            if self.head_list:
                return Plan.from_heads(self.head_list, width=self.width, **shape)
            return Plan.scheduled(
                self.schedule, layers=self.layers, width=self.width, heads=self.heads, dims=self.dims,
                seed=self.shuffle_seed, **shape,
            )  # fmt: skip
        except InputError as error:
            if error.field in {field.name for field in fields(self)}:
                raise InputError(f"model.{error.field}", error.value, error.expected) from None
            raise


@dataclass(frozen=True)
class DataConfig:
    """A folder made by `meristem data prepare` or `prepare-labelled`, and the order of its windows or rows."""

    path: str = "data"
    seed: int = 0
    class_weights: ClassWeights = "none"  # of a classifier's loss; balanced: classes count alike, whatever their rows


@dataclass(frozen=True)
class TrainConfig:
    """Length and batch of the run, and where it runs."""

    steps: int = 1000
    batch_size: int = 32  # sequences per update, over all processes
    micro_batch: int | None = None  # sequences per forward pass and process; all at once if not given
    seed: int = 0  # initial weights
    device: str = "auto"
    compile: bool | None = None  # on a GPU if not given
    attention: Attention = "auto"
    max_skipped: int = 10  # updates with non-finite loss or gradient in a row that are taken for divergence
    on_divergence: OnDivergence = "stop"  # or rewind: go back to the last good checkpoint and pass over these batches
    max_rewinds: int = 3  # times that is done before the run stops


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 6e-4
    warmup: float = 0.025  # fraction of the run
    final: float = 0.1  # last learning rate, as a fraction of lr
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    clip: float = 1.0  # gradient norm; 0 turns clipping off

    def __post_init__(self) -> None:
        for name in ("warmup", "final", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"optimizer.{name}", getattr(self, name), "must be from 0 to 1")
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                raise InputError(f"optimizer.{name}", 1.0, "must be below 1, or nothing is ever learned")
        for name in ("lr", "eps", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"optimizer.{name}", getattr(self, name), "must be 0 or above, and finite")


@dataclass(frozen=True)
class GrowthConfig:
    """What grows during training: extra depth (`policy = "sgt"`, all the rest of this section) or heads (`policy =
    "incrt"`, see the section of that name); and the record of head entropies (`observe`).

    With SGT the structure is fixed from the start where `layers` are named, or taken over from another run, `like`.
    """

    policy: GrowthPolicy = "none"  # or sgt, or incrt
    unit: Unit = "head"  # what is run again: some heads of a layer, or the whole block (then fixed from the start)
    passes: int = Sgt.passes  # extra passes of a layer at most
    heads: LoopedHeads = "high"  # which heads: of high or low entropy, random, or all
    heads_per_layer: int = Sgt.heads_per_layer
    layers: tuple[int, ...] = ()  # none named: layers grow
    max_layers: int = Sgt.max_layers
    shortlist: int = Sgt.shortlist  # layers of highest entropy that may grow
    excluded: tuple[int, ...] = Sgt.excluded  # layers that never grow
    order: GrowthOrder = "deep_first"  # or shallow_first
    start: float = Sgt.start  # first decision: part of the run below 1, updates from 1 on
    window: float = Sgt.window  # between decisions, and until a new pass is at full strength
    beta: float = Sgt.beta  # memory of the entropies' average
    birth: Birth = "gate"  # or paper: all heads at once, those not chosen fade
    train_gates: bool = Sgt.train_gates
    seed: int = Sgt.seed  # of random heads
    like: str | None = None  # a run whose grown layers and heads are taken from the start
    observe: bool = False  # record the entropy of every head
    observe_every: int = 0  # updates; a hundredth of the run if 0
    probe: Probe = "rows"  # how entropy is measured: on some rows of a sequence, or fused on its last half
    rows: int = 16
    sequences: int = Sgt.sequences  # of a batch, on which entropy is measured

    def __post_init__(self) -> None:
        for name, allowed in (("policy", ("none", "sgt", "incrt")), ("unit", ("head", "block"))):
            if getattr(self, name) not in allowed:
                raise InputError(f"growth.{name}", getattr(self, name), f"must be one of {', '.join(allowed)}")
        if len(set(self.layers)) < len(self.layers):
            raise InputError("growth.layers", self.layers, "must be distinct")
        if self.probe not in FORMS:
            raise InputError("growth.probe", self.probe, f"must be one of {', '.join(FORMS)}")
        for name in ("rows", "sequences"):
            if getattr(self, name) < 1:
                raise InputError(f"growth.{name}", getattr(self, name), "must be at least 1")
        if self.observe_every < 0:
            raise InputError("growth.observe_every", self.observe_every, "must be 0 or above")
        if self.layers and self.like is not None:
            raise InputError("growth.like", self.like, "cannot be given together with growth.layers")
        if self.unit == "block" and not self.is_static:
            expected = "runs from the first step on; name growth.layers, or a run in growth.like"
            raise InputError("growth.unit", self.unit, expected)
        if self.unit == "head" and self.layers and self.heads in ("high", "low"):
            raise InputError(
                "growth.heads", self.heads,
                "needs entropies, which a run has not got yet; use random or all, or name a run in growth.like",
            )  # fmt: skip
        if self.policy != "sgt" and (self.is_static or self.unit == "block"):
            raise InputError("growth.policy", self.policy, "must be sgt for growth.layers, growth.like or growth.unit")
        if self.start < 1 and self.window < 1 < self.start + self.window:
            expected = f"together with growth.window = {self.window} is more than the run"
            raise InputError("growth.start", self.start, expected)
        self.sgt()  # refuses bad values; whether there is time to grow is seen when the run's length is known
        _refuse_idle("growth", self, self._idle)

    @property
    def is_static(self) -> bool:
        """Whether what is run again is there from the start."""
        return bool(self.layers) or self.like is not None

    @property
    def _idle(self) -> dict[str, str]:
        """Settings that the others leave nothing to do, and why."""
        idle = {} if self.observe else {"observe_every": "without growth.observe"}
        if self.layers:
            choosing = ("max_layers", "shortlist", "excluded", "order")
            idle |= dict.fromkeys(choosing, "with growth.layers, which are chosen already")
        if self.layers or self.like is not None:
            growing = ("start", "window", "beta", "birth")
            idle |= dict.fromkeys(growing, "with growth.layers or growth.like: nothing is born during the run")
        if self.unit == "block":
            of_heads = ("heads", "train_gates", *(("heads_per_layer",) if self.layers else ()))
            idle |= dict.fromkeys(of_heads, "with growth.unit = 'block', which runs all heads")
        return idle

    def sgt(self, steps: int = ENDLESS) -> Sgt:
        """The SGT policy that the section describes, for a run of so many updates."""
        try:
            names = {entry.name for entry in fields(Sgt)} - {"total_steps"}
            settings: dict[str, Any] = {name: getattr(self, name) for name in names}
            return Sgt(total_steps=steps, **settings)
        except InputError as error:
            raise in_growth(error) from None


OF_DEMAND = ("calibration", "cool_down", "warm_up", "certainty", "steady", "plateau", "hits", "feeds")
OF_PRUNING = ("grace", "redundant", "tolerance")


@dataclass(frozen=True)
class IncrtConfig:
    """Heads that are born and leave during training (`growth.policy = "incrt"`). Times are updates."""

    criterion: Criterion = "demand"  # of the task; or published, the heads' own energy; or random, births at random
    numerics: Numerics = "author"  # of the published criterion; or repaired
    births: int = 0  # at random times
    feed_every: int | None = None  # between two looks at what the task asks of attention; 5 if not given
    decide_every: int | None = None  # 50 if not given, by the published criterion at every feed (repaired: every tenth)
    calibration: int = Incrt.calibration  # updates at the start in which the demand without attention is measured
    cool_down: int = Incrt.cool_down  # between two changes, anywhere in the network
    warm_up: int = Incrt.warm_up  # before the first
    last_birth: float = 0.7  # no birth after this: part of the run up to 1, updates above
    max_heads: int = Incrt.max_heads  # of a layer; 0 for no limit
    certainty: float = Incrt.certainty  # standard errors above zero that a demand must have
    share: float | None = None  # of a layer's largest demand, below which no head is born; 0.03, as published 0.1
    steady: float = Incrt.steady  # of the demand before, below which it is falling by itself
    plateau: float = Incrt.plateau  # births wait while the loss falls by this share within a cool-down
    hits: int = Incrt.hits  # decisions in a row
    feeds: int = Incrt.feeds  # batches that a layer's gauge must have seen since the last change there
    prune: bool = True
    grace: int = 0  # before a head can leave; four times the cool-down if 0
    redundant: float = Prune.redundant  # a head whose own share of the output is below this may leave
    tolerance: float = Prune.tolerance  # of a rise of the loss without it, as a share
    seed: int = Incrt.seed

    def __post_init__(self) -> None:
        if not 0 < self.last_birth < math.inf:
            raise InputError("incrt.last_birth", self.last_birth, "must be above 0 and finite")
        if not self.certainty < math.inf:
            raise InputError("incrt.certainty", self.certainty, "must be a number below infinity")
        if self.criterion not in ("demand", "published", "random"):
            raise InputError("incrt.criterion", self.criterion, "must be one of demand, published, random")
        if self.births and self.criterion != "random":
            raise InputError("incrt.births", self.births, "is the number of births at random times: criterion = random")
        if self.criterion == "random" and not self.births:
            raise InputError("incrt.births", self.births, "must be at least 1 with incrt.criterion = 'random'")
        self.policies(ENDLESS)  # refuses bad values
        idle = {} if self.criterion == "published" else {"numerics": "without incrt.criterion = 'published'"}
        if not self.prune:
            idle |= dict.fromkeys(OF_PRUNING, "with incrt.prune = false")
        _refuse_idle("incrt", self, idle)

    def unused(self, policy: str) -> str:
        """A sentence about settings that were given although this policy, or the criterion, has no use for them."""
        names = {field.name for field in fields(self)}
        if policy == "incrt":
            used = {"demand": names, "published": {"share", "prune"}, "random": {"warm_up"}}[self.criterion]
            names = {*OF_DEMAND, *OF_PRUNING, "share", "prune"} - used
        given = [f"incrt.{field.name}" for field in fields(self) if field.name in names and _is_set(self, field.name)]
        reason = f"incrt.criterion = {self.criterion!r}" if policy == "incrt" else f"growth.policy = {policy!r}"
        return f"{', '.join(given)}: of no use with {reason}" if given else ""

    def policies(self, steps: int) -> list[Policy]:
        """The policies for a run of so many updates."""
        last = round(self.last_birth * steps if self.last_birth <= 1 else self.last_birth)
        times = {"feed_every": self.feed_every, "decide_every": self.decide_every}
        common: dict[str, Any] = {"last_birth": last, "max_heads": self.max_heads, "seed": self.seed, **_given(times)}
        share: dict[str, Any] = _given({"share": self.share})
        numerics: dict[str, Any] = {"numerics": self.numerics}
        try:
            check_numerics(self.numerics)  # also those that another criterion does not use
            if self.criterion == "published":
                return [Published(prune=self.prune, **share, **common, **numerics)]
            if self.criterion == "random":
                return [RandomBirths(self.births, warm_up=self.warm_up, **common)]
            demand = Incrt(
                calibration=self.calibration, cool_down=self.cool_down, warm_up=self.warm_up, **common,
                certainty=self.certainty, steady=self.steady, plateau=self.plateau, hits=self.hits, feeds=self.feeds,
                **share,
            )  # fmt: skip
            pruning = Prune(
                demand.decide_every, self.cool_down, self.grace or 4 * self.cool_down, self.redundant,
                tolerance=self.tolerance,
            )  # fmt: skip
            return [demand, pruning] if self.prune else [demand]
        except InputError as error:
            raise InputError(f"incrt.{error.field}", error.value, error.expected) from None


def _is_set(section: GrowthConfig | IncrtConfig, name: str) -> bool:
    """Whether a setting is other than if it were left out."""
    return getattr(section, name) != getattr(type(section), name)


def _refuse_idle(title: str, section: GrowthConfig | IncrtConfig, idle: Mapping[str, str]) -> None:
    """Refuse settings that others leave nothing to do, by name and with the reason."""
    for name, reason in idle.items():
        if _is_set(section, name):
            raise InputError(f"{title}.{name}", getattr(section, name), f"does nothing {reason}; leave it out")


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that are not left to the criterion."""
    return {name: value for name, value in settings.items() if value is not None}


def in_growth(error: InputError) -> InputError:
    """The error with its field named as it is in the configuration."""
    name = error.field if error.field.startswith("growth.") else f"growth.{error.field}"
    return InputError(name, error.value, error.expected)


@dataclass(frozen=True)
class EvalConfig:
    """What is measured during the run, on held-out windows or rows that never change."""

    every: int = 100  # steps; 0 evaluates at the end only
    windows: int = 64
    rows: int = 0  # of a classifier; 0 is all
    batch: int = 16


@dataclass(frozen=True)
class CheckpointConfig:
    """How often the state is saved, and how many of the newest are kept."""

    every: int = 500  # steps; 0 saves at the end only
    keep: int = 2


@dataclass(frozen=True)
class LogConfig:
    """How often metrics are written; trackers besides metrics.jsonl: tensorboard, trackio, wandb."""

    every: int = 10
    trackers: tuple[TrackerName, ...] = ()


@dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    incrt: IncrtConfig = field(default_factory=IncrtConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        minimums = {
            "train.steps": 1, "train.batch_size": 1, "train.max_skipped": 1, "train.max_rewinds": 1,
            "eval.every": 0, "eval.windows": 1,
            "eval.rows": 0, "eval.batch": 1, "checkpoint.every": 0, "checkpoint.keep": 1, "log.every": 1,
        }  # fmt: skip
        for name in ("model.shuffle_seed", "data.seed", "train.seed", "growth.seed", "incrt.seed"):
            if not 0 <= self[name] < 2**63:
                raise InputError(name, self[name], "must be from 0 to 2^63 - 1")
        for name, minimum in minimums.items():
            value = self[name]
            if value < minimum:
                raise InputError(name, value, f"must be at least {minimum}")
        for name in ("data.class_weights", "train.on_divergence"):
            _check_choice(name, self[name], _known_keys()[name])
        micro = self.train.micro_batch
        if micro is not None and (micro < 1 or self.train.batch_size % micro):
            raise InputError("train.micro_batch", micro, f"must divide train.batch_size = {self.train.batch_size}")
        for name in self.log.trackers:
            _check_choice("log.trackers", name, TrackerName)

    @property
    def policies(self) -> list[Policy]:
        """The policies of the run, in their order; those whose structure is there from the start are not among them."""
        growth, steps = self.growth, self.train.steps
        policies: list[Policy] = []
        if growth.observe:  # first, so that what is recorded is what the others decide from
            every = growth.observe_every or max(1, steps // 100)
            probing: dict[str, Any] = {"probe": growth.probe, "rows": growth.rows, "sequences": growth.sequences}
            policies.append(Observe(every, **probing))
        if growth.policy == "incrt":
            policies += self.incrt.policies(steps)
        elif growth.policy == "sgt" and not growth.is_static:
            policies.append(growth.sgt(steps))
        return policies

    def __getitem__(self, key: str) -> Any:
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def to_toml(self) -> str:
        """TOML text that reads back as the same configuration."""
        lines: list[str] = []
        for section in fields(self):
            lines.append(f"[{section.name}]")
            values = getattr(self, section.name)
            for entry in fields(values):
                value = getattr(values, entry.name)
                if value is not None:
                    lines.append(f"{entry.name} = {_toml_value(value)}")
            lines.append("")
        return "\n".join(lines)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply `--section.key value` overrides."""
    data = read_toml(Path(path))
    values: dict[str, Any] = {}
    sections = [entry.name for entry in fields(Config)]
    for section, entries in data.items():
        if not isinstance(entries, dict):
            raise InputError(section, entries, f"must stand in one of the sections {sections}")
        if section not in sections and not entries:  # one with keys is answered with the nearest key
            nearest = difflib.get_close_matches(section, sections, n=1, cutoff=0.0)[0]
            raise InputError(f"[{section}]", entries, f"unknown section; did you mean [{nearest}]?")
        values.update({f"{section}.{key}": value for key, value in entries.items()})
    return build_config({**values, **parse_overrides(overrides)})


def build_config(values: Mapping[str, Any]) -> Config:
    """A configuration from `section.key` values; what is not named keeps its default."""
    known = _known_keys()
    sections: dict[str, dict[str, Any]] = {entry.name: {} for entry in fields(Config)}
    for key, value in values.items():
        if key not in known:
            raise InputError(key, value, f"unknown key; did you mean {_nearest(key)}?")
        section, name = key.split(".")
        sections[section][name] = _convert(key, value, known[key])
    hints = get_type_hints(Config)
    return Config(**{name: hints[name](**entries) for name, entries in sections.items()})


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`--section.key value` or `--section.key=value` pairs; values are TOML, or else plain text."""
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, text = argument[2:].partition("=")
        if not argument.startswith("--") or "." not in key:
            named = _nearest(key) if argument.startswith("--") else "train.steps"
            raise InputError("argument", argument, f"expected --section.key value; did you mean --{named}?")
        if not equals:
            if not rest:
                raise InputError(key, None, "needs a value")
            text = rest.pop(0)
        values[key] = _parse_text(key, text)
    return values


def override(config: Config, arguments: Sequence[str]) -> Config:
    """The configuration with `--section.key value` overrides applied."""
    return build_config({**flatten(config), **parse_overrides(arguments)})


def check_resumable(config: Config, changed: Config) -> None:
    """Refuse a change of anything that the result of a run depends on."""
    for key in _known_keys():
        if key not in RESUMABLE and changed[key] != config[key]:
            raise InputError(
                key, changed[key],
                f"the run began with {config[key]!r}; when it is resumed, only {', '.join(RESUMABLE)} can change",
            )  # fmt: skip


def flatten(config: Config) -> dict[str, Any]:
    """All values as `section.key`, those that are not given left out."""
    return {key: value for key, value in known_values(config).items() if value is not None}


def known_values(config: Config) -> dict[str, Any]:
    """All values as `section.key`."""
    return {key: config[key] for key in _known_keys()}


def _known_keys() -> dict[str, Any]:
    """Every `section.key` with its type."""
    return {
        f"{section}.{name}": kind
        for section, hint in get_type_hints(Config).items()
        for name, kind in get_type_hints(hint).items()
    }


class Setting(NamedTuple):
    """A key of the configuration as `--help` lists it: what it takes, and its value if it is not given."""

    key: str
    takes: str
    default: str


def all_settings() -> list[Setting]:
    """Every setting of a configuration, section by section."""
    defaults = Config()
    return [Setting(key, _kind_text(kind), _default_text(defaults[key])) for key, kind in _known_keys().items()]


def _kind_text(kind: Any) -> str:
    """What a setting takes, in a word, or the words that it can be."""
    if get_origin(kind) in (Union, types.UnionType):
        return _kind_text(next(k for k in get_args(kind) if k is not type(None)))
    if get_origin(kind) is tuple:
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


def _nearest(key: str) -> str:
    known = list(_known_keys())
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    same_name = [k for k in known if k.split(".")[1] == key.split(".")[-1]]
    return (same_name or close)[0]


def _parse_text(key: str, text: str) -> Any:
    kind = _known_keys().get(key)
    if kind in (str, str | None) or get_origin(kind) is Literal:
        return text
    if get_origin(kind) is tuple and not text.startswith("["):
        text = f"[{text}]" if text else "[]"
        if get_args(kind)[0] is not int:  # words
            text = json.dumps([part.strip() for part in text[1:-1].split(",") if part.strip()])
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # integers of thousands of digits are a ValueError
        return text


def _convert(key: str, value: Any, kind: Any) -> Any:
    """The value as the type of its field, or an error that says which type that is."""
    if get_origin(kind) in (Union, types.UnionType):
        options = [k for k in get_args(kind) if k is not type(None)]
        return _convert(key, value, options[0])
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        simple = int if inner is int else str
        if isinstance(value, (list, tuple)) and all(type(v) is simple for v in value):
            return tuple(_convert(key, entry, inner) for entry in value)
        raise InputError(key, value, f"must be a list of {simple.__name__}")
    if get_origin(kind) is Literal:
        return _check_choice(key, value, kind)
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < LARGEST else math.inf
    if type(value) is not kind:
        raise InputError(key, value, f"must be of type {kind.__name__}")
    if kind is int and abs(value) >= LARGEST:
        raise InputError(key, value, "must be below 2^63")
    return value


def _check_choice(key: str, value: Any, kind: Any) -> Any:
    """The value, if it is one of the words of a `Literal` type."""
    if value not in get_args(kind):
        raise InputError(key, value, f"must be one of {', '.join(get_args(kind))}")
    return value


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)  # strings, integers and booleans are written alike in JSON and TOML
