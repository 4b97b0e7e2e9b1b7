"""Blocks that are stacked, alone and together with heads that come and go and loops that grow: in one training run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Call
from meristem.errors import InputError
from meristem.growth.events import GrowthEvent, event_from_dict
from meristem.plan import Plan
from meristem.runs.checkpoint import checkpoint_name, list_checkpoints, load_checkpoint
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training.train import resume, train

from .helpers import (
    EAGER_BIRTHS,
    EAGER_PRUNING,
    assert_equal_runs,
    assert_nearly_equal_weights,
    copy_run,
    final_state,
    metrics,
    run_jobs,
    tiny_config,
    trained,
)

HEADS = [2, 2, 4, 4]  # of 16 and of 8 channels
BASE: dict[str, Any] = {
    "model__layers": 4, "model__head_list": HEADS, "model__context": 16, "model__feed_forward": 16,
    "checkpoint__every": 1, "eval__every": 4,
}  # fmt: skip
STACK: dict[str, Any] = {
    **BASE, "train__steps": 10, "growth__policies": ["stack"], "growth__stack__start_layers": 1,
    "growth__stack__at": [3, 6],
}  # fmt: skip
INTERLEAVE: dict[str, Any] = {**STACK, "growth__stack__order": "interleave"}
TOGETHER: dict[str, Any] = {
    **BASE, "train__steps": 20, "train__batch_size": 32, "train__micro_batch": 16,
    "growth__policies": ["stack", "incrt", "prune", "sgt", "observe"], "growth__stack__at": [3],
    "growth__sgt__start": 6, "growth__sgt__window": 3, "growth__sgt__beta": 0.0, "growth__sgt__heads_per_layer": 1,
    "growth__sgt__max_layers": 2, "growth__observe__every": 4, **EAGER_BIRTHS, **EAGER_PRUNING,
}  # fmt: skip
# Heads leave while loops fade and grow.
PRUNED: dict[str, Any] = {
    **BASE, "train__steps": 16, "growth__policies": ["prune", "sgt"], "growth__sgt__start": 2, "growth__sgt__window": 4,
    "growth__sgt__beta": 0.0, "growth__sgt__birth": "paper", "growth__sgt__max_layers": 1, **EAGER_PRUNING,
}  # fmt: skip
NORMED: dict[str, Any] = {**TOGETHER, "model__qk_norm": True, "optimizer__kind": "muon"}
ARMS = {"stack": STACK, "normed": NORMED, "interleave": INTERLEAVE, "together": TOGETHER, "pruned": PRUNED}
Runs = Callable[[str], RunFolder]


@pytest.fixture(scope="session")
def grown(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The arms, each trained when it is first asked for. Never changed by a test: copy them."""
    made: dict[str, RunFolder] = {}

    def run(arm: str) -> RunFolder:
        if arm not in made:
            made[arm] = trained(data, tmp_path_factory.mktemp("together") / "run", **ARMS[arm])
        return made[arm]

    return run


def growth(run: RunFolder) -> list[GrowthEvent]:
    found = [event_from_dict(entry) for entry in run.read(run.events) if entry["event"] == "growth"]
    return [event for event in found if isinstance(event, GrowthEvent)]


def told(run: RunFolder) -> list[dict[str, Any]]:
    """What the policies decided and measured, as it was written."""
    return [entry for entry in run.read(run.events) if entry["event"] in ("growth", "measured")]


def plan_at(run: RunFolder, step: int) -> Plan:
    return Plan.from_dict(load_checkpoint(run.checkpoints / checkpoint_name(step)).state["plan"])


def assert_equal_growth(actual: RunFolder, expected: RunFolder) -> None:
    """Bit-equal weights, moments and gauges; equal metrics, decisions with all their readings, entropies, and state."""
    assert_equal_runs(actual, expected)
    assert told(actual) == told(expected)
    assert [*actual.read(actual.entropy)] == [*expected.read(expected.entropy)]
    assert final_state(actual) == final_state(expected)
    mine, other = (load_checkpoint(list_checkpoints(run.checkpoints)[-1]).growth for run in (actual, expected))
    torch.testing.assert_close(mine, other, rtol=0, atol=0)


