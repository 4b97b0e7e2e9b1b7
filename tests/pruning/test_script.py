"""The study that is run where a GPU is lent by the minute."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from meristem.pruning import PruneSettings, prune_run
from meristem.runs.run_folder import RunFolder

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prune_124m.py"
FLAGS = [
    "--keep", "0.5,0.7", "--orders", "measured,norm", "--device", "cpu", "--sequences", "16", "--rates", "0.2,0.8",
    "--repair", "0.25",
]  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prune_124m", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_size_is_held_against_the_whole_model_with_the_same_repair(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: ModuleType
) -> None:
    monkeypatch.setattr(script, "ROUNDS", 1)
    out = tmp_path / "prune.json"

    def call(*flags: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["prune_124m.py", str(whole.path), "--out", str(out), *FLAGS, *flags])
        script.main()
        return json.loads(out.read_text())

    found = call()
    sizes = [("", 1.0), ("measured", 0.5), ("norm", 0.5), ("measured", 0.7), ("norm", 0.7)]
    lines = found["lines"]
    assert [(line["order"], line["keep"], line["rate"]) for line in lines] == [
        (*size, rate) for size in sizes for rate in (0.0, 0.2, 0.8)
    ]
    assert [(line["order"], line["keep"]) for line in found["best"]] == sizes
    control, *others = found["best"]
    assert control["rise"] == 0
    for line in others:
        own = [each for each in lines if (each["order"], each["keep"]) == (line["order"], line["keep"])]
        assert line["loss_aside"] == min(each["loss_aside"] for each in own if each["rate"])
        assert line["rise"] == pytest.approx(line["held_out"] - control["held_out"])
    assert [line["heads"] for line in lines[::3]] == [6, 3, 3, 4, 4]
    assert [(line["keep"], line["batch"]) for line in found["speeds"]] == [(1, 1), (1, 32), (0.5, 1), (0.5, 32)]
    assert call() == found  # all of it is there already
    out.write_text(json.dumps({**found, "lines": lines[:5]}))
    again = call()["lines"]
    assert [line["held_out"] for line in again] == [line["held_out"] for line in lines]
    out.unlink()
    monkeypatch.setattr(script.Study, "in_time", lambda self, *parts: len(self.lines) < 2)
    assert len(call()["lines"]) == 2


def test_its_repair_is_that_of_the_command(whole: RunFolder, tmp_path: Path, script: ModuleType) -> None:
    device = torch.device("cpu")
    settings = PruneSettings(keep=0.5, repair=3, tolerance=math.inf, sequences=16)
    made = prune_run(whole.path, tmp_path / "out", settings, device="cpu")
    source = script.open_source(whole.path, device="cpu")
    pruned = script.Pruned(source, script.pruning_rows(source, settings, device), settings, device)
    pruned.to(0.5)
    for _ in range(2):  # one leaves the moments alone that the next begins with
        model = script.repaired(source, pruned.checkpoint(0.5), settings, device)
        assert script.held_out_numbers(source, model, device)["held_out_loss"] == made.held_out[1]
