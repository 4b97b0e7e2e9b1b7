"""The script of the paired comparisons, with tiny models: arms, results in a file, and arms that take after others."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meristem.plan import Loop, Plan
from training.helpers import prepared

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "evidence.py"
TINY: dict[str, Any] = {
    "model.layers": 3, "model.width": 32, "model.heads": 4, "model.dims": [16, 8], "model.context": 16,
    "model.feed_forward": 48, "train.steps": 12, "train.batch_size": 4, "train.device": "cpu",
    "growth.sgt.start": 2, "growth.sgt.window": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evidence", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["evidence"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("evidence"), 12)


Call = Callable[..., None]


@pytest.fixture
def call(script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`evidence.py run` in this process."""

    def run(study: str, arms: str, seeds: str = "0", **override: Any) -> None:
        options = ["--data", str(data), "--validation", str(data), "--out", str(tmp_path / "results.jsonl")]
        chosen = ["--arms", arms, "--seeds", seeds, "--windows", "2", "--override", json.dumps({**TINY, **override})]
        monkeypatch.setattr(sys, "argv", ["evidence.py", "run", study, *options, *chosen])
        script.main()

    return run


def results(tmp_path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    entries = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    found = {(entry["arm"], entry["seed"]): entry for entry in entries}
    assert len(found) == len(entries)  # no run was made twice
    return found


def loops(result: dict[str, Any]) -> dict[int, Loop]:
    return Plan.from_dict(result["plan"]).loops


def test_arms_of_growth_split_over_calls(
    call: Call, script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second call needs nothing of the first but the file with its results."""
    call("sgt", "vanilla,sgt K=1", "0,1")
    first = results(tmp_path)
    assert set(first) == {(arm, seed) for arm in ("vanilla", "sgt K=1") for seed in (0, 1)}
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
    grown = first["sgt K=1", 0]
    assert len(loops(grown)) == 2
    assert loops(first["vanilla", 0]) == {}
    assert [entry["action"] for entry in grown["growth"]] == ["add", "add", "fix"]
    assert grown["settings"]["growth.sgt.seed"] == 0
    capsys.readouterr()

    call("sgt", "sgt K=1,static,block loop", "0,1")  # one is there already
    second = results(tmp_path)
    assert len(second) == 8
    assert {key: second[key] for key in first} == first
    assert "sgt K=1" not in capsys.readouterr().out
    for seed in (0, 1):
        assert loops(second["static", seed]) == loops(second["sgt K=1", seed])
        repeats = [layer.repeats for layer in Plan.from_dict(second["block loop", seed]["plan"]).layers]
        assert repeats == [int(layer in loops(grown)) for layer in range(3)]
        assert second["static", seed]["growth"] == []
    assert second["static", 0]["training_flops"] > grown["training_flops"] > first["vanilla", 0]["training_flops"]

    table = script.tables(list(second.values())).splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in table[2:6]] == [
        "vanilla", "sgt K=1", "block loop", "static",
    ]  # fmt: skip
    assert table[0].count("|") == table[2].count("|")
    assert any(line.startswith("- sgt K=1 minus static: ") for line in table)


def test_published_births_are_an_override_away(call: Call, tmp_path: Path) -> None:
    call("sgt", "sgt K=1", **{"growth.sgt.birth": "paper"})
    actions = [entry["action"] for entry in results(tmp_path)["sgt K=1", 0]["growth"]]
    assert actions == ["add", "add", "fade", "fix", "fade"]


def test_an_arm_that_takes_after_another_needs_it_first(call: Call, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"sgt K=1, seed 0: not in .*results\.jsonl yet; run it first"):
        call("sgt", "static")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_arm_is_refused_before_anything_runs(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        call("sgt", "vanilla,sgt")
    assert end.value.code == 2
    assert "no arm 'sgt' in study sgt; there are vanilla, sgt K=1, sgt K=3, " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_studies_share_a_file_and_nothing_else(call: Call, script: ModuleType, tmp_path: Path) -> None:
    """Both have an arm K=1: it is run for each, a table stands for each, and the newest of two runs counts."""
    few = {"train.steps": 2, "model.head_dim": 8}
    call("heads", "K=1,K=8", "0,1", **few)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    others = [{**json.loads(line), "study": "sgt", "arm": arm} for line in lines for arm in ("vanilla", "K=1")]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(other) + "\n" for other in others))
    call("heads", "K=1", **few)  # the file has one of another study
    entries = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(entries) == len(others) + 1
    older = [{**json.loads(line), "loss": 99.0} for line in lines]
    text = script.tables([*older, *map(json.loads, lines), *others])
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## sgt", "## heads"]
    assert "99.0" not in text
    with pytest.raises(SystemExit, match="heads: no runs of K=8, the baseline"):
        script.tables(entries)


def test_arms_of_head_counts(call: Call, tmp_path: Path) -> None:
    call("prism", "uniform,prism", **{"train.steps": 2})
    found = results(tmp_path)
    assert found["uniform", 0]["heads"] == [4, 4, 4]
    assert found["prism", 0]["heads"][0] < 4
    assert found["uniform", 0]["training_flops"] == found["prism", 0]["training_flops"]
