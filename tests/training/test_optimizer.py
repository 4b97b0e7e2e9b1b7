"""The update: decay, learning-rate curve, clipping and accumulation against plain torch."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meristem
from meristem.config import OptimizerConfig
from meristem.errors import InputError
from meristem.growth import Sgt
from meristem.model import Decoder
from meristem.plan import Plan
from meristem.training.gradients import Gradients
from meristem.training.optimizer import (
    gradient_norm,
    guarded_update,
    learning_rate,
    make_optimizer,
    parameter_groups,
)

from .helpers import CPU, final_tensors, metrics, trained

PLAN = Plan.from_heads([2, 4], width=32, vocabulary=64, context=16, feed_forward=48)


def batches(count: int, micro: int = 1, rows: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets (micro-batches, b, T)."""
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(PLAN.vocabulary, (count, rows, PLAN.context + 1), generator=generator)
    return [(w[:, :-1].unflatten(0, (micro, -1)), w[:, 1:].unflatten(0, (micro, -1))) for w in windows]


def state_of(model: Decoder, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of weights, moments and step counts."""
    moments = [value for p in model.parameters() for _, value in sorted(optimizer.state.get(p, {}).items())]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *moments]]


def test_decay_falls_on_matrices_only() -> None:
    model = Decoder(PLAN)
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        name: 0.0 if "norm" in name else 0.3 for name, _ in model.named_parameters()
    }
    assert set(decay.values()) == {0.0, 0.3}


def test_parameter_groups_serve_any_optimizer() -> None:
    """Every parameter that is trained, once: matrices with decay, norms and gates without."""
    assert meristem.parameter_groups is parameter_groups
    model = Decoder(Sgt(total_steps=100).prepare(PLAN))
    frozen = model.stack[0].feed_forward.down.weight.requires_grad_(False)
    decayed, rest = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert all(p.dim() == 2 for p in decayed["params"])
    assert any(p is model.gate_delta for p in rest["params"])
    held = [id(p) for group in (decayed, rest) for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p is not frozen)
    sgd = torch.optim.SGD(parameter_groups(model, 0.3), lr=0.1)
    assert [group["weight_decay"] for group in sgd.param_groups] == [0.3, 0.0]
    own = make_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert [[id(p) for p in group["params"]] for group in own] == [
        [id(p) for p in group["params"]] for group in (decayed, rest)
    ]


def test_decay_alone_shrinks_matrices_and_leaves_norms() -> None:
    model = Decoder(PLAN)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    guarded_update(optimizer, 0.1, torch.tensor(1.0), 1.0)
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old * (0.95 if old.dim() > 1 else 1.0), rtol=1e-6, atol=0)


def test_oracle_22_learning_rate_curve() -> None:
    config, steps = OptimizerConfig(lr=6e-4, warmup=0.025, final=0.1), 11_000
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert 0 < rates[0] < 0.01 * 6e-4
    assert rates.index(max(rates)) == 275
    assert rates[275] == pytest.approx(6e-4, rel=1e-12)
    assert all(a < b for a, b in pairwise(rates[:276]))
    assert all(a > b for a, b in pairwise(rates[275:]))
    assert rates[-1] == pytest.approx(6e-5, rel=1e-12)
    assert rates[137] == pytest.approx(3e-4, rel=1e-6)  # half way up
    quarter = 275 + (10_999 - 275) // 4
    assert rates[quarter] == pytest.approx(6e-5 + 5.4e-4 * 0.5 * (1 + math.cos(math.pi / 4)), rel=1e-6)


def test_learning_rate_without_warm_up_starts_at_the_peak() -> None:
    config = OptimizerConfig(lr=1.0, warmup=0.0, final=0.5)
    assert learning_rate(0, 1, config) == 1.0
    assert [learning_rate(s, 3, config) for s in range(3)] == pytest.approx([1.0, 0.75, 0.5])


def test_wsd_warms_up_stays_and_decays_in_a_straight_line() -> None:
    config = OptimizerConfig(lr=1.0, curve="wsd", warmup=0.1, decay=0.25, final=0.2)
    rates = [learning_rate(step, 40, config) for step in range(40)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4:30] == [1.0] * 26
    assert rates[30:] == pytest.approx([1 - 0.08 * fall for fall in range(1, 11)])


def test_a_branch_decays_from_where_it_left_the_trunk() -> None:
    """Before that it is the trunk, whatever its own length; several lengths share it."""
    config = OptimizerConfig(lr=1.0, curve="wsd", warmup=0.0, final=0.0)
    for steps in (24, 30):
        rates = [learning_rate(step, steps, config, branched=20) for step in range(steps)]
        assert rates[:20] == [1.0] * 20
        assert rates[20:] == pytest.approx([1 - (fall + 1) / (steps - 20) for fall in range(steps - 20)])


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_updates_equal_plain_clipping_and_adamw(clip: float) -> None:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.2, clip=clip)
    ours, theirs = Decoder(PLAN), Decoder(PLAN)
    optimizer = make_optimizer(ours, config)
    gradients = Gradients(ours, compile=False, device=CPU)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
    for step, (tokens, targets) in enumerate(batches(6)):
        lr = learning_rate(step, 6, config)
        norm, skipped = guarded_update(optimizer, lr, gradients(tokens, targets), clip)
        reference.zero_grad()
        loss = theirs(tokens[0], targets[0]).loss
        loss.backward()
        plain = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        assert clip in (0.0, 1e6) or plain > clip  # clipping has work to do
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        assert not skipped
        torch.testing.assert_close(norm, plain, rtol=1e-5, atol=0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro", [2, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(micro: int) -> None:
    whole, parts = Decoder(PLAN), Decoder(PLAN)
    ((tokens, targets),) = batches(1)
    loss = Gradients(whole, compile=False, device=CPU)(tokens, targets)
    split = Gradients(parts, compile=False, device=CPU)
    for _ in range(2):  # nothing is left over from the call before
        assert float(split(*(t[0].unflatten(0, (micro, -1)) for t in (tokens, targets)))) == pytest.approx(
            float(loss), abs=1e-6
        )
    for a, b in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6)


def test_micro_batches_do_not_change_a_run(data: Path, tmp_path: Path) -> None:
    runs = {
        micro: trained(data, tmp_path / f"{micro}", train__micro_batch=micro, train__steps=6) for micro in (1, 2, 4)
    }
    for micro in (1, 2):
        torch.testing.assert_close(final_tensors(runs[micro]), final_tensors(runs[4]), rtol=1e-6, atol=1e-6)
        for ours, theirs in zip(metrics(runs[micro]), metrics(runs[4]), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_an_update_that_is_not_finite_changes_nothing(bad: float, where: str, clip: float) -> None:
    model = Decoder(PLAN)
    optimizer = make_optimizer(model, OptimizerConfig())
    gradients = Gradients(model, compile=False, device=CPU)
    first, second, third = batches(3)
    guarded_update(optimizer, 1e-2, gradients(*first), clip)
    before = state_of(model, optimizer)
    loss = gradients(*second)
    if where == "loss":
        loss = torch.full_like(loss, bad)
    else:
        next(iter(model.parameters())).grad[0, 0] = bad  # type: ignore[index]
    _, skipped = guarded_update(optimizer, 1e-2, loss, clip)
    assert skipped == 1
    torch.testing.assert_close(state_of(model, optimizer), before, rtol=0, atol=0)
    _, skipped = guarded_update(optimizer, 1e-2, gradients(*third), clip)
    assert skipped == 0
    assert all(not torch.equal(a, b) for a, b in zip(state_of(model, optimizer), before, strict=True))


def test_the_gradient_norm_is_that_of_all_gradients_together() -> None:
    a, b, without = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert gradient_norm([a, b, without]) == 5


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None], ids=["Linear", "None"])
def test_groups_are_those_of_our_models(model: Any) -> None:
    with pytest.raises(InputError, match=rf"model = '{type(model).__name__}': must be a Meristem model"):
        parameter_groups(model, 0.1)
