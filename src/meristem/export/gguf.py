"""A run as a GGUF file for llama.cpp: `llama` if all layers are alike, `deci` if not, `qwen3` with normed heads."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meristem.data import ByteTokenizer, Tokenizer
from meristem.errors import InputError, RunError, missing_extra
from meristem.export.hf import Written, token_ids
from meristem.export.llama import alike_slot, check_language_model, padded, padded_dims, price
from meristem.export.reference import Reference, reference_of
from meristem.export.slots import Unrolled, named_tensors, unroll
from meristem.export.tokenizer_files import definition_of, end_of_text_name
from meristem.model import Transformer
from meristem.model.rotary import frequencies_of
from meristem.plan import Plan
from meristem.runs.run_folder import LoadedRun

GGUF_FILE = "model.gguf"
LEAST_FEED_FORWARD = 32  # of a layer without one: llama.cpp drops the attention of a `deci` layer whose width is 0
NORMAL, CONTROL, UNUSED = 1, 3, 5  # kinds of tokens

NAMES = {
    "lm_head": "output", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip

Metadata = dict[str, int | float | bool | str | list[int] | list[str]]


class Content(NamedTuple):
    """What a file holds: the architecture, its metadata and its tensors."""

    architecture: str
    metadata: Metadata
    tensors: dict[str, NDArray[np.float32]]


def write_gguf(loaded: LoadedRun, folder: Path) -> Written:
    """Write `model.gguf`, in float32 and with the tokenizer inside, and see that a reader finds what was meant."""
    check_language_model(loaded.model, "gguf")
    stack = as_gguf(loaded.model)
    content = gguf_content(stack, loaded.model.plan, loaded.tokenizer, loaded.folder.path.resolve().name)
    path = folder / GGUF_FILE
    write_content(path, content)
    _compare(path, content)
    difference = llama_cpp_difference(path, reference_of(loaded.model, token_ids(loaded)))
    cost = price(loaded.model.plan, stack.sizes, sum(tensor.size for tensor in content.tensors.values()))
    unchecked = (
        f"tensors and metadata of {GGUF_FILE} were read back and are the same; llama.cpp itself was not run "
        "(llama-cpp-python is not installed)"
    )
    return Written(content.architecture, difference, (cost,), unchecked)


def _library() -> Any:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise missing_extra("gguf", "export") from error


def as_gguf(model: Transformer) -> Unrolled:
    """The model with layers as llama.cpp can have them: heads of one dim, and with normed heads all layers alike."""
    stack, plan = unroll(model), model.plan
    alike = alike_slot(stack.sizes, plan, heads_divide_width=False)
    if plan.qk_norm or len(set(stack.sizes)) == 1:
        return padded(stack, alike)
    return padded_dims(stack, alike.head_dim, LEAST_FEED_FORWARD)


def gguf_content(stack: Unrolled, plan: Plan, tokenizer: Tokenizer, name: str) -> Content:
    """All that goes into the file; what it cannot hold is an error that names it."""
    sizes = stack.sizes
    alike = len(set(sizes)) == 1
    architecture = "qwen3" if stack.qk_norm else "llama" if alike else "deci"
    dim = sizes[0].head_dim
    per_layer: dict[str, Any] = {
        "attention.head_count": [size.heads for size in sizes],
        "attention.head_count_kv": [size.kv_heads for size in sizes],
        "feed_forward_length": [size.feed_forward for size in sizes],
    }
    if alike:
        per_layer = {key: values[0] for key, values in per_layer.items()}
    own: Metadata = {
        "block_count": len(sizes), "context_length": plan.context, "embedding_length": plan.width, **per_layer,
        "attention.key_length": dim, "attention.value_length": dim, "rope.dimension_count": dim,
        "rope.freq_base": plan.rotary.base, "attention.layer_norm_rms_epsilon": plan.norm_eps,
        "vocab_size": plan.vocabulary,
    }  # fmt: skip
    tensors = _tensors(stack, architecture)
    if plan.rotary.band is not None:
        if architecture == "qwen3":
            expected = "must be none for gguf where queries and keys are normed; take hf or llama"
            raise InputError("rotary.band", plan.rotary.band, expected)
        plain = frequencies_of(replace(plan.rotary, factor=1.0), dim)
        tensors["rope_freqs.weight"] = (plain / frequencies_of(plan.rotary, dim)).float().numpy()
    elif plan.rotary.factor != 1:
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": plan.rotary.factor}
    metadata = {"general.name": name, **{f"{architecture}.{key}": value for key, value in own.items()}}
    return Content(architecture, {**metadata, **_tokenizer_metadata(tokenizer, plan.vocabulary)}, tensors)


def _tensors(stack: Unrolled, architecture: str) -> dict[str, NDArray[np.float32]]:
    """The tensors by the names of llama.cpp. A `llama` or `deci` rotates neighbours, where we rotate halves."""
    found = {}
    dims = [size.head_dim for size in stack.sizes]
    for name, tensor in named_tensors(stack).items():
        part, _, kind = name.rpartition(".")
        begin = ""
        if part.startswith("model.layers."):
            _, _, index, part = part.split(".", 3)
            begin = f"blk.{index}."
            if part in ("self_attn.q_proj", "self_attn.k_proj") and architecture != "qwen3":
                tensor = neighbours(tensor, dims[int(index)])
        found[f"{begin}{NAMES[part]}.{kind}"] = tensor.numpy()
    return found


def neighbours(weight: Tensor, dim: int) -> Tensor:
    """Rows of heads (heads dim, d) in another order: what was rotated with i + dim / 2 comes right behind i."""
    return weight.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()


# --- tokenizer -------------------------------------------------------------------------------------------------------


def _tokenizer_metadata(tokenizer: Tokenizer, vocabulary: int) -> Metadata:
    """A byte-level BPE, as GPT-2 has it; other tokenizers are refused by what they have that it does not."""
    definition = definition_of(tokenizer)
    if not isinstance(tokenizer, ByteTokenizer):
        _check_tokenizer(definition)
    tokens, kinds = [f"[unused {number}]" for number in range(vocabulary)], [UNUSED] * vocabulary
    known = [(token, number, NORMAL) for token, number in definition["model"]["vocab"].items()]
    added = [(token["content"], token["id"], CONTROL) for token in definition["added_tokens"]]
    for token, number, kind in known + added:
        tokens[number], kinds[number] = token, kind
    end = end_of_text_name(tokenizer)
    # A list of merges must be there; a pair of special tokens never stands in a text.
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in definition["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges or [f"{end} {end}"],
        "tokenizer.ggml.bos_token_id": tokenizer.end_of_text, "tokenizer.ggml.eos_token_id": tokenizer.end_of_text,
        "tokenizer.ggml.padding_token_id": tokenizer.end_of_text, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }  # fmt: skip


def _check_tokenizer(definition: dict[str, Any]) -> None:
    model, cutting = definition["model"], definition.get("pre_tokenizer") or {}
    wanted = {
        "model.type": (model.get("type"), "BPE"),
        "normalizer": (definition.get("normalizer"), None),
        "pre_tokenizer.type": (cutting.get("type"), "ByteLevel"),
        "pre_tokenizer.use_regex": (cutting.get("use_regex", True), True),
        "pre_tokenizer.add_prefix_space": (cutting.get("add_prefix_space"), False),
        "model.ignore_merges": (model.get("ignore_merges") or False, False),
        "model.byte_fallback": (model.get("byte_fallback") or False, False),
    }
    for field, (value, expected) in wanted.items():
        if value != expected:
            raise InputError(f"tokenizer.{field}", value, f"must be {expected!r} for gguf; take hf or llama")
    plain = [token["content"] for token in definition["added_tokens"] if not token.get("special")]
    if plain:
        raise InputError("tokenizer.added_tokens", plain[0], "must be special tokens for gguf; take hf or llama")


# --- the file --------------------------------------------------------------------------------------------------------


def write_content(path: Path, content: Content) -> None:
    """Write a file."""
    writer = _library().GGUFWriter(path, content.architecture)
    for key, value in content.metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in content.tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path: Path) -> Content:
    """What a file holds."""
    reader = _library().GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = metadata.pop("general.architecture")
    tensors = {each.name: np.array(each.data) for each in reader.tensors}
    return Content(architecture, metadata, tensors)


def _compare(path: Path, content: Content) -> None:
    """Raise unless a reader of the file finds what was meant."""
    found = read_gguf(path)
    differing = [key for key in content.metadata | found.metadata if not _same(content.metadata, found.metadata, key)]
    differing += [
        name
        for name in content.tensors | found.tensors
        if not (
            name in content.tensors
            and name in found.tensors
            and np.array_equal(content.tensors[name], found.tensors[name])
        )
    ]
    if differing or found.architecture != content.architecture:
        raise RunError(f"{path.name}: a reader finds another {differing[0] if differing else 'architecture'} in it")


def llama_cpp_difference(path: Path, reference: Reference) -> float | None:
    """How far what llama.cpp makes of a file is from the reference; None where llama-cpp-python is not installed."""
    try:
        library = import_module("llama_cpp")
    except ImportError:
        return None
    single = 0  # precision, of keys and values too
    model = library.Llama(
        str(path), n_ctx=reference.input_ids.shape[1], logits_all=True, type_k=single, type_v=single, verbose=False
    )

    def answer(ids: Tensor, mask: Tensor) -> Tensor:
        rows = []
        for row in ids.tolist():
            model.reset()
            model.eval(row)
            rows.append(torch.from_numpy(np.array(model.scores[: len(row)])))
        return torch.stack(rows)

    return reference.difference(answer)


def _same(meant: Metadata, found: Metadata, key: str) -> bool:
    """Whether both have it; numbers with a point have single precision in the file."""
    one, other = meant.get(key), found.get(key)
    return np.float32(one) == np.float32(other) if isinstance(one, float) and isinstance(other, float) else one == other
