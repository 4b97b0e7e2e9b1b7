"""The bench of heads that grow: what it says is there, and measured on what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import Call
from meristem.bench.heads_cost import grow_all, with_heads
from meristem.bench.step import random_batches
from meristem.plan import Plan

SMALL = [
    "--policy", "incrt", "--layers", "2", "--width", "32", "--heads", "3", "--vocabulary", "64", "--context", "8",
    "--batch", "2", "--steps", "2", "--rounds", "2", "--feed-every", "2", "--device", "cpu",
]  # fmt: skip


def test_plans_with_other_head_counts_keep_the_dim() -> None:
    plan = Plan.uniform(layers=3, width=48, heads=4)
    assert with_heads(plan, 4) == plan
    assert (with_heads(plan, 1).heads, with_heads(plan, 1).head_dims) == ((1, 1, 1), (12, 12, 12))


@pytest.mark.parametrize("classes", [None, 3])
def test_the_whole_bench_on_a_small_model(classes: int | None, tmp_path: Path, call: Call) -> None:
    width = ["--width", "48"] if classes is None else ["--width", "24", "--classes", str(classes)]
    code, out, errors = call("bench", "growth", *SMALL, *width, "--out", str(tmp_path / "heads.json"))
    assert code == 0, errors
    report = json.loads((tmp_path / "heads.json").read_text(encoding="utf-8"))
    assert report["births"]["births"] == len(report["births"]["pauses"]) == 2 * 2  # from 1 to 3 heads in 2 layers
    assert report["settings"]["heads"] == [3, 3]
    d = report["settings"]["width"]
    e = report["settings"]["head_dim"]
    # Per layer: a followed matrix of d x d, its two bases, queries and keys with their moments, and little else.
    assert report["gate"]["statistics_megabytes"] == pytest.approx(2 * 4 * (d * d + 8 * d * e) / 1e6, rel=0.1)
    assert report["gate"]["decide_every"] == 20
    assert report["step"]["lowest"] <= report["step"]["difference"] <= report["step"]["highest"]
    assert "4 births" in out
    assert "one feed in 2 steps" in out


def test_no_newborn_head_is_empty() -> None:
    plan, device = Plan.uniform(layers=2, width=48, heads=3, vocabulary=64, context=8), torch.device("cpu")
    step, _ = grow_all(plan, device, random_batches(plan, device, 2), say=lambda _: None)
    assert step.model.plan == plan
    for block in step.model.stack:
        assert block.attention.qkv.weight.abs().sum(1).min() > 0


def test_an_unknown_policy_is_named(call: Call) -> None:
    code, _, errors = call("bench", "growth", "--policy", "prism")
    assert code == 2
    assert "'prism' is not one of 'sgt', 'incrt'" in errors
