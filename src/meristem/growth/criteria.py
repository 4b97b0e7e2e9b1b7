"""Ways to decide about heads, each a gauge with the policy that reads it, behind one interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meristem.gauges.demand import DemandGauge
from meristem.gauges.energy import EnergyGauge, Projections, projections
from meristem.growth.incrt import Incrt, IncrtState, RelativeDemand
from meristem.growth.published import Published, PublishedState, RandomBirths, RandomState
from meristem.growth.surgery import Model
from meristem.ranks import from_first_rank, mean_over_ranks

Policy = Incrt | Published | RandomBirths


class Seen(NamedTuple):
    """What a batch shows: the loss, what every layer's attention reads, and the gradient of the loss by what it writes.

    Both are (layers, B, T, d), the gradient that of the mean loss times the number of its terms; `allowed` (T, T) or
    (B, T, T) says which tokens each token may look at, and `sizes` (layers,) how large the stream is.
    """

    loss: Tensor
    inputs: Tensor
    gradients: Tensor
    allowed: Tensor
    sizes: Tensor


class Decision(Protocol):
    """At most one change: the layer that is given a head, or the layer and the head that leaves it."""

    @property
    def layer(self) -> int | None: ...

    @property
    def removal(self) -> tuple[int, int] | None: ...

    @property
    def rules(self) -> Sequence[str]: ...

    @property
    def relative(self) -> Sequence[RelativeDemand]: ...


class Criterion(Protocol):
    """What `HeadGrowth` asks. `silent` updates at the start show the model without attention; some never `see`."""

    silent: int
    sees: bool

    def feed(self, seen: Seen) -> None: ...

    def calibrate(self) -> None: ...

    def decide(self, done: int, loss: float, full: Set[int]) -> Decision: ...

    def may_prune(self, done: int) -> bool: ...

    def directions(self, layer: int) -> tuple[Tensor, Tensor] | None: ...

    def born(self, layer: int) -> None: ...

    def removed(self, done: int, layer: int, head: int, *, grown: bool) -> None: ...

    def predicted(self) -> list[dict[str, float]]: ...

    def tensors(self) -> dict[str, Tensor]: ...

    def values(self) -> dict[str, Any]: ...

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None: ...


def make_criterion(policy: Policy, model: Model) -> Criterion:
    """The criterion that a policy decides by."""
    if isinstance(policy, Incrt):
        return Demand(policy, model)
    if isinstance(policy, Published):
        return Energy(policy, model)
    return Chance(policy, model)


class Demand:
    """What the task asks of attention."""

    sees = True

    def __init__(self, policy: Incrt, model: Model) -> None:
        plan = model.plan
        self.policy, self.silent = policy, policy.calibration
        rotary = model.angles(plan.head_dims[0])
        self.gauge = DemandGauge(len(plan.layers), plan.width, rotary, seed=policy.seed, **gauge_place(model))
        self.state = policy.start(len(plan.layers))
        self.fed = 0
        self.earlier: Tensor | None = None  # the demand half-way through the calibration
        self.spectra: list[list[float]] = []  # of the demand of the model without attention

    def feed(self, seen: Seen) -> None:
        self.gauge.feed(seen.inputs, seen.gradients, seen.allowed, seen.sizes)
        self.fed += 1
        if self.fed == (self.silent + 1) // 2:
            self.earlier = self.gauge.outputs.total.clone()

    def calibrate(self) -> None:
        self.state = from_first_rank(self.policy.calibrated(self.state, self.gauge.readings()))
        if self.earlier is not None:  # there may have been too few feeds: those of skipped updates are left out
            self.spectra = from_first_rank(self.gauge.spectra(self.earlier, self.fed - (self.silent + 1) // 2))
        self.earlier, self.fed = None, self.silent
        self.gauge.reset(range(self.gauge.layers))

    def decide(self, done: int, loss: float, full: Set[int]) -> Decision:
        decision = from_first_rank(self.policy.decide(self.state, done, self.gauge.readings(), loss, full))
        self.state = decision.state
        return decision

    def may_prune(self, done: int) -> bool:
        return self.policy.prune and self.policy.has_cooled(self.state, done)

    def directions(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.gauge.directions(layer)

    def born(self, layer: int) -> None:
        self.gauge.reset([layer])

    def removed(self, done: int, layer: int, head: int, *, grown: bool) -> None:
        self.state = self.policy.removed(self.state, done, layer, born_here=grown)
        self.gauge.reset([layer])

    def predicted(self) -> list[dict[str, float]]:
        return [self.policy.predicted(spectrum) for spectrum in self.spectra]

    def tensors(self) -> dict[str, Tensor]:
        return {**self.gauge.tensors(), **({} if self.earlier is None else {"earlier": self.earlier})}

    def values(self) -> dict[str, Any]:
        return {"state": self.state.to_dict(), "fed": self.fed, "spectra": self.spectra, "gauge": self.gauge.values()}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self.gauge.load(tensors, values["gauge"])
        self.state, self.fed, self.spectra = IncrtState.from_dict(values["state"]), values["fed"], values["spectra"]
        self.earlier = tensors["earlier"].to(self.gauge.sums) if "earlier" in tensors else None


class Energy:
    """The energy of the heads' own forms, as published."""

    silent, sees = 0, True

    def __init__(self, policy: Published, model: Model) -> None:
        plan = model.plan
        self.policy, self.model = policy, model
        self.gauge: EnergyGauge = policy.gauge(len(plan.layers), plan.width, **gauge_place(model))
        self.state = policy.start(len(plan.layers))

    def feed(self, seen: Seen) -> None:
        if not bool(mean_over_ranks(seen.loss).isfinite()):  # it would stay in the averages for good
            return
        self.gauge.feed(seen.inputs, [self._projections(layer) for layer in range(len(seen.inputs))], seen.allowed)

    def _projections(self, layer: int) -> Projections:
        attention = self.model.stack[layer].attention
        return projections(attention.layer, attention.qkv.weight.detach())

    def calibrate(self) -> None:
        pass

    def decide(self, done: int, loss: float, full: Set[int]) -> Decision:
        self.readings = self.gauge.readings()
        decision = from_first_rank(self.policy.decide(self.state, done, self.readings, full))
        self.state = decision.state
        return decision

    def may_prune(self, done: int) -> bool:
        return False  # it removes heads by its own rule

    def directions(self, layer: int) -> None:
        return None  # the published direction is stored, not used

    def born(self, layer: int) -> None:
        self.gauge.born(layer)

    def removed(self, done: int, layer: int, head: int, *, grown: bool) -> None:
        self.state = self.policy.removed(self.state, done, layer, head=head, born_here=grown)
        self.gauge.removed(layer, head)

    def predicted(self) -> list[dict[str, float]]:
        return [asdict(reading.predicted) for reading in self.readings]

    def tensors(self) -> dict[str, Tensor]:
        return self.gauge.tensors()

    def values(self) -> dict[str, Any]:
        return {"state": self.state.to_dict(), "gauge": self.gauge.values()}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self.gauge.load(tensors, values["gauge"])
        self.state = PublishedState.from_dict(values["state"])


class Chance:
    """Nothing is measured."""

    silent, sees = 0, False

    def __init__(self, policy: RandomBirths, model: Model) -> None:
        self.policy, self.state = policy, policy.start(len(model.plan.layers))

    def feed(self, seen: Seen) -> None:
        pass

    def calibrate(self) -> None:
        pass

    def decide(self, done: int, loss: float, full: Set[int]) -> Decision:
        decision = self.policy.decide(self.state, done, full)
        self.state = decision.state
        return decision

    def may_prune(self, done: int) -> bool:
        return False

    def directions(self, layer: int) -> None:
        return None

    def born(self, layer: int) -> None:
        pass

    def removed(self, done: int, layer: int, head: int, *, grown: bool) -> None:
        self.state = self.policy.removed(self.state, done, layer, head=head)

    def predicted(self) -> list[dict[str, float]]:
        return []

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def values(self) -> dict[str, Any]:
        return {"state": self.state.to_dict()}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self.state = RandomState.from_dict(values["state"])


def gauge_place(model: Model) -> dict[str, Any]:
    """Where and how a gauge computes."""
    weight = model.stack[0].attention.out.weight
    return {"device": weight.device, "dtype": torch.float64 if weight.dtype == torch.float64 else torch.float32}
