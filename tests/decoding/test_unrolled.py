"""The weights that decoding reads: every pass in order, up to date, and shared where they can be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meristem.decoding.unrolled import ReadyWeights, unrolled
from meristem.growth.apply import apply_edit
from meristem.growth.edits import RemoveHead
from meristem.model import KVCache

from .helpers import KINDS, model_of


@pytest.mark.parametrize("kind", KINDS)
def test_every_pass_has_its_slot(kind: str) -> None:
    model = model_of(kind)
    weights, cache = unrolled(model), KVCache(model.plan, 2, 5, "meta", torch.float32)
    slots = [slot for layer in cache.layers for slot in layer]
    assert len(slots) == len(weights.passes)
    for slot, each in zip(slots, weights.passes, strict=True):
        assert slot.keys.shape[3] == each.head_dim
        assert each.qkv.shape == ((each.heads + 2 * slot.keys.shape[1]) * each.head_dim, model.plan.width)
        assert each.out.shape == (model.plan.width, each.heads * each.head_dim)
    followed = sum(each.feed_forward is not None for each in weights.passes)
    assert followed == sum(1 + layer.repeats for layer in model.plan.layers)


def test_weights_are_shared_where_the_dtype_is_the_same() -> None:
    model = model_of("prism")
    owned = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for tensor in ReadyWeights(model, torch.float32).weights.tensors} > owned
    copies = ReadyWeights(model, torch.bfloat16).weights
    assert copies.embedding.data_ptr() in owned  # looked up in full precision
    assert {tensor.dtype for each in copies.passes for tensor in (each.qkv, each.out)} == {torch.bfloat16}
    assert copies.unembedding.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_followed(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind)
    ready = ReadyWeights(model, dtype)
    places = [tensor.data_ptr() for tensor in ready.weights.tensors]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert ready.follow(model)
    assert [tensor.data_ptr() for tensor in ready.weights.tensors] == places
    fresh = ReadyWeights(model, dtype).weights.tensors
    assert all(torch.equal(kept, new) for kept, new in zip(ready.weights.tensors, fresh, strict=True))


def test_another_structure_is_not_followed() -> None:
    model = model_of("prism")
    ready = ReadyWeights(model, torch.bfloat16)
    apply_edit(model, None, RemoveHead(5, 3))
    assert not ready.follow(model)


def test_weights_that_lie_elsewhere_are_not_followed_and_not_written_to() -> None:
    """As when averaged weights and those in training change places."""
    model = model_of("prism")
    ready = ReadyWeights(model, torch.float32)
    before: Tensor = model.embedding.weight.data
    kept = before.clone()
    model.embedding.weight.data = before + 1
    assert not ready.follow(model)
    assert torch.equal(before, kept)
    assert isinstance(model.embedding, nn.Embedding)
