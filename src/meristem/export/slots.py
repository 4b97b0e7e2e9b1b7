"""A model as a stack of plain layers, one for every attention pass, named as transformers names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meristem.decoding.unrolled import Weights, unrolled
from meristem.model import Decoder, Transformer
from meristem.model.encoder import Classifier
from meristem.plan import Rotary

MODEL_TYPE = "meristem"


class Slot(NamedTuple):
    """The sizes of one layer; `feed_forward` is 0 where another pass of the same heads follows."""

    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int

    @property
    def fields(self) -> dict[str, int]:
        """The sizes by the names of transformers."""
        names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        return dict(zip(names, self, strict=True))


class SlotWeights(NamedTuple):
    """The weights of one layer. Queries, keys and values are (heads, head dim, d), `out` (d, heads, head dim).

    Where queries and keys are normed, the gains of these norms are (head dim,) each; 1 if not given. `biases` are those
    of queries, keys and values, (heads, head dim) each.
    """

    gain: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    feed_forward: tuple[Tensor, Tensor, Tensor, Tensor] | None  # gain, gate, up, down
    query_gain: Tensor | None = None
    key_gain: Tensor | None = None
    biases: tuple[Tensor, Tensor, Tensor] | None = None


class Unrolled(NamedTuple):
    """All of a model: `last_gain` is that of the last norm, `head` what classes are read with, weight and bias.

    The `output` is that of a language model, if it is not the embedding.
    """

    embedding: Tensor
    slots: tuple[SlotWeights, ...]
    last_gain: Tensor
    qk_norm: bool
    head: tuple[Tensor, Tensor] | None
    output: Tensor | None

    @property
    def sizes(self) -> list[Slot]:
        return [
            Slot(
                len(slot.queries), len(slot.keys), slot.queries.shape[1],
                0 if slot.feed_forward is None else len(slot.feed_forward[1]),
            )
            for slot in self.slots
        ]  # fmt: skip


def unroll(model: Transformer) -> Unrolled:
    """The layers of a model, each with weights of its own: loops are slices of their layer, with their gates."""
    weights = unrolled(model, fold_gains=False)
    head = (model.classes.weight.detach(), model.classes.bias.detach()) if isinstance(model, Classifier) else None
    output = None if model.plan.tied else weights.unembedding
    return Unrolled(weights.embedding, tuple(_slots(weights)), _given(weights.gain), weights.qk_norm, head, output)


def _slots(weights: Weights) -> list[SlotWeights]:
    slots = []
    for each in weights.passes:
        parts = (each.heads, each.kv_heads, each.kv_heads)
        queries, keys, values = each.qkv.unflatten(0, (-1, each.head_dim)).split(parts)
        biases = None
        if each.bias is not None:
            of_queries, of_keys, of_values = each.bias.unflatten(0, (-1, each.head_dim)).split(parts)
            biases = (of_queries, of_keys, of_values)
        query_gain, key_gain = (None, None) if each.head_gains is None else each.head_gains.unbind()
        feed_forward = None
        if each.feed_forward is not None:
            gate, up = each.feed_forward.gate_up.chunk(2)
            feed_forward = (_given(each.feed_forward.gain), gate, up, each.feed_forward.down)
        out = each.out.unflatten(1, (-1, each.head_dim))
        gain = _given(each.gain)
        slots.append(SlotWeights(gain, queries, keys, values, out, feed_forward, query_gain, key_gain, biases))
    return slots


def _given(gain: Tensor | None) -> Tensor:
    assert gain is not None
    return gain


def named_tensors(model: Unrolled) -> dict[str, Tensor]:
    """The weights by their names in a Llama; a tied output is left out."""
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.last_gain}
    for index, slot in enumerate(model.slots):
        named = {
            "input_layernorm": slot.gain, "self_attn.q_proj": slot.queries.flatten(0, 1),
            "self_attn.k_proj": slot.keys.flatten(0, 1), "self_attn.v_proj": slot.values.flatten(0, 1),
            "self_attn.o_proj": slot.out.flatten(1),
        }  # fmt: skip
        if model.qk_norm:
            for name, gain in (("q_norm", slot.query_gain), ("k_norm", slot.key_gain)):
                named[f"self_attn.{name}"] = torch.ones(slot.queries.shape[1]) if gain is None else gain
        if slot.feed_forward is not None:
            names = ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
            named |= dict(zip(names, slot.feed_forward, strict=True))
        tensors |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in named.items()}
        for name, bias in zip("qkv", slot.biases or (), strict=False):
            tensors[f"model.layers.{index}.self_attn.{name}_proj.bias"] = bias.flatten()
    if model.output is not None:
        tensors["lm_head.weight"] = model.output
    if model.head is not None:
        tensors |= {"score.weight": model.head[0], "score.bias": model.head[1]}
    return {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}


def stack_config(model: Transformer, sizes: Sequence[Slot]) -> dict[str, Any]:
    """The fields of a configuration that all formats share; sizes are those of the first layer."""
    plan = model.plan
    return {
        "vocab_size": plan.vocabulary,
        "hidden_size": plan.width,
        "num_hidden_layers": len(sizes),
        **sizes[0]._replace(feed_forward=plan.feed_forward).fields,
        "max_position_embeddings": plan.context,
        "attention_bias": plan.qkv_bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": plan.norm_eps,
        "rope_parameters": rope_parameters(plan.rotary),
        "tie_word_embeddings": isinstance(model, Decoder) and plan.tied,
        "dtype": "float32",
    }


def rope_parameters(rotary: Rotary) -> dict[str, Any]:
    """Rotary positions by the names of transformers."""
    if rotary.band is not None:
        low, high = rotary.band
        return {
            "rope_type": "llama3", "rope_theta": rotary.base, "factor": rotary.factor, "low_freq_factor": low,
            "high_freq_factor": high, "original_max_position_embeddings": rotary.context,
        }  # fmt: skip
    if rotary.factor != 1:
        return {"rope_type": "linear", "rope_theta": rotary.base, "factor": rotary.factor}
    return {"rope_type": "default", "rope_theta": rotary.base}
