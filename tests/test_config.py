"""Configurations: TOML, overrides, errors that say what would be right, and the copy that a run keeps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from commands import Call
from meristem.config import (
    Config,
    TrainConfig,
    all_settings,
    build_config,
    check_resumable,
    flatten,
    load_config,
    override,
    parse_overrides,
)
from meristem.errors import InputError, RunError
from meristem.growth import (
    BlockLoop,
    Incrt,
    Observe,
    Policy,
    Prune,
    Published,
    RandomBirths,
    Sgt,
    Stack,
    StaticLoops,
)
from meristem.growth.policies import POLICIES
from meristem.runs.run_folder import RunFolder
from meristem.training.train import train
from training.helpers import tiny_config

OLD = Path(__file__).parent / "fixtures" / "runs-2026-11-16"
# Every field away from its default, and text that needs care in TOML.
UNUSUAL: dict[str, Any] = {
    "model.layers": 3, "model.width": 96, "model.heads": 6, "model.schedule": "shuffle", "model.head_list": [2, 3],
    "model.dims": [48, 32], "model.shuffle_seed": 5, "model.kv_group": 2, "model.context": 77,
    "model.feed_forward": 80, "model.plan": 'a "plan".json', "data.path": "C:\\data\tnaïve", "data.seed": 7,
    "model.head_dim": 24, "model.pooling": "first", "model.qk_norm": True, "model.start_from": "runs/other",
    "data.class_weights": "balanced", "eval.rows": 9,
    "train.steps": 31, "train.flops": 1e12, "train.batch_size": 6, "train.micro_batch": 3, "train.seed": 8,
    "train.device": "cuda:3",
    "train.compile": True, "train.attention": "math", "train.max_skipped": 4, "train.on_divergence": "rewind",
    "train.max_rewinds": 2, "train.branch_from": 'a "trunk"@at@12', "growth.steps": 50, "train.average": 0.99,
    "train.recompute": True, "train.parallel": "fsdp", "optimizer.kind": "muon", "optimizer.lr": 1e-5,
    "optimizer.curve": "wsd", "optimizer.decay": 0.3, "optimizer.momentum": 0.9,
    "optimizer.warmup": 0.1, "optimizer.final": 0.0, "optimizer.beta1": 0.8, "optimizer.beta2": 0.99,
    "optimizer.eps": 1e-9, "optimizer.weight_decay": 0.01, "optimizer.clip": 0.0, "eval.every": 3,
    "data.held_back": 3, "eval.windows": 2, "eval.batch": 1, "eval.best_by": "accuracy", "eval.patience": 4,
    "checkpoint.every": 0,
    "checkpoint.keep": 9, "checkpoint.keep_best": True, "log.every": 2,
    "log.trackers": ["wandb", "tensorboard"], "growth.policies": ["prune", "stack"],
}  # fmt: skip
# The same of every policy.
BIRTHS: dict[str, Any] = {
    "start_heads": 2, "decide_every": 21, "last_birth": 0.5, "max_heads": 7, "seed": 4,
}  # fmt: skip
LOOPED: dict[str, Any] = {
    "heads_per_layer": 3, "max_layers": 2, "shortlist": 5, "excluded": [0, 1], "order": "shallow_first",
}  # fmt: skip
TABLES: dict[str, dict[str, Any]] = {
    "stack": {"start_layers": 3, "layers": 6, "at": [0.3, 600.0], "order": "interleave"},
    "depth": {"start_layers": 2, "promise": 0.1},
    "incrt": {
        **BIRTHS, "feed_every": 3, "calibration": 9, "cool_down": 90, "warm_up": 70, "certainty": 3.0, "share": 0.2,
        "steady": 0.7, "plateau": 0.3, "hits": 3, "feeds": 5, "hold_back": 0.1, "budget": "heads=9",
    },
    "prune": {
        "decide_every": 20, "cool_down": 90, "grace": 50, "redundant": 0.01, "patience": 2, "tolerance": 0.02,
        "sequences": 33,
    },
    "published": {
        **BIRTHS, "feed_every": 3, "numerics": "repaired", "share": 0.2, "lower_share": 0.4, "complexity": 3.0,
        "accuracy": 0.1, "prune": False, "quiet_share": 0.02, "patience": 50,
    },
    "random_births": {**BIRTHS, "births": 2, "warm_up": 70},
    "sgt": {
        **LOOPED, "passes": 2, "start": 0.1, "window": 20.0, "beta": 0.9, "heads": "low", "birth": "paper",
        "train_gates": False, "seed": 3, "probe": "fused", "rows": 4, "sequences": 3,
    },
    "static_loops": {**LOOPED, "like": "run", "passes": 2, "heads": "low", "train_gates": False, "seed": 3},
    "block_loop": {**LOOPED, "like": "run", "times": 2},
    "observe": {"every": 7, "probe": "fused", "rows": 4, "sequences": 3},
}  # fmt: skip
NAMED: dict[str, dict[str, Any]] = {
    "static_loops": {"layers": [4, 2], "heads": "all"},
    "block_loop": {"layers": [4, 2]},
}
APART = {**NAMED, "depth": {"layers": 4}}  # settings that cannot stand beside those of TABLES


def saved(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def policies(*names: str, **tables: dict[str, Any]) -> dict[str, Any]:
    """Values of the growth section."""
    keys = {f"growth.{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
    return {"growth.policies": [*names], **keys}


# --- there and back --------------------------------------------------------------------------------------------------


def test_every_field_comes_back_through_toml(tmp_path: Path) -> None:
    default = Config()
    plain = {f"{s.name}.{e.name}" for s in fields(Config) for e in fields(getattr(default, s.name))}
    assert set(UNUSUAL) == plain - {"growth.tables"}
    for other in ("train.flops", "train.branch_from"):  # which do not go together
        given = {key: value for key, value in UNUSUAL.items() if key != other}
        config = build_config(given)
        assert all(config[key] != default[key] for key in given)
        assert load_config(saved(tmp_path, config.to_toml())) == config
    assert load_config(saved(tmp_path, default.to_toml())) == default


@pytest.mark.parametrize("name", POLICIES)
def test_every_setting_of_a_policy_comes_back_through_toml(name: str, tmp_path: Path) -> None:
    known = {entry.name: entry for entry in fields(POLICIES[name]) if entry.name != "total_steps"}
    assert {*TABLES[name], *APART.get(name, {})} == known.keys()
    for table in (TABLES[name], *(APART[name] for _ in range(name in APART))):
        config = build_config(policies(name, **{name: table}))
        assert load_config(saved(tmp_path, config.to_toml())) == config
        for key, value in table.items():
            given = tuple(value) if isinstance(value, list) else value
            assert config[f"growth.{name}.{key}"] == given != known[key].default
            assert getattr(config.policy(name), key) == given
        assert build_config(flatten(config)) == override(config, []) == config
        whole = {entry for entry, value in config.growth.settings(name).items() if value is not None}
        assert config.growth.tables[name].keys() == whole  # defaults may change, a run's own settings do not


def test_a_table_without_settings_is_as_good_as_none(tmp_path: Path) -> None:
    config = load_config(saved(tmp_path, "[growth]\npolicies = ['sgt', 'm:Own']\n[growth.observe]\n[growth.own]"))
    assert config == build_config(policies("sgt", "m:Own"))


def test_all_policies_are_built_in_their_order_for_the_length_of_the_run() -> None:
    names = ["observe", "stack", "incrt", "prune", "sgt"]
    tables = {name: TABLES[name] for name in names if name != "observe"}
    config = build_config({"train.steps": 1000, **policies(*names, **tables)})
    built = config.build_policies()
    assert [policy.title for policy in built] == names
    assert [getattr(policy, "total_steps", None) for policy in built] == [1000, 1000, 1000, None, 1000]
    assert built[1] == Stack(1000, start_layers=3, at=(0.3, 600.0), order="interleave", layers=6)
    assert config.policy("published") is None
    assert config.growth.has("published", "sgt")
    assert not config.growth.has("published")


@pytest.mark.parametrize("name", POLICIES)
def test_defaults_are_those_of_the_policy(name: str) -> None:
    required: dict[str, dict[str, Any]] = {"random_births": {"births": 2}, **NAMED}
    needed = required.get(name, {})
    config = build_config(policies(name, **({name: needed} if needed else {})))
    length = {"total_steps": 1000} if name != "prune" and not POLICIES[name].static else {}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in needed.items()}
    assert config.build_policies() == [POLICIES[name](**given, **length)]
    shown = {setting.key: setting.default for setting in all_settings()}
    assert shown["growth.sgt.excluded"] == "0"
    assert shown["growth.prune.grace"] == "not given"


def test_a_run_keeps_the_resolved_configuration(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data.parent)
    path = saved(tmp_path, tiny_config(Path("data"), train__steps=9).to_toml())
    resolved = load_config(path, ["--train.steps", "1", "--log.every=3", "--growth.policies", "observe"])
    train(resolved, tmp_path / "run")
    stored = RunFolder.open(tmp_path / "run").config
    assert stored == tiny_config(data.resolve(), train__steps=1, log__every=3, growth__policies=["observe"])


def test_configurations_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        TrainConfig().steps = 3  # type: ignore[misc]


def test_flattening_leaves_out_what_is_not_given() -> None:
    flat = flatten(Config())
    assert "train.micro_batch" not in flat
    assert flat["train.steps"] == Config().train.steps
    assert build_config(flat) == Config()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = 1.5", r"train\.steps = 1\.5: must be of type int"),
        ("[train]\nsteps = true", r"train\.steps = True: must be of type int"),
        ("[train]\nsteps = 0", r"train\.steps = 0: must be at least 1"),
        ("[train]\nstep = 3", r"train\.step = 3: unknown key; did you mean train\.steps\?"),
        ("[trian]\nbatch_size = 3", r"trian\.batch_size = 3: unknown key; did you mean train\.batch_size\?"),
        ("[trian]\nseed = 3", r"trian\.seed = 3: unknown key; did you mean train\.seed\?"),
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
        ("[log]\ntrackers = ['tensorbord']", r"log\.trackers = 'tensorbord': must be one of tensorboard, tra"),
        # Policies and their tables.
        ("[growth]\npolicies = 'sgt'", r"growth\.policies = 'sgt': must be a list of str"),
        ("[growth]\npolicies = ['sgd']", r"growth\.policies = 'sgd': unknown policy .*; did you mean sgt\?"),
        ("[growth]\npolicies = ['a b:C']", r"growth\.policies = 'a b:C': unknown policy .*; there are stack, depth"),
        ("[growth]\npolicies = ['sgt', 'sgt']", r"growth\.policies = 'sgt': must be named once"),
        ("[growth]\npolicies = ['a:Own', 'b:Own']", r"growth\.policies = 'b:Own': must be named once: .*growth\.own\]"),
        ("[growth]\npolicies = ['a:Sgt']", r"growth\.policies = 'a:Sgt': must be a class with another name"),
        ("[growth]\npolices = ['sgt']", r"growth\.polices = \['sgt'\]: unknown key; did you mean growth\.policies\?"),
        ("[growth]\nsgt = 3", r"growth\.sgt = 3: is a table of settings, \[growth\.sgt\]"),
        ("[growth.sgd]\npasses = 3", r"growth\.sgd\.passes = 3: unknown key; did you mean growth\.sgt\.passes\?"),
        ("[growth.prnue]\nseed = 3", r"growth\.prnue\.seed = 3: unknown key; did you mean growth\..*seed\?"),
        ("[growth.static_lops]\npasses = 3", r"did you mean growth\.static_loops\.passes\?"),
        ("[growth.sgt]\npases = 3", r"growth\.sgt\.pases = 3: unknown key; did you mean growth\.sgt\.passes\?"),
        ("[growth.random_births]\nbirth = 3", r"did you mean growth\.random_births\.births\?"),
        ("[growth.incrt]\nfed_every = 3", r"did you mean growth\.incrt\.feed_every\?"),
        ("[growth.incrt]\npasses = 3", r"did you mean growth\..*\.passes\?"),
        # Where nothing is like it, the error says what there is.
        ("[optimizer]\nxyz = 3", r"optimizer\.xyz = 3: unknown key; \[optimizer\] has kind, lr, .*momentum"),
        ("[foo]\nbar = 3", r"foo\.bar = 3: unknown key; there are \[model\], \[data\], .*\[log\]$"),
        ("[growth.foo]\nbar = 3", r"growth\.foo\.bar = 3: unknown key; there are \[growth\], \[growth\.stack\], "),
        ("[nonesuch]\n", r"\[nonesuch\] = \{\}: unknown section; there are \[model\], .*\[log\]$"),
        ("[incr]\n", r"\[incr\] = \{\}: unknown section; there are \[model\], .*\[log\]$"),
        ("[growth.depth]\nstart = 3", r"growth\.depth\.start = 3: .*did you mean growth\.depth\.start_layers\?"),
        ("[optimizer]\nrl = 3", r"optimizer\.rl = 3: unknown key; did you mean optimizer\.lr\?"),
        ("[optimizer]\nra = 3", r"optimizer\.ra = 3: unknown key; \[optimizer\] has kind, lr, "),
        ("[growth.incrtt]\n", r"\[growth\.incrtt\] = \{\}: unknown table; did you mean \[growth\.incrt\]\?"),
        ("[growth.sgt]\ntotal_steps = 3", r"growth\.sgt\.total_steps = 3: unknown key"),
        ("[growth.sgt.passes]\nx = 3", r"growth\.sgt\.passes = \{'x': 3\}: must be of type int"),
        # Tables are checked whether their policy is named or not.
        ("[growth.sgt]\nbeta = 1.0", r"growth\.sgt\.beta = 1\.0: must be from 0 to below 1"),
        ("[growth.sgt]\nstart = 1.5", r"growth\.sgt\.start = 1\.5: must be a part of the run .*, or whole updates"),
        ("[growth.sgt]\nwindow = 0", r"growth\.sgt\.window = 0\.0: must be a part of the run above 0 and below 1"),
        ("[growth.sgt]\nstart = 0.99", r"growth\.sgt\.start = 0\.99: leaves no time to grow"),
        ("[growth.sgt]\npasses = 0", r"growth\.sgt\.passes = 0: must be at least 1"),
        ("[growth.sgt]\npasses = 1.0", r"growth\.sgt\.passes = 1\.0: must be of type int"),
        ("[growth.sgt]\nheads = 'most'", r"growth\.sgt\.heads = 'most': must be one of high, low, random, all"),
        ("[growth.sgt]\nbirth = 'paper'\nheads = 'all'", r"growth\.sgt\.birth = 'paper': .*leaves none"),
        ("[growth.sgt]\nseed = -1\n[growth]\npolicies = ['sgt']", r"growth\.sgt\.seed = -1: must be at least 0"),
        ("[growth.sgt]\nrows = 0", r"growth\.sgt\.rows = 0"),
        ("[growth.observe]\nevery = -1", r"growth\.observe\.every = -1"),
        ("[growth.stack]\nat = 0.3", r"growth\.stack\.at = 0\.3: must be a list of float"),
        ("[growth.stack]\nat = [0.6, 0.3]", r"growth\.stack\.at = \(0\.6, 0\.3\): must be times that follow"),
        ("[growth.stack]\norder = 'both'", r"growth\.stack\.order = 'both': must be one of stack, interleave"),
        ("[growth.incrt]\nlast_birth = inf", r"growth\.incrt\.last_birth = inf: must be above 0 and finite"),
        ("[growth.incrt]\ncertainty = inf", r"growth\.incrt\.certainty = inf: must be a number below infinity"),
        ("[growth.incrt]\nstart_heads = -1", r"growth\.incrt\.start_heads = -1"),
        ("[growth.prune]\nredundant = 2", r"growth\.prune\.redundant = 2\.0: must be from 0 to 1"),
        ("[growth.published]\nnumerics = 'good'", r"growth\.published\.numerics = 'good': must be one of author, rep"),
        ("[growth.random_births]\nwarm_up = -1\nbirths = 1", r"growth\.random_births\.warm_up = -1"),
        ("[growth]\npolicies = ['random_births']", r"growth\.random_births\.births = None: must be given"),
        ("[growth]\npolicies = ['static_loops']", r"growth\.static_loops\.layers = \(\): must be named, or else a run"),
        ("[growth.static_loops]\nheads = 'all'\nlayers = [1, 1]", r"static_loops\.layers = \(1, 1\): must be distinct"),
        ("[growth.static_loops]\nlayers = [1]", r"growth\.static_loops\.heads = 'high': needs entropies"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_what_is_right(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_config(saved(tmp_path, text))


@pytest.mark.parametrize("key", ["max_layers", "shortlist", "excluded", "order"])
@pytest.mark.parametrize("name", NAMED)
def test_settings_that_named_layers_leave_nothing_to_do_are_refused(name: str, key: str) -> None:
    with pytest.raises(InputError) as error:
        build_config(policies(name, **{name: {**NAMED[name], key: TABLES[name][key]}}))
    assert error.value.field == f"growth.{name}.{key}"
    assert error.value.expected.startswith("does nothing with `layers`")


def test_a_table_of_a_policy_that_is_not_named_is_noted(data: Path, tmp_path: Path, call: Call) -> None:
    config = tiny_config(
        data, train__steps=1, growth__policies=["observe"], growth__sgt__passes=2, growth__prune__grace=3
    )
    said = call("train", saved(tmp_path, config.to_toml()), "--out", tmp_path / "run")
    assert said.code == 0, said.err
    assert "growth.sgt, growth.prune: of no use, as growth.policies does not name it" in said.out + said.err


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("sgt", {}, r"growth\.sgt\.start = 0\.05: leaves no time to grow: .* after 2 updates, .* the run has 40$"),
        ("sgt", {"start": 0.99}, r"growth\.sgt\.start = 0\.99: .* after 40 updates, .* the run has 40$"),
        ("sgt", {"window": 200.0}, r"growth\.sgt\.start = 0\.05: .* needs 200 to settle, and the run has 40$"),
        ("stack", {"at": [0.3, 600.0]}, r"growth\.stack\.at = 600\.0: must be before the end of the run, 40 updates"),
        ("stack", {"at": [0.3, 0.301]}, r"growth\.stack\.at = \(0\.3, 0\.301\): must be times that follow one another"),
        ("incrt", {}, r"growth\.incrt\.last_birth = 0\.7: leaves no time to grow: of 40 updates births end after 28, "),
        ("incrt", {"last_birth": 900.0}, r"growth\.incrt\.last_birth = 900\.0: .* births end after 40, .* after 100; "),
        ("random_births", {"births": 2}, r"births\.warm_up = 300: leaves no time for births: .* after 28 "),
        ("random_births", {"births": 2, "warm_up": 1, "decide_every": 28}, r"births = 2: must be at most 1, the "),
    ],
)  # fmt: skip
def test_times_are_checked_against_the_length_of_the_run_when_it_is_read(
    name: str, table: dict[str, Any], message: str
) -> None:
    given = policies(name, **{name: table} if table else {})
    with pytest.raises(InputError, match=message):
        build_config({"train.steps": 40, **given})


def test_a_table_without_use_may_be_of_a_longer_run() -> None:
    config = build_config({"train.steps": 40, **policies("observe", stack={"at": [600.0]}, incrt={"hits": 3})})
    assert config["growth.stack.at"] == (600.0,)
    with pytest.raises(InputError, match=r"growth\.sgt\.start = 0\.99: .* after 990 updates, .* the run has 1000$"):
        build_config({"growth.sgt.start": 0.99})  # which no run could have


def test_loops_need_time_after_the_last_stack() -> None:
    """They wait for it, then 16 readings of the entropy and a window follow."""
    tables: dict[str, dict[str, Any]] = {"stack": {"at": [60.0]}, "sgt": {"start": 5.0, "window": 20.0}}
    given = policies("stack", "sgt", **tables)
    build_config({"train.steps": 96, **given})
    with pytest.raises(InputError, match=r"growth\.stack\.at = 60\.0: leaves sgt no time to grow: .* needs 36 of 95"):
        build_config({"train.steps": 95, **given})


def test_a_key_that_did_nothing_is_passed_over_with_a_note() -> None:
    """Folders of runs that were written with it can still be read."""
    given = {**policies("random_births", random_births={"births": 2}), "growth.random_births.feed_every": 5}
    notes: list[str] = []
    assert build_config(given, notes.append) == build_config(policies("random_births", random_births={"births": 2}))
    assert notes == ["growth.random_births.feed_every: of no use, as nothing is measured for births at random times"]


@pytest.mark.parametrize(
    "names", [("incrt", "published"), ("random_births", "incrt"), ("static_loops", "sgt"), ("stack", "depth")]
)
def test_policies_that_answer_the_same_question_are_refused(names: tuple[str, str]) -> None:
    first, second = names
    message = rf"growth\.policies = '{second}': cannot stand beside {first}, which answers the same question"
    with pytest.raises(InputError, match=message):
        build_config(policies("observe", *names))


@pytest.mark.parametrize("name", NAMED)
def test_loops_from_the_start_beside_copies_of_blocks_are_refused(name: str) -> None:
    for copies in ("stack", "depth"):
        for names in ((name, copies), (copies, name)):
            with pytest.raises(InputError, match=rf"growth\.policies = '{name}': cannot stand beside {copies}"):
                build_config(policies(*names, **{name: NAMED[name]}))


def test_loops_that_wait_for_the_last_copy_are_refused_where_it_may_never_come() -> None:
    with pytest.raises(InputError, match=r"growth\.policies = 'sgt': cannot stand beside depth"):
        build_config(policies("depth", "sgt"))


@pytest.mark.parametrize("births", ["incrt", "published", "random_births"])
def test_loops_of_heads_that_are_not_there_at_the_start_are_refused(births: str) -> None:
    settings = {"births": 2} if births == "random_births" else {}
    tables = {"static_loops": NAMED["static_loops"], births: {**settings, "start_heads": 1}}
    message = rf"'static_loops': must stand behind {births}: growth\.{births}\.start_heads = 1 takes away the heads"
    with pytest.raises(InputError, match=message):
        build_config(policies("static_loops", births, **tables))
    build_config(policies(births, "static_loops", **tables))  # of the heads that there are
    build_config(policies("static_loops", births, **{**tables, births: {**settings, "start_heads": 0}}))
    build_config(policies("block_loop", births, **{**tables, "block_loop": NAMED["block_loop"]}))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none\.toml: cannot be read"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(RunError, match=r"config\.toml: not a TOML file"):
        load_config(saved(tmp_path, "[train\n"))
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe[train]")
    with pytest.raises(RunError, match=r"config\.toml: not a UTF-8 text file"):
        load_config(tmp_path / "config.toml")


def test_the_shape_beside_a_whole_plan_may_change_when_a_run_is_resumed() -> None:
    config = build_config({"model.start_from": "first", "model.layers": 4})
    check_resumable(config, build_config({"model.start_from": "first"}))
    with pytest.raises(InputError, match=r"model\.layers = 12: the run began with 4"):
        check_resumable(build_config({"model.layers": 4}), build_config({}))


def test_settings_of_growth_cannot_change_when_a_run_is_resumed() -> None:
    config = build_config(policies("prune", "static_loops", static_loops={"like": "run"}))
    check_resumable(config, override(config, ["--growth.static_loops.like", "moved", "--growth.incrt.hits", "3"]))
    for change, key in (
        ("--growth.prune.grace 4", "growth.prune.grace"),
        ("--growth.policies prune", "growth.policies"),
    ):
        with pytest.raises(InputError, match=rf"{key} = .*the run began with"):
            check_resumable(config, override(config, change.split()))


# --- overrides -------------------------------------------------------------------------------------------------------


def test_overrides_replace_what_the_file_says(tmp_path: Path) -> None:
    path = saved(tmp_path, "[train]\nsteps = 5\nseed = 3\n[growth]\npolicies = ['prune']\n[growth.sgt]\nbeta = 0.1")
    arguments = [
        "--train.steps", "70", "--optimizer.lr=1e-4", "--model.dims", "64,32", "--log.trackers", "wandb,trackio",
        "--data.path", "some/where", "--train.compile", "true", "--growth.policies", "stack, sgt",
        "--growth.stack.at", "0.3,0.6", "--growth.sgt.window", "20", "--growth.sgt.heads", "low",
        "--growth.sgt.excluded=", "--growth.prune.grace=5",
    ]  # fmt: skip
    config = load_config(path, arguments)
    expected = {
        "train.steps": 70, "train.seed": 3, "optimizer.lr": 1e-4, "model.dims": [64, 32],
        "log.trackers": ["wandb", "trackio"], "data.path": "some/where", "train.compile": True,
        **policies(
            "stack", "sgt", sgt={"beta": 0.1, "window": 20.0, "heads": "low", "excluded": []},
            stack={"at": [0.3, 0.6]}, prune={"grace": 5},
        ),
    }  # fmt: skip
    assert config == build_config(expected)
    assert load_config(path, ["--growth.policies", ""]).growth.policies == ()
    assert load_config(path, ["--growth.stack.at", "[0.5]"])["growth.stack.at"] == (0.5,)
    assert load_config(path, ["--growth.stack.at", "0.5"])["growth.stack.at"] == (0.5,)


def test_layers_that_were_not_given_were_zero_once(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    old = "[growth]\npolicies = ['stack']\n[growth.stack]\nstart_layers = 0\nlayers = 0\nat = [0.3]\n"
    path.write_text("[data]\npath = 'data'\n" + old)
    assert load_config(path).build_policies() == [Stack(1000, at=(0.3,))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], r"argument = '--steps': expected --section\.key value; did you mean --train\.steps\?"),
        (["--seed", "3"], r"argument = '--seed': expected --section\.key value; did you mean --train\.seed\?"),
        (["train.steps=3"], r"argument = 'train\.steps=3': expected --section\.key value"),
        (["--train.steps"], r"train\.steps = None: needs a value"),
    ],
)
def test_an_override_that_cannot_be_read_is_an_error(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_overrides(arguments)


def test_text_on_the_command_line_stays_text() -> None:
    """A folder may be called 2024, or true."""
    assert parse_overrides(["--data.path", "2024", "--model.plan=true"]) == {"data.path": "2024", "model.plan": "true"}
    assert parse_overrides(["--growth.static_loops.like", "7"]) == {"growth.static_loops.like": "7"}
    assert parse_overrides(["--train.steps", "2024"]) == {"train.steps": 2024}


def test_the_model_section_builds_the_plan(tmp_path: Path) -> None:
    listed = build_config({"model.width": 64, "model.head_list": [2, 4, 4], "model.kv_group": 2}).model.build(320)
    assert (listed.heads, listed.kv_heads, listed.vocabulary) == ((2, 4, 4), (1, 2, 2), 320)
    path = tmp_path / "plan.json"
    path.write_text(listed.to_json(), encoding="utf-8")
    from_file = build_config({"model.plan": str(path)})
    assert from_file.model.build(320) == listed
    with pytest.raises(InputError, match=r"model\.plan = 320: vocabulary is smaller than the data's 384"):
        from_file.model.build(384)


# --- policies of one's own -------------------------------------------------------------------------------------------

MODULE = """
from dataclasses import dataclass
from typing import Literal
from meristem.growth import Policy
{first}
@dataclass(frozen=True)
class Quiet(Policy):
    total_steps: int
    at: tuple = ()
    word: str = "a"
    every: int = 20
    share: float | None = None
    layers: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    kind: Literal["high", "low"] = "high"

    def __post_init__(self):
        len(self.at)
        if self.word == "bad":
            from meristem.errors import InputError
            raise InputError("word", self.word, "must be better")

    def needs(self, state, step, plan):
        return None

