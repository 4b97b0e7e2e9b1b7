"""The published criterion of INCRT: the directional energy of a layer's own heads that no head has been credited with.

A head scores a pair of tokens by x^T M y with M = query^T key. The antisymmetric part of the heads' summed forms, seen
through the tokens' second moments C, is the operator A = sym(C M_a); every birth stores one direction, and what is left
of A across the stored directions is followed at both ends of its spectrum. Positions do not enter: with rotary ones, M
is the form of a token that looks at itself. Nor do norms and biases of queries and keys (`qk_norm`, `qkv_bias`): M is
what it is without them.

There are two ways to compute it. `author` numerics are those of the author's code, with all that is wrong with them;
`repaired` ones measure the same operator well. Neither asks what the task needs. The first goes on until as many heads
are born as the layer is wide; the second stops where the energy is lost in its noise, which with isotropic tokens is
before the first birth, however many heads the task needs. They are here to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from meristem.errors import InputError
from meristem.gauges.gauge import Instrument, gauge_place
from meristem.gauges.probe import Probe
from meristem.model.growable import Growable
from meristem.moves import Moves
from meristem.plan import LayerPlan, Plan
from meristem.ranks import from_first_rank, mean_over_ranks, rank, sum_over_ranks
from meristem.seeds import own_seed

NUMERICS = ("author", "repaired")
CALIBRATION = 16  # feeds at the start, whose median says where a layer begins
MEMORY = 0.95  # of the second moments
SWEEPS, STEP = 5, 0.5  # of the repaired trackers: steps per feed, and their length in units of 1 / |A|
NOISE = 0.7  # largest eigenvalue that isotropic tokens show, measured, in units of |M_a| |C| sqrt(d / tokens)
SAFETY = 2.0  # how far above its noise an eigenvalue must be
LONGEST_DWELL, GRACE_GAP = 10_000, 0.1


# --- heads --------------------------------------------------------------------------------------------------------


class Projections(NamedTuple):
    """Queries and keys of a layer's heads, each (heads, e, d)."""

    query: Tensor
    key: Tensor

    @property
    def form(self) -> Tensor:
        """The summed forms M of all heads, (d, d)."""
        return self.query.flatten(0, 1).T @ self.key.flatten(0, 1)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Left and right (heads, 2 e, d), with left^T @ right the antisymmetric part of each head's form."""
        return torch.cat((self.query, self.key), 1), torch.cat((self.key, -self.query), 1) / 2

    def energies(self, second: Tensor) -> Tensor:
        """|C M_a| of each head, (heads,), in the Frobenius norm; for second moments (d, d)."""
        left, right = self.factors
        seen = left @ second
        return (seen @ seen.mT * (right @ right.mT)).sum((1, 2)).clamp(min=0).sqrt()

    def asymmetries(self) -> Tensor:
        """|M_a| / |M| of each head, (heads,), from 0 to 1; about 0.7 for a random one."""
        left, right = self.factors
        part = (left @ left.mT * (right @ right.mT)).sum((1, 2)).clamp(min=0)
        whole = (self.query @ self.query.mT * (self.key @ self.key.mT)).sum((1, 2))
        return (part / whole.clamp(min=torch.finfo(whole.dtype).tiny)).sqrt()