# --- depth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "shapes", "copies"),
    [
        ("stack", {2: (2,), 4: (2, 2), 8: (2, 2, 4, 4)}, [[[1, 0]], [[2, 0], [3, 1]]]),
        ("interleave", {2: (2,), 4: (2, 4), 8: (2, 2, 4, 4)}, [[[1, 0]], [[2, 1], [1, 0]]]),
    ],
)
def test_stacking_reaches_the_target(
    arm: str, shapes: dict[int, tuple[int, ...]], copies: list[list[list[int]]], grown: Runs
) -> None:
    run = grown(arm)
    target = Plan.from_heads(HEADS, width=32, vocabulary=run.plan.vocabulary, context=16, feed_forward=16)
    assert run.plan.target == target.layers
    assert run.newest_plan == target
    assert {step: plan_at(run, step).heads for step in shapes} == shapes
    events = growth(run)
    assert [(event.step, event.policy, event.action, event.layer) for event in events] == [
        (3, "stack", "stack", None),
        (6, "stack", "stack", None),
    ]
    assert all("the loss jumps" in event.rule for event in events)
    assert [event.facts["copies"] for event in events] == copies
    assert [(event.facts["before"], event.facts["layers"]) for event in events] == [(1, 2), (2, 4)]
    assert [event.plan for event in events] == [plan_at(run, step).digest for step in (3, 6)]


@pytest.mark.parametrize("arm", ["stack", "interleave", "together"])
def test_flops_and_parameters_follow_the_structure(arm: str, grown: Runs) -> None:
    """The update with number n runs through the structure that the one before left."""
    run, total = grown(arm), 0
    config = run.config
    found = {entry["step"]: entry["flops"] for entry in metrics(run) if "flops" in entry}
    for step in range(1, config.train.steps + 1):
        plan = run.plan if step == 1 else plan_at(run, step - 1)
        total += config.train.batch_size * plan.context * plan.cost.training.causal
        assert found[step] == total
        saved = load_checkpoint(run.checkpoints / checkpoint_name(step)).model
        counted = sum(tensor.numel() for name, tensor in saved.items() if name != "gate_ramp")
        assert counted == plan_at(run, step).parameters


def test_the_loss_follows_the_structure(grown: Runs, data: Path, tmp_path: Path) -> None:
    """Until the first copies it is that of the model which does not grow; it jumps with them, and falls again."""
    run = grown("stack")
    plan = tmp_path / "plan.json"
    plan.write_text(replace(run.plan, target=()).to_json(), encoding="utf-8")
    small = {"train__steps": 10, "eval__every": 4, "checkpoint__every": 1}
    shallow = trained(data, tmp_path / "shallow", **small, model__plan=str(plan))
    ours, theirs = ([e["loss"] for e in metrics(r) if "loss" in e] for r in (run, shallow))
    assert ours[:3] == theirs[:3]
    assert ours[3] != theirs[3]
    assert ours[-1] < ours[0]