class NoPolicy:
    pass

class NoDataclass(Policy):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes the module quiet_policy into the present folder, as if it had never been imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(first: str = "") -> None:
        (tmp_path / "quiet_policy.py").write_text(MODULE.format(first=first), encoding="utf-8")
        sys.modules.pop("quiet_policy", None)

    write()
    yield write
    sys.modules.pop("quiet_policy", None)


def test_a_policy_of_ones_own_has_its_table(module: Callable[[str], None], tmp_path: Path) -> None:
    text = "[growth]\npolicies = ['sgt', 'quiet_policy:Quiet']\n[growth.quiet]\nat = [[1, 2], 3]\n"
    config = load_config(saved(tmp_path, text), ["--growth.quiet.word", "b"])
    assert load_config(saved(tmp_path, config.to_toml())) == config
    assert "quiet_policy" not in sys.modules
    sgt, own = config.build_policies()
    assert sgt == Sgt(1000)
    assert isinstance(own, Policy)
    assert own.settings.items() >= {"total_steps": 1000, "at": ((1, 2), 3), "word": "b", "every": 20}.items()
    assert config["growth.quiet.word"] == "b"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--growth.quiet.layers=1,2", "--growth.quiet.words=a, b"], {"layers": (1, 2), "words": ("a", "b")}),
        (["--growth.quiet.layers=[1,2]", "--growth.quiet.words=7"], {"layers": (1, 2), "words": ("7",)}),
        (["--growth.quiet.layers=3", "--growth.quiet.words="], {"layers": (3,)}),
        (["--growth.quiet.every=7", "--growth.quiet.share=1"], {"every": 7, "share": 1.0}),
    ],
)
def test_settings_of_a_policy_of_ones_own_become_their_types(
    arguments: list[str], expected: dict[str, Any], module: Callable[[str], None], tmp_path: Path
) -> None:
    config = load_config(saved(tmp_path, "[growth]\npolicies = ['quiet_policy:Quiet']"), arguments)
    again = load_config(saved(tmp_path, config.to_toml()))
    (own,), (same,) = config.build_policies(), again.build_policies()
    assert own.settings == same.settings == {**own.settings, **expected}
    assert all(type(getattr(own, key)) is type(value) for key, value in expected.items())


