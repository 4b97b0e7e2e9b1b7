"""Configurations: TOML, overrides, errors that say what would be right, and the copy that a run keeps."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, asdict, fields
from pathlib import Path
from typing import Any

import pytest

from meristem.config import (
    Config,
    IncrtConfig,
    TrainConfig,
    build_config,
    flatten,
    load_config,
    parse_overrides,
)
from meristem.errors import InputError, RunError
from meristem.growth import Sgt
from meristem.runs.folder import RunFolder
from meristem.training.loop import train
from training.helpers import tiny_config

# Every field away from its default, and text that needs care in TOML.
UNUSUAL: dict[str, Any] = {
    "model.layers": 3, "model.width": 96, "model.heads": 6, "model.schedule": "shuffle", "model.head_list": [2, 3],
    "model.dims": [48, 32], "model.shuffle_seed": 5, "model.kv_group": 2, "model.context": 77,
    "model.feed_forward": 80, "model.plan": 'a "plan".json', "data.path": "C:\\data\tnaïve", "data.seed": 7,
    "model.head_dim": 24, "model.pooling": "first", "data.class_weights": "balanced", "eval.rows": 9,
    "train.steps": 31, "train.batch_size": 6, "train.micro_batch": 3, "train.seed": 8, "train.device": "cuda:3",
    "train.compile": False, "train.attention": "math", "train.max_skipped": 4, "train.on_divergence": "rewind",
    "train.max_rewinds": 2, "optimizer.lr": 1e-5,
    "optimizer.warmup": 0.1, "optimizer.final": 0.0, "optimizer.beta1": 0.8, "optimizer.beta2": 0.99,
    "optimizer.eps": 1e-9, "optimizer.weight_decay": 0.01, "optimizer.clip": 0.0, "eval.every": 0,
    "eval.windows": 2, "eval.batch": 1, "checkpoint.every": 0, "checkpoint.keep": 9, "log.every": 2,
    "log.trackers": ["wandb", "tensorboard"], "growth.policy": "sgt", "growth.unit": "block", "growth.passes": 2,
    "growth.heads": "low", "growth.heads_per_layer": 3, "growth.layers": [4, 2], "growth.max_layers": 2,
    "growth.shortlist": 5, "growth.excluded": [0, 1], "growth.order": "shallow_first", "growth.start": 0.1,
    "growth.window": 20.0, "growth.beta": 0.9, "growth.birth": "paper", "growth.train_gates": False, "growth.seed": 3,
    "growth.observe": True, "growth.observe_every": 7, "growth.probe": "fused", "growth.rows": 4,
    "growth.like": "run", "incrt.criterion": "random", "incrt.numerics": "repaired",
    "incrt.births": 2, "incrt.feed_every": 3, "incrt.decide_every": 20, "incrt.calibration": 9,
    "incrt.cool_down": 90, "incrt.warm_up": 70, "incrt.last_birth": 0.5, "incrt.max_heads": 7,
    "incrt.certainty": 3.0, "incrt.feeds": 5, "incrt.share": 0.2, "incrt.steady": 0.7, "incrt.plateau": 0.3,
    "incrt.hits": 3, "incrt.prune": False, "incrt.grace": 50, "incrt.redundant": 0.01, "incrt.tolerance": 0.02,
    "incrt.seed": 4,
}  # fmt: skip


def saved(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


# What may be given together: a structure that grows, one like another run's, and blocks of named layers.
APART = ("growth.unit", "growth.layers", "growth.like", "incrt.numerics", "incrt.prune")
GROWS = {k: v for k, v in UNUSUAL.items() if k not in APART}
OTHERS: tuple[dict[str, Any], ...] = (
    {"growth.policy": "sgt", "growth.like": UNUSUAL["growth.like"], "growth.order": UNUSUAL["growth.order"]},
    {"growth.policy": "sgt", "growth.unit": UNUSUAL["growth.unit"], "growth.layers": UNUSUAL["growth.layers"]},
    {"incrt.criterion": "published", "incrt.numerics": UNUSUAL["incrt.numerics"]},
    {"incrt.prune": UNUSUAL["incrt.prune"]},
)


def test_every_field_comes_back_through_toml(tmp_path: Path) -> None:
    default = Config()
    assert set(UNUSUAL) == {f"{s.name}.{e.name}" for s in fields(Config) for e in fields(getattr(default, s.name))}
    assert set(UNUSUAL) == set(GROWS).union(*OTHERS)
    for values in (GROWS, *OTHERS):
        config = build_config(values)
        assert all(config[key] != default[key] for key in values)
        assert load_config(saved(tmp_path, config.to_toml())) == config
    assert load_config(saved(tmp_path, default.to_toml())) == default


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"numerics": "repaired"}, "incrt.numerics = 'repaired': does nothing without incrt.criterion = 'published'"),
        ({"prune": False, "grace": 5}, "incrt.grace = 5: does nothing with incrt.prune = false"),
        ({"criterion": "random"}, "incrt.births = 0: must be at least 1"),
        ({"criterion": "random", "births": 1, "warm_up": -1}, "incrt.warm_up = -1"),
        ({"last_birth": math.inf}, "incrt.last_birth = inf"),
        ({"certainty": math.inf}, "incrt.certainty = inf"),
    ],
)
def test_settings_of_heads_that_do_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build_config({f"incrt.{name}": value for name, value in given.items()})
    assert message in str(caught.value)


def test_what_another_criterion_does_not_use_is_known_and_its_intervals_are_its_own() -> None:
    given: dict[str, Any] = {"cool_down": 7, "warm_up": 8, "grace": 9, "share": 0.5}
    arms: tuple[tuple[dict[str, Any], list[str]], ...] = (
        ({"criterion": "demand"}, []),
        ({"criterion": "published", "numerics": "repaired"}, ["cool_down", "warm_up", "grace"]),
        ({"criterion": "random", "births": 1}, ["cool_down", "share", "grace"]),
    )
    for criterion, unused in arms:
        config = IncrtConfig(**given, **criterion)
        named = f"{', '.join(f'incrt.{name}' for name in unused)}: of no use with incrt.criterion = "
        assert config.unused("incrt") == (f"{named}{config.criterion!r}" if unused else "")
        assert "incrt.cool_down, incrt.warm_up, incrt.share, incrt.grace: of no use with growth.policy" in (
            IncrtConfig(**given).unused("none")
        )
    assert IncrtConfig().unused("none") == ""
    policies = [IncrtConfig(criterion="published", numerics=name).policies(100)[0] for name in ("author", "repaired")]
    assert [getattr(policy, "decide_every", None) for policy in policies] == [5, 50]


@pytest.mark.parametrize(
    ("given", "idle", "reason"),
    [
        ({}, ["observe_every"], "without growth.observe"),
        ({"like": "run"}, ["start", "window", "beta", "birth"], "with growth.layers or growth.like"),
        ({"layers": [4], "heads": "random"}, ["start", "window", "beta", "birth"], "with growth.layers or growth.like"),
        ({"layers": [4], "heads": "random"}, ["order", "shortlist", "max_layers", "excluded"], "with growth.layers,"),
        ({"like": "run", "unit": "block"}, ["heads", "train_gates"], "with growth.unit = 'block'"),
        ({"layers": [4], "unit": "block"}, ["heads", "train_gates", "heads_per_layer"], "with growth.unit = 'block'"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(given: dict[str, Any], idle: list[str], reason: str) -> None:
    values = {"growth.policy": "sgt", **{f"growth.{name}": value for name, value in given.items()}}
    build_config(values)
    for name in (f"growth.{name}" for name in idle):
        with pytest.raises(InputError) as error:
            build_config({**values, name: UNUSUAL[name]})
        assert error.value.field == name
        assert error.value.expected.startswith(f"does nothing {reason}")


def test_a_run_keeps_the_resolved_configuration(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data.parent)
    path = saved(tmp_path, tiny_config(Path("data"), train__steps=9).to_toml())
    resolved = load_config(path, ["--train.steps", "1", "--log.every=3"])
    train(resolved, tmp_path / "run")
    stored = RunFolder.open(tmp_path / "run").config
    assert stored == tiny_config(data.resolve(), train__steps=1, log__every=3)


def test_configurations_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        TrainConfig().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = 1.5", r"train\.steps = 1\.5: must be of type int"),
        ("[train]\nsteps = true", r"train\.steps = True: must be of type int"),
        ("[train]\nsteps = 0", r"train\.steps = 0: must be at least 1"),
        ("[train]\nstep = 3", r"train\.step = 3: unknown key; did you mean train\.steps\?"),
        ("[trian]\nbatch_size = 3", r"trian\.batch_size = 3: unknown key; did you mean train\.batch_size\?"),
        ("[optimiser]\n", r"\[optimiser\] = \{\}: unknown section; did you mean \[optimizer\]\?"),
        ("[train]\nseed = -1", r"train\.seed = -1: must be from 0"),
        ("[optimiser]\nlr = 1.0", r"optimiser\.lr = 1\.0: unknown key; did you mean optimizer\.lr\?"),
        ("steps = 3", r"steps = 3: must stand in one of the sections \['model'"),
        ("[model]\ndims = 3", r"model\.dims = 3: must be a list of int"),
        ("[model]\ndims = ['a']", r"model\.dims = \['a'\]: must be a list of int"),
        ("[train]\nbatch_size = 6\nmicro_batch = 4", r"train\.micro_batch = 4: must divide train\.batch_size = 6"),
        ("[optimizer]\nlr = -1", r"optimizer\.lr = -1\.0: must be 0 or above"),
        ("[optimizer]\nwarmup = nan", r"optimizer\.warmup = nan: must be from 0"),
        ("[checkpoint]\nkeep = 0", r"checkpoint\.keep = 0: must be at least 1"),
        # Growth is checked as a whole whether anything grows or not.
        ("[growth]\nbeta = 1.0", r"growth\.beta = 1\.0: must be from 0 to below 1"),
        ("[growth]\nstart = 1.5", r"growth\.start = 1\.5: must be a part of the run .*, or whole updates"),
        ("[growth]\nwindow = 0", r"growth\.window = 0\.0: must be a part of the run above 0 and below 1"),
        (
            "[growth]\nstart = 0.99",
            r"growth\.start = 0\.99: together with growth\.window = 0\.05 is more than the run",
        ),
        ("[growth]\npasses = 0", r"growth\.passes = 0: must be an integer of at least 1"),
        ("[growth]\nheads = 'most'", r"growth\.heads = 'most': must be one of high, low, random, all"),
        ("[growth]\nbirth = 'paper'\nheads = 'all'", r"growth\.birth = 'paper': .*leaves none"),
        (
            "[growth]\npolicy = 'sgt'\nheads = 'all'\nlayers = [1, 2, 1]",
            r"growth\.layers = \(1, 2, 1\): must be distinct",
        ),
        (
            "[log]\ntrackers = ['tensorbord']",
            r"log\.trackers = 'tensorbord': must be one of tensorboard, tra",
        ),
    ],
)
def test_a_bad_value_is_named_with_what_is_right(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_config(saved(tmp_path, text))


def test_overrides_replace_what_the_file_says(tmp_path: Path) -> None:
    path = saved(tmp_path, "[train]\nsteps = 5\nseed = 3\n")
    arguments = [
        "--train.steps", "7", "--optimizer.lr=1e-4", "--model.dims", "64,32", "--log.trackers", "wandb,trackio",
        "--data.path", "some/where", "--train.compile", "false",
    ]  # fmt: skip
    config = load_config(path, arguments)
    expected = {
        "train.steps": 7, "train.seed": 3, "optimizer.lr": 1e-4, "model.dims": [64, 32],
        "log.trackers": ["wandb", "trackio"], "data.path": "some/where", "train.compile": False,
    }  # fmt: skip
    assert config == build_config(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], r"argument = '--steps': expected --section\.key value"),
        (["train.steps=3"], r"argument = 'train\.steps=3': expected --section\.key value"),
        (["--train.steps"], r"train\.steps = None: needs a value"),
    ],
)
def test_an_override_that_cannot_be_read_is_an_error(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_overrides(arguments)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none\.toml: cannot be read"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(RunError, match=r"config\.toml: not a TOML file"):
        load_config(saved(tmp_path, "[train\n"))


def test_flattening_leaves_out_what_is_not_given() -> None:
    flat = flatten(Config())
    assert "train.micro_batch" not in flat
    assert flat["train.steps"] == Config().train.steps
    assert build_config(flat) == Config()


def test_the_model_section_builds_the_plan(tmp_path: Path) -> None:
    listed = build_config({"model.width": 64, "model.head_list": [2, 4, 4], "model.kv_group": 2}).model.build(320)
    assert (listed.heads, listed.kv_heads, listed.vocabulary) == ((2, 4, 4), (1, 2, 2), 320)
    path = tmp_path / "plan.json"
    path.write_text(listed.to_json(), encoding="utf-8")
    from_file = build_config({"model.plan": str(path)})
    assert from_file.model.build(320) == listed
    with pytest.raises(InputError, match=r"model\.plan = 320: vocabulary is smaller than the data's 384"):
        from_file.model.build(384)


def test_text_on_the_command_line_stays_text() -> None:
    """A folder may be called 2024, or true."""
    assert parse_overrides(["--data.path", "2024", "--model.plan=true"]) == {"data.path": "2024", "model.plan": "true"}
    assert parse_overrides(["--train.steps", "2024"]) == {"train.steps": 2024}


def test_defaults_of_growth_are_those_of_the_policy() -> None:
    policy = Config().growth.sgt(1000)
    assert policy == Sgt(total_steps=1000)
    changed = build_config(GROWS)
    values = asdict(changed.growth.sgt(500))
    assert values.pop("total_steps") == 500
    assert values == {name: changed[f"growth.{name}"] for name in values}


def test_a_run_of_any_length_may_be_written_down() -> None:
    """Whether it is long enough to grow is known when it begins."""
    assert build_config({"train.steps": 3, "growth.policy": "sgt"}).growth.start == 0.05
    with pytest.raises(InputError, match=r"growth\.start = 0\.05: leaves no time to grow"):
        build_config({"growth.policy": "sgt"}).growth.sgt(3)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe[train]")
    with pytest.raises(RunError, match=r"config\.toml: not a UTF-8 text file"):
        load_config(path)
