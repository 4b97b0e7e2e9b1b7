"""Heads that come and go in a training run: recorded, really gone, resumed bit by bit, and alike in two processes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Call
from meristem.errors import InputError, RunError
from meristem.files import sha256_of
from meristem.growth import Incrt, Published, RandomBirths
from meristem.growth.descriptions import describe_demand
from meristem.growth.events import Measurement, event_from_dict
from meristem.plan import Plan
from meristem.runs.checkpoint import list_checkpoints, load_checkpoint
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training.display import Lines
from meristem.training.train import resume, train

from .helpers import (
    EAGER_HEADS,
    assert_equal_runs,
    assert_nearly_equal_weights,
    copy_run,
    final_state,
    metrics,
    run_jobs,
    tiny_config,
    trained,
)
from .test_interruptions import kill_loop

STEPS = 30
EAGER: dict[str, Any] = {
    **EAGER_HEADS, "train__steps": STEPS, "train__batch_size": 8, "train__micro_batch": 4, "checkpoint__every": 1,
    "eval__every": 10, "incrt__last_birth": 14,
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "demand": {},
    "published": {
        "incrt__criterion": "published", "incrt__last_birth": 18, "incrt__share": 1e-3, "incrt__decide_every": 1,
        "incrt__seed": 1,
    },
    "repaired": {
        "incrt__criterion": "published", "incrt__numerics": "repaired", "incrt__last_birth": 28, "incrt__share": 1e-3,
        "incrt__decide_every": 1,
    },
    "random": {"incrt__criterion": "random", "incrt__births": 3},
    "shared keys": {"model__kv_group": 2, "model__heads": 2, "incrt__max_heads": 4},
    "classifier": {"optimizer__lr": 1e-2, "incrt__feeds": 3},  # after one feed chance decides where a scout looks
}  # fmt: skip
Runs = Callable[[str], RunFolder]


@pytest.fixture(scope="session")
def arms(data: Path, labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The arms, each trained when it is first asked for. Never changed by a test: copy them."""
    made: dict[str, RunFolder] = {}

    def run(arm: str) -> RunFolder:
        if arm not in made:
            source = labelled if arm == "classifier" else data
            made[arm] = trained(source, tmp_path_factory.mktemp("incrt") / "run", **{**EAGER, **ARMS[arm]})
        return made[arm]

    return run


def decisions(run: RunFolder) -> list[dict[str, Any]]:
    return [entry for entry in run.read(run.events) if entry["event"] in ("growth", "measured")]


def of_births(run: RunFolder) -> list[dict[str, Any]]:
    """What the policy that gives birth to heads decided, and what it measured."""
    return [entry for entry in decisions(run) if entry["policy"] != "prune"]


def actions(run: RunFolder) -> list[str]:
    return [entry["action"] for entry in decisions(run) if entry["event"] == "growth"]


def changes(run: RunFolder) -> list[int]:
    return [entry["step"] for entry in decisions(run) if entry.get("action") in ("birth", "removal")]


def newest(run: RunFolder) -> Any:
    return load_checkpoint(list_checkpoints(run.checkpoints)[-1])


def assert_equal_growth(actual: RunFolder, expected: RunFolder) -> None:
    """Bit-equal weights, moments and gauges; equal metrics, decisions with all their readings, and state."""
    assert_equal_runs(actual, expected)
    assert decisions(actual) == decisions(expected)
    mine, other = newest(actual), newest(expected)
    assert final_state(actual) == final_state(expected)
    torch.testing.assert_close(mine.growth, other.growth, rtol=0, atol=0)


# --- a run that grows ------------------------------------------------------------------------------------------------


def test_heads_are_born_and_leave_and_the_record_says_so(arms: Runs) -> None:
    run = arms("demand")
    assert run.plan.heads == (1, 1)
    assert {"birth", "removal"} <= set(actions(run))
    heads = [1, 1]
    for entry in decisions(run):
        assert entry["version"] == 1
        assert entry["policy"] == ("prune" if entry.get("action") in ("removal", "spare") else entry["policy"])
        if entry["policy"] == "incrt":
            assert all(len(entry[key]) == 2 for key in ("demand", "noise", "threshold", "rules", "predicted_heads"))
            assert all(0 <= share <= 1 for share in entry["asymmetry"])
            assert all(1 <= rank <= run.plan.head_dims[0] for rank in entry["rank"])
            assert all(noise > 0 for noise in entry["noise"] if noise is not None)
        else:
            left = [count + (entry.get("action") == "removal" and entry["layer"] == i) for i, count in enumerate(heads)]
            assert [len(shares) for shares in entry["own_share"]] in (heads, left)
        if entry["event"] == "growth":
            heads[entry["layer"]] += {"birth": 1, "removal": -1, "spare": 0}[entry["action"]]
            assert str(event_from_dict(entry)).startswith(
                {"birth": "a head is born: layer", "removal": "a head has left: layer", "spare": "layer"}[
                    entry["action"]
                ]
            )
        assert entry.get("heads", heads) == heads
        if entry["policy"] == "incrt":
            assert describe_demand(event_from_dict(entry)).startswith(f"heads {heads[0]}-{heads[1]}")
    assert Plan.from_dict(newest(run).state["plan"]).heads == tuple(heads)


