"""What the benchmark of saves leaves alone."""

from __future__ import annotations

from pathlib import Path

import torch

from meristem.bench.save import compare_saves, saves_text
from meristem.plan import Plan


def test_saves_are_measured_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "step-00000000").mkdir()
    (tmp_path / "precious").write_text("mine")
    plan = Plan.uniform(layers=1, width=16, heads=2, vocabulary=32, context=8)
    report = compare_saves(plan, torch.device("cpu"), batch=1, rounds=2, folder=tmp_path)
    assert [result["kind"] for result in report["results"]] == ["in the way", "beside"] * 2
    assert all(result["held_up"] > 0 and result["written"] > 0 for result in report["results"])
    assert "beside" in saves_text(report)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "step-00000000"]
