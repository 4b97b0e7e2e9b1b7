"""A run as a stock Llama, or a Qwen3 if its queries and keys are normed, by padding with zeros where layers differ."""

from __future__ import annotations

from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.export.hf import Written, hf_difference, write_model, write_texts_files
from meristem.export.slots import Slot, SlotWeights, Unrolled, named_tensors, stack_config, unroll
from meristem.model import Decoder, Transformer
from meristem.plan import Plan
from meristem.runs.run_folder import LoadedRun
from meristem.schedules import choices, divisors
from meristem.wording import counted


def write_llama(loaded: LoadedRun, folder: Path) -> Written:
    """Write a language model as classes of transformers that every runtime knows."""
    check_language_model(loaded.model, "llama")
    stack, config = as_llama(loaded.model)
    tokens = write_texts_files(loaded, folder)
    tensors = llama_tensors(stack)
    reference = write_model(loaded, folder, {**config, **tokens.fields}, tensors, tokens)
    (architecture,) = config["architectures"]
    cost = price(loaded.model.plan, stack.sizes, sum(map(Tensor.numel, tensors.values())))
    return Written(architecture, hf_difference(folder, reference, architecture), (cost,))


def as_llama(model: Transformer) -> tuple[Unrolled, dict[str, Any]]:
    """The model with all layers alike, and its configuration."""
    stack = unroll(model)
    stack = padded(stack, alike_slot(stack.sizes, model.plan))
    model_type, architecture = ("qwen3", "Qwen3ForCausalLM") if stack.qk_norm else ("llama", "LlamaForCausalLM")
    return stack, {
        "model_type": model_type, "architectures": [architecture], **stack_config(model, stack.sizes),
        "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True,
    }  # fmt: skip


def llama_tensors(stack: Unrolled) -> dict[str, Tensor]:
    """The weights; with biases of queries, keys and values there is one of the output as well, of zeros."""
    zeros = {
        f"model.layers.{index}.self_attn.o_proj.bias": torch.zeros_like(slot.gain)
        for index, slot in enumerate(stack.slots)
        if slot.biases is not None
    }
    return named_tensors(stack) | zeros


def check_language_model(model: Transformer, format: str) -> None:
    """Raise unless it is a language model; `format` is what a classifier cannot be written as."""
    if not isinstance(model, Decoder):
        raise InputError("to", format, "is a language model, and this run is of a classifier; take hf or onnx")


def price(plan: Plan, sizes: list[Slot], parameters: int) -> str:
    """What the padding costs in parameters and cache, in words."""
    cache = sum(2 * 2 * size.kv_heads * size.head_dim for size in sizes)  # in 16 bits
    own = plan.cost
    if [size[:3] for size in sizes] == [(layer.heads, layer.kv_heads, layer.head_dim) for layer in plan.layers]:
        return "nothing is padded: the model costs what it did"
    alike = f"{sizes[0].heads} heads of dim {sizes[0].head_dim} and {counted(sizes[0].kv_heads, 'key/value head')}"
    shape = alike if len(set(sizes)) == 1 else f"heads of dim {sizes[0].head_dim}"
    return (
        f"padded to {counted(len(sizes), 'layer')} of {shape}: {parameters:,} parameters instead of {own.parameters:,} "
        f"({parameters / own.parameters:.2f} times), {cache:,} bytes of KV cache per token instead of "
        f"{own.kv_bytes_per_token:,} ({cache / own.kv_bytes_per_token:.2f} times)"
    )


