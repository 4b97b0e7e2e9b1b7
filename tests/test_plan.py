"""Plans against published sizes, hand-written formulas and golden values (prism.md 5.2 and 6, sgt.md O13)."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import hashlib
import inspect
import json
import os
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meristem.errors import InputError, RunError
from meristem.growth.edits import LoopHeads, RepeatBlock
from meristem.model.encoder import build_model
from meristem.plan import Gates, LayerPlan, Loop, Plan, Rotary, Shape, default_feed_forward
from meristem.plan.costs import Cost, Flops, TrainingOptions
from model.helpers import variants

SIZES: dict[str, dict[str, Any]] = {
    "small": {"layers": 12, "width": 768, "heads": 12},
    "medium": {"layers": 24, "width": 1024, "heads": 16},
    "large": {"layers": 24, "width": 1536, "heads": 16},
}
SCHEDULES = ("uniform", "prism", "linear", "geometric", "cosine", "reverse", "bump", "shuffle")


# --- oracles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "feed_forward", "total"),
    [("small", 2048, 123_587_328), ("medium", 2736, 353_944_576), ("large", 4096, 756_819_456)],
)
def test_oracle_2_totals(size: str, feed_forward: int, total: int) -> None:
    assert default_feed_forward(SIZES[size]["width"]) == feed_forward
    for schedule in SCHEDULES:
        assert Plan.scheduled(schedule, **SIZES[size]).parameters == total


@pytest.mark.parametrize("size", SIZES)
def test_oracle_3_heads_fill_the_width(size: str) -> None:
    for schedule in SCHEDULES:
        plan = Plan.scheduled(schedule, **SIZES[size])
        assert all(layer.heads * layer.head_dim == plan.width for layer in plan.layers)
        assert plan.kv_heads == plan.heads


@pytest.mark.parametrize("size", SIZES)
def test_oracle_6_flops_are_equal_integers(size: str) -> None:
    uniform = Plan.uniform(**SIZES[size])
    d, f, v, t, layers = uniform.width, uniform.feed_forward, 50304, 1024, len(uniform.layers)
    matrices = layers * (8 * d * d + 6 * d * f) + 2 * v * d
    expected = Flops(full=matrices + layers * 4 * t * d, causal=matrices + layers * 2 * (t + 1) * d)
    for schedule in SCHEDULES:
        cost = Plan.scheduled(schedule, **SIZES[size]).cost
        assert cost.forward == expected
        assert cost.training == Flops(3 * expected.full, 3 * expected.causal)
        assert cost.kv_bytes_per_token == 2 * 2 * d * layers


def test_all_builders_take_the_shape_that_from_heads_takes() -> None:
    taken = inspect.signature(Plan.from_heads).parameters.keys() - {"heads", "width"}
    assert Shape.__annotations__.keys() == taken


def test_causal_flops_are_the_mean_over_positions() -> None:
    """Position t attends to t keys: two products of one query with t keys, each two FLOPs per channel."""
    plan = Plan.uniform(layers=1, width=64, heads=4, context=37, vocabulary=10)
    forward = plan.cost.forward
    outside = 2 * (4 * 64 * 64 + 3 * 64 * plan.feed_forward + 10 * 64)
    positions = range(1, 37 + 1)
    assert (forward.causal - outside) * len(positions) == sum(2 * 2 * 64 * t for t in positions)
    assert (forward.full - outside) * len(positions) == sum(2 * 2 * 64 * 37 for _ in positions)


@pytest.mark.parametrize(("size", "ratio"), [("small", 0.7361), ("medium", 0.84375), ("large", 0.890625)])
def test_oracle_6_softmax_ratio(size: str, ratio: float) -> None:
    uniform, prism = Plan.uniform(**SIZES[size]).cost, Plan.prism(**SIZES[size]).cost
    assert uniform.softmax_elements == SIZES[size]["layers"] * SIZES[size]["heads"] * 1024**2
    assert prism.softmax_elements / uniform.softmax_elements == pytest.approx(ratio, abs=5e-5)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_sgt_oracle_13_loop_overhead(passes: int) -> None:
    """The oracle's feed-forward has 8 d^2 weights, which is 3 d f at f = 2048."""
    plan = Plan.uniform(**SIZES["small"], feed_forward=2048)
    base, grown = plan.cost.forward, LoopHeads(7, (2, 9), passes).apply(plan).cost.forward
    assert 100 * (grown.full - base.full) / base.full / passes == pytest.approx(0.460, abs=0.01)
    assert 100 * (grown.causal - base.causal) / base.causal / passes == pytest.approx(0.394, abs=0.01)
    # Measured with a FLOP counter over 1024 tokens (sgt.md 3.1).
    assert 1024 * (grown.full - base.full) == passes * 1_342_177_280


def average_overhead(passes: int, birth: int, steps: int, base: float, loop: float) -> float:
    """Percent over a run: three layers, a birth after every `birth` steps, each loop running from then on."""
    births = range(birth, 3 * passes * birth + 1, birth)
    return 100 * sum(1 - step / steps for step in births) * loop / base


@pytest.mark.parametrize(
    ("kind", "after", "average", "blocks"),
    [("full", (1.38, 2.76, 4.14), (1.24, 2.28, 3.11), 18.2), ("causal", (1.18, 2.37, 3.55), (1.07, 1.95, 2.67), 17.7)],
)
def test_sgt_oracle_13_target_size(
    kind: str, after: tuple[float, ...], average: tuple[float, ...], blocks: float
) -> None:
    """The table of sgt.md 3.2: three layers, after growth and averaged over a run with births every 5 % of it."""
    plan = Plan.uniform(**SIZES["small"], feed_forward=2048)
    base = getattr(plan.cost.forward, kind)
    repeated = plan
    for layer in (3, 6, 9):
        repeated = RepeatBlock(layer).apply(repeated)
    assert 100 * (getattr(repeated.cost.forward, kind) / base - 1) == pytest.approx(blocks, abs=0.05)
    for passes in (1, 2, 3):
        grown = plan
        for layer in (3, 6, 9):
            grown = LoopHeads(layer, (0, 5), passes).apply(grown)
        more = getattr(grown.cost.forward, kind) - base
        assert 100 * more / base == pytest.approx(after[passes - 1], abs=0.01)
        found = average_overhead(passes, 5, 100, base, more / (3 * passes))
        assert found == pytest.approx(average[passes - 1], abs=0.01)


