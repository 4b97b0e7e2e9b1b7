"""What the task still asks of attention: the fall of the loss that one more head would open.

A head that writes nothing yet changes the loss, as its output is turned up, with a slope that depends on where it looks
and what it would write. In every layer the gauge follows such a head, a scout, which takes part in nothing: a real
softmax head with the model's positions. It sees a layer's normed input and the gradient of the loss by what the layer's
attention adds to the stream, less all that the present heads could write by themselves: what they read, linearly mapped
to the stream. Where they do not suffice a scout learns to follow what is left, batch after batch; where they do, what
it learns from one batch is worth nothing on the next. A scout's queries and keys are as they are projected, also where
those of the model's heads are normed (`qk_norm`).

All layers are followed together, in tensors whose first dimension is the layer. The work is matrix products, and
Cholesky factors as small as a head; nothing is read back from the device between decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from meristem.errors import InputError
from meristem.gauges.gauge import Instrument, gauge_place
from meristem.gauges.probe import Probe, Seen
from meristem.model.fused import rotate
from meristem.model.growable import Growable
from meristem.model.rotary import RotaryPair
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.ranks import from_first_rank, sum_over_ranks
from meristem.seeds import own_seed

T = TypeVar("T")
Directions = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of a head, (e, d) each

MEMORY = 0.95  # of what a scout would write, per feed
# Of the sums that a decision reads, per feed: short, so that what was asked for a few decisions ago is forgotten, and a
# demand that goes by itself is seen to go.
TEST_MEMORY = 0.9
BETAS = (0.9, 0.95)  # of Adam, which moves queries and keys, once per feed
# START is the size of queries and keys at first, beside those of a usual head: nearly even attention, from where all
# that is asked for can be seen. A scout that starts sharp sees what lies near the tokens it happens to look at, often
# nothing. A step, RATE, is as large, and each feed a scout forgets a share, FORGET, without which it stays where
# something was asked for long ago.
START, RATE, FORGET = 0.1, 0.1, 0.03
PAIRS = 2**27  # of tokens, over sequences and layers, that are held at a time, where a layer has not more
RIDGE = 1e-3  # of the mean diagonal entry of the second moments of what the present heads read
STAY = 1e-2  # of the old basis in a new one, for directions in which nothing is asked for; others do not notice


@dataclass(frozen=True)
class DemandReading:
    """The demand of one layer: how sure it is (mean over standard error), and how steeply the loss would fall.

    The slope is that of a sequence's loss, by what the head writes in units of the stream it would be added to. `feeds`
    is how many batches this layer's scout has seen. `worth` is how far the loss of a sequence would fall at once if the
    head wrote as much as is best: the slope squared by twice the curvature. Where the loss is that of probabilities and
    these are right on average, the curvature is the mean square of the slopes of single sequences (Fisher's
    information), so that the worth follows from the certainty alone, as in a score test.
    """

    certainty: float
    slope: float
    feeds: int
    worth: float = 0.0


@dataclass(frozen=True)
class DemandForm:
    """The form M of one layer's scout, whose scores are x M y: its antisymmetric share |M_a| / |M|, and its rank.

    The rank counts singular values by how even they are: the square of the sum of their squares by the sum of their
    fourth powers.
    """

    asymmetry: float
    rank: float


class DemandGauge:
    """A gauge that follows the demand of `layers` layers of `width`.

    The `rotary` tables, each (T, 1, e), rotate queries and keys by their positions; a head has e dims. Under
    torch.distributed every process feeds its own sequences, as many as each other one, and all follow the same demand:
    what is summed over sequences is summed over processes too.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        rotary: RotaryPair,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layers, self.width, self.head_dim = layers, width, rotary[0].shape[-1]
        self.place: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        self.rotary = tuple(table[:, 0].to(**self.place) for table in rotary)
        self.seed, self.resets = seed, 0
        generator = torch.Generator().manual_seed(seed)
        self.looks = self._drawn(generator)  # queries and keys, (2, layers, d, e)
        self.moments = torch.zeros(2, *self.looks.shape, **self.place)  # Adam's, of the looks
        self.outputs = _LowRank(layers, width, self.head_dim, generator, self.place)
        self.sums = torch.zeros(4, layers, **self.place)  # of gains, their variance, sizes, sequences
        # Of these at a feed: the variance of a weighted sum has the squares of the weights.
        self.kept = torch.tensor([[TEST_MEMORY], [TEST_MEMORY**2], [TEST_MEMORY], [TEST_MEMORY]], **self.place)
        self.feeds = torch.zeros(layers, **self.place)

    def reset(self, layers: Iterable[int]) -> None:
        """Start again in some layers, as after a change there."""
        self.resets += 1
        generator = torch.Generator().manual_seed(own_seed(f"{self.seed}-{self.resets}"))
        looks = self._drawn(generator)
        for layer in layers:
            self.looks[:, layer] = looks[:, layer]
            self.moments[:, :, layer] = 0
            self.outputs.restart(layer, generator)
            self.sums[:, layer] = 0
            self.feeds[layer] = 0

    def take(self, other: DemandGauge, sources: Sequence[int | None]) -> None:
        """Go on with what `other` has followed, whose layer each of these was; None is one that was not there."""
        self.resets = other.resets
        self.reset(range(self.layers))
        theirs, dims = other.tensors(), {"sums": 1, "feeds": 0, "looks": 1, "moments": 2}
        for name, mine in self.tensors().items():
            dim = dims.get(name, 0)
            for new, old in enumerate(sources):
                if old is not None:
                    mine.select(dim, new).copy_(theirs[name].select(dim, old))

    @torch.no_grad()
    def feed(
        self, inputs: Tensor, gradients: Tensor, attention_mask: Tensor, sizes: Tensor, heads: Tensor | None = None,
        *, tests: bool = True, learns: bool = True,
    ) -> None:  # fmt: skip
        """Take in a batch: normed inputs and gradients by the attention's output, each (layers, B, T, d).

        Gradients are those of the mean loss times the number of its terms. `attention_mask` (T, T) or (B, T, T) says
        which tokens (columns) each token (row) may look at; rows of padding, which only the latter has, are empty.
        `sizes` (layers,) are those of a coordinate of the stream, in the root mean square, and `heads` (layers, B, T,
        f) is what the present heads read, side by side; what they could write is not asked for.

        The scouts are tested on the batch before they learn from it. Where batches come again, one kind `tests` and
        another one `learns`. A batch with something in it that is not finite is passed over: it would stay in the sums
        for good.
        """
        x, gradients, sizes = (part.to(**self.place) for part in (inputs, gradients, sizes))
        real = attention_mask.any(-1).expand(x.shape[1], -1)[None, :, :, None].to(x)
        sequences, tokens = sum_over_ranks(torch.stack((x.new_full((), x.shape[1]), real.sum())))
        padded = attention_mask.ndim == 3  # where all sequences look alike nothing is padding

        def of_real(part: Tensor) -> Tensor:
            return part * real if padded else part

        def centred(part: Tensor) -> Tensor:
            middle = sum_over_ranks(of_real(part.detach()).sum((1, 2), keepdim=True)) / tokens
            return of_real(part - middle)

        # What is the same for all tokens is not for attention to say: it is taken out of the gradients, and of what is
        # read. With the one gone the other is a constant in derivatives.
        gradients = centred(gradients)
        looks = self.looks.clone().requires_grad_(learns)
        with torch.enable_grad(), _coarse_products():
            if heads is not None:
                gradients = _unexplained(gradients, centred(heads.to(**self.place)))
            values, refused = self._read(x, gradients, looks, attention_mask)
            values = centred(values)
            # What would be written is values @ core.T @ left.T, whose size needs no left: that is orthonormal.
            wanted = gradients @ self.outputs.left_core[:, None]
            gains = -(wanted * values).sum((2, 3))
            size = (values @ self.outputs.core.mT[:, None]).square().sum((1, 2, 3))
            gain, whole = sum_over_ranks(torch.stack((gains.detach().sum(1), size.detach())))
            if learns:
                # The slope gain / sqrt(size) of all processes together, to which each of them adds its part.
                divisor = whole.clamp(min=1e-30)
                slope = (gains.sum(1) - gain / (2 * divisor) * size) / divisor.sqrt()
                (climb,) = torch.autograd.grad(slope.sum(), looks)
        before, sound = self.tensors(), (gain + whole).sum()
        if tests:
            self._test(gains.detach(), gain, whole / sizes**2, sequences)
            sound = sound + self.sums.sum()
        if learns:
            climb, asked = sum_over_ranks(climb), -sum_over_ranks(refused) / sequences
            self.feeds = self.feeds + 1
            self._climb(climb)
            self.outputs.add(asked)
            sound = sound + climb.sum() + asked.sum()
        # Decided on the device, which the host need not wait for.
        for name, tensor in self.tensors().items():
            tensor.copy_(torch.where(sound.isfinite(), tensor, before[name]))

    def readings(self, rows: int = 0) -> list[DemandReading]:
        """The demand of every layer, from the feeds since its last reset, the recent ones most.

        Where the same `rows` are tested again and again no more than these are certain; 0 if new ones come each time.
        """
        gain, variance, size, count = self.sums.double().cpu()
        count = count.clamp(min=1)
        mean = gain / count
        # Sequences that would tell as much if all counted alike; of those that were tested recent ones count most.
        alike = count * (1 + TEST_MEMORY) / (1 + TEST_MEMORY ** self.feeds.double().cpu())
        few = (rows / alike).clamp(max=1.0).sqrt() if rows else torch.ones_like(alike)
        certainty = few * mean / (variance / count / count).clamp(min=1e-300).sqrt()
        slope = mean / (size / count).clamp(min=1e-300).sqrt()
        # Of the square of the certainty 1 is chance.
        square = certainty.square()
        worth = (square - 1).clamp(min=0) / (2 * (few.square() * alike + square))
        parts = certainty.tolist(), slope.tolist(), self.feeds.long().tolist(), worth.tolist()
        return [DemandReading(*reading) for reading in zip(*parts, strict=True)]

    def directions(self, layer: int) -> Directions:
        """The queries, keys and values (e, d) of a layer's scout: of the head that is asked for."""
        query, key = self.looks[:, layer]
        return query.T.clone(), key.T.clone(), self.outputs.right[layer].T.clone()

    def forms(self) -> list[DemandForm]:
        """The form of every layer's scout. M = Q K', so products of heads' size, in float64, say all."""
        query, key = self.looks.double().cpu()
        across, square = key.mT @ query, query.mT @ query @ (key.mT @ key)
        size, crossed, fourth = (_trace(matrix) for matrix in (square, across @ across, square @ square))
        asymmetry = ((size - crossed) / (2 * size).clamp(min=1e-300)).clamp(min=0).sqrt()
        rank = size.square() / fourth.clamp(min=1e-300)
        return [DemandForm(*form) for form in zip(asymmetry.tolist(), rank.tolist(), strict=True)]

    def spectra(self, earlier: Tensor, feeds: int) -> list[list[float]]:
        """The singular values of the output map that each layer asks for, the largest first.

        `earlier` is `outputs.total` as it was when `feeds` feeds fewer had been seen. What was asked for then says
        which directions there are, and what came since how strong they are, so that noise has no strength on average.
        """
        later = self.outputs.total - MEMORY**feeds * earlier
        left, _, right = torch.linalg.svd(earlier.double())
        strengths = torch.linalg.vecdot(left.mT, right @ later.double().mT)
        return strengths.sort(dim=-1, descending=True).values.tolist()

    def tensors(self) -> dict[str, Tensor]:
        """The large part of the state."""
        own = {"sums": self.sums, "feeds": self.feeds, "looks": self.looks, "moments": self.moments}
        return own | {f"outputs.{name}": value for name, value in vars(self.outputs).items()}

    def values(self) -> dict[str, Any]:
        """The rest of the state, for JSON; `load` goes on from both exactly."""
        return {"resets": self.resets}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from a state."""
        placed = {name: tensor.to(**self.place, copy=True) for name, tensor in tensors.items()}
        for name in ("sums", "feeds", "looks", "moments"):
            setattr(self, name, placed[name])
        vars(self.outputs).update({name: placed[f"outputs.{name}"] for name in vars(self.outputs)})
        self.resets = values["resets"]

    def _drawn(self, generator: torch.Generator) -> Tensor:
        looks = torch.randn(2, self.layers, self.width, self.head_dim, generator=generator)
        return looks.to(**self.place) * START / math.sqrt(self.width)

    def _read(self, x: Tensor, gradients: Tensor, looks: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """What the scouts read, (layers, B, T, e), and the gradients by a full output map, (layers, d, d)."""

        def read(x: Tensor, gradients: Tensor, looks: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
            weights = self._attend(x, looks, attention_mask)
            values = weights @ (x @ right[:, None])
            return values, (weights.detach().mT @ gradients).flatten(1, 2).mT @ x.flatten(1, 2)

        layers = max(1, PAIRS // (x.shape[1] * x.shape[2] ** 2))
        if layers >= len(x):
            return read(x, gradients, looks, self.outputs.right)
        # A few layers at a time, of which the pairs of tokens are computed again for derivatives rather than kept.
        chunks = (x.split(layers), gradients.split(layers), looks.split(layers, 1), self.outputs.right.split(layers))
        again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        parts = [checkpoint(read, *chunk, **again) for chunk in zip(*chunks, strict=True)]
        values, refused = (torch.cat(part) for part in zip(*parts, strict=True))
        return values, refused

    def _attend(self, x: Tensor, looks: Tensor, attention_mask: Tensor) -> Tensor:
        """The attention weights of the scouts from token to token, (layers, B, T, T)."""
        cos, sin = (table[: x.shape[2]] for table in self.rotary)
        query, key = (rotate(x @ look[:, None], cos, sin).flatten(0, 1) for look in looks)
        # A mask that is added needs no pass of its own over all pairs of tokens, nor one for its gradient.
        mask = torch.zeros_like(attention_mask, dtype=x.dtype).masked_fill_(~attention_mask, torch.finfo(x.dtype).min)
        mask = mask.expand(*x.shape[:2], *mask.shape[-2:]).flatten(0, 1)
        scores = torch.baddbmm(mask, query, key.mT, alpha=1 / math.sqrt(self.head_dim))
        return scores.softmax(-1).unflatten(0, x.shape[:2])

    def _test(self, gains: Tensor, gain: Tensor, size: Tensor, sequences: Tensor) -> None:
        """Add up how much the scouts would gain on a batch from which they have not learnt yet."""
        spread = sum_over_ranks((gains - (gain / sequences)[:, None]).square().sum(1))
        # Means were taken out twice over the sequences, of gradients and of what is read, which makes their gains more
        # alike than chance would. One or two sequences say nothing of chance: then all of the gain may be.
        variance = torch.where(sequences > 2, spread * sequences / (sequences - 2).clamp(min=1), gain.square())
        self.sums = self.kept * self.sums + torch.stack((gain, variance, size, sequences.expand_as(gain)))

    def _climb(self, slope: Tensor) -> None:
        """Take a step of Adam, upwards."""
        feeds = self.feeds.view(-1, 1, 1)
        new = zip(BETAS, self.moments, (slope, slope.square()), strict=True)
        self.moments = torch.stack([beta * old + (1 - beta) * power for beta, old, power in new])
        mean, square = (moment / (1 - beta**feeds) for beta, moment in zip(BETAS, self.moments, strict=True))
        step = RATE / math.sqrt(self.width) * mean / (square.sqrt() + 1e-30)
        self.looks = (1 - FORGET) * self.looks + step


@dataclass(frozen=True)
class Demand:
    """The demand of every layer, beside that of the same model without attention.

    The first `calibration` feeds show the model without attention; what they tell is remembered, and the scouts begin
    anew.

    >>> instrument = Demand(calibration=1).instrument(model)
    >>> for _ in range(3):
    ...     instrument.feed(probe)
    >>> [layer.feeds for layer in instrument.read(probe).layers]
    [2, 2]
    """

    calibration: int = 20
    seed: int = 0

    def instrument(self, model: Growable) -> DemandInstrument:
        """What follows the demand in a model."""
        return DemandInstrument(self, model)


@dataclass(frozen=True)
class ModelDemand:
    """What is known of every layer: its demand now, the form of its scout, and where it looks.

    `start` is the demand of the model without attention, and `spectra` the singular values of what it asked for; both
    are empty during the calibration. `directions` are the scout's queries, keys and values (e, d).
    """

    layers: tuple[DemandReading, ...]
    forms: tuple[DemandForm, ...]
    start: tuple[DemandReading, ...]
    spectra: tuple[tuple[float, ...], ...]
    directions: tuple[Directions, ...]


class DemandInstrument(Instrument):
    """Follows the demand: a gauge for all layers whose heads have the same dim."""

    def __init__(self, gauge: Demand, model: Growable) -> None:
        self.gauge, self.model = gauge, model
        self.groups = {dim: _Group(model, model.plan, dim, gauge.seed) for dim in dict.fromkeys(model.plan.head_dims)}
        self.fed = 0
        self.start: tuple[DemandReading, ...] = ()
        self.spectra: tuple[tuple[float, ...], ...] = ()

    @property
    def half(self) -> int:
        """The feed half-way through the calibration."""
        return (self.gauge.calibration + 1) // 2

    def feed(self, probe: Probe) -> None:
        silent = self.fed < self.gauge.calibration
        seen = probe.look(silent=silent)
        held_back = probe.look_held_back(silent=silent)
        self.fed += 1
        with torch.no_grad(), torch.autocast(probe.tokens.device.type, enabled=False):
            for group in self.groups.values():
                if held_back is not None:
                    group.feed(held_back, silent=silent, learns=False)
                group.feed(seen, silent=silent, tests=held_back is None)
                if self.fed == self.half:
                    group.earlier = group.gauge.outputs.total.clone()
            if self.fed == self.gauge.calibration:
                self._calibrate(probe.rows)

    def _calibrate(self, rows: int) -> None:
        """Remember the demand without attention, and begin anew."""
        start = self._by_layer(lambda group: group.gauge.readings(rows))
        spectra = self._by_layer(lambda group: group.spectra(self.gauge.calibration - self.half))
        self.start, self.spectra = from_first_rank((tuple(start), tuple(tuple(values) for values in spectra)))
        for group in self.groups.values():
            group.earlier = None
            group.gauge.reset(range(group.gauge.layers))

    def read(self, probe: Probe) -> ModelDemand:
        terms = probe.targets.numel() / len(probe.targets)  # of the loss, in a sequence
        layers = [replace(r, worth=r.worth / terms) for r in self._by_layer(lambda g: g.gauge.readings(probe.rows))]
        forms = self._by_layer(lambda group: group.gauge.forms())
        agreed = from_first_rank((tuple(layers), tuple(forms), self.start, self.spectra))
        directions = self._by_layer(lambda group: [group.gauge.directions(i) for i in range(group.gauge.layers)])
        return ModelDemand(*agreed, tuple(directions))

    def follow(self, moves: Moves, plan: Plan) -> None:
        """Scouts begin anew where heads came or went, and in blocks that were born."""
        if moves.stays:
            return
        if moves.layers != tuple(range(len(moves.layers))):
            self._follow_layers(moves, plan)
        for layer in sorted(moves.heads):
            group = self.groups[plan.layers[layer].head_dim]
            group.gauge.reset([group.layers.index(layer)])

    def _follow_layers(self, moves: Moves, plan: Plan) -> None:
        groups = {}
        for dim in dict.fromkeys(plan.head_dims):
            new = _Group(self.model, plan, dim, self.gauge.seed)
            if dim in self.groups:
                old = self.groups[dim]
                sources = [moves.layers[layer] for layer in new.layers]
                places = [None if source is None else old.layers.index(source) for source in sources]
                new.gauge.take(old.gauge, places)
                new.follow(old, places)
            groups[dim] = new
        self.groups = groups
        if self.start:  # a copy asks for what its source asked for; another one is measured as it comes
            born = [moves.copies.get(new) for new in range(len(moves.layers))]
            unknown = DemandReading(0.0, 0.0, 0)
            starts, spectra = self.start, self.spectra
            self.start = moves.of_layers(starts, lambda new: unknown if born[new] is None else starts[born[new] or 0])
            self.spectra = moves.of_layers(spectra, lambda new: () if born[new] is None else spectra[born[new] or 0])

    def state(self) -> dict[str, Any]:
        groups = {str(dim): group.state() for dim, group in self.groups.items()}
        start = [[r.certainty, r.slope, r.feeds, r.worth] for r in self.start]
        return {"fed": self.fed, "start": start, "spectra": [list(s) for s in self.spectra], "groups": groups}

    def load(self, state: dict[str, Any]) -> None:
        for name in ("start", "spectra"):
            if len(state[name]) not in (0, len(self.model.plan.layers)):
                raise InputError(name, state[name], f"must be of {len(self.model.plan.layers)} layers")
        self.fed = state["fed"]
        self.start = tuple(DemandReading(*reading) for reading in state["start"])
        self.spectra = tuple(tuple(float(value) for value in spectrum) for spectrum in state["spectra"])
        for dim, group in self.groups.items():
            group.load(state["groups"][str(dim)])

    def _by_layer(self, measure: Callable[[_Group], Sequence[T]]) -> list[T]:
        """What is measured of the layers of every group, in the order of the layers."""
        groups = self.groups.values()
        found = {layer: one for group in groups for layer, one in zip(group.layers, measure(group), strict=True)}
        return [found[layer] for layer in sorted(found)]


class _Group:
    """The layers whose heads have `dim` dims, and the gauge that follows them."""

    def __init__(self, model: Growable, plan: Plan, dim: int, seed: int) -> None:
        place = gauge_place(model)
        self.layers = [layer for layer, own in enumerate(plan.head_dims) if own == dim]
        self.gauge = DemandGauge(len(self.layers), plan.width, model.rope(dim), seed=seed, **place)
        self.earlier: Tensor | None = None  # the demand half-way through the calibration
        # On the device, where a feed picks its layers without waiting; nothing is picked where all are meant.
        self.index = torch.tensor(self.layers, device=place["device"]) if len(self.layers) < len(plan.layers) else None

    def follow(self, other: _Group, places: Sequence[int | None]) -> None:
        """Take over what was remembered half-way through the calibration; of a new layer there is nothing."""
        if other.earlier is not None:
            empty = torch.zeros_like(other.earlier[0])
            self.earlier = torch.stack([empty if place is None else other.earlier[place] for place in places])

    def feed(self, seen: Seen, *, silent: bool, tests: bool = True, learns: bool = True) -> None:
        """Feed the gauge; the heads of a `silent` model could write nothing."""
        inputs, gradients, sizes = (self._own(part) for part in (seen.inputs, seen.gradients, seen.sizes))
        heads = None if silent else side_by_side([seen.heads.head_outputs[layer] for layer in self.layers])
        self.gauge.feed(inputs, gradients, seen.attention_mask, sizes, heads, tests=tests, learns=learns)

    def spectra(self, feeds: int) -> list[list[float]]:
        earlier = torch.zeros_like(self.gauge.outputs.total) if self.earlier is None else self.earlier
        return self.gauge.spectra(earlier, feeds)

    def state(self) -> dict[str, Any]:
        earlier = {} if self.earlier is None else {"earlier": self.earlier}
        return {**self.gauge.values(), **self.gauge.tensors(), **earlier}

    def load(self, state: dict[str, Any]) -> None:
        self.gauge.load({name: value for name, value in state.items() if isinstance(value, Tensor)}, state)
        self.earlier = state["earlier"].to(self.gauge.sums, copy=True) if "earlier" in state else None

    def _own(self, part: Tensor) -> Tensor:
        return part if self.index is None else part.index_select(0, self.index)


class _LowRank:
    """The best low-rank part, of unit size, of slowly changing matrices (layers, d, d): left @ core @ right.T.

    It is followed by subspace iteration that goes on from where it was.
    """

    def __init__(self, layers: int, width: int, rank: int, generator: torch.Generator, place: dict[str, Any]) -> None:
        self.total = torch.zeros(layers, width, width, **place)
        self.left = torch.zeros(layers, width, rank, **place)
        self.right = torch.zeros_like(self.left)
        self.core = torch.zeros(layers, rank, rank, **place)
        for layer in range(layers):
            self.restart(layer, generator)

    @property
    def left_core(self) -> Tensor:
        return self.left @ self.core

    def restart(self, layer: int, generator: torch.Generator) -> None:
        """Forget one of the matrices."""
        rank = self.core.shape[-1]
        left, right = torch.randn(2, 1, self.left.shape[1], rank, generator=generator).to(self.left)
        self.total[layer] = 0
        self.left[layer], self.right[layer] = _orthonormal(left)[0], _orthonormal(right)[0]
        self.core[layer] = torch.eye(rank).to(self.core) / math.sqrt(rank)

    def add(self, new: Tensor) -> None:
        self.total = MEMORY * self.total + (1 - MEMORY) * new
        self.left = _orthonormal(_unit(self.total @ self.right) + STAY * self.left)
        self.right = _orthonormal(_unit(self.total.mT @ self.left) + STAY * self.right)
        self.core = _unit(self.left.mT @ self.total @ self.right)


@contextmanager
def _coarse_products() -> Iterator[None]:
    """Let products over all tokens round their factors on a GPU: noise is far larger than that."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def side_by_side(head_outputs: Sequence[Tensor]) -> Tensor:
    """What the heads of some layers read, (B, heads, T, e) each, as (layers, B, T, f); what a layer lacks is zero."""
    flat = [layer.transpose(1, 2).flatten(2) for layer in head_outputs]
    most = max(layer.shape[-1] for layer in flat)
    return torch.stack([pad(layer, (0, most - layer.shape[-1])) for layer in flat])


