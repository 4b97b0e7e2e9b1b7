"""Models as transformers has them, made in memory or from exported folders."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meristem.export.hf import hf_config
from meristem.export.slots import named_tensors, unroll
from meristem.export.standalone.configuration_meristem import MeristemConfig
from meristem.export.standalone.modeling_meristem import MeristemForCausalLM, MeristemForSequenceClassification
from meristem.export.tokenizer_files import SpecialTokens
from meristem.growth.edits import RepeatBlock
from meristem.model import Decoder, Transformer
from meristem.plan import Gates, LayerPlan, Plan
from model.helpers import looped

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "runs-2026-11-16"

# Wide and narrow heads, shared keys, gated loops, a block run again, and heads that are not as wide as the stream.
EVERYTHING = RepeatBlock(2, 1).apply(
    looped(
        replace(
            Plan.uniform(layers=4, width=32, heads=4, vocabulary=61, context=24, feed_forward=40),
            layers=(LayerPlan(2, 16, 2), LayerPlan(4, 8, 2), LayerPlan(3, 16, 1), LayerPlan(5, 8, 5)),
        ),
        {0: ((1,), 1), 1: ((0, 3), 2)},
        Gates(passes=2, heads=2),
    )
)


def in_transformers(model: Transformer, **changes: Any) -> Any:
    """The model as its export will be, without the way over the disk."""
    causal = isinstance(model, Decoder)
    labels = [f"class {number}" for number in range(model.plan.classes or 0)]
    config = MeristemConfig(**hf_config(model, SpecialTokens(1 if causal else None, 0), labels), **changes)
    made = (MeristemForCausalLM if causal else MeristemForSequenceClassification)(config)
    missing = made.load_state_dict(named_tensors(unroll(model)), strict=False)
    assert missing.unexpected_keys == []
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    made.tie_weights()
    return made.eval()


def with_lively_gates(model: Decoder) -> Decoder:
    """The model with gates that differ from head to head and from pass to pass."""
    if model.gate_ramp is not None:
        with torch.no_grad():
            model.gate_ramp.copy_(torch.rand(model.gate_ramp.shape, generator=torch.Generator().manual_seed(5)))
    return model


def assert_same(exported: Any, model: Transformer, tokens: Tensor) -> None:
    """Logits of an exported model are those of ours."""
    with torch.no_grad():
        assert_same_logits(exported(input_ids=tokens).logits, model, tokens)


def assert_same_logits(found: Tensor, model: Transformer, tokens: Tensor) -> None:
    """Logits are those of ours to 1e-5, or as near as rounding lets ours be to exact ones.

    Random plans have heads of two dims, whose norms amplify rounding where both are small.
    """
    with torch.no_grad():
        expected = model.logits(tokens)
        exact = copy.deepcopy(model).double().logits(tokens)
    tolerance = 1e-5 * max(1.0, float(expected.abs().max())) + 4 * float((expected - exact).abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