@pytest.mark.parametrize(
    ("layers", "width", "heads", "millions", "blocks", "loops"),
    [
        (12, 768, 12, 275.4, 20.24, (1.47, 2.43, 3.20)),
        (16, 1024, 16, 572.8, 16.42, (0.85, 1.37, 1.78)),
        (16, 1536, 16, 1211.5, 17.01, (0.74, 1.19, 1.55)),
    ],
    ids=["275M", "573M", "1.2B"],
)
def test_sgt_oracle_13_published_sizes(
    layers: int, width: int, heads: int, millions: float, blocks: float, loops: tuple[float, ...]
) -> None:
    """The table of sgt.md 3.3, with the accounting and the run of the paper: 5035 steps, births every 250.

    Its embeddings are untied and both count in backward; in the 250 steps after a layer's birth all heads are counted.
    """
    plan = Plan.uniform(layers=layers, width=width, heads=heads, context=4096, feed_forward=8 * width)
    assert (plan.parameters + 50304 * width) / 1e6 == pytest.approx(millions, abs=0.1)
    base = plan.cost.training.full + 4 * 50304 * width
    one = LoopHeads(5, (0, 1), 1).apply(plan).cost.training.full - plan.cost.training.full
    every = LoopHeads(5, tuple(range(heads)), 1).apply(plan).cost.training.full - plan.cost.training.full
    repeated = plan
    for layer in (3, 6, 9):
        repeated = RepeatBlock(layer).apply(repeated)
    assert 100 * (repeated.cost.training.full - plan.cost.training.full) / base == pytest.approx(blocks, abs=0.01)
    fading = 100 * 3 * 250 / 5035 * (every - one) / base
    for passes in (1, 2, 3):
        found = average_overhead(passes, 250, 5035, base, one) + fading
        assert found == pytest.approx(loops[passes - 1], abs=0.01)


def test_repeated_blocks_cost_all_but_parameters_again() -> None:
    plan = Plan.prism(**SIZES["small"])
    for index in (0, 7):
        one = plan.layer_cost(plan.layers[index])
        more = RepeatBlock(index, 2).apply(plan).cost
        assert more.parameters == plan.parameters
        assert more.forward == plan.cost.forward + one.forward * 2
        assert more.training == plan.cost.training + one.training * 2
        assert more.softmax_elements == plan.cost.softmax_elements + 2 * one.softmax_elements
        assert more.kv_bytes_per_token == plan.cost.kv_bytes_per_token + 2 * one.kv_bytes_per_token


def test_gates_cost_a_parameter_each_if_they_are_trained() -> None:
    plan = Plan.prism(**SIZES["small"])
    gated = replace(plan, gates=Gates(passes=3, heads=2))
    assert gated.parameters == plan.parameters + 12 * 3 * 2
    assert gated.cost.forward == plan.cost.forward
    assert replace(plan, gates=Gates(3, 2, trained=False)).cost == plan.cost


def test_loops_cost_no_parameters_and_cache_their_own_keys_and_values() -> None:
    plan = Plan.uniform(**SIZES["small"])
    grown = LoopHeads(3, (0, 1), 1).apply(plan).cost
    assert grown.parameters == plan.parameters
    share = grown.kv_bytes_per_token / plan.cost.kv_bytes_per_token - 1
    assert share == pytest.approx(2 / (12 * 12))  # 1.4 % for each loop (sgt.md 3.4)
    assert grown.softmax_elements - plan.cost.softmax_elements == 2 * 1024**2


# --- grouped keys and values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "width", "group", "kv_heads", "kv_width"),
    [
        ((*[4] * 3, *[8] * 3, *[16] * 18), 1024, 4, (*[1] * 3, *[2] * 3, *[4] * 18), 256),
        ((*[4] * 3, *[8] * 3, *[16] * 18), 1024, 2, (*[2] * 3, *[4] * 3, *[8] * 18), 512),
        ((*[6] * 3, *[12] * 3, *[16] * 18), 1536, 2, (*[3] * 3, *[6] * 3, *[8] * 18), 768),
        ((3, 3, 6, 6, 6, 6, *[12] * 6), 768, 3, (1, 1, 2, 2, 2, 2, *[4] * 6), 256),
    ],
    ids=["medium by 4", "medium by 2", "large by 2", "small by 3"],
)
def test_grouped_plans_stay_neutral(
    heads: tuple[int, ...], width: int, group: int, kv_heads: tuple[int, ...], kv_width: int
) -> None:
    plan = Plan.from_heads(heads, width=width, kv_group=group)
    assert plan.kv_heads == kv_heads
    assert {layer.kv_width for layer in plan.layers} == {kv_width}
    uniform = Plan.uniform(layers=len(heads), width=width, heads=heads[-1], kv_group=group)
    assert plan.parameters == uniform.parameters
    assert plan.cost.forward == uniform.cost.forward
    assert plan.cost.kv_bytes_per_token == 2 * 2 * kv_width * len(heads) == uniform.cost.kv_bytes_per_token
    ungrouped = Plan.from_heads(heads, width=width)
    assert ungrouped.parameters - plan.parameters == len(heads) * 2 * width * (width - kv_width)


@pytest.mark.parametrize(
    ("size", "group", "allowed"),
    [("small", 3, [1]), ("medium", 3, [1, 2, 4]), ("medium", 8, [1, 2, 4]), ("large", 4, [1, 2])],
)
def test_refused_groups_name_the_allowed_ones(size: str, group: int, allowed: list[int]) -> None:
    with pytest.raises(InputError, match="kv_group") as caught:
        Plan.prism(**SIZES[size], kv_group=group)
    assert caught.value.value == group
    assert str(allowed) in str(caught.value)


def test_multi_query_is_not_neutral_and_says_so() -> None:
    prism = Plan.prism(**SIZES["small"], force_multi_query=True)
    uniform = Plan.uniform(**SIZES["small"], force_multi_query=True)
    assert set(prism.kv_heads) == {1}
    # K and V are as wide as one head: 256, 128 and 96 in two layers each, where the uniform plan has 64.
    wider = 2 * (256 - 64) + 2 * (128 - 64) + 2 * (96 - 64)
    assert prism.parameters - uniform.parameters == 2 * 768 * wider
    assert prism.cost.kv_bytes_per_token - uniform.cost.kv_bytes_per_token == 2 * 2 * wider
    assert any("key/value" in warning and "[3, 6, 8, 12]" in warning for warning in prism.warnings())
    assert not any("key/value" in warning for warning in uniform.warnings())


def test_explicit_head_counts() -> None:
    plan = Plan.from_heads([2, 4, 4, 6], width=192, vocabulary=320, context=256, feed_forward=100)
    assert plan.heads == (2, 4, 4, 6)
    assert plan.head_dims == (96, 48, 48, 32)
    assert (plan.vocabulary, plan.context, plan.feed_forward) == (320, 256, 100)


# --- properties -------------------------------------------------------------------------------------------


