"""HeadGrowth on a small model: what it does with what it is shown."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.growth import Incrt, Pruning, Published, RandomBirths
from meristem.growth.criteria import Policy
from meristem.growth.head_growth import HeadGrowth
from meristem.model import Decoder
from meristem.plan import LayerPlan, Plan
from meristem.synthetic import Student, Task

EAGER: dict[str, Any] = {
    "feed_every": 1, "decide_every": 1, "calibration": 2, "cool_down": 1, "warm_up": 1, "certainty": -math.inf,
    "share": 1e-9, "steady": -math.inf, "plateau": 1.0, "hits": 1, "feeds": 1,
}  # fmt: skip


def grown(policy: Policy, steps: int, heads: int = 1, **shape: Any) -> tuple[Student, HeadGrowth, list[dict[str, Any]]]:
    task, model = Task(heads=2, width=16, length=6), Student(16, 6, 4, heads, **shape)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    growth, events = HeadGrowth(model, optimizer, policy), []
    for step in range(steps):
        tokens, targets = task.batch(16, step)
        optimizer.zero_grad()
        model.loss(tokens, targets).backward()
        optimizer.step()
        events += growth.step(tokens, targets).events
    return model, growth, events


def test_oracle_13_no_birth_changes_what_a_model_says() -> None:
    model, growth, _ = grown(Incrt(**EAGER, prune=False, max_heads=6), 2)
    tokens, _ = Task(heads=2, width=16, length=6).batch(16, 99)
    for step in range(3, 12):
        before, heads = model(tokens), model.plan.heads[0]
        growth.step(*Task(heads=2, width=16, length=6).batch(16, step))
        torch.testing.assert_close(model(tokens), before, rtol=0, atol=1e-6)
        assert model.plan.heads[0] >= heads
    assert model.plan.heads[0] > 1


def test_a_duplicate_leaves_and_the_others_stand_in_for_it() -> None:
    """Oracle 15 in a living model, weights and moments: the loss stays, the head is gone."""
    task = Task(heads=2, width=16, length=6)
    model = Student(16, 6, 4, heads=3)
    attention = model.stack[0].attention
    with torch.no_grad():  # the last head reads what the first one does, and writes something else
        for part in attention.qkv.weight.unflatten(0, (3, 3, 4)):
            part[2] = part[0]
    optimizer = torch.optim.Adam(model.parameters(), 1e-9)  # a step so that there are moments
    model.loss(*task.batch(16, 0)).backward()
    optimizer.step()
    trial = Pruning(grace=0, patience=1, redundant=1e-3)
    policy = Incrt(**{**EAGER, "share": 1.0, "certainty": math.inf}, pruning=trial)
    growth = HeadGrowth(model, optimizer, policy)
    before = model(task.batch(64, 5)[0]).detach()
    events = [event for step in range(1, 5) for event in growth.step(*task.batch(64, step)).events]
    (removal,) = [event for event in events if event.get("action") == "removal"]
    assert removal["head"] in (0, 2)
    assert removal["loss_without"] == pytest.approx(removal["loss_with"], rel=1e-4)
    assert model.plan.heads == (2,)
    after = model(task.batch(64, 5)[0]).detach()
    assert float((after - before).norm() / before.norm()) < 1e-4
    for parameter in (attention.qkv.weight, attention.out.weight):
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_a_head_that_is_needed_is_spared() -> None:
    policy = Incrt(
        **{**EAGER, "certainty": math.inf}, pruning=Pruning(grace=150, patience=1, redundant=1.0, tolerance=0.0)
    )
    model, _, events = grown(policy, 160, heads=2)  # by then both are needed
    spared = [event for event in events if event.get("action") == "spare"]
    assert spared
    assert all(event["loss_without"] > event["loss_with"] for event in spared)
    assert model.plan.heads == (2,)


@pytest.mark.parametrize("policy", [Incrt(**EAGER, prune=False), Published("repaired", feed_every=1)])
def test_what_is_not_finite_is_not_taken_in(policy: Policy) -> None:
    _, growth, _ = grown(policy, 20)
    tensors = {name: tensor.clone() for name, tensor in growth.tensors().items()}
    tokens, targets = Task(heads=2, width=16, length=6).batch(16, 50)
    growth._feed(tokens, torch.full_like(targets, math.nan))
    for name, tensor in growth.tensors().items():
        assert torch.equal(tensor, tensors[name]), name
    growth._feed(tokens, targets)
    changed = {name for name, tensor in growth.tensors().items() if not torch.equal(tensor, tensors[name])}
    demand = {"criterion.sums", "criterion.looks", "criterion.moments", "criterion.outputs.total", "criterion.feeds"}
    assert {"losses"} | (demand if isinstance(policy, Incrt) else {"criterion.second", "criterion.vectors"}) <= changed


def test_random_births_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loss(*arguments: Tensor, **named: Any) -> Tensor:
        raise AssertionError("nothing is to be measured")

    task, model = Task(heads=2, width=16, length=6), Student(16, 6, 4)
    growth = HeadGrowth(model, None, RandomBirths(3, last_birth=30, warm_up=1, decide_every=5))
    monkeypatch.setattr(model, "loss", no_loss)
    for step in range(30):
        growth.step(*task.batch(4, step))
    assert model.plan.heads == (4,)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((LayerPlan(2, 8, 2), LayerPlan(1, 16, 1)), "head_dim = (8, 16): must be the same in all layers"),
        ((LayerPlan(4, 8, 2),), "kv_heads = 2: must be 1 or 4 for heads to come and go"),
    ],
)
def test_plans_that_cannot_grow_heads_are_refused(layers: tuple[LayerPlan, ...], message: str) -> None:
    model = Decoder(Plan(width=16, vocabulary=32, context=8, feed_forward=16, layers=layers))
    with pytest.raises(InputError) as caught:
        HeadGrowth(model, None, Incrt())
    assert message in str(caught.value)


def test_another_policy_cannot_go_on_from_a_state() -> None:
    _, growth, _ = grown(Incrt(**EAGER), 3)
    other = HeadGrowth(growth.model, None, Incrt(**{**EAGER, "share": 0.5}))
    with pytest.raises(InputError, match=r"policy\.share = 0\.5: must be 1e-09"):
        other.load(growth.tensors(), growth.values())
