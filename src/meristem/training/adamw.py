"""AdamW, in one kernel for all weights of a group on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from meristem.model.operators import use_triton


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, with the same state, on a GPU by a kernel that reads and writes less.

    Where `found_inf` (a tensor) is 1 nothing changes, and gradients are divided by `grad_scale`; they are left as they
    are, where torch writes them anew.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self._tables: dict[int, Any] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tables = {}  # a copy has its tensors elsewhere

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; a `closure` makes the gradients first."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        trained = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        if not any(trained):
            return loss
        if not all(_is_plain(p) for parameters in trained for p in parameters):
            _torch_step(self)
            return loss
        from meristem.training.triton_adamw import adamw_kernel_

        for index, (group, parameters) in enumerate(zip(self.param_groups, trained, strict=True)):
            if parameters:
                states = [self._state(p) for p in parameters]
                self._tables[index] = adamw_kernel_(
                    parameters, [p.grad for p in parameters], states, group, getattr(self, "found_inf", None),
                    getattr(self, "grad_scale", None), self._tables.get(index),
                )  # fmt: skip
        return loss

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _torch_step(optimizer: AdamW) -> None:
    """torch's update without the hooks of a step, which torch puts around the methods of both classes."""
    unwrap(torch.optim.AdamW.step, stop=lambda function: not hasattr(function, "hooked"))(optimizer)


def _is_plain(parameter: Tensor) -> bool:
    """Whether the kernel can update a parameter: a whole one in float32 on a GPU, without gaps in memory."""
    return (
        type(parameter.data) is Tensor
        and use_triton(parameter)
        and parameter.dtype == torch.float32
        and parameter.is_contiguous()
    )