@st.composite
def layer_plans(draw: Any) -> LayerPlan:
    heads = draw(st.integers(1, 16))
    kv_heads = draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0]))
    chosen = st.lists(st.integers(0, heads - 1), min_size=1, unique=True).map(tuple)
    loop = draw(st.none() | st.builds(Loop, chosen, st.integers(1, 4)))
    repeats = draw(st.integers(0, 3)) if loop is None else 0
    return LayerPlan(heads, 2 * draw(st.integers(1, 160)), kv_heads, loop, repeats)


sizes = st.integers(1, 5000)
plans = st.builds(
    Plan,
    *[sizes] * 4,
    st.lists(layer_plans(), min_size=1, max_size=6).map(tuple),
    st.none() | st.builds(Gates, st.integers(4, 6), st.integers(16, 20), st.booleans()),
    qk_norm=st.booleans(),
)
plans = st.builds(lambda plan, variant: replace(plan, **variant), plans, variants())


@given(plan=plans)
def test_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.digest == plan.digest


@given(one=plans, other=plans)
def test_digests_are_equal_exactly_for_equal_plans(one: Plan, other: Plan) -> None:
    assert (one.digest == other.digest) == (one == other)


@pytest.mark.parametrize("field", ["width", "vocabulary", "context", "feed_forward"])
def test_every_size_is_in_the_digest(field: str) -> None:
    plan = Plan.prism(**SIZES["small"])
    changed = replace(plan, **{field: getattr(plan, field) + 1})
    assert changed.digest != plan.digest


def test_digest_golden_value() -> None:
    """The canonical form is written out here, so a change of the format cannot pass unnoticed."""
    plan = Plan(8, 16, 32, 24, (LayerPlan(2, 4, 1), LayerPlan(1, 6, 1, Loop((0,), 2))))
    canonical = (
        '{"context":32,"feed_forward":24,"format":"meristem-plan/1","layers":['
        '{"head_dim":4,"heads":2,"kv_heads":1,"loop":null},'
        '{"head_dim":6,"heads":1,"kv_heads":1,"loop":{"heads":[0],"passes":2}}],"vocabulary":16,"width":8}'
    )
    assert plan.digest == hashlib.sha256(canonical.encode()).hexdigest()
    assert Plan.prism(**SIZES["small"]).digest == "d367e72a727d59b24bd39e710af0f8cbbf598053e86d032e69ce2598cc0d1490"


def test_digest_of_a_grown_plan() -> None:
    layers = (LayerPlan(2, 4, 1, repeats=2), LayerPlan(4, 6, 2, Loop((3, 0), 2)))
    plan = Plan(8, 16, 32, 24, layers, Gates(passes=3, heads=2))
    canonical = (
        '{"context":32,"feed_forward":24,"format":"meristem-plan/1",'
        '"gates":{"heads":2,"passes":3,"trained":true},"layers":['
        '{"head_dim":4,"heads":2,"kv_heads":1,"loop":null,"repeats":2},'
        '{"head_dim":6,"heads":4,"kv_heads":2,"loop":{"heads":[3,0],"passes":2}}],"vocabulary":16,"width":8}'
    )
    assert plan.digest == hashlib.sha256(canonical.encode()).hexdigest()
    assert Plan.from_json(canonical) == plan
    variants = [
        replace(plan, gates=None),
        replace(plan, gates=Gates(3, 2, trained=False)),
        replace(plan, gates=Gates(2, 2)),
        replace(plan, gates=Gates(3, 3)),
        RepeatBlock(0, 1).apply(plan),
        RepeatBlock(0, 0).apply(plan),
        LoopHeads(1, (0, 3), 2).apply(plan),  # the order of heads is that of their gates
        replace(plan, qk_norm=True),
        replace(plan, qk_norm=True, qk_gain=True),
        replace(plan, qkv_bias=True),
        replace(plan, tied=False),
        replace(plan, norm_eps=1e-6),
        replace(plan, rotary=Rotary(500_000.0)),
        replace(plan, rotary=Rotary(factor=4.0)),
        replace(plan, rotary=Rotary(factor=4.0, band=(1.0, 4.0), context=32)),
        replace(plan, rotary=Rotary(factor=4.0, band=(1.0, 4.0), context=33)),
    ]
    assert len({plan.digest, *(variant.digest for variant in variants)}) == 1 + len(variants)


def test_files_from_before_growth_mean_what_they_meant() -> None:
    """They know nothing of gates and repeats. So does the file of a plan that has none."""
    old = (
        '{"format": "meristem-plan/1", "width": 8, "vocabulary": 16, "context": 32, "feed_forward": 24, "layers": ['
        '{"heads": 2, "head_dim": 4, "kv_heads": 1, "loop": null},'
        '{"heads": 1, "head_dim": 6, "kv_heads": 1, "loop": {"heads": [0], "passes": 2}}]}'
    )
    plan = Plan.from_json(old)
    assert plan == Plan(8, 16, 32, 24, (LayerPlan(2, 4, 1), LayerPlan(1, 6, 1, Loop((0,), 2))))
    assert plan.digest == "56d4cec06778697ed5a552431a7f20b38ceaba1f301fd2c5706cfe24dff5dc8c"
    assert json.loads(plan.to_json()) == json.loads(old)
    named = json.loads(old)
    named["gates"] = None
    named |= {"qk_norm": False, "qk_gain": False, "qkv_bias": False, "tied": True, "norm_eps": 1e-5, "rotary": {}}
    named["layers"][0]["repeats"] = 0
    assert Plan.from_dict(named).digest == plan.digest


@given(plan=plans, layer=layer_plans(), position=st.integers(0, 5))
def test_with_layer_changes_one_layer(plan: Plan, layer: LayerPlan, position: int) -> None:
    index = position % len(plan.layers)
    changed = plan.with_layer(index, layer)
    assert changed.layers[index] == layer
    assert changed.layers[:index] + changed.layers[index + 1 :] == plan.layers[:index] + plan.layers[index + 1 :]
    assert changed.with_layer(index, plan.layers[index]) == plan


@given(plan=plans)
def test_cost_is_the_sum_of_its_parts(plan: Plan) -> None:
    parts = [plan.outer_cost, *(plan.layer_cost(layer) for layer in plan.layers)]
    assert plan.cost == sum(parts, Cost())
    assert plan.parameters == sum(part.parameters for part in parts)
    assert plan.cost.forward.full == sum(part.forward.full for part in parts)


