"""ONNX graphs give the run's logits in onnxruntime, for other sizes than they were made with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meristem.errors import RunError
from meristem.export import export_run
from meristem.export.onnx import CachedGraph, Graph, KeyShape
from meristem.runs.run_folder import load_run

from .helpers import FIXTURES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(FIXTURES / "heads", tmp_path_factory.mktemp("onnx") / "heads", "onnx").folder


def shapes(folder: Path) -> list[KeyShape]:
    plan = json.loads((folder / "config.json").read_text())["plan"]
    return [KeyShape(layer["kv_heads"], layer["head_dim"]) for layer in plan["layers"]]


def test_a_language_model_runs_with_and_without_a_cache(folder: Path) -> None:
    model = load_run(FIXTURES / "heads", device="cpu").model
    tokens = torch.randint(256, (5, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.logits(tokens)
    for graph in (Graph(folder / "model.onnx"), CachedGraph(folder / "model_with_past.onnx", shapes(folder))):
        torch.testing.assert_close(graph(tokens, torch.ones_like(tokens)), expected, rtol=0, atol=1e-5)


def test_prompts_may_be_padded_on_the_left(folder: Path) -> None:
    model = load_run(FIXTURES / "heads", device="cpu").model
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = torch.cat((model.logits(tokens[:1, 3:])[:, -1], model.logits(tokens[1:])[:, -1]))
    for graph in (Graph(folder / "model.onnx"), CachedGraph(folder / "model_with_past.onnx", shapes(folder))):
        torch.testing.assert_close(graph(tokens, mask)[:, -1], expected, rtol=0, atol=1e-5)


def test_tokens_come_one_by_one(folder: Path) -> None:
    graph = CachedGraph(folder / "model_with_past.onnx", shapes(folder))
    tokens = torch.randint(256, (1, 6), generator=torch.Generator().manual_seed(3))
    mask, past, found = torch.ones_like(tokens), graph.empty(1), []
    for place in range(6):
        logits, *past = graph.run(tokens[:, place : place + 1], mask[:, : place + 1], past)
        found.append(logits)
    whole = Graph(folder / "model.onnx")(tokens, mask)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=1e-5)


def test_graphs_stand_for_the_weights_and_name_no_places(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {"model.onnx", "model_with_past.onnx", "tokenizer.json", "check.py", "README.md"} <= names
    assert not {"model.safetensors", "modeling_meristem.py"} & names
    for name in ("model.onnx", "model_with_past.onnx"):
        assert b".py" not in (folder / name).read_bytes()
    done = subprocess.run([sys.executable, folder / "check.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_classifier_reads_rows_of_different_lengths(tmp_path: Path) -> None:
    folder = export_run(FIXTURES / "classifier", tmp_path / "out", "onnx").folder
    judge = load_run(FIXTURES / "classifier", device="cpu")
    rows = [judge.recipe.encode(text).tolist() for text in ("w3 high w4 w5 w1", "odd", "low w2")]
    tokens = torch.tensor([row + [0] * (5 - len(row)) for row in rows])
    with torch.no_grad():
        expected = judge.model.logits(tokens)
    found = Graph(folder / "model.onnx")(tokens, (tokens != 0).long())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not (folder / "model_with_past.onnx").exists()


def test_without_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(RunError, match=r"onnxruntime is not installed; .*meristem\[export\]"):
        export_run(FIXTURES / "heads", tmp_path / "out", "onnx")
    assert list(tmp_path.iterdir()) == []
