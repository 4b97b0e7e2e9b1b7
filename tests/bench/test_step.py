"""The bench of a training step, on a CPU at toy size."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import pytest
import torch

from meristem.bench.peers import NanoGPTStep
from meristem.bench.step import Timing, TrainingStep, random_batches
from meristem.bench.steps import compare_steps, results_text
from meristem.bench.train_speed import measure_train
from meristem.errors import InputError, RunError
from meristem.plan import Plan
from meristem.training.gradients import Gradients
from training.helpers import CPU

SHAPE = {"width": 32, "vocabulary": 64, "context": 16, "feed_forward": 48}
PLANS = {"uniform": Plan.from_heads([4, 4], **SHAPE), "prism": Plan.from_heads([2, 4], **SHAPE)}  # type: ignore[arg-type]


def test_arms_are_measured_in_turn_and_reported() -> None:
    said: list[str] = []
    report = compare_steps(
        PLANS, CPU, attention=["auto"], nanogpt=None, train=False, timing=Timing(2, 3, 1), rounds=2, compile=False,
        say=said.append,
    )  # fmt: skip
    results = report["results"]
    assert [result["name"] for result in results] == ["uniform", "prism"] * 2
    assert len(said) == 4
    for result in results:
        assert result["tokens_per_second"] == pytest.approx(2 * 16 / result["milliseconds"] * 1e3)
        assert result["milliseconds"] > 0
        assert result["peak_gib"] is None
        assert 3 < result["last_loss"] < 6
    assert report["plans"] == {"uniform": [4, 4], "prism": [2, 4]}
    table = results_text(report).splitlines()
    assert [line.split()[0] for line in table[2:]] == ["uniform", "prism"]
    assert " 1.000 " in table[2]


def test_a_whole_training_is_measured_beside_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    """On data of the plan's vocabulary, and with a loss that is that of random tokens; it prints nothing itself."""
    report = compare_steps(
        {"prism": PLANS["prism"]}, CPU, attention=["auto"], nanogpt=None, train=True, timing=Timing(2, 3, 1),
        rounds=1, compile=False, say=lambda text: None,
    )  # fmt: skip
    step, whole = report["results"]
    assert [step["name"], whole["name"]] == ["prism", "train, prism"]
    assert whole["tokens_per_second"] == pytest.approx(2 * 16 / whole["milliseconds"] * 1e3)
    assert whole["last_loss"] == pytest.approx(math.log(64), abs=0.5)
    assert capsys.readouterr().out == ""


def test_the_first_updates_of_a_whole_training_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the warm-up says, and the first one; those that are timed take as long as they take."""
    timing, slow, count = Timing(batch=2, steps=3, warmup=16), 0.2, itertools.count()
    compute = Gradients.__call__

    def slow_at_first(self: Gradients, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if next(count) in range(timing.warmup, 1 + timing.warmup):
            time.sleep(slow)
        return compute(self, tokens, targets)

    monkeypatch.setattr(Gradients, "__call__", slow_at_first)
    found = measure_train("", PLANS["prism"], CPU, timing, attention="auto", compile=False)
    assert next(count) == 1 + timing.warmup + timing.steps + 1  # the first of them starts the clock
    assert found.steps == timing.steps
    assert found.milliseconds < 1e3 * slow / timing.steps


def test_steps_with_recomputed_blocks_and_an_average_have_the_same_losses() -> None:
    plan, losses = PLANS["prism"], []
    for options in ({}, {"recompute": True, "average": 0.9}):
        step = TrainingStep(plan, CPU, **options)  # type: ignore[arg-type]
        batches = random_batches(plan, CPU, 2)
        losses.append([float(step(*next(batches))) for _ in range(3)])
        states = [step.optimizer.state[parameter] for parameter in step.model.parameters()]
        assert all(("average" in state) == bool(options) for state in states)
    assert losses[0] == losses[1]


def test_nanogpt_needs_a_checkout_and_one_head_count(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"model\.py: not found; this is no checkout"):
        NanoGPTStep(tmp_path, PLANS["uniform"], CPU)
    (tmp_path / "model.py").touch()
    with pytest.raises(InputError, match=r"plan = \(2, 4\): nanoGPT takes one head count"):
        NanoGPTStep(tmp_path, PLANS["prism"], CPU)


def test_nanogpt_is_stepped_as_its_own_training_does(tmp_path: Path) -> None:
    """A stand-in with nanoGPT's interface: the step clips, updates and clears the gradients."""
    (tmp_path / "model.py").write_text(
        """
import dataclasses, torch

@dataclasses.dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert (config.n_layer, config.n_head, config.n_embd, config.vocab_size) == (2, 4, 32, 64)
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def configure_optimizers(self, decay, lr, betas, device):
        return torch.optim.SGD(self.parameters(), lr=lr)

    def forward(self, tokens, targets):
        logits = self.table(tokens)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
""",
        encoding="utf-8",
    )
    step = NanoGPTStep(tmp_path, PLANS["uniform"], CPU, rate=100.0)
    tokens = torch.arange(16)[None]
    losses = [float(step(tokens, tokens)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
