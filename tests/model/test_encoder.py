"""The classifier against a plain float64 form of it, with padding, pooling, class weights, and what it costs."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meristem.errors import InputError
from meristem.model import Classifier, Decoder
from meristem.model.backends import choose_backends
from meristem.plan import PADDING, LayerPlan, Plan

from .helpers import complex_rotation, grown_plans, layer_plans, looped, normed_heads, small_plan, with_exact_positions


def classifier_plan(classes: int = 3, pooling: str = "mean", **shape: Any) -> Plan:
    return replace(small_plan(**shape), classes=classes, pooling=pooling)


def lively_classifier(plan: Plan, seed: int = 0, class_weights: Tensor | None = None) -> Classifier:
    """In float64, with weights large enough for attention to be far from uniform."""
    model = Classifier(plan, seed, class_weights)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1 / math.sqrt(parameter.shape[1]) if parameter.dim() == 2 else 0.5
            parameter.copy_((parameter.dim() != 2) + scale * torch.randn(parameter.shape, generator=generator))
    return with_exact_positions(model)


def rows(plan: Plan, lengths: list[int], seed: int = 0) -> Tensor:
    """Random tokens of these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, plan.vocabulary, (len(lengths), max(lengths)), generator=generator)
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = PADDING
    return tokens


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def reference_logits(model: Classifier, row: Tensor) -> Tensor:
    """The logits of one row without padding, (classes,), head by head and with explicit attention maps."""
    weights = dict(model.named_parameters())
    x = weights["embedding.weight"][row]
    for index, layer in enumerate(model.plan.layers):
        name = f"blocks.{index}"
        h, k, e = layer.heads, layer.kv_heads, layer.head_dim
        normed = rms(x, weights[f"{name}.attention_norm.weight"])
        packed = (normed @ weights[f"{name}.attention.qkv.weight"].T).unflatten(-1, (h + 2 * k, e))
        compared = normed_heads(packed[:, : h + k], model.plan.qk_norm)
        queries, keys = (complex_rotation(part[None])[0] for part in (compared[:, :h], compared[:, h:]))
        values, out = packed[:, h + k :], weights[f"{name}.attention.out.weight"].unflatten(1, (h, e))
        for head in range(h):
            shared = head // (h // k)
            scores = torch.einsum("te,se->ts", queries[:, head], keys[:, shared]) / math.sqrt(e)
            output = torch.einsum("ts,se->te", scores.exp() / scores.exp().sum(-1, keepdim=True), values[:, shared])
            x = x + torch.einsum("te,de->td", output, out[:, head])
        normed = rms(x, weights[f"{name}.feed_forward_norm.weight"])
        gate, up = (normed @ weights[f"{name}.feed_forward.gate_up.weight"].T).chunk(2, dim=-1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ weights[f"{name}.feed_forward.down.weight"].T
    hidden = rms(x, weights["norm.weight"])
    pooled = hidden.mean(0) if model.plan.pooling == "mean" else hidden[0]
    return pooled @ weights["classes.weight"].T + weights["classes.bias"]


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("lengths", [[7, 7, 7], [1, 9, 4, 32], [5]])
@pytest.mark.parametrize("kv_group", [1, 2])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_scores_are_those_of_a_plain_form_row_by_row(
    pooling: str, lengths: list[int], kv_group: int, qk_norm: bool
) -> None:
    plan = classifier_plan(pooling=pooling, kv_group=kv_group, qk_norm=qk_norm)
    model, tokens = lively_classifier(plan), rows(plan, lengths)
    expected = torch.stack([reference_logits(model, row[:n]) for row, n in zip(tokens, lengths, strict=True)])
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-10, atol=1e-10)
    spread = expected.detach().amax(0) - expected.detach().amin(0)
    assert bool((spread > 0.1).all()) or len(lengths) == 1, "the rows must not be alike"


