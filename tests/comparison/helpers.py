"""Small comparisons: their files, and results that were never trained."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from meristem.comparison.ended import finished_runs
from meristem.comparison.file import Comparison, read_comparison
from meristem.comparison.planning import RunKey, Waiting, configuration, known_keys
from meristem.comparison.results import Result
from meristem.config import build_config
from meristem.training.train import train
from training.helpers import TINY


def base_file(folder: Path, data: Path | str = "data", **changes: Any) -> Path:
    """A file of a tiny configuration; returns the place for the file of a comparison beside it."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    values = {**TINY, "checkpoint.keep": 1, "data.path": str(data), **named}
    (folder / "base.toml").write_text(build_config(values).to_toml(), encoding="utf-8")
    return folder / "question.toml"


def tables(**changes: Any) -> dict[str, Any]:
    """The tables of a file with two arms and two seeds."""
    return {
        "config": "base.toml", "seeds": [0, 1], "primary": ["prism", "uniform"],
        "arms": {"uniform": {"model": {"schedule": "uniform"}}, "prism": {"model.schedule": "prism"}}, **changes,
    }  # fmt: skip


def comparison(folder: Path, data: Path | str = "data", **changes: Any) -> Comparison:
    return read_comparison(tables(**changes), base_file(folder, data))


def result(arm: str, seed: int, loss: float, **changes: Any) -> Result:
    """What a run might have ended with."""
    values: dict[str, Any] = {
        "arm": arm, "seed": seed, "rate": 1e-3, "folder": f"/runs/{arm}/{seed}", "scores": {"held_out_loss": loss},
        "steps": 100, "tokens": 6400, "flops": 10**9, "parameters": 1000, "structure": "heads 4x2", "heads": [4, 4],
        "heads_at_start": [4, 4], "training_seconds": 10.0, "compilation_seconds": 1.0, "evaluation_seconds": 2.0,
        "saving_seconds": 3.0, "peak_memory": 2**30, "device": "cpu", "births": [], "plan": {},
        "loss": [(1, 5.0), (50, 4.0), (100, loss)], "held_out": [(50, loss + 1), (100, loss)],
        "seconds": [(1, 0.1), (50, 5.0), (100, 10.0)],
    }  # fmt: skip
    return Result(**{**values, **changes})


def results(losses: dict[str, list[float]], rate: float | None = None, **changes: Any) -> dict[RunKey, Result]:
    """Results of seeds 0, 1, ... by arm."""
    return {
        RunKey(arm, seed, rate): result(arm, seed, loss, **changes)
        for arm, values in losses.items()
        for seed, loss in enumerate(values)
    }


def trained(found: Comparison, out: Path) -> dict[RunKey, Result]:
    """All runs of a comparison, made here one after the other as `compare` would make them."""
    while True:
        known, made = finished_runs(found, out), False
        for key in (key for key in known_keys(found, known) if key not in known):
            with suppress(Waiting):
                train(configuration(found, key, known), out / key.path)
                made = True
        if not made:
            return known
