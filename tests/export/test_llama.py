"""A stock Llama or Qwen3 with the same logits, at a price that is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import Call
from meristem.errors import InputError
from meristem.export import export_run
from meristem.export.llama import as_llama, llama_tensors
from meristem.export.slots import named_tensors
from meristem.model import Decoder
from meristem.plan import LayerPlan, Plan
from model.helpers import grown_plans, lively, random_tokens

from .helpers import EVERYTHING, FIXTURES, assert_same, with_lively_gates


def stock(model: Decoder) -> Any:
    """The model as a class of transformers."""
    stack, config = as_llama(model)
    (architecture,) = config.pop("architectures")
    known = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**config)
    made = getattr(transformers, architecture)(known)
    missing = made.load_state_dict(llama_tensors(stack), strict=False)
    assert (missing.unexpected_keys, missing.missing_keys) == ([], ["lm_head.weight"] if model.plan.tied else [])
    made.tie_weights()
    return made.eval()


@st.composite
def paddable_plans(draw: Any) -> Plan:
    """Any plan whose head dims are powers of two."""
    plan = draw(grown_plans())
    dims = st.sampled_from([2, 4, 8, 16])
    return replace(
        plan, width=16 * plan.width, layers=tuple(replace(layer, head_dim=draw(dims)) for layer in plan.layers)
    )


@given(plan=paddable_plans(), seed=st.integers(0, 100))
@settings(max_examples=40)
def test_padding_changes_nothing(plan: Plan, seed: int) -> None:
    model = with_lively_gates(lively(plan, seed=seed)).eval()
    found = stock(model)
    assert type(found).__name__ == ("Qwen3ForCausalLM" if plan.qk_norm else "LlamaForCausalLM")
    assert_same(found, model, random_tokens(plan))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_generation_is_the_same(qk_norm: bool) -> None:
    model = with_lively_gates(lively(replace(EVERYTHING, qk_norm=qk_norm))).eval()
    found, tokens = stock(model), random_tokens(EVERYTHING, 1, 5)
    written = found.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, eos_token_id=None)
    for _ in range(6):
        with torch.no_grad():
            tokens = torch.cat((tokens, model.logits(tokens)[:, -1:].argmax(-1)), 1)
    assert written.tolist() == tokens.tolist()


@pytest.mark.parametrize("kv_group", [1, 2])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_uniform_plans_cost_nothing(kv_group: int, qk_norm: bool) -> None:
    plan = Plan.uniform(layers=2, width=32, heads=4, vocabulary=61, context=16, kv_group=kv_group, qk_norm=qk_norm)
    stack, config = as_llama(Decoder(plan))
    gains = 2 * 2 * plan.head_dims[0] if qk_norm else 0  # that a Qwen3 has and we have not
    assert sum(tensor.numel() for tensor in named_tensors(stack).values()) == plan.parameters + gains
    assert config["num_key_value_heads"] == 4 // kv_group


def test_the_price_is_said(call: Call, tmp_path: Path) -> None:
    said = call("export", FIXTURES / "loops", "--to", "llama", "--out", tmp_path / "out")
    assert said.code == 0, said.err
    assert (
        "padded to 6 layers of 2 heads of dim 4 and 2 key/value heads: 6,504 parameters instead of 4,542 (1.43 times), "
        "192 bytes of KV cache per token instead of 144 (1.33 times)"
    ) in said.out
    folder = tmp_path / "out"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)  # no code of ours, and no flag
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.num_parameters() == 6504
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    assert not list(folder.glob("*meristem.py"))
    card = (folder / "README.md").read_text()
    assert "6,504 parameters instead of 4,542" in card
    assert "trust_remote_code" not in card


def test_what_a_llama_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    plan = Plan.uniform(layers=2, width=32, heads=4, vocabulary=61, context=16)
    odd = Decoder(replace(plan, layers=(LayerPlan(2, 12, 2), LayerPlan(2, 16, 2))))
    with pytest.raises(InputError, match="head_dim = 12: must divide the largest head dim, 16"):
        as_llama(odd)
    many = Decoder(replace(plan, layers=(LayerPlan(48, 2, 48),)))
    with pytest.raises(InputError, match="heads = 48: must be at most the width, 32"):
        as_llama(many)
    with pytest.raises(InputError, match="this run is of a classifier"):
        export_run(FIXTURES / "classifier", tmp_path / "out", "llama")
    assert list(tmp_path.iterdir()) == []