@given(plan=plans)
def test_parameters_are_those_of_the_matrices(plan: Plan) -> None:
    d, f = plan.width, plan.feed_forward
    shapes = [(plan.vocabulary, d), (d, 1), *([] if plan.tied else [(d, plan.vocabulary)])]
    for layer in plan.layers:
        q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        shapes += [(d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d), (d, 1), (d, 1)]
        shapes += [(q, 1), (kv, 1), (kv, 1)] * plan.qkv_bias + [(layer.head_dim, 1)] * 2 * plan.qk_gain
        if plan.gates is not None and plan.gates.trained:
            shapes.append((plan.gates.passes, plan.gates.heads))
    assert plan.parameters == sum(rows * columns for rows, columns in shapes)


@given(plan=plans)
def test_table_names_every_layer_and_the_digest(plan: Plan) -> None:
    lines = plan.table().splitlines()
    assert lines == str(plan).splitlines()
    assert plan.digest[:12] in lines[-1]
    covered: list[int] = []
    for row in lines[1 : next(i for i, text in enumerate(lines) if text.startswith("("))]:
        first, _, last = row.split()[0].partition("-")
        covered += range(int(first), int(last or first) + 1)
    assert covered == list(range(len(plan.layers)))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (LayerPlan(8, 16, 8), ""),
        (LayerPlan(8, 16, 8, Loop((3, 7), 2)), "h3,h7 x2"),
        (LayerPlan(8, 16, 8, Loop((5,), 1)), "h5 x1"),
        (LayerPlan(8, 16, 8, repeats=1), "block x1"),
        (LayerPlan(8, 16, 8, repeats=3), "block x3"),
    ],
)
def test_what_is_run_again_in_words(layer: LayerPlan, words: str) -> None:
    assert layer.run_again == words
    plain = LayerPlan(8, 16, 8)
    plan = Plan(128, 300, 64, 256, (plain, layer, plain))
    assert plan.is_looped == bool(words)
    header, *rows = plan.table().splitlines()
    first, last = header.index("run again"), header.index("run again") + len("run again")
    cells = [row[first:last].strip() for row in rows[: 3 if words else 1]]
    assert cells == (["-", words, "-"] if words else ["-"])


@given(plan=plans)
def test_a_bare_plan_runs_everything_once(plan: Plan) -> None:
    bare = plan.bare
    assert (bare.loops, bare.is_looped) == ({}, False)
    assert not any(layer.run_again for layer in bare.layers)
    assert (bare == plan) != plan.is_looped
    assert plan.is_looped == any(layer.run_again for layer in plan.layers)
    assert (bare.heads, bare.head_dims, bare.kv_heads, bare.gates) == (
        plan.heads,
        plan.head_dims,
        plan.kv_heads,
        plan.gates,
    )
    assert bare.parameters == plan.parameters
    assert bare.bare == bare
    assert bare.cost.forward.full <= plan.cost.forward.full


# --- memory -----------------------------------------------------------------------------------------------


@given(plan=plans, tokens=st.integers(1, 10**6), more=st.integers(1, 10**6))
def test_memory_grows_with_the_batch(plan: Plan, tokens: int, more: int) -> None:
    small, large = plan.memory(tokens), plan.memory(tokens + more)
    assert min(small.weights, small.gradients, small.optimizer, small.activations, small.loss) > 0
    assert small.total < large.total
    assert (small.weights, small.gradients, small.optimizer) == (
        large.weights,
        large.gradients,
        large.optimizer,
    )


@pytest.mark.parametrize("size", SIZES)
def test_memory_is_plausible(size: str) -> None:
    """16 to 18 bytes per parameter, and less than the 34 d bytes of activations per token and layer that Korthikanti
    et al. (2205.05198) count without the attention matrices: no dropout, and no stream is kept."""
    plan = Plan.prism(**SIZES[size])
    memory = plan.memory(16384)
    assert 16 <= (memory.weights + memory.gradients + memory.optimizer) / plan.parameters <= 18
    assert 20 <= memory.activations / (16384 * len(plan.layers) * plan.width) <= 26
    # The loss keeps a chunk of logits, never those of the whole batch.
    assert plan.memory(10**6).loss == memory.loss


@pytest.mark.parametrize("passes", [1, 3])
def test_a_loop_keeps_what_its_backward_needs_and_nothing_in_float32(passes: int) -> None:
    """In bf16 the normed stream, q, k, v and the attention's output of the looped heads; their log-sum-exp."""
    plan = Plan.prism(**SIZES["small"])
    for index, heads in ((2, (0, 5)), (9, (1, 2, 3))):
        m = len(heads) * plan.layers[index].head_dim
        grown = LoopHeads(index, heads, passes).apply(plan)
        kept = 2 * plan.width + 2 * 3 * m + 2 * m + 4 * len(heads)
        assert grown.memory(1000).activations - plan.memory(1000).activations == 1000 * passes * kept
        assert grown.memory(1000).total - plan.memory(1000).total == 1000 * passes * kept


def test_normed_queries_and_keys_cost_a_number_a_head_and_token() -> None:
    """For backward, and nothing else; heads of loops also their queries and keys before the norm, in bf16."""
    for plan in (Plan.prism(**SIZES["small"]), Plan.uniform(**SIZES["small"], kv_group=3, classes=4)):
        normed, heads = replace(plan, qk_norm=True), sum(plan.heads) + sum(plan.kv_heads)
        more = normed.cost.activation_bytes_per_token - plan.cost.activation_bytes_per_token
        assert more == 4 * heads
        assert replace(normed.cost, activation_bytes_per_token=0) == replace(plan.cost, activation_bytes_per_token=0)
        assert normed.memory(1000).total - plan.memory(1000).total == 1000 * more
        looped, plain = (LoopHeads(2, (0, 5), 3).apply(each).cost for each in (normed, plan))
        of_loop = 3 * (2 * 2 * 2 * plan.head_dims[2] + 4 * 2 * 2)
        assert looped.activation_bytes_per_token - plain.activation_bytes_per_token == more + of_loop


@pytest.mark.parametrize("value", [1, None, "true"])
def test_whether_heads_are_normed_is_a_bool(value: Any) -> None:
    plan = Plan.uniform(layers=1, width=8, heads=2)
    for build in (
        lambda: Plan.uniform(layers=1, width=8, heads=2, qk_norm=value),
        lambda: Plan.from_dict({**json.loads(plan.to_json()), "qk_norm": value}),
    ):
        with pytest.raises(InputError, match=rf"qk_norm = {value!r}: must be true or false"):
            build()


def test_all_ways_to_build_a_plan_know_normed_heads() -> None:
    size: dict[str, Any] = {"width": 768, "qk_norm": True}
    plans = [
        Plan.from_heads([3, 12], **size), Plan.uniform(layers=2, heads=12, **size),
        Plan.prism(layers=12, heads=12, **size), Plan.scheduled("reverse", layers=12, heads=12, **size),
    ]  # fmt: skip
    assert all(plan.qk_norm and plan.bare.qk_norm and plan.to_dict()["qk_norm"] for plan in plans)
    assert "queries and keys normed" in plans[0].table()
    assert "normed" not in replace(plans[0], qk_norm=False).table()