def test_types_that_are_only_there_for_a_type_checker_are_not_checked(
    module: Callable[[str], None], tmp_path: Path
) -> None:
    config = load_config(saved(tmp_path, "[growth]\npolicies = ['quiet_policy:Quiet']\n[growth.quiet]\nevery = 7"))
    path = tmp_path / "quiet_policy.py"
    path.write_text("from __future__ import annotations\n" + path.read_text().replace("every: int", "every: Steps"))
    (own,) = config.build_policies()
    assert own.settings["every"] == 7


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("nowhere:Quiet", [], r"growth\.policies = 'nowhere:Quiet': cannot be imported"),
        ("quiet_policy:Loud", [], r"growth\.policies = 'quiet_policy:Loud': cannot be imported"),
        ("quiet_policy:NoPolicy", [], r"'quiet_policy:NoPolicy': must be a dataclass that derives from .*Policy"),
        ("quiet_policy:NoDataclass", [], r"'quiet_policy:NoDataclass': must be a dataclass"),
        (
            "quiet_policy:Quiet",
            ["--growth.quiet.wrod=b"],
            r"growth\.quiet\.wrod = 'b': .*did you mean .*quiet\.word\?",
        ),
        ("quiet_policy:Quiet", ["--growth.quiet.total_steps=9"], r"growth\.quiet\.total_steps = 9: unknown key"),
        ("quiet_policy:Quiet", ["--growth.quiet.at=9"], r"growth\.quiet = \{'at': 9\}: does not fit: .*int"),
        ("quiet_policy:Quiet", ["--growth.quiet.every=abc"], r"growth\.quiet\.every = 'abc': must be of type int"),
        ("quiet_policy:Quiet", ["--growth.quiet.every=2.5"], r"growth\.quiet\.every = 2\.5: must be of type int"),
        ("quiet_policy:Quiet", ["--growth.quiet.every=true"], r"growth\.quiet\.every = True: must be of type int"),
        ("quiet_policy:Quiet", ["--growth.quiet.share=high"], r"growth\.quiet\.share = 'high': must be of type float"),
        ("quiet_policy:Quiet", ["--growth.quiet.layers=a"], r"growth\.quiet\.layers = 'a': must be a list of int"),
        ("quiet_policy:Quiet", ["--growth.quiet.kind=most"], r"growth\.quiet\.kind = 'most': must be one of high, low"),
        ("quiet_policy:Quiet", ["--growth.quiet.word=bad"], r"growth\.quiet\.word = 'bad': must be better"),
    ],
)
def test_a_policy_of_ones_own_that_cannot_be_made_is_refused(
    name: str, arguments: list[str], message: str, module: Callable[[str], None], tmp_path: Path
) -> None:
    config = load_config(saved(tmp_path, f"[growth]\npolicies = ['{name}']"), arguments)
    with pytest.raises(InputError, match=message):
        config.build_policies()


