"""Models of peers, from checkouts of their repositories."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meristem.devices import autocast
from meristem.errors import InputError, Remedy, RunError
from meristem.plan import Plan

NANOGPT_RATE = 6e-4  # its own, of 124M parameters


def uniform_twin(plan: Plan) -> Plan:
    """A plan for peers, whose layers are all alike: with the most heads of any layer of ours."""
    heads = [max(plan.heads)] * len(plan.layers)
    return Plan.from_heads(heads, width=plan.width, vocabulary=plan.vocabulary, context=plan.context)


def nanogpt_model(folder: Path, plan: Plan) -> Any:
    """nanoGPT's model with the sizes of a plan, from a checkout of karpathy/nanoGPT."""
    source = folder / "model.py"
    if not source.is_file():
        raise RunError(f"{source}: not found; this is no checkout of karpathy/nanoGPT", Remedy(("nanogpt",)))
    if len(set(plan.heads)) > 1:
        raise InputError("plan", plan.heads, "nanoGPT takes one head count for all layers")
    spec = importlib.util.spec_from_file_location("nanogpt_model", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=plan.context, vocab_size=plan.vocabulary, n_layer=len(plan.layers), n_head=plan.heads[0],
        n_embd=plan.width, dropout=0.0, bias=False,
    )  # fmt: skip
    return module.GPT(config)


class NanoGPTStep:
    """nanoGPT's model and optimizer step, as its train.py does them, at a `rate` that may be set between two steps.

    On a GPU it is compiled, which is its default.
    """

    def __init__(self, folder: Path, plan: Plan, device: torch.device, rate: float = NANOGPT_RATE) -> None:
        self.device, self.rate = device, rate
        self.model = nanogpt_model(folder, plan).to(device)
        self.optimizer = self.model.configure_optimizers(0.1, rate, (0.9, 0.95), device.type)
        self.forward = torch.compile(self.model) if device.type == "cuda" else self.model

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        loss = self.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of tokens (B, T)."""
        with autocast(self.device):
            loss: Tensor = self.forward(tokens, targets)[1]
        return loss
