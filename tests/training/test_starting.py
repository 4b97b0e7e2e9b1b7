"""Runs that start from another one, above all from imported models with biases, gains and an output of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as kinds

from meristem import InputError, import_model, load_run
from meristem.data import load_tokenizer, prepare
from meristem.evaluation.audit import AuditSettings
from meristem.evaluation.audit_run import audit_run
from meristem.evaluation.evaluate import evaluate_run
from meristem.runs.checkpoint import checkpoint_name, list_checkpoints, load_checkpoint
from meristem.runs.run_folder import RunFolder
from meristem.training.train import resume, train
from pretrained.helpers import LLAMA3, random_model, saved

from .helpers import (
    EAGER_BIRTHS,
    EAGER_PRUNING,
    assert_equal_runs,
    copy_run,
    events,
    final_state,
    final_tensors,
    tiny_config,
    trained,
    write_texts,
)

BIASED = "biases of queries, keys and values"
GAINED = "gains of queries and keys"
SGT: dict[str, Any] = {
    "growth__policies": ["sgt"], "growth__sgt__start": 2, "growth__sgt__window": 3, "growth__sgt__beta": 0.0,
    "growth__sgt__heads_per_layer": 2, "growth__sgt__max_layers": 2,
}  # fmt: skip
BIRTHS: dict[str, Any] = {
    **EAGER_BIRTHS, **EAGER_PRUNING, "growth__policies": ["incrt", "prune"], "growth__incrt__start_heads": 0,
}  # fmt: skip
STACK: dict[str, Any] = {"growth__policies": ["stack"], "growth__stack__layers": 6, "growth__stack__at": [5]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Imported runs."""
    folder = tmp_path_factory.mktemp("models")
    biased = saved(random_model("Qwen2", tie_word_embeddings=True), folder / "qwen2")
    gained = saved(random_model("Qwen3", head_dim=12, rope_parameters=LLAMA3), folder / "qwen3")
    import_model(biased, folder / BIASED, context=32, own_keys=True)
    import_model(gained, folder / GAINED, context=32)
    return {name: folder / name for name in (BIASED, GAINED)}


def test_it_begins_with_the_weights_and_learns(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    for number, source in enumerate(models.values()):
        run = trained(data, tmp_path / f"{number}", model__start_from=str(source))
        assert events(run)[:2] == ["checkpoint", "start"]
        begun, theirs = (load_checkpoint(folder / "checkpoints" / checkpoint_name(0)) for folder in (run.path, source))
        torch.testing.assert_close(begun.model, theirs.model, rtol=0, atol=0)
        assert not begun.optimizer
        before, after = (evaluate_run(folder, data=data, device="cpu").loss for folder in (source, run.path))
        assert after < before - 0.5


@pytest.mark.parametrize(
    ("name", "growth", "actions"),
    [
        (BIASED, {}, set()),
        (BIASED, {"optimizer__kind": "muon", **BIRTHS}, {"birth", "removal"}),
        (GAINED, SGT, {"add"}),
        (GAINED, {"optimizer__kind": "muon", **STACK}, {"stack"}),
        (BIASED, {**STACK, "growth__stack__order": "interleave", "train__average": 0.9}, {"stack"}),
    ],
    ids=["biases", "births", "loops", "stack", "interleaved"],
)
def test_it_grows_and_goes_on_bit_equal_where_it_was_killed(
    name: str, growth: dict[str, Any], actions: set[str], models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    run = trained(data, tmp_path / "run", model__start_from=str(models[name]), **growth)
    done = {entry["action"] for entry in run.read(run.events) if entry["event"] == "growth"}
    assert actions <= done
    assert (run.newest_plan != run.plan) == bool(actions)
    model = load_run(run.path, device="cpu").model
    assert sum(parameter.numel() for parameter in model.parameters()) == run.newest_plan.parameters
    for last in (0, 8):
        again = copy_run(run, tmp_path / f"run-{last}", last=last)
        resume(again.path)
        assert_equal_runs(again, run)
        assert final_state(again) == final_state(run)


def test_it_begins_anew_with_the_same_weights(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path / "run", model__start_from=str(models[GAINED]), train__steps=4)
    expected = final_tensors(run)
    resume(run.path, from_start=True)
    torch.testing.assert_close(final_tensors(run), expected, rtol=0, atol=0)
    assert [path.name for path in list_checkpoints(run.checkpoints)] == [checkpoint_name(0), checkpoint_name(4)]


def test_a_trained_run_can_be_started_from_too(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    first = trained(data, tmp_path / "first", model__start_from=str(models[GAINED]), **SGT)
    second = trained(data, tmp_path / "second", model__start_from=str(first.path))
    assert second.plan == first.newest_plan
    assert second.plan.loops


def test_data_that_would_come_again_in_the_same_order_are_told_of(
    models: dict[str, Path], data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = trained(data, tmp_path / "first", model__start_from=str(models[GAINED]), train__steps=1)
    assert not caplog.messages  # an imported run has seen no data
    trained(data, tmp_path / "other", model__start_from=str(first.path), train__steps=1, data__seed=1)
    assert not caplog.messages
    trained(data, tmp_path / "same", model__start_from=str(first.path), train__steps=1)
    assert [text.partition(" as in ")[0] for text in caplog.messages] == [
        "data.seed = 0: the same data come in the same order"
    ]


def test_audits_read_imported_models(models: dict[str, Path], data: Path) -> None:
    settings = AuditSettings(feeds=2, steps=2, layers=1)
    found = audit_run(models[BIASED], settings, sequences=4, data=data, device="cpu").audit
    assert len(found.heads) == 3 * 4
    assert sum(layer.gain is not None for layer in found.layers) == 1
    grouped = audit_run(models[GAINED], settings, sequences=4, data=data, device="cpu").audit
    assert all(layer.gain is None for layer in grouped.layers)


def test_what_does_not_go_together_is_refused(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    def refused(words: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=words):
            train(tiny_config(data, **changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    gained = str(models[GAINED])
    refused("cannot be started from", model__start_from=str(tmp_path / "nothing"))
    refused(r"model\.plan cannot be given", model__start_from=gained, model__plan="plan.json")
    refused("kv_heads = 2", model__start_from=gained, **BIRTHS)
    fewer = {**BIRTHS, "growth__incrt__start_heads": 1}
    refused(
        r"blocks\.0\.attention\.out\.weight.*growth must begin with all", model__start_from=str(models[BIASED]), **fewer
    )
    refused(
        r"stack\.start_layers.*must be 3",
        model__start_from=gained,
        **{**STACK, "growth__stack__layers": 7, "growth__stack__start_layers": 2},
    )
    empty = RunFolder(copy_run(RunFolder.open(models[GAINED]), tmp_path / "empty").path)
    (empty.checkpoints / checkpoint_name(0)).rename(tmp_path / "aside")
    refused("has no checkpoint yet", model__start_from=str(empty.path))


def test_data_of_another_tokenizer_is_refused(models: dict[str, Path], tmp_path: Path) -> None:

    words = Tokenizer(kinds.WordLevel({"<eos>": 0, "Page": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    prepare([write_texts(tmp_path / "texts")], tmp_path / "data", tokenizer=load_tokenizer(tmp_path), held_out=0.2)
    with pytest.raises(InputError, match="another tokenizer"):
        train(tiny_config(tmp_path / "data", model__start_from=str(models[GAINED])), tmp_path / "run")