def test_a_policy_of_ones_own_takes_plain_values(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"growth\.quiet\.at = .*: must be text, a number, true or false, or a list"):
        load_config(saved(tmp_path, "[growth]\npolicies = ['m:Quiet']\n[growth.quiet.at]\nx = 1"))


def test_only_train_and_resume_import_a_policy_of_ones_own(
    module: Callable[[str], None], data: Path, tmp_path: Path, call: Call
) -> None:
    """A folder from somebody else must not run code."""
    config = tiny_config(data, train__steps=4, growth__policies=["quiet_policy:Quiet"], growth__quiet__word="b")
    run = tmp_path / "run"
    said = call("train", saved(tmp_path, config.to_toml()), "--out", run)
    assert said.code == 0, said.err
    module("raise SystemExit('code has run')")
    for command in (
        ("eval", run), ("report", run), ("generate", run, "--prompt", "a", "--tokens", "3"), ("plan", "--plan", run),
        ("audit", run, "--sequences", "4", "--steps", "2", "--feeds", "2"),
    ):  # fmt: skip
        said = call(*command)
        assert said.code == 0, (command, said.err)
        assert "quiet_policy" not in sys.modules
    with pytest.raises(BaseException, match="code has run"):
        RunFolder.open(run).config.build_policies()
    for checkpoint in (run / "checkpoints").iterdir():
        for path in checkpoint.iterdir():
            path.unlink()
        checkpoint.rmdir()
    (run / "events.jsonl").unlink()
    module("print('imported')")
    said = call("resume", run)
    assert said.code == 0, said.err
    assert "imported" in said.out


