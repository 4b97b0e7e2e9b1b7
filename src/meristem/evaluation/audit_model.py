"""Measuring what every head of a model is worth, what its task still asks for, and what one more head would gain."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from meristem.comparison import paired_difference
from meristem.errors import InputError, RunError
from meristem.evaluation.audit import (
    CONFIDENCE,
    Audit,
    AuditSettings,
    DemandKind,
    Gain,
    HeadFinding,
    LayerFinding,
    demand_kind,
)
from meristem.gauges.demand import DemandGauge, DemandReading, Directions, side_by_side
from meristem.gauges.gauge import gauge_place
from meristem.gauges.probe import Batch, Batches, heads_read, look, silenced, writing
from meristem.gauges.redundancy import head_moments
from meristem.growth import AddHead
from meristem.growth.apply import apply_edit
from meristem.growth.births import RelativeDemand
from meristem.growth.head_surgery import insert_head, newborn_head, with_head
from meristem.growth.policies.incrt import Incrt, IncrtState
from meristem.model import Classifier, Decoder
from meristem.model.growable import Growable
from meristem.plan import LayerPlan

Training = Callable[[], Batches]  # the same training batches, from the first on, whenever it is called
Report = Callable[[str, int, int], None]  # told what is being done, how far it is, and of how much


def audit_model(
    model: Growable,
    training: Training,
    held_out: Sequence[Batch],
    settings: AuditSettings = AuditSettings(),  # noqa: B008  (immutable)
    *,
    policy: Incrt = Incrt(),  # noqa: B008  (immutable)
    start: IncrtState | None = None,
    seen: bool = False,
    report: Report = lambda what, done, total: None,
) -> Audit:
    """Audit a model, which is left as it was.

    Losses are compared on the `held_out` sequences, everything else is measured or trained on `training` batches; where
    the model has `seen` these before, the demand is tested on the held-out ones. `policy` says when a demand is certain
    and large, `start` how large each layer's was in the run; where that is not known it is measured with all attention
    switched off.
    """
    if model.plan.is_looped:
        raise InputError("plan", model.plan.digest[:12], "has loops; only layers that run once can be audited")
    return _Auditor(model, training, held_out, settings, policy, report, seen).audit(start)


class _Auditor:
    """The parts of an audit, and what they share: the losses of the model as it is, sequence by sequence."""

    def __init__(
        self, model: Growable, training: Training, held_out: Sequence[Batch], settings: AuditSettings, policy: Incrt,
        report: Report, seen: bool,
    ) -> None:  # fmt: skip
        self.model, self.training, self.held_out, self.seen = model, training, held_out, seen
        self.settings, self.policy, self.report = settings, policy, report
        self.whole = sequence_losses(model, self._reported("measuring the loss", held_out, len(held_out)))

    def audit(self, start: IncrtState | None) -> Audit:
        if len(self.whole) < 2:
            raise InputError("held-out sequences", len(self.whole), "must be at least 2 to say how sure anything is")
        loss = math.fsum(self.whole) / len(self.whole)
        if not math.isfinite(loss):
            raise RunError("the held-out loss of this model is not finite: there is nothing to audit")
        heads = self._heads()
        gauges, relative = self._demand(start)
        gains = self._gains(gauges, relative)
        layers = [
            LayerFinding(layer, self.model.plan.heads[layer], demand, self._kind(demand), *gains[layer])
            for layer, demand in enumerate(relative)
        ]
        return Audit(loss, len(self.whole), self.settings, heads, tuple(layers))

    # --- what every head is worth -----------------------------------------------------------------------------------

    def _heads(self) -> tuple[HeadFinding, ...]:
        batches = self._batches("looking at how heads overlap")
        moments = head_moments(heads_read(self.model, *batch) for batch in batches)
        places = [(layer, head) for layer, count in enumerate(self.model.plan.heads) for head in range(count)]
        confidence = _joint_confidence(len(places))
        findings = []
        for number, (layer, head) in enumerate(places):
            self.report("switching heads off", number, len(places))
            weight = self.model.stack[layer].attention.out.weight.detach()
            dim = self.model.plan.head_dims[layer]
            zeroed = weight.clone()
            zeroed[:, head * dim : (head + 1) * dim] = 0
            off = replaced = paired_difference(self._losses_writing(layer, zeroed), self.whole, confidence)
            if self.model.plan.heads[layer] > 1:
                folded = moments[layer].folded(weight, head)
                replaced = paired_difference(self._losses_writing(layer, folded), self.whole, confidence)
            findings.append(HeadFinding(layer, head, off, replaced))
        self.report("switching heads off", len(places), len(places))
        return tuple(findings)

    def _losses_writing(self, layer: int, out: Tensor) -> list[float]:
        """The losses with another output projection in a layer."""
        with writing([self.model.stack[layer].attention.out.weight], [out]):
            return sequence_losses(self.model, self.held_out)

    # --- what is still asked for ------------------------------------------------------------------------------------

    def _demand(self, start: IncrtState | None) -> tuple[list[DemandGauge], tuple[RelativeDemand, ...]]:
        """The gauge, and what is left of the largest demand of every layer."""
        gauges = self._fed("measuring the demand")
        readings = self._readings(gauges)
        state = self.policy.begin(self.model.plan) if start is None else start
        if not all(layer.largest for layer in state.layers):
            with silenced(self.model):
                silent = self._fed("measuring the demand without attention", self.policy.calibration, silent=True)
            measured = self.policy.calibrated(state, self._readings(silent))
            pairs = zip(state.layers, measured.layers, strict=True)
            state = IncrtState(tuple(known if known.largest else new for known, new in pairs))
        return gauges, self.policy.relative(self.policy.calibrated(state, readings), readings)

    def _fed(self, what: str, most: int | None = None, *, silent: bool = False) -> list[DemandGauge]:
        """A gauge for each layer, as layers may have heads of different sizes, that has seen `most` batches or all."""
        plan, place = self.model.plan, gauge_place(self.model)
        seed, dims = self.settings.seed, plan.head_dims
        gauges = [DemandGauge(1, plan.width, self.model.rope(dim), seed=seed, **place) for dim in dims]
        tests = itertools.cycle(self.held_out) if self.seen else None
        for batch in self._batches(what, most):
            if tests is not None:
                self._feed(gauges, next(tests), silent=silent, learns=False)
            self._feed(gauges, batch, silent=silent, tests=tests is None)
        return gauges

    def _feed(
        self, gauges: Sequence[DemandGauge], batch: Batch, *, silent: bool, tests: bool = True, learns: bool = True
    ) -> None:
        shown = look(self.model, *batch)
        with torch.autocast(batch[0].device.type, enabled=False):
            for layer, gauge in enumerate(gauges):
                own = slice(layer, layer + 1)
                heads = None if silent else side_by_side(shown.heads.head_outputs[own])
                parts = shown.inputs[own], shown.gradients[own], shown.attention_mask, shown.sizes[own]
                gauge.feed(*parts, heads, tests=tests, learns=learns)

    def _readings(self, gauges: Sequence[DemandGauge]) -> list[DemandReading]:
        return [gauge.readings(len(self.whole) if self.seen else 0)[0] for gauge in gauges]

    def _kind(self, demand: RelativeDemand) -> DemandKind:
        return demand_kind(demand, max(self.policy.certainty, Incrt.certainty))  # also of a run that grew by less

    # --- what one more head gains -----------------------------------------------------------------------------------

    def _gains(
        self, gauges: Sequence[DemandGauge], relative: Sequence[RelativeDemand]
    ) -> list[tuple[Gain | None, str]]:
        """The gain of every layer, or why it was not tried."""
        reasons = [_cannot_grow(layer) for layer in self.model.plan.layers]
        able = [layer for layer, reason in enumerate(reasons) if not reason]
        # Where no demand was ever certain it is not a number, and comes last.
        able.sort(key=lambda layer: -relative[layer].demand if math.isfinite(relative[layer].demand) else math.inf)
        tried = sorted(able[: self.settings.layers])
        confidence = _joint_confidence(len(tried))

        def untried(layer: int) -> str:
            if not self.settings.layers:
                return "none was to be tried (layers = 0)"
            unknown = not math.isfinite(relative[layer].demand)
            return "its demand was never certain" if unknown else "its demand is smaller than that of the layers tried"

        gains: list[tuple[Gain | None, str]] = [
            (None, reason or untried(layer)) for layer, reason in enumerate(reasons)
        ]
        for layer in tried:
            grown = self._losses_after_training(layer, gauges[layer].directions(0))
            longer = self._losses_after_training(layer, None)
            pairs = ((self.whole, grown), (self.whole, longer), (longer, grown))
            gains[layer] = Gain(*(paired_difference(*pair, confidence) for pair in pairs)), ""
        return gains

    def _losses_after_training(self, layer: int, directions: Directions | None) -> list[float]:
        """The losses after training one layer of a copy: a head added to it, or without `directions` those it has."""
        model = copy.deepcopy(self.model)
        attention = model.stack[layer].attention
        weights = attention.qkv.weight.detach(), attention.out.weight.detach()
        masks = torch.ones_like(weights[0]), torch.ones_like(weights[1])
        what = f"training the heads of layer {layer} further"
        if directions is not None:
            head = newborn_head(attention.layer, model.plan.width, directions, self.settings.seed + layer)
            nothing = torch.zeros_like(weights[0]), torch.zeros_like(weights[1])
            masks = insert_head(attention.layer, *nothing, head.mapped(torch.ones_like))
            apply_edit(model, None, AddHead(layer, head))
            what = f"training another head in layer {layer}"
        self._train(model, [attention.qkv.weight, attention.out.weight], masks, what)
        return sequence_losses(model, self.held_out)

    def _train(self, model: Growable, weights: Sequence[Tensor], masks: Sequence[Tensor], what: str) -> None:
        """Train what the masks let through of some weights, and nothing else."""
        steps, rate = self.settings.steps, self.settings.rate
        for parameter in model.parameters():
            parameter.requires_grad_(any(parameter is weight for weight in weights))
        optimizer = torch.optim.Adam(weights, rate)
        for step, (tokens, targets) in enumerate(itertools.islice(self.training(), steps)):
            self.report(what, step, steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps)
            gradients = torch.autograd.grad(model.loss(tokens, targets), weights)
            for weight, gradient, mask in zip(weights, gradients, masks, strict=True):
                weight.grad = gradient * mask  # Adam leaves alone what never had a gradient
            optimizer.step()
        self.report(what, steps, steps)

    def _batches(self, what: str, most: int | None = None) -> Batches:
        count = self.settings.feeds if most is None else min(most, self.settings.feeds)
        return self._reported(what, itertools.islice(self.training(), count), count)

    def _reported(self, what: str, batches: Iterable[Batch], count: int) -> Batches:
        """So many batches, one after another, with a word of how far it is."""
        for number, batch in enumerate(batches):
            self.report(what, number, count)
            yield batch
        self.report(what, count, count)


@torch.no_grad()
def sequence_losses(model: Growable, batches: Iterable[Batch]) -> list[float]:
    """The loss of every sequence by itself."""
    return [loss for tokens, targets in batches for loss in _losses(model, tokens, targets).tolist()]


def _losses(model: Growable, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sequence of a batch, (B,); their mean is the model's loss on the batch."""
    if isinstance(model, Classifier):
        return cross_entropy(model.logits(tokens).float(), targets, model.class_weights, reduction="none")
    pairs = zip(tokens, targets, strict=True)
    if isinstance(model, Decoder):  # logits one sequence at a time: a whole batch of them may not fit
        pairs = zip(model.hidden(tokens), targets, strict=True)
        return torch.stack([cross_entropy(model.unembed(hidden).float(), target) for hidden, target in pairs])
    return torch.stack([model.loss(token[None], target[None]) for token, target in pairs])


def _joint_confidence(count: int) -> float:
    """The confidence that each of `count` intervals needs, so that all hold at once (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / max(1, count)


def _cannot_grow(layer: LayerPlan) -> str:
    """Why a layer cannot be given a head; empty if it can."""
    try:
        with_head(layer)
    except InputError as error:
        return str(error)
    return ""
