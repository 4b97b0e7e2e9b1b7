"""The grower ties a policy to a model: it measures, asks, edits, and says what it did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.gauges.entropy import EntropyGauge, HeadReadings, as_decoder, read_heads
from meristem.growth.criteria import Policy
from meristem.growth.edits import LoopHeads
from meristem.growth.ema import Ema
from meristem.growth.head_growth import Fresh, HeadGrowth, check_held
from meristem.growth.outcome import Growth, check_rule
from meristem.growth.policies.sgt import Sgt, SgtState
from meristem.model import Transformer
from meristem.ranks import from_first_rank, mean_over_ranks, require_equal, some_of, sum_over_ranks
from meristem.records import finite

PROBED_SEQUENCES = 8  # of the whole batch, over all processes, that a measurement looks at


class Grower:
    """Grows `model` while it trains: call `step` after every update of the optimizer.

    With `Sgt` loops are born; the model is built from `policy.prepare(plan)`. With `Incrt` (or `Published`, or
    `RandomBirths`, to compare with) heads are born and leave: the layers' projections are then exchanged in the model
    and in the optimizer (see `Growth.exchanged`); without one that is left to the caller, or what is born never
    learns. With `observe_every` the entropy of every head is reported every so many updates; without a policy that is
    all a grower does. Under torch.distributed the processes measure together, the first one decides, and all compare
    their plans.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: torch.optim.Optimizer | None = None,
        policy: Sgt | Policy | None = None,
        *,
        gauge: EntropyGauge = EntropyGauge(),  # noqa: B008  (immutable)
        observe_every: int = 0,
    ) -> None:
        self.heads = HeadGrowth(model, optimizer, policy) if isinstance(policy, Policy) else None
        policy = policy if isinstance(policy, Sgt) else None
        if policy is not None or observe_every > 0:
            as_decoder(model)
        if policy is not None and policy.prepare(model.plan).gates != model.plan.gates:
            raise InputError("model.plan.gates", model.plan.gates, "build the model from policy.prepare(plan)")
        if model.gate_delta is not None:
            check_held(optimizer, "gate_delta", model.gate_delta)
        self.model, self.policy, self.gauge, self.observe_every = model, policy, gauge, observe_every
        self.done = 0
        self.state = SgtState()
        self.average = Ema(0.0 if policy is None else policy.beta)

    def step(self, tokens: Tensor, targets: Tensor | None = None, fresh: Fresh | None = None) -> Growth:
        """Measure and grow, when either is due, after an update on tokens (B, T), this process's share of the batch.

        `Incrt` also needs the targets, and `fresh` batches, not trained on yet, to try a head's removal on; without,
        that is done on the present batch.
        """
        growth = self._loops(tokens)
        if self.heads is None:
            return growth
        if targets is None:
            raise InputError("targets", None, "are needed to measure what the task asks of attention")
        heads = self.heads.step(tokens, targets, fresh)
        changed, exchanged = growth.changed or heads.changed, heads.exchanged
        return Growth(growth.events + heads.events, changed, exchanged, growth.observation)

    def _loops(self, tokens: Tensor) -> Growth:
        self.done += 1
        policy, done = self.policy, self.done
        probes = policy is not None and policy.probes(self.state, done)
        observes = self.observe_every > 0 and done % self.observe_every == 0
        readings = self._measure(tokens) if probes or observes else None
        if readings is not None and probes:
            self.average.add(readings.entropy)
        observation = self._observation(readings) if observes and readings is not None else None
        if policy is None:
            return Growth(observation=observation)
        events: list[dict[str, Any]] = []
        if policy.decides(self.state, done):
            assert readings is not None
            events.append(self._decide(policy, readings))
        edits = self._apply(policy)
        events += [_faded(edit) for edit in edits if not any(event["layer"] == edit.layer for event in events)]
        if edits:
            require_equal(self.model.plan.digest, "plan")
        if policy.is_ramping(self.state, done):
            self._set_ramps(policy)
        return Growth(events, bool(edits), observation=observation)

    # --- measuring --------------------------------------------------------------------------------------------------

    def _measure(self, tokens: Tensor) -> HeadReadings:
        """Entropies averaged over the same few sequences of the batch however many processes share it."""
        chosen = tokens[some_of(len(tokens), PROBED_SEQUENCES)]
        readings = read_heads(self.model, chosen if len(chosen) else tokens[:1], self.gauge)
        entropy = readings.entropy if len(chosen) else torch.zeros_like(readings.entropy)
        total = sum_over_ranks(torch.cat((entropy, torch.full_like(entropy[:1], float(len(chosen))))))
        updates = {place: mean_over_ranks(update) for place, update in readings.updates.items()}
        return HeadReadings(total[:-1] / total[-1], updates)

    def _by_layer(self, entropy: Tensor) -> list[list[float]]:
        values = entropy.tolist()
        return [values[a:b] for a, b in pairwise(accumulate(self.model.plan.heads, initial=0))]

    def _observation(self, readings: HeadReadings) -> dict[str, Any]:
        return {"head_entropy": _recorded(self._by_layer(readings.entropy)), **self._loop_facts(readings)}

    def _loop_facts(self, readings: HeadReadings) -> dict[str, Any]:
        """Strength and relative size of every loop's update."""
        gates = self.model.gates
        loops = [
            {
                "layer": layer,
                "heads": list(loop.heads),
                "passes": loop.passes,
                "gates": None if gates is None else _recorded(gates[layer, : loop.passes, : len(loop.heads)].tolist()),
                "update": _recorded([[float(readings.updates[layer, n]) for n in range(1, loop.passes + 1)]])[0],
            }
            for layer, loop in self.model.plan.loops.items()
        ]
        return {"loops": loops} if loops else {}

    # --- growing ----------------------------------------------------------------------------------------------------

    def _decide(self, policy: Sgt, readings: HeadReadings) -> dict[str, Any]:
        entropies = self._by_layer(self.average.mean)
        before = self._loop_facts(readings)
        decision = from_first_rank(policy.decide(self.state, self.done, entropies))
        self.state, self.average = decision.state, Ema(policy.beta)
        grown = next((g for g in self.state.grown if g.layer == decision.layer), None)
        return {
            "event": "growth",
            "action": decision.action,
            "layer": decision.layer,
            "heads": None if grown is None else list(grown.heads),
            "passes": None if grown is None else len(grown.births),
            "birth": policy.birth,
            "rule": decision.rule,
            "shortlist": list(decision.shortlist),
            "layer_entropy": _recorded([[sum(layer) / len(layer) for layer in entropies]])[0],
            "head_entropy": _recorded(entropies),
            "next_decision": policy.next_decision(self.state),
            **before,
        }

    def _apply(self, policy: Sgt) -> list[LoopHeads]:
        plan = self.model.plan
        edits = policy.edits(plan, self.state, self.done)
        for edit in edits:
            plan = edit.apply(plan)
        if edits:
            self.model.restructure(plan)
        return edits

    @torch.no_grad()
    def _set_ramps(self, policy: Sgt) -> None:
        ramp = self.model.gate_ramp
        assert ramp is not None
        values = torch.zeros(ramp.shape)
        for layer, strengths in policy.ramps(self.model.plan, self.state, self.done).items():
            passes, heads = len(strengths), len(strengths[0])
            values[layer, :passes, :heads] = torch.tensor(strengths)
        ramp.copy_(values.pin_memory() if ramp.is_cuda else values, non_blocking=True)

    @property
    def _rule(self) -> dict[str, Any]:
        """The policy's settings as they come back from JSON."""
        return {} if self.policy is None else json.loads(json.dumps(asdict(self.policy)))

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values for JSON, from which `load_state_dict` goes on exactly."""
        average = self.average
        return {
            "done": self.done,
            "rule": self._rule,
            "policy": self.state.to_dict(),
            "average": {
                "value": None if average.value is None else average.value.tolist(),
                "count": average.count,
            },
            "heads": None if self.heads is None else self.heads.values(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """The part of the state that is too large for JSON."""
        return {} if self.heads is None else self.heads.tensors()

    def load_state_dict(self, data: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Go on from a state. The model is given the loops that belong to it; it must have the heads already."""
        for name in ("done", "rule", "policy", "average", *(("heads",) if self.heads is not None else ())):
            if data.get(name) is None:
                raise InputError(f"state.{name}", None, "is missing: this is no state of a grower like this one")
        if self.heads is not None:
            self.heads.load(tensors or {}, data["heads"])
        check_rule(self._rule, data["rule"])
        self.done, self.state = data["done"], SgtState.from_dict(data["policy"])
        value: Sequence[float] | None = data["average"]["value"]
        weight = self.model.embedding.weight
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        tensor = None if value is None else torch.tensor(value, dtype=wide, device=weight.device)
        self.average = Ema(self.average.beta, tensor, data["average"]["count"])
        if self.policy is not None:
            self.model.restructure(self.model.plan.bare)
            self._apply(self.policy)
            if self.state.grown:
                self._set_ramps(self.policy)


def _faded(edit: LoopHeads) -> dict[str, Any]:
    """The end of a published birth: the heads that were not chosen have left."""
    return {
        "event": "growth",
        "action": "fade",
        "layer": edit.layer,
        "heads": list(edit.heads),
        "passes": edit.passes,
        "rule": "a window has passed since the birth",
        "shortlist": [],
    }


def _recorded(layers: list[list[float]]) -> list[list[float | None]]:
    """Values for JSON, layer by layer."""
    return [[finite(value) for value in layer] for layer in layers]
