"""The optimizer of a run, the learning-rate curve, and one guarded update."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meristem.config import OptimizerConfig
from meristem.model.inputs import check_model
from meristem.ranks import own_parts, sum_over_ranks
from meristem.training.adamw import AdamW
from meristem.training.muon import Muon


def learning_rate(step: float, steps: float, config: OptimizerConfig, branched: int | None = None) -> float:
    """The rate of update `step` (0-based) of `steps`: linear up to the peak, then down to the floor.

    By "cosine" that is half a cosine. By "wsd" the rate stays, and falls in a straight line in the last part of the
    run, or from the update on at which the run has `branched` off another, where the warm-up is over.
    """
    warmup, begin = constant_part(steps, config, branched)
    if step < warmup:
        return config.rate * (step + 1) / (warmup + 1)
    floor = config.rate * config.final
    if config.curve == "wsd":
        return config.rate + (floor - config.rate) * max(0, step - begin + 1) / max(1, steps - begin)
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return floor + (config.rate - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def constant_part(steps: float, config: OptimizerConfig, branched: int | None = None) -> tuple[int, int]:
    """The updates done when the warm-up of a run is over, and when the decay of "wsd" begins."""
    if branched is not None:
        return 0, branched
    return round(config.warmup * steps), round((1 - config.decay) * steps)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The model's parameters for an optimizer: weight decay on matrices only, not on norms and gates.

    >>> optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3)
    >>> [group["weight_decay"] for group in optimizer.param_groups]
    [0.1, 0.0]
    """
    own = model.module if isinstance(model, DistributedDataParallel) else model
    check_model(own)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Fused AdamW, or Muon."""
    betas = config.beta1, config.beta2
    if config.kind == "muon":
        return Muon(
            model, config.rate, momentum=config.momentum, betas=betas, eps=config.eps, weight_decay=config.weight_decay
        )
    groups = parameter_groups(model, config.weight_decay)
    return AdamW(groups, lr=config.rate, betas=betas, eps=config.eps)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of all gradients together, those of all processes where each has its part."""
    gradients, parts = own_parts([p.grad for p in parameters if p.grad is not None])
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return sum_over_ranks(norm.square()).sqrt() if parts else norm


def guarded_update(optimizer: torch.optim.Optimizer, lr: float, loss: Tensor, clip: float) -> tuple[Tensor, Tensor]:
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
