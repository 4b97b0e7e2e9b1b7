"""Births that are laid down: they come when and where they were named, and change no function."""

from __future__ import annotations

from pathlib import Path

import pytest

from meristem.comparison.controls import BirthsAt
from meristem.comparison.results import other_layers
from meristem.errors import InputError
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
