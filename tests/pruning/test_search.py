"""The search: what leaves first, what that costs, and what never leaves."""

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from meristem.growth import LoopHeads
from meristem.growth.apply import apply_edit
from meristem.model import Decoder
from meristem.model.block import Pass
from meristem.plan import Plan
from meristem.pruning.refit import behind, refit
from meristem.pruning.search import LEAST, LIMIT, MET, Group, Search, mean_loss
from meristem.pruning.settings import Budget
from pruning.helpers import CPU, search_of, strong_model, written_rows

SHAPE: dict[str, Any] = {"layers": 2, "width": 32, "vocabulary": 48, "context": 12}
PLAN = Plan.uniform(heads=4, **SHAPE)


def removed(search: Search) -> list[Group]:
    """The groups of heads that have left, in their order."""
    return [change.group for change in search.changes if change.group is not None]


def planted() -> Decoder:
    """A model whose heads 4 and 5 read what 2 and 3 read, and write it elsewhere; 0 and 1 are small, and alone."""
    model = strong_model(Plan.uniform(heads=6, head_dim=8, **SHAPE))
    with torch.no_grad():
        for block in model.stack:
            parts = block.attention.qkv.weight.unflatten(0, (3, 6, 8))
            parts[:, 4:] = parts[:, 2:4]
            block.attention.out.weight[:, :16] *= 0.6
    return model


def test_a_head_that_writes_nothing_leaves_first_and_changes_nothing() -> None:
    model = strong_model(PLAN)
    with torch.no_grad():
        model.stack[1].attention.out.weight[:, 16:24] = 0
    tokens = written_rows(model).aside[0][0]
    before = model.logits(tokens)
    search = search_of(model)
    assert search.to(Budget("heads", 7), math.inf) == MET
    assert removed(search) == [Group(1, (2,))]
    assert_close(model.logits(tokens), before, rtol=1e-4, atol=1e-4)
    assert search.points[1].loss == pytest.approx(search.start, abs=1e-5)


