"""The bench of growth, on a CPU at toy size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from commands import Call
from meristem.bench import loops_cost
from meristem.bench.loops_cost import compare_growth, grown_plans, growth_text, measure_births
from meristem.bench.step import TrainingStep
from meristem.errors import InputError
from meristem.plan import Gates, Loop, Plan
from training.helpers import CPU

PLAN = Plan.from_heads([2, 4, 4], width=32, vocabulary=64, context=16, feed_forward=48)


def test_arms_have_the_loops_of_their_names() -> None:
    plans = grown_plans(PLAN, (2, 1), (0, 3), 3)
    assert list(plans) == ["vanilla", "SGT K=1", "SGT K=2", "SGT K=3", "2 blocks looped"]
    assert plans["vanilla"] == PLAN
    for k in (1, 2, 3):
        looped = plans[f"SGT K={k}"]
        assert looped.loops == {1: Loop((0, 3), k), 2: Loop((0, 3), k)}
        assert looped.gates == Gates(k, 2, trained=True)
    assert [layer.repeats for layer in plans["2 blocks looped"].layers] == [0, 1, 1]


def test_one_layer_is_one_block_and_a_layer_is_named_once() -> None:
    assert list(grown_plans(PLAN, (2,), (0, 3), 1)) == ["vanilla", "SGT K=1", "1 block looped"]
    with pytest.raises(InputError, match=r"layers = \(1, 1\): must be distinct"):
        grown_plans(PLAN, (1, 1), (0, 3), 1)


def test_steps_births_and_the_probe_are_measured() -> None:
    report = compare_growth(
        PLAN, CPU, layers=(2, 1), heads=(0, 3), passes=2, batch=4, steps=2, rounds=2,
        say=lambda text: None,
    )  # fmt: skip
    assert [arm["name"] for arm in report["arms"]] == ["vanilla", "SGT K=1", "SGT K=2", "2 blocks looped"]
    assert [(birth["layer"], birth["passes"]) for birth in report["births"]["pauses"]] == [
        (2, 1),
        (2, 2),
        (1, 1),
        (1, 2),
    ]
    shares = report["probe"]["share_of_5000_steps"]
    assert list(shares) == ["K=1", "K=2"]
    assert shares["K=2"] == pytest.approx(shares["K=1"] * 7 / 4)  # a decision for each pass, and the last one
    text = growth_text(report).splitlines()
    assert [line.split("  ")[0] for line in text[2:6]] == [arm["name"] for arm in report["arms"]]


def test_births_are_measured_before_any_kernel_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards everything is as it was."""
    order: list[str] = []
    folders: list[str | None] = []

    class Step(TrainingStep):
        def __init__(self, plan: Plan, device: torch.device) -> None:
            folder = os.environ.get("TRITON_CACHE_DIR")
            folders.append(folder)
            order.append("arm" if folder == usual else "births")
            if folder is not None and folder != usual:
                assert not any(Path(folder).glob("*"))  # nor need it be there yet
            super().__init__(plan, device)

    usual = os.environ.get("TRITON_CACHE_DIR")
    monkeypatch.setattr(loops_cost, "TrainingStep", Step)
    compare_growth(
        PLAN, CPU, layers=(2,), heads=(0, 3), passes=1, batch=4, steps=2, rounds=2,
        say=lambda text: None,
    )  # fmt: skip
    assert order == ["births", "arm", "arm", "arm"]
    measure_births(PLAN, CPU, (2,), (0, 3), 1, batch=4)
    assert len({folders[0], folders[-1]}) == 2  # a new one each time
    assert os.environ.get("TRITON_CACHE_DIR") == usual


def test_loops_of_a_classifier_are_refused_before_anything_is_timed(call: Call) -> None:
    code, out, errors = call(
        "bench", "growth", "--layers", "2", "--width", "32", "--heads", "4", "--classes", "3", "--grown", "1",
        "--device", "cpu",
    )  # fmt: skip
    assert (code, out) == (2, "")
    assert "classes = 3: loops grow by the entropy of causal attention" in errors
