"""Heads are born and leave while a model trains: measuring, deciding, operating and saying why."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.gauges.demand import DemandGauge
from meristem.gauges.redundancy import HeadMoments
from meristem.growth.average import Average
from meristem.growth.edits import AddHead, RemoveHead
from meristem.growth.heads import Head, empty_head
from meristem.growth.incrt import DemandDecision, Incrt, IncrtState
from meristem.growth.outcome import Growth
from meristem.growth.pruning import PruningState
from meristem.growth.surgery import Model, add_head, remove_head
from meristem.model.block import Pass
from meristem.ranks import from_first_rank, mean_over_ranks, rank, require_equal, sum_over_ranks, world
from meristem.records import finite

FEED_SEQUENCES, FEED_TOKENS = 64, 8192  # of the whole batch, over all processes, that the gauge is shown at most
LOSS_MEMORY = 0.9  # per feed

Batches = Iterator[tuple[Tensor, Tensor]]  # tokens and labels
Fresh = Callable[[], Batches]  # this process's share of batches that the model has not been trained on yet


class HeadGrowth:
    """Follows `policy` on `model`, whose layers all have heads of one dim."""

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer | None, policy: Incrt) -> None:
        plan = model.plan
        if len(set(plan.head_dims)) > 1:
            raise InputError("head_dim", plan.head_dims, "must be the same in all layers for heads to be born")
        if plan.is_looped:
            raise InputError("plan", plan.digest[:12], "has loops; heads come and go in layers that run once")
        self.model, self.optimizer, self.policy = model, optimizer, policy
        weight = model.stack[0].attention.out.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.gauge = DemandGauge(
            len(plan.layers), plan.width, plan.head_dims[0], seed=policy.seed, device=weight.device, dtype=dtype
        )
        self.done = 0
        self.state = policy.start(len(plan.layers))
        self.pruning = policy.pruning.start(plan.heads)
        self.loss = Average(LOSS_MEMORY)
        self.earlier: Tensor | None = None  # the demand half-way through the calibration
        self.spectra: list[list[float]] = []  # of the demand of the model without attention

    def step(self, tokens: Tensor, labels: Tensor, fresh: Fresh | None = None) -> Growth:
        """After an update on tokens and labels, this process's share of the batch."""
        self.done += 1
        policy, done = self.policy, self.done
        if done <= policy.calibration:
            with _silenced(self.model):
                self._feed(tokens, labels)
            if done == (policy.calibration + 1) // 2:
                self.earlier = self.gauge.scores.total.clone()
            if done == policy.calibration:
                self._calibrate()
        elif done % policy.feed_every == 0:
            self._feed(tokens, labels)
        if done <= policy.calibration or done % policy.decide_every:
            return Growth()
        return self._decide(tokens, labels, fresh)

    # --- measuring --------------------------------------------------------------------------------------------------

    def _feed(self, tokens: Tensor, labels: Tensor) -> None:
        """Show the gauge what the attention of every layer reads, and the gradient of the loss by what it writes."""
        tokens, labels = _chosen(tokens, labels)
        passes: list[Pass] = []
        attention = self.model.stack[0].attention
        # All that is asked for are gradients by activations, so only the first layer's output need lead to them.
        with _frozen(self.model, but=attention.out.weight), torch.enable_grad():
            loss = self.model.loss(tokens, labels, watch=lambda layer, number, seen: passes.append(seen))
            gradients = torch.autograd.grad(loss, [seen.update for seen in passes])
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            blocks = zip(self.model.stack, passes, strict=True)
            inputs = torch.stack([block.attention_input(seen.stream.detach()) for block, seen in blocks])
            self.gauge.feed(inputs, torch.stack(gradients) * labels.numel(), self.model.allowed(tokens))
            self.loss.add(mean_over_ranks(loss.detach().float()))

    def _calibrate(self) -> None:
        self.state = from_first_rank(self.policy.calibrated(self.state, self.gauge.readings()))
        assert self.earlier is not None
        self.spectra = from_first_rank(self.gauge.spectra(self.earlier, self.policy.calibration // 2))
        self.earlier = None
        self.gauge.reset()
        self.loss = Average(LOSS_MEMORY)

    @torch.no_grad()
    def _moments(self, tokens: Tensor, labels: Tensor) -> list[HeadMoments]:
        """Of every layer's heads, over some sequences."""
        tokens, labels = _chosen(tokens, labels)
        passes: list[Pass] = []
        self.model.loss(tokens, labels, watch=lambda layer, number, seen: passes.append(seen))
        real = self.model.allowed(tokens).any(-1).expand(len(tokens), -1)
        sums = [HeadMoments.of(seen.mixed, real) for seen in passes]
        return [
            HeadMoments(sum_over_ranks(gram) / sum_over_ranks(count), layer.head_dim)
            for (gram, count), layer in zip(sums, self.model.plan.layers, strict=True)
        ]

    # --- deciding ---------------------------------------------------------------------------------------------------

    def _decide(self, tokens: Tensor, labels: Tensor, fresh: Fresh | None) -> Growth:
        policy, plan = self.policy, self.model.plan
        most = policy.max_heads or max(plan.heads) + 1
        full = frozenset(index for index, heads in enumerate(plan.heads) if heads >= most)
        readings, loss = self.gauge.readings(), float(self.loss.mean)
        decision = from_first_rank(policy.decide(self.state, self.done, readings, loss, self.gauge.feeds, full=full))
        self.state = decision.state
        event = {"event": "demand", "loss": finite(loss), **self._demand(decision)}
        if decision.layer is not None:
            self._bear(decision.layer)
            action = {"action": "birth", "layer": decision.layer, "rule": decision.rules[decision.layer]}
            return self._changed(event, action)
        if not policy.prune or not policy.has_cooled(self.state, self.done):
            return Growth([event])
        return self._prune(event, tokens, labels, fresh)

    def _demand(self, decision: DemandDecision) -> dict[str, Any]:
        """What was measured of every layer: the demand left, of what there was, its noise, and where births begin."""
        readings = decision.relative
        return {
            "heads": list(self.model.plan.heads),
            "demand": [finite(reading.demand) for reading in readings],
            "noise": [finite(reading.noise) for reading in readings],
            "threshold": [finite(reading.threshold) for reading in readings],
            "rules": list(decision.rules),
            "predicted_heads": [self.policy.predicted(spectrum) for spectrum in self.spectra],
        }

    def _prune(self, event: dict[str, Any], tokens: Tensor, labels: Tensor, fresh: Fresh | None) -> Growth:
        policy = self.policy.pruning
        if not policy.watches(self.pruning, self.done):
            return Growth([event])
        moments = self._moments(tokens, labels)
        blocks = zip(moments, self.model.stack, strict=True)
        shares = from_first_rank([moment.shares(block.attention.out.weight).tolist() for moment, block in blocks])
        event["own_share"] = [[finite(share) for share in layer] for layer in shares]
        self.pruning = policy.suspect(self.pruning, self.done, shares)
        suspect = policy.tries(self.pruning)
        if suspect is None:
            return Growth([event])
        layer, head = suspect
        batches = iter([(tokens, labels)]) if fresh is None else fresh()
        before, after = self._try_without(layer, head, moments[layer], batches)
        facts = {"layer": layer, "head": head, "loss_with": before, "loss_without": after}
        if not policy.passes(before, after):
            self.pruning = policy.spared(self.pruning, self.done, layer, head)
            spared = {"event": "growth", "action": "spare", "rule": "the loss rises without it"}
            return Growth([{**event, **spared, **facts}])
        remove_head(self.model, self.optimizer, RemoveHead(layer, head))
        grown = self.pruning.heads[layer][head].grown
        self.pruning = policy.removed(self.pruning, layer, head)
        self.state = self.policy.removed(self.state, self.done, layer, born_here=grown)
        return self._changed(event, {"action": "removal", "rule": "the other heads can stand in for it", **facts})

    def _changed(self, event: dict[str, Any], facts: dict[str, Any]) -> Growth:
        self.gauge.reset()
        require_equal(self.model.plan.digest, "plan")
        return Growth([{**event, "event": "growth", **facts, "heads": list(self.model.plan.heads)}], True, True)

    # --- operating --------------------------------------------------------------------------------------------------

    def _bear(self, layer: int) -> None:
        """A head that looks for what is asked for, half of it at random, and writes nothing yet."""
        attention = self.model.stack[layer].attention
        seed = random.Random(f"{self.policy.seed}-{self.done}-{layer}").getrandbits(63)
        generator = torch.Generator().manual_seed(seed)
        blank = empty_head(attention.layer, attention.qkv.weight.detach(), attention.out.weight.detach())
        query, key = self.gauge.directions(layer)

        def drawn(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=generator).to(like) / like.shape[1] ** 0.5

        head = Head(
            (drawn(blank.query) + query.to(blank.query)) / 2,
            None if blank.key is None else (drawn(blank.key) + key.to(blank.key)) / 2,
            None if blank.value is None else drawn(blank.value),
            blank.out,
        )
        add_head(self.model, self.optimizer, AddHead(layer, head))
        self.pruning = self.policy.pruning.born(self.pruning, self.done, layer)

    @torch.no_grad()
    def _try_without(self, layer: int, head: int, moments: HeadMoments, batches: Batches) -> tuple[float, float]:
        """The loss with a head, and with the others in its place, which then stay so if that is good enough."""
        weight = self.model.stack[layer].attention.out.weight
        old, new = weight.clone(), moments.folded(weight, head)
        sums = torch.zeros(3, device=weight.device, dtype=torch.float64)
        for tokens, labels in batches:
            weight.copy_(old)
            with_head = self.model.loss(tokens, labels).double()
            weight.copy_(new)
            without = self.model.loss(tokens, labels).double()
            sums += len(tokens) * torch.stack((with_head, without, torch.ones_like(without)))
            if sums[2] * world() >= self.policy.pruning.sequences:
                break
        before, after, count = sum_over_ranks(sums).tolist()
        if not self.policy.pruning.passes(before / count, after / count):
            weight.copy_(old)
        return before / count, after / count

    # --- state ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The large part of the state."""
        found = {f"gauge.{name}": tensor for name, tensor in self.gauge.tensors().items()}
        others = {"loss": self.loss.value, "earlier": self.earlier}
        return {**found, **{name: tensor for name, tensor in others.items() if tensor is not None}}

    def values(self) -> dict[str, Any]:
        """The rest of the state, plain values for JSON; `load` goes on from both exactly."""
        return {
            "rule": asdict(self.policy), "done": self.done, "gauge": self.gauge.values(), "losses": self.loss.count,
            "state": self.state.to_dict(), "pruning": self.pruning.to_dict(), "spectra": self.spectra,
        }  # fmt: skip

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from a state, with a model that has the structure that belongs to it."""
        mine, theirs = asdict(self.policy), values["rule"]
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                raise InputError(f"policy.{name}", mine.get(name), f"must be {theirs.get(name)!r}, as in the state")
        prefix = "gauge."
        gauge = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        self.gauge.load(gauge, values["gauge"])
        device = self.model.stack[0].attention.out.weight.device
        loss, self.earlier = (tensors[name].to(device) if name in tensors else None for name in ("loss", "earlier"))
        self.loss = Average(LOSS_MEMORY, loss, values["losses"])
        self.done, self.spectra = values["done"], values["spectra"]
        self.state, self.pruning = IncrtState.from_dict(values["state"]), PruningState.from_dict(values["pruning"])


def _chosen(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Every so manieth sequence, the same ones of the whole batch however many processes share it."""
    mine = len(tokens)
    wanted = max(world(), min(FEED_SEQUENCES, FEED_TOKENS // tokens.shape[1]))
    stride = -(-mine * world() // wanted)
    chosen = slice(-rank() * mine % stride, None, stride)
    return tokens[chosen], labels[chosen]


@contextmanager
def _frozen(model: Model, but: Tensor) -> Iterator[None]:
    """Gradients by the parameters are not asked for, and so not computed."""
    trained = [p for p in model.parameters() if p.requires_grad and p is not but]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _silenced(model: Model) -> Iterator[None]:
    """The model as it would be without attention."""
    weights = [block.attention.out.weight for block in model.stack]
    saved = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        torch._foreach_zero_(weights)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, saved)
