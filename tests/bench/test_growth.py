"""The bench of growth, on a CPU at toy size."""

from __future__ import annotations

import pytest

from meristem.bench.growth import compare_growth, grown_plans, growth_text
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


def test_steps_births_and_the_probe_are_measured() -> None:
    report = compare_growth(
        PLAN, CPU, layers=(2, 1), heads=(0, 3), passes=2, batch=4, steps=2, rounds=2, compile=False,
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
    assert shares["K=3"] == pytest.approx(shares["K=1"] * 10 / 4)  # a decision for each pass, and the last one
    text = growth_text(report).splitlines()
    assert [line.split("  ")[0] for line in text[2:6]] == [arm["name"] for arm in report["arms"]]
