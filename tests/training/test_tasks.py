"""Classifiers in the training loop: the same promises as for language models, and what is their own."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from meristem.data import LabelledData, TokenData, open_data
from meristem.errors import InputError
from meristem.model import Classifier
from meristem.runs.checkpoint import list_checkpoints, load_checkpoint
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training.tasks import ClassificationTask, LanguageTask, initial_plan, make_task
from meristem.training.train import resume, train

from .helpers import (
    EAGER_BIRTHS,
    STEPS,
    assert_equal_runs,
    copy_run,
    final_tensors,
    metrics,
    prepared_labelled,
    run_jobs,
    tiny_config,
    trained,
)
from .test_distributed import assert_close_runs
from .test_interruptions import KILLED, kill_loop

BALANCED: dict[str, Any] = {"data__class_weights": "balanced"}


@pytest.fixture(scope="session")
def classified(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Never changed by a test: copy it."""
    return trained(labelled, tmp_path_factory.mktemp("classified") / "run", **BALANCED)


def task_of(data: Path, *, fixed: bool = False, **changes: Any) -> ClassificationTask:
    config, opened = tiny_config(data, **changes), LabelledData.open(data)
    task = make_task(config, initial_plan(config, opened), opened, fixed=fixed)
    assert isinstance(task, ClassificationTask)
    return task


# --- rows that are held back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["labelled", "data"])
def test_rows_are_held_back_where_births_by_demand_see_rows_again(kind: str, request: pytest.FixtureRequest) -> None:
    """They are never trained on; other runs, and those that see no row twice, do without nothing."""
    path: Path = request.getfixturevalue(kind)

    def task(**changes: Any) -> Any:
        config, opened = tiny_config(path, **changes), open_data(path)
        return make_task(config, initial_plan(config, opened), opened, fixed=False)

    def rows(batches: Any) -> set[bytes]:
        found = [tokens for number in range(100) for tokens in batches(number, 0, 1)[0]]
        return {tokens[tokens != 0].tobytes() for tokens in found}

    growing: dict[str, Any] = {"growth__policies": ("incrt",), **EAGER_BIRTHS}
    plain, grown = task(train__steps=1000), task(train__steps=1000, **growing)
    assert plain.held_back == task(train__steps=17, **growing).held_back == 0
    assert task(train__steps=1000, growth__incrt__hold_back=0.0, **growing).held_back == 0
    assert grown.held_back > 0
    kept, trained_on = rows(grown.held_back_batch), rows(grown.batch)
    assert kept
    assert not kept & trained_on
    assert kept | trained_on == rows(plain.batch)
    assert grown.steps_per_epoch < plain.steps_per_epoch


