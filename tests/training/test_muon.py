"""Muon: against the polar factor, torch's own class, and AdamW; through edits, guards and several processes."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meristem import AddBlock, AddHead, Decoder, Grower, InputError, Plan, RemoveHead
from meristem.config import OptimizerConfig
from meristem.growth.apply import apply_edit
from meristem.growth.head_surgery import newborn_head
from meristem.runs.run_folder import RunFolder
from meristem.training import muon
from meristem.training.muon import Muon, orthogonalised
from meristem.training.optimizer import guarded_update, make_optimizer
from meristem.training.train import resume

from .helpers import EAGER_BIRTHS, assert_equal_runs, copy_run, final_tensors, run_jobs, tiny_config
from .helpers import trained as trained_run

PLAN = Plan.from_heads([2, 4], width=32, vocabulary=23, context=8, feed_forward=48)


def batch(step: int) -> Tensor:
    return torch.randint(23, (4, 8), generator=torch.Generator().manual_seed(step))


def trained(model: Decoder, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        tokens = batch(step)
        optimizer.zero_grad()
        loss = model(tokens, targets=tokens.roll(-1, 1)).loss
        assert loss is not None
        loss.backward()
        optimizer.step()


def matrices(model: Decoder) -> list[tuple[Tensor, tuple[int, ...]]]:
    """The matrices of the blocks, with the heights of what they are made of."""
    return [
        entry
        for block in model.stack
        for entry in (
            (block.attention.qkv.weight, (block.attention.layer.query_width,) * 3), (block.attention.out.weight, (32,)),
            (block.feed_forward.gate_up.weight, (48, 48)), (block.feed_forward.down.weight, (32,)),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 48), (2, 48, 16), (1, 1, 8)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, ...], scale: float) -> None:
    """Against the polar factor by singular value decomposition, whatever the size of the momentum."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    left, _, right = torch.linalg.svd(drawn, full_matrices=False)
    found = orthogonalised(drawn)
    values = torch.linalg.svdvals(found)
    assert 0.7 < values.min() <= values.max() < 1.2
    torch.testing.assert_close(
        left.mT @ found @ right.mT, torch.diag_embed(values.new_ones(values.shape)), atol=0.3, rtol=0
    )


def test_a_matrix_without_momentum_stays_without() -> None:
    assert not orthogonalised(torch.zeros(2, 4, 6)).any()


def test_updates_are_those_of_torchs_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its polynomial, for each of queries, keys, values and both halves of the feed-forward by itself."""
    coefficients = (3.4445, -4.775, 2.0315)
    monkeypatch.setattr(muon, "STEPS", (coefficients,) * 5)
    monkeypatch.setattr(muon, "SAFETY", 1.0)
    # Theirs is always in bfloat16, as ours is on a GPU.
    monkeypatch.setattr(muon, "orthogonalised", lambda matrices: orthogonalised(matrices.bfloat16()).float())
    model, reference = Decoder(PLAN, seed=1), Decoder(PLAN, seed=1)
    # The rows of a weight, and the matrix that they are to torch.
    parts = [(r, nn.Parameter(r.detach().clone())) for w, heights in matrices(reference) for r in w.split(heights)]
    theirs = torch.optim.Muon(
        [matrix for _, matrix in parts], lr=0.01, weight_decay=0.1, ns_coefficients=coefficients,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    mine = Muon(model, lr=0.01, weight_decay=0.1)
    drawn = torch.Generator().manual_seed(0)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=drawn)
        gradients = [(weight.grad, heights) for weight, heights in matrices(model)]
        rows = [rows for gradient, heights in gradients if gradient is not None for rows in gradient.split(heights)]
        for (_, matrix), gradient in zip(parts, rows, strict=True):
            matrix.grad = gradient.clone()
        mine.step()
        theirs.step()
    moved = [
        torch.cat([weight.detach().flatten() for weight in weights])
        for weights in (
            [block.attention.qkv.weight for block in model.stack],
            [matrix for index, (_, matrix) in enumerate(parts) if index % 7 < 3],
            [block.attention.qkv.weight for block in reference.stack],
        )
    ]
    assert (moved[0] - moved[1]).norm() < 0.01 * (moved[1] - moved[2]).norm()


def test_everything_else_is_trained_by_adamw() -> None:
    """To the bit, as if it were alone."""
    model = Decoder(PLAN, seed=1)
    optimizer = Muon(model, lr=0.01, weight_decay=0.1)
    twins = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters() if "blocks" not in name}
    norms = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters() if "norm" in name}
    twins |= norms
    groups: list[dict[str, Any]] = [
        {"params": [p for p in twins.values() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in twins.values() if p.dim() != 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(3):
        tokens = batch(step)
        model.zero_grad()
        loss = model(tokens, targets=tokens.roll(-1, 1)).loss
        assert loss is not None
        loss.backward()
        for name, parameter in model.named_parameters():
            if name in twins:
                assert parameter.grad is not None
                twins[name].grad = parameter.grad.clone()
        optimizer.step()
        theirs.step()
    for name, parameter in model.named_parameters():
        if name in twins:
            assert torch.equal(parameter, twins[name]), name


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(bad: str) -> None:
    model = Decoder(PLAN, seed=1)
    optimizer = make_optimizer(model, OptimizerConfig(kind="muon"))
    trained(model, optimizer, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in model.named_parameters()}
    tokens = batch(9)
    optimizer.zero_grad()
    loss = model(tokens, targets=tokens).loss
    assert loss is not None
    loss.backward()
    if bad == "gradient":
        weight = model.stack[0].attention.qkv.weight
        assert weight.grad is not None
        weight.grad[3, 4] = torch.inf
    skipped = guarded_update(optimizer, 0.1, loss.detach() * (torch.nan if bad == "loss" else 1), clip=1.0)[1]
    assert skipped == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, kept[name][key]), (name, key)
    skipped = guarded_update(optimizer, 0.1, loss.detach(), clip=1.0)[1]
    assert skipped == (bad == "gradient")


def test_a_birth_leaves_the_update_of_other_layers_and_the_momentum_of_other_heads() -> None:
    """And the newborn has none yet; a head that leaves takes its own along; a copied block has its source's."""
    model = Decoder(PLAN, seed=1)
    optimizer = Muon(model, lr=0.01)
    trained(model, optimizer, 2)
    before = [optimizer.state[block.attention.qkv.weight]["momentum_buffer"].clone() for block in model.stack]
    apply_edit(model, optimizer, AddHead(0, newborn_head(model.plan.layers[0], 32, None, seed=1)))
    now = optimizer.state[model.stack[0].attention.qkv.weight]["momentum_buffer"]
    queries, keys, values = now.split(48)
    assert torch.equal(torch.cat((queries[:32], keys[:32], values[:32])), before[0])
    assert not any(part[32:].any() for part in (queries, keys, values))
    apply_edit(model, optimizer, RemoveHead(0, 0))
    apply_edit(model, optimizer, AddBlock(2, 1))
    assert torch.equal(optimizer.state[model.stack[2].attention.qkv.weight]["momentum_buffer"], before[1])
    trained(model, optimizer, 2, start=2)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert len(optimizer.param_groups[0]["params"]) == 3 * 4
    assert all("momentum_buffer" in optimizer.state[p] for p in optimizer.param_groups[0]["params"])
    assert all("exp_avg" in optimizer.state[p] for group in optimizer.param_groups[1:] for p in group["params"])


