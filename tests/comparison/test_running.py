"""A comparison that is really run: what is missing is trained, what was interrupted goes on, what is done stays."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comparison.helpers import base_file, result, tables, trained
from meristem.comparison.analysis import analyse
from meristem.comparison.ended import as_begun, describe_lines, finished_runs
from meristem.comparison.file import Comparison, read_comparison
from meristem.comparison.foreseen import foreseen_configuration
from meristem.comparison.lines import Begun, add_line, append_line, read_lines
from meristem.comparison.planning import Lost, RunKey, Waiting, best_rate, configuration, known_keys
from meristem.comparison.processes import free_gpu, launched_jobs, threads_of, visible_gpus, wait_for_others
from meristem.comparison.record import show
from meristem.comparison.results import CarriedResult, Result, has_diverged, read_result
from meristem.comparison.running import Runner, Slowest, check_place, check_room, run_comparison
from meristem.config import check_resumable, load_config
from meristem.errors import InputError, RunError
from meristem.runs.lock import LOCK_FILE
from meristem.runs.run_folder import RunFolder
from meristem.training.train import train
from training.helpers import assert_equal_runs, copy_run, events, metrics, prepared, prepared_labelled, start

SGT = {"model.schedule": "uniform", "growth": {"policies": ["sgt"], "sgt": {"start": 2, "window": 3}}}
ROOTS = {"model.schedule": "uniform", "model.layers": 1}
ARMS: dict[str, Any] = {
    "sgt": SGT,
    "plain": {"model.schedule": "uniform", "budget": {"kind": "flops", "of": "sgt"}},
    "static": {"model.schedule": "uniform", "growth": {"policies": ["static_loops"], "static_loops": {"like": "@sgt"}}},
    "same": {"model.plan": "@sgt.plan"},
}  # fmt: skip
ASKED: dict[str, Any] = {"arms": ARMS, "primary": ["sgt", "plain"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("running"), 30)


def asked(folder: Path, data: Path, **changes: Any) -> Comparison:
    folder.mkdir(parents=True, exist_ok=True)
    return read_comparison(tables(**{**ASKED, **changes}), base_file(folder, data))


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All eight runs, made in this process; what is missing of them is made by processes, as `compare` starts them."""
    out = tmp_path_factory.mktemp("done")
    trained(asked(out / "files", data), out)
    return out


def test_a_launch_is_written_down_after_one_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "launches.jsonl").write_text('{"run": "runs/a/seed-0", "jobs": 2}\n{"run": "runs/a/se')
    append_line(tmp_path / "launches.jsonl", {"run": "runs/b/seed-0", "jobs": 3})
    assert launched_jobs(tmp_path) == {"runs/a/seed-0": 2, "runs/b/seed-0": 3}


def launches(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "launches.jsonl").read_text().splitlines()]


def test_arms_are_paired_and_matched(done: Path, data: Path) -> None:
    results = finished_runs(asked(done / "files", data), done)
    assert set(results) == {RunKey(arm, seed) for arm in ARMS for seed in (0, 1)}
    for seed in (0, 1):
        sgt, plain, static, same = (results[RunKey(arm, seed)] for arm in ARMS)
        first = [metrics(RunFolder.open(Path(run.folder)))[0] for run in (sgt, plain)]
        assert first[0]["loss"] == first[1]["loss"]  # the same weights and the same batch
        per_update = plain.flops // plain.steps
        assert 0 <= plain.flops - sgt.flops < per_update  # stopped at the update at which the count was reached
        assert plain.steps > sgt.steps
        assert static.structure == same.structure == sgt.structure
        assert "looped" in static.structure
        assert sgt.training_seconds > 0
        assert sgt.evaluation_seconds > 0


def test_what_is_done_is_not_repeated(done: Path, data: Path) -> None:
    said: list[str] = []
    run_comparison(asked(done / "files", data), done, say=said.append)
    assert not (done / "launches.jsonl").exists()
    assert said == [f"8 runs in {done}; 8 done"]
    lines = (done / "lines.jsonl").read_text()
    assert {json.loads(line)["run"] for line in lines.splitlines()} == {
        f"runs/{a}/seed-{s}" for a in ARMS for s in (0, 1)
    }
    run_comparison(asked(done / "files", data), done, say=said.append)
    assert (done / "lines.jsonl").read_text() == lines


def test_what_was_interrupted_goes_on_and_ends_alike(done: Path, data: Path, tmp_path: Path) -> None:
    """Two at a time, but the static arm waits for the loops of the other one."""
    out = tmp_path / "out"
    shutil.copytree(done, out)
    whole = RunFolder.open(done / "runs/sgt/seed-1")
    shutil.rmtree(out / "runs/sgt/seed-1")
    shutil.rmtree(out / "runs/static/seed-1")
    cut = trained_part(whole, out / "runs/sgt/seed-1")
    said: list[str] = []
    run_comparison(asked(out / "files", data), out, jobs=2, say=said.append)
    assert "going on with sgt, seed 1" in said
    assert [entry["run"] for entry in launches(out)] == ["runs/sgt/seed-1", "runs/static/seed-1"]
    assert "resume" in events(cut)
    assert_equal_runs(cut, whole)


