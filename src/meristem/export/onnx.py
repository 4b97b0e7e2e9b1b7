"""A run as ONNX graphs, made by torch.export of what the folder for transformers holds, and run in onnxruntime."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meristem.errors import missing_extra
from meristem.export.hf import CHECK_FILE, Written, load_exported, token_ids, write_hf
from meristem.export.reference import Reference, reference_of
from meristem.export.tokenizer_files import STANDALONE
from meristem.model import Decoder
from meristem.runs.run_folder import LoadedRun

PLAIN_FILE, CACHED_FILE, CHECK_CODE = "model.onnx", "model_with_past.onnx", "check_onnx.py"
INPUTS = ("input_ids", "attention_mask")
LARGE = 1 << 30  # bytes of weights from which on they lie beside the graph, which may have 2 GiB at most


class KeyShape(NamedTuple):
    """Heads and head dim of the keys and values of a layer."""

    heads: int
    head_dim: int


def write_onnx(loaded: LoadedRun, folder: Path) -> Written:
    """Write the forward pass, and for a language model one that goes on from keys and values."""
    for package in ("transformers", "onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(package)
        except ImportError as error:
            raise missing_extra(package, "export") from error
    written = write_hf(loaded, folder)
    model: Any = load_exported(folder, written.architecture)
    model.set_attn_implementation("eager")  # plain products
    reference = reference_of(loaded.model, token_ids(loaded))
    _export(PlainPass(model), folder / PLAIN_FILE, reference)
    difference = reference.difference(Graph(folder / PLAIN_FILE))
    if isinstance(loaded.model, Decoder):
        shapes = [KeyShape(own.num_key_value_heads, own.head_dim) for own in model.config.per_layer_config]
        _export(CachedPass(model), folder / CACHED_FILE, reference, shapes)
        difference = max(difference, reference.difference(CachedGraph(folder / CACHED_FILE, shapes)))
    _leave_to_graphs(folder)
    return written._replace(difference=difference)


def _leave_to_graphs(folder: Path) -> None:
    """Remove what the graphs stand for."""
    for name in ("modeling_meristem.py", "model.safetensors"):
        (folder / name).unlink()
    shutil.copyfile(STANDALONE / CHECK_CODE, folder / CHECK_FILE)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": config["auto_map"]["AutoConfig"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class PlainPass(nn.Module):
    """From ids and attention mask (B, T) to logits; positions are counted from the first real token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = positions(attention_mask)
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=places, use_cache=False
        ).logits


class CachedPass(PlainPass):
    """The same with the keys and values of `past`, two for each layer; returns those of the next past as well."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:  # type: ignore[override]
        from transformers import DynamicCache

        places = positions(attention_mask)[:, -input_ids.shape[1] :]
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        logits = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=places,
            use_cache=True,
            past_key_values=cache,
        ).logits
        return logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))


def positions(attention_mask: Tensor) -> Tensor:
    """The position of every token, (B, T), in a row whose padding is on the left."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def _names(begin: str, shapes: Sequence[KeyShape]) -> list[str]:
    return [f"{begin}.{index}.{part}" for index in range(len(shapes)) for part in ("key", "value")]


def _export(step: PlainPass, path: Path, reference: Reference, shapes: Sequence[KeyShape] = ()) -> None:
    """Write the graph of a pass, for any batch, length and past."""
    batch, length, past, dynamic = (*map(torch.export.Dim, ("batch", "length", "past")), torch.export.Dim.DYNAMIC)
    ids = reference.input_ids[:, :8].contiguous()
    rows, seen = len(ids), 5 if shapes else 0
    example: tuple[Any, ...] = (ids, torch.ones(rows, seen + ids.shape[1], dtype=torch.long))
    sizes: tuple[Any, ...] = ({0: batch, 1: length}, {0: batch, 1: dynamic if shapes else length})
    if shapes:
        example += ([torch.zeros(rows, each.heads, seen, each.head_dim) for each in shapes for _ in range(2)],)
        sizes += ([{0: batch, 2: past}] * (2 * len(shapes)),)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            step.eval(), example, dynamo=True, dynamic_shapes=sizes, verbose=False,
            input_names=[*INPUTS, *_names("past_key_values", shapes)],
            output_names=["logits", *_names("present", shapes)],
        )  # fmt: skip
    assert program is not None
    for node in program.model.graph.all_nodes():  # which say where in our sources they come from
        node.metadata_props.clear()
    size = sum(weight.nbytes for weight in step.parameters())
    program.save(path, external_data=size > LARGE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about packages that are not needed here."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(level)


class Graph:
    """A graph in onnxruntime, which gives logits for input ids and attention mask, (B, T) each."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.run(ids, mask, [])[0]

    def run(self, ids: Tensor, mask: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        """All that the graph gives: the logits, and perhaps the next past."""
        names = [wanted.name for wanted in self.session.get_inputs()]
        given = {name: np.asarray(tensor) for name, tensor in zip(names, (ids, mask, *past), strict=True)}
        return [torch.from_numpy(found) for found in self.session.run(None, given)]


class CachedGraph(Graph):
    """One that goes on from a past; called, it takes the tokens in two parts, the first with an empty past."""

    def __init__(self, path: Path, shapes: Sequence[KeyShape]) -> None:
        super().__init__(path)
        self.shapes = shapes

    def empty(self, rows: int) -> list[Tensor]:
        return [torch.zeros(rows, each.heads, 0, each.head_dim) for each in self.shapes for _ in range(2)]

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        middle = (ids.shape[1] + 1) // 2
        first, *past = self.run(ids[:, :middle], mask[:, :middle], self.empty(len(ids)))
        if middle == ids.shape[1]:
            return first
        return torch.cat((first, self.run(ids[:, middle:], mask, past)[0]), dim=1)
