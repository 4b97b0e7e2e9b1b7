"""Loops: extra attention passes over some heads, and repeated blocks (sgt.md 2.3 and 6, oracles 1 to 6, 9 to 12, 18).

The reference computes all heads in each pass and multiplies their outputs by 0, or by their gate.
"""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from decoding.helpers import PROMPTS, repeated_argmax
from meristem.decoding import Sampling, generate
from meristem.errors import InputError
from meristem.gauges import layer_distances
from meristem.growth.apply import apply_edit
from meristem.growth.edits import Edit, LoopHeads, RepeatBlock
from meristem.model import Decoder, KVCache
from meristem.model.attention import View
from meristem.model.block import Block, Pass
from meristem.model.decoder import visibility
from meristem.model.fused_loops import follow_heads, norm_project_heads
from meristem.model.rotary import rotary_table
from meristem.model.transformer import Regions
from meristem.plan import Gates, LayerPlan, Loop, Plan
from meristem.training.compilation import compiled_regions

from .helpers import (
    Recorder,
    complex_rotation,
    grown_plans,
    lively,
    looped,
    needs_gpu,
    normed_heads,
    random_tokens,
    relative_error,
    small_plan,
    with_exact_positions,
)
from .test_cache import assert_decodes_in_any_chunks, decode
from .test_structure import assert_counted_as_planned, count_flops, parameters, saved_by_loops, shapes

