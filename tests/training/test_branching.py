"""Runs that branch off another one: they are, to the bit, the runs that would have begun their decay there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import Call
from meristem.config import load_config
from meristem.errors import InputError, RunError
from meristem.report.pictures import draw_growth, draw_loss, run_text
from meristem.runs.checkpoint import checkpoint_name, list_checkpoints, load_checkpoint, step_of
from meristem.runs.lock import run_lock
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training.train import resume, train
from runs.test_divergence import bad_batches

from .helpers import assert_equal_runs, events, final_state, metrics, prepared, run_jobs, tiny_config, trained
from .test_distributed import assert_close_runs
from .test_together import TOGETHER

LENGTH, STEP = 20, 6
# Two updates of warm-up; the rate stays until 16 of the trunk's 20 updates are done.
TRUNK: dict[str, Any] = {
    "train__steps": LENGTH, "optimizer__curve": "wsd", "optimizer__warmup": 0.1, "optimizer__decay": 0.2,
    "checkpoint__every": 2,
}  # fmt: skip
# The same in a run of 12 updates, which decays in the last six of them.
PLAIN: dict[str, Any] = {**TRUNK, "train__steps": 12, "optimizer__warmup": 2 / 12, "optimizer__decay": 0.5}
# With blocks that are stacked, heads that come and go, and loops, of which all times are updates.
GROWING: dict[str, Any] = {**TOGETHER, **TRUNK}


@pytest.fixture(scope="module")
def trunk(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(data, tmp_path_factory.mktemp("trunk") / "run", **TRUNK)


def branch_of(trunk: RunFolder, step: int = STEP, **changes: Any) -> dict[str, Any]:
    """The settings of a branch of 12 updates."""
    return {**TRUNK, "train__steps": 12, "train__branch_from": f"{trunk.path}@{step}", **changes}


def test_a_branch_is_the_run_that_would_have_decayed_there(data: Path, trunk: RunFolder, tmp_path: Path) -> None:
    """Weights, moments and all lines of metrics; lengths that are shorter and longer share the trunk."""
    before = {path: path.read_bytes() for path in trunk.path.rglob("*") if path.is_file()}
    branch = trained(data, tmp_path / "branch", **branch_of(trunk))
    assert_equal_runs(branch, trained(data, tmp_path / "plain", **PLAIN))
    longer = {"train__steps": 24, "optimizer__warmup": 2 / 24, "optimizer__decay": 14 / 24}
    branch = trained(data, tmp_path / "longer", **branch_of(trunk, 10, train__steps=24))
    assert_equal_runs(branch, trained(data, tmp_path / "plain longer", **{**TRUNK, **longer}))
    assert before == {path: path.read_bytes() for path in trunk.path.rglob("*") if path.is_file()}


def test_a_branch_grows_by_the_clock_of_its_trunk(data: Path, tmp_path: Path) -> None:
    """Blocks, heads and loops grow before and after, as in a run with that clock; decisions are equal too."""
    trunk = trained(data, tmp_path / "trunk", **GROWING)
    changes = {**GROWING, "train__steps": 18, "train__branch_from": f"{trunk.path}@10"}
    branch = trained(data, tmp_path / "branch", **changes)
    assert branch.config.growth.steps == LENGTH
    times = {"optimizer__warmup": 2 / 18, "optimizer__decay": 8 / 18, "growth__steps": LENGTH}
    plain = trained(data, tmp_path / "plain", **{**GROWING, "train__steps": 18, **times})
    assert_equal_runs(branch, plain)
    grown = [[e for e in run.read(run.events) if e["event"] == "growth"] for run in (branch, plain)]
    assert grown[0] == grown[1]
    assert min(e["step"] for e in grown[0]) < 10 < max(e["step"] for e in grown[0])
    assert final_state(branch)["growth"] == final_state(plain)["growth"]
    assert list(branch.read(branch.entropy)) == list(plain.read(plain.entropy))
    assert draw_growth(branch.path) is not None
    with pytest.raises(InputError, match=r"growth\.steps = 18: must be 20, the clock of .*trunk"):
        train(tiny_config(data, **changes, growth__steps=18), tmp_path / "other clock")


def test_a_branch_of_a_classifier(labelled: Path, tmp_path: Path) -> None:
    trunk = trained(labelled, tmp_path / "trunk", **TRUNK)
    branch = trained(labelled, tmp_path / "branch", **branch_of(trunk))
    assert_equal_runs(branch, trained(labelled, tmp_path / "plain", **PLAIN))


def test_a_branch_of_muon(data: Path, tmp_path: Path) -> None:
    trunk = trained(data, tmp_path / "trunk", **TRUNK, optimizer__kind="muon")
    branch = trained(data, tmp_path / "branch", **branch_of(trunk, optimizer__kind="muon"))
    assert_equal_runs(branch, trained(data, tmp_path / "plain", **PLAIN, optimizer__kind="muon"))


def test_batches_that_the_trunk_passed_over_stay_so(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before the branch: what the trunk has passed over later is no business of the branch."""
    on: dict[str, Any] = {"train__max_skipped": 2, "train__on_divergence": "rewind"}
    with monkeypatch.context() as patch:
        bad_batches(patch, data, range(4, 6), **TRUNK)
        plain = trained(data, tmp_path / "plain", **PLAIN, **on)
        early = trained(data, tmp_path / "early", **TRUNK, **on)
    with monkeypatch.context() as patch:
        bad_batches(patch, data, range(14, 16), **TRUNK)
        late = trained(data, tmp_path / "late", **TRUNK, **on)
    branch = trained(data, tmp_path / "branch", **branch_of(early, **on))
    assert [rewind.first for rewind in branch.rewinds] == [rewind.first for rewind in early.rewinds] == [4]
    assert_equal_runs(branch, plain)
    branch = trained(data, tmp_path / "second", **branch_of(late, **on))
    assert [len(run.rewinds) for run in (late, branch)] == [1, 0]


