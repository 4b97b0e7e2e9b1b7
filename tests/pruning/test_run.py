"""Pruned runs: what everything else makes of them, what they leave alone, and what is left of broken ones."""

import json
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import Call
from meristem import PruneSettings, prune_run
from meristem.data import load_tokenizer, open_data, prepare
from meristem.errors import InputError
from meristem.evaluation.evaluate import evaluate_run
from meristem.files import sha256_of
from meristem.gauges.probe import Batch
from meristem.pruning import PruneResult, attempts
from meristem.pruning.rows import pruning_rows
from meristem.pruning.search import Search
from meristem.pruning.settings import Budget
from meristem.pruning.source import open_source
from meristem.report.page.data import run_data
from meristem.report.page.events import growth_rows
from meristem.report.page.file import report_page
from meristem.report.page.repeat import repeat_command
from meristem.report.run_growth import RunGrowth
from meristem.runs.divergence import Rewind, batch_number, write_rewinds
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training import loop
from meristem.training.loop import Outcome
from meristem.training.optimizer import guarded_update
from meristem.training.tasks import make_task
from meristem.training.train import resume, train
from training.helpers import CPU, EAGER_HEADS, STEPS, tiny_config, trained

FREE = PruneSettings(keep=0.5, tolerance=math.inf, sequences=16)


