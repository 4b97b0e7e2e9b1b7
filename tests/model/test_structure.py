"""What a plan builds: shapes, counts, weights and FLOPs, all exact (prism.md 6, oracles 1 to 6)."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meristem.errors import InputError
from meristem.model import Decoder
from meristem.model.block import Block
from meristem.model.rotary import RotaryTables
from meristem.model.transformer import Watch
from meristem.plan import LayerPlan, Plan

from .helpers import ARMS, SCHEDULES, SIZES, lively, plans, random_tokens, small_plan


def shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def parameters(model: Decoder) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("schedule", ARMS)
@pytest.mark.parametrize("kv_group", [1, 2])
def test_oracle_1_shapes_do_not_depend_on_the_schedule(schedule: str, kv_group: int) -> None:
    uniform = lively(small_plan("uniform", kv_group=kv_group))
    model = Decoder(small_plan(schedule, kv_group=kv_group))
    assert list(shapes(model).items()) == list(shapes(uniform).items())
    assert parameters(model) == parameters(uniform)
    model.load_state_dict(uniform.state_dict(), strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, uniform.state_dict()[name])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("size", "total", "tables"),
    [("small", 123_587_328, 4), ("medium", 353_944_576, 3), ("large", 756_819_456, 3)],
)
def test_oracles_1_2_4_at_published_sizes(size: str, total: int, tables: int, schedule: str) -> None:
    with torch.device("meta"):
        model = Decoder(Plan.scheduled(schedule, **SIZES[size]))
        uniform = Decoder(Plan.uniform(**SIZES[size]))
    assert shapes(model) == shapes(uniform)
    assert parameters(model) == total == model.plan.parameters
    expected = 1 if schedule == "uniform" else tables
    assert len(list(model.rotary.buffers())) == 2 * expected


def test_oracle_4_layers_share_tables_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan("shuffle")
    model = Decoder(plan)
    used: list[tuple[int, int, int]] = []
    original = Block.forward

    def forward(
        self: Block, x: Tensor, branch: Tensor, rope: tuple[Tensor, Tensor], *rest: Any
    ) -> tuple[Tensor, Tensor]:
        cos, sin = (table.untyped_storage().data_ptr() for table in rope)
        used.append((self.attention.layer.head_dim, cos, sin))
        return original(self, x, branch, rope, *rest)

    monkeypatch.setattr(Block, "forward", forward)
    model(random_tokens(plan))
    assert [dim for dim, *_ in used] == list(plan.head_dims)
    assert len(set(used)) == len(set(plan.head_dims)) == 4
    assert not [name for name in model.state_dict() if "rotary" in name]


@pytest.mark.parametrize("schedule", ARMS)
def test_oracle_5_equal_seeds_give_equal_weights(schedule: str) -> None:
    uniform, model = Decoder(small_plan("uniform"), seed=7), Decoder(small_plan(schedule), seed=7)
    for (name, mine), theirs in zip(model.named_parameters(), uniform.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    other = Decoder(small_plan(schedule), seed=8)
    assert not torch.equal(other.embedding.weight, model.embedding.weight)
    assert not torch.equal(other.blocks[0].attention.qkv.weight, model.blocks[0].attention.qkv.weight)  # type: ignore[union-attr,arg-type]


def test_initial_scales() -> None:
    """N(0, 0.02), and 0.02 / sqrt(2 L) for the two products that write to the stream (prism.md 3.3)."""
    model = Decoder(Plan.uniform(layers=8, width=256, heads=4, vocabulary=1024))
    for name, weight in model.state_dict().items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        residual = name.endswith(("out.weight", "down.weight"))
        assert float(weight.std()) == pytest.approx(0.005 if residual else 0.02, rel=0.02), name
        assert abs(float(weight.mean())) < 5 * 0.02 / weight.numel() ** 0.5, name


def count_flops(model: Decoder, tokens: Tensor, *, backward: bool, watch: Watch | None = None) -> int:
    targets = tokens.roll(-1, dims=1)
    # The math kernel is the only one that computes, and shows to the counter, the whole square.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        if backward:
            loss = model.loss(tokens, targets, watch=watch)
            loss.backward()
        else:
            with torch.no_grad():
                model.loss(tokens, targets, watch=watch)
    return int(counter.get_total_flops())


def saved_by_loops(plan: Plan, positions: int) -> int:
    """What the plan counts for loops, forward, less what is computed unless each pass has to be seen.

    The plan has 8 d m per token and pass, for the products of m channels with the stream. If there is more than one
    pass, the first makes 4 m numbers of the stream, 8 d m, and one product writes for all, 2 d m; each of the others is
    a product of m with 4 m numbers, 8 m^2, whose weight is a product of weights, 8 d m^2 whatever the batch.
    """
    saved, d = 0, plan.width
    if plan.qkv_bias or plan.qk_gain:  # these heads cannot go by what was added to the stream
        return 0
    for index, loop in plan.loops.items():
        m, passes = len(loop.heads) * plan.head_dims[index], loop.passes
        if passes > 1:
            saved += positions * (passes * 8 * d * m - 10 * d * m - (passes - 1) * 8 * m * m) - 8 * d * m * m
    return saved


def assert_counted_as_planned(plan: Plan) -> None:
    """Parameters, and FLOPs forward and with backward."""
    model, batch = Decoder(plan), 3
    assert parameters(model) == plan.parameters
    tokens = random_tokens(plan, batch)
    positions = batch * plan.context
    forward, training = positions * plan.cost.forward.full, positions * plan.cost.training.full
    saved = saved_by_loops(plan, positions)
    assert count_flops(model, tokens, backward=False) == forward - saved
    assert count_flops(model, tokens, backward=True) == training - 3 * saved
    assert count_flops(model, tokens, backward=True, watch=lambda *seen: None) == training


@settings(max_examples=25, deadline=None)
@given(plan=plans())
def test_oracles_2_and_6_counted_parameters_and_flops_are_those_of_the_plan(plan: Plan) -> None:
    assert_counted_as_planned(plan)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kv_group", [1, 2])
def test_oracle_6_counted_flops_do_not_depend_on_the_schedule(schedule: str, kv_group: int) -> None:
    plan = small_plan(schedule, kv_group=kv_group)
    uniform = small_plan("uniform", kv_group=kv_group)
    tokens = random_tokens(plan)
    for backward in (False, True):
        counted = count_flops(Decoder(plan), tokens, backward=backward)
        assert counted == count_flops(Decoder(uniform), tokens, backward=backward)


def test_logits_cost_as_much_as_the_loss() -> None:
    plan = small_plan()
    model, tokens = Decoder(plan), random_tokens(plan)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    assert counter.get_total_flops() == tokens.numel() * plan.cost.forward.full


def test_loss_is_that_of_the_logits() -> None:
    plan = small_plan()
    model, tokens = lively(plan), random_tokens(plan)
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = -100
    expected = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets).loss, expected, rtol=1e-5, atol=0)
    assert model(tokens, targets).logits is None
    assert model(tokens).loss is None


def test_gradients_flow_to_every_weight() -> None:
    plan = small_plan()
    model, tokens = lively(plan), random_tokens(plan)
    model(tokens, tokens.roll(-1, dims=1)).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert bool((weight.grad != 0).any()), name


def test_too_many_positions() -> None:
    plan = small_plan(context=8)
    with pytest.raises(InputError, match=r"tokens = 9: .*8"):
        Decoder(plan)(torch.zeros(1, 9, dtype=torch.long))


# --- room for growth --------------------------------------------------------------------------------------


def outputs_of_blocks(model: Decoder, tokens: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, out: found.append(out[0] + out[1])) for block in model.blocks]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def test_exchanged_blocks_equal_exchanged_weights() -> None:
    """Nothing in a block is indexed by its depth."""
    plan = small_plan("uniform")
    one, other = lively(plan), lively(plan)
    tokens = random_tokens(plan)
    before = one(tokens).logits
    one.blocks[1], one.blocks[4] = one.blocks[4], one.blocks[1]
    source = {name: value.clone() for name, value in other.state_dict().items()}
    names = {"blocks.1.": "blocks.4.", "blocks.4.": "blocks.1."}
    exchanged = {name: source[names.get(name[:9], name[:9]) + name[9:]] for name in source}
    other.load_state_dict(exchanged)
    assert torch.equal(one(tokens).logits, other(tokens).logits)
    assert not torch.allclose(one(tokens).logits, before, atol=1e-2)


def test_a_block_can_be_replaced_by_one_of_another_plan() -> None:
    """Growth replaces a layer in place: blocks before it do not notice, those after it take its stream."""
    plan = small_plan()
    layer = LayerPlan(3, 20, 1)  # 60 query channels in a model of width 96, and a head dim of its own
    grown = plan.with_layer(3, layer)
    model, tokens = lively(plan), random_tokens(plan)
    before = outputs_of_blocks(model, tokens)
    fresh = lively(grown, seed=5)
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("blocks.3.")}
    fresh.load_state_dict(state, strict=False)
    block = fresh.blocks[3]

    model.blocks[3] = block
    model.plan = grown
    model.rotary = RotaryTables(grown.head_dims, grown.context)
    after = outputs_of_blocks(model, tokens)
    for mine, theirs in zip(after[:3], before[:3], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(after, outputs_of_blocks(fresh, tokens), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.allclose(after[3], before[3], atol=1e-2)
    assert parameters(model) == grown.parameters
