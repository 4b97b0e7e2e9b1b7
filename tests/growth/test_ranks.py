"""Two processes measure together, decide once, and notice when their plans differ (sgt.md D12)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meristem import ranks
from meristem.gauges.entropy import EntropyGauge, read_heads

from .helpers import tokens_of
from .pair import BATCH, looped_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    command = [sys.executable, str(Path(__file__).with_name("pair.py")), str(tmp_path_factory.mktemp("pair") / "store")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_the_processes_agree_on_sums_and_on_what_the_first_one_says(pair: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(pair):
        assert found["agreements"] == {
            "rank": rank, "world": 2, "sum": [3.0, 30.0], "mean": [1.5, 15.0], "first": {"from": 0},
            "disagreement": "the processes do not agree on the plan: ['plan of 0', 'plan of 1']",
        }  # fmt: skip


def test_the_processes_measure_what_one_would(pair: list[dict[str, Any]]) -> None:
    model = looped_model()
    tokens = tokens_of(model.plan, 0, BATCH)
    for name, taken in (("observed", tokens[::2]), ("first sequence", tokens[:1])):
        expected = read_heads(model, taken, EntropyGauge()).entropy / len(taken)
        for found in pair:
            entropies = torch.tensor(found[name]["head_entropy"]).flatten()
            torch.testing.assert_close(entropies, expected, rtol=0, atol=1e-6)


def test_the_processes_tell_the_mean_of_their_updates(pair: list[dict[str, Any]]) -> None:
    """That of a process without a sequence of its own is the one of its first."""
    model = looped_model()
    tokens = tokens_of(model.plan, 0, BATCH)
    halves = {"observed": (tokens[:8:2], tokens[8::2]), "first sequence": (tokens[:1], tokens[8:9])}
    for name, taken in halves.items():
        alone = [read_heads(model, half, EntropyGauge()).updates for half in taken]
        for number in (1, 2):
            mine, other = (float(updates[2, number]) for updates in alone)
            assert mine != pytest.approx(other, rel=1e-4)
            for found in pair:
                (loop,) = found[name]["loops"]
                assert loop["update"][number - 1] == pytest.approx((mine + other) / 2, rel=1e-5)


def test_the_processes_grow_alike(pair: list[dict[str, Any]]) -> None:
    """From the mean of their entropies, which they hold together."""
    assert pair[0]["grown"] == pair[1]["grown"]
    assert pair[0]["grown"]["layer"] == 3
    assert pair[0]["grown"]["layer_entropy"] == pytest.approx([0.1, 0.45, 0.1, 0.5], abs=1e-6)


def test_plans_that_differ_are_an_error_in_every_process(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert found["disagreement"] is not None
        assert found["disagreement"].startswith("the processes do not agree on the plan: ")
        assert pair[0]["grown"]["plan"] in found["disagreement"]


def test_one_process_that_grows_alone_is_an_error_in_both(pair: list[dict[str, Any]]) -> None:
    for found in pair:
        assert found["one grows"].startswith("the processes do not agree on the plan: ")


def test_the_first_process_saves_for_both(pair: list[dict[str, Any]]) -> None:
    """The other one waits for it: what it looks at right after a save is whole."""
    for found in pair:
        names = ["step-00000001", "step-00000002", "step-00000003"]
        assert found["saved"]["paths"] == names
        assert found["saved"]["lies"] == [names[:1], names[:2], names[1:]]
        assert (found["saved"]["done"], found["saved"]["weight"]) == (3, 0.0)


def test_a_save_that_fails_is_an_error_in_every_process(pair: list[dict[str, Any]]) -> None:
    first, second = (found["saved"]["refused"] for found in pair)
    assert "saves/file" in first
    assert second == f"the first process could not do it: {first}"


def test_in_a_single_process_there_is_nothing_to_agree_on() -> None:
    values = torch.tensor([1.0, 2.0])
    assert (ranks.rank(), ranks.world(), ranks.from_first_rank("mine")) == (0, 1, "mine")
    assert ranks.by_first_rank(lambda: "mine") == "mine"
    assert torch.equal(ranks.sum_over_ranks(values), values)
    assert torch.equal(ranks.mean_over_ranks(values), values)
    ranks.require_equal("anything", "plan")