# --- flat keys, as they were before policies had tables --------------------------------------------------------------

STEPS = {"train.steps": 1000}
# By settings of before, the policies that the code of then built for a run of 1000 updates.
FORMER: dict[str, tuple[dict[str, Any], list[Policy]]] = {
    "none": ({"growth.policy": "none", "growth.passes": 3, "incrt.hits": 3}, []),
    "sgt": ({"growth.policy": "sgt"}, [Sgt(1000)]),
    "sgt otherwise": (
        {
            "growth.policy": "sgt", "growth.passes": 3, "growth.heads": "low", "growth.heads_per_layer": 3,
            "growth.max_layers": 2, "growth.shortlist": 5, "growth.excluded": [0, 1],
            "growth.order": "shallow_first", "growth.start": 0.1, "growth.window": 20, "growth.beta": 0.9,
            "growth.birth": "paper", "growth.train_gates": False, "growth.seed": 3, "growth.probe": "fused",
            "growth.rows": 4,
        },
        [
            Sgt(
                1000, passes=3, heads="low", heads_per_layer=3, max_layers=2, shortlist=5, excluded=(0, 1),
                order="shallow_first", start=0.1, window=20.0, beta=0.9, birth="paper", train_gates=False, seed=3,
                probe="fused", rows=4,
            )
        ],
    ),
    "static layers": (
        {
            "growth.policy": "sgt", "growth.layers": [4, 2], "growth.heads": "random", "growth.passes": 2,
            "growth.heads_per_layer": 3, "growth.train_gates": False, "growth.seed": 3,
        },
        [StaticLoops((4, 2), heads="random", passes=2, heads_per_layer=3, train_gates=False, seed=3)],
    ),
    "like": (
        {
            "growth.policy": "sgt", "growth.like": "run", "growth.heads": "low", "growth.max_layers": 2,
            "growth.shortlist": 5, "growth.excluded": [0, 1], "growth.order": "shallow_first",
        },
        [
            StaticLoops(
                like="run", heads="low", max_layers=2, shortlist=5, excluded=(0, 1), order="shallow_first"
            )
        ],
    ),
    "blocks": (
        {"growth.policy": "sgt", "growth.unit": "block", "growth.layers": [4, 2], "growth.passes": 2},
        [BlockLoop((4, 2), times=2)],
    ),
    "blocks like": (
        {
            "growth.policy": "sgt", "growth.unit": "block", "growth.like": "run", "growth.heads_per_layer": 3,
            "growth.order": "shallow_first", "growth.seed": 3,
        },
        [BlockLoop(like="run", heads_per_layer=3, order="shallow_first")],
    ),
    "observe": ({"growth.observe": True}, [Observe(total_steps=1000)]),
    "observe sgt": (
        {"growth.policy": "sgt", "growth.observe": True, "growth.observe_every": 7, "growth.rows": 4},
        [Observe(every=7, rows=4, total_steps=1000), Sgt(1000, rows=4)],
    ),
    "demand": ({"growth.policy": "incrt"}, [Incrt(1000), Prune()]),
    "demand otherwise": (
        {
            "growth.policy": "incrt", "incrt.feed_every": 3, "incrt.decide_every": 20, "incrt.calibration": 9,
            "incrt.cool_down": 90, "incrt.warm_up": 70, "incrt.last_birth": 0.5, "incrt.max_heads": 7,
            "incrt.certainty": 3, "incrt.feeds": 5, "incrt.share": 0.2, "incrt.steady": 0.7, "incrt.plateau": 0.3,
            "incrt.hits": 3, "incrt.grace": 50, "incrt.redundant": 0.01, "incrt.tolerance": 0.02, "incrt.seed": 4,
        },
        [
            Incrt(
                1000, feed_every=3, decide_every=20, calibration=9, cool_down=90, warm_up=70, last_birth=0.5,
                max_heads=7, certainty=3.0, feeds=5, share=0.2, steady=0.7, plateau=0.3, hits=3, seed=4,
            ),
            Prune(decide_every=20, cool_down=90, grace=50, redundant=0.01, tolerance=0.02),
        ],
    ),
    "demand, four cool-downs of grace": (
        {"growth.policy": "incrt", "incrt.cool_down": 90, "incrt.grace": 0},
        [Incrt(1000, cool_down=90), Prune(cool_down=90, grace=None)],
    ),
    "demand without pruning": ({"growth.policy": "incrt", "incrt.prune": False}, [Incrt(1000)]),
    "published": ({"growth.policy": "incrt", "incrt.criterion": "published"}, [Published("author", 1000)]),
    "published, repaired": (
        {
            "growth.policy": "incrt", "incrt.criterion": "published", "incrt.numerics": "repaired",
            "incrt.feed_every": 2, "incrt.share": 0.2, "incrt.max_heads": 7, "incrt.last_birth": 300,
            "incrt.prune": False, "incrt.seed": 4, "incrt.cool_down": 7,
        },
        [Published("repaired", 1000, feed_every=2, share=0.2, max_heads=7, last_birth=300.0, prune=False, seed=4)],
    ),
    "random": (
        {"growth.policy": "incrt", "incrt.criterion": "random", "incrt.births": 2, "incrt.warm_up": 70},
        [RandomBirths(2, 1000, warm_up=70)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), FORMER.values(), ids=FORMER)
def test_flat_keys_make_the_policies_that_they_made(
    given: dict[str, Any], expected: list[Policy], tmp_path: Path
) -> None:
    config = build_config({**STEPS, **given})
    assert config.build_policies() == expected
    assert load_config(saved(tmp_path, config.to_toml())) == config


def test_times_of_the_published_criterion_are_its_own() -> None:
    given = {"growth.policy": "incrt", "incrt.criterion": "published"}
    every = [
        build_config({**given, "incrt.numerics": name}).policy("published").decide_every
        for name in ("author", "repaired")
    ]
    assert every == [5, 50]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("loops", ["observe", "sgt"]),
        ("heads", ["incrt", "prune"]),
        ("classifier", ["incrt", "prune"]),
    ],
)
def test_complete_configurations_of_before_are_read(run: str, expected: list[str], tmp_path: Path) -> None:
    notes: list[str] = []
    config = load_config(OLD / run / "config.toml", note=notes.append)
    assert list(config.growth.policies) == expected
    assert set(config.growth.tables) <= set(expected)  # whatever else they had was as usual
    assert len(notes) == 1
    assert "read as they were before" in notes[0]
    again = load_config(saved(tmp_path, config.to_toml()), note=notes.append)
    assert again == config
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("given", "arguments", "expected"),
    [
        # Keys of before over a file of today.
        (policies("sgt", sgt={"passes": 2}), "--growth.passes 3", [Sgt(1000, passes=3)]),
        (policies("sgt"), "--growth.policy none", []),
        (policies("incrt"), "--growth.policy sgt", [Sgt(1000)]),
        (policies("stack"), "--growth.observe true", [Observe(total_steps=1000), Stack(1000)]),
        (policies("observe", "sgt"), "--growth.observe false --growth.seed 3", [Sgt(1000, seed=3)]),
        (policies("sgt", sgt={"passes": 2}), "--growth.like run", [StaticLoops(like="run", passes=2)]),
        (
            policies("incrt", "sgt", sgt={"passes": 2}),
            "--growth.like run --growth.unit block",
            [Incrt(1000), BlockLoop(like="run", times=2)],
        ),
        (
            policies("incrt", "prune", "sgt", incrt={"feed_every": 25}),
            "--incrt.criterion published",
            [Published("author", 1000, feed_every=25), Sgt(1000)],
        ),
        (policies("incrt", "prune"), "--incrt.prune false", [Incrt(1000)]),
        (policies("incrt", "sgt"), "--incrt.prune true", [Incrt(1000), Prune(), Sgt(1000)]),
        (
            policies("incrt", "prune"),
            "--incrt.cool_down 9 --incrt.grace 7",
            [Incrt(1000, cool_down=9), Prune(cool_down=9, grace=7)],
        ),
        (policies("published"), "--incrt.max_heads 3", [Published("author", 1000, max_heads=3)]),
        (policies("block_loop", block_loop={"layers": [1]}), "--growth.passes 2", [BlockLoop((1,), times=2)]),
        # Keys of today over a file of before.
        ({"growth.policy": "sgt", "growth.passes": 2}, "--growth.sgt.passes 3", [Sgt(1000, passes=3)]),
        (
            {"growth.policy": "sgt", "growth.passes": 2, "incrt.hits": 3},
            "--growth.policies incrt,sgt",
            [Incrt(1000, hits=3), Sgt(1000, passes=2)],
        ),
        (
            {"growth.policy": "incrt", "incrt.criterion": "demand", "incrt.prune": True, "incrt.feed_every": 2},
            "--growth.policies published",
            [Published("author", 1000, feed_every=2)],
        ),
        ({"growth.policy": "sgt", "growth.observe": False}, "--growth.policies observe", [Observe(total_steps=1000)]),
        # Among overrides the last one holds, whichever keys there are in the file.
        ({"growth.policy": "none"}, "--growth.policy sgt --growth.policies incrt", [Incrt(1000)]),
        ({"growth.policy": "none"}, "--growth.policies incrt --growth.policy sgt", [Sgt(1000)]),
        (policies("prune"), "--growth.policy sgt --growth.sgt.passes 3", [Sgt(1000, passes=3)]),
        (policies("sgt"), "--growth.sgt.passes 3 --growth.passes 2", [Sgt(1000, passes=2)]),
        (policies("sgt"), "--growth.passes 2 --growth.sgt.passes 3", [Sgt(1000, passes=3)]),
        ({"growth.policy": "sgt", "growth.passes": 1}, "--growth.sgt.passes 3 --growth.passes 2", [Sgt(1000, 2)]),
        (policies("sgt"), "--growth.passes 2 --growth.sgt.passes 3 --growth.passes 4", [Sgt(1000, passes=4)]),
    ],
)  # fmt: skip
def test_of_keys_of_before_and_of_today_the_last_holds(
    given: dict[str, Any], arguments: str, expected: list[Policy], tmp_path: Path
) -> None:
    sections: dict[str, list[str]] = {}
    for key, value in given.items():
        title, _, name = key.rpartition(".")
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        sections.setdefault(title, []).append(f"{name} = {text}")
    text = "\n".join(f"[{title}]\n" + "\n".join(lines) for title, lines in sections.items())
    assert load_config(saved(tmp_path, text), arguments.split()).build_policies() == expected