def test_a_branch_passes_over_what_made_its_trunk_come_back(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint was written before that, and knows nothing of it."""
    on: dict[str, Any] = {"train__max_skipped": 2, "train__on_divergence": "rewind", "eval__every": 2}
    bad_batches(monkeypatch, data, range(8, 10), **TRUNK)
    trunk = trained(data, tmp_path / "trunk", **TRUNK, **on)
    assert [(rewind.to_step, rewind.first, rewind.end) for rewind in trunk.rewinds] == [(8, 8, 10)]
    assert load_checkpoint(trunk.checkpoints / checkpoint_name(8)).state["rewinds"] == 0
    branch = trained(data, tmp_path / "branch", **branch_of(trunk, 8, **{**on, "train__on_divergence": "stop"}))
    assert branch.rewinds == trunk.rewinds
    plain = trained(data, tmp_path / "plain", **{**PLAIN, **on, "optimizer__decay": 4 / 12})
    assert_equal_runs(branch, plain)
    told = [entry for entry in branch.read(branch.events) if entry["event"] in ("rewind", "branch")]
    assert [entry["event"] for entry in told] == ["rewind", "branch"]
    assert told[0] in list(trunk.read(trunk.events))
    for path in list_checkpoints(branch.checkpoints)[1:]:
        shutil.rmtree(path)
    resume(branch.path)
    assert_equal_runs(branch, plain)


def test_what_a_branch_holds(data: Path, trunk: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logs are those of the trunk up to there, then its own; its configuration names the trunk from any folder."""
    monkeypatch.chdir(trunk.path.parent)
    branch = trained(data, tmp_path / "branch", **branch_of(RunFolder(Path("run"))))
    assert branch.config.train.branch_from == f"{trunk.path.resolve()}@{STEP}"
    told = list(branch.read(branch.events))
    begin = next(number for number, event in enumerate(told) if event["event"] == "branch")
    assert told[begin] == {"step": STEP, "event": "branch", "run": str(trunk.path.resolve())}
    assert told[:begin] == list(trunk.read(trunk.events))[:begin]
    assert [event["event"] for event in told[begin:]] == [
        "branch",
        "checkpoint",
        "start",
        *["checkpoint"] * 3,
        "finished",
    ]
    assert [step_of(path) for path in list_checkpoints(branch.checkpoints)] == [6, 8, 10, 12]
    assert [line for line in metrics(branch) if line["step"] <= STEP] == [
        line for line in metrics(trunk) if line["step"] <= STEP
    ]
    assert run_text(branch.path).startswith(f"branch: step 12 of 12, branched off {trunk.path.resolve()} at step 6, ")
    assert draw_loss(branch.path) is not None
    assert load_run(branch.path, step=STEP).step == STEP


@pytest.mark.parametrize("last", [STEP, 8])
def test_a_branch_goes_on_without_its_trunk(
    last: int, data: Path, trunk: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trunk.path, tmp_path / "trunk")
    settings = branch_of(RunFolder(tmp_path / "trunk"))
    whole = trained(data, tmp_path / "whole", **settings)
    shutil.rmtree(tmp_path / "trunk")
    branch = RunFolder(Path(shutil.copytree(whole.path, tmp_path / "branch")))
    for path in list_checkpoints(branch.checkpoints):
        if step_of(path) > last:
            shutil.rmtree(path)
    assert resume(branch.path, tiny_config(data, **settings)).step == 12
    assert_equal_runs(branch, whole)


def test_a_branch_begins_anew_where_it_branched_off(data: Path, trunk: RunFolder, tmp_path: Path) -> None:
    """Never at step 0, which is not its beginning: without a checkpoint and without its trunk it does nothing."""
    shutil.copytree(trunk.path, tmp_path / "trunk")
    branch = trained(data, tmp_path / "branch", **branch_of(RunFolder(tmp_path / "trunk")))
    before = metrics(branch)
    shutil.rmtree(branch.checkpoints)
    branch.events.unlink()  # as if it had never written one
    with pytest.raises(RunError, match="holds no checkpoint, though one of step 6 was written") as refused:
        resume(branch.path)
    assert refused.value.remedy is not None
    resume(branch.path, from_start=True)
    assert metrics(branch) == before
    shutil.rmtree(tmp_path / "trunk")
    with pytest.raises(InputError, match=r"train\.branch_from = .*trunk@6': cannot be branched off: .*not a run"):
        resume(branch.path, from_start=True)
    assert metrics(branch) == before  # nothing was touched


def test_a_branch_goes_back_to_its_own_beginning(
    data: Path, trunk: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_batches(monkeypatch, data, range(STEP, STEP + 2), **TRUNK)
    on: dict[str, Any] = {"train__max_skipped": 2, "train__on_divergence": "rewind", "eval__every": 0}
    branch = trained(data, tmp_path / "branch", **branch_of(trunk, **on))
    assert [(rewind.from_step, rewind.to_step) for rewind in branch.rewinds] == [(STEP + 2, STEP)]
    assert events(branch)[-1] == "finished"


def test_a_running_trunk_can_be_branched_off(data: Path, trunk: RunFolder, tmp_path: Path) -> None:
    """Another process holds it, and writes: a line of its log is not whole yet."""
    running = RunFolder(Path(shutil.copytree(trunk.path, tmp_path / "running")))
    with run_lock(running.path), running.metrics.open("a", encoding="utf-8") as log:
        log.write('{"step": 21, "loss"')
        log.flush()
        branch = trained(data, tmp_path / "branch", **branch_of(running))
    assert metrics(branch) == metrics(trained(data, tmp_path / "again", **branch_of(trunk)))


def test_a_branch_of_two_processes(data: Path, trunk: RunFolder, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(data, **branch_of(trunk)).to_toml(), encoding="utf-8")
    run_jobs((2, "train", config, tmp_path / "pair"))
    assert_close_runs(RunFolder.open(tmp_path / "pair"), trained(data, tmp_path / "alone", **branch_of(trunk)))


def test_the_command_begins_and_goes_on(data: Path, tmp_path: Path, call: Call) -> None:
    """`--continue` with the same words, though the run has found out the clock of its trunk meanwhile."""
    config, grown = tmp_path / "config.toml", {**GROWING, "train__batch_size": 4, "train__micro_batch": 4}
    config.write_text(tiny_config(data, **grown).to_toml(), encoding="utf-8")
    trunk = tmp_path / "trunk"
    assert call("train", config, "--out", trunk).code == 0
    words = ["train", config, "--out", tmp_path / "branch", "--continue", "--train.steps", "12"]
    words += [f"--train.branch_from={trunk}@8"]
    assert call(*words).code == 0
    assert call(*words).out.startswith("finished at step 12")
    assert "branched off" in call("report", tmp_path / "branch").out
    assert load_config(tmp_path / "branch" / "config.toml").growth.steps == LENGTH


KILLING = """
import shutil, signal, sys
from pathlib import Path
from killing import killed_at, operations
from meristem.config import load_config
from meristem.runs.run_folder import RunFolder
from meristem.training.train import resume, train
from training.helpers import assert_equal_runs
folder = Path(sys.argv[1])
config, out, whole = load_config(folder / "config.toml"), folder / "branch", folder / "whole"
count = operations(lambda: train(config, whole))
def begin_or_go_on():
    resume(out) if (out / "config.toml").is_file() else train(config, out)
for operation in range(1, count, 4):
    shutil.rmtree(out, ignore_errors=True)
    assert killed_at(operation, begin_or_go_on) == -signal.SIGKILL
    assert killed_at(count * 10, begin_or_go_on) == 0
    assert_equal_runs(RunFolder(out), RunFolder(whole))
    assert {path.name for path in folder.iterdir()} == {"config.toml", "branch", "whole"}, operation
print(count)
"""


def test_a_branch_killed_at_any_moment_of_its_start_begins_or_goes_on(
    data: Path, trunk: RunFolder, tmp_path: Path
) -> None:
    """In a process of its own: one that forks must not have threads."""
    config = tiny_config(data, **branch_of(trunk, train__steps=8, eval__every=0))
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    command, tests = [sys.executable, "-c", KILLING, str(tmp_path)], Path(__file__).resolve().parents[1]
    ended = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.splitlines()[-1]) > 50


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"train__branch_from": "nowhere@6"},
            r"train\.branch_from = .*nowhere@6': cannot be branched off: .*not a run",
        ),
        ({"train__branch_from": "{trunk}"}, r"must be RUN@STEP, the folder of a run and a step"),
        ({"train__branch_from": "@6"}, r"must be RUN@STEP"),
        ({"train__branch_from": "a\0b@6"}, r"train\.branch_from = 'a\\x00b': must be the path of a folder"),
        ({"train__branch_from": "{trunk}@six"}, r"must be RUN@STEP"),
        ({"train__branch_from": "{trunk}@7"}, r"has no checkpoint of step 7; there are \[2, 4, 6, .*20\]"),
        ({"train__branch_from": "{trunk}@12"}, r"train\.branch_from = .*must be a step before train\.steps = 12"),
        (
            {"train__branch_from": "{trunk}@18", "train__steps": 30},
            r"must be from step 2 to 16, while the learning rate",
        ),
        ({"optimizer__curve": "cosine"}, r"optimizer\.curve = 'cosine': must be wsd with train\.branch_from"),
        ({"optimizer__lr": 1e-3}, r"optimizer\.lr = 0\.001: must be 0\.003, as in .*run; free are train\.steps"),
        ({"optimizer__warmup": 0.2}, r"optimizer\.warmup = 0\.2: must be 0\.1, as in"),
        ({"model__feed_forward": 64}, r"model\.feed_forward = 64: must be 48, as in"),
        ({"train__batch_size": 8}, r"train\.batch_size = 8: must be 4, as in"),
        ({"data__seed": 1}, r"data\.seed = 1: must be 0, as in"),
        ({"model__plan": "plan.json"}, r"model\.plan = 'plan\.json': must not be given, as in"),
        ({"growth__policies": ["observe"]}, r"growth\.policies = \('observe',\): must be \(\), as in"),
    ],
)
def test_what_cannot_be_branched_off_is_said(
    changes: dict[str, Any], said: str, data: Path, trunk: RunFolder, tmp_path: Path
) -> None:
    named = {key: value.format(trunk=trunk.path) if isinstance(value, str) else value for key, value in changes.items()}
    with pytest.raises(InputError, match=said):
        train(tiny_config(data, **{**branch_of(trunk), **named}), tmp_path / "branch")
    assert not any(tmp_path.iterdir())