# Prism's small plan has 2, 4, 6, 12, 12, 12 heads. In groups of 2, (2, 3) and (5, 4) share a key/value head.
LOOPS = {1: ((3, 0), 1), 2: ((2, 3), 2), 4: ((5, 4, 11), 3)}
GATES = Gates(passes=3, heads=4)
PRECISIONS: dict[str, tuple[torch.dtype, Callable[[], AbstractContextManager[Any]]]] = {
    "float32": (torch.float32, nullcontext),
    "bf16 weights": (torch.bfloat16, nullcontext),
    "autocast": (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
}


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the reference ----------------------------------------------------------------------------------------

USUAL = small_plan()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def masked_attention(
    x: Tensor, weights: Mapping[str, Tensor], layer: LayerPlan, strengths: Tensor, seen: Tensor | None, plan: Plan
) -> Tensor:
    """Attention of all heads, each one's output times its strength, (h,); `seen` (B or 1, 1, T, T) is a mask."""
    heads, groups, qkv, out = (
        layer.heads,
        layer.kv_heads,
        weights["attention.qkv.weight"],
        weights["attention.out.weight"],
    )
    projected = x @ qkv.T + weights.get("attention.qkv.bias", torch.zeros((), dtype=x.dtype))
    packed = projected.unflatten(-1, (heads + 2 * groups, layer.head_dim))
    compared = normed_heads(packed[:, :, : heads + groups], plan.qk_norm, plan.norm_eps)
    queries, keys = compared[:, :, :heads], compared[:, :, heads:]
    if plan.qk_gain:
        queries, keys = queries * weights["attention.query_gain"], keys * weights["attention.key_gain"]
    queries, keys = (complex_rotation(part, rotary=plan.rotary) for part in (queries, keys))
    values = packed[:, :, heads + groups :]
    keys, values = (part.repeat_interleave(heads // groups, dim=2) for part in (keys, values))
    scores = torch.einsum("bthe,bshe->bhts", queries, keys) / math.sqrt(layer.head_dim)
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    maps = scores.masked_fill(~(causal if seen is None else seen), -math.inf).softmax(-1)
    head_outputs = torch.einsum("bhts,bshe->bthe", maps, values)
    return (head_outputs * strengths[:, None]).flatten(2) @ out.T


def masked_block(
    weights: Mapping[str, Tensor], layer: LayerPlan, x: Tensor, gates: Tensor | None, seen: Tensor | None = None,
    plan: Plan = USUAL,
) -> Tensor:  # fmt: skip
    """One block; `gates` (passes, looped heads) are 1 if not given; of `plan` nothing is asked but its variant."""
    strengths = [torch.ones(layer.heads, dtype=x.dtype)]
    if layer.loop is not None:
        # Row i of `where` is 1 at the i-th looped head.
        where = torch.eye(layer.heads, dtype=x.dtype)[list(layer.loop.heads)]
        full = torch.ones(layer.loop.passes, len(where), dtype=x.dtype)
        strengths += list((full if gates is None else gates[: layer.loop.passes]) @ where)
    for strength in strengths:
        normed = rms_norm(x, weights["attention_norm.weight"], plan.norm_eps)
        x = x + masked_attention(normed, weights, layer, strength, seen, plan)
    normed = rms_norm(x, weights["feed_forward_norm.weight"], plan.norm_eps)
    gate, up = (normed @ weights["feed_forward.gate_up.weight"].T).chunk(2, -1)
    return x + (silu(gate) * up) @ weights["feed_forward.down.weight"].T


def masked_logits(model: Decoder, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits of the whole model, in the precision of `weights`; ramps are those of the model."""
    x = weights["embedding.weight"][tokens]
    gates = None
    if model.gate_ramp is not None:
        gates = model.gate_ramp.to(x.dtype) + weights.get("gate_delta", torch.zeros((), dtype=x.dtype))
    for index, layer in enumerate(model.plan.layers):
        prefix = f"blocks.{index}."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        size = 0 if layer.loop is None else len(layer.loop.heads)
        for _ in range(1 + layer.repeats):
            strengths = None if gates is None else gates[index, :, :size]
            x = masked_block(own, layer, x, strengths, plan=model.plan)
    normed = rms_norm(x, weights["norm.weight"], model.plan.norm_eps)
    return normed @ weights["embedding.weight" if model.plan.tied else "output.weight"].T


def reference_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Its parameters in float64, as leaves of their own."""
    return {name: value.detach().double().requires_grad_() for name, value in module.named_parameters()}


def gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def run_block(
    block: Block, x: Tensor, gates: Tensor | None = None, *, first: int = 0, mask: Tensor | None = None
) -> Tensor:
    """The stream after a block, whose tokens are at the positions from `first`."""
    cos, sin = rotary_table(block.attention.layer.head_dim, first + x.shape[1])
    stream, branch = block(x, torch.zeros_like(x), (cos[first:], sin[first:]), gates, View(mask=mask))
    total: Tensor = stream + branch
    return total


def silent(model: Decoder) -> Decoder:
    """The same model, all loops at strength 0."""
    with torch.no_grad():
        for gates in (model.gate_ramp, model.gate_delta):
            if gates is not None:
                gates.zero_()
    return model


def with_loop(block: Block, heads: Sequence[int], passes: int) -> Block:
    """The same block, its loop exchanged."""
    block.attention.restructure(replace(block.attention.layer, loop=Loop(tuple(heads), passes)))
    return block


def everything(model: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """The stream after each block, logits, loss, and the gradients of all weights but the gates."""
    found: dict[str, Tensor] = {}
    hooks = [
        block.register_forward_hook(
            lambda _, __, out, i=i: found.update({f"stream {i}": out[0], f"branch {i}": out[1]})
        )
        for i, block in enumerate(model.stack)
    ]
    loss = model(tokens, tokens.roll(-1, dims=1)).loss
    for hook in hooks:
        hook.remove()
    weights = {name: value for name, value in model.named_parameters() if name != "gate_delta"}
    found |= {"loss": loss, "logits": model(tokens).logits, **gradients(loss, weights)}
    return {name: value.detach().clone() for name, value in found.items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


# --- oracles 1 to 3: nothing changes before a loop has strength -------------------------------------------


@pytest.mark.parametrize("schedule", ["uniform", "prism"])
@pytest.mark.parametrize("kv_group", [1, 2])
def test_sgt_oracle_1_a_block_without_loops_is_the_plain_block(schedule: str, kv_group: int) -> None:
    model = lively(small_plan(schedule, kv_group=kv_group))
    x, branch = draw(2, 32, 96).float(), draw(2, 32, 96, seed=2).float()
    for block in model.stack:
        pair = rotary_table(block.attention.layer.head_dim, 32)
        stream, normed = block.attention_norm(x, branch)
        stream, normed = block.feed_forward_norm(stream, block.attention(normed, block.attention_norm.weight, pair))
        found = block(x, branch, pair)
        assert torch.equal(found[0], stream)
        assert torch.equal(found[1], block.feed_forward(normed, block.feed_forward_norm.weight))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("trained", [True, False])
def test_sgt_oracle_1_gates_without_loops_change_nothing(precision: str, trained: bool) -> None:
    dtype, context = PRECISIONS[precision]
    plan = small_plan(kv_group=2)
    tokens = random_tokens(plan)
    with context():
        expected = everything(lively(plan, dtype), tokens)
        model = lively(replace(plan, gates=replace(GATES, trained=trained)), dtype)
        model.load_state_dict(lively(plan, dtype).state_dict(), strict=False)
        assert_equal(everything(model, tokens), expected)


def test_sgt_oracle_1_a_loop_that_is_taken_back_leaves_no_trace() -> None:
    plan = small_plan(kv_group=2)
    model, tokens = lively(plan), random_tokens(plan)
    before = everything(model, tokens)
    model.follow_plan(RepeatBlock(3).apply(looped(plan, LOOPS)))
    assert relative_error(everything(model, tokens)["logits"], before["logits"]) > 0.1
    model.follow_plan(plan)
    assert_equal(everything(model, tokens), before)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("schedule", "kv_group", "qk_norm"), [("uniform", 1, False), ("prism", 2, False), ("prism", 2, True)]
)
@pytest.mark.parametrize("trained", [True, False])
def test_sgt_oracle_2_birth_changes_nothing(
    precision: str, schedule: str, kv_group: int, qk_norm: bool, trained: bool
) -> None:
    dtype, context = PRECISIONS[precision]
    gates = replace(GATES, trained=trained)
    plan = replace(small_plan(schedule, kv_group=kv_group, qk_norm=qk_norm), gates=gates)
    model, tokens = silent(lively(plan, dtype)), random_tokens(plan)
    with context():
        before = everything(model, tokens)
        for layer, (heads, passes) in LOOPS.items():
            apply_edit(model, None, LoopHeads(layer, heads, passes))
        after = everything(model, tokens)
        for name, value in before.items():
            if name in dict(model.named_parameters()):
                assert float((after[name] - value).abs().max()) <= 1e-7, name
            else:
                assert torch.equal(after[name], value), name
        if precision == "autocast":  # the stream has the dtype of the products from the start (sgt.md D3)
            assert after["stream 4"].dtype == torch.bfloat16
        assert model.gate_ramp is not None
        model.gate_ramp[4] = 1  # the loops are there
        grown = everything(model, tokens)
    assert torch.equal(grown["stream 3"], before["stream 3"])
    assert relative_error(grown["stream 4"], before["stream 4"]) > 0.1


def born_gates() -> Tensor:
    """True for the gates of LOOPS."""
    born = torch.zeros(6, GATES.passes, GATES.heads, dtype=torch.bool)
    for layer, (heads, passes) in LOOPS.items():
        born[layer, :passes, : len(heads)] = True
    return born


@pytest.mark.parametrize("at_birth", [True, False])
def test_sgt_oracle_3_gradients_of_the_gates(at_birth: bool) -> None:
    """Against central differences, of which the rounding error is about 1e-16 / 1e-4."""
    plan = looped(small_plan(kv_group=2), LOOPS, GATES)
    model, tokens = lively(plan, torch.float64), random_tokens(plan)
    targets = tokens.roll(-1, dims=1)
    assert model.gate_delta is not None
    if at_birth:
        silent(model)
    model(tokens, targets).loss.backward()
    born, found = born_gates(), model.gate_delta.grad
    assert found is not None
    assert not found[~born].any()
    assert float(found[born].abs().min()) > 1e-6
    step = 1e-4
    with torch.no_grad():
        for place in born.nonzero().tolist():
            gate = model.gate_delta[tuple(place)]
            value = gate.clone()
            losses = []
            for sign in (1, -1):
                gate.copy_(value + sign * step)
                losses.append(float(model(tokens, targets).loss))
            gate.copy_(value)
            expected = (losses[0] - losses[1]) / (2 * step)
            assert float(found[tuple(place)]) == pytest.approx(expected, rel=1e-6), place


def test_sgt_oracle_3_a_deeper_loop_is_born_alone() -> None:
    """The second pass of a layer at strength 0, the first at full strength; nobody else has a gradient."""
    plan = looped(small_plan(), {4: ((5, 4), 2)}, GATES)
    model, tokens = silent(lively(plan)), random_tokens(plan)
    assert model.gate_ramp is not None
    assert model.gate_delta is not None
    model.gate_ramp[4, 0] = 1
    model(tokens, tokens.roll(-1, dims=1)).loss.backward()
    assert model.gate_delta.grad is not None
    assert sorted(map(tuple, model.gate_delta.grad.nonzero().tolist())) == [(4, p, h) for p in (0, 1) for h in (0, 1)]


def test_gates_nobody_uses_have_a_gradient_of_zero() -> None:
    """A parameter without a gradient would stop distributed training (sgt.md D12)."""
    plan = replace(small_plan(), gates=GATES)
    model, tokens = lively(plan), random_tokens(plan)
    model(tokens, tokens.roll(-1, dims=1)).loss.backward()
    assert model.gate_delta is not None
    assert model.gate_delta.grad is not None
    assert model.gate_delta.grad.shape == (6, 3, 4)
    assert not model.gate_delta.grad.any()


# --- oracles 4 to 6: which heads, and in which order -------------------------------------------------------


def compare_block(block: Block, x: Tensor, gates: Tensor | None, limit: float, seen: Tensor | None = None) -> None:
    """Output and all gradients of a block against the reference."""
    grad = draw(*x.shape, seed=3)
    mine: dict[str, Tensor] = {**dict(block.named_parameters()), "x": x.clone().requires_grad_()}
    theirs: dict[str, Tensor] = {**reference_of(block), "x": x.double().requires_grad_()}
    if gates is not None:
        mine["gates"] = gates.clone().requires_grad_()
        theirs["gates"] = gates.double().requires_grad_()
    found = run_block(block, mine["x"], mine.get("gates"), mask=seen)
    attention = block.attention
    plan = replace(USUAL, qk_norm=attention.qk_norm)
    expected = masked_block(theirs, attention.layer, theirs["x"], theirs.get("gates"), seen, plan)
    assert relative_error(found, expected) <= limit
    found_gradients = gradients((found * grad.to(found.dtype)).sum(), mine)
    for name, value in gradients((expected * grad).sum(), theirs).items():
        # A gate has one number, the sum of a whole slice of weights times their gradients, of either sign.
        allowed = 4 * limit if name == "gates" else limit
        assert relative_error(found_gradients[name], value) <= allowed, name


@pytest.mark.parametrize(
    ("schedule", "kv_group", "layer", "heads"),
    [
        ("uniform", 1, 3, (7, 2)),
        ("uniform", 2, 3, (4, 5)),  # both read key/value head 2
        ("uniform", 2, 3, (11, 4, 5)),
        ("prism", 1, 1, (3,)),
        ("prism", 1, 2, (5, 0)),
        ("prism", 2, 0, (1, 0)),
        ("prism", 2, 2, (3, 2)),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_sgt_oracle_4_gathered_heads_equal_masked_heads(
    schedule: str, kv_group: int, layer: int, heads: tuple[int, ...], gated: bool, qk_norm: bool, dtype: torch.dtype,
    limit: float,
) -> None:  # fmt: skip
    model = lively(small_plan(schedule, kv_group=kv_group, qk_norm=qk_norm), dtype)
    block = with_loop(model.stack[layer], heads, 2)
    gates = draw(2, len(heads)).to(dtype) if gated else None
    compare_block(block, draw(2, 32, 96).to(dtype), gates, limit)


def model_against_reference(model: Decoder) -> None:
    """Logits and all gradients, in float64 and with gates of any strength."""
    limit, tokens = 1e-9, random_tokens(model.plan)
    with_exact_positions(model)
    if model.gate_ramp is not None:
        model.gate_ramp.copy_(draw(*model.gate_ramp.shape))
    targets = tokens.roll(-1, dims=1)
    weights = reference_of(model)
    logits = masked_logits(model, weights, tokens)
    assert relative_error(model(tokens).logits, logits) <= limit
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
    if "gate_delta" in weights:
        loss = loss + 0 * weights["gate_delta"].sum()
    found = gradients(model(tokens, targets).loss, dict(model.named_parameters()))
    for name, value in gradients(loss, weights).items():
        difference = (found[name].double() - value).norm()
        assert float(difference) <= limit * (float(value.norm()) + 1e-3), name


@pytest.mark.parametrize("kv_group", [1, 2])
@pytest.mark.parametrize("gates", [None, GATES, replace(GATES, trained=False)], ids=["none", "trained", "fixed"])
@pytest.mark.parametrize("schedule", ["uniform", "prism"])
def test_sgt_oracle_4_whole_models(kv_group: int, gates: Gates | None, schedule: str) -> None:
    plan = RepeatBlock(3, 2).apply(looped(small_plan(schedule, kv_group=kv_group), LOOPS, gates))
    model_against_reference(lively(plan, torch.float64))


@settings(max_examples=30, deadline=None)
@given(plan=grown_plans(min_context=2))
def test_sgt_oracle_4_any_plan(plan: Plan) -> None:
    model_against_reference(lively(plan, torch.float64))


# --- loops with and without a stream between their passes ---------------------------------------------------------


def loss_and_gradients(model: Decoder, tokens: Tensor, *, watched: bool) -> dict[str, Tensor]:
    """If they are watched, passes follow each other as they are defined."""
    loss = model.loss(tokens, tokens.roll(-1, dims=1), watch=(lambda *seen: None) if watched else None)
    return {"loss": loss.detach(), **gradients(loss, dict(model.named_parameters()))}


@settings(max_examples=60, deadline=None)
@given(plan=grown_plans(min_context=2), silent_passes=st.sets(st.integers(0, 2)))
def test_passes_that_nobody_watches_compute_the_same(plan: Plan, silent_passes: set[int]) -> None:
    """Loss and all gradients, in float64, with gates of any strength, 0 included."""
    model, tokens = with_exact_positions(lively(plan, torch.float64)), random_tokens(plan)
    if model.gate_ramp is not None:
        model.gate_ramp.copy_(draw(*model.gate_ramp.shape))
        with torch.no_grad():
            for gates in (model.gate_ramp, model.gate_delta):
                if gates is not None:
                    gates[:, list(silent_passes)] = 0
    expected = loss_and_gradients(model, tokens, watched=True)
    for name, value in loss_and_gradients(model, tokens, watched=False).items():
        assert float((value - expected[name]).norm()) <= 1e-10 * (float(expected[name].norm()) + 1e-3), name


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("gates", [None, GATES], ids=["full strength", "gated"])
@pytest.mark.parametrize(("kv_group", "qk_norm"), [(1, False), (2, False), (1, True), (2, True)])
def test_passes_that_nobody_watches_are_as_precise_under_autocast(
    passes: int, gates: Gates | None, kv_group: int, qk_norm: bool
) -> None:
    """Errors of bf16, as the mean over weights and three models: those of watched passes, give or take a quarter."""
    loops = {1: ((3, 0), passes), 2: ((2, 7), passes), 4: ((5, 11), passes)}
    plan = looped(small_plan("uniform", kv_group=kv_group, qk_norm=qk_norm), loops, gates)
    errors: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(3):
        tokens = random_tokens(plan, batch=4, seed=seed)
        exact = loss_and_gradients(with_exact_positions(lively(plan, torch.float64, seed)), tokens, watched=True)
        model = lively(plan, seed=seed)
        for watched, found in errors.items():
            with torch.autocast("cpu", torch.bfloat16):
                rounded = loss_and_gradients(model, tokens, watched=watched)
            found += [relative_error(rounded[name], value) for name, value in exact.items()]
    means = {watched: sum(found) / len(found) for watched, found in errors.items()}
    assert means[False] <= 1.25 * means[True]
    assert max(*errors[False], *errors[True]) <= 6e-2  # the worst is that of the gates, which are few


@pytest.mark.parametrize("gates", [None, GATES], ids=["full strength", "gated"])
def test_only_the_first_of_the_passes_touches_the_stream(gates: Gates | None) -> None:
    """As many tensors as wide as the stream are made with three passes as with one, forward and backward."""
    made = {}
    for passes in (0, 1, 2, 3):
        block = lively(small_plan("uniform")).stack[2]
        if passes:
            with_loop(block, (7, 2), passes)
        x = draw(2, 35, 96).float().requires_grad_()
        strengths = None if gates is None else draw(3, 2).float().requires_grad_()
        with Recorder() as recorder:
            run_block(block, x, strengths).sum().backward()
        made[passes] = sum(shape in ((2, 35, 96), (70, 96)) for shape, _ in recorder.made)
    assert made[3] == made[2] == made[1] > made[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_that_loops_take_back(dtype: torch.dtype) -> None:
    """What is read undoes the stream nearly or entirely: its square is a small difference of large numbers."""
    generator = torch.Generator().manual_seed(0)
    out = torch.linalg.qr(torch.randn(8, 8, generator=generator))[0]
    weight = torch.cat((torch.randn(24, 8, generator=generator), out)).to(dtype)
    x = (3 * torch.randn(2, 5, 8, generator=generator)).to(dtype).requires_grad_()
    table = rotary_table(4, 5)
    _, _, *_, packed, scale = norm_project_heads(x, torch.zeros_like(x), weight, *table, heads=2, eps=1e-5)
    for factor in (1.0, 1.001, 0.9):
        read = (-factor * x.detach() @ out.T.to(dtype)).unflatten(-1, (2, 4)).requires_grad_()
        found = follow_heads(packed, scale, read, out.to(dtype) @ weight.T, *table, eps=1e-5, width=8)
        slopes = torch.autograd.grad(torch.cat(found).sum(), (x, read), retain_graph=True)
        assert all(bool(value.isfinite().all()) for value in (*found, *slopes))


@pytest.mark.parametrize("wanted", ["flash", "math"])
def test_loops_run_with_a_fixed_kernel(wanted: str) -> None:
    plan = looped(small_plan(kv_group=2), LOOPS)
    model, tokens = lively(plan), random_tokens(plan)
    expected = masked_logits(model, reference_of(model), tokens)
    model.use_attention(torch.device("cpu"), torch.float32, wanted)
    assert relative_error(model(tokens).logits, expected) <= 1e-5


def test_sgt_oracle_5_all_heads_in_any_order_are_a_second_attention_pass() -> None:
    for kv_group in (1, 2):
        block = lively(small_plan(kv_group=kv_group)).stack[1]
        x = draw(2, 32, 96).float()
        pair = rotary_table(24, 32)
        stream, branch = x, torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(3):
                stream, normed = block.attention_norm(stream, branch)
                branch = block.attention(normed, block.attention_norm.weight, pair)
            stream, normed = block.feed_forward_norm(stream, branch)
            expected = stream + block.feed_forward(normed, block.feed_forward_norm.weight)
            for heads in permutations(range(4)):
                assert relative_error(run_block(with_loop(block, heads, 2), x), expected) <= 1e-5, heads
            assert relative_error(run_block(with_loop(block, (0, 1, 3), 2), x), expected) > 1e-2


@pytest.mark.parametrize("kv_group", [1, 2])
def test_sgt_oracle_6_the_order_of_heads_does_not_matter(kv_group: int) -> None:
    block = lively(small_plan(kv_group=kv_group)).stack[4]
    heads, strengths, grad = (9, 2, 3), draw(2, 3).float(), draw(2, 32, 96, seed=4).float()
    x = draw(2, 32, 96).float()
    results = []
    for order in permutations(range(3)):
        gates = strengths[:, list(order)].requires_grad_()
        out = run_block(with_loop(block, [heads[i] for i in order], 2), x, gates)
        found = gradients((out * grad).sum(), {**dict(block.named_parameters()), "gates": gates})
        found["gates"] = found["gates"][:, torch.tensor(order).argsort()]
        results.append({"out": out, **found})
    for result in results[1:]:
        for name, value in results[0].items():
            assert relative_error(result[name], value) <= 1e-5, name
    # The gates belong to their heads.
    exchanged = run_block(with_loop(block, (2, 9, 3), 2), x, strengths)
    assert relative_error(exchanged, results[0]["out"]) > 1e-2


def test_a_loop_over_all_heads_with_a_gate_for_each() -> None:
    """The published birth: all heads loop, and those not selected fade (sgt.md 2.2, D1)."""
    plan = replace(small_plan(kv_group=2), gates=Gates(passes=1, heads=12))
    every = {layer: (tuple(range(plan.heads[layer])), 1) for layer in (2, 4)}
    selected = {2: (4, 1), 4: (11, 6)}
    some = {layer: (heads, 1) for layer, heads in selected.items()}
    model, few = (
        silent(with_exact_positions(lively(looped(plan, loops, plan.gates), torch.float64))) for loops in (every, some)
    )
    tokens = random_tokens(plan)
    assert model.gate_ramp is not None
    assert few.gate_ramp is not None
    few.gate_ramp.fill_(1)
    logits = []
    for fade in (1.0, 0.3, 0.0):
        for layer, heads in selected.items():
            model.gate_ramp[layer, 0] = fade
            model.gate_ramp[layer, 0, list(heads)] = 1
        logits.append(model(tokens).logits)
        assert relative_error(logits[-1], masked_logits(model, reference_of(model), tokens)) <= 1e-10
    assert relative_error(logits[1], logits[0]) > 1e-2
    assert relative_error(logits[2], few(tokens).logits) <= 1e-10


# --- what tokens see --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_group", [1, 2])
@pytest.mark.parametrize("repeated", [False, True])
def test_sgt_oracle_9_causality(kv_group: int, repeated: bool) -> None:
    plan = looped(small_plan(kv_group=kv_group), LOOPS)
    if repeated:
        plan = RepeatBlock(5, 2).apply(plan)
    model, tokens = lively(plan), random_tokens(plan)
    with torch.no_grad():
        before = model(tokens).logits
        for t in (1, 7, 16, 31):
            changed = tokens.clone()
            changed[:, t:] = (changed[:, t:] + 1 + random_tokens(plan, seed=5)[:, t:] % 60) % plan.vocabulary
            after = model(changed).logits
            assert torch.equal(after[:, :t], before[:, :t])
            assert bool((after[:, t:] != before[:, t:]).any(-1).all())


@pytest.mark.parametrize("kv_group", [1, 2])
def test_documents_do_not_see_each_other_in_loops(kv_group: int) -> None:
    """A block with a mask: its loops see what the normal pass sees."""
    document = torch.tensor([[0] * 11 + [1] * 21, [0] * 25 + [1] * 7])
    seen = visibility(0, 32, None, torch.device("cpu")) & (document[:, None, :, None] == document[:, None, None, :])
    assert seen.shape == (2, 1, 32, 32)
    block = with_loop(lively(small_plan(kv_group=kv_group)).stack[2], (3, 2), 2)
    x, gates = draw(2, 32, 96).float(), draw(2, 2).float()
    compare_block(block, x, gates, 1e-5, seen)
    with torch.no_grad():
        masked = run_block(block, x, gates, mask=seen)
        assert relative_error(masked[:1, :11], run_block(block, x[:1, :11], gates)) <= 1e-5
        assert relative_error(masked[:1, 11:], run_block(block, x[:1, 11:], gates)) <= 1e-5
        assert relative_error(masked, run_block(block, x, gates)) > 1e-2


@pytest.mark.parametrize("kv_group", [1, 2])
@pytest.mark.parametrize("first", [1, 7, 500])
def test_sgt_oracle_11_only_relative_positions_count(kv_group: int, first: int) -> None:
    block = lively(small_plan(kv_group=kv_group)).stack[1]
    x, gates = draw(2, 32, 96).float(), draw(2, 2).float()
    with torch.no_grad():
        plain = run_block(block, x)
        expected = run_block(with_loop(block, (3, 0), 2), x, gates)
        assert relative_error(run_block(block, x, gates, first=first), expected) <= 1e-5
        assert relative_error(expected, plain) > 1e-2
        # Positions twice as far apart are something else.
        cos, sin = rotary_table(24, 64)
        stream, branch = block(x, torch.zeros_like(x), (cos[::2], sin[::2]), gates)
        assert relative_error(stream + branch, expected) > 1e-2


# --- oracle 10: the cache ---------------------------------------------------------------------------------


def cache_plan(passes: int, kv_group: int, repeats: int, gates: Gates | None = GATES) -> Plan:
    plan = looped(small_plan(kv_group=kv_group), {1: ((3, 0), passes), 4: ((5, 4, 11), passes)}, gates)
    return RepeatBlock(5, repeats).apply(RepeatBlock(2, repeats).apply(plan))


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("kv_group", [1, 2])
@pytest.mark.parametrize("repeats", [0, 2])
def test_sgt_oracle_10_cached_decoding(passes: int, kv_group: int, repeats: int) -> None:
    plan = cache_plan(passes, kv_group, repeats)
    model, tokens = lively(plan), random_tokens(plan)
    with torch.no_grad():
        expected = model(tokens).logits
    for prefill in ((20,), (11, 9)):
        assert relative_error(decode(model, tokens, prefill, torch.float32), expected) <= 1e-5


@settings(max_examples=30, deadline=None)
@given(plan=grown_plans(min_context=3), data=st.data())
def test_sgt_oracle_10_any_plan_and_any_chunks(plan: Plan, data: st.DataObject) -> None:
    assert_decodes_in_any_chunks(plan, data)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("kv_group", [1, 2])
@pytest.mark.parametrize("repeats", [0, 1])
@torch.no_grad()
def test_sgt_oracle_10_rows_of_different_lengths(passes: int, kv_group: int, repeats: int) -> None:
    """Rows of 20, 13 and 4 tokens, padded on the left, then 8 more tokens one by one; each row alone is the measure."""
    plan = cache_plan(passes, kv_group, repeats)
    model, tokens = lively(plan), random_tokens(plan, batch=3, length=28)
    padding = torch.tensor([0, 7, 16])
    cache = KVCache(plan, 3, 28, "cpu", torch.float32)
    parts = [model.unembed(model.hidden(tokens[:, :20], cache, padding))]
    parts += [model.unembed(model.hidden(tokens[:, t : t + 1], cache, padding)) for t in range(20, 28)]
    found = torch.cat(parts, dim=1)
    for row, skipped in enumerate(padding.tolist()):
        alone = model(tokens[row : row + 1, skipped:]).logits
        assert relative_error(found[row : row + 1, skipped:], alone) <= 1e-5
        whole = model.unembed(model.hidden(tokens, padding=padding))[row : row + 1, skipped:]
        assert relative_error(whole, alone) <= 1e-5


@pytest.mark.parametrize("kv_group", [1, 2])
def test_sgt_oracle_10_slots(kv_group: int) -> None:
    """One slot per pass: (B, h, T, head dim) for a loop of h heads, whatever keys they share."""
    plan = RepeatBlock(3, 2).apply(looped(small_plan(kv_group=kv_group), LOOPS))
    cache = KVCache(plan, 2, 20, "cpu", torch.bfloat16)
    heads = [[slot.keys.shape[1] for slot in layer] for layer in cache.layers]
    normal = [h // kv_group for h in plan.heads]
    expected = [[n] for n in normal]
    expected[1] += [2]
    expected[2] += [2, 2]
    expected[3] *= 3
    expected[4] += [3, 3, 3]
    assert heads == expected
    for layer, slots in zip(plan.layers, cache.layers, strict=True):
        for slot in slots:
            assert slot.keys.shape == slot.values.shape == (2, slot.keys.shape[1], 20, layer.head_dim)
    assert cache.nbytes == 2 * 20 * plan.cost.kv_bytes_per_token


@given(plan=grown_plans())
@settings(max_examples=50, deadline=None)
def test_sgt_oracle_10_bytes_of_any_cache_are_those_of_the_plan(plan: Plan) -> None:
    cache = KVCache(plan, 3, plan.context, "meta", torch.bfloat16)
    assert cache.nbytes == 3 * plan.context * plan.cost.kv_bytes_per_token


def test_sgt_oracle_10_each_pass_has_its_own_keys() -> None:
    """A slot holds the keys that its pass computes without a cache, from the stream as it is by then."""
    plan = RepeatBlock(5).apply(looped(small_plan(kv_group=2), LOOPS))
    model, tokens = lively(plan), random_tokens(plan, length=9)
    cache = KVCache(plan, 2, 12, "cpu", torch.float32)
    seen: dict[tuple[int, int], Tensor] = {}
    with torch.no_grad():
        model.hidden(tokens, watch=lambda layer, number, it: seen.update({(layer, number): it.keys}))
        for part in tokens.split([4, 1, 4], dim=1):
            model.hidden(part, cache)
    assert seen.keys() == {(layer, i) for layer, slots in enumerate(cache.layers) for i in range(len(slots))}
    for (layer, number), keys in seen.items():
        slot = cache.layers[layer][number]
        torch.testing.assert_close(slot.keys[:, :, :9], keys, rtol=1e-4, atol=1e-4)
        assert not slot.keys[:, :, 9:].any()
        assert not slot.values[:, :, 9:].any()
    first, second = seen[2, 1], seen[2, 2]
    assert relative_error(second, first) > 0.1


@pytest.mark.parametrize("kv_group", [1, 2])
def test_generation_with_loops(kv_group: int) -> None:
    """In float64, so that the other kernel behind a mask cannot tip a near tie."""
    model = lively(cache_plan(2, kv_group, 1), torch.float64)
    greedy = Sampling(temperature=0)
    expected = [repeated_argmax(model, prompt, 8) for prompt in PROMPTS]
    assert [generate(model, [prompt], max_tokens=8, sampling=greedy)[0] for prompt in PROMPTS] == expected
    assert generate(model, PROMPTS, max_tokens=8, sampling=greedy) == expected
    model.follow_plan(replace(model.plan, layers=small_plan(kv_group=kv_group).layers))
    assert generate(model, PROMPTS, max_tokens=8, sampling=greedy) != expected


def test_generation_with_loops_under_autocast() -> None:
    model = Decoder(cache_plan(2, 2, 1))
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(model, PROMPTS, max_tokens=5, sampling=Sampling(temperature=0))
    assert [len(row) for row in found] == [5] * len(PROMPTS)


# --- oracle 12: cost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_group", [1, 2])
@pytest.mark.parametrize("gates", [None, GATES], ids=["full strength", "gated"])
def test_sgt_oracle_12_counted_flops_of_a_loop(kv_group: int, gates: Gates | None) -> None:
    """B T (8 d m + 4 T m) for each pass over m channels, three times that with backward.

    So it is for one pass, and for any number if each has to be seen. Else several take less (see `saved_by_loops`).
    """
    base = replace(small_plan(kv_group=kv_group), gates=gates)
    tokens = random_tokens(base, batch=3)
    batch, length, width = *tokens.shape, base.width
    before = [count_flops(Decoder(base), tokens, backward=backward) for backward in (False, True)]
    for layer, heads, passes in ((0, (1,), 1), (2, (3, 2), 3), (4, (0, 7, 5), 2)):
        m = len(heads) * base.head_dims[layer]
        increment = passes * batch * length * (8 * width * m + 4 * length * m)
        plan = looped(base, {layer: (heads, passes)}, gates)
        saved = saved_by_loops(plan, batch * length)
        assert (saved > 0) == (passes > 1)
        for watch, expected in ((None, increment - saved), (lambda *seen: None, increment)):
            after = [count_flops(Decoder(plan), tokens, backward=backward, watch=watch) for backward in (False, True)]
            assert after[0] - before[0] == expected
            assert after[1] - before[1] == 3 * expected


def test_sgt_oracle_12_the_number_of_heads_does_not_matter() -> None:
    """48 looped channels: one head of 48, two of 24, three of 16 or six of 8."""
    increments = set()
    for heads in (2, 4, 6, 12):
        plan = Plan.uniform(layers=2, width=96, heads=heads, vocabulary=61, context=32)
        tokens = random_tokens(plan)
        loop = {1: (tuple(range(heads // 2)), 1)}
        counted = [count_flops(Decoder(p), tokens, backward=True) for p in (looped(plan, loop), plan)]
        increments.add(counted[0] - counted[1])
    assert increments == {3 * 2 * 32 * (8 * 96 * 48 + 4 * 32 * 48)}


@settings(max_examples=25, deadline=None)
@given(plan=grown_plans())
def test_sgt_oracles_12_and_18_counted_parameters_and_flops_are_those_of_the_plan(plan: Plan) -> None:
    assert_counted_as_planned(plan)


# --- oracle 18: one set of tensors ------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [True, False])
def test_sgt_oracle_18_tensors_do_not_change_over_growth(trained: bool) -> None:
    vanilla = small_plan(kv_group=2)
    plan = replace(vanilla, gates=replace(GATES, trained=trained))
    model = lively(plan)
    extra = 6 * 3 * 4 if trained else 0
    assert parameters(model) == plan.parameters == vanilla.parameters + extra == parameters(Decoder(vanilla)) + extra
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = {"gate_ramp", "gate_delta"} if trained else {"gate_ramp"}
    assert before.keys() - Decoder(vanilla).state_dict().keys() == names
    assert all(before[name].shape == (6, 3, 4) for name in names)
    identities = {name: id(value) for name, value in model.named_parameters()}
    stages: list[Edit] = [LoopHeads(4, (5, 2), 1), LoopHeads(4, (5, 2), 2), LoopHeads(1, (0, 3), 1), RepeatBlock(3, 2)]
    for edit in stages:
        plan = edit.apply(plan)
        apply_edit(model, None, edit)
        assert model.plan == plan
        assert parameters(model) == plan.parameters == vanilla.parameters + extra
        assert {name: id(value) for name, value in model.named_parameters()} == identities
        assert list(shapes(model).items()) == [(name, tuple(value.shape)) for name, value in before.items()]
        assert_equal(model.state_dict(), before)
    # A model that is built as it is grown takes the same tensors, and computes the same.
    fresh, tokens = Decoder(plan, seed=5), random_tokens(plan)
    fresh.load_state_dict(before, strict=True)
    assert_equal(everything(fresh, tokens), everything(model, tokens))


def test_sgt_oracle_18_loops_of_a_new_model_are_at_full_strength() -> None:
    """And passes that it has not got have none."""
    plan = looped(small_plan(), LOOPS, GATES)
    gated, plain = Decoder(plan, seed=3), Decoder(replace(plan, gates=None), seed=3)
    assert gated.gates is not None
    assert torch.equal(gated.gates, born_gates().float())
    assert plain.gates is None
    tokens = random_tokens(plan)
    assert_equal(everything(gated, tokens), everything(plain, tokens))
    silent(gated)
    gated.initialise(3)
    assert torch.equal(gated.gates, born_gates().float())


@pytest.mark.parametrize("trained", [True, False])
def test_edits_without_a_grower_change_nothing_either(trained: bool) -> None:
    """A pass begins without strength whoever adds it; those that were there keep theirs."""
    plan = LoopHeads(4, (5, 2), 1).apply(replace(small_plan(kv_group=2), gates=replace(GATES, trained=trained)))
    model, tokens = lively(plan), random_tokens(plan)
    assert model.gate_ramp is not None
    with torch.no_grad():
        model.gate_ramp[4, 0, :2] = torch.tensor([0.75, 1.25])
        if model.gate_delta is not None:
            model.gate_delta.zero_()
        before = model(tokens).logits
        edits = [LoopHeads(4, (5, 2), 3), LoopHeads(2, (0, 3, 1), 2)]
        for edit in edits:
            apply_edit(model, None, edit)
            assert torch.equal(model(tokens).logits, before), edit
        assert model.gate_ramp[4].tolist() == [[0.75, 1.25, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
        model.gate_ramp[2, :2, :3] = 1
        model.gate_ramp[4, 2, :2] = 1
        assert relative_error(model(tokens).logits, before) > 0.01
        model.follow_plan(plan)  # a loop that is taken back and given again begins anew
        assert torch.equal(model(tokens).logits, before)
        for edit in edits:
            apply_edit(model, None, edit)
        assert torch.equal(model(tokens).logits, before)


def test_loops_without_gates_have_full_strength_at_once() -> None:
    """There is nothing that could be 0."""
    plan = small_plan()
    model, tokens = lively(plan), random_tokens(plan)
    before = model(tokens).logits
    model.follow_plan(looped(plan, {4: ((5, 2), 1)}))
    assert model.gates is None
    assert relative_error(model(tokens).logits, before) > 0.01


def test_the_gates_are_ramp_and_delta_together() -> None:
    plan = looped(small_plan(), LOOPS, GATES)
    model, tokens = lively(plan, torch.float64), random_tokens(plan)
    assert model.gate_ramp is not None
    assert model.gate_delta is not None
    before = model(tokens).logits
    with torch.no_grad():
        model.gate_ramp.add_(0.75)
        model.gate_delta.sub_(0.75)
    assert relative_error(model(tokens).logits, before) <= 1e-10


# --- gauges and loops -------------------------------------------------------------------------------------


def test_a_watch_sees_every_pass_in_order() -> None:
    plan = RepeatBlock(3, 2).apply(looped(small_plan(kv_group=2), LOOPS, GATES))
    model, tokens = lively(plan), random_tokens(plan)
    passes: list[tuple[int, int, Pass]] = []
    with torch.no_grad():
        hidden = model.hidden(tokens, watch=lambda layer, number, seen: passes.append((layer, number, seen)))
        assert relative_error(hidden, model.hidden(tokens)) <= 1e-5
    counts = [1, 2, 3, 3, 4, 1]
    assert [(layer, number) for layer, number, _ in passes] == [(i, n) for i, c in enumerate(counts) for n in range(c)]
    for layer, number, seen in passes:
        heads = LOOPS[layer][0] if layer in LOOPS and number else range(plan.heads[layer])
        keys = len(heads) if layer in LOOPS and number else plan.kv_heads[layer]
        assert seen.queries.shape == (2, len(heads), 32, plan.head_dims[layer])
        assert seen.keys.shape == (2, keys, 32, plan.head_dims[layer])
    for (layer, _, seen), (later, _, after) in pairwise(passes):
        if layer == later and layer in LOOPS:  # the next pass reads what this one has added to
            torch.testing.assert_close(seen.stream + seen.update, after.stream)


def test_distances_are_those_of_the_normal_pass() -> None:
    """Up to the first layer that is run again, all is as it was."""
    plan = small_plan()
    model, tokens = lively(plan), random_tokens(plan)
    before = layer_distances(model, tokens)
    model.follow_plan(RepeatBlock(5).apply(looped(plan, {2: ((1, 0), 2)})))
    after = layer_distances(model, tokens)
    assert after.shape == (6,)
    assert torch.equal(after[:3], before[:3])
    assert bool((after[3:] != before[3:]).all())


# --- edits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "field", "value"),
    [
        (LoopHeads(6, (0,), 1), "layer", 6),
        (LoopHeads(-1, (0,), 1), "layer", -1),
        (LoopHeads(True, (0,), 1), "layer", True),
        (LoopHeads(2, (), 1), "loop.heads", ()),
        (LoopHeads(2, (3, 3), 1), "loop.heads", (3, 3)),
        (LoopHeads(2, (0, 6), 1), "loop.heads", (0, 6)),
        (LoopHeads(2, (-1,), 1), "loop.heads", (-1,)),
        (LoopHeads(2, (0, 1), 0), "loop.passes", 0),
        (LoopHeads(2, (0, 1), 4), "layers[2].loop.passes", 4),
        (LoopHeads(4, (0, 1, 2, 3, 4), 1), "layers[4].loop.heads", 5),
        (LoopHeads(5, (0, 1), 1), "repeats", 2),
        (RepeatBlock(6), "layer", 6),
        (RepeatBlock(2, -1), "repeats", -1),
        (RepeatBlock(1), "repeats", 1),
    ],
    ids=repr,
)
def test_bad_edits_name_field_and_value(edit: Edit, field: str, value: Any) -> None:
    """Layer 1 has a loop, layer 5 is repeated twice."""
    plan = RepeatBlock(5, 2).apply(looped(small_plan(), {1: ((3, 0), 1)}, GATES))
    with pytest.raises(InputError) as caught:
        edit.apply(plan)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert str(caught.value).startswith(f"{field} = {value!r}: ")


def test_edits_change_one_layer() -> None:
    plan = replace(small_plan(), gates=GATES)
    once = LoopHeads(4, (7, 2), 1).apply(plan)
    assert once.loops == {4: Loop((7, 2), 1)}
    deeper = LoopHeads(4, (7, 2), 3).apply(once)
    assert deeper.loops == {4: Loop((7, 2), 3)}
    repeated = RepeatBlock(0).apply(deeper)
    assert [layer.repeats for layer in repeated.layers] == [1, 0, 0, 0, 0, 0]
    assert RepeatBlock(0, 0).apply(repeated) == deeper
    assert replace(deeper, layers=plan.layers) == plan
    assert len({p.digest for p in (plan, once, deeper, repeated)}) == 4


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "variant",
    [{}, {"qk_norm": True}, {"qkv_bias": True, "tied": False}, {"qk_norm": True, "qk_gain": True, "qkv_bias": True}],
    ids=["plain", "normed", "biased", "gained"],
)
def test_loops_on_the_gpu(variant: dict[str, Any]) -> None:
    """Float32 without tensor cores' rounding, by logits and by the gradients of all weights."""
    plan = RepeatBlock(3).apply(looped(replace(small_plan(kv_group=2), **variant), LOOPS, GATES))
    model, tokens = lively(plan), random_tokens(plan)
    expected = everything(model, tokens)
    found = everything(model.cuda(), tokens.cuda())
    for name, value in expected.items():
        assert relative_error(found[name].cpu(), value) <= 1e-3, name


def trained_forward(model: Decoder, tokens: Tensor, regions: Regions) -> tuple[Tensor, Tensor]:
    """The stream after the last block and the loss, in bfloat16 as in training."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        x, branch = model.stream(tokens, regions=regions)
        loss = model(tokens, tokens.roll(-1, dims=1), regions).loss
    assert loss is not None
    return (x + branch).detach(), loss.detach()


def births_with_equal_bits(plan: Plan, device: str, compile: bool) -> list[bool]:
    """Of a layer that grows from no pass to three, those before at full strength. All births are equal to rounding.

    A first pass adds zeros to the stream. A second one widens the projection from 3 h e to 4 h e columns, for which
    cuBLAS may choose another kernel.
    """
    model = silent(lively(replace(plan, gates=Gates(3, 2)))).to(device)
    tokens, regions = random_tokens(plan, batch=4).to(device), compiled_regions() if compile else Regions()
    layer, equal = len(plan.layers) // 2, []
    assert model.gate_ramp is not None
    before = trained_forward(model, tokens, regions)
    for passes in (1, 2, 3):
        apply_edit(model, None, LoopHeads(layer, (3, 7), passes))
        after = trained_forward(model, tokens, regions)
        equal.append(all(map(torch.equal, after, before)))
        for mine, theirs in zip(after, before, strict=True):
            assert relative_error(mine, theirs) <= 0.013  # what bfloat16 differs from float32
        model.gate_ramp[layer, passes - 1] = 1
        before = trained_forward(model, tokens, regions)
        assert relative_error(before[0], after[0]) > 0.05  # the new pass is there
    return equal


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sgt_oracle_2_each_birth_of_a_layer(compile: bool) -> None:
    assert births_with_equal_bits(small_plan("uniform"), "cpu", compile) == [True] * 3


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_sgt_oracle_2_each_birth_of_a_layer_on_the_gpu(
    compile: bool, record_property: Callable[[str, object], None]
) -> None:
    """`pytest -s` shows whether deeper loops are born with equal bits too, `--junit-xml` keeps it."""
    plan = Plan.uniform(layers=3, width=768, heads=12, vocabulary=512, context=1024)
    equal = births_with_equal_bits(plan, "cuda", compile)
    record_property("equal bits at births", equal)
    print(f"compile={compile}: equal bits at births 1, 2, 3: {equal}")
    assert equal[0]