def test_memory_agrees_with_a_measured_step() -> None:
    """The steps on an H200 that the lab log reports: 32, 16 and 8 x 1024 tokens at 124M, 354M and 757M parameters."""
    file = Path(__file__).resolve().parents[1] / "results/2026-11-16-step-parts/steps.json"
    measured = {entry["size"]: entry["peak_gib"] for entry in json.loads(file.read_text())["results"]}
    for (name, peak), size, batch in zip(measured.items(), SIZES, (32, 16, 8), strict=True):
        estimate = Plan.uniform(**SIZES[size]).memory(batch * 1024).total / 2**30
        assert estimate == pytest.approx(peak, rel=0.12), name


GATED = replace(LoopHeads(1, (0, 2), 2).apply(Plan.from_heads((2, 4, 4), width=32)), gates=Gates(2, 2))


@pytest.mark.parametrize(
    "plan", [GATED, Plan.uniform(layers=2, width=32, heads=4, classes=3)], ids=["gates", "classes"]
)
def test_memory_of_processes_by_the_parameters_of_a_model(plan: Plan) -> None:
    """What each of them holds of the weights, gradients and moments of a model that was really built."""
    model = build_model(plan)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    blocks = [[p.numel() for p in block.parameters() if p.dim() == 2] for block in model.stack]
    count, matrices = sum(sizes.values()), sum(map(sum, blocks))
    one, ddp = plan.memory(1000), plan.memory(1000, world=8)
    assert (one.weights, one.gradients, one.optimizer) == (6 * count, 4 * count, 8 * count)
    # DDP has the gradients a second time, in the buckets in which they travel.
    assert ddp == replace(one, gradients=2 * one.gradients)
    # Muon keeps the momentum of a matrix, AdamW two moments.
    muon = plan.memory(1000, optimizer="muon")
    assert muon == replace(one, optimizer=4 * matrices + 8 * (count - matrices))
    for world in (2, 8):
        sharded = plan.memory(1000, optimizer="muon", parallel="fsdp", world=world)
        largest = max(map(sum, blocks))
        assert sharded.weights == ceil(4 * count / world) + 4 * (count - matrices) + 6 * largest
        assert sharded.gradients == ceil(4 * count / world) + 4 * (count - matrices) + 6 * largest
        assert sharded.optimizer == ceil(muon.optimizer / world)
        assert (sharded.activations, sharded.loss) == (one.activations, one.loss)
        assert sharded.gathered == 4 * count
    assert plan.memory(1000, parallel="fsdp") == one
    few = plan.memory(1, parallel="fsdp", world=8)  # whole weights are more than what a token needs
    held = few.weights + few.gradients + few.optimizer
    assert few.total == held + max(few.activations + few.loss, 4 * count)


def test_a_process_must_have_room_for_whole_weights() -> None:
    """Of a model that is shared out: when it is evaluated and grows."""
    plan, how = Plan.prism(**SIZES["small"]), TrainingOptions(parallel="fsdp", world=64)
    needed = plan.memory(1024, **how)
    held = needed.weights + needed.gradients + needed.optimizer
    plan.check_memory(1024, 1, needed.total + 2**20, **how)
    with pytest.raises(InputError, match=r"parameters = .*with gradients and optimizer"):
        plan.check_memory(1024, 1, held + 2 * plan.parameters, **how)
    with pytest.raises(InputError, match="world = 0"):
        plan.memory(1024, world=0)
    with pytest.raises(InputError, match="parallel = 'both'"):
        plan.memory(1024, parallel="both")  # type: ignore[arg-type]


# --- warnings ---------------------------------------------------------------------------------------------


def test_a_plan_without_trouble_has_no_warnings() -> None:
    assert Plan.uniform(**SIZES["small"]).warnings() == []
    assert Plan.prism(**SIZES["medium"], feed_forward=2688).warnings(tensor_parallel=4) == []


def test_a_feed_forward_that_fills_tiles_badly_is_warned_of() -> None:
    (warning,) = Plan.uniform(**SIZES["medium"]).warnings()
    assert "feed-forward 2736 is not a multiple of 128" in warning
    assert "2688 and 2816" in warning


@pytest.mark.parametrize(
    ("heads", "width", "tensor_parallel", "words"),
    [
        ([2, 12], 768, 1, ["layer 0", "384", "256"]),
        ([12, 12], 144, 1, ["layers 0, 1", "12", "multiple of 8"]),
        ([8, 8], 768, 1, ["layers 0, 1", "96", "FlashInfer", "64, 128, 256, 512"]),
        ([4, 8, 8], 512, 8, ["tensor-parallel size 8", "[4]"]),
        ([4, 4, 8], 512, 1, ["phase of 8 heads", "1 layer"]),
    ],
    ids=["above 256", "not a multiple of 8", "96", "tensor parallel", "short phase"],
)
def test_warnings(heads: list[int], width: int, tensor_parallel: int, words: list[str]) -> None:
    found = Plan.from_heads(heads, width=width).warnings(tensor_parallel)
    assert any(all(word in warning for word in words) for warning in found), found


@pytest.mark.parametrize(("size", "allowed"), [("small", {1}), ("medium", {1, 2, 4}), ("large", {1, 2})])
def test_tensor_parallel_sizes_divide_all_head_counts(size: str, allowed: set[int]) -> None:
    plan = Plan.prism(**SIZES[size])
    quiet = {n for n in range(1, 17) if not any("tensor-parallel" in w for w in plan.warnings(n))}
    assert quiet == allowed


# --- errors -----------------------------------------------------------------------------------------------


