"""Averages with a short memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Ema:
    """An exponential average that starts from nothing; `mean` corrects for its short memory."""

    beta: float
    value: Tensor | None = None
    count: int = 0

    def add(self, value: Tensor) -> None:
        before = torch.zeros_like(value) if self.value is None else self.value
        self.value = self.beta * before + (1 - self.beta) * value
        self.count += 1

    @property
    def mean(self) -> Tensor:
        assert self.value is not None
        return self.value / (1 - self.beta**self.count)
