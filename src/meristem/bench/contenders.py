"""Models in training, ours and those of peers, with all that belongs to their recipes."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor

from meristem.bench.peers import NanoGPTStep
from meristem.bench.step import TrainingStep
from meristem.config import OptimizerConfig
from meristem.errors import Remedy, RunError
from meristem.plan import Plan
from meristem.training.optimizer import learning_rate

BASELINE = "train_gpt_simple.py"
IMPORTS = "import torch\nfrom torch import Tensor, nn\nfrom torch.optim import AdamW\nimport torch.nn.functional as F\n"
BASELINE_FOLDERS = (".", "records/track_3_optimization")


class Contender(Protocol):
    """A model in training."""

    def update(self, step: int, tokens: Tensor, targets: Tensor) -> None:
        """One update, the `step`-th from 0, with tokens and targets (B, T)."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of tokens (B, T), without gradients."""


class OnCurve:
    """A training step whose rate follows the curve of a configuration over so many updates."""

    def __init__(self, step: TrainingStep | NanoGPTStep, config: OptimizerConfig, steps: int) -> None:
        self.step, self.config, self.steps = step, config, steps

    def update(self, step: int, tokens: Tensor, targets: Tensor) -> None:
        self.step.rate = learning_rate(step, self.steps, self.config)
        self.step(tokens, targets)

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.step.loss(tokens, targets)


class Ours(OnCurve):
    """Our model of a plan, with an optimizer and curve as a configuration has them."""

    def __init__(self, plan: Plan, config: OptimizerConfig, steps: int, device: torch.device) -> None:
        seed = torch.initial_seed()  # as the peers, by torch.manual_seed
        super().__init__(TrainingStep(plan, device, optimizer=config, seed=seed), config, steps)


class NanoGPT(OnCurve):
    """nanoGPT's model and optimizer, with the curve of its train.py: warm-up, then half a cosine down to a tenth."""

    def __init__(self, folder: Path, plan: Plan, rate: float, steps: int, device: torch.device) -> None:
        super().__init__(NanoGPTStep(folder, plan, device, rate), OptimizerConfig(lr=rate), steps)


class Baseline:
    """The public baseline of modded-nanogpt's optimization track, from its own source.

    Its architecture, initial weights, optimizers and curve are run as they are written. Only its data loader is
    exchanged for ours, its processes for one, and all its rates are multiplied by one factor.
    """

    def __init__(self, folder: Path, plan: Plan, factor: float, steps: int, device: torch.device) -> None:
        source = _baseline_source(folder)
        module = ModuleType("modded_nanogpt_baseline")
        sys.modules[module.__name__] = module  # the compiler looks it up
        names = vars(module)
        exec(IMPORTS, names)
        names["dist"] = SimpleNamespace(
            get_world_size=lambda: 1, get_rank=lambda: 0, all_gather=lambda parts, own: None
        )
        parts = _between(source, "class RMSNorm", "#" * 40 + "\n#                Setup")
        exec(parts if device.type == "cuda" else parts.replace("@torch.compile\n", ""), names)
        self.model = names["GPT"](plan.vocabulary, len(plan.layers), plan.width).to(device)
        names.update(model=self.model, train_steps=steps)
        setting = _between(
            source, "    # initialize model parameters", "    " + "#" * 40 + "\n    #        Training and"
        )
        exec(textwrap.dedent(setting), names)
        self.optimizers, self.set_rates = names["optimizers"], names["set_hparams"]
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["initial_lr"] *= factor
        if device.type == "cuda":
            self.model.compile(dynamic=False)

    def update(self, step: int, tokens: Tensor, targets: Tensor) -> None:
        self.model(tokens.int(), targets).backward()
        self.set_rates(step)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        total: Tensor = self.model(tokens.int(), targets)
        return total / targets.numel()


def _baseline_source(folder: Path) -> str:
    paths = [folder / place / BASELINE for place in BASELINE_FOLDERS]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        text = f"{paths[-1]}: not found; this is no checkout of KellerJordan/modded-nanogpt"
        raise RunError(text, Remedy(("baseline",)))
    return path.read_text(encoding="utf-8")


def _between(source: str, begin: str, end: str) -> str:
    """The part of a text from `begin` on and before `end`."""
    _, begun, rest = source.partition(begin)
    part, ended, _ = rest.partition(end)
    if not begun or not ended:
        missing = (end if begun else begin).strip()
        raise RunError(f"{BASELINE}: has no {missing!r}; this version of it is not known")
    return begin + part
