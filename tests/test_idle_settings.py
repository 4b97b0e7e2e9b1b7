"""Settings that others leave without effect: said, each with its reason, and really without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import Call
from meristem.config import build_config, idle_settings, load_config
from training.helpers import tiny_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"optimizer.momentum": 0.9}, ["optimizer.momentum: of no use with optimizer.kind = adamw"]),
        ({"optimizer.momentum": 0.9, "optimizer.kind": "muon"}, []),
        ({"optimizer.decay": 0.5}, ["optimizer.decay: of no use with optimizer.curve = cosine"]),
        ({"optimizer.decay": 0.5, "optimizer.curve": "wsd"}, []),
        ({"train.max_rewinds": 9}, ["train.max_rewinds: of no use with train.on_divergence = stop"]),
        ({"train.max_rewinds": 9, "train.on_divergence": "rewind"}, []),
        ({"model.shuffle_seed": 2}, ["model.shuffle_seed: of no use with model.schedule = prism"]),
        ({"model.shuffle_seed": 2, "model.schedule": "shuffle"}, []),
        ({"model.dims": [64], "model.schedule": "uniform"}, ["model.dims: of no use with model.schedule = uniform"]),
        ({"model.pooling": "first", "eval.rows": 5}, ["model.pooling, eval.rows: of no use for a language model"]),
        (
            {"model.head_list": [2, 4], "model.layers": 3, "model.schedule": "uniform", "model.width": 64},
            ["model.layers, model.schedule: of no use with model.head_list"],
        ),
        (
            {"model.plan": "plan.json", "model.width": 64, "model.qk_norm": True},
            ["model.width, model.qk_norm: of no use with model.plan, which has a plan"],
        ),
        (
            {"model.start_from": "runs/first", "model.context": 64},
            ["model.context: of no use with model.start_from, which has a plan"],
        ),
    ],
)
def test_changed_settings_of_a_language_model(values: dict[str, Any], expected: list[str]) -> None:
    assert idle_settings(build_config(values), classifier=False) == expected


def test_a_classifier_uses_rows_and_no_windows() -> None:
    values = {"model.pooling": "first", "eval.rows": 5, "eval.windows": 7}
    expected = ["eval.windows: of no use for a classifier, which is measured on rows"]
    assert idle_settings(build_config(values), classifier=True) == expected


@pytest.mark.parametrize(
    "values",
    [
        {"model.head_list": [2, 4], "model.layers": 3, "model.heads": 2, "model.schedule": "bump", "model.dims": [64]},
        {"model.schedule": "uniform", "model.dims": [64], "model.shuffle_seed": 3, "model.heads": 6},
    ],
)
def test_what_is_said_to_be_idle_leaves_the_plan_as_it_is(values: dict[str, Any]) -> None:
    config = build_config(values)
    (said,) = idle_settings(config, classifier=False)
    idle = said.partition(":")[0].split(", ")
    assert len(idle) >= 2
    without = build_config({key: value for key, value in values.items() if key not in idle})
    assert config.model.build(320) == without.model.build(320)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_that_come_with_meristem_have_none(path: Path) -> None:
    config = load_config(path)
    labelled = any(name in path.stem for name in ("classifier", "clade", "sst2"))
    assert idle_settings(config, classifier=labelled) == []


def test_a_run_says_so_when_it_begins(data: Path, tmp_path: Path, call: Call) -> None:
    config = tiny_config(data, train__steps=1, optimizer__momentum=0.5)
    (tmp_path / "config.toml").write_text(config.to_toml())
    said = call("train", tmp_path / "config.toml", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    assert "optimizer.momentum: of no use with optimizer.kind = adamw" in said.out + said.err
