"""The bench of whole trainings, on a CPU at toy size, with stand-ins for the peers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Call
from meristem.bench.contenders import Baseline, Ours
from meristem.bench.recipe import Conditions, Point, arms_of, compare_recipes, recipes_text, seconds_to
from meristem.config import OptimizerConfig
from meristem.data import TokenData, open_data
from meristem.errors import InputError, RunError
from meristem.plan import Plan
from training.helpers import CPU

PLAN = Plan.from_heads([2, 2], width=32, vocabulary=320, context=16, feed_forward=48)
# As much of the public baseline as is cut out of it, in its order and with its headings.
SOURCE = """
raise SystemExit("what comes before the architecture is not run")

class RMSNorm(nn.Module):
    pass

class GPT(nn.Module):
    def __init__(self, vocab_size, num_layers, model_dim):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, inputs, targets):
        assert inputs.dtype == torch.int32
        logits = self.table(inputs)
        return F.cross_entropy(logits.view(targets.numel(), -1), targets.view(-1), reduction="sum")

@torch.compile
def halved(x):
    return x / 2

assert dist.get_world_size() == 1

########################################
#                Setup                 #
########################################

raise SystemExit("nor is this")

for _ in range(num_trials):

    # initialize model parameters
    model.table.weight.data.zero_()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5)]
    for group in optimizers[0].param_groups:
        group["initial_lr"] = group["lr"]

    def set_hparams(step):
        for group in optimizers[0].param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / train_steps)

    ########################################
    #        Training and Validation       #
    ########################################

    raise SystemExit("nor this")