def test_other_data_and_other_plans_are_refused(data: Path, trunk: RunFolder, tmp_path: Path) -> None:
    other = prepared(tmp_path / "other", count=81)
    with pytest.raises(InputError, match=r"data\.path = .*other.*is not the data that .*run began with"):
        train(tiny_config(other, **branch_of(trunk)), tmp_path / "branch")
    file, plan = tmp_path / "plan.json", trunk.plan.to_json()
    file.write_text(plan, encoding="utf-8")
    from_file = trained(data, tmp_path / "trunk", **TRUNK, model__plan=str(file))
    file.write_text(json.dumps({**json.loads(plan), "feed_forward": 64}), encoding="utf-8")
    with pytest.raises(InputError, match=r"\[model\] = 'feed_forward': is not what .*trunk began with"):
        train(tiny_config(data, **branch_of(from_file), model__plan=str(file)), tmp_path / "branch")
    assert not (tmp_path / "branch").exists()


def test_a_damaged_checkpoint_of_the_trunk_leaves_nothing_behind(data: Path, trunk: RunFolder, tmp_path: Path) -> None:
    damaged = RunFolder(Path(shutil.copytree(trunk.path, tmp_path / "trunk")))
    (damaged.checkpoints / "step-00000006" / "model.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"step-00000006/model\.safetensors: has 0 bytes"):
        train(tiny_config(data, **branch_of(damaged)), tmp_path / "branch")
    assert [path.name for path in tmp_path.iterdir()] == ["trunk"]


def test_a_branch_of_a_branch_leaves_at_the_same_step(data: Path, trunk: RunFolder, tmp_path: Path) -> None:
    """After that its rate falls."""
    first = trained(data, tmp_path / "first", **branch_of(trunk))
    second = trained(data, tmp_path / "second", **branch_of(first))
    assert metrics(second) == metrics(first)
    with pytest.raises(InputError, match=rf"is a branch too, .* from step 6 on; branch off {trunk.path}"):
        train(tiny_config(data, **branch_of(first, 8)), tmp_path / "third")
    assert load_checkpoint(list_checkpoints(second.checkpoints)[0]).state["good"] is True