@pytest.mark.parametrize("kind", ["labelled", "data"])
def test_any_run_can_do_without_the_rows_that_one_with_births_does_without(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """So that both train on the same rows, in the same order."""
    path: Path = request.getfixturevalue(kind)

    def task(**changes: Any) -> Any:
        config, opened = tiny_config(path, train__steps=1000, **changes), open_data(path)
        return make_task(config, initial_plan(config, opened), opened, fixed=False)

    grown = task(growth__policies=("incrt",), **EAGER_BIRTHS)
    plain = task(data__held_back=grown.held_back)
    assert plain.held_back == grown.held_back > 0
    for step in (0, 7, 999):
        for mine, theirs in zip(plain.batch(step, 0, 1), grown.batch(step, 0, 1), strict=True):
            assert np.array_equal(mine, theirs)
    more = task(growth__policies=("incrt",), data__held_back=grown.held_back + 1, **EAGER_BIRTHS)
    assert more.held_back == grown.held_back + 1
    few = task(growth__policies=("incrt",), data__held_back=1, **EAGER_BIRTHS)
    assert few.held_back == grown.held_back  # one row could show nothing to be certain
    with pytest.raises(InputError, match=r"data\.held_back = 1000000: must be below"):
        task(data__held_back=1_000_000)


# --- what every run promises ------------------------------------------------------------------------------------------


def test_the_data_folder_decides_the_task(data: Path, labelled: Path, classified: RunFolder, whole: RunFolder) -> None:
    index = LabelledData.open(labelled).index
    plan = classified.plan
    assert (plan.classes, plan.context, plan.pooling) == (3, index.length, "mean")
    assert plan.vocabulary >= index.ids
    assert isinstance(load_run(classified.path, device="cpu").model, Classifier)
    assert whole.plan.classes is None
    config, tokens = tiny_config(data), TokenData.open(data)
    assert isinstance(make_task(config, initial_plan(config, tokens), tokens, fixed=False), LanguageTask)


@pytest.mark.parametrize("step", [0, 4, 8])
def test_resuming_from_any_checkpoint_gives_the_same_run(step: int, classified: RunFolder, tmp_path: Path) -> None:
    run = copy_run(classified, tmp_path / "run", last=step)
    assert resume(run.path).step == STEPS
    assert_equal_runs(run, classified)


def test_two_processes_equal_one_with_accumulation(labelled: Path, classified: RunFolder, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(labelled, **BALANCED).to_toml(), encoding="utf-8")
    run_jobs((2, "train", config, tmp_path / "run"))
    run = RunFolder.open(tmp_path / "run")
    assert load_checkpoint(list_checkpoints(run.checkpoints)[-1]).state["processes"] == 2
    assert_close_runs(run, classified)


def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(labelled: Path, tmp_path: Path) -> None:
    run, reached = kill_loop(labelled, tmp_path, kills=5, seed=1)
    assert len(set(reached)) >= 2
    assert_equal_runs(run, trained(labelled, tmp_path / "whole", **KILLED))


def test_micro_batches_add_up(labelled: Path, classified: RunFolder, tmp_path: Path) -> None:
    assert classified.config.train.micro_batch == 2
    at_once = trained(labelled, tmp_path / "run", train__micro_batch=4, **BALANCED)
    torch.testing.assert_close(final_tensors(at_once), final_tensors(classified), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiled_runs_are_close(labelled: Path, classified: RunFolder, tmp_path: Path) -> None:
    compiled = trained(labelled, tmp_path / "run", train__compile=True, **BALANCED)
    losses, expected = ([entry["loss"] for entry in metrics(run) if "loss" in entry] for run in (compiled, classified))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_other_data_is_refused_on_resume(classified: RunFolder, tmp_path: Path) -> None:
    prepared_labelled(tmp_path / "other", count=80)
    run = copy_run(classified, tmp_path / "run", last=4)
    config = tiny_config(tmp_path / "other", **BALANCED)
    with pytest.raises(InputError, match=r"data\.path.*not the data this run began with"):
        resume(run.path, config)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_an_epoch_has_every_row_once(labelled: Path) -> None:
    task = task_of(labelled)
    rows = task.rows
    count = len(rows)
    seen = Counter(int(row) for step in range(count) for row in task.sampler.rows(step))
    assert set(seen.values()) == {4}, "four epochs in as many batches of four as there are rows"
    first = [int(row) for step in range(count // 4) for row in task.sampler.rows(step)]
    assert len(set(first)) == len(first)
    assert first != sorted(first)


@pytest.mark.parametrize("step", [0, 3, 100])
def test_batches_are_rows_padded_to_the_longest_of_all_processes(labelled: Path, step: int) -> None:
    task = task_of(labelled, train__batch_size=6, train__micro_batch=1)
    chosen = task.sampler.rows(step)
    tokens, targets = task.batch(step, 0, 1)
    longest = int(task.rows.lengths[chosen].max())
    assert tokens.shape == (6, min(task.context, -(-longest // 16) * 16))
    assert targets.tolist() == task.rows.labels[chosen].tolist()
    for row, number in zip(tokens, chosen, strict=True):
        size = int(task.rows.lengths[number])
        start = int(task.rows.ends[number]) - size
        assert row.tolist() == task.rows.tokens[start : start + size].tolist() + [0] * (tokens.shape[1] - size)
    shares = [task.batch(step, rank, 3) for rank in range(3)]
    assert np.array_equal(np.concatenate([share[0] for share in shares]), tokens)
    assert np.array_equal(np.concatenate([share[1] for share in shares]), targets)


def test_the_order_of_rows_follows_the_data_seed_alone(labelled: Path) -> None:
    base = [task_of(labelled).batch(step, 0, 1)[0] for step in range(9)]
    same = [task_of(labelled, train__seed=5).batch(step, 0, 1)[0] for step in range(9)]
    other = [task_of(labelled, data__seed=5).batch(step, 0, 1)[0] for step in range(9)]
    assert all(np.array_equal(a, b) for a, b in zip(base, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(base, other, strict=True))


def test_compiled_code_sees_one_shape(labelled: Path) -> None:
    task = task_of(labelled, fixed=True)
    assert {task.batch(step, 0, 1)[0].shape for step in range(20)} == {(4, task.context)}


def test_a_smaller_context_cuts_rows(labelled: Path, tmp_path: Path) -> None:
    run = trained(labelled, tmp_path / "run", model__context=5, train__steps=2)
    assert run.plan.context == 5
    assert task_of(labelled, model__context=5).batch(0, 0, 1)[0].shape == (4, 5)
    assert not (task_of(labelled, model__context=5).batch(0, 0, 1)[0] == 0).all()


# --- what is recorded -------------------------------------------------------------------------------------------------


def direct_scores(model: Classifier, rows: Any) -> tuple[float, list[int]]:
    """Loss and predictions, row by row and without padding."""
    losses, predicted = [], []
    for number in range(len(rows)):
        tokens = torch.from_numpy(rows.padded(np.array([number]), min(int(rows.lengths[number]), model.plan.context)))
        with torch.no_grad():
            logits: Tensor = model(tokens).logits
        losses.append(float(cross_entropy(logits, torch.tensor([rows.labels[number]]))))
        predicted.append(int(logits.argmax()))
    return sum(losses) / len(losses), predicted


def test_held_out_numbers_are_those_of_the_rows_one_by_one(labelled: Path, classified: RunFolder) -> None:
    rows = LabelledData.open(labelled).split("held_out")
    logged = {entry["step"]: entry for entry in metrics(classified) if "held_out_loss" in entry}
    assert set(logged) == {4, 8, 12}
    for step, entry in logged.items():
        model = load_run(classified.path, step=step, device="cpu").model
        assert isinstance(model, Classifier)
        loss, predicted = direct_scores(model, rows)
        assert entry["held_out_loss"] == pytest.approx(loss, abs=1e-5), "without class weights"
        assert entry["accuracy"] == pytest.approx(float(np.mean(np.array(predicted) == rows.labels)))
        scores = []
        for label in {*predicted, *rows.labels.tolist()}:
            hits = sum(p == t == label for p, t in zip(predicted, rows.labels, strict=True))
            scores.append(2 * hits / (predicted.count(label) + rows.labels.tolist().count(label)))
        assert entry["macro_f1"] == pytest.approx(sum(scores) / len(scores))


def test_some_held_out_rows_spread_over_all(labelled: Path) -> None:
    task = task_of(labelled, eval__rows=5)
    count = len(task.held_out)
    assert task.chosen.tolist() == [i * count // 5 for i in range(5)]
    assert task_of(labelled, eval__rows=1000).chosen.tolist() == list(range(count))


def test_runs_without_held_out_rows_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared_labelled(tmp_path / "data", held_out=0)
    run = trained(tmp_path / "data", tmp_path / "run", train__steps=2)
    assert "nothing is measured: no rows are held out" in capsys.readouterr().out
    assert not [entry for entry in metrics(run) if "held_out_loss" in entry]


def test_counted_flops_and_tokens_are_the_mean_over_an_epoch(labelled: Path) -> None:
    task, config = task_of(labelled), tiny_config(labelled)
    plan = initial_plan(config, LabelledData.open(labelled))
    steps = -(-len(task.rows) // 4)
    total = 0
    for step in range(steps):
        rows, length = task.batch(step, 0, 1)[0].shape
        of_length = replace(plan, context=length)
        total += 3 * (rows * length * of_length.cost.forward.full + rows * of_length.cost.answer)
    assert task.step_flops(plan).full == task.step_flops(plan).causal == round(total / steps)
    assert task.tokens_per_step == round(4 * task.rows.lengths.mean())
    assert task.steps_per_epoch == len(task.rows) / 4
    fixed = task_of(labelled, fixed=True)
    assert fixed.step_flops(plan) == plan.cost.training_of(4, plan.context)


def test_accuracy_is_shown(labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(labelled, tmp_path / "run")
    out = capsys.readouterr().out
    last = [entry for entry in metrics(run) if "accuracy" in entry][-1]
    assert f"step 12: held-out loss {last['held_out_loss']:.4f}, accuracy {last['accuracy']:.4f}" in out


# --- learning ---------------------------------------------------------------------------------------------------------


def test_balanced_weights_make_classes_count_alike(labelled: Path) -> None:
    task = task_of(labelled, **BALANCED)
    assert task.weights is not None
    counts = np.bincount(task.rows.labels)
    assert (task.weights.numpy() * counts).tolist() == pytest.approx([len(task.rows) / 3] * 3)
    assert task_of(labelled).weights is None
    model = task.model(initial_plan(task.config, LabelledData.open(labelled)))
    assert model.class_weights is not None
    assert torch.equal(model.class_weights, task.weights)


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_classifier_learns(labelled: Path, tmp_path: Path, pooling: str) -> None:
    run = trained(
        labelled, tmp_path / "run", model__pooling=pooling, train__steps=120, train__batch_size=16,
        train__micro_batch=16, eval__every=0, checkpoint__every=0, optimizer__lr=1e-2,
    )  # fmt: skip
    last = metrics(run)[-1]
    assert last["accuracy"] > 0.8
    assert last["macro_f1"] > 0.7
    assert last["held_out_loss"] < 0.6 < math.log(3)


def test_one_head_of_its_own_width(labelled: Path, tmp_path: Path) -> None:
    run = trained(
        labelled, tmp_path / "run", model__heads=1, model__head_dim=6, model__schedule="uniform", train__steps=2
    )
    assert [(layer.heads, layer.head_dim) for layer in run.plan.layers] == [(1, 6)] * 2


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"growth__policy": "sgt", "train__steps": 100}, r"growth\.policies = 'sgt': .*causal"),
        ({"growth__observe": True}, r"growth\.policies = 'observe': .*causal"),
        ({"growth__policies": ["stack", "sgt"], "train__steps": 100}, r"growth\.policies = 'sgt': .*causal"),
        ({"data__class_weights": "equal"}, r"data\.class_weights = 'equal': must be one of none, balanced"),
        ({"model__pooling": "max"}, r"model\.pooling = 'max'"),
        ({"model__head_dim": 6}, r"model\.head_dim = 6: .*uniform"),
        ({"eval__rows": -1}, r"eval\.rows = -1"),
    ],
)
def test_what_a_classifier_cannot_do(labelled: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        train(tiny_config(labelled, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__class_weights": "balanced"}, r"data\.class_weights = 'balanced': .*no labels"),
        ({"model__pooling": "first"}, r"model\.pooling = 'first': .*no classes"),
    ],
)
def test_what_a_language_model_has_not(data: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        train(tiny_config(data, **changes), tmp_path / "run")


def test_plan_files_must_be_of_the_task(labelled: Path, data: Path, classified: RunFolder, tmp_path: Path) -> None:
    plan = classified.path / "plan.json"
    again = trained(labelled, tmp_path / "again", model__plan=str(plan), **BALANCED)
    assert_equal_runs(again, classified)
    with pytest.raises(InputError, match=r"model\.plan = 3: classes must be those of the data, None"):
        train(tiny_config(data, model__plan=str(_with(plan, tmp_path, vocabulary=320))), tmp_path / "run")
    with pytest.raises(InputError, match=r"model\.plan = 5: classes must be those of the data, 3"):
        train(tiny_config(labelled, model__plan=str(_with(plan, tmp_path, classes=5))), tmp_path / "run")


def _with(plan: Path, folder: Path, **changes: int) -> Path:
    path = folder / "changed.json"
    path.write_text(json.dumps({**json.loads(plan.read_text()), **changes}))
    return path
