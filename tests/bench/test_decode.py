"""The benchmark of decoding: what it reports, and what the memory-bound limit is."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from meristem.bench import decode
from meristem.bench.decode import PLAIN, STATIC, compare_decoding, decoding_text, limit
from meristem.errors import InputError, RunError
from meristem.plan import Plan

SHAPE: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 50, "context": 24}
PRISM = Plan.from_heads([2, 4], width=32, vocabulary=50, context=24)
CPU = torch.device("cpu")


def test_arms_are_measured_in_turn() -> None:
    plans = {"uniform": Plan.uniform(**SHAPE), "prism": PRISM}
    said: list[str] = []
    report = compare_decoding(plans, CPU, batches=[1, 3], prompt=4, tokens=6, rounds=2, say=said.append)
    arms = [PLAIN, STATIC, "meristem, uniform", "meristem, prism"]
    assert [(each["batch"], each["name"]) for each in report["results"]] == [
        (batch, name) for batch in (1, 3) for _ in range(2) for name in arms
    ]
    assert len(said) == 8
    for each in report["results"]:
        assert each["tokens_per_second"] == pytest.approx(each["batch"] * 6 / each["seconds"])
        assert each["limit_share"] is None
    text = decoding_text(report)
    assert text.count("meristem, prism") == 2
    assert "bandwidth of this device is not known" in text


def test_ratios_are_those_of_the_same_round() -> None:
    results = [
        {"name": name, "batch": 1, "tokens_per_second": rate, "limit_share": 0.25}
        for rates in ((10, 30), (100, 310), (50, 140))
        for name, rate in zip((STATIC, "meristem, uniform"), rates, strict=True)
    ]
    settings = {"prompt": 4, "tokens": 6, "dtype": "torch.bfloat16"}
    report = {"device": "x", "torch": "2", "transformers": "5", "settings": settings, "results": results}
    last = decoding_text(report).splitlines()[-1].split()
    assert last == ["1", "meristem,", "uniform", "140", "7.143", "3.00", "25.0%"]


def test_the_limit_is_the_time_to_read_weights_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.uniform(**SHAPE, kv_group=2)
    assert limit(plan, CPU, 1, 4, 6) is None
    monkeypatch.setattr(decode, "memory_bandwidth", lambda _: 1e9)
    monkeypatch.setattr(decode, "compute_dtype", lambda _: torch.bfloat16)
    # A prompt of 4 and on average 2.5 more tokens; 2 layers, keys and values, 16 of each, 2 bytes.
    found = limit(plan, CPU, 3, 4, 6)
    assert found == pytest.approx(3 * 1e9 / (2 * plan.parameters + 3 * 6.5 * 2 * 2 * 16 * 2))


def test_bad_requests() -> None:
    uniform = Plan.uniform(**SHAPE)
    request = {"batches": [1], "prompt": 4, "tokens": 6, "rounds": 1, "say": print}
    with pytest.raises(InputError, match=r"tokens = 22: must be at most 21"):
        compare_decoding({"uniform": uniform}, CPU, **{**request, "tokens": 22})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"batch = 0: must be at least 1"):
        compare_decoding({"uniform": uniform}, CPU, **{**request, "batches": [0]})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"schedules = .*: must begin with uniform"):
        compare_decoding({"prism": PRISM}, CPU, **request)  # type: ignore[arg-type]


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RunError, match=r"transformers is not installed; .*meristem\[hf\]"):
        compare_decoding({"uniform": Plan.uniform(**SHAPE)}, CPU, batches=[1], prompt=4, tokens=6, rounds=1, say=print)
