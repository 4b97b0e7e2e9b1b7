"""Growth in a training run: recorded, counted, resumed bit by bit, refused early, and alike in two processes."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from commands import Call
from meristem.config import OptimizerConfig, build_config, flatten, load_config
from meristem.errors import InputError, RunError
from meristem.gauges.entropy import EntropyGauge, HeadReadings, read_heads
from meristem.growth import BlockLoop, LoopHeads, Sgt
from meristem.growth.descriptions import describe_loops, describe_structure
from meristem.growth.events import GrowthEvent, event_from_dict
from meristem.model import Decoder
from meristem.plan import Gates, Loop, Plan
from meristem.runs.checkpoint import MANIFEST, list_checkpoints, load_checkpoint
from meristem.runs.log import Log
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training.display import Lines, Live
from meristem.training.growth_from_config import starting_plan, structure_of
from meristem.training.optimizer import make_optimizer
from meristem.training.train import resume, train

from .helpers import assert_equal_runs, copy_run, final_state, final_tensors, metrics, run_jobs, tiny_config, trained
from .test_display import ESCAPES
from .test_interruptions import kill_loop
from .test_resume import signal_at

# Four layers, the first of which never grows. Decisions after 6, 11, 16 and 21 updates.
STEPS, START, WINDOW = 26, 6, 5
HEADS = [2, 4, 4, 4]
GROWING: dict[str, Any] = {
    "model__head_list": HEADS, "train__steps": STEPS, "eval__every": 8, "checkpoint__every": 2,
    "growth__policy": "sgt", "growth__start": START, "growth__window": WINDOW, "growth__observe": True,
    "growth__observe_every": 4,
}  # fmt: skip
TWICE: dict[str, Any] = {"growth__passes": 2, "growth__max_layers": 1, "train__steps": 18}
ARMS: dict[str, dict[str, Any]] = {
    "gate": {},
    "two passes": TWICE,
    "paper": {**TWICE, "growth__birth": "paper"},
}
UNOBSERVED: dict[str, Any] = {"growth__observe": False, "growth__observe_every": 0}
VANILLA: dict[str, Any] = {**GROWING, "growth__policy": "none"}
Runs = Callable[[str], RunFolder]
WARNING = re.compile(r"^warning, step (\d+): the loop of layer (\d+) adds more than the stream itself holds$", re.M)


@pytest.fixture(scope="session")
def grown(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The arms, each trained when it is first asked for. Never changed by a test: copy them."""
    made: dict[str, RunFolder] = {}

    def run(arm: str) -> RunFolder:
        if arm not in made:
            changes = VANILLA if arm == "vanilla" else {**GROWING, **ARMS[arm]}
            made[arm] = trained(data, tmp_path_factory.mktemp("grown") / "run", **changes)
        return made[arm]

    return run


def decisions(run: RunFolder) -> list[dict[str, Any]]:
    return [entry for entry in run.read(run.events) if entry["event"] == "growth"]


def observations(run: RunFolder) -> list[dict[str, Any]]:
    return list(run.read(run.entropy))


def actions(run: RunFolder) -> list[tuple[int, str, int | None]]:
    return [(entry["step"], entry["action"], entry["layer"]) for entry in decisions(run)]


def last_plan(run: RunFolder) -> Plan:
    return Plan.from_dict(load_checkpoint(list_checkpoints(run.checkpoints)[-1]).state["plan"])


def assert_equal_growth(actual: RunFolder, expected: RunFolder) -> None:
    """Bit-equal weights, equal metrics, decisions with all their readings, observations, and final state."""
    assert_equal_runs(actual, expected)
    assert decisions(actual) == decisions(expected)
    assert observations(actual) == observations(expected)
    assert final_state(actual) == final_state(expected)


# --- a run that grows ------------------------------------------------------------------------------------------------


def test_a_run_grows_deep_to_shallow_and_says_so(grown: Runs) -> None:
    run = grown("gate")
    assert actions(run) == [(6, "add", 3), (11, "add", 2), (16, "add", 1), (21, "fix", None)]
    loops = {entry["layer"]: Loop(tuple(entry["heads"]), 1) for entry in decisions(run)[:3]}
    assert last_plan(run).loops == dict(sorted(loops.items()))
    assert (run.plan.loops, run.plan.gates) == ({}, Gates(1, 2, trained=True))
    for entry in decisions(run)[:3]:
        entropies = entry["head_entropy"][entry["layer"]]
        assert entry["heads"] == sorted(sorted(range(4), key=lambda head: -entropies[head])[:2])
        assert [len(layer) for layer in entry["head_entropy"]] == [2, 4, 4, 4]
    digests = [entry["plan"] for entry in decisions(run)]
    assert len(set(digests)) == 3
    assert digests[-1] == last_plan(run).digest
    assert [entry["step"] for entry in observations(run)] == list(range(4, STEPS + 1, 4))
    assert "loops" not in observations(run)[0]
    (loop,) = observations(run)[1]["loops"]  # after update 8, in which strengths were those of 7
    assert loop["gates"] == [pytest.approx([(7 - START) / WINDOW] * 2, abs=0.01)]  # but for what was trained


def test_sgt_oracle_20_the_first_loss_after_a_birth_is_that_of_the_run_that_does_not_grow(grown: Runs) -> None:
    """Gates that nobody uses yet change nothing either."""
    ours, theirs = (
        [entry["loss"] for entry in metrics(grown(arm)) if "loss" in entry] for arm in ("gate", "vanilla")
    )  # fmt: skip
    assert ours[: START + 1] == theirs[: START + 1]
    assert ours[START + 1] != theirs[START + 1]


def test_two_passes_and_paper_birth(grown: Runs) -> None:
    for arm in ("two passes", "paper"):
        run = grown(arm)
        assert actions(run) == [(6, "add", 3), (11, "deepen", 3), (16, "fix", None)]
        assert last_plan(run).loops == {3: Loop(tuple(decisions(run)[0]["heads"]), 2)}
    fading = Plan.from_dict(load_checkpoint(grown("paper").checkpoints / "step-00000010").state["plan"])
    stay = tuple(decisions(grown("paper"))[0]["heads"])
    assert fading.loops == {3: Loop((0, 1, 2, 3), 1, fading=tuple(head for head in range(4) if head not in stay))}
    assert fading.gates == Gates(2, 4, trained=False)
    assert "gate_delta" not in final_tensors(grown("paper"))


