"""Blocks that are run again in the backward pass: the same gradients to the bit, from far fewer saved activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from commands import Call
from meristem.config import override
from meristem.errors import InputError
from meristem.growth.apply import apply_edit
from meristem.growth.edits import AddHead, LoopHeads
from meristem.growth.head_surgery import newborn_head
from meristem.model import Classifier, Decoder, Transformer
from meristem.model.transformer import Regions
from meristem.plan import Gates, Loop, Plan
from meristem.runs.run_folder import RunFolder
from meristem.training.compilation import recomputed
from meristem.training.gradients import Gradients
from meristem.training.train import resume

from .helpers import CPU, assert_equal_runs, copy_run, run_jobs, tiny_config, trained
from .test_distributed import assert_close_runs
from .test_together import TOGETHER

BASE = Plan.from_heads([2, 2, 4], width=32, vocabulary=40, context=16)
LOOPED = replace(BASE.with_layer(1, replace(BASE.layers[1], loop=Loop((1, 0), 2))), gates=Gates(2, 2, True))
PLANS = {
    "plain": BASE,
    "loops": LOOPED,
    "repeats": BASE.with_layer(1, replace(BASE.layers[1], repeats=2)),
    "shared keys": Plan.from_heads([4, 4], width=32, vocabulary=40, context=16, kv_group=2),
    "classifier": replace(BASE, classes=3),
    "normed heads": replace(LOOPED, qk_norm=True),
    "biases and gains": replace(LOOPED, qk_norm=True, qk_gain=True, qkv_bias=True, tied=False),
}


def built(plan: Plan) -> Transformer:
    return Decoder(plan) if plan.classes is None else Classifier(plan)


def batch(plan: Plan, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets of two micro-batches."""
    window = torch.randint(1, 40, (2, 3, 17), generator=torch.Generator().manual_seed(seed))
    return window[..., :-1], window[..., 1:] if plan.classes is None else window[..., -1] % plan.classes