@pytest.mark.parametrize(
    ("text", "expected", "said"),
    [
        (
            "[growth.sgt]\npasses = 2\n[growth]\npolicies = ['sgt']\npasses = 3",
            [Sgt(1000, passes=2)], ["growth.passes: of no use, as growth.sgt.passes holds"],
        ),
        ("[growth]\npolicies = ['sgt']\npasses = 2\n[growth.sgt]\npasses = 2", [Sgt(1000, passes=2)], []),
        (
            "[growth]\npolicies = ['incrt']\npolicy = 'sgt'\nobserve = true\nunit = 'head'",
            [Incrt(1000)],
            [
                "growth.policy: of no use, as growth.policies holds",
                "growth.observe: of no use, as growth.policies holds",
            ],
        ),
        (
            "[growth.incrt]\nhits = 4\n[growth]\npolicies = ['incrt']\n[incrt]\nhits = 3\nfeeds = 5",
            [Incrt(1000, hits=4, feeds=5)], ["incrt.hits: of no use, as growth.incrt.hits holds"],
        ),
    ],
)  # fmt: skip
def test_within_a_file_keys_of_today_hold(text: str, expected: list[Policy], said: list[str], tmp_path: Path) -> None:
    notes: list[str] = []
    assert load_config(saved(tmp_path, text), note=notes.append).build_policies() == expected
    assert notes[1:] == said


