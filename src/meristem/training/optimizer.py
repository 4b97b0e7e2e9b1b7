"""AdamW, the learning-rate curve, and one guarded update."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meristem.errors import InputError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 6e-4
    warmup: float = 0.025  # fraction of the run
    final: float = 0.1  # last learning rate, as a fraction of lr
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    clip: float = 1.0  # gradient norm; 0 turns clipping off

    def __post_init__(self) -> None:
        for field in ("warmup", "final", "beta1", "beta2"):
            if not 0 <= getattr(self, field) <= 1:
                raise InputError(f"optimizer.{field}", getattr(self, field), "must be from 0 to 1")
        for field in ("beta1", "beta2"):
            if getattr(self, field) == 1:
                raise InputError(f"optimizer.{field}", 1.0, "must be below 1, or nothing is ever learned")
        for field in ("lr", "eps", "weight_decay", "clip"):
            if not 0 <= getattr(self, field) < math.inf:
                raise InputError(f"optimizer.{field}", getattr(self, field), "must be 0 or above, and finite")


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of update `step` (0-based) of `steps`: linear up to the peak, then a half cosine to the floor."""
    warmup = round(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    floor = config.lr * config.final
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The model's parameters for an optimizer: weight decay on matrices only, not on norms and gates."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW."""
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients together."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    return torch.linalg.vector_norm(torch.stack(norms))


def guarded_update(optimizer: torch.optim.AdamW, lr: float, loss: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Clip and update; where loss or gradient are not finite, leave weights and moments as they are.

    Returns the gradient norm and whether the update was skipped (1.0 or 0.0), both still on the device. Nothing
    here waits for the device: clipping and skipping ride on the fused kernel's own loss-scaling inputs.
    """
    norm = gradient_norm(p for group in optimizer.param_groups for p in group["params"])
    bad = (~torch.isfinite(norm) | ~torch.isfinite(loss)).float()
    optimizer.found_inf = bad  # type: ignore[attr-defined]
    if clip > 0:
        optimizer.grad_scale = (norm / clip).clamp(min=1.0)  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return norm, bad
