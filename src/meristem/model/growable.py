"""What a model must have so that it can be measured and grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from meristem.model.attention import Attention
from meristem.model.rotary import RotaryPair
from meristem.model.transformer import Watch
from meristem.plan import LayerPlan, Plan


class GrowableBlock(Protocol):
    """A block whose attention can be given heads."""

    attention: Attention

    def attention_input(self, stream: Tensor) -> Tensor: ...


class Growable(Protocol):
    """The language model, the classifier, or any other module with such blocks."""

    plan: Plan
    blocks: nn.ModuleList

    @property
    def stack(self) -> Sequence[GrowableBlock]: ...

    def make_block(self, layer: LayerPlan) -> nn.Module:
        """A block of the given shape where the others are, whose weights are still to be given."""

    def follow_plan(self, plan: Plan) -> None:
        """Follow a plan whose changes the weights already have."""

    def loss(self, tokens: Tensor, targets: Tensor, *, watch: Watch | None = None) -> Tensor: ...

    def attention_mask(self, tokens: Tensor) -> Tensor: ...

    def rope(self, head_dim: int) -> RotaryPair: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...
