"""The average of the weights: its formula, what edits do to it, and how runs keep, measure and hand it out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import Call
from meristem import Decoder, InputError, Plan, parameter_groups
from meristem.config import OptimizerConfig
from meristem.growth.apply import apply_edit
from meristem.growth.edits import AddBlock, AddHead, Edit, LoopHeads, RemoveBlock, RemoveHead
from meristem.growth.head_surgery import newborn_head
from meristem.plan.layers import Gates
from meristem.runs.checkpoint import list_checkpoints, load_checkpoint
from meristem.runs.run_folder import RunFolder, load_run
from meristem.training.averaging import averaged, update_average
from meristem.training.gradients import Gradients
from meristem.training.optimizer import guarded_update, make_optimizer
from meristem.training.train import resume
from runs.test_divergence import bad_batches

from .helpers import CPU, assert_equal_runs, copy_run, final_tensors, metrics, run_jobs, tiny_config, trained
from .test_branching import TRUNK, branch_of
from .test_distributed import assert_close_runs
from .test_together import TOGETHER

PLAN = Plan.from_heads([2, 2], width=16, vocabulary=40, context=8)
KINDS = ("adamw", "muon")


class Followed:
    """A model that trains, and the average of its weights beside it, in float64 and by the formula."""

    def __init__(self, decay: float, kind: Any = "adamw") -> None:
        self.decay, self.model = decay, Decoder(PLAN)
        self.optimizer = make_optimizer(self.model, OptimizerConfig(kind=kind))
        self.expected: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.seed = 0

    def update(self, *, skipped: bool = False) -> None:
        self.seed += 1
        window = torch.randint(40, (1, 4, 9), generator=torch.Generator().manual_seed(self.seed))
        loss = Gradients(self.model, compile=False, device=CPU)(window[..., :-1], window[..., 1:])
        loss = loss * math.nan if skipped else loss
        update_average(self.optimizer, self.decay, guarded_update(self.optimizer, 1e-2, loss, 1.0)[1])
        if skipped:
            return
        for name, weights in self.model.named_parameters():
            t = self.counts[name] = self.counts.get(name, 0) + 1
            share = max(1 - self.decay, 10 / (9 + t))
            old = self.expected.get(name, torch.zeros_like(weights, dtype=torch.float64))
            self.expected[name] = old + share * (weights.detach().double() - old)

    def check(self) -> None:
        states = {name: self.optimizer.state[p] for name, p in self.model.named_parameters()}
        assert {name: int(state["averaged"]) for name, state in states.items()} == self.counts
        found = {name: state["average"].double() for name, state in states.items()}
        torch.testing.assert_close(found, self.expected, rtol=1e-5, atol=1e-6)

    def edit(self, edit: Edit) -> None:
        apply_edit(self.model, self.optimizer, edit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_is_that_of_the_formula(decay: float, kind: str) -> None:
    """In 0.5 the end of the quick beginning is among the updates, in 0.999 it is not. Skipped updates count nothing."""
    followed = Followed(decay, kind)
    for number in range(24):
        followed.update(skipped=number in (0, 5, 6))
    followed.check()
    far = [(followed.expected[name] - p.detach()).abs().max() for name, p in followed.model.named_parameters()]
    assert max(far) > 1e-3  # it is not just the weights


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_follows_heads_and_blocks(kind: str) -> None:
    """What stays keeps its average, a copy has that of its source, and what is new begins as its weights."""
    followed = Followed(0.9, kind)
    for _ in range(6):
        followed.update()
    head = newborn_head(PLAN.layers[1], PLAN.width, None, seed=3)
    followed.edit(AddHead(1, head))
    qkv, out = "blocks.1.attention.qkv.weight", "blocks.1.attention.out.weight"
    expected, dim = followed.expected, PLAN.layers[1].head_dim
    rows = expected[qkv].unflatten(0, (3, 2, dim))
    new = torch.stack([part.double() for part in (head.query, head.key, head.value) if part is not None])[:, None]
    expected[qkv] = torch.cat((rows, new), dim=1).flatten(0, 2)
    expected[out] = torch.cat((expected[out], head.out.double()), dim=1)
    followed.check()
    followed.update()

    followed.edit(AddBlock(2, copy_of=1))
    for name in [name for name in expected if name.startswith("blocks.1.")]:
        copy = name.replace("blocks.1.", "blocks.2.")
        expected[copy], followed.counts[copy] = expected[name].clone(), followed.counts[name]
    followed.check()
    followed.update()

    followed.edit(AddBlock(0))  # of which neither optimizer nor average know anything before its first update
    expected = followed.expected = {_moved(name, 1): value for name, value in expected.items()}
    followed.counts = {_moved(name, 1): value for name, value in followed.counts.items()}
    followed.update()
    followed.check()

    folded = torch.randn(PLAN.width, 3 * dim, generator=torch.Generator().manual_seed(1))
    followed.edit(RemoveHead(2, 0, folded))
    qkv, out = "blocks.2.attention.qkv.weight", "blocks.2.attention.out.weight"
    expected[qkv] = expected[qkv].unflatten(0, (3, 3, dim))[:, 1:].flatten(0, 2)
    expected[out] = folded[:, dim:].double()  # made anew
    followed.check()
    followed.edit(RemoveBlock(0))
    left = [name for name in expected if not name.startswith("blocks.0.")]
    followed.expected = {_moved(name, -1): expected[name] for name in left}
    followed.counts = {_moved(name, -1): followed.counts[name] for name in left}
    followed.update()
    followed.check()


def _moved(name: str, by: int) -> str:
    """The name of a tensor when its block has another number."""
    start, _, rest = name.partition(".")
    number, _, own = rest.partition(".")
    return f"blocks.{int(number) + by}.{own}" if start == "blocks" else name


def test_a_single_gate_is_followed_too() -> None:
    """Weights of one number have moments of one number, which grow with them."""
    plan = replace(Plan.uniform(layers=1, width=8, heads=1, vocabulary=11, context=8), gates=Gates(1, 1))
    model = Decoder(LoopHeads(0, (0,), 1).apply(plan))
    optimizer, tokens = torch.optim.AdamW(parameter_groups(model, 0.1)), torch.arange(8)[None]
    for edit in (AddBlock(1, copy_of=0), RemoveBlock(0)):
        model(tokens, tokens).loss.backward()
        optimizer.step()
        update_average(optimizer, 0.9, torch.zeros(()))
        apply_edit(model, optimizer, edit)
        for parameter in model.parameters():
            for kind in ("exp_avg", "exp_avg_sq", "average"):
                assert optimizer.state[parameter][kind].shape == parameter.shape


def test_a_newborn_head_leaves_the_function_of_the_average() -> None:
    followed, tokens = Followed(0.9), torch.arange(8)[None]
    for _ in range(4):
        followed.update()
    with averaged(followed.optimizer):
        before = followed.model.logits(tokens)
    followed.edit(AddHead(0, newborn_head(PLAN.layers[0], PLAN.width, None, seed=3)))
    with averaged(followed.optimizer):
        assert torch.equal(followed.model.logits(tokens), before)


def test_weights_come_back_to_the_bit_and_to_their_places() -> None:
    followed = Followed(0.9)
    for _ in range(3):
        followed.update()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in followed.model.named_parameters()}

    def look_and_fail() -> None:
        with averaged(followed.optimizer):
            found = {name: p.detach().double() for name, p in followed.model.named_parameters()}
            torch.testing.assert_close(found, followed.expected, rtol=1e-5, atol=1e-6)
            assert all(p.data_ptr() == before[name][0] for name, p in followed.model.named_parameters())
            raise KeyError

    with pytest.raises(KeyError):
        look_and_fail()
    assert all(torch.equal(p, before[name][1]) for name, p in followed.model.named_parameters())
    followed.check()


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Blocks are stacked, heads come and go, loops grow."""
    return trained(data, tmp_path_factory.mktemp("grown") / "run", **TOGETHER, train__average=0.9)


def plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith((".average", ".averaged"))}


def test_an_average_changes_nothing_else(data: Path, grown: RunFolder, tmp_path: Path) -> None:
    without = trained(data, tmp_path / "without", **TOGETHER)
    tensors = final_tensors(grown)
    torch.testing.assert_close(plain(tensors), final_tensors(without), rtol=0, atol=0)
    assert len(tensors) > len(plain(tensors))
    own = [{key: value for key, value in line.items() if not key.endswith("_average")} for line in metrics(grown)]
    assert own == metrics(without)


@pytest.mark.parametrize("last", [2, 5, 9, 14])
def test_a_resumed_run_has_the_same_average(last: int, grown: RunFolder, tmp_path: Path) -> None:
    run = copy_run(grown, tmp_path / "run", last=last)
    resume(run.path)
    assert_equal_runs(run, grown)  # the average is among the tensors


def test_both_losses_are_measured_and_shown(grown: RunFolder, call: Call) -> None:
    """What the run recorded of its average is what `eval` finds of the saved one."""
    last = [line for line in metrics(grown) if "held_out_loss" in line][-1]
    windows = str(grown.config.eval.windows)
    for words, name in (([], ""), (["--average"], "_average")):
        said = call("eval", grown.path, "--windows", windows, "--distance-windows", "1", *words)
        assert said.code == 0
        assert ("average of the weights" in said.out) == bool(words)
        found = json.loads((grown.path / f"eval{'-average' * bool(words)}.json").read_text())
        assert found["average"] == bool(words)
        assert found["loss"] == pytest.approx(last[f"held_out_loss{name}"], rel=1e-9)
        assert last[f"perplexity{name}"] == pytest.approx(math.exp(found["loss"]), rel=1e-9)
    assert last["held_out_loss"] != last["held_out_loss_average"]
    text = call("report", grown.path).out
    assert f"held-out loss {last['held_out_loss']:.4f}, of the average {last['held_out_loss_average']:.4f}" in text
    assert f"average {last['held_out_loss_average']:.3f}" in (grown.path / "loss.svg").read_text(encoding="utf-8")