def trained_part(whole: RunFolder, to: Path) -> RunFolder:
    """A copy of a run, made anew and stopped before its end."""
    config, aside = whole.config, to.with_name("aside")
    train(replace(config, checkpoint=replace(config.checkpoint, every=4, keep=9)), aside)
    cut = copy_run(RunFolder.open(aside), to, last=4)
    shutil.rmtree(aside)
    lines = cut.events.read_text().splitlines(keepends=True)
    cut.events.write_text("".join(line for line in lines if '"finished"' not in line))
    return cut


def test_a_run_that_is_done_otherwise_is_refused_by_the_key(done: Path, data: Path) -> None:
    arms = {**ARMS, "sgt": {**SGT, "optimizer.weight_decay": 0.3}}
    with pytest.raises(InputError, match=r"optimizer.weight_decay = 0.3: .*sgt/seed-0 was trained with 0.1"):
        finished_runs(asked(done / "files", data, arms=arms), done)


def test_a_folder_may_be_moved(done: Path, data: Path, tmp_path: Path) -> None:
    """The plan file that `same` begins with lies in the folder: what it says counts, not where it is."""
    out = tmp_path / "moved"
    shutil.copytree(done, out)
    comparison = asked(out / "files", data)
    results = finished_runs(comparison, out)
    assert {key: run.scores for key, run in results.items()} == {
        key: run.scores for key, run in finished_runs(comparison, done).items()
    }
    config, folder = configuration(comparison, RunKey("same", 0), results), RunFolder.open(out / "runs/same/seed-0")
    assert str(config.model.plan).startswith(str(out))
    check_resumable(folder.config, as_begun(Begun.at(folder.path), config, None))


def with_lines(done: Path, out: Path) -> Path:
    """What a comparison that has made all runs itself leaves: a copy of the folder, and the lines."""
    shutil.copytree(done, out, ignore=shutil.ignore_patterns("lines.jsonl"))
    for run in sorted((out / "runs").glob("*/seed-*")):
        folder = RunFolder.open(run)
        add_line(
            out, run.relative_to(out), Begun.at(run), read_result(run.parent.name, folder.config.train.seed, folder), 1
        )
    return out / "lines.jsonl"


def test_lines_stand_for_folders_that_are_elsewhere(done: Path, data: Path, tmp_path: Path) -> None:
    """Lines of two machines have come, of one also a piece that was cut off; what is missing is made here."""
    comparison, here = asked(tmp_path / "files", data), tmp_path / "here"
    lines = with_lines(done, tmp_path / "there").read_text().splitlines(keepends=True)
    assert max(map(len, lines)) < 16_000
    known = [line for line in lines if not json.loads(line)["run"].endswith(("static/seed-1", "same/seed-1"))]
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    paths[0].write_text("".join(known[:4]))
    paths[1].write_text("".join(known[2:]) + known[0][:99])
    carried = read_lines(paths, here)
    assert {key: {**run.to_dict(), "folder": ""} for key, run in finished_runs(comparison, here, carried).items()} == {
        key: {**run.to_dict(), "folder": ""}
        for key, run in finished_runs(comparison, done).items()
        if (key.arm, key.seed) not in (("static", 1), ("same", 1))
    }
    said: list[str] = []
    results = run_comparison(comparison, here, jobs=2, lines=carried, say=said.append)
    assert said[:2] == [f"8 runs in {here}; 6 done", "lines of 6 runs read"]
    assert [entry["run"] for entry in launches(here)] == ["runs/static/seed-1", "runs/same/seed-1"]
    for key, run in finished_runs(comparison, done).items():  # they took after one whose folder is not here
        assert (results[key].scores, results[key].structure) == (run.scores, run.structure)
    made = read_lines([here / "lines.jsonl"], here)
    assert {run: line.jobs for run, line in made.items()} == {"runs/static/seed-1": 2, "runs/same/seed-1": 2}
    everywhere = read_lines([*paths, here / "lines.jsonl"], tmp_path / "home")
    assert len(finished_runs(comparison, tmp_path / "home", everywhere)) == 8
    _, text = show(comparison, results, here, carried)
    assert "Up to 2 runs went side by side" in text


