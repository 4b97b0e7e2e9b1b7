"""Training on a CUDA device: recorded graphs, evaluation in between, and resume."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meristem.config import OptimizerConfig
from meristem.errors import InputError
from meristem.model import Decoder
from meristem.plan import Plan
from meristem.runs import saver
from meristem.runs.checkpoint import Snapshot, list_checkpoints, load_checkpoint, snapshot, write_checkpoint
from meristem.runs.run_folder import RunFolder
from meristem.training.averaging import update_average
from meristem.training.cuda_graph import RecordedStep
from meristem.training.gradients import Gradients
from meristem.training.optimizer import guarded_update, make_optimizer
from meristem.training.train import resume

from .helpers import copy_run, metrics, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = {"train__device": "cuda", "model__width": 64, "model__dims": [32], "model__heads": 4}


PLAIN = Plan.from_heads([2, 4], width=128, vocabulary=320, context=64)
IMPORTED = replace(PLAIN, qk_norm=True, qk_gain=True, qkv_bias=True, tied=False)


@pytest.mark.parametrize("plan", [PLAIN, IMPORTED], ids=["plain", "biases and gains"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_recorded_graph_gives_the_gradients_of_plain_calls(micro_batches: int, plan: Plan) -> None:
    device = torch.device("cuda")
    models = [Decoder(plan).to(device) for _ in range(2)]
    for model in models:
        model.use_attention(device, torch.bfloat16)
    plain, recorded = (Gradients(m, device=device, record=r) for m, r in zip(models, (False, True), strict=True))
    assert recorded.graph is not None
    assert plain.graph is None
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):  # the first call records, the others replay on other tokens
        windows = torch.randint(320, (micro_batches, 4, 65), generator=generator).to(device)
        tokens, targets = windows[..., :-1].contiguous(), windows[..., 1:].contiguous()
        losses = [float(gradients(tokens, targets)) for gradients in (plain, recorded)]
        assert losses[0] == pytest.approx(losses[1], abs=2e-3)
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            error = (mine.grad - theirs.grad).norm() / theirs.grad.norm()
            assert float(error) < 2e-2


@pytest.mark.parametrize("shape", [(2, 1, 64), (1, 4, 64), (2, 4, 32)])
def test_a_recorded_graph_refuses_tokens_of_another_shape(shape: tuple[int, ...]) -> None:
    """One sequence instead of four would be copied into all of them, and half the micro-batches count half."""
    device = torch.device("cuda")
    model = Decoder(Plan.from_heads([2], width=64, vocabulary=320, context=64)).to(device)
    gradients = Gradients(model, device=device)
    tokens = torch.randint(320, (2, 4, 64), generator=torch.Generator().manual_seed(0)).to(device)
    for _ in range(2):
        gradients(tokens, tokens)
    part = tokens[: shape[0], : shape[1], : shape[2]]
    with pytest.raises(InputError, match="tokens"):
        gradients(part, part)


def test_a_recorded_graph_with_recomputed_blocks_gives_the_same_gradients() -> None:
    """From less memory."""
    plan, device = Plan.from_heads([4] * 8, width=256, vocabulary=320, context=256), torch.device("cuda")
    windows = torch.randint(320, (1, 32, 257), generator=torch.Generator().manual_seed(0)).to(device)
    peaks, losses, found = [], [], []
    for recompute in (False, True):
        model = Decoder(plan).to(device)
        model.use_attention(device, torch.bfloat16)
        gradients = Gradients(model, device=device, recompute=recompute)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):  # recorded, replayed
            loss = float(gradients(windows[..., :-1].contiguous(), windows[..., 1:].contiguous()))
        peaks.append(torch.cuda.max_memory_allocated())
        losses.append(loss)
        found.append({name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})
        del gradients, model
    assert peaks[1] < 0.7 * peaks[0]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    for name in found[0]:
        assert float((found[1][name] - found[0][name]).norm() / found[0][name].norm()) < 1e-2, name


def test_an_average_is_taken_without_waiting_for_the_device() -> None:
    plan, device = Plan.from_heads([2, 4], width=64, vocabulary=320, context=64), torch.device("cuda")
    model = Decoder(plan).to(device)
    optimizer = make_optimizer(model, OptimizerConfig())
    gradients = Gradients(model, device=device)
    expected: dict[str, Tensor] = {}
    for t in range(1, 6):
        windows = torch.randint(320, (1, 4, 65), generator=torch.Generator().manual_seed(t)).to(device)
        loss = gradients(windows[..., :-1].contiguous(), windows[..., 1:].contiguous())
        torch.cuda.set_sync_debug_mode("error" if t > 1 else "default")  # AdamW looks up once where everything lies
        try:
            _, skipped = guarded_update(optimizer, 1e-2, loss, 1.0)
            update_average(optimizer, 0.5, skipped)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for name, weights in model.named_parameters():
            old = expected.get(name, torch.zeros_like(weights, dtype=torch.float64))
            expected[name] = old + max(0.5, 10 / (9 + t)) * (weights.detach().double() - old)
    found = {name: optimizer.state[p]["average"].double() for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_compiled_and_plain_runs_agree(data: Path, tmp_path: Path) -> None:
    compiled = trained(data, tmp_path / "compiled", **CUDA, train__compile=True)
    plain = trained(data, tmp_path / "plain", **CUDA)
    pairs = list(zip(metrics(compiled), metrics(plain), strict=True))
    assert any("held_out_loss" in mine for mine, _ in pairs)
    for mine, theirs in pairs:
        for key in ("loss", "held_out_loss"):
            if key in mine:
                assert mine[key] == pytest.approx(theirs[key], abs=2e-2)


# Births after 3 and 7 updates, the deeper layer first, of random heads: no rounding can change what is born.
GROWING: dict[str, Any] = {
    **CUDA, "model__head_list": [2, 4, 4], "growth__policy": "sgt", "growth__start": 3, "growth__window": 4,
    "growth__heads": "random", "growth__max_layers": 2, "growth__shortlist": 2,
}  # fmt: skip


def test_a_run_that_grows_is_recorded_again_after_each_birth(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[RecordedStep] = []
    updates: list[int] = []  # done when a recording was made
    record, call = RecordedStep._record, Gradients.__call__
    done = 0

    def noted(graph: RecordedStep, *arguments: Any) -> None:
        recorded.append(graph)
        updates.append(done)
        record(graph, *arguments)

    def counted(gradients: Gradients, tokens: Tensor, targets: Tensor) -> Tensor:
        nonlocal done
        loss = call(gradients, tokens, targets)
        done += 1
        return loss

    monkeypatch.setattr(RecordedStep, "REST", 2)
    monkeypatch.setattr(RecordedStep, "_record", noted)
    monkeypatch.setattr(Gradients, "__call__", counted)
    ours = trained(data, tmp_path / "recorded", **GROWING)
    assert updates == [0, 4, 8]
    assert recorded[-1].recording is not None
    monkeypatch.setattr(RecordedStep, "is_due", lambda _: False)
    plain = trained(data, tmp_path / "plain", **GROWING)
    assert len(updates) == 3
    runs = ours, plain
    births, theirs = ([entry for entry in run.read(run.events) if entry["event"] == "growth"] for run in runs)
    assert [entry["layer"] for entry in births[:2]] == [2, 1]
    for name in ("step", "action", "layer", "heads", "passes", "plan"):
        assert [entry[name] for entry in births] == [entry[name] for entry in theirs], name
    for mine, other in zip(births, theirs, strict=True):
        assert mine["layer_entropy"] == pytest.approx(other["layer_entropy"], abs=1e-2)
    assert ours.newest_plan.loops.keys() == {1, 2}
    for mine, other in zip(*map(metrics, runs), strict=True):
        for key in ("loss", "held_out_loss"):
            if key in mine:
                assert mine[key] == pytest.approx(other[key], abs=2e-2), (mine["step"], key)


def test_graphs_are_recorded_while_checkpoints_are_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save at every step, each still being written when the next updates, births and recordings come."""

    def slow(folder: Path, taken: Snapshot) -> Path:
        for tensors in taken.tensors.values():
            for tensor in tensors.values():
                for _ in range(50):
                    tensor.cpu()
        return write_checkpoint(folder, taken)

    monkeypatch.setattr(saver, "write_checkpoint", slow)
    monkeypatch.setattr(RecordedStep, "REST", 0)
    wanted = {**GROWING, "checkpoint__every": 1, "checkpoint__keep": 100, "eval__every": 0}
    run = trained(data, tmp_path / "run", **wanted)
    monkeypatch.undo()
    whole = trained(data, tmp_path / "whole", **{**wanted, "checkpoint__every": 0})
    last = [load_checkpoint(list_checkpoints(one.checkpoints)[-1]).model for one in (run, whole)]
    for name, tensor in last[0].items():
        torch.testing.assert_close(tensor, last[1][name], rtol=0, atol=2e-2)
    steps = [load_checkpoint(path) for path in list_checkpoints(run.checkpoints)]
    assert [one.step for one in steps] == list(range(1, 13))
    for before, after in itertools.pairwise(steps):  # each is of its own step
        assert not torch.equal(before.model["embedding.weight"], after.model["embedding.weight"])


