"""Stacking: every copy has its target's shape, whatever the shapes are and whatever has grown meanwhile."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meristem import AddBlock, BlockLoop, Decoder, Incrt, InputError, LoopHeads, Plan, RandomBirths, Stack, StaticLoops
from meristem.growth.apply import apply_edit
from meristem.growth.edits import AddHead
from meristem.growth.head_surgery import newborn_head
from meristem.moves import Moves
from meristem.plan import Gates, LayerPlan


def plan_of(*layers: LayerPlan) -> Plan:
    return Plan(width=16, layers=layers, vocabulary=23, context=8, feed_forward=32)


def stacked(policy: Stack, plan: Plan) -> Plan:
    """The plan after all stacks, without a model."""
    for step in policy.times:
        assert policy.needs(None, step, plan) == ()
        (change,) = policy.decide(None, step, plan, {}).changes
        plan = reduce(lambda had, edit: edit.apply(had), change.edits, plan)
    return plan


shapes = st.builds(
    lambda heads, dim, shared: LayerPlan(heads, 2 * dim, 1 if shared else heads),
    st.integers(1, 6), st.integers(1, 4), st.booleans(),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(shapes, min_size=4, max_size=4), st.sampled_from(["stack", "interleave"]), st.booleans())
def test_whatever_its_layers_the_target_is_reached(layers: list[LayerPlan], order: str, twice: bool) -> None:
    """Fewer or more heads, of any dim, with keys of their own or shared."""
    target = plan_of(*layers)
    policy = Stack(100, start_layers=1, at=(10, 20) if twice else (10,), order=order)  # type: ignore[arg-type]
    assert stacked(policy, policy.prepare(target)) == target


@settings(max_examples=30, deadline=None)
@given(st.lists(shapes, min_size=2, max_size=2), st.sampled_from(["stack", "interleave"]), st.booleans())
def test_a_plan_can_be_what_it_begins_with(layers: list[LayerPlan], order: str, twice: bool) -> None:
    """Then every block at the end has the shape of the one that it is a copy of."""
    start = plan_of(*layers)
    policy = Stack(100, start_layers=2, layers=8, at=(10, 20) if twice else (10,), order=order)  # type: ignore[arg-type]
    plan = policy.prepare(start)
    assert plan.layers == start.layers
    assert policy.prepare(plan) == plan
    expected = layers * 4 if order == "stack" else [layer for layer in layers for _ in range(4)]
    assert stacked(policy, plan).layers == tuple(expected)
    with pytest.raises(InputError, match=r"start_layers = 3: must be 2"):
        Stack(100, start_layers=3, layers=8).prepare(start)


def test_blocks_that_never_came_to_their_target_are_counted() -> None:
    """A run that was left with 2 of 8 blocks is the start of another only if that begins with 2."""
    left = Stack(100, start_layers=2).prepare(plan_of(*[LayerPlan(2, 4, 2)] * 8))
    assert Stack(100, start_layers=2, at=(10, 20)).prepare(left) == left
    for policy in (Stack(100), Stack(100, layers=8), Stack(100, layers=8, start_layers=4)):
        with pytest.raises(InputError, match=r"start_layers = (None|4): must be 2, the blocks that are there"):
            policy.prepare(left)


def test_a_copy_of_a_layer_that_has_grown_has_as_many_heads_as_fit_below_its_ceiling() -> None:
    policy = Stack(100, start_layers=1, at=(10,))
    plan = Incrt(start_heads=1).prepare(
        policy.prepare(plan_of(LayerPlan(4, 4, 4), LayerPlan(2, 8, 2), LayerPlan(2, 4, 2)))
    )
    grown = plan.with_layer(0, LayerPlan(3, 4, 3, ceiling=4))
    after = stacked(policy, grown)
    assert after.layers == (
        LayerPlan(3, 4, 3, ceiling=4), LayerPlan(2, 8, 2, ceiling=2), LayerPlan(2, 4, 2, ceiling=2),
    )  # fmt: skip


def test_what_a_copy_is_filled_up_with_changes_nothing_and_can_learn() -> None:
    """A copy with more heads of the same dim computes what its source does; all of its weights have gradients."""
    plan = plan_of(LayerPlan(2, 4, 2))
    wider = LayerPlan(3, 4, 3)
    tokens = torch.randint(23, (2, 8), generator=torch.Generator().manual_seed(0))
    copied, filled = (Decoder(plan, seed=1) for _ in range(2))
    apply_edit(copied, None, AddBlock(1, 0))
    apply_edit(filled, None, AddBlock(1, 0, wider, seed=5))
    torch.testing.assert_close(filled(tokens).logits, copied(tokens).logits, rtol=1e-5, atol=1e-6)
    attention = filled.stack[1].attention
    optimizer = torch.optim.SGD(filled.parameters(), lr=0.1)
    for _ in range(2):  # the first step gives the new columns of `out` something to write
        optimizer.zero_grad()
        filled(tokens, targets=tokens).loss.backward()
        optimizer.step()
    born = torch.tensor([8, 9, 10, 11])
    assert attention.qkv.weight.grad is not None
    rows = attention.qkv.weight.grad.view(3, 12, 16)[:, born]
    assert (rows.abs().amax(-1) > 0)[[0, 2]].all()  # queries and values; keys follow once the queries are not zero
    assert attention.out.weight.grad is not None
    assert (attention.out.weight.grad[:, born].abs() > 0).any(0).all()


def test_the_second_moment_of_what_is_filled_up_is_the_mean() -> None:
    model = Decoder(plan_of(LayerPlan(2, 4, 2)), seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(23, (2, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, targets=tokens).loss.backward()
    optimizer.step()
    before = optimizer.state[model.stack[0].attention.qkv.weight]["exp_avg_sq"].clone()
    apply_edit(model, optimizer, AddBlock(1, 0, LayerPlan(3, 4, 3)))
    state = optimizer.state[model.stack[1].attention.qkv.weight]
    torch.testing.assert_close(state["exp_avg_sq"][8:12], before[:8].mean(0).expand(4, -1))
    assert not state["exp_avg"][8:12].any()


def test_a_model_of_one_layer_has_nothing_to_begin_with() -> None:
    with pytest.raises(InputError, match="must be at least 2"):
        Stack(100).prepare(plan_of(LayerPlan(2, 4, 2)))


@pytest.mark.parametrize("static", [StaticLoops((0,), heads="all"), BlockLoop((0,))])
def test_what_is_there_from_the_start_and_would_not_follow_is_refused_in_either_order(
    static: StaticLoops | BlockLoop,
) -> None:
    stack, plan = Stack(100), Plan.uniform(layers=4, width=16, heads=2, vocabulary=23, context=8)
    with pytest.raises(InputError, match="would not follow"):
        stack.prepare(static.prepare(plan))
    with pytest.raises(InputError, match="would not follow"):
        static.prepare(stack.prepare(plan))


# --- what the others make of it ---------------------------------------------------------------------------------------


def test_a_stack_is_a_change_for_births_by_demand() -> None:
    """The cool-down begins anew, and losses of before the jump are forgotten."""
    policy, plan = Incrt(), Plan.uniform(layers=2, width=16, heads=2, vocabulary=23, context=8)
    state = replace(policy.begin(plan), losses=((50, 3.0), (100, 2.0)))
    edit = AddBlock(2, 1)
    moved = policy.moved(state, 400, edit.apply(plan), edit.moves(plan))
    assert [layer.changed for layer in moved.layers] == [400] * 3
    assert moved.losses == ()


def test_random_births_are_drawn_for_all_layers_that_there_will_be() -> None:
    """Those of a layer that is still to come go to one that there is."""
    stack, births = Stack(1000, start_layers=2, at=(500,)), RandomBirths(10, warm_up=50, last_birth=950, seed=3)
    plan = stack.prepare(Plan.uniform(layers=8, width=16, heads=2, vocabulary=23, context=8))
    state = births.begin(plan)
    assert {layer for _, layer in state.due} - {0, 1}
    assert births.fits(state, plan)
    after = stacked(stack, plan)
    kept = births.moved(state, 500, after, Moves((0, 1, *(None,) * 6)))
    assert kept == state
    assert births.fits(kept, after)
    for done in range(50, 951, 50):
        judged = births.judge(state, done, 2 if done < 500 else 8)
        if judged.layer is not None:
            drawn = state.due[0][1]
            assert judged.layer == (drawn % 2 if done < 500 else drawn)
        state = judged.state


# --- loops over other heads -------------------------------------------------------------------------------------------


def test_a_loop_over_other_heads_keeps_what_was_trained_of_those_that_stay() -> None:
    """Strengths and their moments go with their heads; a head that was not looped begins without."""
    plan = replace(Plan.uniform(layers=2, width=16, heads=4, vocabulary=23, context=8), gates=Gates(2, 2))
    model = Decoder(plan, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    apply_edit(model, optimizer, LoopHeads(1, (1, 2), 1))
    tokens = torch.randint(23, (2, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, targets=tokens).loss.backward()
    optimizer.step()
    assert model.gate_delta is not None
    trained, moments = model.gate_delta.detach().clone(), optimizer.state[model.gate_delta]["exp_avg"].clone()
    assert trained[1, 0].all()
    assert moments[1, 0].all()
    apply_edit(model, optimizer, LoopHeads(1, (2, 3), 2))
    for new, old in ((model.gate_delta, trained), (optimizer.state[model.gate_delta]["exp_avg"], moments)):
        assert new[1, 0, 0] == old[1, 0, 1]
        assert not new[1, 0, 1]
        assert not new[1, 1].any()


def test_a_birth_in_a_layer_leaves_the_states_of_others_alone() -> None:
    """The very tensors: nothing that stays is copied."""
    model = Decoder(plan_of(LayerPlan(2, 4, 2), LayerPlan(2, 4, 2)), seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(23, (2, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, targets=tokens).loss.backward()
    optimizer.step()
    kept = optimizer.state[model.stack[1].attention.qkv.weight]["exp_avg"]
    apply_edit(model, optimizer, AddHead(0, newborn_head(model.plan.layers[0], 16, None, seed=1)))
    assert optimizer.state[model.stack[1].attention.qkv.weight]["exp_avg"] is kept
    assert optimizer.state[model.stack[0].attention.qkv.weight]["exp_avg"].shape == (36, 16)
    assert set(optimizer.state) == set(model.parameters())