@settings(max_examples=30, deadline=None)
@given(data=st.data(), pooling=st.sampled_from(["mean", "first"]))
def test_more_padding_changes_nothing(data: Any, pooling: str) -> None:
    plan = replace(data.draw(grown_plans(min_context=2)), tied=True)
    plan = replace(plan, classes=data.draw(st.integers(2, 5)), pooling=pooling)
    lengths = data.draw(st.lists(st.integers(1, plan.context), min_size=1, max_size=4))
    model, tokens = lively_classifier(plan), rows(plan, lengths)
    more = data.draw(st.integers(0, plan.context - tokens.shape[1]))
    padded = torch.nn.functional.pad(tokens, (0, more), value=PADDING)
    torch.testing.assert_close(model(padded).logits, model(tokens).logits, rtol=1e-9, atol=1e-9)
    targets = torch.zeros(len(lengths), dtype=torch.long)
    torch.testing.assert_close(model(padded, targets).loss, model(tokens, targets).loss, rtol=1e-9, atol=1e-9)


def test_padding_gets_no_gradient_and_all_else_does() -> None:
    plan = classifier_plan()
    model, tokens = lively_classifier(plan), rows(plan, [3, 30, 12])
    model(tokens, torch.tensor([0, 1, 2])).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert bool((weight.grad != 0).any()), name
    assert model.embedding.weight.grad is not None
    assert not bool(model.embedding.weight.grad[PADDING].any())


def test_a_batch_without_padding_uses_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Tensor | None] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*arguments: Any, **options: Any) -> Tensor:
        masks.append(options["attn_mask"])
        assert not options["is_causal"]
        return attend(*arguments, **options)

    monkeypatch.setattr("meristem.model.attention.scaled_dot_product_attention", watched)
    plan = classifier_plan()
    model = Classifier(plan)
    model(rows(plan, [8, 8]))
    assert masks == [None] * 6
    masks.clear()
    model(rows(plan, [8, 5]))
    assert [None if mask is None else tuple(mask.shape) for mask in masks] == [(2, 1, 8, 8)] * 6


def test_who_may_look_at_whom() -> None:
    tokens = torch.tensor([[5, 6, 0], [7, 0, 0]])
    seen = Classifier(classifier_plan()).attention_mask(tokens)
    assert seen.tolist() == [[[1, 1, 0], [1, 1, 0], [0, 0, 0]], [[1, 0, 0], [0, 0, 0], [0, 0, 0]]]
    causal = Decoder(small_plan()).attention_mask(tokens)
    assert causal.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_looped_heads_see_the_mask_too() -> None:
    """The loop's second look, with padding and without, is the same."""
    plan = replace(looped(small_plan(), {2: ((1, 3), 2)}), classes=4)
    model, tokens = lively_classifier(plan), rows(plan, [6, 11])
    alone = model(tokens[:1, :6]).logits
    torch.testing.assert_close(model(tokens).logits[:1], alone, rtol=1e-10, atol=1e-10)


# --- loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 3.0, 1.0])])
def test_loss_is_the_weighted_mean_surprise(weights: Tensor | None) -> None:
    plan = classifier_plan()
    model, tokens = lively_classifier(plan, class_weights=weights), rows(plan, [4, 9, 6, 2])
    targets = torch.tensor([2, 0, 1, 1])
    probabilities = model(tokens).logits.detach().softmax(-1)
    factors = [1.0, 1.0, 1.0] if weights is None else weights.tolist()
    surprises = [-factors[c] * math.log(float(p[c])) for p, c in zip(probabilities, targets.tolist(), strict=True)]
    assert float(model(tokens, targets).loss.detach()) == pytest.approx(sum(surprises) / 4, rel=1e-9)


def test_the_loss_of_a_batch_is_the_mean_of_its_parts() -> None:
    """With class weights too: how many processes and micro-batches share a batch does not matter."""
    plan = classifier_plan()
    model, tokens = lively_classifier(plan, class_weights=torch.tensor([0.2, 5.0, 1.0])), rows(plan, [4, 9, 6, 2])
    targets = torch.tensor([2, 0, 1, 1])
    parts = [model(tokens[i : i + 2], targets[i : i + 2]).loss for i in (0, 2)]
    torch.testing.assert_close(torch.stack(parts).mean(), model(tokens, targets).loss)


