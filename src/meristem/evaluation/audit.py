"""The certificate of a trained model: whether every head matters, and whether another one would help.

What was measured, and what may be said of it. Nothing here computes with a model; see `audit_model` and `audit_run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from meristem.comparison import PairedDifference
from meristem.errors import InputError
from meristem.growth.births import RelativeDemand
from meristem.growth.policies.prune import Prune
from meristem.limits import MOST_LAYERS, MOST_SEED, check_integer
from meristem.records import finite

# More would take days and tell nothing new: errors fall with the root of what was seen.
MOST_FEEDS, MOST_STEPS = 10_000, 100_000
CONFIDENCE = 0.95  # that all intervals of a table hold at once

Answer = Literal["yes", "no", "not shown"]
DemandKind = Literal["certain", "small", "unknown"]


@dataclass(frozen=True)
class AuditSettings:
    """How thorough an audit is."""

    threshold: float = Prune.tolerance  # share of the loss below which a difference is none
    feeds: int = 40  # training batches on which the demand is measured, and how heads overlap
    steps: int = 200  # updates of a head that is added
    rate: float = 3e-3  # its learning rate at the beginning, which falls linearly to 0; Adam
    layers: int = 4  # that are given a head, one at a time: those with the largest demand
    seed: int = 0  # of added heads

    def __post_init__(self) -> None:
        limits = (
            ("feeds", 2, MOST_FEEDS),
            ("steps", 1, MOST_STEPS),
            ("layers", 0, MOST_LAYERS),
            ("seed", 0, MOST_SEED),
        )
        for field, least, most in limits:
            check_integer(field, getattr(self, field), least, most)
        if not 0 <= self.threshold < 1:
            raise InputError("threshold", self.threshold, "must be from 0 to below 1: a share of the loss")
        if not self.rate > 0:
            raise InputError("rate", self.rate, "must be above 0")


@dataclass(frozen=True)
class HeadFinding:
    """The rise of the loss without a head: switched off, and with the other heads of its layer in its place."""

    layer: int
    head: int
    off: PairedDifference
    replaced: PairedDifference


@dataclass(frozen=True)
class Gain:
    """The fall of the loss when a layer is given another head, which alone is trained, briefly.

    `further` is the fall when the heads that are there are trained as briefly instead, and `extra` the difference
    between the two: a model that is not done training gains either way.
    """

    head: PairedDifference
    further: PairedDifference
    extra: PairedDifference


def demand_kind(demand: RelativeDemand, certainty: float) -> DemandKind:
    """What is known of a demand, within so many standard errors of it."""
    error = certainty * demand.noise
    if demand.demand > demand.threshold and demand.demand > error:
        return "certain"
    return "small" if demand.demand + error <= demand.threshold else "unknown"


@dataclass(frozen=True)
class LayerFinding:
    """What a layer still wants."""

    layer: int
    heads: int
    demand: RelativeDemand
    kind: DemandKind  # certain: for sure above zero, and above its threshold; small: for sure below that
    gain: Gain | None  # by one more head; None if that was not tried
    untried: str = ""  # why not
    predicted: Mapping[str, float] | None = None  # number of heads

    @property
    def asks(self) -> bool:
        return self.kind == "certain"


@dataclass(frozen=True)
class Audit:
    """Everything that was measured. Intervals hold for all heads together, and for all tried layers together."""

    loss: float
    sequences: int
    settings: AuditSettings
    heads: tuple[HeadFinding, ...]
    layers: tuple[LayerFinding, ...]

    # --- what may be said -------------------------------------------------------------------------------------------

    @property
    def unit(self) -> float:
        """What shares are shares of: the loss, unless it is too small to speak of shares."""
        return max(self.loss, Prune.SMALL_LOSS)

    @property
    def threshold(self) -> float:
        """The difference of losses that counts as none."""
        return self.settings.threshold * self.unit

    def is_only(self, head: HeadFinding) -> bool:
        """Whether its layer has no other, so that without it there is no attention in that layer."""
        return self.layers[head.layer].heads == 1

    def matters(self, head: HeadFinding) -> Answer:
        """No: the others can take its place, at a cost below the threshold. Yes: there is a cost."""
        if head.replaced.high <= self.threshold:
            return "no"
        return "yes" if head.replaced.low > 0 else "not shown"

    def gains(self, layer: LayerFinding) -> Answer:
        """Whether another head gains more than the threshold.

        One that made the model worse was trained badly, and shows nothing.
        """
        if layer.gain is None or layer.gain.head.high < -self.threshold:
            return "not shown"
        if layer.gain.head.high <= self.threshold:
            return "no"
        return "yes" if layer.gain.head.low > self.threshold else "not shown"

    def wants_more(self, layer: LayerFinding) -> Answer:
        """Whether a layer gains by another head, or asks for one."""
        return "yes" if layer.asks else self.gains(layer)

    @property
    def minimal(self) -> Answer:
        """Whether every head matters."""
        answers = {self.matters(head) for head in self.heads}
        return "no" if "no" in answers else "not shown" if "not shown" in answers else "yes"

    @property
    def sufficient(self) -> Answer:
        """Whether no layer gains by another head, nor asks for one."""
        answers = {self.wants_more(layer) for layer in self.layers}
        return "no" if "yes" in answers else "yes" if answers == {"no"} else "not shown"

    # --- for machines -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, which has no NaN: None stands for a number that is not finite."""
        heads = [
            {
                "layer": head.layer, "head": head.head, "only": self.is_only(head), "matters": self.matters(head),
                "off": self._difference(head.off), "replaced": self._difference(head.replaced),
            }
            for head in self.heads
        ]  # fmt: skip
        layers = [
            {
                "layer": layer.layer, "heads": layer.heads,
                "predicted": None if layer.predicted is None else _recorded(layer.predicted),
                **_recorded(asdict(layer.demand)), "demand_is": layer.kind, "asks": layer.asks,
                "gain": None if layer.gain is None else self._gain(layer.gain), "untried": layer.untried,
                "wants_more": self.wants_more(layer),
            }
            for layer in self.layers
        ]  # fmt: skip
        return {
            "loss": self.loss, "sequences": self.sequences, "settings": asdict(self.settings),
            "confidence": CONFIDENCE, "correction": "Bonferroni",
            "minimal": self.minimal, "sufficient": self.sufficient, "heads": heads, "layers": layers,
        }  # fmt: skip

    def _gain(self, gain: Gain) -> dict[str, dict[str, float | None]]:
        return {name: self._difference(getattr(gain, name)) for name in ("head", "further", "extra")}

    def _difference(self, difference: PairedDifference) -> dict[str, float | None]:
        """A difference of losses for JSON, with its mean as a share."""
        return _recorded({**asdict(difference), "share": difference.mean / self.unit})


def _recorded(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(value) for name, value in values.items()}