def message(error: Any) -> str:
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"heads": []}, ["layers", "0", "at least 1"]),
        ({"heads": [5]}, ["heads", "5", "768", "[1, 2, 3, 4, 6, 8, 12,"]),
        ({"heads": [0]}, ["heads", "0", "[1, 2, 3, 4, 6, 8, 12,"]),
        ({"heads": [2], "width": 90}, ["heads", "2", "odd", "45", "[1, 3, 5, 9, 15, 45]"]),
        ({"width": 0}, ["width", "0", "at least 1"]),
        ({"vocabulary": 0}, ["vocabulary", "0", "at least 1"]),
        ({"context": -1}, ["context", "-1", "at least 1"]),
        ({"feed_forward": 0}, ["feed_forward", "0", "at least 1"]),
        ({"kv_group": 0}, ["kv_group", "0", "at least 1"]),
    ],
)
def test_builder_errors(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Plan.from_heads(**{"heads": [3, 12], "width": 768, **arguments})
    assert all(word in message(caught) for word in words), message(caught)


def test_named_schedules_report_their_errors() -> None:
    with pytest.raises(InputError, match=r"schedule = 'prisma': must be one of prism, linear"):
        Plan.scheduled("prisma", layers=12, width=768, heads=12)
    with pytest.raises(InputError, match=r"layers = 0: must be at least 1"):
        Plan.prism(layers=0, width=768, heads=12)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 64, 1), ["heads", "0", "at least 1"]),
        ((4, 7, 4), ["head_dim", "7", "even"]),
        ((4, 8, 3), ["kv_heads", "3", "[1, 2, 4]"]),
        ((4, 8, 0), ["kv_heads", "0", "at least 1"]),
        ((4, 8, 2.0), ["kv_heads", "2.0", "integer"]),
        ((4, 8, 4, Loop((), 1)), ["loop.heads", "()", "0..3"]),
        ((4, 8, 4, Loop((4,), 1)), ["loop.heads", "(4,)", "0..3"]),
        ((4, 8, 4, Loop((1, 1), 1)), ["loop.heads", "(1, 1)", "distinct"]),
        ((4, 8, 4, Loop((True,), 1)), ["loop.heads", "(True,)", "0..3"]),
        ((4, 8, 4, Loop((1,), 0)), ["loop.passes", "0", "at least 1"]),
        ((4, 8, 4, None, -1), ["repeats", "-1", "at least 0"]),
        ((4, 8, 4, None, 1.0), ["repeats", "1.0", "integer"]),
        ((4, 8, 4, Loop((1,), 1), 2), ["repeats", "2", "must be 0 in a layer that has a loop"]),
    ],
)
def test_layer_errors(arguments: tuple[Any, ...], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        LayerPlan(*arguments)
    assert all(word in message(caught) for word in words), message(caught)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 2), ["gates.passes", "0", "at least 1"]),
        ((1, 0), ["gates.heads", "0", "at least 1"]),
        ((1, 2.0), ["gates.heads", "2.0", "integer"]),
        ((1, 2, 1), ["gates.trained", "1", "true or false"]),
    ],
)
def test_gate_errors(arguments: tuple[Any, ...], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Gates(*arguments)
    assert all(word in message(caught) for word in words), message(caught)


def test_loops_must_fit_the_gates() -> None:
    layers = (LayerPlan(4, 8, 4), LayerPlan(4, 8, 4, Loop((0, 3), 2)))
    assert Plan(8, 16, 32, 24, layers, Gates(2, 2)).loops == {1: Loop((0, 3), 2)}
    with pytest.raises(InputError, match=r"layers\[1\]\.loop\.passes = 2: must be at most gates\.passes, 1"):
        Plan(8, 16, 32, 24, layers, Gates(passes=1, heads=2))
    with pytest.raises(InputError, match=r"layers\[1\]\.loop\.heads = 2: must be at most gates\.heads, 1"):
        Plan(8, 16, 32, 24, layers, Gates(passes=2, heads=1))


def test_with_layer_outside_the_plan() -> None:
    plan = Plan.prism(**SIZES["small"])
    with pytest.raises(InputError, match=r"layer = 12: must be in 0\.\.11"):
        plan.with_layer(12, plan.layers[0])


def test_tensor_parallel_size_is_at_least_one() -> None:
    with pytest.raises(InputError, match=r"tensor_parallel = 0"):
        Plan.prism(**SIZES["small"]).warnings(tensor_parallel=0)


def set_field(path: str, value: Any) -> Any:
    """The JSON object of a small plan with the field at `path` set, or removed where the value is `...`."""
    plan = Plan(8, 16, 32, 24, (LayerPlan(2, 4, 1), LayerPlan(4, 6, 2, Loop((0, 3), 2))))
    data: Any = json.loads(plan.to_json())
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    target = data
    for key in parents:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", "other/1", ["format", "'other/1'", "meristem-plan/1"]),
        ("format", ..., ["format", "None", "meristem-plan/1"]),
        ("colour", 3, ["plan.colour", "3", "unknown field", "width", "layers"]),
        ("width", ..., ["plan.width", "missing"]),
        ("width", "8", ["plan.width", "'8'", "integer"]),
        ("width", 8.0, ["plan.width", "8.0", "integer"]),
        ("width", True, ["plan.width", "True", "integer"]),
        ("context", 0, ["plan.context", "0", "at least 1"]),
        ("layers", 3, ["layers", "3", "list"]),
        ("layers", [], ["layers", "at least 1"]),
        ("layers.0", 3, ["layers[0]", "3", "object"]),
        ("layers.1.dim", 3, ["layers[1].dim", "3", "unknown field", "head_dim"]),
        ("layers.1.heads", None, ["layers[1].heads", "None", "integer"]),
        ("layers.1.kv_heads", 3, ["kv_heads", "3", "[1, 2, 4]"]),
        ("layers.1.loop", ..., ["layers[1].loop", "missing"]),
        ("layers.1.loop", 2, ["layers[1].loop", "2", "object or null"]),
        ("layers.1.loop.depth", 2, ["layers[1].loop.depth", "2", "unknown field", "passes"]),
        ("layers.1.loop.heads", 0, ["layers[1].loop.heads", "0", "list"]),
        ("layers.1.loop.heads", ["0"], ["loop.heads", "'0'", "integers"]),
        ("layers.1.loop.heads", [0.0], ["loop.heads", "0.0", "integers"]),
        ("layers.0.repeats", "2", ["repeats", "'2'", "integer"]),
        ("layers.1.repeats", 1, ["repeats", "1", "must be 0 in a layer that has a loop"]),
        ("gates", 3, ["gates", "3", "object or null"]),
        ("gates", {"passes": 2, "heads": 2}, ["gates.trained", "missing"]),
        ("gates", {"passes": 2, "heads": 2, "trained": 1}, ["gates.trained", "1", "true or false"]),
        ("gates", {"passes": 0, "heads": 2, "trained": True}, ["gates.passes", "0", "at least 1"]),
        ("gates", {"passes": 2, "heads": 2, "trained": True, "size": 2}, ["gates.size", "2", "unknown field"]),
        ("gates", {"passes": 1, "heads": 2, "trained": True}, ["layers[1].loop.passes", "2", "gates.passes, 1"]),
    ],
)
def test_bad_json_names_the_field(path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Plan.from_dict(set_field(path, value))
    assert all(word in message(caught) for word in words), message(caught)


def test_a_plan_must_be_an_object() -> None:
    with pytest.raises(InputError, match="format = 'list'"):
        Plan.from_json("[]")


def test_files(tmp_path: Path) -> None:
    plan = Plan.prism(**SIZES["small"])
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert Plan.load(path) == plan
    for content, reason in ((b"{", "a JSON"), (b"\xff\xfe\x00", "a UTF-8 text")):
        path.write_bytes(content)
        with pytest.raises(RunError, match=rf"plan\.json: not {reason} file"):
            Plan.load(path)
    with pytest.raises(RunError, match=r"absent\.json: cannot be read"):
        Plan.load(tmp_path / "absent.json")


# --- classifiers, and heads that do not fill the width --------------------------------------------------------------


def test_a_classifier_costs_its_classes_instead_of_the_vocabulary() -> None:
    plan = Plan.uniform(layers=2, width=64, heads=4, vocabulary=100, context=10)
    classifier = replace(plan, classes=7)
    assert classifier.parameters == plan.parameters + 7 * 64 + 7
    assert classifier.cost.answer == 2 * 7 * 64
    assert classifier.cost.forward.full == plan.cost.forward.full - 2 * 64 * 100
    assert classifier.cost.forward.causal == classifier.cost.forward.full, "every token sees all others"
    assert classifier.cost.kv_bytes_per_token == 0
    training = classifier.cost.training_of(3, 10)
    assert training.full == training.causal == 3 * (30 * classifier.cost.forward.full + 3 * classifier.cost.answer)
    assert classifier.memory(100).loss < plan.memory(100).loss


def test_classifier_plans_in_json() -> None:
    plan = Plan.uniform(layers=1, width=64, heads=4, vocabulary=100, context=10)
    assert not {"classes", "pooling"} & set(plan.to_dict())
    for pooling in ("mean", "first"):
        classifier = replace(plan, classes=3, pooling=pooling)
        assert classifier.to_dict()["classes"] == 3
        assert Plan.from_json(classifier.to_json()) == classifier
    assert len({plan.digest, replace(plan, classes=3).digest, replace(plan, classes=3, pooling="first").digest}) == 3


def test_classifier_plans_in_words() -> None:
    text = str(Plan.uniform(layers=1, width=64, heads=4, vocabulary=100, context=10, classes=3))
    assert "3 classes read from all tokens" in text
    assert "causal" not in text
    assert "KV cache" not in text
    assert "read from the first" in str(Plan.uniform(layers=1, width=64, heads=4, classes=3, pooling="first"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"classes": 1}, ["classes = 1", "at least 2"]),
        ({"classes": True}, ["classes = True"]),
        ({"classes": 3, "pooling": "max"}, ["pooling = 'max'", "mean, first"]),
        ({"pooling": "first"}, ["pooling = 'first'", "no classes"]),
    ],
)
def test_classifier_errors(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        Plan.uniform(layers=1, width=64, heads=4, **arguments)
    assert all(word in str(error.value) for word in words)


def test_heads_of_a_given_dim_need_not_fill_the_width() -> None:
    plan = Plan.uniform(layers=3, width=768, heads=1, head_dim=64)
    assert plan.layers == (LayerPlan(1, 64, 1),) * 3
    assert Plan.from_heads([5, 7], width=100, head_dim=6).layers == (LayerPlan(5, 6, 5), LayerPlan(7, 6, 7))
    assert Plan.from_heads([4], width=100, head_dim=6, kv_group=2).layers == (LayerPlan(4, 6, 2),)
    with pytest.raises(InputError, match=r"head_dim = 64: .*uniform"):
        Plan.scheduled("prism", layers=12, width=768, heads=12, head_dim=64)
    with pytest.raises(InputError, match="head_dim = 7"):
        Plan.uniform(layers=1, width=768, heads=1, head_dim=7)


WRONG_TYPES: dict[str, Any] = {
    "layers": "2", "width": "64", "heads": [4], "vocabulary": 11.0, "context": None, "feed_forward": "16",
    "head_dim": "16", "kv_group": 1.0, "force_multi_query": "yes", "classes": "3", "pooling": 3,
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG_TYPES)
def test_builders_name_what_has_the_wrong_type(field: str) -> None:
    shape: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, field: WRONG_TYPES[field]}
    with pytest.raises(InputError, match=rf"^{field} = "):
        Plan.uniform(**shape)