@pytest.mark.parametrize("arm", ["vanilla", *ARMS])
def test_flops_are_counted_with_the_structure_of_the_time(arm: str, grown: Runs) -> None:
    """The sum over updates; a loop over m channels costs 8 d m + 2 (T + 1) m a token, and three times that to train."""
    run = grown(arm)
    plan, config = run.plan, run.config
    births = [(entry["step"], entry["layer"], entry["heads"]) for entry in decisions(run) if entry["layer"] is not None]
    first = {layer: step for step, layer, _ in reversed(births)}

    def channels(update: int) -> int:
        """Of all loops that the update with this number, from 1, runs through."""
        total = 0
        for step, layer, heads in births:
            fading = arm == "paper" and step == first[layer] and update <= step + WINDOW
            total += (plan.layers[layer].head_dim * (4 if fading else len(heads))) if update > step else 0
        return total

    d, t = plan.width, plan.context
    expected, total = {}, 0
    for update in range(1, config.train.steps + 1):
        per_token = 3 * (plan.cost.forward.causal + channels(update) * (8 * d + 2 * (t + 1)))
        total += config.train.batch_size * t * per_token
        expected[update] = total
    found = {entry["step"]: entry["flops"] for entry in metrics(run) if "flops" in entry}
    assert found == expected


# --- O17: resume -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "step"),
    [
        ("gate", 4),  # before the first decision, entropies half averaged
        ("gate", 6),  # at a decision
        ("gate", 8),  # in a window, while strengths rise
        ("gate", 16),  # at a decision, when an older pass is at full strength
        ("gate", 22),  # when all is decided, but strengths had still to rise
        ("two passes", 10),
        ("two passes", 12),
        ("paper", 6),  # all heads at full strength
        ("paper", 10),  # just before those not chosen are dropped
        ("paper", 14),
        ("vanilla", 10),  # which observes
    ],
)
def test_sgt_oracle_17_resuming_while_a_model_grows_gives_the_same_run(
    arm: str, step: int, grown: Runs, tmp_path: Path
) -> None:
    run = copy_run(grown(arm), tmp_path / "run", last=step)
    assert observations(run)
    resume(run.path)
    assert_equal_growth(run, grown(arm))


@pytest.mark.parametrize("update", [START - 1, START + 1])
def test_sgt_oracle_17_a_signal_while_a_model_grows(
    update: int, data: Path, grown: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, update, signal.SIGTERM)
        outcome = train(tiny_config(data, **GROWING), tmp_path / "run")
    assert outcome.signal == signal.SIGTERM
    assert update < outcome.step < update + 4
    run = RunFolder.open(tmp_path / "run")
    resume(run.path)
    assert_equal_growth(run, grown("gate"))


def test_sgt_oracle_17_kills_while_a_model_grows(data: Path, tmp_path: Path) -> None:
    start, window = 2, 6
    growth = {"growth__start": start, "growth__window": window, "growth__observe_every": 3}
    changes = {**GROWING, **growth, "train__steps": 28, "checkpoint__every": 1, "checkpoint__keep": 2}
    run, reached = kill_loop(data, tmp_path, kills=5, seed=0, **changes)
    assert len({step for step in reached if start <= step < start + 3 * window}) >= 2  # in the middle of growth
    unkilled = trained(data, tmp_path / "unkilled", **changes)
    assert [action for _, action, _ in actions(unkilled)] == ["add", "add", "add", "fix"]
    assert_equal_growth(run, unkilled)


def forget(checkpoint: Path, *keys: str) -> None:
    """Make a checkpoint look as if these entries had not been written yet in its time."""
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    for key in keys:
        del state[key]
    content = json.dumps(state).encode()
    (checkpoint / "state.json").write_bytes(content)
    manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"]["state.json"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def test_a_checkpoint_from_before_there_was_growth_resumes(whole: RunFolder, tmp_path: Path) -> None:
    run = copy_run(whole, tmp_path / "run", last=8)
    (newest,) = [path for path in list_checkpoints(run.checkpoints) if path.name == "step-00000008"]
    assert load_checkpoint(newest).state["growth"] is None
    forget(newest, "growth", "flops")
    assert "flops" not in load_checkpoint(newest).state
    resume(run.path)
    assert_equal_runs(run, whole)  # the count of FLOPs among the rest


# --- arms ------------------------------------------------------------------------------------------------------------


SHORT: dict[str, Any] = {
    "train__steps": 12, "growth__start": 2, "growth__window": 3, "eval__every": 0, "checkpoint__every": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "order", "lowest"),
    [
        ({"growth__heads": "low"}, [3, 2, 1], True),
        ({"growth__order": "shallow_first"}, [1, 2, 3], False),
        ({"growth__heads": "low", "growth__order": "shallow_first", "growth__probe": "fused"}, [1, 2, 3], True),
    ],
)
def test_low_and_shallow_first_arms(
    changes: dict[str, Any], order: list[int], lowest: bool, data: Path, tmp_path: Path
) -> None:
    run = trained(data, tmp_path / "run", **{**GROWING, **SHORT, **changes})
    assert [layer for _, action, layer in actions(run) if action == "add"] == order
    sign = 1 if lowest else -1
    for entry in decisions(run)[:3]:
        entropies = entry["head_entropy"][entry["layer"]]
        assert entry["heads"] == sorted(sorted(range(4), key=lambda head: sign * entropies[head])[:2])


