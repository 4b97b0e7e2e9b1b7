"""What a gauge is: a value that says what is measured, and the instrument that measures it in a model.

Policies ask for gauges. Those that are equal share one instrument, so that everything is measured once however many
ask for it. A reading is something all processes agree on: it is summed over them, or the first one's.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from meristem.gauges.probe import Probe
from meristem.model.growable import Growable
from meristem.moves import Moves
from meristem.plan import Plan


@runtime_checkable
class Gauge(Protocol):
    """A frozen value; a new gauge is a dataclass with this one method, and an `Instrument`.

    >>> isinstance(TrainingLoss(), Gauge)
    True
    """

    def instrument(self, model: Growable) -> Instrument:
        """What measures it in a model."""


class Instrument:
    """Measures. One that remembers is fed with batches, follows changes of the structure, and has a state.

    >>> class TokenCount(Instrument):
    ...     def read(self, probe):
    ...         return probe.tokens.numel()
    >>> TokenCount().read(probe)
    32
    """

    looks: ClassVar[bool] = True  # whether being fed it looks at the weights, which may first have to be gathered

    def feed(self, probe: Probe) -> None:
        """Take in what a batch shows."""

    def read(self, probe: Probe) -> Any:
        """What is known now; the same on all processes."""
        raise NotImplementedError

    def follow(self, moves: Moves, plan: Plan) -> None:
        """Layers or heads have moved, and the model has this plan now."""

    def state(self) -> dict[str, Any]:
        """JSON values and tensors, from which `load` goes on exactly."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


def gauge_place(model: Growable) -> dict[str, Any]:
    """The device and the dtype in which an instrument computes."""
    weight = model.stack[0].attention.out.weight
    return {"device": weight.device, "dtype": torch.float64 if weight.dtype == torch.float64 else torch.float32}