def projections(layer: LayerPlan, qkv: Tensor) -> Projections:
    """The projections in a layer's packed weight; heads that share keys have a copy each."""
    queries, keys, _ = qkv.detach().split((layer.query_width, layer.kv_width, layer.kv_width))
    queries, keys = (part.unflatten(0, (-1, layer.head_dim)) for part in (queries, keys))
    return Projections(queries, keys.repeat_interleave(layer.heads // layer.kv_heads, 0))


# --- the operator -------------------------------------------------------------------------------------------------


def antisymmetric(forms: Tensor) -> Tensor:
    return (forms - forms.mT) / 2


def without(vectors: Tensor, stored: Tensor) -> Tensor:
    """Columns (..., d, n) less their part along the stored directions, the orthonormal or zero columns (..., d, k)."""
    return vectors - stored @ (stored.mT @ vectors)


def residual_operator(second: Tensor, turning: Tensor, stored: Tensor) -> Tensor:
    """P sym(C M_a) P, (..., d, d), from second moments C, an antisymmetric M_a, and stored directions (..., d, k)."""
    product = second @ turning
    return without(without((product + product.mT) / 2, stored).mT, stored)


def rayleigh(operator: Tensor, vectors: Tensor) -> Tensor:
    """The Rayleigh quotients (..., n) of columns (..., d, n); 0 for a column of zeros."""
    size = vectors.square().sum(-2).clamp(min=torch.finfo(vectors.dtype).tiny)
    return (vectors * (operator @ vectors)).sum(-2) / size


def eigenvalues(matrices: Tensor) -> Tensor:
    """Ascending eigenvalues of symmetric matrices (..., d, d); NaN where one is not finite, which torch refuses."""
    finite = matrices.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(matrices.where(finite[..., None, None], 0))
    return values.where(finite[..., None], math.nan)


def gaps(values: Tensor) -> Tensor:
    """The gaps between the two largest and the two smallest of ascending eigenvalues (..., d), stacked: (2, ...)."""
    return torch.stack((values[..., -1] - values[..., -2], values[..., 1] - values[..., 0]))


@dataclass(frozen=True)
class Prediction:
    """Births to come if the operator stayed as it is.

    `count` are its eigenvalues above the threshold, which is exact then; `estimate` is the intrinsic dimension of its
    positive part times the log of the range, close where eigenvalues fall like a geometric series.
    """

    count: int
    estimate: float


def predicted_births(values: Sequence[float], threshold: float) -> Prediction:
    """Predict births from the eigenvalues of the operator."""
    largest = max(values)
    if not largest > threshold > 0:
        return Prediction(0, 0.0)
    dimension = sum(value for value in values if value > 0) / largest
    return Prediction(sum(value > threshold for value in values), dimension * math.log(largest / threshold))


# --- trackers -----------------------------------------------------------------------------------------------------


def author_rate(width: int) -> float:
    """The step of the published tracker of the largest eigenvalue; the other one's is half of it."""
    return 1 / (10 * width)


def author_step(operator: Tensor, upper: Tensor, lower: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Both published trackers, each (..., d, 1), a step further; `mix` (..., 1, 1) is the upper gap's share of both.

    The factor y in the lower one, which belongs to the rule for single tokens, leads it to a quotient of zero. Its
    coupling to the upper one has no effect, since it is made orthogonal to that one afterwards.
    """
    rate = author_rate(operator.shape[-1])
    image = operator @ upper
    coupling = _dot(upper, operator @ lower)
    upper = _unit(upper + rate * (image - _dot(upper, image) * upper - (1 - mix) * coupling * lower))
    image = operator @ lower
    y = _dot(lower, image)
    lower = lower - rate / 2 * (y * (image - y * lower) - mix * (1 - mix) * coupling * upper)
    return upper, _unit(lower - _dot(lower, upper) * upper)


def repaired_step(operator: Tensor, vectors: Tensor) -> Tensor:
    """Columns (..., d, 3) a step further: to the largest eigenvalue, to the smallest, and to the largest in size.

    The third one is a power iteration, which gives the scale of the steps that the others take.
    """
    images = operator @ vectors
    ascent = images - (vectors * images).sum(-2, keepdim=True) * vectors
    size = images[..., 2:].norm(dim=-2, keepdim=True)
    length = STEP / size.clamp(min=torch.finfo(size.dtype).tiny)
    upper = _unit(vectors[..., :1] + length * ascent[..., :1])
    lower = _unit(vectors[..., 1:2] - length * ascent[..., 1:2])
    return torch.cat((upper, lower, torch.where(size > 0, _unit(images[..., 2:]), vectors[..., 2:])), -1)


def author_dwell(gap: float, width: int, complexity: float, accuracy: float) -> int:
    """Feeds between two births in a layer, as published; the gap is absolute."""
    if not gap >= 1e-8:  # as when it is not a number
        return LONGEST_DWELL
    return math.ceil(complexity / (author_rate(width) * gap**2) * math.log(1 / accuracy))


def repaired_dwell(gap: float, complexity: float, accuracy: float) -> int:
    """Feeds in which the repaired trackers' error falls to `accuracy`, times `complexity`; the gap is one of |A|.

    A step takes the share `STEP` times the gap from the error, hence no square. The quotient itself is good long
    before that where eigenvalues nearly coincide, hence the limit.
    """
    shortest = complexity * math.log(1 / accuracy) / (SWEEPS * STEP)
    return math.ceil(shortest / gap) if gap * LONGEST_DWELL >= shortest else LONGEST_DWELL


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-2, keepdim=True)


def _unit(vectors: Tensor) -> Tensor:
    """Columns of length one; those of length zero stay."""
    return vectors / vectors.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)


# --- the gauge ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadReading:
    """The energy |C M_a| of a head, and its share |M_a| / |M|; NaN for one that was born after the last feed."""

    energy: float
    asymmetry: float


@dataclass(frozen=True)
class EnergyReading:
    """The reading of one layer: eigenvalues and energy of the residual operator; dwell and grace in feeds."""

    lambda_max: float  # as tracked: Rayleigh quotients, not eigenvalues
    lambda_min: float
    energy: float  # the Frobenius norm
    start: float  # what the threshold is a share of; not a number before it is known
    noise: float  # what lambda_max would be about with nothing there
    threshold: float  # infinite before `start` is known
    dwell: int
    grace: int
    feeds: int  # since the trackers were restarted
    births: int
    predicted: Prediction
    heads: tuple[HeadReading, ...]

    @property
    def strength(self) -> float:
        """The tracked largest eigenvalue in thresholds."""
        return self.lambda_max / self.threshold if self.threshold else math.inf


class EnergyGauge:
    """A gauge that follows the residual energy of `layers` layers of `width`; the first dimension is the layer.

    Author numerics look at the first sequence of a batch, padding included, and do not divide by its length. Repaired
    ones look at all real tokens, of all processes, and remember. The first feeds only measure where the layers start.
    The threshold is a `share` of that: of the operator's norm (author), or of its largest eigenvalue, and then at least
    twice the noise (repaired). `complexity` and `accuracy` set the dwell.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        *,
        numerics: str = "author",
        share: float = 0.1,
        complexity: float = 2.0,
        accuracy: float = 0.05,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_numerics(numerics)
        if width < 2:
            raise InputError("width", width, "must be at least 2: there are two ends to follow")
        self.layers, self.width, self.author = layers, width, numerics == "author"
        self.share, self.complexity, self.accuracy, self.seed = share, complexity, accuracy, seed
        self.place: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        self.feeds = 0
        self.second = torch.zeros(layers, width, width, **self.place)
        self.turning = torch.zeros(layers, width, width, **self.place)  # antisymmetric part of the heads' forms
        self.uncertainty = torch.zeros((), **self.place)  # one over the number of tokens that `second` is worth
        self.starts = torch.zeros(0, layers, **self.place)
        self.heads = [torch.zeros(2, 0, **self.place) for _ in range(layers)]  # energy and asymmetry
        self.stored = torch.zeros(layers, width, 0, **self.place)  # filled up with zeros where layers have fewer
        self.births = [0] * layers
        self.vectors = torch.zeros(layers, width, 3, **self.place)  # upper, lower, and the one that gives the scale
        self.restarts = 0
        self.seen = [0] * layers
        for layer in range(layers):
            self._restart(layer)
        if self.author:  # whose first birth has nothing to wait for
            self.seen = [LONGEST_DWELL] * layers

    @property
    def operator(self) -> Tensor:
        """The residual operators, (layers, d, d)."""
        return residual_operator(self.second, self.turning, self.stored)

    @torch.no_grad()
    def feed(self, inputs: Tensor, heads: Sequence[Projections], attention_mask: Tensor) -> None:
        """Take in a batch: normed inputs (layers, B, T, d) and the projections of every layer's heads as they are now.

        `attention_mask` (T, T) or (B, T, T) says which tokens (columns) each token (row) may look at; rows of padding
        are empty.
        """
        self._see(inputs.to(**self.place), attention_mask.to(self.place["device"]))
        placed = [Projections(*(part.to(**self.place) for part in layer)) for layer in heads]
        self.turning = antisymmetric(torch.stack([layer.form for layer in placed]))
        self.heads = [
            torch.stack((layer.energies(second), layer.asymmetries()))
            for layer, second in zip(placed, self.second, strict=True)
        ]
        self.feeds += 1
        operator = self.operator
        if self.feeds <= CALIBRATION:
            start = operator.norm(dim=(1, 2)) if self.author else eigenvalues(operator)[:, -1]
            self.starts = torch.cat((self.starts, start[None]))
            return
        if self.author:
            upper_gap, lower_gap = gaps(eigenvalues(operator)).clamp(min=1e-8)
            mix = (upper_gap / (upper_gap + lower_gap + 1e-8))[:, None, None]
            upper, lower = author_step(operator, self.vectors[..., :1], self.vectors[..., 1:2], mix)
            stepped = torch.cat((upper, lower, self.vectors[..., 2:]), -1)
        else:
            stepped = self.vectors
            for _ in range(SWEEPS):
                stepped = repaired_step(operator, stepped)
        # Rounding must not lead them back to where directions are taken.
        self.vectors = _unit(without(stepped, self.stored))
        self.seen = [feeds + 1 for feeds in self.seen]

    @torch.no_grad()
    def readings(self) -> list[EnergyReading]:
        """The reading of every layer at the last feed. Eigenvalues are computed here; feeds do mostly without."""
        operator = self.operator
        quotients = rayleigh(operator, self.vectors).double().cpu()
        spectra = eigenvalues(torch.stack((operator, self.second, self.turning.mT @ self.turning)))
        residual, second, turning = spectra.double().cpu()
        noise = NOISE * second[:, -1] * turning[:, -1].clamp(min=0).sqrt()
        noise *= (self.width * self.uncertainty.double().cpu()).sqrt()
        upper_gap, _ = gaps(residual)
        energy = operator.norm(dim=(1, 2)).tolist()
        starts = self.start.tolist()
        readings = []
        for layer in range(self.layers):
            values = residual[layer].tolist()
            threshold = self._threshold(starts[layer], float(noise[layer]))
            reading = EnergyReading(
                lambda_max=float(quotients[layer, 0]),
                lambda_min=float(quotients[layer, 1]),
                energy=energy[layer],
                start=starts[layer],
                noise=float(noise[layer]),
                threshold=threshold,
                dwell=self._dwell(float(upper_gap[layer]), max(map(abs, values))),
                grace=self._dwell(GRACE_GAP, 1.0),
                feeds=self.seen[layer],
                births=self.births[layer],
                predicted=predicted_births(values, threshold),
                heads=tuple(HeadReading(*head) for head in self.heads[layer].T.tolist()),
            )
            readings.append(reading)
        return readings

    @property
    def start(self) -> Tensor:
        """The median of the first feeds, (layers,); not a number before these are over."""
        if self.feeds < CALIBRATION:
            return torch.full((self.layers,), math.nan, **self.place)
        return self.starts.nanquantile(0.5, dim=0)

    def directions(self, layer: int) -> Tensor:
        """The tracked dominant direction (d,), which a birth stores. The published method puts it in no weight."""
        return self.vectors[layer, :, 0]

    def born(self, layer: int) -> None:
        """Follow a birth in a layer: its direction counts as taken, and the trackers begin anew across all of these."""
        births = self.births[layer]
        if births == self.width:
            raise InputError("layer", layer, f"has stored {births} directions, as many as it is wide: none is left")
        direction = self.vectors[layer, :, :1]
        for _ in range(2):
            direction = _unit(without(direction, self.stored[layer]))
        columns = torch.cat((self.stored[layer, :, :births], direction), 1)
        self.births[layer] += 1
        self._store(layer, columns)
        newborn = torch.full((2, 1), math.nan, **self.place)
        self.heads[layer] = torch.cat((self.heads[layer], newborn), 1)

    def removed(self, layer: int, head: int) -> None:
        """Follow a head that has left a layer: the direction it was credited with, if any, is free again.

        Newborn heads are a layer's last ones, in the order of their birth, so the last heads own the directions.
        """
        heads = self.heads[layer].shape[1]
        if not 0 <= head < heads:
            raise InputError("head", head, f"must be in 0..{heads - 1}")
        column = head - (heads - self.births[layer])
        columns = self.stored[layer, :, : self.births[layer]]
        if column >= 0:
            columns = _dropped(columns, column)
            self.births[layer] -= 1
        self._store(layer, columns)
        self.heads[layer] = _dropped(self.heads[layer], head)

    # --- state ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The large part of the state."""
        own = {name: getattr(self, name) for name in _TENSORS}
        return {**own, **{f"heads.{layer}": measured for layer, measured in enumerate(self.heads)}}

    def values(self) -> dict[str, Any]:
        """The rest of the state, plain values for JSON; `load` goes on from both exactly."""
        return {"feeds": self.feeds, "seen": [*self.seen], "births": [*self.births], "restarts": self.restarts}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from a state."""
        placed = {name: tensor.to(**self.place) for name, tensor in tensors.items()}
        for name in _TENSORS:
            mine, theirs = getattr(self, name).shape, placed[name].shape
            if name != "starts" and mine[:2] != theirs[:2]:
                raise InputError(name, tuple(theirs), f"must begin with {tuple(mine[:2])}, the layers and their width")
            setattr(self, name, placed[name])
        self.heads = [placed[f"heads.{layer}"] for layer in range(self.layers)]
        self.feeds, self.restarts = values["feeds"], values["restarts"]
        self.seen, self.births = list(values["seen"]), list(values["births"])

    # --- parts ------------------------------------------------------------------------------------------------------

    def _see(self, inputs: Tensor, attention_mask: Tensor) -> None:
        """Take in the tokens' second moments, and how sure they are."""
        if self.author:  # the first sequence there is, which the first process has
            tokens = inputs[:, 0] * (rank() == 0)
            new = sum_over_ranks(tokens.mT @ tokens)
            count = torch.tensor(float(tokens.shape[1]), **self.place)
        else:
            real = attention_mask.any(-1).expand(inputs.shape[1:3]).to(inputs)
            tokens = (inputs * real[:, :, None]).flatten(1, 2)
            count = sum_over_ranks(real.sum()).clamp(min=1)
            new = sum_over_ranks(tokens.mT @ tokens) / count
        weight = 1.0 if self.author or self.feeds == 0 else 1 - MEMORY
        self.second = (1 - weight) * self.second + weight * new
        # The variance of an average; in the long run the tokens of a feed count (1 + MEMORY) / (1 - MEMORY) times.
        self.uncertainty = (1 - weight) ** 2 * self.uncertainty + weight**2 / count

    def _threshold(self, start: float, noise: float) -> float:
        if math.isnan(start):
            return math.inf
        return self.share * start if self.author else max(self.share * start, SAFETY * noise)

    def _dwell(self, gap: float, size: float) -> int:
        if self.author:
            return author_dwell(gap, self.width, self.complexity, self.accuracy)
        return repaired_dwell(gap / size if size else 0.0, self.complexity, self.accuracy)

    def _store(self, layer: int, columns: Tensor) -> None:
        """Take orthonormal columns as the directions of a layer, and look for others."""
        rows = [*self.stored]
        rows[layer] = columns
        most = max(self.births)
        self.stored = torch.stack([pad(row, (0, most - row.shape[1])) for row in rows])
        self._restart(layer)

    def _restart(self, layer: int) -> None:
        """Draw a layer's trackers at random, across the stored directions; the lower one also across the upper one."""
        generator = torch.Generator().manual_seed(own_seed(f"{self.seed}-{self.restarts}"))
        self.restarts += 1
        drawn = torch.randn(self.width, 3, generator=generator).to(**self.place)
        for _ in range(2):
            drawn = _unit(without(drawn, self.stored[layer]))
            drawn[:, 1:2] = _unit(without(drawn[:, 1:2], drawn[:, :1]))
        self.vectors = torch.cat((self.vectors[:layer], drawn[None], self.vectors[layer + 1 :]))
        self.seen[layer] = 0


@dataclass(frozen=True)
class Energy:
    """The energy of the heads' own forms, as published; see `EnergyGauge` for the settings.

    >>> instrument = Energy().instrument(model)
    >>> instrument.feed(probe)
    >>> [layer.births for layer in instrument.read(probe)]
    [0, 0]
    """

    numerics: str = "author"
    share: float = 0.1
    complexity: float = 2.0
    accuracy: float = 0.05
    seed: int = 0

    def instrument(self, model: Growable) -> EnergyInstrument:
        """What follows the energy in a model."""
        return EnergyInstrument(self, model)


class EnergyInstrument(Instrument):
    """Follows the energy of all layers."""

    def __init__(self, gauge: Energy, model: Growable) -> None:
        self.settings, self.model = gauge, model
        self.gauge = self._made(model.plan)

    def _made(self, plan: Plan) -> EnergyGauge:
        own = self.settings
        return EnergyGauge(
            len(plan.layers), plan.width, numerics=own.numerics, share=own.share, complexity=own.complexity,
            accuracy=own.accuracy, seed=own.seed, **gauge_place(self.model),
        )  # fmt: skip

    def feed(self, probe: Probe) -> None:
        seen = probe.look()
        if not bool(mean_over_ranks(seen.loss).isfinite()):  # it would stay in the averages for good
            return
        with torch.no_grad(), torch.autocast(probe.tokens.device.type, enabled=False):
            attentions = [block.attention for block in self.model.stack]
            heads = [projections(attention.layer, attention.qkv.weight.detach()) for attention in attentions]
            self.gauge.feed(seen.inputs, heads, seen.attention_mask)

    def read(self, probe: Probe) -> tuple[EnergyReading, ...]:
        return from_first_rank(tuple(self.gauge.readings()))

    def follow(self, moves: Moves, plan: Plan) -> None:
        """A birth takes a direction, and a head that leaves gives its own back; with other blocks all begins anew."""
        if moves.layers != tuple(range(len(moves.layers))):
            self.gauge = self._made(plan)
            return
        for layer, heads in moves.heads.items():
            for gone in sorted(set(range(self.gauge.heads[layer].shape[1])) - set(heads), reverse=True):
                self.gauge.removed(layer, gone)
            for _ in range(heads.count(None)):
                self.gauge.born(layer)

    def state(self) -> dict[str, Any]:
        return {**self.gauge.values(), **self.gauge.tensors()}

    def load(self, state: dict[str, Any]) -> None:
        self.gauge.load({name: value for name, value in state.items() if isinstance(value, Tensor)}, state)


def check_numerics(numerics: str) -> None:
    """Raise unless there are such numerics."""
    if numerics not in NUMERICS:
        raise InputError("numerics", numerics, f"must be one of {', '.join(NUMERICS)}")


_TENSORS = ("second", "turning", "uncertainty", "starts", "stored", "vectors")


def _dropped(columns: Tensor, index: int) -> Tensor:
    return torch.cat((columns[:, :index], columns[:, index + 1 :]), 1)