"""


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    folder = tmp_path / "records" / "track_3_optimization"
    folder.mkdir(parents=True)
    (folder / "train_gpt_simple.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def test_the_baseline_runs_from_its_own_source(baseline: Path) -> None:
    found = Baseline(baseline, PLAN, 0.1, 4, CPU)
    tokens = torch.arange(16)[None]
    assert float(found.loss(tokens, tokens)) == pytest.approx(torch.log(torch.tensor(320.0)).item())
    before = found.model.table.weight.detach().clone()
    found.update(1, tokens, tokens)
    # A step of plain gradient descent on the summed loss, at its own rate times our factor and its own curve.
    change = (found.model.table.weight.detach() - before)[3, 3]
    assert float(change) == pytest.approx(0.5 * 0.1 * (1 - 1 / 4) * (1 - 1 / 320), rel=1e-5)
    assert found.model.table.weight.grad is None


def test_another_version_of_the_baseline_is_refused(baseline: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"train_gpt_simple\.py: not found; this is no checkout"):
        Baseline(tmp_path / "empty", PLAN, 1.0, 4, CPU)
    path = baseline / "records" / "track_3_optimization" / "train_gpt_simple.py"
    path.write_text(SOURCE.replace("# initialize model parameters", "# begin"), encoding="utf-8")
    with pytest.raises(RunError, match="has no '# initialize model parameters'; this version of it is not known"):
        Baseline(baseline, PLAN, 1.0, 4, CPU)


def test_arms_are_tried_and_the_best_rates_compared(baseline: Path, data: Path) -> None:
    """Rates are chosen on one seed and compared on the next; ours also in a shorter training."""
    found = open_data(data)
    assert isinstance(found, TokenData)
    arms = arms_of(PLAN, OptimizerConfig(lr=1e-3), CPU, nanogpt=None, baseline=baseline, factors=(0.001, 1.0))
    said: list[str] = []
    kept: list[Any] = []
    alike = Conditions(found, PLAN.context, CPU, steps=10, batch_size=2, looks=5, windows=4, seed=3)
    report = compare_recipes(arms, PLAN, alike, shares=(0.4,), say=said.append, keep=kept.append)
    tried = [(training["arm"], training["rate"]) for training in report["tried"]]
    assert tried == [("baseline", 0.001), ("baseline", 1.0), ("meristem", 1e-6), ("meristem", 1e-3)]
    names = ["baseline", "meristem", "meristem, 0.4 of the updates", "baseline, in the time of ours"]
    assert [training["arm"] for training in report["compared"]] == names
    losses = {rate: training["curve"][-1]["loss"] for training, (_, rate) in zip(report["tried"], tried, strict=True)}
    assert report["compared"][1]["rate"] == min((1e-6, 1e-3), key=losses.__getitem__)
    assert [point["step"] for point in report["compared"][1]["curve"]] == [2, 4, 6, 8, 10]
    assert report["compared"][2]["curve"][-1]["step"] == 4
    seconds = [point["seconds"] for point in report["compared"][1]["curve"]]
    assert seconds == sorted(seconds)
    assert len(said) == len(kept) == 8
    lines = recipes_text(report).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2].endswith("1.00")  # the first arm reaches its own loss in its own time
    with pytest.raises(InputError, match="windows = 1: must be at least one batch, 2"):
        replace(alike, windows=1)


def test_a_rate_that_diverges_is_not_the_best(data: Path) -> None:
    found = open_data(data)
    assert isinstance(found, TokenData)
    arms = arms_of(PLAN, OptimizerConfig(lr=1e-3), CPU, nanogpt=None, baseline=None, factors=(1e30, 1))
    alike = Conditions(found, PLAN.context, CPU, steps=3, batch_size=2, looks=1, windows=5, seed=0)
    report = compare_recipes(arms, PLAN, alike, shares=(), say=print, keep=print)
    assert math.isnan(report["tried"][0]["curve"][-1]["loss"])
    assert [training["rate"] for training in report["compared"]] == [1e-3]
    assert report["settings"]["windows"] == 4  # whole batches
    for share in (0.1, 1.5):
        with pytest.raises(InputError, match=r"shares = .*: must be at most 1, and leave at least one update of 3"):
            compare_recipes(arms, PLAN, alike, shares=(share,), say=print, keep=print)
    with pytest.raises(InputError, match="batch = 100000: must be at most the held-out windows"):
        replace(alike, batch_size=100_000, windows=100_000)


def test_heads_that_no_peer_can_have_are_measured_without_peers() -> None:
    odd = Plan.from_heads([3], width=32, head_dim=8, vocabulary=320, context=16)
    options: dict[str, Any] = {"baseline": None, "factors": (1.0,)}
    assert [arm.name for arm in arms_of(odd, OptimizerConfig(), CPU, nanogpt=None, **options)] == ["meristem"]
    with pytest.raises(InputError, match="heads = 3: must divide width 32"):
        arms_of(odd, OptimizerConfig(), CPU, nanogpt=Path("nanoGPT"), **options)


def test_another_seed_is_another_beginning() -> None:
    tokens, losses = torch.arange(16)[None], []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(float(Ours(PLAN, OptimizerConfig(), 1, CPU).loss(tokens, tokens)))
    assert losses[0] == losses[1] != losses[2]


def test_ours_is_trained_as_its_configuration_says() -> None:
    """Muon learns a sequence by heart; a rate of 0 learns nothing."""
    tokens = torch.arange(32).view(2, 16)
    losses = {}
    for rate in (0.0, 1e-2):
        ours = Ours(PLAN, OptimizerConfig(kind="muon", lr=rate), 20, CPU)
        for step in range(20):
            ours.update(step, tokens, tokens)
        losses[rate] = float(ours.loss(tokens, tokens))
    untrained = Ours(PLAN, OptimizerConfig(), 1, CPU)
    assert losses[0.0] == float(untrained.loss(tokens, tokens))
    assert losses[1e-2] < losses[0.0] / 2


def test_when_a_curve_reaches_a_loss() -> None:
    curve = [Point(10, 1.0, 5.0), Point(20, 2.0, 4.0), Point(30, 4.0, 3.0)]
    assert seconds_to(curve, 5.5) == 1.0
    assert seconds_to(curve, 4.0) == 2.0
    assert seconds_to(curve, 3.5) == 3.0
    assert seconds_to(curve, 2.9) is None


def test_from_the_command_line(call: Call, data: Path, tmp_path: Path) -> None:
    config = tmp_path / "ours.toml"
    config.write_text("[model]\nlayers = 1\nwidth = 16\nheads = 2\nschedule = 'uniform'\ncontext = 8\n")
    told = ("bench", "recipe", "--data", data, "--config", config, "--device", "cpu")
    done = call(*told, "--steps", "4", "--batch", "2", "--windows", "2", "--looks", "2", "--out", tmp_path / "r.json")
    assert done.code == 0
    assert "meristem, 0.4 of the updates" in done.out
    assert (tmp_path / "r.json").is_file()
    assert "out = " in call(*told, "--out", tmp_path).err
    assert "factors = '1,x': must be a positive number or several" in call(*told, "--factors", "1,x").err