def _unexplained(gradients: Tensor, heads: Tensor) -> Tensor:
    """What is left of gradients (layers, B, T, d) by what heads read (layers, B, T, f), all centred, in least squares.

    That is what no change of the heads' output maps could make. The ridge leaves out what heads hardly read, as there
    rounding would decide.
    """
    wanted, read = gradients.flatten(1, 2), heads.flatten(1, 2)
    moments = sum_over_ranks(read.mT @ read)
    ridge = RIDGE * moments.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] + 1e-30
    eye = torch.eye(moments.shape[-1], device=moments.device, dtype=moments.dtype)
    factor, failed = torch.linalg.cholesky_ex(moments + ridge * eye)
    factor = factor.where(failed[:, None, None] == 0, torch.nan)
    made = read @ torch.cholesky_solve(sum_over_ranks(read.mT @ wanted), factor)
    return (wanted - made).view_as(gradients)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum(-1)


def _unit(matrices: Tensor) -> Tensor:
    return matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns, (layers, d, k): two rounds of Cholesky's factors of their inner products."""
    for _ in range(2):
        inner = columns.mT @ columns
        eye = torch.eye(inner.shape[-1], device=columns.device, dtype=columns.dtype)
        slack = 1e-7 * inner.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] + 1e-30
        factor, _ = torch.linalg.cholesky_ex(inner + slack * eye)
        columns = torch.linalg.solve_triangular(factor, columns.mT, upper=False).mT
    return columns