def gradients_of(model: Transformer, *, recompute: bool, compile: bool = False) -> dict[str, Tensor]:
    """Loss and gradients of two updates."""
    gradients, found = Gradients(model, compile=compile, device=CPU, recompute=recompute), {}
    for seed in (0, 1):
        found[f"{seed} loss"] = gradients(*batch(model.plan, seed))
        found |= {f"{seed} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_the_same_to_the_bit(name: str) -> None:
    plain, again = (gradients_of(built(PLANS[name]), recompute=recompute) for recompute in (False, True))
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    assert len(plain) == 2 * (1 + len(list(built(PLANS[name]).parameters())))


def test_gradients_are_the_same_to_the_bit_in_bfloat16() -> None:
    found = []
    for regions in (Regions(), recomputed(Regions())):
        model = Decoder(LOOPED)
        tokens, targets = (part[0] for part in batch(LOOPED))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(tokens, targets, regions)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs as they are compiled, without kernels of their own."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


def test_compiled_blocks_need_no_other_graphs(quick_compiler: None) -> None:
    """One for each kind of block, whether forward or again; the same gradients."""
    kinds, counts, found = 3, [], []
    for recompute in (True, False):
        found.append(gradients_of(Decoder(LOOPED), recompute=recompute, compile=True))
        counts.append(len(_debug_get_cache_entry_list(Regions().block.__code__)))
    assert counts == [kinds, kinds]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def saved_bytes(plan: Plan, regions: Regions) -> int:
    """What a forward pass keeps for the backward one, in bytes, without the weights themselves."""
    model = Decoder(plan)
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, targets = (part[0] for part in batch(plan))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(tokens, targets, regions)
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("name", ["plain", "shared keys", "loops"])
def test_the_norm_of_heads_keeps_what_the_plan_says(name: str) -> None:
    """In bf16; the factors of heads are in float32."""
    plan = PLANS[name]
    normed = replace(plan, qk_norm=True)
    with torch.autocast("cpu", torch.bfloat16):
        more = saved_bytes(normed, Regions()) - saved_bytes(plan, Regions())
    assert more == 3 * 16 * (normed.cost.activation_bytes_per_token - plan.cost.activation_bytes_per_token)


@pytest.mark.parametrize("name", ["plain", "loops"])
def test_only_the_inputs_of_blocks_are_saved(name: str) -> None:
    """Of a block more, the stream and the last branch, both in float32 here, and its row of gates."""
    again, plan = recomputed(Regions()), PLANS[name]
    deeper = replace(plan, layers=(*plan.layers, plan.layers[-1]))
    tokens, gates = 3 * 16, 0 if plan.gates is None else 4 * plan.gates.passes * plan.gates.heads
    assert saved_bytes(deeper, again) - saved_bytes(plan, again) == tokens * 2 * 4 * plan.width + gates
    assert saved_bytes(plan, again) < 0.35 * saved_bytes(plan, Regions())
    ten = replace(plan, layers=(*plan.layers, *plan.layers[-1:] * 7))
    assert saved_bytes(ten, again) < 0.2 * saved_bytes(ten, Regions())


def test_whoever_watches_sees_every_pass_once() -> None:
    model, seen = Decoder(LOOPED), []
    tokens, targets = (part[0] for part in batch(LOOPED))
    loss = model.loss(tokens, targets, recomputed(Regions()), lambda layer, number, _: seen.append((layer, number)))
    loss.backward()
    assert seen == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_births_between_updates() -> None:
    """A head and a loop that are born between two updates are in the next one, once."""
    found = []
    for recompute in (False, True):
        model = Decoder(replace(BASE, gates=Gates(2, 2, True)))
        gradients = Gradients(model, compile=False, device=CPU, recompute=recompute)
        gradients(*batch(BASE))
        apply_edit(model, None, AddHead(0, newborn_head(BASE.layers[0], BASE.width, None, seed=1)))
        apply_edit(model, None, LoopHeads(1, (0, 1), 2))
        gradients.restructured(model)
        gradients(*batch(BASE, 1))
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_is_the_same_to_the_bit(data: Path, tmp_path: Path) -> None:
    """With stacked blocks, births, loops and all their gauges; and it may change when a run goes on."""
    plain = trained(data, tmp_path / "plain", **TOGETHER)
    assert_equal_runs(trained(data, tmp_path / "again", **TOGETHER, train__recompute=True), plain)
    resumed = copy_run(plain, tmp_path / "resumed", last=8)
    resume(resumed.path, override(resumed.config, ["--train.recompute", "true"]))
    assert_equal_runs(resumed, plain)


def test_a_run_of_a_classifier_is_the_same_to_the_bit(labelled: Path, tmp_path: Path) -> None:
    plain = trained(labelled, tmp_path / "plain")
    assert_equal_runs(trained(labelled, tmp_path / "again", train__recompute=True), plain)


def test_two_processes_recompute(data: Path, whole: RunFolder, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(data, train__recompute=True).to_toml(), encoding="utf-8")
    run_jobs((2, "train", config, tmp_path / "pair"))
    assert_close_runs(RunFolder.open(tmp_path / "pair"), whole)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_memory_estimate_knows_it(call: Call) -> None:
    """Per token the stream and the branch in bfloat16 of every pass through a block, and one whole block."""
    plan = PLANS["repeats"]
    plain, again = plan.memory(1000), plan.memory(1000, recompute=True)
    d, one = (
        plan.width,
        max(plan.layer_cost(replace(layer, repeats=0)).activation_bytes_per_token for layer in plan.layers),
    )
    outer = plan.memory(1000).activations // 1000 - sum(
        plan.layer_cost(layer).activation_bytes_per_token for layer in plan.layers
    )
    assert again.activations == 1000 * (5 * 4 * d + one + outer)
    assert plain.total - again.total == plain.activations - again.activations > 0
    size: tuple[str, ...] = ("plan", "--layers", "24", "--width", "1024", "--heads", "16", "--schedule", "uniform")
    said = [call(*size, *words).out for words in ((), ("--recompute",))]
    activations = [float(text.partition("(activations ")[2].partition(",")[0]) for text in said]
    assert activations[1] < 0.3 * activations[0]
    assert "blocks recomputed" in said[1]


def test_what_fits_only_with_recomputation_is_let_through(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = trained(data, tmp_path / "first", train__steps=1).plan
    tokens = 2 * plan.context
    needed: dict[bool, Any] = {again: plan.memory(tokens, recompute=again).total for again in (False, True)}
    available = (needed[False] + needed[True]) // 2 + 8 * 4 * (plan.context + 1)
    monkeypatch.setattr("meristem.training.train.memory_of", lambda device: available)
    said = r"for the whole training step.*take a smaller model or batch or train\.recompute"
    with pytest.raises(InputError, match=said):
        trained(data, tmp_path / "second")
    trained(data, tmp_path / "third", train__recompute=True, train__steps=1)
