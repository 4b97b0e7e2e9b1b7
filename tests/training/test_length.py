"""Runs that are as long as their FLOPs allow for: what they spend, how the rate falls, and that they can be resumed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meristem.errors import InputError
from meristem.growth.policy import Ahead
from meristem.report.page.data import run_data
from meristem.runs.run_folder import RunFolder
from meristem.training.train import resume, train

from .helpers import STEPS, assert_equal_runs, copy_run, events, final_tensors, metrics, tiny_config, trained

STACKED = {"growth__policies": ["stack"], "growth__stack__at": [0.5]}


def update_flops(run: RunFolder, layers: int) -> int:
    """What an update of the model's first layers takes, by the plan's own count."""
    plan = replace(run.plan, layers=(run.plan.target or run.plan.layers)[:layers], target=())
    return plan.cost.training.causal * run.config.train.batch_size * plan.context


@pytest.fixture(scope="module")
def stacked(data: Path, whole: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One block becomes two when half of the FLOPs are spent, of 30 updates and a half of one block: after 16."""
    flops = 30.5 * update_flops(whole, 1)
    return trained(data, tmp_path_factory.mktemp("stacked") / "run", train__flops=flops, **STACKED)


@given(st.integers(10**12, 10**17), st.integers(1, 10**5), st.data())
def test_the_end_is_the_same_from_any_update_on(each: int, updates: int, data: st.DataObject) -> None:
    """Also where FLOPs are more than a float can count one by one."""
    budget = float(each * updates)
    end = int(budget) // each
    done = data.draw(st.integers(0, end))
    assert Ahead(done, done * each, each, budget).end == end


def test_a_model_that_does_not_grow_has_the_updates_that_its_flops_suffice_for(
    data: Path, whole: RunFolder, tmp_path: Path
) -> None:
    run = trained(data, tmp_path / "run", train__flops=(STEPS + 0.9) * update_flops(whole, 2), train__steps=1)
    assert run.config.train.steps == STEPS
    assert_equal_runs(run, whole)
    assert events(run) == events(whole)


def test_one_that_grows_spends_what_it_may_and_no_more(stacked: RunFolder) -> None:
    small, large = update_flops(stacked, 1), update_flops(stacked, 2)
    spent = metrics(stacked)[-2]
    updates = 16 + int((30.5 * small - 16 * small) // large)
    assert stacked.config.train.steps == stacked.config.growth.steps == 30
    assert spent["step"] == updates < 30
    assert spent["flops"] == 16 * small + (updates - 16) * large
    assert 0 <= 30.5 * small - spent["flops"] < large
    assert metrics(stacked)[-1]["step"] == updates  # what is measured at the end
    assert events(stacked)[-1] == "finished"
    assert len(final_tensors(stacked)) > 0


def test_its_rate_follows_what_is_spent(stacked: RunFolder) -> None:
    """Before and after the growth the rate is half a cosine of the share of the FLOPs that the updates before took."""
    budget, small, large = 30.5 * update_flops(stacked, 1), update_flops(stacked, 1), update_flops(stacked, 2)
    lines = [entry for entry in metrics(stacked) if "lr" in entry]
    for entry in lines[3:]:
        each = small if entry["step"] <= 16 else large
        share = (entry["flops"] - each) / (budget - each)
        expected = 3e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))
        assert entry["lr"] == pytest.approx(expected, abs=2e-4)
    assert lines[-1]["lr"] == pytest.approx(3e-4)


@pytest.mark.parametrize("at", [[0.25, 0.8], [12, 0.5]])
def test_parts_of_a_run_are_parts_of_its_flops(at: list[float], data: Path, tmp_path: Path) -> None:
    """Copies come with the first update by whose end that part is spent; those in updates after so many."""
    settings = {"growth__policies": ["stack"], "growth__stack__at": at, "growth__stack__start_layers": 1}
    shape = {"model__layers": 4, "model__schedule": "uniform", "checkpoint__every": 2, "checkpoint__keep": 20}
    plan = trained(data, tmp_path / "plain", **shape, train__steps=1).plan
    flops = 40.5 * replace(plan, layers=plan.layers[:1]).cost.training.causal * 4 * plan.context
    run = trained(data, tmp_path / "run", train__flops=flops, **shape, **settings, log__every=1)
    spent = {entry["step"]: entry["flops"] / flops for entry in metrics(run) if "flops" in entry}
    copies = [event["step"] for event in run.read(run.events) if event.get("action") == "stack"]
    for time, step in zip(at, copies, strict=True):
        assert step == time if time >= 1 else spent[step - 1] < time <= spent[step] + 0.013
    for last in (copies[0] + 2 - copies[0] % 2, copies[1] + 2 - copies[1] % 2):
        copy = copy_run(run, tmp_path / f"copy-{last}", last=last)
        resume(copy.path)
        assert_equal_runs(copy, run)


@pytest.mark.parametrize("last", [8, 20])
def test_it_is_resumed_bit_for_bit_before_and_after_its_growth(stacked: RunFolder, last: int, tmp_path: Path) -> None:
    copy = copy_run(stacked, tmp_path / "copy", last=last)
    assert resume(copy.path).step == metrics(stacked)[-1]["step"]
    assert_equal_runs(copy, stacked)
    assert events(copy)[-1] == "finished"


def test_a_run_that_has_spent_all_is_not_gone_on_with(data: Path, stacked: RunFolder, tmp_path: Path) -> None:
    copy = copy_run(stacked, tmp_path / "copy")
    described = tiny_config(data, train__flops=stacked.config.train.flops, **STACKED)  # without the steps found out
    assert resume(copy.path, described).step == metrics(stacked)[-1]["step"]
    assert_equal_runs(copy, stacked)
    assert events(copy).count("finished") == 1


def test_the_page_knows_its_length(stacked: RunFolder) -> None:
    shown = run_data(stacked.path)
    assert shown["status"]["word"] == "finished"
    assert "early" not in shown["status"]["text"]
    assert shown["steps"] == shown["last_step"] == metrics(stacked)[-1]["step"]


def test_flops_that_no_run_can_have_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train.flops = 1.0: is less than one update needs"):
        train(tiny_config(data, train__flops=1.0), tmp_path / "run")
    with pytest.raises(InputError, match=r"train.flops = 1e\+30: must be below .*, those of 2\^63 updates"):
        train(tiny_config(data, train__flops=1e30), tmp_path / "run")
    for flops in (0.0, math.inf, math.nan):
        with pytest.raises(InputError, match=r"train.flops = .*: must be above 0, and finite"):
            tiny_config(data, train__flops=flops)


def test_what_is_as_long_as_its_flops_allow_for_has_no_branches(
    data: Path, whole: RunFolder, stacked: RunFolder, tmp_path: Path
) -> None:
    of_one = {"train__branch_from": f"{whole.path}@{10**6}", "optimizer__curve": "wsd", "train__flops": 1e9}
    with pytest.raises(InputError, match=r"train.flops = 1000000000.0: cannot be given with train.branch_from"):
        tiny_config(data, **of_one)
    of_stacked = {"train__branch_from": f"{stacked.path}@4", "optimizer__curve": "wsd"}
    with pytest.raises(InputError, match=r"train.flops = .*: ends .* which so cannot be branched off"):
        train(tiny_config(data, **of_stacked), tmp_path / "branch")