def test_gates_that_are_not_trained_end_at_full_strength(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", **{**GROWING, **SHORT, "growth__train_gates": False})
    assert run.plan.gates == Gates(1, 2, trained=False)
    assert "gate_delta" not in final_tensors(run)
    deepest = [loop for entry in decisions(run) for loop in entry.get("loops", ()) if loop["layer"] == 3]
    assert [loop["gates"][0] for loop in deepest] == [pytest.approx([2 / 3] * 2), [1.0, 1.0], [1.0, 1.0]]


# Without what a structure that does not grow has no use for.
BRIEF: dict[str, Any] = {
    "train__steps": 3, "eval__every": 0, "checkpoint__every": 2, "growth__start": Sgt.start,
    "growth__window": Sgt.window, **UNOBSERVED,
}  # fmt: skip


def static(data: Path, out: Path, **changes: Any) -> RunFolder:
    """A short run of a structure that is there from the first step."""
    run = trained(data, out, **{**GROWING, **BRIEF, **changes})
    assert run.plan == last_plan(run)
    assert decisions(run) == []
    return run


@pytest.mark.parametrize(("heads", "count"), [("random", 2), ("all", 4)])
def test_static_heads_of_named_layers(heads: str, count: int, data: Path, tmp_path: Path) -> None:
    changes = {"growth__layers": [3, 1], "growth__heads": heads, "growth__passes": 2, "growth__seed": 5}
    run = static(data, tmp_path / "run", **changes)
    assert set(run.plan.loops) == {1, 3}
    for layer, loop in run.plan.loops.items():
        assert (len(loop.heads), loop.passes) == (count, 2)
        if heads == "random":
            drawn = Sgt(total_steps=100, heads="random", seed=5).chosen_heads(layer, [0.0] * 4)
            assert loop.heads == drawn
    tensors = final_tensors(run)
    assert bool((tensors["gate_ramp"][[1, 3]] == 1).all())  # at full strength from the start
    assert not tensors["gate_ramp"][[0, 2]].any()
    assert bool((tensors["gate_delta"] != 0).any())
    vanilla = trained(data, tmp_path / "vanilla", **{**VANILLA, **BRIEF})
    assert metrics(run)[0]["loss"] != metrics(vanilla)[0]["loss"]
    resumed = copy_run(run, tmp_path / "resumed", last=2)
    resume(resumed.path)
    assert_equal_runs(resumed, run)


def test_random_heads_have_a_seed(data: Path, tmp_path: Path) -> None:
    changes = {"growth__layers": [1, 2, 3], "growth__heads": "random", "train__steps": 2}
    plans = [static(data, tmp_path / f"{seed}", growth__seed=seed, **changes).plan for seed in (0, 1)]
    assert plans[0].loops != plans[1].loops


def test_static_structure_like_that_of_a_run_that_grew(grown: Runs, data: Path, tmp_path: Path) -> None:
    source = grown("gate")
    run = static(data, tmp_path / "high", growth__like=str(source.path))
    assert run.plan.loops == last_plan(source).loops
    assert run.config["growth.static_loops.like"] == str(source.path)
    low = static(data, tmp_path / "low", growth__like=str(source.path), growth__heads="low")
    entropies = observations(source)[-1]["head_entropy"]
    assert observations(source)[-1]["step"] == 24
    lowest = {layer: tuple(sorted(sorted(range(4), key=lambda h: entropies[layer][h])[:2])) for layer in (1, 2, 3)}
    assert {layer: loop.heads for layer, loop in low.plan.loops.items()} == lowest
    blocks = static(data, tmp_path / "block", growth__like=str(source.path), growth__unit="block")
    assert [layer.repeats for layer in blocks.plan.layers] == [0, 1, 1, 1]


def test_static_structure_like_what_would_have_grown_in_a_run_that_did_not(
    grown: Runs, data: Path, tmp_path: Path
) -> None:
    """By its last entropies: the deepest of the shortlist, then what is shallower."""
    source = grown("vanilla")
    assert decisions(source) == []
    entropies = observations(source)[-1]["head_entropy"]
    means = [sum(layer) / len(layer) for layer in entropies]
    listed = sorted(range(1, 4), key=lambda layer: -means[layer])[:2]
    changes = {"growth__like": str(source.path), "growth__shortlist": 2, "growth__max_layers": 2}
    run = static(data, tmp_path / "high", **changes)
    expected = {layer: sorted(sorted(range(4), key=lambda h: -entropies[layer][h])[:2]) for layer in sorted(listed)}
    assert {layer: list(loop.heads) for layer, loop in run.plan.loops.items()} == expected
    blocks = static(data, tmp_path / "block", growth__unit="block", growth__passes=2, **changes)
    assert [layer.repeats for layer in blocks.plan.layers] == [2 if layer in listed else 0 for layer in range(4)]


def test_static_structure_in_a_run_that_is_shorter_than_a_window(grown: Runs, data: Path, tmp_path: Path) -> None:
    """As windows that are a part of the run have at least 50 updates, a shorter run is one."""
    run = trained(data, tmp_path / "run", **{**GROWING, **BRIEF, "growth__like": str(grown("vanilla").path),
                                             "growth__window": 0.05})  # fmt: skip
    assert len(run.plan.loops) == 3


def uneven() -> Plan:
    """As a run with at most two passes may leave it: a layer with two, one with one."""
    plan = replace(Plan.from_heads([2, 4, 4, 4], width=32, vocabulary=320, context=32), gates=Gates(2, 2))
    return LoopHeads(3, (0, 2), 2).apply(LoopHeads(1, (3,), 1).apply(plan))


def test_a_structure_is_taken_over_as_it_is(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a run, whose layers may have different passes, and from its plan in a file."""

    def read(model: Decoder, tokens: Tensor, gauge: EntropyGauge) -> HeadReadings:
        """Each layer leads until it has grown; only the last one still does then, and goes deeper."""
        readings = read_heads(model, tokens, gauge)
        leader = [3, 2, 1, 1][len(model.plan.loops)]
        entropy = torch.tensor([0.5 if layer == leader else 0.1 for layer, n in enumerate(HEADS) for _ in range(n)])
        return HeadReadings(entropy * len(tokens), readings.updates)

    monkeypatch.setattr("meristem.gauges.entropy.read_heads", read)
    short = {**SHORT, **UNOBSERVED, "train__steps": 20}
    source = trained(data, tmp_path / "source", **{**GROWING, **short, "growth__passes": 2, "growth__shortlist": 1})
    passes = {layer: loop.passes for layer, loop in source.newest_plan.loops.items()}
    assert passes == {1: 2, 2: 1, 3: 1}
    file = tmp_path / "plan.json"
    file.write_text(source.newest_plan.to_json(), encoding="utf-8")
    for like in (source.path, file):
        for own in (1, 2, 3):  # the run's own number does not count
            run = static(data, tmp_path / f"{like.name} {own}", growth__like=str(like), growth__passes=own)
            assert run.plan.loops == source.newest_plan.loops
            assert run.plan.gates == Gates(2, 2, trained=True)
            ramp = final_tensors(run)["gate_ramp"]
            assert [[int(row.sum()) for row in layer] for layer in ramp] == [[0, 0], [2, 2], [2, 0], [2, 0]]
    blocks = static(data, tmp_path / "blocks", growth__like=str(file), growth__unit="block", growth__passes=2)
    assert [layer.repeats for layer in blocks.plan.layers] == [0, 2, 2, 2]


def test_whole_blocks_are_a_structure_to_be_like(data: Path, tmp_path: Path) -> None:
    """Their layers are taken, and the heads by the last entropies."""
    changes = {"growth__unit": "block", "growth__layers": [3, 1], "growth__passes": 2, "growth__observe": True}
    source = static(data, tmp_path / "source", **changes, growth__observe_every=1)
    run = static(data, tmp_path / "run", growth__like=str(source.path))
    entropies = observations(source)[-1]["head_entropy"]
    expected = {layer: tuple(sorted(sorted(range(4), key=lambda h: -entropies[layer][h])[:2])) for layer in (1, 3)}
    assert {layer: loop.heads for layer, loop in run.plan.loops.items()} == expected
    again = static(data, tmp_path / "again", growth__like=str(source.path), growth__unit="block", growth__passes=2)
    assert again.plan == source.plan


def test_a_run_that_has_not_ended_is_nothing_to_be_like(grown: Runs, data: Path, tmp_path: Path) -> None:
    source = copy_run(grown("gate"), tmp_path / "source", last=22)
    assert len(source.newest_plan.loops) == 3
    changes = {**GROWING, **BRIEF, "growth__like": str(source.path)}
    with pytest.raises(RunError, match=r"source: has not ended yet \(step 22\); `like` takes finished runs"):
        train(tiny_config(data, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    begun = copy_run(grown("gate"), tmp_path / "begun", last=0)
    with pytest.raises(RunError, match=r"begun: has not ended yet \(step 0\)"):
        structure_of(begun.path, Sgt(total_steps=100))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (LoopHeads(5, (0, 1), 1), r"layers? = 5 must be in 0\.\.3"),
        (LoopHeads(3, (0, 5), 1), r"loop\.heads = \(0, 5\) must be distinct heads out of 0\.\.3"),
    ],
)
@pytest.mark.parametrize("unit", ["head", "block"])
def test_a_structure_that_does_not_fit_names_the_run_it_is_of(
    loop: LoopHeads, message: str, unit: str, data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(loop.apply(Plan.uniform(layers=6, width=48, heads=6)).to_json(), encoding="utf-8")
    changes = {**GROWING, **BRIEF, "growth__like": str(file), "growth__unit": unit}
    table = r"growth\.static_loops" if unit == "head" else r"growth\.block_loop"
    if unit == "block" and loop.layer == 3:  # whole blocks fit whatever their heads
        assert starting_plan(tiny_config(data, **changes), Plan.uniform(layers=4, width=32, heads=4)).is_looped
        return
    with pytest.raises(InputError, match=rf"{table}\.like = '.*plan\.json': does not fit this model: {message}"):
        train(tiny_config(data, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_without_heads_enough_is_nothing_to_be_like(grown: Runs, data: Path, tmp_path: Path) -> None:
    """This model has eight heads a layer, the one to be like four."""
    changes = {"model__head_list": [8] * 4, "growth__heads_per_layer": 5, "growth__like": str(grown("vanilla").path)}
    with pytest.raises(RunError, match=r"run: has nothing to take after"):
        train(tiny_config(data, **{**GROWING, **BRIEF, **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_plan_is_named(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"heads": [4, 4]}', encoding="utf-8")
    with pytest.raises(InputError) as error:
        train(tiny_config(data, **{**GROWING, **BRIEF, "growth__like": str(file)}), tmp_path / "run")
    assert error.value.field == "growth.static_loops.like"


def test_a_plan_file_has_no_entropies(data: Path, tmp_path: Path) -> None:
    """So it has to have loops, and says nothing about other heads."""
    file = tmp_path / "plan.json"
    message = r"plan\.json: has no loops of high-entropy heads and no recorded entropies to take after"
    for plan, heads in ((uneven().bare, "high"), (uneven(), "low"), (uneven(), "random")):
        file.write_text(plan.to_json(), encoding="utf-8")
        with pytest.raises(RunError, match=message):
            train(
                tiny_config(data, **{**GROWING, **BRIEF, "growth__like": str(file), "growth__heads": heads}),
                tmp_path / "run",
            )
    assert not (tmp_path / "run").exists()


def test_whole_blocks_of_named_layers(data: Path, tmp_path: Path) -> None:
    changes = {"growth__unit": "block", "growth__layers": [2], "growth__observe": True, "growth__observe_every": 0}
    run = static(data, tmp_path / "run", **changes)
    assert run.plan == BlockLoop((2,), 1).prepare(run.plan)
    assert run.plan.gates is None
    vanilla = trained(data, tmp_path / "vanilla", **{**VANILLA, **BRIEF})
    block = vanilla.plan.layer_cost(vanilla.plan.layers[2]).training.causal
    per_step = run.config.train.batch_size * run.plan.context
    assert metrics(run)[0]["flops"] - metrics(vanilla)[0]["flops"] == per_step * block
    assert [entry["step"] for entry in observations(run)] == [1, 2, 3]  # a hundredth of the run, but at least 1
    resumed = copy_run(run, tmp_path / "resumed", last=2)
    resume(resumed.path)
    assert_equal_growth(resumed, run)


def test_a_run_without_loops_or_entropies_is_nothing_to_be_like(whole: RunFolder, data: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no loops of high-entropy heads and no recorded entropies to take after"):
        train(tiny_config(data, **{**GROWING, **BRIEF, "growth__like": str(whole.path)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_entropies_to_be_like_are_the_newest(grown: Runs, tmp_path: Path) -> None:
    run = copy_run(grown("gate"), tmp_path / "run")
    entropies = decisions(run)[-1]["head_entropy"]
    reversed_ones = [[-entropy for entropy in layer] for layer in entropies]
    run.entropy.write_text(json.dumps({"step": 4, "head_entropy": reversed_ones}) + "\n", encoding="utf-8")
    policy = Sgt(total_steps=100, heads="low")
    found = structure_of(run.path, policy)
    expected = {layer: Loop(policy.chosen_heads(layer, entropies[layer]), 1) for layer in (1, 2, 3)}
    assert found == expected
    entries = [*run.read(run.events)]
    late = {"step": STEPS, "head_entropy": [[0.5] * 2, [0.5] * 4, [0.5] * 4, [0.5, None, 0.5, 0.5]]}
    Log(run.entropy).append(late)  # one that is not whole says nothing
    assert structure_of(run.path, policy) == expected
    fade = {"step": STEPS, "event": "growth", "action": "fade", "layer": 3, "heads": [0, 1], "passes": 1}
    Log(run.events).append(fade)  # neither does one without a reading
    assert structure_of(run.path, policy) == expected
    assert len([*run.read(run.events)]) == len(entries) + 1


def test_gates_are_not_decayed() -> None:
    model = Decoder(Sgt(total_steps=100).prepare(Plan.from_heads([4, 4], width=16, vocabulary=11, context=4)))
    groups = make_optimizer(model, OptimizerConfig(weight_decay=0.1)).param_groups
    (decay,) = [g["weight_decay"] for g in groups if any(p is model.gate_delta for p in g["params"])]
    assert decay == 0


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["gate", "two passes"])
def test_a_grown_run_is_evaluated_and_generates(arm: str, grown: Runs, tmp_path: Path, call: Call) -> None:
    run = copy_run(grown(arm), tmp_path / "run")
    windows = str(run.config.eval.windows)
    evaluated = call("eval", run.path, "--windows", windows, "--distance-windows", "2", "--device", "cpu", "--json")
    assert evaluated.code == 0, evaluated.err
    recorded = [entry["held_out_loss"] for entry in metrics(run) if "held_out_loss" in entry]
    assert json.loads(evaluated.out)["loss"] == pytest.approx(recorded[-1], rel=1e-6)
    said = call(
        "generate", run.path, "--prompt", "Page 1: 1", "--tokens", "12", "--temperature", "0", "--device", "cpu"
    )
    assert said.code == 0, said.err
    loaded = load_run(run.path, device="cpu")
    assert loaded.model.plan.loops
    ids = [int(token) for token in loaded.tokenizer.encode("Page 1: 1")]
    with torch.no_grad():
        for _ in range(12):
            logits = loaded.model(torch.tensor([ids])).logits[0, -1, : loaded.tokenizer.vocabulary]
            ids.append(int(logits.argmax()))
    assert said.out.rstrip("\n") == loaded.tokenizer.decode(ids).rstrip("\n")


def test_an_earlier_checkpoint_is_evaluated_with_the_structure_of_its_time(
    grown: Runs, tmp_path: Path, call: Call
) -> None:
    run = copy_run(grown("gate"), tmp_path / "run")
    options = ("--windows", "6", "--distance-windows", "2", "--device", "cpu", "--json")
    recorded = {entry["step"]: entry["held_out_loss"] for entry in metrics(run) if "held_out_loss" in entry}
    for step in (8, 16):
        evaluated = call("eval", run.path, "--step", str(step), *options)
        assert json.loads(evaluated.out)["loss"] == pytest.approx(recorded[step], rel=1e-6)


# --- what a person sees ----------------------------------------------------------------------------------------------

LOOPED = LoopHeads(5, (0, 3), 1).apply(Plan.uniform(layers=6, width=768, heads=12))


def test_loops_in_a_few_characters() -> None:
    assert describe_loops(LOOPED) == "L5:h0,h3 x1"
    assert describe_loops(LoopHeads(2, (7, 1), 3).apply(LOOPED)) == "L5:h0,h3 x1 L2:h7,h1 x3"
    assert describe_loops(BlockLoop((4, 1), 2).prepare(LOOPED)) == "L5:h0,h3 x1 L4:block x2 L1:block x2"
    assert describe_loops(Plan.uniform(layers=6, width=768, heads=12)) == ""
    assert describe_structure(LOOPED) == "heads 12x6, looped L5:h0,h3 x1"


def test_lines_show_the_loops_once_they_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines(Plan.uniform(layers=6, width=768, heads=12), 3) as display:
        display.update({"step": 1, "loss": 2.0})
        display.restructured(LOOPED, 3)
        display.update({"step": 3, "loss": 2.0})
    _, first, last = capsys.readouterr().out.splitlines()
    assert first == "step 1/3  loss 2.0000"
    assert last == "step 3/3  loss 2.0000  L5:h0,h3 x1"


@pytest.mark.parametrize(("width", "beside"), [(80, True), (60, True), (50, False), (40, False), (36, False)])
def test_the_live_display_shows_the_loops_beside_the_numbers_or_below_them(width: int, beside: bool) -> None:
    console = Console(width=width, force_terminal=True, file=io.StringIO(), _environ={})
    with Live(Plan.uniform(layers=6, width=768, heads=12), 2000, console) as display:
        display.restructured(LOOPED, 2000)
        display.update({"step": 100, "loss": 2.0, "left": 100.0})
    assert isinstance(console.file, io.StringIO)
    rows = [row.rstrip() for row in re.split(r"[\r\n]+", ESCAPES.sub("", console.file.getvalue()).rstrip())]
    assert all(len(row) <= width for row in rows)
    if beside:
        assert rows[-1].endswith("loss 2.0000  1:40 left  L5:h0,h3 x1")
    else:
        above = " ".join(
            " ".join(rows[-3:-1] if width < 50 else rows[-2:-1]).split()
        )  # a narrow one has the time below
        assert re.search(r"^[━╸╺ ]+ 100/2000 loss 2\.0000 1:40 left$", above)
        assert rows[-1].strip() == "L5:h0,h3 x1"


def test_loops_that_are_wider_than_the_display_are_cut() -> None:
    plan = Plan.uniform(layers=6, width=768, heads=12)
    for layer in range(6):
        plan = LoopHeads(layer, (0, 3, 7, 11), 3).apply(plan)
    console = Console(width=60, force_terminal=True, file=io.StringIO(), _environ={})
    with Live(plan, 2000, console) as display:
        display.update({"step": 100, "loss": 2.0, "left": 100.0})
    assert isinstance(console.file, io.StringIO)
    rows = [row.rstrip() for row in re.split(r"[\r\n]+", ESCAPES.sub("", console.file.getvalue()).rstrip())]
    assert "loss 2.0000  1:40 left" in rows[-2]
    assert describe_loops(plan).startswith(rows[-1].strip())
    assert len(rows[-1].strip()) > 30


def test_decisions_and_loops_are_told_while_a_model_trains(
    grown: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = grown("gate")
    run = copy_run(source, tmp_path / "run", last=10)
    resume(run.path)
    text = capsys.readouterr().out
    (first, second, third, _) = (",".join(f"h{head}" for head in entry["heads"] or ()) for entry in decisions(source))
    assert f"heads 2x1 4x3, looped L3:{first} x1\n" in text  # as it is resumed
    assert re.search(rf"step {STEPS}/{STEPS} .*  L3:{first} x1 L2:{second} x1 L1:{third} x1\n", text)
    assert "step 11: layer 2 now loops heads " in text
    assert "step 21: growth has ended (3 layers have grown, and none of these that is on the shortlist " in text
    told = [str(event_from_dict(entry)) for entry in decisions(source)]
    for entry, line in zip(decisions(source)[1:], told[1:], strict=True):
        reason = r"; entropy [\d.]+, at least [\d.]+, the lowest on the shortlist" if entry["action"] == "add" else ""
        assert re.search(rf"^step {entry['step']}: {re.escape(line)}{reason}$", text, re.MULTILINE)
    assert told[0].endswith(f"(deepest layer of the shortlist; shortlist {decisions(source)[0]['shortlist']})")


@pytest.fixture
def troubled(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose first entropies are not finite, and whose loops are too strong."""
    calls = itertools.count(1)

    def read(model: Decoder, tokens: Tensor, gauge: EntropyGauge) -> HeadReadings:
        readings = read_heads(model, tokens, gauge)
        entropy = readings.entropy * (math.nan if next(calls) == 1 else 1.0)
        return HeadReadings(entropy, {key: torch.tensor(1.5) for key in readings.updates})

    monkeypatch.setattr("meristem.gauges.entropy.read_heads", read)
    return trained(data, tmp_path / "run", **{**GROWING, **SHORT, **UNOBSERVED})


def test_a_window_without_a_decision_and_loops_that_are_too_strong_are_told(
    capsys: pytest.CaptureFixture[str], troubled: RunFolder
) -> None:
    assert actions(troubled) == [(2, "wait", None), (5, "add", 3), (8, "add", 2), (11, "fix", None)]
    text = capsys.readouterr().out
    assert "step 2: no growth (an entropy is not finite: no decision in this window)\n" in text
    assert WARNING.findall(text) == [("8", "3"), ("11", "2")]  # once each, the first time it is seen


@pytest.mark.parametrize("size", [1.5, math.nan, math.inf])
def test_loops_that_are_too_strong_are_told_by_observations_too(
    size: float, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between decisions, and where there are none; also if there is no telling how strong they are."""

    def read(model: Decoder, tokens: Tensor, gauge: EntropyGauge) -> HeadReadings:
        readings = read_heads(model, tokens, gauge)
        sizes = {key: torch.tensor(size if key == (3, 2) else 0.5) for key in readings.updates}
        return HeadReadings(readings.entropy, sizes)

    monkeypatch.setattr("meristem.gauges.entropy.read_heads", read)
    observed = {"growth__observe": True, "growth__observe_every": 1}
    changes = {"growth__layers": [1, 3], "growth__heads": "all", "growth__passes": 2, **observed}
    run = static(data, tmp_path / "run", **changes)
    text = capsys.readouterr().out
    assert WARNING.findall(text) == [("1", "3")]
    last = size if math.isfinite(size) else None
    found = [loop["update"] for entry in observations(run) for loop in entry["loops"]]
    assert found == [[0.5, 0.5], [0.5, last]] * 3


def test_what_is_not_finite_is_no_reason_to_write_a_log_that_only_python_reads(troubled: RunFolder) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    for line in troubled.events.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_deeper_loop_and_a_window_without_a_decision_in_words() -> None:
    facts = {"heads": [0, 3], "passes": 2, "shortlist": [5, 1]}
    event = GrowthEvent(9, "sgt", "deepen", "why", 5, facts)
    assert str(event) == "layer 5 now loops heads 0, 3 in 2 passes (why; shortlist [5, 1])"
    waited = GrowthEvent(9, "sgt", "wait", "?", facts={"heads": None, "passes": None, "shortlist": []})
    assert str(waited) == "no growth (?)"


def test_a_published_birth_and_the_end_of_its_fade_in_words() -> None:
    facts = {"heads": [0, 3], "passes": 1, "shortlist": [5, 1], "birth": "paper"}
    born = GrowthEvent(9, "sgt", "add", "why", 5, facts)
    assert str(born) == "layer 5 now loops all heads, 0, 3 to stay (why; shortlist [5, 1])"
    gate = replace(born, facts={**facts, "birth": "gate"})
    assert str(gate) == "layer 5 now loops heads 0, 3 (why; shortlist [5, 1])"
    faded = replace(born, action="fade", facts={"heads": [0, 3], "passes": 1, "shortlist": []})
    assert str(faded) == "layer 5 now loops heads 0, 3 only (why)"
    deeper = replace(born, action="deepen", facts={**facts, "passes": 2})
    assert str(deeper) == "layer 5 now loops heads 0, 3 in 2 passes (why; shortlist [5, 1])"


def test_the_end_of_a_fade_is_told_and_recorded(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"growth__birth": "paper", **UNOBSERVED, "growth__max_layers": 1}
    run = trained(data, tmp_path / "run", **{**GROWING, **SHORT, **changes})
    assert actions(run) == [(2, "add", 3), (5, "fix", None), (5, "fade", 3)]
    born, fixed, faded = decisions(run)
    assert (born["birth"], fixed["birth"]) == ("paper", "paper")
    assert faded["heads"] == born["heads"]
    assert faded["plan"] == run.newest_plan.digest != born["plan"]
    text, heads = capsys.readouterr().out, ", ".join(map(str, born["heads"]))
    assert f"step 2: layer 3 now loops all heads, {heads} to stay (" in text
    assert f"step 5: layer 3 now loops heads {heads} only (a window has passed since the birth)\n" in text
    assert structure_of(run.path, Sgt(total_steps=100)) == run.newest_plan.loops


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "stg"}, r"growth\.policy = 'stg': must be one of none, sgt"),
        ({"unit": "layer"}, r"growth\.unit = 'layer': must be one of head, block"),
        ({"unit": "block"}, r"growth\.block_loop\.layers = \(\): must be named, or else a run in `like`"),
        ({"layers": [1]}, r"growth\.static_loops\.heads = 'high': needs entropies.*random or all.*`like`"),
        ({"layers": [1], "heads": "low"}, r"growth\.static_loops\.heads = 'low': needs entropies"),
        ({"layers": [1], "like": "run"}, r"growth\.static_loops\.like = 'run': cannot be given together with `layers`"),
        ({"observe_every": -1}, r"growth\.observe\.every = -1: must be at least 0"),
        (
            {"start": STEPS},
            rf"growth\.sgt\.start = {STEPS}\.0: leaves no time to grow: .* after {STEPS} updates, ",
        ),
        ({"start": 1e6}, r"growth\.sgt\.start = 1000000\.0: leaves no time to grow"),
        (
            {"window": STEPS},
            rf"growth\.sgt\.start = 6\.0: leaves .* needs {STEPS} to settle, and .* has {STEPS}",
        ),
        ({"window": 0}, r"growth\.sgt\.window = 0\.0: must be a part of the run above 0 and below 1, or whole"),
        (
            {"window": 2.5},
            r"growth\.sgt\.window = 2\.5: must be a part of the run above 0 and below 1, or whole",
        ),
        ({"beta": 1}, r"growth\.sgt\.beta = 1\.0: must be from 0 to below 1"),
        ({"passes": 0}, r"growth\.sgt\.passes = 0: must be at least 1"),
        ({"heads": "most"}, r"growth\.sgt\.heads = 'most': must be one of high, low, random, all"),
        ({"order": "deep"}, r"growth\.sgt\.order = 'deep': must be one of deep_first, shallow_first"),
        ({"birth": "late"}, r"growth\.sgt\.birth = 'late': must be one of gate, paper"),
        ({"birth": "paper", "heads": "all"}, r"growth\.sgt\.birth = 'paper': .*heads = 'all'"),
        ({"seed": -1}, r"growth\.sgt\.seed = -1: must be at least 0"),
        ({"layers": [1], "heads": "random", "seed": -1}, r"growth\.static_loops\.seed = -1: must be at least 0"),
        ({"layers": [1], "heads": "all", "passes": 0}, r"growth\.static_loops\.passes = 0: must be at least 1"),
        ({"layers": [1], "unit": "block", "passes": 0}, r"growth\.block_loop\.times = 0: must be at least 1"),
        ({"layers": [4], "unit": "block"}, r"growth\.block_loop\.layers = 4: must be in 0\.\.3"),
        ({"layers": [1], "heads": "all", "order": "shallow_first"}, r"growth\.static_loops\.order = .*: does nothing"),
        ({"rows": 0}, r"growth\.(sgt|observe)\.rows = 0: must be an integer of at least 1"),
        ({"probe": "all"}, r"growth\.(sgt|observe)\.probe = 'all': must be one of rows, fused"),
        ({"policy": "none", "rows": 0}, r"growth\.(sgt|observe)\.rows = 0: must be an integer of at least 1"),
        ({"policy": "none", "shortlist": 0}, r"growth\.sgt\.shortlist = 0: must be at least 1"),
        (
            {"heads_per_layer": 5},
            r"growth\.sgt\.heads_per_layer = 5: must be at most 4, the heads of the layer that has most",
        ),
        ({"excluded": [0, 4]}, r"growth\.sgt\.excluded = 4: must be in 0\.\.3"),
        ({"excluded": [0, 1, 2, 3]}, r"growth\.sgt\.excluded = .*leaves no layer"),
        ({"layers": [1, 4], "heads": "all"}, r"growth\.static_loops\.layers = 4: must be in 0\.\.3"),
        ({"layers": [1, 1], "heads": "all"}, r"growth\.static_loops\.layers = \(1, 1\): must be distinct"),
        ({"layers": [1, 1], "unit": "block"}, r"growth\.block_loop\.layers = \(1, 1\): must be distinct"),
        (
            {"layers": [0, 1], "heads": "random", "heads_per_layer": 3},
            r"growth\.static_loops\.heads_per_layer = 3: must be at most 2, the heads of layer 0",
        ),
    ],
)
def test_a_mistake_in_the_growth_section_is_named_before_anything_is_written(
    changes: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    named = {f"growth__{key}": value for key, value in changes.items()}
    base = {**GROWING, **BRIEF} if "layers" in changes else GROWING
    with pytest.raises(InputError, match=message):
        train(tiny_config(data, **{**base, **named}), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "name"), [(GROWING, "sgt"), (VANILLA, "observe"), ({**GROWING, **UNOBSERVED}, "sgt")]
)
def test_one_token_has_no_entropy(changes: dict[str, Any], name: str, data: Path, tmp_path: Path) -> None:
    message = rf"model\.context = 1: must be at least 2: one token has no entropy, which {name} of"
    with pytest.raises(InputError, match=message):
        train(tiny_config(data, **{**changes, "model__context": 1}), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    births = {"growth__policies": ["random_births"], "growth__random_births__births": 1, "train__steps": 4}
    births |= {"growth__random_births__warm_up": 1, "growth__random_births__decide_every": 1, "model__context": 1}
    assert trained(data, tmp_path / "births", **births).newest_plan.context == 1  # nobody needs an entropy
    brief = {**VANILLA, **BRIEF, "model__context": 1}
    assert trained(data, tmp_path / "plain", **brief).plan.context == 1  # without growth it is enough


def test_the_run_to_be_like_says_how_many_heads_are_looped(grown: Runs, data: Path, tmp_path: Path) -> None:
    model = grown("gate")
    changes = {**GROWING, **BRIEF, "growth__like": str(model.path), "growth__heads_per_layer": 1}
    run = trained(data, tmp_path / "run", **changes)
    assert {layer: loop.heads for layer, loop in run.plan.loops.items()} == {
        layer: loop.heads for layer, loop in model.newest_plan.loops.items()
    }


def test_a_plan_that_has_loops_is_not_grown_on(grown: Runs, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(grown("gate").newest_plan.to_json())
    with pytest.raises(
        InputError, match=r"model\.plan = .*plan\.json': has loops already, which sgt of growth\.policies would have to"
    ):
        train(tiny_config(data, **{**GROWING, "model__plan": str(path)}), tmp_path / "run")


def test_growth_may_not_change_on_resume(grown: Runs, data: Path, tmp_path: Path) -> None:
    run = copy_run(grown("gate"), tmp_path / "run", last=8)
    for name, changes in (
        ("growth.sgt.window", {"growth__window": 7}),
        ("growth.policies", UNOBSERVED),
        ("growth.observe.every", {"growth__observe_every": 8}),
        ("growth.sgt.passes", {"growth__passes": 2}),
    ):
        with pytest.raises(InputError, match=rf"{name} = .*the run began with"):
            resume(run.path, tiny_config(data, **{**GROWING, **changes}))


def test_the_run_to_be_like_may_move_or_vanish_before_a_resume(grown: Runs, data: Path, tmp_path: Path) -> None:
    """What was taken from it is in the run."""
    source = copy_run(grown("gate"), tmp_path / "source")
    changes = {**GROWING, **BRIEF, "growth__like": str(source.path)}
    run = trained(data, tmp_path / "run", **changes)
    whole = copy_run(run, tmp_path / "whole")
    interrupted = copy_run(run, tmp_path / "again", last=2)
    moved = source.path.rename(tmp_path / "moved")
    resume(interrupted.path)
    assert_equal_runs(interrupted, whole)
    interrupted = copy_run(run, tmp_path / "once more", last=2)
    resume(interrupted.path, tiny_config(data, **{**changes, "growth__like": str(moved)}))
    assert_equal_runs(interrupted, whole)
    assert interrupted.config["growth.static_loops.like"] == str(moved)


# --- Prism plans -----------------------------------------------------------------------------------------------------


def test_a_prism_model_grows_where_it_has_heads_enough(data: Path, tmp_path: Path) -> None:
    """configs/demo.toml in small, whose second layer has a single head."""
    demo = load_config(Path(__file__).parents[2] / "configs" / "demo.toml")
    assert demo.model.build(320).heads[:2] == (1, 1)
    values = {
        **flatten(demo), "data.path": str(data), "model.width": 32, "model.dims": [32, 16, 8], "model.context": 32,
        "train.steps": 18, "train.batch_size": 4, "train.device": "cpu", "eval.every": 0, "checkpoint.every": 0,
        "growth.policy": "sgt", "growth.start": 2, "growth.window": 3, "growth.max_layers": 6, "growth.shortlist": 6,
    }  # fmt: skip
    train(build_config(values), tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    enough = [layer for layer, heads in enumerate(run.plan.heads) if heads > 1]
    assert run.plan.heads == demo.model.build(320).heads
    assert [layer for _, action, layer in actions(run) if action == "add"] == enough[::-1]
    assert all(set(entry["shortlist"]) == set(enough) for entry in decisions(run))
    assert sorted(run.newest_plan.loops) == enough


# --- two processes ---------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    **GROWING,
    "train__batch_size": 16,
    "train__micro_batch": 8,
}  # every second sequence is measured


def assert_close_growth(actual: RunFolder, expected: RunFolder) -> None:
    """The same decisions, and entropies, strengths, losses and weights within 1e-5."""
    close: dict[str, Any] = {"rel": 1e-5, "abs": 1e-5}
    ours, theirs = decisions(actual), decisions(expected)
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("step", "action", "layer", "heads", "passes", "shortlist", "rule", "next_decision", "plan"):
            assert mine[key] == other[key]
        for entropies, others in zip(mine["head_entropy"], other["head_entropy"], strict=True):
            assert entropies == pytest.approx(others, **close)
        for loop, twin in zip(mine.get("loops", ()), other.get("loops", ()), strict=True):
            for row, its in zip(loop["gates"], twin["gates"], strict=True):
                assert row == pytest.approx(its, **close)
    for mine, other in zip(observations(actual), observations(expected), strict=True):
        for entropies, others in zip(mine["head_entropy"], other["head_entropy"], strict=True):
            assert entropies == pytest.approx(others, **close)
    for mine, other in zip(metrics(actual), metrics(expected), strict=True):
        assert mine == pytest.approx(other, **close)
    torch.testing.assert_close(final_tensors(actual), final_tensors(expected), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def single(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(data, tmp_path_factory.mktemp("single") / "run", **WIDE)


@pytest.fixture(scope="module")
def pair(single: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Begun by one process, which has measured but not decided yet, and from there on two."""
    run = copy_run(single, tmp_path_factory.mktemp("pair") / "run", last=4)
    run_jobs((2, "resume", run.path))
    return run


def test_two_processes_grow_as_one_does(pair: RunFolder, single: RunFolder) -> None:
    assert [action for _, action, _ in actions(single)] == ["add", "add", "add", "fix"]
    assert load_checkpoint(list_checkpoints(pair.checkpoints)[-1]).state["processes"] == 2
    assert_close_growth(pair, single)


def test_growth_of_two_processes_goes_on_in_one(pair: RunFolder, single: RunFolder, tmp_path: Path) -> None:
    run = copy_run(pair, tmp_path / "run", last=8)  # in a window, while strengths rise
    assert load_checkpoint(list_checkpoints(run.checkpoints)[-1]).state["processes"] == 2
    resume(run.path)
    assert_close_growth(run, single)


@pytest.mark.slow
@pytest.mark.parametrize("birth", ["gate", "paper"])
def test_growth_from_first_to_last_in_two_processes(birth: str, data: Path, tmp_path: Path) -> None:
    changes = {**WIDE, "growth__birth": birth, "growth__passes": 2, "train__steps": 38}
    (tmp_path / "config.toml").write_text(tiny_config(data, **changes).to_toml(), encoding="utf-8")
    run_jobs((2, "train", tmp_path / "config.toml", tmp_path / "pair"))
    alone = trained(data, tmp_path / "single", **changes)
    assert [action for _, action, _ in actions(alone)] == ["add", "deepen"] * 3 + ["fix"]
    assert_close_growth(RunFolder.open(tmp_path / "pair"), alone)
    run = copy_run(alone, tmp_path / "run", last=14)
    run_jobs((2, "resume", run.path))
    assert_close_growth(run, alone)
