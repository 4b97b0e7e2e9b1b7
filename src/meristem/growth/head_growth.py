"""Heads are born and leave while a model trains: measuring, deciding, operating and saying why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.gauges.redundancy import HeadMoments
from meristem.growth.criteria import Decision, HeadsRead, Policy, gauge_place, make_criterion, with_prefix
from meristem.growth.edits import AddHead, RemoveHead
from meristem.growth.heads import fewest_heads, newborn_head, with_head
from meristem.growth.measuring import Batches, head_moments, heads_read, look, silenced
from meristem.growth.outcome import Growth, check_rule
from meristem.growth.policies.incrt import Incrt
from meristem.growth.policies.pruning import Pruning, PruningState
from meristem.growth.surgery import Model, add_head, remove_head
from meristem.plan import Plan
from meristem.ranks import from_first_rank, mean_over_ranks, require_equal, sum_over_ranks, world
from meristem.records import finite
from meristem.seeds import own_seed

LOSS_MEMORY = 0.9  # per feed

Fresh = Callable[[], Batches]  # this process's share of batches that the model has not been trained on yet


class HeadGrowth:
    """Follows `policy` on `model`.

    The `optimizer` holds the layers' attention, and is given what takes its place. With None nothing that is born will
    be trained unless the caller sees to it, whenever a step says that parameters were exchanged.
    """

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer | None, policy: Policy) -> None:
        check_growable(model.plan)
        for layer, block in enumerate(model.stack):
            attention = block.attention
            check_held(optimizer, f"attention of layer {layer}", attention.qkv.weight, attention.out.weight)
        self.model, self.optimizer, self.policy = model, optimizer, policy
        self.criterion = make_criterion(policy, model)
        self.trials = policy.pruning if isinstance(policy, Incrt) else Pruning()
        self.ages = self.trials.start(model.plan.heads)
        self.losses = torch.zeros(2, **gauge_place(model))  # averages of the loss, and of what it was weighted with
        self.done = 0
        self.names = tuple(self.tensors())  # that every state has

    def step(self, tokens: Tensor, targets: Tensor, fresh: Fresh | None = None) -> Growth:
        """After an update on tokens and targets, this process's share of the batch."""
        self.done += 1
        policy, done, silent = self.policy, self.done, self.criterion.silent
        read: HeadsRead | None = None
        if done <= silent:
            with silenced(self.model):
                self._feed(tokens, targets)
            if done == silent:
                self.criterion.calibrate()
                self.losses.zero_()
        elif done % policy.feed_every == 0 and self.criterion.sees:
            read = self._feed(tokens, targets)
        if done <= silent or done % policy.decide_every:
            return Growth()
        return self._decide(tokens, targets, read, fresh)

    # --- measuring --------------------------------------------------------------------------------------------------

    def _feed(self, tokens: Tensor, targets: Tensor) -> HeadsRead:
        """Show the criterion what every layer's attention reads, and the gradient of the loss by what it writes."""
        seen = look(self.model, tokens, targets)
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            self.criterion.feed(seen)
            loss = mean_over_ranks(seen.loss).to(self.losses)
            new = torch.lerp(torch.stack((loss, torch.ones_like(loss))), self.losses, LOSS_MEMORY)
            # A loss that is not finite, as of an update that was skipped, would stay for good.
            self.losses = torch.where(loss.isfinite(), new, self.losses)
        return seen.heads

    def _moments(self, tokens: Tensor, targets: Tensor, read: HeadsRead | None) -> list[HeadMoments]:
        """Of every layer's heads, over some sequences: those of this update's feed, if there was one."""
        return head_moments([heads_read(self.model, tokens, targets) if read is None else read])

    # --- deciding ---------------------------------------------------------------------------------------------------

    def _decide(self, tokens: Tensor, targets: Tensor, read: HeadsRead | None, fresh: Fresh | None) -> Growth:
        most = self.policy.max_heads or max(self.model.plan.heads) + 1
        full = frozenset(index for index, heads in enumerate(self.model.plan.heads) if heads >= most)
        loss, weight = self.losses.tolist()
        loss = loss / weight if weight else math.nan
        decision = self.criterion.decide(self.done, loss, full)
        event = {"event": "demand", "loss": finite(loss), **self._facts(decision)}
        if decision.layer is not None:
            layer = decision.layer
            self._bear(layer)
            return self._changed(event, {"action": "birth", "layer": layer, "rule": decision.rules[layer]})
        if decision.removal is not None:
            layer, head = decision.removal
            weight = self.model.stack[layer].attention.out.weight
            with torch.no_grad():
                folded = self._moments(tokens, targets, read)[layer].folded(weight, head)
                if not folded.isfinite().all():  # of a batch that is not; the next one will do
                    return Growth([event])
                weight.copy_(folded)
            self._remove(layer, head)
            facts = {"action": "removal", "layer": layer, "head": head, "rule": decision.rules[layer]}
            return self._changed(event, facts)
        if not self.criterion.may_prune(self.done) or not self.trials.watches(self.ages, self.done):
            return Growth([event])
        return self._prune(event, self._moments(tokens, targets, read), fresh or (lambda: iter([(tokens, targets)])))

    def _facts(self, decision: Decision) -> dict[str, Any]:
        """What was measured of every layer: the demand left, of what there was, its noise, and where births begin."""
        return {
            "heads": list(self.model.plan.heads),
            "demand": [finite(reading.demand) for reading in decision.relative],
            "noise": [finite(reading.noise) for reading in decision.relative],
            "threshold": [finite(reading.threshold) for reading in decision.relative],
            "rules": list(decision.rules),
            "predicted_heads": self.criterion.predicted(),
            **{name: [finite(value) for value in layers] for name, layers in self.criterion.form().items()},
        }

    def _prune(self, event: dict[str, Any], moments: list[HeadMoments], fresh: Fresh) -> Growth:
        """Look for a head that the others can stand in for, and try it."""
        blocks = zip(moments, self.model.stack, strict=True)
        own = [moment.shares(block.attention.out.weight.detach()) for moment, block in blocks]
        shares = from_first_rank([layer.tolist() for layer in own])
        event["own_share"] = [[finite(share) for share in layer] for layer in shares]
        judged = [share if self._may_lose(layer) else [math.nan] * len(share) for layer, share in enumerate(shares)]
        self.ages = self.trials.suspect(self.ages, self.done, judged)
        suspect = self.trials.tries(self.ages)
        if suspect is None:
            return Growth([event])
        layer, head = suspect
        before, after = self._try_without(layer, head, moments[layer], fresh())
        facts = {"layer": layer, "head": head, "loss_with": finite(before), "loss_without": finite(after)}
        if self.trials.passes(before, after):
            self._remove(layer, head)
            return self._changed(event, {"action": "removal", "rule": "the other heads can stand in for it", **facts})
        self.ages = self.trials.spared(self.ages, self.done, layer, head)
        return Growth([{**event, "event": "growth", "action": "spare", "rule": "the loss rises without it", **facts}])

    def _may_lose(self, layer: int) -> bool:
        plan = self.model.plan.layers[layer]
        return plan.heads > fewest_heads(plan)

    def _changed(self, event: dict[str, Any], facts: dict[str, Any]) -> Growth:
        require_equal(self.model.plan.digest, "plan")
        return Growth([{**event, "event": "growth", **facts, "heads": list(self.model.plan.heads)}], True, True)

    # --- operating --------------------------------------------------------------------------------------------------

    def _bear(self, layer: int) -> None:
        """A head that looks for what is asked for, half of it at random, and writes nothing yet."""
        attention = self.model.stack[layer].attention
        seed = own_seed(f"{self.policy.seed}-{self.done}-{layer}")
        weights = attention.qkv.weight.detach(), attention.out.weight.detach()
        head = newborn_head(attention.layer, *weights, self.criterion.directions(layer), seed)
        add_head(self.model, self.optimizer, AddHead(layer, head))
        self.ages = self.trials.born(self.ages, self.done, layer)
        self.criterion.born(layer)

    def _remove(self, layer: int, head: int) -> None:
        """Take out a head that writes nothing any more."""
        remove_head(self.model, self.optimizer, RemoveHead(layer, head))
        grown = self.ages.heads[layer][head].grown
        self.ages = self.trials.removed(self.ages, layer, head)
        self.criterion.removed(self.done, layer, head, grown=grown)

    @torch.no_grad()
    def _try_without(self, layer: int, head: int, moments: HeadMoments, batches: Batches) -> tuple[float, float]:
        """The loss with a head, and with the others in its place, which then stay so if that is good enough."""
        weight = self.model.stack[layer].attention.out.weight
        old, new = weight.clone(), moments.folded(weight, head)
        sums = torch.zeros(3, device=weight.device, dtype=torch.float64)
        try:
            for tokens, targets in batches:
                weight.copy_(old)
                with_head = self.model.loss(tokens, targets).double()
                weight.copy_(new)
                without = self.model.loss(tokens, targets).double()
                sums += len(tokens) * torch.stack((with_head, without, torch.ones_like(without)))
                if sums[2] * world() >= self.trials.sequences:
                    break
        finally:
            weight.copy_(old)
        before, after, count = sum_over_ranks(sums).tolist()
        if not count:
            raise InputError("fresh", "no batch", "must give batches to try a head on")
        if self.trials.passes(before / count, after / count):
            weight.copy_(new)
        return before / count, after / count

    # --- state ------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The large part of the state."""
        return {"losses": self.losses, **{f"criterion.{name}": t for name, t in self.criterion.tensors().items()}}

    def values(self) -> dict[str, Any]:
        """The rest of the state, plain values for JSON; `load` goes on from both exactly."""
        return {
            "rule": asdict(self.policy), "done": self.done, "ages": self.ages.to_dict(),
            "criterion": self.criterion.values(),
        }  # fmt: skip

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from a state, with a model that has the structure that belongs to it."""
        check_rule(asdict(self.policy), values["rule"])
        ages = PruningState.from_dict(values["ages"])
        heads = tuple(len(layer) for layer in ages.heads)
        if heads != self.model.plan.heads:
            raise InputError("model.plan.heads", self.model.plan.heads, f"must be {heads}, as in the state")
        missing = [name for name in self.names if name not in tensors]
        if missing:
            raise InputError("tensors", f"{', '.join(missing)} missing", "must be all that `tensors` gave")
        self.criterion.load(with_prefix(tensors, "criterion."), values["criterion"])
        self.losses = tensors["losses"].to(self.losses, copy=True)
        self.done, self.ages = values["done"], ages


def check_growable(plan: Plan) -> None:
    """Refuse, by name, a plan whose layers cannot be given heads."""
    if plan.is_looped:
        raise InputError("plan", plan.digest[:12], "has loops; heads come and go in layers that run once")
    for layer in plan.layers:
        with_head(layer)


def check_held(optimizer: torch.optim.Optimizer | None, name: str, *parameters: Tensor) -> None:
    """Refuse an optimizer that would not train these parameters; None trains nothing, and is for the caller to know."""
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held.issuperset(map(id, parameters)):
        raise InputError("optimizer", f"{name} missing", "must hold all parameters of the model")
