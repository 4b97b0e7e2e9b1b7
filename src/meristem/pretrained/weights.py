"""The weights of a checkpoint of the Llama family, under the names of our model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meristem.errors import InputError, RunError
from meristem.files import read_json
from meristem.plan import LayerPlan, Plan
from meristem.pretrained.families import Family
from meristem.wording import listed

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
IGNORED = ".rotary_emb.inv_freq"  # a table that old checkpoints have among their weights


class Source(Protocol):
    """Where weights come from."""

    def read(self, name: str, *shape: int) -> Tensor:
        """A weight in float32; one that is missing or of another shape is refused by name."""


class SafetensorsFolder:
    """The weights of a folder in safetensors, one file or several with an index, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _files(folder)  # by the name of the weight
        self.unread = {name for name in self.files if not name.endswith(IGNORED)}

    def read(self, name: str, *shape: int) -> Tensor:
        if name not in self.files:
            raise InputError(name, None, f"is missing in the weights of {self.folder}")
        self.unread.discard(name)
        path = self.folder / self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise RunError(f"{path}: cannot be read ({error})") from error
        if tuple(tensor.shape) != shape:
            raise InputError(name, tuple(tensor.shape), f"must be of shape {shape}, by config.json")
        if tensor.dtype not in FLOATS:
            raise InputError(name, str(tensor.dtype), "must be float32, float16 or bfloat16: quantised weights are not")
        return tensor.float()

    def check_all_read(self) -> None:
        """Refuse weights that nobody has asked for: the model would be another one without them."""
        if self.unread:
            expected = f"are weights of {self.folder} that this kind of model has no place for"
            raise InputError("weights", listed(sorted(self.unread), 4), expected)


def _files(folder: Path) -> dict[str, str]:
    """The file that each weight is in."""
    if (folder / FILE).is_file():
        try:
            with safe_open(folder / FILE, framework="pt") as file:
                return dict.fromkeys(file.keys(), FILE)
        except (SafetensorError, OSError) as error:
            raise RunError(f"{folder / FILE}: cannot be read ({error})") from error
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {listed(pickled, 2)}, which is pickled and never loaded here; " if pickled else ""
        raise InputError("folder", str(folder), f"must hold {FILE}, or {INDEX} with its parts; {found}save it anew")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise RunError(f"{folder / INDEX}: has no weight_map")
    for file in set(places.values()):
        if Path(file).name != file or not (folder / file).is_file():
            raise RunError(f"{folder / INDEX}: names {file!r}, which is not there")
    return places


def model_tensors(plan: Plan, family: Family, source: Source) -> dict[str, Tensor]:
    """All tensors of a model of this plan, by name.

    Where norms subtract the mean, what is written to the stream is made free of a mean here, once and for all: an RMS
    norm then does the same.
    """
    d, v = plan.width, plan.vocabulary
    centred = _centred if family.centred else (lambda written, dim: written)
    embedding = source.read("model.embed_tokens.weight", v, d)
    tensors = {"embedding.weight": centred(embedding, 1), "norm.weight": _gain(family, source, "model.norm", d)}
    if not plan.tied:
        tensors["output.weight"] = source.read("lm_head.weight", v, d)
    for index, layer in enumerate(plan.layers):
        own = _block(plan, layer, family, source, f"model.layers.{index}.", centred)
        tensors |= {f"blocks.{index}.{name}": tensor for name, tensor in own.items()}
    return tensors


def _block(
    plan: Plan, layer: LayerPlan, family: Family, source: Source, prefix: str,
    centred: Callable[[Tensor, int], Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    d, f, e = plan.width, plan.feed_forward, layer.head_dim
    heights = {"q": layer.query_width, "k": layer.kv_width, "v": layer.kv_width}
    attention, feed_forward = f"{prefix}self_attn", f"{prefix}mlp"
    qkv = [source.read(f"{attention}.{name}_proj.weight", rows, d) for name, rows in heights.items()]
    gate_up = [source.read(f"{feed_forward}.{name}_proj.weight", f, d) for name in ("gate", "up")]
    tensors = {
        "attention_norm.weight": _gain(family, source, f"{prefix}input_layernorm", d),
        "attention.qkv.weight": torch.cat(qkv),
        "attention.out.weight": centred(source.read(f"{attention}.o_proj.weight", d, layer.query_width), 0),
        "feed_forward_norm.weight": _gain(family, source, f"{prefix}post_attention_layernorm", d),
        "feed_forward.gate_up.weight": torch.cat(gate_up),
        "feed_forward.down.weight": centred(source.read(f"{feed_forward}.down_proj.weight", d, f), 0),
    }
    if plan.qkv_bias:
        biases = [source.read(f"{attention}.{name}_proj.bias", rows) for name, rows in heights.items()]
        tensors["attention.qkv.bias"] = torch.cat(biases)
    if plan.qk_gain:
        tensors["attention.query_gain"] = source.read(f"{attention}.q_norm.weight", e)
        tensors["attention.key_gain"] = source.read(f"{attention}.k_norm.weight", e)
    return tensors


def _gain(family: Family, source: Source, name: str, width: int) -> Tensor:
    return torch.ones(width) if family.centred else source.read(f"{name}.weight", width)


def _centred(written: Tensor, dim: int) -> Tensor:
    """A weight by which nothing is written along (1, ..., 1); the coordinates of the stream lie along `dim`."""
    precise = written.double()
    return (precise - precise.mean(dim, keepdim=True)).float()


def with_own_keys(plan: Plan, tensors: Mapping[str, Tensor]) -> tuple[Plan, dict[str, Tensor]]:
    """The same model with keys and values of its own for every head, copies of those that it shares with others."""
    result = dict(tensors)
    layers = tuple(LayerPlan(layer.heads, layer.head_dim, layer.heads) for layer in plan.layers)
    for index, layer in enumerate(plan.layers):
        for kind in ("weight", "bias") if plan.qkv_bias else ("weight",):
            name = f"blocks.{index}.attention.qkv.{kind}"
            queries, *shared = result[name].split((layer.query_width, layer.kv_width, layer.kv_width))
            result[name] = torch.cat((queries, *_repeated(shared, layer)))
    return replace(plan, layers=layers), result


def _repeated(parts: Sequence[Tensor], layer: LayerPlan) -> list[Tensor]:
    times = layer.heads // layer.kv_heads
    heads = (part.unflatten(0, (layer.kv_heads, layer.head_dim)) for part in parts)
    return [part.repeat_interleave(times, dim=0).flatten(0, 1) for part in heads]