@pytest.fixture(scope="module")
def pruned(whole: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> PruneResult:
    """A run pruned to half its heads, never changed by a test."""
    return prune_run(whole.path, tmp_path_factory.mktemp("pruned") / "run", FREE, device="cpu")


def test_the_new_run_is_what_was_measured(whole: RunFolder, pruned: PruneResult) -> None:
    folder = RunFolder.open(pruned.folder)
    assert sum(whole.newest_plan.heads) == 6
    assert sum(folder.newest_plan.heads) == 3
    assert folder.newest_plan == pruned.plan == load_run(pruned.folder, device="cpu").model.plan
    found = evaluate_run(pruned.folder, windows=6, device="cpu")
    assert found.loss == pytest.approx(pruned.held_out[1], abs=1e-5)
    assert evaluate_run(whole.path, windows=6, device="cpu", out=pruned.folder / "other").loss == pytest.approx(
        pruned.held_out[0], abs=1e-5
    )
    told = json.loads((pruned.folder / "prune.json").read_text())
    assert told["after"]["heads"] == 3
    assert told["rise"] == pytest.approx(pruned.loss - pruned.before.loss)
    assert len((pruned.folder / "prune.csv").read_text().splitlines()) == 5
    assert "<svg" in (pruned.folder / "prune.svg").read_text()
    assert "6 heads became 3" in str(pruned)


def test_the_source_stays_as_it_was(whole: RunFolder, tmp_path: Path) -> None:
    def files() -> dict[Path, str]:
        return {path: sha256_of(path) for path in whole.path.rglob("*") if path.is_file()}

    before = files()
    prune_run(whole.path, tmp_path / "out", FREE, device="cpu")
    assert files() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_page_tells_of_every_head_that_left(pruned: PruneResult) -> None:
    events = list(RunFolder.open(pruned.folder).read(pruned.folder / "events.jsonl"))
    removals = [entry for entry in events if entry.get("action") == "removal"]
    assert len(removals) == 3
    assert all(entry["loss_without"] is not None and "misses it least" in entry["rule"] for entry in removals)
    told = growth_rows(RunGrowth(RunFolder.open(pruned.folder)))
    readings = [row["reading"] for row in told if row["action"] == "removal"]
    assert readings == [
        f"loss {one['loss_with']:.4g} with it, {one['loss_without']:.4g} without "
        f"({one['loss_without'] - one['loss_with']:+.2g})"
        for one in removals
    ]
    page = report_page([pruned.folder])
    assert "took heads out of a trained model" in page
    assert page.count("a head has left") >= 3
    flags = "--keep 0.5 --tolerance inf --sequences 16 --step 12"
    assert repeat_command(pruned.folder, 1).startswith(f"meristem prune {pruned.source} {flags} --out ")
    assert flags in page


def test_moments_follow_and_a_repair_goes_on_with_the_data(whole: RunFolder, tmp_path: Path) -> None:
    settings = PruneSettings(keep=0.5, repair=3, tolerance=math.inf, sequences=16)
    result = prune_run(whole.path, tmp_path / "out", settings, device="cpu")
    folder = RunFolder.open(result.folder)
    assert result.repaired
    assert folder.newest_step == STEPS + 3
    entries = list(folder.read(folder.metrics))
    steps = {entry["step"]: entry for entry in entries if "loss" in entry}
    source = {entry["step"]: entry for entry in whole.read(whole.metrics) if "loss" in entry}
    assert all(steps[step]["loss"] == source[step]["loss"] for step in source)
    rates = [steps[STEPS + number]["lr"] for number in (1, 2, 3)]
    assert rates == pytest.approx([6e-4 * 2 / 3, 6e-4 / 3, 0.0], abs=1e-9)
    assert load_run(result.folder, device="cpu").model.plan == result.plan
    assert resume(result.folder).step == STEPS + 3  # it is done
    with pytest.raises(InputError, match="was pruned"):
        resume(result.folder, from_start=True)


def test_a_run_that_its_flops_ended_can_be_repaired(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", train__flops=1.5e8)
    steps = run.newest_step
    assert 0 < steps == run.config.train.steps
    settings = PruneSettings(keep=0.5, repair=3, tolerance=math.inf, sequences=16)
    folder = RunFolder.open(prune_run(run.path, tmp_path / "out", settings, device="cpu").folder)
    assert folder.newest_step == steps + 3
    assert folder.config.train.flops is None


def test_a_grown_run_that_its_flops_ended_has_ended_when_it_is_pruned(data: Path, tmp_path: Path) -> None:
    """It has fewer updates than train.steps, which are those of the structure that it began with."""
    grows = {"growth__policies": ["stack"], "growth__stack__at": [2], "growth__stack__start_layers": 1}
    run = trained(data, tmp_path / "run", train__flops=1.5e8, checkpoint__every=4, **grows)
    assert run.newest_step < run.config.train.steps
    result = prune_run(run.path, tmp_path / "out", FREE, device="cpu")
    assert run_data(result.folder)["status"] == {"word": "finished", "text": f"Finished: {run.newest_step} steps."}
    early = prune_run(run.path, tmp_path / "early", FREE, step=4, device="cpu")
    assert run_data(early.folder)["status"]["word"] == "not finished"


def test_a_repair_alone_is_the_control(whole: RunFolder, tmp_path: Path) -> None:
    result = prune_run(whole.path, tmp_path / "out", PruneSettings(keep=1.0, repair=2, sequences=16), device="cpu")
    assert result.plan == whole.newest_plan
    assert result.kept == 0
    assert result.repaired
    assert RunFolder.open(result.folder).newest_step == STEPS + 2


def test_a_stopped_repair_is_resumed_like_any_run(whole: RunFolder, tmp_path: Path) -> None:
    """The folder of a repair is a run before its first update."""
    source = open_source(whole.path, device="cpu")
    settings = PruneSettings(keep=0.5, repair=4, tolerance=math.inf, sequences=16)
    made = prune_run(whole.path, tmp_path / "all", settings, device="cpu")
    assert source.step + 4 == RunFolder.open(made.folder).newest_step
    again = tmp_path / "again"
    train(tiny_config(Path(source.config.data.path), model__start_from=str(made.folder), train__steps=2), again)
    assert RunFolder.open(again).newest_plan == made.plan


def test_the_rows_set_aside_are_never_trained_on_or_reported(whole: RunFolder) -> None:
    source = open_source(whole.path, device="cpu")
    settings = PruneSettings(keep=0.5, repair=5, sequences=16)
    rows = pruning_rows(source, settings, CPU)

    def windows(batches: object) -> set[bytes]:
        return {row.numpy().tobytes() for tokens, _ in batches for row in tokens}  # type: ignore[attr-defined]

    task = make_task(source.config, source.checkpoint.plan, source.data, fixed=False)
    trained_on = {
        np.ascontiguousarray(row).tobytes() for step in range(STEPS, STEPS + 5) for row in task.batch(step, 0, 1)[0]
    }
    aside, shown = windows(rows.aside), windows(rows.shown)
    assert len(aside) == 16
    assert not aside & trained_on
    assert not aside & shown
    reported = {row[:-1].numpy().tobytes() for row in task.windows}  # type: ignore[attr-defined]
    assert not (aside | shown) & reported
    with pytest.raises(InputError, match="repair"):
        pruning_rows(source, PruneSettings(repair=10_000), CPU)


def test_rows_that_a_run_holds_back_are_set_aside_and_stay_so(data: Path, tmp_path: Path) -> None:
    """Those alone, though fewer than asked for: the others are ones that a run over several epochs was trained on."""
    run = trained(data, tmp_path / "run", data__held_back=24, train__steps=4)
    source, settings = open_source(run.path, device="cpu"), PruneSettings(keep=0.5, repair=3, sequences=40)
    task = make_task(source.config, source.checkpoint.plan, source.data, fixed=False)
    held_back = {row.tobytes() for number in range(24) for row in task.held_back_batch(number, 0, 1)[0]}
    assert len(held_back) == 24
    aside = {row.numpy().tobytes() for tokens, _ in pruning_rows(source, settings, CPU).aside for row in tokens}
    assert aside == held_back
    made = prune_run(run.path, tmp_path / "out", replace(settings, tolerance=math.inf), device="cpu")
    assert RunFolder.open(made.folder).config.data.held_back == 24
    pruning_rows(source, replace(settings, repair=10_000), CPU)  # no repair can see them


def trained_on(run: RunFolder, aside: list[Batch]) -> int:
    """How many of the rows set aside were in a batch of the run."""
    task = make_task(run.config, run.plan, open_data(run.config.data.path), fixed=False)
    numbers = (batch_number(step, run.rewinds) for step in range(run.newest_step))
    seen = {row.tobytes() for number in numbers for row in task.batch(number, 0, 1)[0]}
    return sum(row.numpy().tobytes() in seen for tokens, _ in aside for row in tokens)


def test_rows_that_the_run_was_trained_on_are_told(data: Path, tmp_path: Path) -> None:
    """None, some of them near the end of an epoch, where a look at others goes round, and all after it."""
    whole, most = trained(data, tmp_path / "whole", train__steps=1), PruneSettings(keep=0.5, sequences=64)
    assert pruning_rows(open_source(whole.path, device="cpu"), most, CPU).trained == 0
    count = make_task(whole.config, whole.plan, open_data(data), fixed=False).sampler.windows  # type: ignore[attr-defined]
    parts = {}
    for part in (0.95, 1.1):
        steps = {"train__steps": 4, "train__batch_size": math.ceil(count * part / 4), "train__micro_batch": None}
        run = trained(data, tmp_path / f"run-{part}", **steps, checkpoint__every=0, eval__every=0)
        rows = pruning_rows(open_source(run.path, device="cpu"), most, CPU)
        assert rows.trained == trained_on(run, rows.aside)
        parts[part] = rows.trained / sum(len(tokens) for tokens, _ in rows.aside)
    assert 0 < parts[0.95] < parts[1.1] == 1
    made = prune_run(run.path, tmp_path / "out", replace(FREE, keep=0.8), device="cpu")
    number = pruning_rows(open_source(run.path), FREE, CPU).trained
    assert made.notes[0].startswith(f"The run was trained on {number} of")
    write_rewinds(run.path, [Rewind(from_step=3, to_step=1, first=1, end=2)])  # of the second batch nothing was learnt
    rows = pruning_rows(open_source(run.path, device="cpu"), most, CPU)
    assert rows.trained == trained_on(RunFolder.open(run.path), rows.aside)


def test_rows_of_other_data_are_none_that_the_run_was_trained_on(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", train__steps=40, train__batch_size=32, train__micro_batch=None)
    other = tmp_path / "other"
    prepare([Path(__file__)], other, tokenizer=load_tokenizer(data))
    most = PruneSettings(keep=0.5, sequences=64)
    assert pruning_rows(open_source(run.path, device="cpu"), most, CPU).trained > 0
    assert pruning_rows(open_source(run.path, data=other, device="cpu"), most, CPU).trained == 0


def test_what_kept_a_model_larger_than_asked_for_is_told(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are made up: every head is missed by 1 nat."""
    trial = Search._trial
    monkeypatch.setattr(Search, "_trial", lambda self, *given: replace(trial(self, *given), loss=self.start + 1.0))
    made = prune_run(whole.path, tmp_path / "out", replace(FREE, tolerance=0.5), device="cpu")
    told = (
        "Not as small as asked for: without another head the loss would rise by 1.0000 at least; the tolerance is 0.5."
    )
    assert made.notes == (told,)


def test_a_repair_that_ends_above_the_tolerance_takes_heads_back(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are made up: every head that left is missed by 1 nat, and a repair makes up for two of them."""
    tried: list[int] = []

    def to(self: Search, budget: Budget | None, tolerance: float) -> str:
        ended = real_to(self, budget, tolerance)
        self.points = [replace(point, loss=self.start + number) for number, point in enumerate(self.points)]
        return ended

    def make(self: attempts.Attempts, kept: int, *, repair: bool) -> attempts.Attempt:
        tried.append(kept)
        found = real(self, kept, repair=False)
        return attempts.Attempt(found.path, found.plan, kept, self.search.start + kept - 2, None, repair)

    real, real_to = attempts.Attempts.make, Search.to
    monkeypatch.setattr(attempts.Attempts, "make", make)
    monkeypatch.setattr(Search, "to", to)
    settings = PruneSettings(keep=0.34, repair=2, tolerance=1e-9, sequences=16)
    result = prune_run(whole.path, tmp_path / "out", settings, device="cpu")
    assert tried == [4, 2, 3]
    assert result.kept == 2
    assert result.rise <= 1e-9
    assert "above the tolerance" in str(result)
    assert sum(RunFolder.open(result.folder).newest_plan.heads) == 6 - result.kept


def test_without_a_budget_the_tolerance_is_the_limit(whole: RunFolder, tmp_path: Path) -> None:
    result = prune_run(whole.path, tmp_path / "out", PruneSettings(tolerance=0.005, sequences=16), device="cpu")
    assert result.rise <= 0.005
    assert all(point.loss - result.before.loss <= 0.005 for point in result.curve)


@pytest.mark.parametrize("how", [KeyboardInterrupt(), None])
def test_what_is_interrupted_leaves_nothing(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: BaseException | None, call: Call
) -> None:
    def stopped(path: Path) -> Outcome:
        if how is not None:
            raise how
        return Outcome(path, STEPS + 1, None, 15)

    monkeypatch.setattr(attempts, "resume", stopped)
    flags = ("--keep", "0.5", "--repair", "2", "--tolerance", "inf", "--sequences", "16", "--device", "cpu")
    said = call("prune", whole.path, "--out", tmp_path / "out", *flags)
    assert said.code == (130 if how is not None else 128 + 15)
    assert "nothing was kept" in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_signal_during_a_repair_leaves_nothing(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)  # what is said about it comes from another thread
        return guarded_update(*arguments)

    monkeypatch.setattr(loop, "guarded_update", interrupted)
    flags = ("--keep", "0.5", "--repair", "20", "--tolerance", "inf", "--sequences", "16", "--device", "cpu")
    said = call("prune", whole.path, "--out", tmp_path / "out", *flags)
    assert said.code == 128 + signal.SIGINT
    assert "finishing this step first; press again to stop at once" in said.out
    assert "stopped by SIGINT: nothing was kept" in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_refused_at_once(whole: RunFolder, tmp_path: Path, call: Call) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    said = call("prune", whole.path, "--keep", "0.5", "--out", tmp_path)
    assert said.code == 2
    assert "already holds something" in said.err


def test_a_folder_inside_the_run_is_refused(whole: RunFolder) -> None:
    for out in (whole.path / "sub", whole.path / "checkpoints" / ".." / "small"):
        with pytest.raises(InputError, match=r"out = .*: lies inside the run that is pruned, .*; name a folder"):
            prune_run(whole.path, out, FREE, device="cpu")
        assert not out.exists()


@pytest.mark.parametrize("settings", [{"keep": 1.0}, {"budget": "heads=100"}, {"budget": "heads=1.0"}])
def test_a_budget_that_is_met_already_is_refused(settings: dict[str, Any], whole: RunFolder, tmp_path: Path) -> None:
    """The new run would be a copy; a repair alone is another matter."""
    (field,) = settings
    message = rf"{field} = .*: takes nothing out: the model is within it already \(heads=6\); ask for less, or for"
    with pytest.raises(InputError, match=message):
        prune_run(whole.path, tmp_path / "out", PruneSettings(**settings), device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_classifier_is_pruned_and_predicts(labelled: Path, tmp_path: Path) -> None:
    run = trained(labelled, tmp_path / "run", model__schedule="uniform", data__class_weights="balanced")
    settings = PruneSettings(keep=0.5, repair=2, tolerance=math.inf, sequences=16)
    result = prune_run(run.path, tmp_path / "out", settings, device="cpu")
    loaded = load_run(result.folder, device="cpu")
    assert sum(loaded.model.plan.heads) == 4
    assert result.before.sizes.kv_bytes == 0
    assert result.before.tokens_per_second is None
    assert len(loaded.predict(["low w1 w2", "high w3"])) == 2
    assert "-" in str(result)
    with pytest.raises(InputError, match="keeps no keys and values"):
        prune_run(run.path, tmp_path / "other", PruneSettings(budget="kv=0.5"), device="cpu")


def test_an_imported_model_with_groups_is_pruned_by_data_that_are_named(data: Path, tmp_path: Path) -> None:
    helpers = pytest.importorskip("pretrained.helpers")
    from meristem import import_model

    folder = helpers.saved(helpers.random_model("Qwen2"), tmp_path / "qwen")
    run = import_model(folder, tmp_path / "imported", context=32).path
    with pytest.raises(InputError, match="no data of its own"):
        prune_run(run, tmp_path / "out", FREE)
    result = prune_run(run, tmp_path / "out", FREE, data=data, device="cpu")
    assert result.plan.kv_heads == (1, 1, 1)
    assert result.plan.heads == (2, 2, 2)
    assert load_run(result.folder, device="cpu").model.plan == result.plan
    with pytest.raises(InputError, match="was imported"):
        resume(result.folder)
    repaired = prune_run(
        run, tmp_path / "repaired", PruneSettings(budget="kv=0.5", repair=1, tolerance=math.inf, sequences=16),
        data=data, device="cpu",
    )  # fmt: skip
    assert RunFolder.open(repaired.folder).newest_step == 1
    assert repaired.after.sizes.kv_bytes * 2 == repaired.before.sizes.kv_bytes


def test_a_model_that_grew_can_be_pruned_twice(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", train__steps=24, **EAGER_HEADS)
    assert sum(run.newest_plan.heads) > 2
    first = prune_run(run.path, tmp_path / "first", PruneSettings(keep=0.8, repair=2, tolerance=math.inf), device="cpu")
    second = prune_run(
        first.folder, tmp_path / "second", PruneSettings(keep=0.7, tolerance=math.inf), device="cpu"
    )  # fmt: skip
    assert second.step == 26
    assert sum(second.plan.heads) < sum(first.plan.heads) < sum(run.newest_plan.heads)
    assert "a head has left" in report_page([second.folder])


def test_the_average_of_the_weights_can_be_pruned(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", train__average=0.5, train__steps=4)
    result = prune_run(run.path, tmp_path / "out", FREE, average=True, device="cpu")
    folder = RunFolder.open(result.folder)
    assert folder.config.train.average == 0
    whole = load_run(run.path, average=True, device="cpu").model
    assert torch.equal(load_run(result.folder, device="cpu").model.embedding.weight, whole.embedding.weight)
    followed = prune_run(run.path, tmp_path / "followed", FREE, device="cpu")
    assert load_run(followed.folder, average=True, device="cpu").model.plan == followed.plan


def test_the_command_line_says_what_was_done(whole: RunFolder, tmp_path: Path, call: Call) -> None:
    flags = ("--budget", "attention=0.7", "--tolerance", "inf", "--sequences", "16", "--device", "cpu", "--no-fold")
    said = call("prune", whole.path, "--out", tmp_path / "out", *flags)
    assert said.code == 0, said.err
    assert "the budget is met" in said.out
    assert "heads left" in said.err
    assert call("generate", tmp_path / "out", "--prompt", "Page", "--tokens", "4", "--device", "cpu").code == 0
    assert call("report", tmp_path / "out").code == 0
    asked = call("prune", whole.path, "--out", tmp_path / "json", "--order", "random", *flags, "--json")
    assert json.loads(asked.out)["settings"]["order"] == "random"
    assert call("prune", whole.path, "--out", tmp_path / "no", "--budget", "kv=70%").code == 2
