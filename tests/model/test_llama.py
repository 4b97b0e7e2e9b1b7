"""A uniform model is a Llama: the same weights give the same logits in Hugging Face's implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from meristem.model import Decoder, KVCache
from meristem.plan import Plan

from .helpers import lively, random_tokens


def llama(model: Decoder) -> Any:
    """A LlamaForCausalLM with the weights of a model whose layers are all alike."""
    plan = model.plan
    (layer,) = set(plan.layers)
    config = LlamaConfig(
        vocab_size=plan.vocabulary,
        hidden_size=plan.width,
        intermediate_size=plan.feed_forward,
        num_hidden_layers=len(plan.layers),
        num_attention_heads=layer.heads,
        num_key_value_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        max_position_embeddings=plan.context,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
    )
    source = model.state_dict()
    weights = {
        "model.embed_tokens.weight": source["embedding.weight"],
        "lm_head.weight": source["embedding.weight"],
        "model.norm.weight": source["norm.weight"],
    }
    for index in range(len(plan.layers)):
        mine, theirs = f"blocks.{index}", f"model.layers.{index}"
        parts = torch.split(source[f"{mine}.attention.qkv.weight"], [layer.query_width, layer.kv_width, layer.kv_width])
        for name, part in zip("qkv", parts, strict=True):
            weights[f"{theirs}.self_attn.{name}_proj.weight"] = part
        gate, up = source[f"{mine}.feed_forward.gate_up.weight"].chunk(2)
        weights |= {
            f"{theirs}.self_attn.o_proj.weight": source[f"{mine}.attention.out.weight"],
            f"{theirs}.mlp.gate_proj.weight": gate,
            f"{theirs}.mlp.up_proj.weight": up,
            f"{theirs}.mlp.down_proj.weight": source[f"{mine}.feed_forward.down.weight"],
            f"{theirs}.input_layernorm.weight": source[f"{mine}.attention_norm.weight"],
            f"{theirs}.post_attention_layernorm.weight": source[f"{mine}.feed_forward_norm.weight"],
        }
    twin = LlamaForCausalLM(config).eval()
    twin.load_state_dict(weights, strict=True)
    assert sum(p.numel() for p in twin.parameters()) == plan.parameters
    return twin


def uniform_plan(kv_group: int) -> Plan:
    return Plan.uniform(layers=3, width=64, heads=4, kv_group=kv_group, vocabulary=97, context=40, feed_forward=112)


@pytest.mark.parametrize("kv_group", [1, 2, 4])
@torch.no_grad()
def test_logits_are_those_of_llama(kv_group: int) -> None:
    plan = uniform_plan(kv_group)
    model, tokens = lively(plan), random_tokens(plan)
    expected: Tensor = llama(model)(tokens).logits
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-4)
    assert float(expected.std()) > 0.3


@pytest.mark.parametrize("kv_group", [1, 2])
def test_loss_and_gradients_are_those_of_llama(kv_group: int) -> None:
    plan = uniform_plan(kv_group)
    model, tokens = lively(plan), random_tokens(plan)
    twin = llama(model)
    targets = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    loss, expected = model(tokens, targets).loss, twin(tokens, labels=tokens).loss  # Llama shifts by itself
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(model.embedding.weight.grad, twin.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kv_group", [1, 2])
@torch.no_grad()
def test_cached_decoding_is_that_of_llama(kv_group: int) -> None:
    plan = uniform_plan(kv_group)
    model, tokens = lively(plan), random_tokens(plan)
    twin = llama(model)
    mine, theirs = KVCache(plan, 2, plan.context, "cpu", torch.float32), DynamicCache(config=twin.config)
    for part in torch.split(tokens, [11, *[1] * (plan.context - 11)], dim=1):
        found = model.unembed(model.hidden(part, mine))
        expected = twin(part, past_key_values=theirs, use_cache=True).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert mine.length == theirs.get_seq_length() == plan.context