def test_what_is_usual_for_a_policy_is_not_handed_to_the_one_in_its_place() -> None:
    """The configuration of a run has every setting of its policies."""
    config = build_config({**STEPS, **policies("incrt", "prune", incrt={"max_heads": 9})})
    exchanged = override(config, ["--incrt.criterion", "published"])
    assert exchanged.build_policies() == [Published("author", 1000, max_heads=9)]


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({"growth.policy": "sgt"}, ""),
        ({"growth.policy": "sgt", "growth.like": "run", "growth.start": 0.1, "growth.window": 0.05}, "growth.start"),
        ({"growth.policy": "sgt", "growth.like": "run", "growth.unit": "block", "growth.heads": "low"}, "growth.heads"),
        ({"growth.policy": "incrt", "incrt.numerics": "repaired"}, "incrt.numerics"),
        ({"growth.policy": "incrt", "incrt.prune": False, "incrt.grace": 5}, "incrt.grace"),
        ({"growth.policy": "incrt", "incrt.criterion": "published", "incrt.hits": 3}, "incrt.hits"),
        ({"growth.policy": "incrt", "incrt.criterion": "published", "incrt.hits": 2}, ""),
    ],
)  # fmt: skip
def test_flat_settings_that_do_nothing_are_noted(given: dict[str, Any], unused: str) -> None:
    notes: list[str] = []
    config = build_config(given, notes.append)
    expected = [f"{unused}: of no use with growth.policies = {list(config.growth.policies)}"] if unused else []
    assert notes[1:] == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"growth.policy": "sgd"}, r"growth\.policy = 'sgd': must be one of none, sgt, incrt"),
        ({"growth.unit": "layer"}, r"growth\.unit = 'layer': must be one of head, block"),
        ({"incrt.criterion": "energy"}, r"incrt\.criterion = 'energy': must be one of demand, published, random"),
        ({"growth.observe": 1}, r"growth\.observe = 1: must be of type bool"),
        ({"growth.policies": "sgt", "growth.passes": 1}, r"growth\.policies = 'sgt': must be a list of str"),
        ({"growth.passes": "many"}, r"growth\.sgt\.passes = 'many': must be of type int"),
        ({"growth.policy": "sgt", "growth.unit": "block"}, r"growth\.block_loop\.layers = \(\): must be named"),
        (
            {"growth.policy": "sgt", "growth.layers": [1], "growth.like": "run", "growth.heads": "all"},
            r"growth\.static_loops\.like = 'run': cannot be given together with `layers`",
        ),
        (
            {"growth.policy": "incrt", "incrt.criterion": "random"},
            r"growth\.random_births\.births = None: must be given",
        ),
        ({"incrt.certainty": math.inf}, r"growth\.incrt\.certainty = inf"),
        ({"incrt.shares": 1}, r"incrt\.shares = 1: unknown key; did you mean growth\.incrt\.share\?"),
    ],
)
def test_flat_values_that_are_wrong_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_config(given)


def test_the_command_notes_flat_keys(data: Path, tmp_path: Path, call: Call) -> None:
    path = saved(tmp_path, tiny_config(data, train__steps=1).to_toml())
    said = call("train", path, "--out", tmp_path / "run", "--growth.observe", "true")
    assert said.code == 0, said.err
    assert said.err.startswith("growth.observe: read as they were before policies had tables of their own")
