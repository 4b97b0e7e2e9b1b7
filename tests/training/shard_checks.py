"""What each of several processes checks of a sharded model, beside a plain one that has seen the whole batch."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meristem.growth.apply import apply_edit
from meristem.growth.edits import AddHead, Edit, LoopHeads, RemoveBlock, RepeatBlock
from meristem.growth.head_surgery import newborn_head
from meristem.model import Classifier, Transformer
from meristem.model.encoder import build_model
from meristem.model.transformer import Regions
from meristem.plan import Plan
from meristem.ranks import whole_tensor
from meristem.training import sharding
from meristem.training.compilation import compiled_regions
from meristem.training.distributed import Processes
from meristem.training.gradients import Gradients
from meristem.training.optimizer import guarded_update, parameter_groups
from meristem.training.sharding import Sharded

PLAN = Plan.from_heads((1, 2, 4), width=32, vocabulary=23, context=8, feed_forward=24)  # all projections of one shape
ROWS = 2  # of each process


def adamw(model: Transformer) -> Optimizer:
    return torch.optim.AdamW(parameter_groups(model, 0.1), lr=0.01, eps=1e-4, fused=True)


def pair(peers: Processes, plan: Plan = PLAN) -> tuple[Transformer, Sharded, Optimizer, Transformer, Optimizer]:
    """A sharded model and a plain one, alike."""
    ours, plain = build_model(plan, 1), build_model(plan, 1)
    first, second = adamw(ours), adamw(plain)
    wrapped = peers.wrap(ours, first, "fsdp")
    assert isinstance(wrapped, Sharded)
    return ours, wrapped, first, plain, second


def batches(peers: Processes, seed: int, plan: Plan = PLAN) -> list[tuple[Tensor, Tensor]]:
    """The share of every process: tokens and targets."""
    drawn = torch.Generator().manual_seed(seed)
    windows = torch.randint(1, 23, (peers.world, ROWS, plan.context + 1), generator=drawn)
    if plan.classes is None:
        return [(rows[:, :-1], rows[:, 1:]) for rows in windows]
    return [(rows, rows[:, 0] % plan.classes) for rows in windows[..., :-1]]


def updated(peers: Processes, seed: int, wrapped: Any, optimizer: Optimizer, plan: Plan, regions: Regions) -> Tensor:
    """An update on this process's share, or on all of them; its gradient norm."""
    alone = isinstance(wrapped, Transformer)
    shares = batches(peers, seed, plan)
    optimizer.zero_grad()
    for tokens, targets in shares if alone else shares[peers.rank : peers.rank + 1]:
        loss = wrapped(tokens, targets, regions).loss
        (loss / (len(shares) if alone else 1)).backward()
    return guarded_update(optimizer, 0.01, torch.zeros(()), 0.5)[0]