def test_torchs_own_way_of_saving_goes_on_to_the_bit() -> None:
    """As frameworks do that know nothing of Meristem."""
    model = Decoder(PLAN, seed=1)
    optimizer = Muon(model, lr=0.01)
    trained(model, optimizer, 3)
    weights, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    trained(model, optimizer, 3, start=3)
    again = Decoder(PLAN, seed=2)
    resumed = Muon(again, lr=0.5)
    trained(again, resumed, 1)
    again.load_state_dict(weights)
    resumed.load_state_dict(moments)
    trained(again, resumed, 3, start=3)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_a_closure_makes_the_gradients() -> None:
    model, same = Decoder(PLAN, seed=1), Decoder(PLAN, seed=1)
    trained(model, Muon(model, lr=0.01), 1)
    tokens, optimizer = batch(0), Muon(same, lr=0.01)

    def closure() -> float:
        loss = same(tokens, targets=tokens.roll(-1, 1)).loss
        assert loss is not None
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == pytest.approx(math.log(23), abs=0.5)
    for name, parameter in model.named_parameters():
        assert torch.equal(same.get_parameter(name), parameter), name


GROWING: dict[str, Any] = {
    "optimizer__kind": "muon", "checkpoint__every": 1, "train__steps": 12, "growth__policies": ["stack", "incrt"],
    "model__layers": 2, "growth__stack__at": [4], **EAGER_BIRTHS,
}  # fmt: skip


def test_a_growing_run_goes_on_to_the_bit(data: Path, tmp_path: Path) -> None:
    whole = trained_run(data, tmp_path / "whole", **GROWING)
    actions = [entry["action"] for entry in whole.read(whole.events) if entry["event"] == "growth"]
    assert {"stack", "birth"} <= set(actions)
    for step in (3, 6, 9):
        run = copy_run(whole, tmp_path / f"run-{step}", last=step)
        resume(run.path)
        assert_equal_runs(run, whole)


def test_two_processes_share_the_work_and_train_as_one(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, optimizer__kind="muon", train__steps=5)
    whole = trained_run(data, tmp_path / "one", optimizer__kind="muon", train__steps=5)
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    run_jobs((2, "train", tmp_path / "config.toml", tmp_path / "two"))
    found, expected = final_tensors(RunFolder.open(tmp_path / "two")), final_tensors(whole)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_kernels_do_what_the_plain_form_does() -> None:
    """Gradients that are not finite and those that are, at sizes that fill no block."""
    device = torch.device("cuda")
    drawn = torch.Generator().manual_seed(0)
    for bad in (0.0, 1.0):
        gradient, momentum, weight = (torch.randn(37, 61, generator=drawn) for _ in range(3))
        if bad:
            gradient[3, 5] = torch.nan
        outcomes = []
        for where in (torch.device("cpu"), device):
            kept, parameter = momentum.to(where, copy=True), weight.to(where, copy=True)
            directions = torch.empty_like(kept)
            flag, scale = torch.tensor(bad, device=where), torch.tensor(2.0, device=where)
            muon.momentum_(directions, gradient.to(where), kept, flag, scale, 0.95)
            muon.update_(parameter, directions, (1 - flag) * 0.1, 0.2, 3.0)
            outcomes.append([tensor.cpu() for tensor in (directions, kept, parameter)])
        torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-5, atol=1e-6)
        if bad:
            assert torch.equal(outcomes[1][1], momentum)
            assert torch.equal(outcomes[1][2], weight)


def test_what_it_cannot_train_is_said() -> None:
    with pytest.raises(InputError, match="for the matrices of blocks, not for embeddings, norms and the like"):
        Muon(nn.Embedding(3, 4), lr=0.1)
    Grower(model := Decoder(PLAN), Muon(model, lr=0.1), [])