def test_a_head_that_left_is_really_gone(arms: Runs) -> None:
    """From the weights, both moments, the parameter count, the FLOPs of a step, and the loaded model."""
    run = arms("demand")
    left = [entry["step"] for entry in decisions(run) if entry.get("action") == "removal"]
    assert left
    before, after = (load_checkpoint(run.checkpoints / f"step-{step:08d}") for step in (left[0] - 1, left[0]))
    layer = next(entry["layer"] for entry in decisions(run) if entry.get("action") == "removal")
    plans = [Plan.from_dict(checkpoint.state["plan"]) for checkpoint in (before, after)]
    assert plans[0].heads[layer] == plans[1].heads[layer] + 1
    width, dim = plans[0].width, plans[0].head_dims[0]
    assert plans[0].parameters - plans[1].parameters == 4 * width * dim
    for tensors in ("model", "optimizer"):
        sizes = [sum(t.numel() for t in getattr(c, tensors).values()) for c in (before, after)]
        assert sizes[0] - sizes[1] == 4 * width * dim * (1 if tensors == "model" else 2)
    flops = {entry["step"]: entry["flops"] for entry in metrics(run) if "flops" in entry}
    steps = [flops[left[0] + k] - flops[left[0] + k - 1] for k in (0, 1)]
    tokens = 8 * plans[0].context
    assert steps == [tokens * plan.cost.training.causal for plan in plans]
    model = load_run(run.path).model
    assert sum(p.numel() for p in model.parameters()) == Plan.from_dict(newest(run).state["plan"]).parameters


def test_the_loss_does_not_jump_at_a_birth(arms: Runs, data: Path, tmp_path: Path) -> None:
    """The update after a birth sees the loss of a run in which nothing was born, bit for bit."""
    run = arms("random")
    first = changes(run)[0]
    quiet = trained(data, tmp_path / "run", **{**EAGER, "growth__policy": "none"})
    losses = [{e["step"]: e["loss"] for e in metrics(r) if "loss" in e} for r in (run, quiet)]
    assert [losses[0][step] for step in range(1, first + 2)] == [losses[1][step] for step in range(1, first + 2)]
    assert losses[0][first + 3] != losses[1][first + 3]


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({"incrt__criterion": "demand"}, Incrt),
        ({"incrt__criterion": "published"}, Published),
        ({"incrt__criterion": "random", "incrt__births": 1}, RandomBirths),
    ],
)
def test_every_criterion_is_a_word_or_two_away(settings: dict[str, Any], policy: type, data: Path) -> None:
    config = tiny_config(data, growth__policy="incrt", train__steps=1000, **settings)
    assert type(config.build_policies()[0]) is policy


def test_random_births_come_as_many_as_asked_for(arms: Runs) -> None:
    assert actions(arms("random")) == ["birth"] * 3
    assert sum(Plan.from_dict(newest(arms("random")).state["plan"]).heads) == 5


def test_the_published_criterion_logs_the_same_facts(arms: Runs) -> None:
    for arm in ("published", "repaired"):
        assert "birth" in actions(arms(arm))
        for entry in decisions(arms(arm)):
            facts = ("demand", "noise", "threshold", "rules", "predicted_heads", "asymmetry")
            assert all(len(entry[key]) == 2 for key in facts)
            had = [count - (entry.get("action") == "birth") for count in entry["heads"]]
            assert all(p["count"] >= h for p, h in zip(entry["predicted_heads"], had, strict=True))  # heads, not births


