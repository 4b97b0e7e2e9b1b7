"""Births that are laid down: they come when and where they were named, and change no function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meristem.comparison.controls import BirthsAt
from meristem.comparison.results import other_layers
from meristem.errors import InputError
from meristem.growth.edits import AddHead
from meristem.plan import Plan
from training.helpers import events, metrics, prepared, trained


def test_heads_are_born_when_and_where_they_were_named(tmp_path: Path) -> None:
    data = prepared(tmp_path, 30)
    shape = {"model__schedule": "uniform", "model__heads": 1, "model__head_dim": 8}
    control = {"growth__policies": ["meristem.comparison.controls:BirthsAt"], "growth__birthsat__times": [3, 6, 8],
               "growth__birthsat__layers": [1, 0, 1]}  # fmt: skip
    run, plain = trained(data, tmp_path / "run", **shape, **control), trained(data, tmp_path / "plain", **shape)
    born = [(e["step"], e["layer"]) for e in run.read(run.events) if e["event"] == "growth"]
    assert born == [(3, 1), (6, 0), (8, 1)]
    assert run.newest_plan.heads == (2, 3)
    losses = [[entry["loss"] for entry in metrics(r) if "loss" in entry] for r in (run, plain)]
    assert losses[0][:4] == losses[1][:4]  # the first update after a birth still has the function of before
    assert losses[0][5:] != losses[1][5:]
    assert events(run)[-1] == "finished"


def test_several_heads_may_be_born_after_one_update() -> None:
    """As many as the run had whose births they repeat, also where two fall to the same layer; no two are alike."""
    plan = Plan.uniform(layers=3, width=16, heads=1, head_dim=4, vocabulary=16, context=8)
    policy = BirthsAt(times=(5, 5, 5, 9), layers=(2, 0, 2, 1))
    decision = policy.decide(policy.begin(plan), 5, plan, {})
    assert [change.layer for change in decision.changes] == [2, 0, 2]
    assert decision.changes[-1].facts["heads"] == [2, 1, 3]
    first, _, twin = (change.edits[0] for change in decision.changes)
    assert isinstance(first, AddHead)
    assert isinstance(twin, AddHead)
    assert not torch.equal(first.head.query, twin.head.query)


def test_births_are_in_layers_that_there_are() -> None:
    plan = Plan.uniform(layers=2, width=16, heads=1, head_dim=4, vocabulary=16, context=8)
    with pytest.raises(InputError, match=r"layers = 7: must be from 0 to 1"):
        BirthsAt(times=(1,), layers=(7,)).begin(plan)
    with pytest.raises(InputError, match="max_heads = -5"):
        BirthsAt(max_heads=-5)


def test_births_need_a_layer_each_and_an_order() -> None:
    with pytest.raises(InputError, match="one for each of the 2 times"):
        BirthsAt(times=(1, 2), layers=(0,))
    with pytest.raises(InputError, match="in their order"):
        BirthsAt(times=(2, 1), layers=(0, 0))


@pytest.mark.parametrize("seed", range(5))
def test_other_layers_are_others(seed: int) -> None:
    layers = [0, 1, 2, 2, 1, 0] * 5
    found = other_layers(layers, 3, seed)
    assert all(a != b for a, b in zip(layers, found, strict=True))
    assert set(found) == {0, 1, 2}
    assert found == other_layers(layers, 3, seed)
    with pytest.raises(InputError, match="no other layer"):
        other_layers([0], 1, seed)
