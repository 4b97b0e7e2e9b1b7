"""Ways to decide about heads, each a gauge with the policy that reads it, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from meristem.gauges.demand import DemandGauge, DemandReading
from meristem.gauges.energy import EnergyGauge, Projections, projections
from meristem.growth.heads import fewest_heads
from meristem.growth.policies.incrt import Incrt, IncrtState, RelativeDemand
from meristem.growth.policies.published import Published, PublishedState, RandomBirths, RandomState
from meristem.growth.surgery import Model
from meristem.ranks import from_first_rank, mean_over_ranks

Policy = Incrt | Published | RandomBirths
T = TypeVar("T")


class HeadsRead(NamedTuple):
    """What the heads of every layer read, (B, heads, T, head dim) each, and which tokens (B, T) are not padding."""

    head_outputs: list[Tensor]
    real: Tensor


class Seen(NamedTuple):
    """What a batch shows: the loss, what every layer's attention reads, and the gradient of the loss by what it writes.

    Both are (layers, B, T, d), the gradient that of the mean loss times the number of its terms; `attention_mask`,
    (T, T) or (B, T, T), says which tokens each token may look at, and `sizes` (layers,) how large the stream is.
    `heads` is what the heads read.
    """

    loss: Tensor
    inputs: Tensor
    gradients: Tensor
    attention_mask: Tensor
    sizes: Tensor
    heads: HeadsRead


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
    """What `HeadGrowth` asks. `silent` updates at the start show the model without attention; some never `see`.

    What is only recorded of every layer: the heads that the first measurement `predicted`, and the `form` of what was
    measured, the antisymmetric share |M_a| / |M| of the scores' bilinear form and its effective rank.
    """

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

    def form(self) -> dict[str, list[float]]: ...

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
        self.policy, self.silent = policy, policy.calibration
        dims = dict.fromkeys(model.plan.head_dims)
        self.groups = {str(dim): _Group(model, dim, policy.seed) for dim in dims}
        self.state = policy.start(len(model.plan.layers))
        self.fed = 0
        self.spectra: list[list[float]] = []  # of the demand of the model without attention

    @property
    def half(self) -> int:
        """The feed half-way through the calibration."""
        return (self.silent + 1) // 2

    def readings(self) -> list[DemandReading]:
        """The demand of every layer."""
        return self._by_layer(lambda group: group.gauge.readings())

    def feed(self, seen: Seen) -> None:
        self.fed += 1
        for group in self.groups.values():
            group.feed(seen)
            if self.fed == self.half:
                group.earlier = group.gauge.outputs.total.clone()

    def calibrate(self) -> None:
        self.state = from_first_rank(self.policy.calibrated(self.state, self.readings()))
        self.spectra = from_first_rank(self._by_layer(lambda group: group.spectra(self.silent - self.half)))
        for group in self.groups.values():
            group.earlier = None
            group.gauge.reset(range(group.gauge.layers))

    def decide(self, done: int, loss: float, full: Set[int]) -> Decision:
        decision = from_first_rank(self.policy.decide(self.state, done, self.readings(), loss, full))
        self.state = decision.state
        return decision

    def may_prune(self, done: int) -> bool:
        return self.policy.prune and self.policy.has_cooled(self.state, done)

    def directions(self, layer: int) -> tuple[Tensor, Tensor]:
        group = self._group(layer)
        return group.gauge.directions(group.layers.index(layer))

    def born(self, layer: int) -> None:
        self._restart(layer)

    def removed(self, done: int, layer: int, head: int, *, grown: bool) -> None:
        self.state = self.policy.removed(self.state, done, layer, born_here=grown)
        self._restart(layer)

    def predicted(self) -> list[dict[str, float]]:
        return [self.policy.predicted(spectrum) for spectrum in self.spectra]

    def form(self) -> dict[str, list[float]]:
        forms = self._by_layer(lambda group: group.gauge.forms())
        return {"asymmetry": [form.asymmetry for form in forms], "rank": [form.rank for form in forms]}

    def tensors(self) -> dict[str, Tensor]:
        return {f"{dim}.{name}": t for dim, group in self.groups.items() for name, t in group.tensors().items()}

    def values(self) -> dict[str, Any]:
        gauges = {dim: group.gauge.values() for dim, group in self.groups.items()}
        return {"state": self.state.to_dict(), "fed": self.fed, "spectra": self.spectra, "gauges": gauges}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self.state, self.fed = IncrtState.from_dict(values["state"]), values["fed"]
        self.spectra = [[float(value) for value in spectrum] for spectrum in values["spectra"]]
        for dim, group in self.groups.items():
            own = with_prefix(tensors, f"{dim}.")
            group.gauge.load(own, values["gauges"][dim])
            waits = self.half <= self.fed < self.silent
            group.earlier = own["earlier"].to(group.gauge.sums, copy=True) if waits else None

    def _restart(self, layer: int) -> None:
        group = self._group(layer)
        group.gauge.reset([group.layers.index(layer)])

    def _group(self, layer: int) -> _Group:
        return next(group for group in self.groups.values() if layer in group.layers)

    def _by_layer(self, measure: Callable[[_Group], Sequence[T]]) -> list[T]:
        """What is measured of the layers of every group, in the order of the layers."""
        groups = self.groups.values()
        found = {layer: one for group in groups for layer, one in zip(group.layers, measure(group), strict=True)}
        return [found[layer] for layer in sorted(found)]


class _Group:
    """The layers whose heads have `dim` dims, and the gauge that follows them."""

    def __init__(self, model: Model, dim: int, seed: int) -> None:
        plan, place = model.plan, gauge_place(model)
        self.layers = [layer for layer, own in enumerate(plan.head_dims) if own == dim]
        self.gauge = DemandGauge(len(self.layers), plan.width, model.rope(dim), seed=seed, **place)
        self.earlier: Tensor | None = None  # the demand half-way through the calibration
        # On the device, where a feed picks its layers without waiting; nothing is picked where all are meant.
        self.index = torch.tensor(self.layers, device=place["device"]) if len(self.layers) < len(plan.layers) else None

    def feed(self, seen: Seen) -> None:
        inputs, gradients, sizes = (self._own(part) for part in (seen.inputs, seen.gradients, seen.sizes))
        self.gauge.feed(inputs, gradients, seen.attention_mask, sizes)

    def spectra(self, feeds: int) -> list[list[float]]:
        assert self.earlier is not None
        return self.gauge.spectra(self.earlier, feeds)

    def tensors(self) -> dict[str, Tensor]:
        return {**self.gauge.tensors(), **({} if self.earlier is None else {"earlier": self.earlier})}

    def _own(self, part: Tensor) -> Tensor:
        return part if self.index is None else part.index_select(0, self.index)


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
        heads = [self._projections(layer) for layer in range(len(seen.inputs))]
        self.gauge.feed(seen.inputs, heads, seen.attention_mask)

    def _projections(self, layer: int) -> Projections:
        attention = self.model.stack[layer].attention
        return projections(attention.layer, attention.qkv.weight.detach())

    def calibrate(self) -> None:
        pass

    def decide(self, done: int, loss: float, full: Set[int]) -> Decision:
        self.readings = self.gauge.readings()
        bare = {i for i, layer in enumerate(self.model.plan.layers) if layer.heads <= fewest_heads(layer)}
        decision = from_first_rank(self.policy.decide(self.state, done, self.readings, full, bare))
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
        heads = zip(self.readings, self.model.plan.heads, strict=True)  # those there are, and the births to come
        return [{name: have + more for name, more in asdict(r.predicted).items()} for r, have in heads]

    def form(self) -> dict[str, list[float]]:
        heads = [[head.asymmetry for head in reading.heads] for reading in self.readings]
        return {"asymmetry": [sum(layer) / len(layer) if layer else math.nan for layer in heads]}  # before any feed

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

    def form(self) -> dict[str, list[float]]:
        return {}

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


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