def test_other_wrong_types_are_named_too() -> None:
    wrong: Any = 5
    with pytest.raises(InputError, match="heads = 5: must be a list of head counts"):
        Plan.from_heads(wrong, width=64)
    with pytest.raises(InputError, match="dims = 5: must be a list of head dims"):
        Plan.prism(layers=12, width=768, heads=12, dims=wrong)
    with pytest.raises(InputError, match="loop = 5: must be a Loop"):
        LayerPlan(2, 8, 2, loop=wrong)
    with pytest.raises(InputError, match=r"loop\.heads = 5: must be a tuple of heads"):
        LayerPlan(2, 8, 2, loop=Loop(wrong, 1))
    with pytest.raises(InputError, match="gates = 5: must be Gates"):
        Plan(16, 11, 8, 16, (LayerPlan(2, 8, 2),), gates=wrong)


# --- sizes that cannot be --------------------------------------------------------------------------------------------

HUGE = (10**9, 10**18, 10**400, 10**5000)


@pytest.mark.parametrize("value", HUGE, ids=("9", "18", "400", "5000"))
@pytest.mark.parametrize("field", ["layers", "width", "heads", "vocabulary", "context", "feed_forward", "classes"])
def test_huge_sizes_are_refused_before_anything_is_made(field: str, value: int) -> None:
    if field == "context" and value == 10**9:
        return  # a context that long is thinkable
    with pytest.raises(InputError) as caught:
        Plan.scheduled("uniform", **{**SIZES["small"], field: value})
    assert message(caught).startswith(f"{field} = ")
    assert len(message(caught)) < 400
    with pytest.raises(InputError, match=rf"{field} = "):
        Plan.uniform(**{**SIZES["small"], "head_dim": 64, field: value})


@pytest.mark.parametrize("value", HUGE, ids=("9", "18", "400", "5000"))
@pytest.mark.parametrize(
    "make",
    [
        lambda n: LayerPlan(n, 64, 1),
        lambda n: LayerPlan(12, 2 * n, 1),
        lambda n: LayerPlan(12, 64, n),
        lambda n: LayerPlan(12, 64, 12, Loop((n,), 1)),
        lambda n: LayerPlan(12, 64, 12, Loop((0,), n)),
        lambda n: LayerPlan(12, 64, 12, None, n),
        lambda n: Gates(n, 1),
        lambda n: Gates(1, n),
        lambda n: Plan.from_heads([12, n], width=768),
        lambda n: Plan.from_heads([n], width=768, head_dim=64),
        lambda n: Plan.from_heads([12], width=768, head_dim=2 * n),
        lambda n: Plan.from_heads([12], width=768, kv_group=n),
        lambda n: Plan.prism(**SIZES["small"]).memory(n * 10**4),
        lambda n: Plan.prism(**SIZES["small"]).warnings(n),
    ],
)
def test_huge_parts_are_refused(make: Any, value: int) -> None:
    with pytest.raises(InputError) as caught:
        make(value)
    assert len(message(caught)) < 400