def test_copies_are_made_on_the_host_where_they_would_be_in_the_way_of_the_next_update() -> None:
    """A GPU that has room for them now, and not when the next update needs what it had before."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = torch.nn.Linear(4096, 4096, device=device)  # 64 MiB
    optimizer = torch.optim.AdamW(model.parameters())
    free = torch.cuda.mem_get_info()[0]
    activations = torch.empty(free - 2**26, dtype=torch.uint8, device=device)  # an update at its fullest
    del activations
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > 2**30
    taken = snapshot(1, model=model, optimizer=optimizer, state={})
    assert not any(tensor.is_cuda for tensors in taken.tensors.values() for tensor in tensors.values())
    torch.cuda.reset_peak_memory_stats()
    taken = snapshot(1, model=model, optimizer=optimizer, state={})
    assert taken.tensors["model.safetensors"]["weight"].is_cuda


def test_a_run_resumes_on_cuda(data: Path, tmp_path: Path) -> None:
    whole = trained(data, tmp_path / "whole", **CUDA)
    run: RunFolder = copy_run(whole, tmp_path / "again", last=4)
    resume(run.path)
    last, expected = metrics(run)[-1], metrics(whole)[-1]
    assert last["step"] == expected["step"]
    assert last["held_out_loss"] == pytest.approx(expected["held_out_loss"], abs=2e-2)