def assert_alike(ours: Transformer, first: Optimizer, plain: Transformer, second: Optimizer) -> None:
    """Equal weights and moments, to rounding."""
    mine, theirs = dict(ours.named_parameters()), dict(plain.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, parameter in theirs.items():
        torch.testing.assert_close(whole_tensor(mine[name]).detach(), parameter.detach(), rtol=1e-5, atol=1e-6)
        for key, value in second.state[parameter].items():
            torch.testing.assert_close(whole_tensor(first.state[mine[name]][key]), value, rtol=1e-5, atol=1e-7)


def trains_alike(peers: Processes, plan: Plan = PLAN, regions: Regions = Regions(), steps: int = 3) -> None:  # noqa: B008
    ours, wrapped, first, plain, second = pair(peers, plan)
    for seed in range(steps):
        norm = updated(peers, seed, wrapped, first, plan, regions)
        torch.testing.assert_close(norm, updated(peers, seed, plain, second, plan, Regions()), rtol=1e-5, atol=0)
    assert_alike(ours, first, plain, second)


def repeated_blocks(peers: Processes) -> None:
    trains_alike(peers, RepeatBlock(1, 2).apply(PLAN))


def normed_heads(peers: Processes) -> None:
    trains_alike(peers, replace(LoopHeads(2, (0, 3), 2).apply(PLAN), qk_norm=True))


def biases_and_gains(peers: Processes) -> None:
    """With an output that is no embedding."""
    plan = LoopHeads(2, (0, 3), 2).apply(PLAN)
    trains_alike(peers, replace(plan, qk_norm=True, qk_gain=True, qkv_bias=True, tied=False))


def classifier(peers: Processes) -> None:
    """Whose three classes are too few for each of four processes to have one."""
    plan = Plan.uniform(layers=2, width=16, heads=2, vocabulary=23, context=8, feed_forward=24, classes=3)
    assert isinstance(build_model(plan), Classifier)
    trains_alike(peers, plan)


def compiled(peers: Processes) -> None:
    """Blocks of equal shapes, whose heads the compiler must look at; also when one of them is looped."""
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        regions = compiled_regions()
    trains_alike(peers, PLAN, regions)
    trains_alike(peers, LoopHeads(2, (0, 3), 2).apply(PLAN), regions)


def parts(peers: Processes) -> None:
    """A process has its share of weights, gradients and moments between updates, and nothing else of them."""
    ours, wrapped, optimizer, _, _ = pair(peers)
    updated(peers, 0, wrapped, optimizer, PLAN, Regions())
    held: dict[int, int] = {}  # bytes of every piece of memory
    for parameter in ours.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
            assert isinstance(tensor, DTensor)
            storage = tensor.to_local().untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    share = 4 * 4 * PLAN.parameters / peers.world
    assert share <= sum(held.values()) < 1.1 * share  # rounded up to rows


def guard(peers: Processes) -> None:
    """What is not finite in one process changes nothing in any."""
    ours, wrapped, first, plain, second = pair(peers)
    for model, optimizer in ((wrapped, first), (plain, second)):
        updated(peers, 0, model, optimizer, PLAN, Regions())
    tokens, targets = batches(peers, 1)[peers.rank]
    wrapped(tokens, targets, Regions()).loss.backward()
    if peers.rank == 1:
        gradient = ours.embedding.weight.grad
        assert isinstance(gradient, DTensor)
        gradient.to_local()[0, 0] = torch.inf
    norm, skipped = guarded_update(first, 0.01, torch.zeros(()), 1.0)
    assert not norm.isfinite()
    assert skipped == 1
    for state in second.state.values():
        assert state["step"] == 1
    assert_alike(ours, first, plain, second)


def micro_batches(peers: Processes) -> None:
    """Their gradients add up to the mean, as those of processes do."""
    ours, wrapped, _, plain, _ = pair(peers)
    shares = [batches(peers, seed) for seed in range(3)]
    tokens, targets = (torch.stack(parts) for parts in zip(*[share[peers.rank] for share in shares], strict=True))
    loss = Gradients(wrapped, compile=False, device=peers.device)(tokens, targets)
    for share in shares:
        for one in share:
            (plain(*one).loss / (3 * peers.world)).backward()
    assert loss.isfinite()
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(whole_tensor(mine.grad), other.grad, rtol=1e-5, atol=1e-7)


def precision(peers: Processes) -> None:
    """With products in bfloat16 the gradients are those of autocast, averaged in float32.

    A gain's gradient is made with the weight that the gain is in, which is there in bfloat16.
    """
    with patch.object(sharding, "compute_dtype", lambda device: torch.bfloat16):
        ours, wrapped, _, plain, _ = pair(peers)
    shares = batches(peers, 0)
    with torch.autocast("cpu", torch.bfloat16):
        wrapped(*shares[peers.rank], Regions()).loss.backward()
    for share in shares:
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(*share).loss
        (loss / peers.world).backward()
    for name, parameter in plain.named_parameters():
        gradient = ours.get_parameter(name).grad
        assert gradient is not None
        assert gradient.dtype == torch.float32
        limit = 1e-6 if parameter.dim() == 2 else 2e-2
        torch.testing.assert_close(whole_tensor(gradient), parameter.grad, rtol=limit, atol=max(1e-9, limit / 5e3))


def growing(peers: Processes) -> None:
    """Edits of a whole model between updates; what there was before is let go."""
    ours, wrapped, first, plain, second = pair(peers)
    for seed in range(3):
        for model, optimizer in ((wrapped, first), (plain, second)):
            updated(peers, seed, model, optimizer, ours.plan, Regions())
        before = weakref.ref(wrapped.root)
        born: Edit = AddHead(2, newborn_head(ours.plan.layers[-1], 32, None, seed))
        edit = born if seed < 2 else RemoveBlock(2)  # after which all others are the very same
        with wrapped.whole():
            assert not any(isinstance(parameter, DTensor) for parameter in ours.parameters())
            apply_edit(ours, first, edit)
        apply_edit(plain, second, edit)
        gc.collect()
        assert before() is None
        assert_alike(ours, first, plain, second)


def values(peers: Processes) -> None:
    """What is only set, in whole weights, stays; parameters and shells are those that there were."""
    ours, wrapped, optimizer, _, _ = pair(peers)
    updated(peers, 0, wrapped, optimizer, PLAN, Regions())
    root, parameters, states = wrapped.root, list(ours.parameters()), dict(optimizer.state)
    before = [whole_tensor(parameter).detach() for parameter in parameters]
    with wrapped.whole(), torch.no_grad():
        ours.stack[1].attention.out.weight.mul_(2)
    assert wrapped.root is root
    assert all(one is other for one, other in zip(ours.parameters(), parameters, strict=True))
    assert states == dict(optimizer.state)
    for (name, parameter), value in zip(ours.named_parameters(), before, strict=True):
        factor = 2 if name == "blocks.1.attention.out.weight" else 1
        assert torch.equal(whole_tensor(parameter), factor * value), name


def errors(peers: Processes) -> None:
    """After an error within the model is sharded as before, with an edit that was made until then, and trains on."""
    ours, wrapped, first, plain, second = pair(peers)
    for edit in (None, RemoveBlock(2)):
        with contextlib.suppress(ZeroDivisionError), wrapped.whole():
            if edit is not None:
                apply_edit(ours, first, edit)
            raise ZeroDivisionError
        assert all(isinstance(parameter, DTensor) for parameter in ours.parameters())
        if edit is not None:
            apply_edit(plain, second, edit)
        for model, optimizer in ((wrapped, first), (plain, second)):
            updated(peers, 0, model, optimizer, ours.plan, Regions())
        assert_alike(ours, first, plain, second)