def test_the_largest_plans_are_still_quick_and_their_texts_short() -> None:
    plan = Plan.uniform(layers=2**14, width=768, heads=8)
    assert len(plan.warnings()[0]) < 1000  # head dim 96, in all layers
    with pytest.raises(InputError, match="layers = 16385"):
        Plan(768, 100, 10, 10, (LayerPlan(1, 2, 1),) * (2**14 + 1))
    with pytest.raises(InputError, match="layers = 16385"):
        Plan.from_dict({**Plan.prism(**SIZES["small"]).to_dict(), "layers": [None] * (2**14 + 1)})
    with pytest.raises(InputError, match=r"heads = 17: must divide width 720720.* and 220 more") as caught:
        Plan.from_heads([17], width=720720)
    assert len(message(caught)) < 300


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "", "NaN", '{"width": ' + "9" * 5000])
def test_no_text_is_a_traceback(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        Plan.from_json(text)
    assert len(message(caught)) < 500
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RunError, match=r"plan\.json: "):
        Plan.load(tmp_path / "plan.json")


def test_a_pipe_is_no_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    for path in (tmp_path / "plan.json", Path("/dev/zero"), tmp_path):
        with pytest.raises(RunError, match="cannot be read"):
            Plan.load(path)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.sampled_from([*HUGE, -1, 0, 1, 2, -(10**400)]),
    st.lists(st.integers(-1, 3), max_size=2), st.sampled_from([[[1]], {}, {"heads": None}]),
)  # fmt: skip


def test_a_plan_comes_back_from_its_dict() -> None:
    plan = Plan.uniform(layers=3, width=64, heads=4, vocabulary=10, context=8, qk_norm=True)
    plan = replace(plan, gates=Gates(2, 2)).with_layer(1, LayerPlan(4, 16, 4, Loop((0, 1), 2, (1,))))
    assert Plan.from_dict(plan.to_dict()) == plan
    assert json.loads(plan.to_json()) == plan.to_dict()


@given(st.data())
def test_no_value_in_a_plan_is_a_traceback(data: st.DataObject) -> None:
    plan = Plan.uniform(layers=3, width=64, heads=4, vocabulary=10, context=8, classes=3)
    plan = replace(plan, gates=Gates(2, 2)).with_layer(1, LayerPlan(4, 16, 4, Loop((0, 1), 2)))
    content = plan.to_dict()
    objects = [content, content["gates"], *content["layers"], content["layers"][1]["loop"]]
    inner, key = data.draw(st.sampled_from([(inner, key) for inner in objects for key in inner]))
    inner[key] = data.draw(ANYTHING)
    try:
        Plan.from_dict(content).table()
    except InputError as error:
        assert len(str(error)) < 600  # noqa: PT017


# --- memory ----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_named() -> None:
    plan, gib = Plan.prism(**SIZES["small"]), 2**30
    tokens, total = 8 * 1024, plan.memory(8 * 1024).total
    plan.check_memory(tokens, 8, total + 8 * 8 * 1025)
    cases = [
        ((tokens, 8, total), "batch_tokens = 8192", f"needs about {total / gib:.1f} GiB for the whole training step"),
        ((tokens, 10**12, 64 * gib), "batch_size = 1000000000000", "GiB for the ids of so many sequences of 1,024"),
        (
            (tokens, 8, gib),
            "parameters = 123587328",
            "needs about 2.1 GiB with gradients and optimizer, the machine has",
        ),
        ((2**40, 8, 64 * gib), "batch_tokens = 1099511627776", "the machine has 64.0"),
        ((10**400, 8, gib), "batch_tokens = 1000", "must be at most"),
        ((tokens, 10**400, gib), "batch_size = 1000", "must be at most"),
    ]
    for arguments, field, reason in cases:
        with pytest.raises(InputError) as caught:
            plan.check_memory(*arguments)
        assert message(caught).startswith(field)
        assert reason in message(caught)
        assert len(message(caught)) < 400


@pytest.mark.parametrize(
    ("variant", "field", "words"),
    [
        ({"tied": 1}, "tied", "true or false"),
        ({"qkv_bias": "yes"}, "qkv_bias", "true or false"),
        ({"qk_gain": True}, "qk_gain", "set qk_norm too"),
        ({"norm_eps": 0.0}, "norm_eps", "above 0"),
        ({"norm_eps": 1}, "norm_eps", "above 0"),
        ({"rotary": 10_000}, "rotary", "must be an object"),
        ({"rotary": {"theta": 1e4}}, "rotary.theta", "unknown field"),
        ({"rotary": {"base": 1}}, "rotary.base", "above 1"),
        ({"rotary": {"base": "high"}}, "rotary.base", "above 1"),
        ({"rotary": {"factor": 0.5}}, "rotary.factor", "1 or above"),
        ({"rotary": {"factor": 2.0, "band": [1.0, 4.0]}}, "rotary.band", "rotary.context"),
        ({"rotary": {"factor": 2.0, "band": [4.0, 1.0], "context": 64}}, "rotary.band", "the lower first"),
        ({"rotary": {"factor": 2.0, "band": 3, "context": 64}}, "rotary.band", "two numbers"),
        ({"rotary": {"factor": 2.0, "band": [1.0, 4.0], "context": 0}}, "rotary.context", "at least 1"),
        ({"tied": False, "classes": 3, "pooling": "mean"}, "tied", "language models"),
    ],
)
def test_variants_that_cannot_be_are_refused_by_name(variant: dict[str, Any], field: str, words: str) -> None:
    plan = Plan(8, 16, 32, 24, (LayerPlan(2, 4, 1),)).to_dict()
    with pytest.raises(InputError, match=words) as caught:
        Plan.from_dict(plan | variant)
    assert caught.value.field == field


def test_equal_rotations_are_equal_plans() -> None:
    plan = Plan(8, 16, 32, 24, (LayerPlan(2, 4, 1),))
    whole, real = (replace(plan, rotary=Rotary(base, 8, (1, 4), 64)) for base in (500_000, 500_000.0))
    assert whole == real
    assert whole.digest == real.digest