def test_loss_shows_every_pass_to_a_watch() -> None:
    plan = replace(looped(small_plan(), {1: ((0,), 2)}), classes=3)
    model, tokens, targets = lively_classifier(plan), rows(plan, [4, 8]), torch.tensor([0, 2])
    seen: list[tuple[int, int, tuple[int, ...]]] = []
    loss = model.loss(
        tokens, targets, watch=lambda layer, number, p: seen.append((layer, number, tuple(p.head_outputs.shape)))
    )
    torch.testing.assert_close(loss, model(tokens, targets).loss)
    assert [(layer, number) for layer, number, _ in seen] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
        (3, 0),
        (4, 0),
        (5, 0),
    ]
    assert all(
        shape == (2, plan.heads[layer] if not number else 1, 8, plan.head_dims[layer]) for layer, number, shape in seen
    )


def test_class_weights_are_not_saved() -> None:
    model = Classifier(classifier_plan(), class_weights=torch.ones(3))
    assert "class_weights" not in model.state_dict()


# --- structure -------------------------------------------------------------------------------------------------------


def test_trunk_and_language_model_start_from_equal_weights() -> None:
    mine, theirs = Classifier(classifier_plan(), seed=5).state_dict(), Decoder(small_plan(), seed=5).state_dict()
    assert set(mine) - set(theirs) == {"classes.weight", "classes.bias"}
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
    assert 0.01 < float(mine["classes.weight"].std()) < 0.03
    assert not bool(mine["classes.bias"].any())


@settings(max_examples=25, deadline=None)
@given(
    layers=st.lists(layer_plans(), min_size=1, max_size=3), classes=st.integers(2, 6),
    sizes=st.tuples(st.integers(2, 20), st.integers(2, 30), st.integers(1, 12), st.integers(1, 20)),
)  # fmt: skip
def test_counted_parameters_and_flops_are_those_of_the_plan(
    layers: list[LayerPlan], classes: int, sizes: tuple[int, int, int, int]
) -> None:
    plan = Plan(*sizes, tuple(layers), classes=classes)
    model, batch = Classifier(plan), 3
    assert sum(p.numel() for p in model.parameters()) == plan.parameters
    tokens, targets = rows(plan, [plan.context] * batch), torch.zeros(batch, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, targets)
    cost = plan.cost
    assert cost.forward.causal == cost.forward.full
    assert counter.get_total_flops() == batch * plan.context * cost.forward.full + batch * cost.answer
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, targets).loss.backward()
    assert counter.get_total_flops() == cost.training_of(batch, plan.context).full


def test_models_refuse_the_other_kind_of_plan() -> None:
    with pytest.raises(InputError, match=r"plan.classes = None"):
        Classifier(small_plan())
    with pytest.raises(InputError, match=r"plan.classes = 3"):
        Decoder(classifier_plan())


def test_too_many_positions() -> None:
    plan = classifier_plan(context=8)
    with pytest.raises(InputError, match=r"tokens = 9: .*8"):
        Classifier(plan)(torch.ones(1, 9, dtype=torch.long))


@pytest.mark.parametrize("grouped", [False, True])
def test_a_kernel_for_training_takes_the_mask(grouped: bool) -> None:
    layer = LayerPlan(4, 16, 2 if grouped else 4)
    assert choose_backends([layer], torch.device("cpu"), torch.float32, masked=True) == ["flash"]
    plan = replace(Plan(32, 20, 8, 16, (layer,)), classes=2)
    model, tokens = Classifier(plan), rows(plan, [8, 3])
    expected = model(tokens).logits
    assert model.use_attention(torch.device("cpu"), torch.float32) == ["flash"]
    torch.testing.assert_close(model(tokens).logits, expected)


@pytest.mark.slow
def test_compiled_regions_give_the_same_gradients() -> None:
    from meristem.training.compilation import compiled_regions

    plan = classifier_plan()
    model, tokens, targets = Classifier(plan), rows(plan, [16, 7, 12]), torch.tensor([0, 1, 2])
    regions = compiled_regions()

    def gradients(compiled: bool) -> list[Tensor]:
        model.zero_grad()
        loss = model(tokens, targets, regions).loss if compiled else model(tokens, targets).loss
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if isinstance(parameter.grad, Tensor)]

    assert isinstance(model.classes, nn.Linear)
    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)