def test_the_picture_of_a_run_is_of_its_weights(grown: RunFolder, call: Call) -> None:
    """Distances of attention by the average are told, and do not take the place of those in structure.svg."""
    picture, few = grown.path / "structure.svg", ("--windows", "1", "--distance-windows", "1", "--json")
    found = json.loads(call("eval", grown.path, *few).out)
    drawn = picture.read_bytes()
    of_average = json.loads(call("eval", grown.path, "--average", *few).out)
    assert of_average["attention_distance"] != found["attention_distance"]
    assert picture.read_bytes() == drawn


def test_what_is_loaded_is_the_average(grown: RunFolder, whole: RunFolder, call: Call) -> None:
    saved = load_checkpoint(list_checkpoints(grown.checkpoints)[-1])
    model = load_run(grown.path, average=True, device="cpu").model
    for name, weights in model.named_parameters():
        assert torch.equal(weights, saved.optimizer[f"{name}.average"])
    words = ["--prompt", "Page", "--tokens", "8", "--temperature", "0", "--device", "cpu"]
    with_average, without = call("generate", grown.path, *words, "--average"), call("generate", grown.path, *words)
    assert (with_average.code, without.code) == (0, 0)
    assert call("generate", whole.path, *words, "--average").code == 2
    with pytest.raises(InputError, match=r"average = True: was not kept.*was trained with train\.average = 0\.0"):
        load_run(whole.path, average=True)


def test_a_classifier_has_an_average(labelled: Path, tmp_path: Path, call: Call) -> None:
    run = trained(labelled, tmp_path / "run", train__average=0.9)
    last = [line for line in metrics(run) if "held_out_loss" in line][-1]
    assert last.keys() >= {"accuracy_average", "macro_f1_average", "held_out_loss_average"}
    said = call("eval", run.path, "--average", "--json")
    assert json.loads(said.out)["loss"] == pytest.approx(last["held_out_loss_average"], rel=1e-9)


def test_skipped_updates_of_a_run_count_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad_batches(monkeypatch, data, range(5, 7))
    run = trained(data, tmp_path / "run", train__average=0.9)
    counts = {int(value) for name, value in final_tensors(run).items() if name.endswith(".averaged")}
    assert counts == {10}


def test_two_processes_have_the_average_of_one(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(tiny_config(data, train__average=0.9).to_toml(), encoding="utf-8")
    run_jobs((2, "train", config, tmp_path / "pair"))
    assert_close_runs(RunFolder.open(tmp_path / "pair"), trained(data, tmp_path / "alone", train__average=0.9))


def test_a_branch_may_begin_an_average_go_on_with_it_or_drop_it(data: Path, tmp_path: Path) -> None:
    without = trained(data, tmp_path / "without", **TRUNK)
    trunk = trained(data, tmp_path / "with", **TRUNK, train__average=0.9)
    counts: dict[str, set[int]] = {}
    for name, settings in {
        "begins": branch_of(without, train__average=0.9),
        "goes on": branch_of(trunk, train__average=0.9),
        "drops": branch_of(trunk),
    }.items():
        tensors = final_tensors(trained(data, tmp_path / name, **settings))
        counts[name] = {int(value) for key, value in tensors.items() if key.endswith(".averaged")}
        torch.testing.assert_close(
            plain(tensors), final_tensors(trained(data, tmp_path / f"{name} 2", **branch_of(without))), rtol=0, atol=0
        )
    assert counts == {"begins": {6}, "goes on": {12}, "drops": set()}


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5])
def test_what_is_no_memory_is_refused(value: float, data: Path) -> None:
    with pytest.raises(InputError, match=rf"train\.average = {value}: must be below 1, and 0 or above"):
        tiny_config(data, train__average=value)


def test_the_memory_estimate_counts_the_average() -> None:
    plain, kept = PLAN.memory(100), PLAN.memory(100, average=True)
    assert kept.total - plain.total == kept.optimizer - plain.optimizer == 4 * PLAN.parameters