def test_lines_are_checked_like_folders(done: Path, data: Path, tmp_path: Path) -> None:
    path, home = with_lines(done, tmp_path / "there"), tmp_path / "home"
    lines = read_lines([path], home)
    arms = {**ARMS, "sgt": {**SGT, "optimizer.weight_decay": 0.3}}
    remedy = "leave out that file, or remove the line of that run"
    with pytest.raises(InputError) as error:
        finished_runs(asked(tmp_path / "files", data, arms=arms), home, lines)
    assert (error.value.field, error.value.remedy) == ("optimizer.weight_decay", None)
    assert error.value.expected == f"runs/sgt/seed-0 in {path} was trained with 0.1; {remedy}"
    with pytest.raises(InputError) as error:
        finished_runs(asked(tmp_path / "files", prepared(tmp_path, 20)), home, lines)
    assert error.value.expected == f"runs/sgt/seed-0 in {path} was trained on other data; {remedy}"
    before = path.read_text()
    first = json.loads(before.partition("\n")[0])
    other = {**first, "result": {**first["result"], "scores": {"held_out_loss": 1.0}}}
    for entry, said in ((other, "has another result of"), ({"run": "x"}, "is no line of"), (5, "is no line of")):
        path.write_text(before + json.dumps(entry))
        with pytest.raises(RunError, match=rf"lines.jsonl:{before.count(chr(10)) + 1}: {said}"):
            read_lines([path], home)


def test_only_a_last_line_may_be_cut_off(done: Path, data: Path, tmp_path: Path) -> None:
    path = with_lines(done, tmp_path / "there")
    first, second, third, *_ = path.read_text().splitlines()
    whole = set(read_lines([path], tmp_path))
    for text, number in ((f"{first}\n{second[:99]}\n{third}\n", 2), (first[:99], 1), ('\nconfig = "base.toml"\n', 2)):
        path.write_text(text)
        with pytest.raises(RunError, match=rf"lines.jsonl:{number}: is no line of a finished run \(not JSON\)"):
            read_lines([path], tmp_path)
    path.write_text("")
    assert read_lines([path], tmp_path) == {}
    for text in (f"{first}\n\n{second}\n{third[:99]}", f"{first}\n{second}"):  # the next line is one of its own
        path.write_text(text)
        run_comparison(asked(tmp_path / "files", data), path.parent, say=lambda text: None)
        assert set(read_lines([path], tmp_path)) == whole
        assert path.read_text().startswith(f"{first}\n")


def test_lines_that_are_not_of_the_comparison_are_counted(done: Path, data: Path, tmp_path: Path) -> None:
    lines = read_lines([with_lines(done, tmp_path / "there")], tmp_path)
    arms = {"plain": {"model.schedule": "uniform"}, "sgt": SGT}
    fewer = asked(tmp_path / "files", data, arms=arms, seeds=[0, 2])
    assert describe_lines(fewer, lines) == (
        "lines of 8 runs read; 6 of them not of this comparison, such as runs/plain/seed-1"
    )
    assert describe_lines(asked(tmp_path / "files", data), lines) == "lines of 8 runs read"


def test_no_run_is_begun_that_would_end_too_late(data: Path, tmp_path: Path) -> None:
    """A run of ten updates that took a second leaves no time for one of a million, but for one of ten."""
    arms = {"a": {"model.schedule": "uniform"}, "long": {"budget": {"tokens": 64_000_000}}}
    comparison = asked(tmp_path / "files", data, arms=arms, primary=["long", "a"])
    said: list[str] = []
    results = run_comparison(comparison, tmp_path / "out", limit=60, say=said.append)
    assert {key.arm for key in results} == {"a"}
    assert said[-1].startswith("no time is left for")