# --- resume (oracle 23) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_incrt_oracle_23_resuming_in_the_middle_of_growth_gives_the_same_run(
    arm: str, arms: Runs, tmp_path: Path
) -> None:
    """From before the calibration has ended, just before and after changes, between them, and near the end.

    All of it with one arm; the others go on from before and after their first change, and from their last.
    """
    whole = arms(arm)
    first, *_, last = changes(whole)
    others = {2, first + 1, last - 1, STEPS - 1} if arm == "demand" else set()
    for step in sorted({first - 1, first, last} | others):
        run = copy_run(whole, tmp_path / f"run-{step}", last=step)
        resume(run.path)
        assert_equal_growth(run, whole)


def test_incrt_oracle_23_kills_while_heads_come_and_go(data: Path, tmp_path: Path) -> None:
    # Something changes every five updates from the seventh on, and each kill but the first two comes an update later.
    early = {"incrt__calibration": 2, "incrt__decide_every": 1, "incrt__cool_down": 1, "incrt__last_birth": 28}
    settings = {**EAGER, **early, "checkpoint__keep": 2}
    run, reached = kill_loop(data, tmp_path, kills=12, seed=0, **settings)
    unkilled = trained(data, tmp_path / "unkilled", **settings)
    assert len({step for step in reached if changes(unkilled)[0] <= step < changes(unkilled)[-1]}) >= 2
    assert_equal_growth(run, unkilled)


def test_settings_of_growth_may_not_change_on_resume(arms: Runs, data: Path, tmp_path: Path) -> None:
    run = copy_run(arms("demand"), tmp_path / "run", last=9)
    with pytest.raises(InputError, match=r"incrt\.share = 0\.5: the run began with"):
        resume(run.path, tiny_config(data, **{**EAGER, "incrt__share": 0.5}))


# --- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["demand", "repaired", "classifier"])
def test_two_processes_grow_as_one_does(arm: str, arms: Runs, tmp_path: Path) -> None:
    single = arms(arm)
    run = copy_run(single, tmp_path / "run", last=3)
    run_jobs((2, "resume", run.path))
    assert newest(run).state["processes"] == 2
    for mine, other in zip(decisions(run), decisions(single), strict=True):
        assert [mine.get(k) for k in ("step", "action", "layer", "heads", "plan")] == [
            other.get(k) for k in ("step", "action", "layer", "heads", "plan")
        ]
        assert mine["policy"] == other["policy"]
        found = (entry.get(name, ()) for name in ("demand", "noise") for entry in (mine, other))
        for demand, its, noise, _ in zip(*found, strict=True):
            assert (demand is None) == (its is None)
            # Rounding is far below what a demand is known to.
            assert demand is None or demand == pytest.approx(its, rel=2e-3, abs=0.2 * (noise or 0) + 1e-5), mine["step"]
    assert_nearly_equal_weights(run, single)
    losses = ([entry["loss"] for entry in metrics(one) if "loss" in entry] for one in (run, single))
    assert next(losses) == pytest.approx(next(losses), rel=1e-2)


# --- what a person sees ----------------------------------------------------------------------------------------------


