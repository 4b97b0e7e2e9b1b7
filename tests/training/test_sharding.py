"""Processes that share a model out are one process: through growth, with either optimizer, and from any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meristem.runs.checkpoint import list_checkpoints, load_checkpoint
from meristem.runs.run_folder import RunFolder

from .helpers import (
    Job,
    assert_nearly_equal_weights,
    copy_run,
    final_tensors,
    metrics,
    run_jobs,
    tiny_config,
    trained,
)
from .test_together import TOGETHER, told

LAST = 8  # the checkpoint that runs go on from: blocks were stacked, a head was born, and a loop
# Two feeds before a birth: after one, chance alone decides where a scout looks, and rounding moves it.
DEMAND: dict[str, Any] = {
    **TOGETHER, "train__steps": 12, "checkpoint__every": 4, "optimizer__eps": 1e-6, "growth__incrt__feeds": 2,
}  # fmt: skip
# Births by demand have values that rounding decides in part (`assert_nearly_equal_weights`): here they come at random.
GROWING: dict[str, Any] = {
    **{name: value for name, value in DEMAND.items() if "incrt" not in name},
    "growth__policies": ["stack", "random_births", "prune", "sgt", "observe"], "growth__random_births__births": 4,
    "growth__random_births__start_heads": 1, "growth__random_births__warm_up": 1,
    "growth__random_births__decide_every": 2, "growth__random_births__last_birth": 8,
}  # fmt: skip
MUON: dict[str, Any] = {
    **GROWING, "optimizer__kind": "muon", "train__average": 0.9, "train__recompute": True,
}  # fmt: skip
KINDS: dict[str, tuple[int, str]] = {"one": (1, "ddp"), "ddp": (2, "ddp"), "fsdp": (2, "fsdp"), "four": (4, "fsdp")}
WAYS = [("one", "ddp"), ("one", "fsdp"), ("ddp", "one"), ("ddp", "four"), ("fsdp", "one"), ("fsdp", "ddp")]


def job(data: Path, folder: Path, name: str, kind: str, **changes: Any) -> Job:
    """To train a new run."""
    world, parallel = KINDS[kind]
    config = folder / f"{name}.toml"
    config.write_text(tiny_config(data, **changes, train__parallel=parallel).to_toml(), encoding="utf-8")
    return world, "train", config, folder / name


def assert_same_decisions(run: RunFolder, single: RunFolder) -> None:
    names = ("step", "event", "policy", "action", "layer", "heads", "plan")
    assert [[e.get(n) for n in names] for e in told(run)] == [[e.get(n) for n in names] for e in told(single)]


def assert_same_run(run: RunFolder, single: RunFolder) -> None:
    """The same decisions and structures; weights and moments within 1e-5, losses and norms within 1e-4."""
    assert_same_decisions(run, single)
    torch.testing.assert_close(final_tensors(run), final_tensors(single), rtol=0, atol=1e-5)
    for ours, theirs in zip(metrics(run), metrics(single), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Growing runs by the kind of processes, with AdamW and Muon, and those that others went on with."""
    folder = tmp_path_factory.mktemp("sharded")
    trained(data, folder / "one", **GROWING)
    trained(data, folder / "one-muon", **MUON)
    begun = [job(data, folder, kind, kind, **GROWING) for kind in ("ddp", "fsdp")]
    run_jobs(*begun, job(data, folder, "four-muon", "four", **MUON))
    jobs: list[Job] = []
    for before, after in WAYS:
        copy = copy_run(RunFolder.open(folder / before), folder / f"{before}-{after}", last=LAST)
        world, parallel = KINDS[after]
        jobs.append((world, "resume", copy.path, "--train.parallel", parallel))
    run_jobs(*jobs)
    return folder


def test_they_grow_as_one_process_does(folder: Path) -> None:
    single = RunFolder.open(folder / "one")
    actions = {entry["action"] for entry in told(single) if entry["event"] == "growth"}
    assert {"stack", "birth", "removal", "add"} <= actions
    assert_same_run(RunFolder.open(folder / "fsdp"), single)
    assert_same_run(RunFolder.open(folder / "four-muon"), RunFolder.open(folder / "one-muon"))


def test_births_by_demand_are_those_of_one_process(data: Path, tmp_path: Path) -> None:
    single = trained(data, tmp_path / "single", **DEMAND)
    run_jobs(job(data, tmp_path, "demand", "fsdp", **DEMAND))
    shared = RunFolder.open(tmp_path / "demand")
    assert any(entry.get("action") == "birth" and entry["policy"] == "incrt" for entry in told(shared))
    assert_same_decisions(shared, single)
    assert_nearly_equal_weights(shared, single)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_checkpoints_go_on_in_any_number_and_kind_of_processes(before: str, after: str, folder: Path) -> None:
    run = RunFolder.open(folder / f"{before}-{after}")
    states = [load_checkpoint(path).state for path in list_checkpoints(run.checkpoints)]
    assert [state["processes"] for state in states] == [KINDS[before][0], KINDS[before][0], KINDS[after][0]]
    assert run.config.train.parallel == KINDS[after][1]
    assert_same_run(run, RunFolder.open(folder / "one"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "changes"), [
    ("four", "four", GROWING), ("muon", "fsdp", MUON), ("muon-ddp", "ddp", MUON),
    ("published", "fsdp", {**GROWING, "growth__sgt__birth": "paper"}),
])  # fmt: skip
def test_so_do_the_other_kinds(name: str, kind: str, changes: dict[str, Any], data: Path, tmp_path: Path) -> None:
    single = trained(data, tmp_path / "single", **changes)
    run_jobs(job(data, tmp_path, name, kind, **changes))
    assert_same_run(RunFolder.open(tmp_path / name), single)


def test_what_a_process_has(data: Path) -> None:
    """See `shard_checks.py`; one that fails is named in the output."""
    names = (
        "trains_alike", "repeated_blocks", "normed_heads", "biases_and_gains",
        "parts", "guard", "micro_batches", "precision", "growing",
        "values", "errors",
    )  # fmt: skip
    run_jobs(*((2, "check", name) for name in names), (4, "check", "classifier"))


@pytest.mark.slow
def test_blocks_are_compiled(data: Path) -> None:
    run_jobs((2, "check", "compiled"))