def alike_slot(sizes: list[Slot], plan: Plan, *, heads_divide_width: bool | None = None) -> Slot:
    """The smallest sizes that every layer can be padded to.

    The dim of each layer's heads must divide the largest, so that all its rotary frequencies are there. Query heads per
    key/value head must divide those of every layer. A Llama's configuration wants heads that divide the width.
    """
    dim = max(size.head_dim for size in sizes)
    for size in sizes:
        if dim % size.head_dim:
            expected = f"must divide the largest head dim, {dim}, for a Llama: one of {choices(divisors(dim))}"
            raise InputError("head_dim", size.head_dim, f"{expected}; take hf")
    divide = not plan.qk_norm if heads_divide_width is None else heads_divide_width
    most, group = max(size.heads for size in sizes), gcd(*(size.heads // size.kv_heads for size in sizes))
    found = [
        Slot(heads, heads // shared, dim, plan.feed_forward)
        for shared in divisors(group)
        for heads in (divisors(plan.width) if divide else range(shared * -(-most // shared), most + shared))
        if heads >= most and heads % shared == 0
    ]
    if not found:
        raise InputError("heads", most, f"must be at most the width, {plan.width}, for a Llama; take hf")
    return min(found, key=lambda slot: (slot.kv_heads, slot.heads))


def padded(model: Unrolled, to: Slot) -> Unrolled:
    """The same model with all layers of one shape."""
    return model._replace(slots=tuple(_padded_slot(slot, to, model.qk_norm) for slot in model.slots))


def padded_dims(model: Unrolled, head_dim: int, feed_forward: int) -> Unrolled:
    """The same model with heads of one dim; layers without a feed-forward get one of zeros, of the given size."""
    sizes = [size._replace(head_dim=head_dim, feed_forward=size.feed_forward or feed_forward) for size in model.sizes]
    pairs = zip(model.slots, sizes, strict=True)
    return model._replace(slots=tuple(_padded_slot(slot, size, model.qk_norm) for slot, size in pairs))


def _padded_slot(slot: SlotWeights, to: Slot, qk_norm: bool) -> SlotWeights:
    stretch = to.head_dim / slot.queries.shape[1]
    feed_forward = slot.feed_forward
    if feed_forward is None:
        nothing = slot.gain.new_zeros(to.feed_forward, len(slot.gain))
        feed_forward = (torch.ones_like(slot.gain), nothing, nothing, nothing.T)
    biases = None
    if slot.biases is not None:
        queries, keys, values = (bias[..., None] for bias in slot.biases)  # like a further column of the weights
        queries, keys, values = _padded_heads(queries, keys, values, to, qk_norm)
        biases = (queries[..., 0], keys[..., 0], values[..., 0])
    return SlotWeights(
        slot.gain,
        *_padded_heads(slot.queries, slot.keys, slot.values, to, qk_norm),
        out=_more_heads(_filled(slot.out.permute(1, 2, 0), to.head_dim), to.heads).permute(2, 0, 1),
        feed_forward=feed_forward,
        query_gain=_padded_gain(slot.query_gain, slot, to.head_dim) if qk_norm else None,
        key_gain=_padded_gain(slot.key_gain, slot, to.head_dim) * stretch**-0.5 if qk_norm else None,
        biases=biases,
    )


def _padded_heads(
    queries: Tensor, keys: Tensor, values: Tensor, to: Slot, qk_norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (its heads, head dim, d), of as many heads and as wide ones as are asked for."""
    stretch = to.head_dim / queries.shape[1]
    shared = len(queries) // len(keys) // (to.heads // to.kv_heads)  # copies of each key/value head
    keys, values = (heads.repeat_interleave(shared, dim=0) for heads in (keys, values))
    # Scores are divided by the root of the larger dim. A norm takes the mean over it, too, and what it adds to the
    # mean stays the same share if what it reads is larger by that root.
    queries, keys = queries * stretch**0.5, keys * (stretch**0.5 if qk_norm else 1)
    return (
        _more_heads(_spread(queries, to.head_dim), to.heads),
        _more_heads(_spread(keys, to.head_dim), to.kv_heads),
        _more_heads(_filled(values, to.head_dim), to.kv_heads),
    )


def _padded_gain(gain: Tensor | None, slot: SlotWeights, dim: int) -> Tensor:
    """The gain of the norm of queries or keys, where these have gone; 1 if there was none."""
    own = slot.gain.new_ones(slot.queries.shape[1]) if gain is None else gain
    return _spread(own[None, :, None], dim).flatten()


def _spread(heads: Tensor, dim: int) -> Tensor:
    """Heads (h, e, d) as (h, dim, d): rotary pair j goes to j dim / e, where its frequency is."""
    count, own, width = heads.shape
    halves = heads.new_zeros(count, 2, own // 2, dim // own, width)
    halves[:, :, :, 0] = heads.unflatten(1, (2, own // 2))
    return halves.reshape(count, dim, width)


def _filled(heads: Tensor, dim: int) -> Tensor:
    """Heads (h, e, d) as (h, dim, d), with zeros behind."""
    return torch.nn.functional.pad(heads, (0, 0, 0, dim - heads.shape[1]))


def _more_heads(heads: Tensor, count: int) -> Tensor:
    """Heads (h, dim, d) and others of zeros behind them, (count, dim, d)."""
    return torch.nn.functional.pad(heads, (0, 0, 0, 0, 0, count - len(heads)))