def test_demand_and_births_are_told_while_a_model_trains(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("meristem.training.display.time.monotonic", lambda: next(seconds))
    train(tiny_config(data, **EAGER), tmp_path / "run")
    shown = capsys.readouterr().out
    assert "a head is born: layer" in shown
    told = re.compile(r"^step .* heads \d-\d demand -?[\d.]+ ± [\d.e+]+ of 0\.00 in L[01]$")
    assert any(told.search(line) for line in shown.splitlines())


def test_lines_show_what_they_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines(Plan.uniform(layers=2, width=32, heads=2), 3) as display:
        display.status("heads 1-2 demand 0.30 of 0.10 in L1")
        display.update({"step": 1, "loss": 1.0})
    assert "heads 1-2 demand 0.30 of 0.10 in L1" in capsys.readouterr().out


def test_demand_in_words() -> None:
    event = {"heads": [1, 2], "demand": [0.05, 0.3], "noise": [0.01, 0.0512], "threshold": [0.1, 0.1]}
    assert describe_demand(Measurement(9, "incrt", event)) == "heads 1-2 demand 0.30 ± 0.051 of 0.10 in L1"
    one = {"heads": [3], "demand": [0.05], "noise": [None], "threshold": [0.1]}
    assert describe_demand(Measurement(9, "published", one)) == "heads 3 energy 0.05 of 0.10"
    assert describe_demand(Measurement(9, "random_births", {**one, "demand": [None]})) == "heads 3"


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"incrt__criterion": "energy"}, "incrt.criterion = 'energy': must be one of demand, published, random"),
        ({"incrt__criterion": "random", "incrt__births": 0}, "growth.random_births.births = None: must be given"),
        ({"incrt__criterion": "random", "incrt__births": -2}, "growth.random_births.births = -2: must be at least 1"),
        ({"incrt__seed": -1}, "incrt.seed = -1: must be at least 0"),
        ({"incrt__certainty": float("inf")}, "incrt.certainty = inf: must be a number below infinity"),
        ({"growth__unit": "layer"}, "growth.unit = 'layer': must be one of head, block"),
        ({"incrt__share": 0.0}, "incrt.share = 0.0"),
        ({"incrt__calibration": 1}, "incrt.calibration = 1"),
        ({"incrt__certainty": float("nan")}, "incrt.certainty = nan"),
        ({"incrt__steady": 5.0}, "incrt.steady = 5.0"),
        ({"incrt__warm_up": -5}, "incrt.warm_up = -5"),
        ({"incrt__feed_every": 50, "incrt__decide_every": 20}, "incrt.decide_every = 20: must be at least feed_every"),
        ({"incrt__feeds": 5000}, "updates births end after 14, and the first could come after 500"),
        (
            {"growth__incrt__budget": "heads=2"},
            "incrt.budget = 'heads=2': must be above what the model has",
        ),
        ({"incrt__last_birth": 0.0}, "incrt.last_birth = 0.0"),
        (
            {"incrt__criterion": "published", "incrt__numerics": "exact"},
            "growth.published.numerics = 'exact': must be one of author, repaired",
        ),
        ({"model__heads": 4, "model__kv_group": 2}, "model.kv_group = 2: must be 1 (or as many as there are heads, 2 "),
        ({"incrt__max_heads": 1}, "incrt.max_heads = 1: must be above the heads that every layer has at the start, 1"),
    ],
)
def test_a_mistake_is_named_before_anything_is_written(
    wrong: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    settings = {key: value for key, value in {**EAGER, **wrong}.items() if value is not None}
    with pytest.raises(InputError) as caught:
        train(tiny_config(data, **settings), tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_model_that_begins_with_all_its_heads_is_refused_births(data: Path, tmp_path: Path) -> None:
    early = dict.fromkeys(("feed_every", "calibration", "warm_up", "feeds", "cool_down", "decide_every", "hits"), 2)
    settings = {f"growth__incrt__{name}": value for name, value in early.items()}
    for heads in (2, 9):
        named = {"growth__policies": ["incrt"], "growth__incrt__start_heads": heads, "model__schedule": "uniform"}
        with pytest.raises(InputError, match=rf"growth.incrt.start_heads = {heads}: must be below 2, the most that"):
            train(tiny_config(data, **settings, **named, model__heads=2), tmp_path / "run")


def test_a_grown_run_is_evaluated_and_generates(arms: Runs, tmp_path: Path, call: Call) -> None:
    run = copy_run(arms("demand"), tmp_path / "run")
    code, out, _ = call("eval", str(run.path), "--windows", "2")
    assert code == 0
    code, out, _ = call("generate", str(run.path), "--prompt", "Page", "--tokens", "4")
    assert (code, out.startswith("Page")) == (0, True)


@pytest.mark.parametrize(
    ("place", "damage", "message"),
    [
        (("prune", "state", "times"), {}, r"growth\.policies\.prune\.state\.times = \{\}: must be of the type"),
        (("prune", "state", "since"), [[0]], r"state\.policies\.prune = .*: must be of a model of heads"),
        (("incrt", "state", "layers"), [], r"state\.policies\.incrt = .*: must be of a model of heads"),
        (("incrt", "state", "grown"), [[True], []], r"state\.policies\.incrt = .*: must be of a model of heads"),
    ],
)
def test_a_state_of_growth_that_makes_no_sense_is_refused(
    place: tuple[str, ...], damage: Any, message: str, arms: Runs, tmp_path: Path
) -> None:
    run = copy_run(arms("demand"), tmp_path / "run", last=20)
    path = list_checkpoints(run.checkpoints)[-1]
    state = json.loads((path / "state.json").read_text())
    policy, part, name = place
    state["growth"]["policies"][policy][part][name] = damage
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    facts = {"sha256": sha256_of(path / "state.json"), "bytes": (path / "state.json").stat().st_size}
    manifest["files"]["state.json"] = facts
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=rf"does not fit this run \({message}"):
        resume(run.path)