def test_runs_of_earlier_calls_tell_how_long_a_run_would_take(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own folder, or by their lines: nothing is begun that they leave no time for."""
    arms = {"a": {"model.schedule": "uniform"}, "long": {"budget": {"tokens": 64_000_000}}}
    comparison = asked(tmp_path / "files", data, arms=arms, primary=["long", "a"])
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for key in (RunKey("a", 0), RunKey("a", 1)):
        train(configuration(comparison, key, {}), out / key.path)
    monkeypatch.setattr("subprocess.Popen", None)  # nothing can be begun
    assert len(run_comparison(comparison, out, limit=60, say=lambda text: None)) == 2
    lines = read_lines([out / "lines.jsonl"], elsewhere)
    assert len(run_comparison(comparison, elsewhere, limit=60, lines=lines, say=lambda text: None)) == 2


@pytest.mark.parametrize(
    ("device", "jobs", "alike"),
    [
        ("x86_64 CPU, 2 threads", 2, True),
        ("x86_64 CPU, 2 threads", 4, True),
        ("x86_64 CPU, 1 thread", 1, False),
        ("H200", 2, False),
    ],
)
def test_runs_of_other_devices_or_more_side_by_side_do_not(device: str, jobs: int, alike: bool) -> None:
    """Two runs side by side have a thread each, on a machine that says of itself that it has two."""
    slow = result("a", 0, 3.0, training_seconds=700.0, steps=7, device="x86_64 CPU, 1 thread")
    known, side_by_side = {RunKey("a", 0): slow}, {"runs/a/seed-0": 2}
    found = Slowest.of_earlier(known, side_by_side, jobs, device)
    assert found == (Slowest(100.0, 6.0) if alike else Slowest())
    assert found.seconds(70) == (7006.0 if alike else 0.0)


@pytest.mark.parametrize(
    ("given", "threads"), [(None, [8, 4, 1]), ("2", [2, 2, 1]), ("3,2", [3, 3, 1]), ("99", [8, 4, 1]), ("x", [8, 4, 1])]
)
def test_runs_have_no_more_threads_than_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, given: str | None, threads: list[int]
) -> None:
    monkeypatch.setattr("meristem.comparison.processes.usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert [threads_of(side_by_side) for side_by_side in (1, 2, 9)] == threads


def test_another_structure_is_refused_wherever_it_comes_from(done: Path, data: Path) -> None:
    arms = {**ARMS, "same": {"model.plan": "@plain.plan"}}
    with pytest.raises(InputError, match=r"model.plan = .*same/seed-0 began with another structure \(layers"):
        finished_runs(asked(done / "files", data, arms=arms), done)


def test_a_changed_arm_is_refused_by_the_key_that_was_changed(done: Path, data: Path) -> None:
    """Also where another structure follows from it."""
    arms = {**ARMS, "plain": {**ARMS["plain"], "model.heads": 2, "model.head_dim": 16}}
    with pytest.raises(InputError, match=r"model.head") as error:
        finished_runs(asked(done / "files", data, arms=arms), done)
    assert "was trained with" in str(error.value)


@pytest.mark.parametrize(
    ("ends", "diverged"),
    [
        ([("skipped", step) for step in range(5, 15)], True),  # as older versions ended
        ([("skipped", 5), ("measured", 5), *(("skipped", step) for step in range(6, 15)), ("checkpoint", 8)], True),
        ([("skipped", step) for step in range(5, 14)], False),
        ([("skipped", step) for step in range(5, 500, 50)], False),  # one now and then
        ([("measured", 5), ("diverged", 14)], True),
        ([("diverged", 14), ("resume", 4)], False),
        ([], False),
    ],
)
def test_a_run_that_was_given_up_is_known_by_its_events(
    done: Path, tmp_path: Path, ends: list[tuple[str, int]], diverged: bool
) -> None:
    run = copy_run(RunFolder.open(done / RunKey("plain", 0).path), tmp_path / "run")
    lines = [json.dumps({"step": step, "event": event}) + "\n" for event, step in [("start", 0), *ends]]
    run.events.write_text("".join(lines))
    assert has_diverged(run) == diverged


@pytest.mark.parametrize(
    ("arm", "field"),
    [
        ({**ROOTS, "model.width": 33}, "model.heads"),
        ({"model.start_from": "nowhere"}, "arms.b.model.start_from"),
        (
            {"growth.policies": ["stack"], "growth.stack.start_layers": 9, "model.schedule": "uniform"},
            "arms.b.growth.stack.start_layers",
        ),
    ],
)
def test_what_a_run_would_be_refused_for_is_told_before_the_first(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: dict[str, Any], field: str
) -> None:
    arms = {"a": ROOTS, "b": arm}
    monkeypatch.setattr("subprocess.Popen", None)  # nothing can be begun
    with pytest.raises(InputError) as error:
        run_comparison(asked(tmp_path, data, arms=arms, primary=["b", "a"]), tmp_path / "out", say=lambda text: None)
    assert error.value.field == field
    assert "arm b" in str(error.value) or "arms.b" in str(error.value)


def test_text_is_not_compared_by_what_needs_labels(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"measure = 'accuracy': must be held_out_loss"):
        finished_runs(asked(tmp_path, data, measure="accuracy"), tmp_path / "out")


def test_blocks_that_another_rule_began_with_are_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms: dict[str, Any] = {"a": {"model.schedule": "uniform"}}
    arms["depth"] = arms["a"] | {"growth.policies": ["depth"]}
    comparison = asked(tmp_path, data, arms=arms, primary=["depth", "a"], budget={"kind": "flops", "flops": 3e8})
    train(configuration(comparison, RunKey("depth", 0), {}), tmp_path / "out" / RunKey("depth", 0).path)
    monkeypatch.setattr("meristem.training.growth_from_config.best_depth", lambda updates, tokens: 2)
    told = (
        r"growth.depth.start_layers = None: .*seed-0 began with 1 block; to keep it, give growth.depth.start_layers = 1"
    )
    with pytest.raises(InputError, match=told):
        finished_runs(comparison, tmp_path / "out")
    arms["depth"]["growth.depth.start_layers"] = 1
    named = asked(tmp_path, data, arms=arms, primary=["depth", "a"], budget={"kind": "flops", "flops": 3e8})
    assert finished_runs(named, tmp_path / "out").keys() == {RunKey("depth", 0)}


def test_blocks_that_another_rule_wanted_of_a_finished_model_are_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meristem.training.growth_from_config.best_depth", lambda updates, tokens: 3)
    arms: dict[str, Any] = {"a": {"model.schedule": "uniform", "model.layers": 2}}
    arms["depth"] = arms["a"] | {"growth.policies": ["depth"]}
    first = asked(tmp_path, data, arms=arms, primary=["depth", "a"], budget={"kind": "flops", "flops": 3e8})
    train(configuration(first, RunKey("a", 0), {}), tmp_path / "first")
    start = {"model.start_from": str(tmp_path / "first")}
    arms = {"a": start, "depth": start | {"growth.policies": ["depth"]}}
    comparison = asked(tmp_path, data, arms=arms, primary=["depth", "a"], budget={"kind": "flops", "flops": 3e8})
    key = RunKey("depth", 0)
    train(configuration(comparison, key, {}), tmp_path / "out" / key.path)
    assert key in finished_runs(comparison, tmp_path / "out")
    monkeypatch.setattr("meristem.training.growth_from_config.best_depth", lambda updates, tokens: 4)
    told = r"growth.depth.layers = None: .*seed-0 was to end with 3 blocks; to keep it, give growth.depth.layers = 3"
    with pytest.raises(InputError, match=told):
        finished_runs(comparison, tmp_path / "out")
    arms["depth"]["growth.depth.layers"] = 3
    named = asked(tmp_path, data, arms=arms, primary=["depth", "a"], budget={"kind": "flops", "flops": 3e8})
    assert finished_runs(named, tmp_path / "out").keys() == {key}


def test_other_data_is_refused(done: Path, tmp_path: Path) -> None:
    """Also where they make for another structure, as rows with labels do."""
    rows = tmp_path / "rows"
    prepared_labelled(rows)
    for other in (prepared(tmp_path, 20), rows):
        with pytest.raises(InputError, match=r"data.path = .*seed-0 was trained on other data; remove it, or compare"):
            finished_runs(asked(tmp_path / "files", other), done)


def test_a_seed_can_be_added(done: Path, data: Path) -> None:
    results = finished_runs(asked(done / "files", data, seeds=[0, 1, 2]), done)
    assert {key.seed for key in results} == {0, 1}


def test_a_run_that_fails_says_why(tmp_path: Path, data: Path) -> None:
    place = tmp_path / "out/runs/sgt/seed-0"
    place.parent.mkdir(parents=True)
    place.write_text("not a folder")
    arms: dict[str, Any] = {"sgt": {}, "plain": {}}
    with pytest.raises(RunError, match=r"sgt, seed 0: stopped with status 2 \(error: out = .*seed-0"):
        run_comparison(asked(tmp_path / "files", data, arms=arms), tmp_path / "out", say=lambda text: None)


def test_a_run_that_diverges_is_a_result_and_is_not_tried_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also, two runs at a time are given a GPU each, if there are two; here these are names that nobody asks for."""
    monkeypatch.setattr("meristem.comparison.running.visible_gpus", lambda: ["4", "7"])
    arms = {"wild": {"optimizer.weight_decay": 1e30, "train.device": "auto"}, "calm": {"train.device": "auto"}}
    arms |= {"follower": {"budget": {"kind": "flops", "of": "wild"}}}  # which can never be run, and holds nothing up
    changes = {"arms": arms, "primary": ["wild", "calm"]}
    comparison = asked(tmp_path / "files", data, **changes)
    found = run_comparison(comparison, tmp_path / "out", jobs=2, say=lambda text: None)
    ended = {key.arm: (result.diverged, result.lost) for key, result in found.items()}
    assert ended == {"wild": (True, False), "calm": (False, False), "follower": (True, True)}
    (caution,) = [text for text in analyse(comparison, found).cautions if text.startswith("follower")]
    assert caution.startswith("follower could not be run, for want of what it takes after, with 2 of 2 seeds (0, 1)")
    assert [entry["gpu"] for entry in launches(tmp_path / "out")][:2] == ["4", "7"]
    again: list[str] = []
    assert run_comparison(comparison, tmp_path / "out", say=again.append) == found
    assert again == [f"6 runs in {tmp_path / 'out'}; 6 done"]


@pytest.mark.parametrize(
    ("device", "taken", "chosen"),
    [("auto", [], "0"), ("auto", ["0"], "3"), ("cuda", ["3", "0", "3"], "0"), ("cuda:1", [], None), ("cpu", [], None)],
)
def test_runs_are_spread_over_gpus(device: str, taken: list[str | None], chosen: str | None) -> None:
    assert free_gpu(device, ["0", "3"], taken) == chosen
    assert free_gpu(device, ["0"], taken) is None  # one is shared


@pytest.mark.parametrize(
    ("named", "found"), [(None, ["0", "1"]), ("5,7", ["5", "7"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])]
)
def test_gpus_are_those_that_may_be_seen(monkeypatch: pytest.MonkeyPatch, named: str | None, found: list[str]) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == found


def test_more_runs_side_by_side_than_memory_allows_are_refused(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(asked(tmp_path, data), RunKey("sgt", 0), {})
    monkeypatch.setattr("meristem.training.train.memory_of", lambda device: 2**26)
    check_room(RunKey("sgt", 0), config, 1, [])
    with pytest.raises(InputError, match=r"jobs = 512: must be fewer: sgt, seed 0 does not fit 512 times on"):
        check_room(RunKey("sgt", 0), config, 512, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_stop_leaves_nothing_running_and_a_second_call_goes_on(
    tmp_path: Path, data: Path, number: signal.Signals
) -> None:
    """While the first run is at work, the only one that is missing. One whose call was killed is waited for."""
    arms = {"a": {"model.schedule": "uniform"}, "b": {"budget": {"tokens": 512}}}
    path = base_file(tmp_path, data, train__steps=200, eval__every=0, checkpoint__every=0, log__every=5)
    text = ['config = "base.toml"', "seeds = [0, 1]", 'primary = ["b", "a"]', "[arms.a]", 'model.schedule = "uniform"',
            "[arms.b]", "budget.tokens = 512"]  # fmt: skip
    path.write_text("\n".join(text))
    out = tmp_path / "out"
    comparison = read_comparison(tables(arms=arms, primary=["b", "a"]), path)
    for key in (RunKey("a", 1), RunKey("b", 0), RunKey("b", 1)):
        train(configuration(comparison, key, {}), out / key.path)
    process = start("compare", path, "--out", out)
    first, again = out / "runs/a/seed-0/metrics.jsonl", list[str]()
    deadline = time.monotonic() + 60
    while not (first.exists() and first.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(RunError, match=rf"\(pid {process.pid}\) is working on this comparison"):
        run_comparison(comparison, out, say=again.append)
    training = int((out / "runs/a/seed-0" / LOCK_FILE).read_text())
    if number == signal.SIGKILL:  # it waits, so that it cannot have ended before it is waited for
        os.kill(training, signal.SIGSTOP)
    process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait(timeout=60)

        def let_go(text: str) -> None:
            again.append(text)
            os.kill(training, signal.SIGCONT)

        assert len(run_comparison(comparison, out, say=let_go)) == 4
        assert again[0].startswith("waiting for a, seed 0: ")
        assert again[0].endswith(f"another process (pid {training}) is working on this run")
        assert again[1:] == [f"4 runs in {out}; 4 done"]
        assert events(RunFolder.open(out / "runs/a/seed-0"))[-1] == "finished"
        return
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "stopping 1 run; the same command goes on from there" in said
    assert events(RunFolder.open(out / "runs/a/seed-0"))[-1] == "stopped"
    assert len(run_comparison(comparison, out, say=again.append)) == 4
    assert again[:2] == [f"4 runs in {out}; 3 done", "going on with a, seed 0"]


def test_a_run_that_only_names_a_process_that_lives_is_not_waited_for(tmp_path: Path) -> None:
    """Its own ended, and another one has got its number: what counts is the lock."""
    key, said = RunKey("a", 0), list[str]()
    folder = tmp_path / key.path
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / LOCK_FILE).write_text(f"{os.getppid()}\n")
    wait_for_others(tmp_path, [key], said.append, math.inf)
    assert said == []
    assert (folder / LOCK_FILE).read_text() == f"{os.getppid()}\n"


# --- arms that start from the runs of another ------------------------------------------------------------------------

SECOND_BUDGET: dict[str, Any] = {
    "arms": {
        "finished": {**ROOTS, "budget": {"kind": "flops", "flops": 1e8}},
        "deeper": {"model.start_from": "@finished", "growth.policies": ["depth"], "growth.depth.layers": 2},
        "fresh": {**ROOTS, "model.layers": 2},
    },
    "seeds": [0, 1], "rates": [1e-3, 3e-3], "rate_seeds": [7], "primary": ["deeper", "fresh"],
    "budget": {"kind": "flops", "flops": 3e8},
}  # fmt: skip


@pytest.fixture(scope="module")
def second_budget(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison with an arm that starts from the finished runs of another, all its runs done."""
    out = tmp_path_factory.mktemp("second-budget") / "out"
    (out / "files").mkdir(parents=True)
    trained(asked(out / "files", data, **SECOND_BUDGET), out)
    return out


def test_a_second_budget_begins_with_the_best_rate_of_the_first_and_has_other_data(
    second_budget: Path, data: Path
) -> None:
    found = asked(second_budget / "files", data, **SECOND_BUDGET)
    results = finished_runs(found, second_budget)
    assert set(results) == set(known_keys(found, results))
    assert len(results) == 3 * 2 + 3 * 2
    best = best_rate(found, "finished", results)
    for rate in found.rates:
        config = configuration(found, RunKey("deeper", 7, rate), results)
        assert config.model.start_from == str(second_budget / f"runs/finished/rate-{best:g}/seed-7")
        assert config.optimizer.lr == rate
        begun = RunFolder.open(second_budget / RunKey("deeper", 7, rate).path)
        assert [len(begun.plan.layers), len(begun.newest_plan.layers)] == [1, 2]
    seeds = [configuration(found, RunKey(arm, 7, best), results).data.seed for arm in found.arms]
    assert seeds[0] != seeds[1] == seeds[2] == 7


def test_runs_that_start_from_others_may_be_moved_with_them(second_budget: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "moved"
    shutil.copytree(second_budget, out)
    moved = finished_runs(asked(out / "files", data, **SECOND_BUDGET), out)
    stayed = finished_runs(asked(second_budget / "files", data, **SECOND_BUDGET), second_budget)
    assert {key: run.scores for key, run in moved.items()} == {key: run.scores for key, run in stayed.items()}


def test_runs_that_start_from_others_count_by_their_lines_alone(
    second_budget: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still to be made of them needs the folder of what it starts from."""
    found = asked(tmp_path, data, **SECOND_BUDGET)
    results = finished_runs(asked(second_budget / "files", data, **SECOND_BUDGET), second_budget)
    for key, run in results.items():
        add_line(tmp_path, key.path, Begun.at(second_budget / key.path), run, 1)
    out = tmp_path / "out"
    out.mkdir()
    lines = read_lines([tmp_path / "lines.jsonl"], out)
    assert {key: run.scores for key, run in finished_runs(found, out, lines).items()} == {
        key: run.scores for key, run in results.items()
    }
    deeper = next(name for name in lines if name.startswith("runs/deeper") and name.endswith("seed-1"))
    without = {name: line for name, line in lines.items() if name != deeper}
    monkeypatch.setattr("subprocess.Popen", None)  # nothing can be begun
    told = r"arms.deeper.model.start_from = '.*/out/runs/finished/rate-0.00\d/seed-1': .*only a line of it is here"
    with pytest.raises(InputError, match=told):
        run_comparison(found, out, lines=without)
    # One that has begun has the weights.
    copy_run(RunFolder.open(second_budget / deeper), out / deeper, last=0)
    with pytest.raises(TypeError, match="NoneType"):
        run_comparison(found, out, lines=without)


def test_what_does_not_lack_its_source_is_made_before_what_does(
    second_budget: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is seen only as the rates are chosen."""
    found = asked(tmp_path, data, **SECOND_BUDGET)
    out = tmp_path / "out"
    for key, run in finished_runs(asked(second_budget / "files", data, **SECOND_BUDGET), second_budget).items():
        if (key.arm, key.seed) == ("finished", 1):
            add_line(tmp_path, key.path, Begun.at(second_budget / key.path), run, 1)
        elif (key.arm, key.seed) not in {("deeper", 1), ("fresh", 1), ("deeper", 7)}:
            shutil.copytree(second_budget / key.path, out / key.path)
    made: list[str] = []

    def process(command: list[str], **options: Any) -> Any:
        given = dict(pairwise(command))
        made.append(Path(given["--out"]).relative_to(out).parts[1])
        train(load_config(given["train"]), given["--out"])
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr("subprocess.Popen", process)
    with pytest.raises(InputError, match=r"arms.deeper.model.start_from = .*only a line of it is here"):
        run_comparison(found, out, lines=read_lines([tmp_path / "lines.jsonl"], out), say=lambda text: None)
    assert sorted(made) == ["deeper", "deeper", "fresh"]


def test_in_a_chain_every_arm_but_the_last_has_an_order_of_data_of_its_own(data: Path, tmp_path: Path) -> None:
    arms = {"a": ROOTS, "b": {"model.start_from": "@a"}, "c": {"model.start_from": "@b"}, "d": ROOTS}
    found = asked(tmp_path, data, arms=arms, primary=["c", "d"])
    results: dict[RunKey, Result] = {}
    orders = []
    for arm in arms:
        config = configuration(found, RunKey(arm, 1), results)
        orders.append(config.data.seed)
        train(config, tmp_path / arm)
        results[RunKey(arm, 1)] = result(arm, 1, 3.0, folder=str(tmp_path / arm))
    assert len(set(orders)) == 3
    assert orders[2] == orders[3] == 1


def test_what_would_start_from_a_run_that_diverged_is_lost(data: Path, tmp_path: Path) -> None:
    arms = {"a": ROOTS, "b": {"model.start_from": "@a"}}
    found = asked(tmp_path, data, arms=arms, primary=["b", "a"])
    with pytest.raises(Lost, match="a diverged, which it takes after"):
        configuration(found, RunKey("b", 0), {RunKey("a", 0): result("a", 0, 3.0, scores={})})


def test_a_source_that_diverged_elsewhere_is_not_said_to_lack_a_folder(data: Path, tmp_path: Path) -> None:
    arms = {"a": ROOTS, "b": {"model.start_from": "@a"}}
    runner = Runner(asked(tmp_path, data, arms=arms, primary=["b", "a"]), tmp_path, 1, math.inf, {}, print)
    for scores, missing in (({"held_out_loss": 3.0}, tmp_path / RunKey("a", 0).path), ({}, None)):
        runner.results = {RunKey("a", 0): CarriedResult(**vars(result("a", 0, 3.0, scores=scores)))}
        assert runner.missing_source(RunKey("b", 0)) == missing


@pytest.mark.parametrize("rates", [{}, {"rates": [1e-3, 2e-3], "rate_seeds": [7]}])
@pytest.mark.parametrize(
    ("arm", "told"),
    [
        ({"data.class_weights": "balanced"}, r"^arms\.c\.data\.class_weights = 'balanced': is of classifiers"),
        ({"data.held_back": 10**9}, r"^arms\.c\.data\.held_back = 1000000000: must be below \d+, all there are"),
        ({"growth.policies": ["stack"], "growth.stack.at": [99], "growth.stack.layers": 3},
         r"^arms\.c\.growth\.stack\.at = 99\.0: must be before the end of the run"),
        ({"growth.policies": ["stack"], "growth.stack.start_layers": 1, "growth.stack.layers": 3},
         r"^arms\.c\.growth\.stack\.start_layers = 1: must be 2, the blocks that are there"),
    ],
)  # fmt: skip
def test_what_starts_from_runs_that_are_not_made_yet_is_checked_before_them(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: Any, arm: dict[str, Any], told: str
) -> None:
    """Here two of them, of which the second starts from the first."""
    monkeypatch.setattr("subprocess.Popen", None)  # nothing can be begun
    arms = {"a": {**ROOTS, "model.layers": 2}, "b": {"model.start_from": "@a"}, "c": {"model.start_from": "@b", **arm}}
    found = asked(tmp_path, data, arms=arms, primary=["c", "a"], **rates)
    with pytest.raises(InputError, match=told):
        run_comparison(found, tmp_path / "out", say=lambda text: None)
    assert not [*(tmp_path / "out").rglob("*.json")]


def test_a_fault_of_a_source_is_not_blamed_on_what_starts_from_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    arms = {"c": {"model.start_from": "@b"}, "b": {**ROOTS, "data.held_back": 10**9}}
    with pytest.raises(InputError, match=r"^arms\.b\.data\.held_back = 1000000000: must be below"):
        run_comparison(asked(tmp_path, data, arms=arms, primary=["c", "b"]), tmp_path / "out", say=lambda text: None)


def test_what_a_run_will_write_is_not_looked_for_before_it_is_made(data: Path, tmp_path: Path) -> None:
    """Entropies of an observed run, for loops like those that they point to."""
    loops = {"growth.policies": ["static_loops"], "growth.static_loops.like": "@a"}
    arms = {"a": {**ROOTS, "growth.policies": ["observe"]}, "b": {"model.start_from": "@a", **loops}}
    found = asked(tmp_path, data, arms=arms, primary=["b", "a"])
    Runner(found, tmp_path / "out", 1, math.inf, {}, print)
    with pytest.raises(Waiting), foreseen_configuration(found, RunKey("b", 0), {}):
        pass


def test_a_run_that_is_not_made_yet_is_named_as_in_the_file(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    looped = {**ROOTS, "growth.policies": ["block_loop"], "growth.block_loop.layers": [0]}
    arms = {"a": looped, "b": {"model.start_from": "@a", "growth.policies": ["sgt"], "growth.sgt.window": 1}}
    with pytest.raises(InputError, match=r"^arms\.b\.model\.start_from = '@a': has loops already"):
        run_comparison(asked(tmp_path, data, arms=arms, primary=["b", "a"]), tmp_path / "out", say=lambda text: None)


def test_flops_that_are_too_few_are_named_by_the_budget(data: Path, tmp_path: Path) -> None:
    train(
        configuration(asked(tmp_path, data), RunKey("plain", 0), {RunKey("sgt", 0): result("sgt", 0, 3.0)}),
        tmp_path / "was",
    )
    deeper = {"model.start_from": str(tmp_path / "was"), "growth": {"policies": ["depth"], "depth": {"layers": 40}}}
    found = asked(
        tmp_path, data, arms={"a": deeper, "b": ROOTS}, primary=["a", "b"], budget={"kind": "flops", "flops": 3e6}
    )
    with pytest.raises(InputError, match=r"^budget.flops = 3000000.0: must be at least .* after there are 40 blocks"):
        run_comparison(found, tmp_path / "out", say=lambda text: None)


def test_the_folder_of_a_run_is_none_for_a_comparison(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text("")
    check_place(tmp_path / "run")  # files that a run could be made of
    (tmp_path / "run/plan.json").write_text("")
    with pytest.raises(InputError, match="is the folder of a run; a comparison needs one of its own"):
        run_comparison(asked(tmp_path, data), tmp_path / "run")


def test_a_run_starts_from_a_whole_run(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"arms.b.model.start_from = '@a.plan': must be @a"):
        asked(tmp_path, data, arms={"a": ROOTS, "b": {"model.start_from": "@a.plan"}}, primary=["b", "a"])