def test_heads_that_read_the_same_are_found_and_folded() -> None:
    model = planted()
    tokens = written_rows(model).aside[0][0]
    before = model.logits(tokens)
    search = search_of(model)
    search.to(Budget("heads", 8), math.inf)
    assert model.plan.heads == (4, 4)
    for left in search.left:  # one of each pair, whichever it is
        assert sorted(head if head < 4 else head - 2 for head in left) == [0, 1, 2, 3]
    assert search.points[-1].loss == pytest.approx(search.start, abs=1e-3)
    assert_close(model.logits(tokens), before, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("control", [{"order": "random"}, {"order": "norm"}, {"fold": False}])
def test_controls_are_worse_where_redundancy_is_planted(control: dict[str, object]) -> None:
    model, other = planted(), planted()
    rows = written_rows(model)
    ours, theirs = search_of(model, rows), search_of(other, rows, **control)
    for search in (ours, theirs):
        search.to(Budget("heads", 8), math.inf)
    rises = [search.points[-1].loss - search.start for search in (ours, theirs)]
    assert rises[1] > 0.05
    assert rises[1] > 20 * rises[0]


def test_the_curve_is_what_models_of_that_size_have() -> None:
    model = strong_model(PLAN)
    untouched, rows = copy.deepcopy(model), written_rows(model)
    search = search_of(model, rows)
    search.to(Budget("heads", 4), math.inf)
    assert len(search.points) == 5
    for before, point in itertools.pairwise(search.points):
        for change in search.changes[before.changes : point.changes]:
            apply_edit(untouched, None, change.edit)
            assert change.event.plan == untouched.plan.digest
        assert mean_loss(untouched, rows.aside, CPU) == pytest.approx(point.loss, abs=1e-4)
        assert point.sizes.heads == sum(untouched.plan.heads)
    assert_close(untouched.state_dict(), model.state_dict())


def test_the_tolerance_is_never_exceeded() -> None:
    whole = search_of(strong_model(PLAN))
    assert whole.to(None, math.inf) == LEAST
    assert whole.model.plan.heads == (1, 1)
    limit = (whole.points[3].loss - whole.start) * 1.001
    search = search_of(strong_model(PLAN))
    assert search.to(None, limit) == LIMIT
    assert 1 <= len(removed(search)) < 6
    assert all(point.loss - search.start <= limit for point in search.points)


@pytest.mark.parametrize("order", ["measured", "random", "norm"])
def test_groups_that_share_a_key_leave_together(order: str) -> None:
    model = strong_model(Plan.uniform(heads=6, head_dim=8, kv_group=2, **SHAPE))
    rows = written_rows(model)
    search = search_of(model, rows, order=order)
    assert search.to(Budget("kv_bytes", search.points[0].sizes.kv_bytes * 2 / 3), math.inf) == MET
    assert sum(model.plan.kv_heads) == 4
    assert sum(model.plan.heads) == 8
    assert all(len(group.heads) == 2 for group in removed(search))
    assert search.points[-1].sizes.kv_bytes * 3 == search.points[0].sizes.kv_bytes * 2
    assert mean_loss(model, rows.aside, CPU) == pytest.approx(search.points[-1].loss, abs=1e-4)
    assert search.to(None, math.inf) == LEAST
    assert model.plan.kv_heads == (1, 1)
    assert model.plan.heads == (2, 2)


def test_heads_that_all_share_one_key_can_leave_but_for_two() -> None:
    model = strong_model(Plan.uniform(heads=4, kv_group=4, **SHAPE))
    search = search_of(model)
    search.to(None, math.inf)
    assert model.plan.heads == (2, 2)
    assert search.points[-1].sizes.kv_bytes == search.points[0].sizes.kv_bytes


def test_looped_heads_stay() -> None:
    model = strong_model(PLAN)
    apply_edit(model, None, LoopHeads(1, (1, 3), 1))
    search = search_of(model)
    search.to(None, math.inf)
    assert search.left[1] == [1, 3]
    assert model.plan.layers[1].loop is not None
    assert model.plan.layers[1].loop.heads == (0, 1)


def test_where_heads_differ_in_size_what_is_saved_counts() -> None:
    wide = replace(PLAN.layers[0], heads=2, head_dim=16, kv_heads=2)
    plan = replace(PLAN, layers=(wide, replace(PLAN.layers[1], heads=4)))
    model = strong_model(plan)
    search = search_of(model)
    first = search.points[0].sizes.attention
    search.to(Budget("attention", first * 0.75), math.inf)
    assert search.points[-1].sizes.attention <= first * 0.75


def test_the_random_order_goes_by_its_seed() -> None:
    def order(seed: int) -> list[Group]:
        search = search_of(strong_model(PLAN), order="random", seed=seed)
        search.to(None, math.inf)
        return removed(search)

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_the_norm_order_takes_the_smallest_weights_first() -> None:
    model = strong_model(PLAN)
    with torch.no_grad():
        for part in (model.stack[0].attention.qkv.weight[8:16], model.stack[0].attention.out.weight[:, 8:16]):
            part.mul_(0.5)
    search = search_of(model, order="norm")
    search.to(Budget("heads", 7), math.inf)
    assert removed(search) == [Group(0, (1,))]


def test_feed_forward_layers_take_over_what_they_can() -> None:
    """Where only what a feed-forward layer wrote itself is missing, it can write all of it again."""
    model = strong_model(PLAN)
    with torch.no_grad():
        model.stack[0].feed_forward.gate_up.weight.mul_(20)
        model.stack[0].feed_forward.down.weight.mul_(50)
    rows = written_rows(model, count=200)
    (tokens, targets), whole = rows.aside[0], copy.deepcopy(model)
    seen = behind(model, 0, tokens, targets, CPU)
    with torch.no_grad():
        written = model.stack[0].feed_forward.down.weight.double() @ seen.hidden.T
        passes: list[Pass] = []
        model.loss(tokens, targets, watch=lambda layer, number, seen: passes.append(seen))
        stream = passes[0].stream + passes[0].update
        assert_close((stream.flatten(0, 1).double() + written.T), seen.stream, rtol=1e-4, atol=1e-4)
        model.stack[0].feed_forward.down.weight.mul_(0.5)
    lost = mean_loss(model, rows.aside, CPU)
    edit = refit(model, whole, rows.shown, CPU)
    assert lost > mean_loss(whole, rows.aside, CPU) + 0.1
    assert mean_loss(model, rows.aside, CPU) < mean_loss(whole, rows.aside, CPU) + 0.1 * lost
    again = copy.deepcopy(whole)
    apply_edit(again, None, edit)
    assert_close(again.state_dict(), model.state_dict())
    assert refit(copy.deepcopy(whole), whole, rows.shown, CPU).down == {}