@pytest.mark.parametrize(("arm", "steps"), [("stack", (2, 3, 4, 6, 8)), ("together", (2, 4, 8, 20)), ("normed", (20,))])
def test_checkpoints_before_and_after_growth_are_evaluated_and_generate(
    arm: str, steps: tuple[int, ...], grown: Runs, tmp_path: Path, call: Call
) -> None:
    run = copy_run(grown(arm), tmp_path / "run")
    recorded = {entry["step"]: entry["held_out_loss"] for entry in metrics(run) if "held_out_loss" in entry}
    options = ("--windows", "6", "--distance-windows", "2", "--device", "cpu", "--json")
    for step in steps:
        evaluated = call("eval", run.path, "--step", str(step), *options)
        assert evaluated.code == 0, evaluated.err
        if step in recorded:
            assert json.loads(evaluated.out)["loss"] == pytest.approx(recorded[step], rel=1e-6)
        said = call(
            "generate", run.path, "--step", str(step), "--prompt", "Page 1", "--tokens", "8", "--temperature", "0",
            "--device", "cpu",
        )  # fmt: skip
        assert said.code == 0, said.err
        assert said.out.startswith("Page 1")
        if step == steps[-1]:
            loaded = load_run(run.path, device="cpu", step=step)
            assert loaded.model.plan == plan_at(run, step)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"growth__stack__start_layers": 4}, r"growth\.stack\.start_layers = 4: must be from 1 to 3"),
        ({"growth__stack__start_layers": -1}, r"growth\.stack\.start_layers = -1: must be at least 1"),
        ({"growth__stack__at": [float("inf")]}, r"growth\.stack\.at = inf: must be a part of the run"),
        ({"growth__policies": ["random_births"]}, r"growth\.random_births\.births = None: must be given"),
        ({"growth__stack__at": []}, r"growth\.stack\.at = \(\): must be one or more times"),
        ({"growth__stack__at": [6, 3]}, r"growth\.stack\.at = .*: must be times that follow one another"),
        ({"growth__stack__at": [10]}, r"growth\.stack\.at = 10\.0: must be before the end of the run, 10 updates"),
        ({"growth__stack__order": "top"}, r"growth\.stack\.order = 'top': must be one of stack, interleave"),
        (
            {"growth__stack__order": "interleave", "growth__stack__start_layers": 3, "growth__stack__at": [3]},
            r"growth\.stack\.start_layers = 3: must divide the 4 layers",
        ),
        (
            {"growth__policies": ["static_loops", "stack"], "growth__static_loops__layers": [1],
             "growth__static_loops__heads": "all"},
            r"growth\.policies = 'static_loops': cannot stand beside stack",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_named_before_anything_is_written(
    changes: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(tiny_config(data, **{**STACK, **changes}), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# --- all of it in one run --------------------------------------------------------------------------------------------


def test_births_stacks_and_loops_are_told(grown: Runs) -> None:
    run = grown("together")
    events = growth(run)
    assert {(event.policy, event.action) for event in events} >= {
        ("stack", "stack"), ("incrt", "birth"), ("prune", "removal"), ("sgt", "add"), ("sgt", "fix"),
    }  # fmt: skip
    assert [event.step for event in events] == sorted(event.step for event in events)
    assert all(event.rule for event in events)
    plan = run.plan
    for event in events:
        assert event.to_dict()["version"] == 1
        after = plan_at(run, event.step)
        together = [other for other in events if other.step == event.step]
        assert after.digest == together[-1].plan
        if event.action in ("birth", "removal"):
            assert event.layer is not None
            before = plan_at(run, event.step - 1) if event is not together[0] else plan
            assert event.facts["heads"][event.layer] == before.heads[event.layer] + (
                1 if event.action == "birth" else -1
            )
        if event.action == "add":
            assert event.layer is not None
            assert after.layers[event.layer].loop is not None
        plan = after
    assert events[0].action == "stack"
    assert all(event.step > 3 for event in events if event.policy == "sgt")  # it waits for the last block
    assert [layer.ceiling for layer in run.newest_plan.layers] == HEADS
    assert all(layer.heads <= (layer.ceiling or 0) for layer in run.newest_plan.layers)
    assert {len(entry["head_entropy"]) for entry in run.read(run.entropy)} == {4}
    assert len(run.newest_plan.loops) == 2


@pytest.mark.parametrize(("arm", "steps"), [
    ("stack", (2, 3, 5, 6)), ("together", (2, 3, 6, 8, 11, 19)), ("pruned", (2, 4, 8, 15)),
    ("normed", (3, 9)),
])  # fmt: skip
def test_resuming_anywhere_gives_the_same_run(arm: str, steps: tuple[int, ...], grown: Runs, tmp_path: Path) -> None:
    for step in steps:
        run = copy_run(grown(arm), tmp_path / f"run-{step}", last=step)
        resume(run.path)
        assert_equal_growth(run, grown(arm))


def test_normed_heads_stay_normed_through_all_growth(grown: Runs) -> None:
    run = grown("normed")
    assert {event.action for event in growth(run)} >= {"stack", "birth", "removal", "add"}
    assert all(plan_at(run, step).qk_norm for step in range(1, 21))
    model, tokens = load_run(run.path, device="cpu").model, torch.arange(16)[None]
    normed = model(tokens).logits
    model.follow_plan(replace(model.plan, qk_norm=False))
    assert not torch.allclose(model(tokens).logits, normed, atol=1e-3)


def test_heads_leave_beside_loops(grown: Runs) -> None:
    """So that a checkpoint has fewer heads than there are gates, and is gone on from all the same."""
    actions = {event.action for event in growth(grown("pruned"))}
    assert {"add", "fade", "removal"} <= actions
    plan = grown("pruned").newest_plan
    assert plan.gates is not None
    assert max(plan.heads) == 2 < plan.gates.heads


@pytest.mark.parametrize("arm", ["stack", "together"])
def test_two_processes_grow_as_one_does(arm: str, grown: Runs, tmp_path: Path) -> None:
    single = grown(arm)
    run = copy_run(single, tmp_path / "run", last=1)
    run_jobs((2, "resume", run.path))
    assert load_checkpoint(list_checkpoints(run.checkpoints)[-1]).state["processes"] == 2
    names = ("step", "event", "policy", "action", "layer", "heads", "plan")
    assert [[e.get(n) for n in names] for e in told(run)] == [[e.get(n) for n in names] for e in told(single)]
    assert_nearly_equal_weights(run, single)
    losses = ([entry["loss"] for entry in metrics(one) if "loss" in entry] for one in (run, single))
    assert next(losses) == pytest.approx(next(losses), rel=2e-3)
