"""The engine: any number of policies on one model, with one clock.

At every step it asks the policies what they need, measures each gauge once however many ask for it, lets the policies
decide in their order, applies their edits, tells everybody what moved, and returns what happened. It knows no policy
and no gauge by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meristem.errors import InputError, shown
from meristem.gauges.gauge import Gauge, Instrument
from meristem.gauges.probe import Fresh, HeldBack, Probe
from meristem.growth.apply import adopt, apply_edit, check_can_follow, check_held, tensors_of
from meristem.growth.events import Event, GrowthEvent, Measurement, check_facts
from meristem.growth.policy import Ahead, Change, Decision, Policy
from meristem.growth.state import joined, separated
from meristem.model.growable import Growable
from meristem.model.inputs import check_model, check_plan
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.ranks import require_equal

VERSION = 1  # of the state
ROUNDS = 8  # times that a policy may ask for more at one step


@dataclass(frozen=True)
class Growth:
    """What a step brought: events, whether the structure changed, and what is recorded regularly.

    Where parameters were `exchanged` the model has others now: an optimizer that the grower knows has them already,
    but whoever else holds on to them, such as a wrapper for several processes, must be made anew. `moves` say, change
    by change, which layers and heads went where.

    >>> growth = Grower(model, optimizer, [Observe(every=1)]).step(tokens)
    >>> growth.changed, growth.events
    (False, [])
    """

    events: list[Event] = field(default_factory=list)
    changed: bool = False
    exchanged: bool = False
    observation: Mapping[str, Any] | None = None
    moves: list[Moves] = field(default_factory=list)


def prepared(plan: Plan, policies: Sequence[Policy]) -> Plan:
    """The plan with what the policies must find in it before training; the model is built from this one.

    >>> prepared(plan, [Incrt(start_heads=1), Sgt(total_steps=5000)]).heads
    (1, 1)
    """
    check_plan(plan)
    for policy in _named(policies).values():
        plan = policy.prepare(plan)
    return plan


class Grower:
    """Grows `model` while it trains: call `step` after every update of the optimizer.

    The model is built from `prepared(plan, policies)`. The optimizer is given what takes the place of parameters, with
    its moments; without one that is left to the caller, or what is born never learns. Under torch.distributed the
    processes measure together, all decide from the same numbers, and they compare their plans. `instruments` stand in
    for those that the gauges would make, as tests want.

    >>> policies = [Sgt(total_steps=10, start=1, window=1)]
    >>> model = Decoder(prepared(plan, policies))
    >>> grower = Grower(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policies)
    >>> growth = grower.step(tokens, targets)  # after every update
    >>> growth.changed, model.plan.loops
    (True, {1: Loop(heads=(0, 2), passes=1, fading=())})
    """

    def __init__(
        self,
        model: Growable,
        optimizer: torch.optim.Optimizer | None = None,
        policies: Sequence[Policy] = (),
        *,
        instruments: Mapping[Gauge, Instrument] | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        self.policies = _named(policies)
        self._acting = dict(self.policies)  # with the length that the run turns out to have
        for policy in self.policies.values():
            policy.check(model.plan)
        self.attach(optimizer)
        self.states = {name: policy.begin(model.plan) for name, policy in self.policies.items()}
        self._fakes = dict(instruments or {})
        gauges = dict.fromkeys(gauge for policy in self.policies.values() for gauge in policy.remembers)
        self.instruments = {gauge: self._instrument(gauge) for gauge in gauges}  # those with a memory
        self.done = 0
        self.whole: Callable[[], AbstractContextManager[None]] = nullcontext  # in which the model has whole weights
        self._tree()  # refuses states and settings that would not come back from a file

    def lasts(self, ahead: Ahead) -> None:
        """The length of the run has changed: what policies do after a part of it they do when that part is spent.

        A state is bound to the policies as they were made, so a grower that goes on from one is told again.

        >>> grower = Grower(model, optimizer, [Incrt(total_steps=1000, last_birth=0.7)])
        >>> grower.lasts(Ahead(done=100, spent=500, each=10, budget=1000))
        """
        self._acting = {name: policy.lasting(ahead) for name, policy in self.policies.items()}

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Let an optimizer follow from now on, where it is made after the grower.

        >>> grower = Grower(model, policies=[Observe(every=1)])
        >>> grower.attach(torch.optim.AdamW(model.parameters(), lr=1e-3))
        """
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError("optimizer", type(optimizer).__name__, "must be an optimizer of torch, or None")
        _check_optimizer(self.model, optimizer)
        self.optimizer = optimizer

    def step(
        self, tokens: Tensor, targets: Tensor | None = None, fresh: Fresh | None = None,
        held_back: HeldBack | None = None, loss: Tensor | None = None,
    ) -> Growth:  # fmt: skip
        """Measure and grow, when either is due, after an update on tokens (B, T), this process's share of the batch.

        Targets are (B, T), or (B,) of a classifier; `Incrt` and `Prune` need them, `Sgt` does not. `fresh()` gives
        batches (tokens, targets) that are not trained on yet, for trials without a head; without it, these are made on
        the present batch. Where training comes back to its rows nothing stays fresh: then some are `held_back`. `loss`
        is that of the update; without it, a policy that asks for it has it computed again.

        >>> grower = Grower(model, optimizer, [Observe(every=2)])
        >>> [grower.step(tokens).observation is not None for _ in range(4)]
        [False, True, False, True]
        """
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InputError("tokens", shape, "must be (B, T), one sequence in each row")
        self.done += 1
        decided = False
        with ExitStack() as ending:
            probe = Probe(self.model, tokens, targets, fresh, held_back, loss)
            growth = _Step(self.done, lambda: ending.enter_context(self.whole()))
            for gauge in dict.fromkeys(gauge for name in self.policies for gauge in self._feeding(name)):
                if self.instruments[gauge].looks:
                    growth.look()
                self.instruments[gauge].feed(probe)
            for name, policy in self._acting.items():
                needs = policy.needs(self.states[name], self.done, self.model.plan)
                if needs is not None:
                    self._follow(name, self._decided(name, needs, probe, growth), probe, growth)
                    decided = True
        if decided:  # whatever came of it: a process in which nothing changed has to be asked as well
            require_equal(self.model.plan.digest, "plan")
        return growth.result()

    # --- measuring and deciding -------------------------------------------------------------------------------------

    def _feeding(self, name: str) -> tuple[Gauge, ...]:
        return self._acting[name].feeding(self.states[name], self.done, self.model.plan)

    def _instrument(self, gauge: Gauge) -> Instrument:
        return self._fakes[gauge] if gauge in self._fakes else gauge.instrument(self.model)

    def _read(self, gauge: Gauge, probe: Probe) -> Any:
        return (self.instruments.get(gauge) or self._instrument(gauge)).read(probe)

    def _decided(self, name: str, needs: Sequence[Gauge], probe: Probe, growth: _Step) -> Decision:
        """A policy's decision from what it needs, and from what it finds out that it needs besides."""
        policy, state, plan = self._acting[name], self.states[name], self.model.plan
        asked: dict[Gauge, None] = {}
        for _ in range(ROUNDS):
            if needs:
                growth.look()
            growth.readings |= {gauge: self._read(gauge, probe) for gauge in needs if gauge not in growth.readings}
            asked |= dict.fromkeys(needs)
            decision = policy.decide(state, self.done, plan, {gauge: growth.readings[gauge] for gauge in asked})
            if not isinstance(decision, Decision):
                raise InputError(f"{name}.decide", decision, "must return a Decision")
            if not decision.needs:
                return decision
            needs = decision.needs
        raise InputError("policy", name, f"must decide after {ROUNDS} rounds of readings")

    # --- changing ---------------------------------------------------------------------------------------------------

    def _follow(self, name: str, decision: Decision, probe: Probe, growth: _Step) -> None:
        """Carry out a decision, unless another policy has just changed the same layer: then it decides again later."""
        conflict = self._conflict(decision.changes, growth)
        if conflict is not None:
            growth.events.append(GrowthEvent(self.done, name, "postponed", *conflict, {}, self._digest))
            return
        told = self._told(name, decision, growth)
        self.states[name] = decision.state
        for change, event in zip(decision.changes, told, strict=True):
            moves = self._change(name, change, probe, growth)
            growth.events.append(replace(event, plan=self._digest, moves={} if moves is None else moves.to_dict()))
        for edit in decision.quiet:
            apply_edit(self.model, self.optimizer, edit)
        if decision.measured is not None:
            growth.events.append(Measurement(self.done, name, decision.measured, self._digest))
        if decision.observed is not None:
            growth.observation = {**(growth.observation or {}), **decision.observed}

    def _told(self, name: str, decision: Decision, growth: _Step) -> list[GrowthEvent]:
        """The events of a decision; what cannot be told, or would change the structure without a word, is refused."""
        for facts in (decision.measured, decision.observed):
            check_facts(name, facts or {})
        for key in (decision.observed or {}).keys() & (growth.observation or {}).keys():
            raise InputError(f"{name}.observed.{key}", key, "must have another name: another policy records it too")
        for edit in decision.quiet:
            if edit.apply(self.model.plan) != self.model.plan:
                raise InputError(f"{name}.quiet", type(edit).__name__, "changes the structure: it must be in a Change")
        return [GrowthEvent(self.done, name, c.action, c.rule, c.layer, c.facts) for c in decision.changes]

    def _conflict(self, changes: Sequence[Change], growth: _Step) -> tuple[str, int] | None:
        """Why changes have to wait, and the layer that another policy has just changed; what cannot be is refused."""
        plan = self.model.plan
        places: tuple[int | None, ...] = tuple(range(len(plan.layers)))  # numbers of layers before the decision
        for change in changes:
            for edit in change.edits:
                after, moves = edit.apply(plan), edit.moves(plan)
                if moves.heads:
                    check_can_follow(self.model, self.optimizer)
                touched = {places[old] for old in _changed(plan, after, moves)}
                for layer, other in growth.changed.items():
                    if layer in touched:
                        return f"{other} has just changed layer {layer}: to be decided again ({change.rule})", layer
                plan, places = after, tuple(None if old is None else places[old] for old in moves.layers)
        return None

    def _change(self, name: str, change: Change, probe: Probe, growth: _Step) -> Moves | None:
        """Carry out the edits of a change, and say what moved where in all."""
        whole: Moves | None = None
        for edit in change.edits:
            growth.look()
            before = self.model.plan
            moves = apply_edit(self.model, self.optimizer, edit)
            whole = moves if whole is None else whole.then(moves)
            growth.moved(name, before, self.model.plan, moves)
            if not moves.stays:
                for instrument in self.instruments.values():
                    instrument.follow(moves, self.model.plan)
                for other, policy in self._acting.items():
                    self.states[other] = policy.moved(self.states[other], self.done, self.model.plan, moves)
        if change.edits:  # what was seen is of the structure before
            probe.forget()
            growth.readings.clear()
        return whole

    @property
    def _digest(self) -> str:
        return self.model.plan.digest

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values for JSON, from which `load_state_dict` goes on exactly; the large part is in `tensors`."""
        return separated(self._tree())[0]

    def tensors(self) -> dict[str, Tensor]:
        """The part of the state that is too large for JSON."""
        return separated(self._tree())[1]

    def _tree(self) -> dict[str, Any]:
        policies = {
            name: {"settings": _plain_settings(policy), "state": _dumped(name, policy, self.states[name])}
            for name, policy in self.policies.items()
        }
        gauges = {repr(gauge): instrument.state() for gauge, instrument in self.instruments.items()}
        plan = self.model.plan.to_dict()
        return {"version": VERSION, "done": self.done, "plan": plan, "policies": policies, "gauges": gauges}

    def load_state_dict(self, data: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Go on from a state. The model is given the loops that belong to it; it must have the heads already.

        >>> grower = Grower(model, optimizer, [Observe(every=2)])
        >>> growth = grower.step(tokens)
        >>> other = Grower(model, optimizer, [Observe(every=2)])
        >>> other.load_state_dict(grower.state_dict(), grower.tensors())
        >>> other.done
        1
        """
        tree = joined(data, tensors or {})
        for name in ("version", "done", "plan", "policies", "gauges"):
            if tree.get(name) is None:
                raise InputError(f"state.{name}", None, "is missing: this is no state of a grower")
        if tree["version"] != VERSION:
            raise InputError("state.version", tree["version"], f"must be {VERSION}")
        if list(tree["policies"]) != list(self.policies):
            raise InputError("policies", list(self.policies), f"must be {list(tree['policies'])}, as in the state")
        states, plan = {}, Plan.from_dict(tree["plan"])
        for name, policy in self.policies.items():
            saved = tree["policies"][name]
            _check_settings(name, policy.settings, saved["settings"])
            states[name] = policy.load(saved["state"])
            if not policy.fits(states[name], plan):
                raise InputError(f"state.policies.{name}", saved["state"], f"must be of a model of heads {plan.heads}")
        for gauge in self.instruments:
            if repr(gauge) not in tree["gauges"]:
                raise InputError("state.gauges", list(tree["gauges"]), f"must have {gauge!r}")
        self._take(plan)
        self.states, self.done = states, tree["done"]
        for gauge in self.instruments:  # made anew, for the structure that the state belongs to
            self.instruments[gauge] = self._instrument(gauge)
            self.instruments[gauge].load(tree["gauges"][repr(gauge)])

    def _take(self, plan: Plan) -> None:
        """Give the model the plan of a state, whose weights it must have."""
        if self.model.plan.heads != plan.heads:
            raise InputError("model.plan.heads", self.model.plan.heads, f"must be {plan.heads}, as in the state")
        adopt(self.model, self.optimizer, plan, tensors_of(self.model), {}, Moves.none(len(plan.layers)))


class _Step:
    """What has happened at a step so far."""

    def __init__(self, step: int, look: Callable[[], None]) -> None:
        self.step, self._look, self._looked = step, look, False
        self.readings: dict[Gauge, Any] = {}
        self.events: list[Event] = []
        self.moves: list[Moves] = []
        self.changed: dict[int, str] = {}  # layers, by their present numbers, and who has changed them
        self.observation: Mapping[str, Any] | None = None

    def look(self) -> None:
        """Weights are about to be looked at, or changed."""
        if not self._looked:
            self._look()
            self._looked = True

    def moved(self, policy: str, before: Plan, after: Plan, moves: Moves) -> None:
        """A policy has changed the structure."""
        touched = _changed(before, after, moves)
        earlier = {new: self.changed[old] for new, old in enumerate(moves.layers) if old in self.changed}
        own = (new for new, old in enumerate(moves.layers) if old is None or old in touched)
        self.changed = earlier | dict.fromkeys(own, policy)
        self.moves.append(moves)

    def result(self) -> Growth:
        exchanged = any(not moves.stays for moves in self.moves)
        return Growth(self.events, bool(self.moves), exchanged, self.observation, self.moves)


def _changed(before: Plan, after: Plan, moves: Moves) -> set[int]:
    """The layers, by their numbers before, that a change of structure has altered or taken out."""
    same = {old for new, old in enumerate(moves.layers) if old is not None and before.layers[old] == after.layers[new]}
    return set(range(len(before.layers))) - same


def _named(policies: Sequence[Policy]) -> dict[str, Policy]:
    """The policies by their names, in order."""
    if isinstance(policies, Policy):
        raise InputError("policies", policies.title, "must be in a list of policies, if only one")
    if not isinstance(policies, Iterable):
        raise InputError("policies", policies, "must be a list of policies")
    named: dict[str, Policy] = {}
    for policy in policies:
        if not isinstance(policy, Policy):
            raise InputError("policies", policy, "must be policies: objects whose class derives from meristem.Policy")
        if not is_dataclass(type(policy)):
            raise InputError("policies", policy.title, "must be a dataclass, whose fields are its settings")
        if policy.title in named:
            raise InputError("policies", policy.title, "must have different names")
        named[policy.title] = policy
    return named


def _check_optimizer(model: Growable, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer that would not train what grows."""
    gates = getattr(model, "gate_delta", None)
    if gates is not None:
        check_held(optimizer, "gate_delta", gates)
    for layer, block in enumerate(model.stack):
        check_held(optimizer, f"attention of layer {layer}", *block.attention.parameters())


def _plain_settings(policy: Policy) -> dict[str, Any]:
    """What a state is bound to; settings that JSON cannot hold are refused by name."""
    for key, value in policy.settings.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{policy.title}.{key}", value, f"must be a plain value, as it is saved: {error}"
            ) from None
    return policy.settings


def _dumped(name: str, policy: Policy, state: Any) -> Any:
    """A policy's state as it is saved; one that would not come back as it was is refused."""
    dumped = policy.dump(state)
    plain, tensors = separated(dumped)
    try:
        text = json.dumps(plain)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}.dump", plain, f"must give what JSON can hold, and tensors: {error}") from None
    try:
        loaded = policy.load(joined(json.loads(text), tensors))
    except Exception as error:  # whatever somebody's own `load` does
        raise InputError(f"{name}.load", plain, f"must be the inverse of `dump`: {error!r}") from error
    if not _same(loaded, state):
        expected = f"must be the inverse of `dump` and give {shown(state)}, but gives {shown(loaded)}"
        raise InputError(f"{name}.load", plain, expected)
    return dumped


def _same(one: Any, other: Any) -> bool:
    """Whether two values are alike in types and content, tensors in shape and type alone; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype
    if is_dataclass(one):
        return all(_same(getattr(one, entry.name), getattr(other, entry.name)) for entry in fields(one))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


def _check_settings(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse to go on from a state that a policy with other settings left."""
    mine = json.loads(json.dumps(mine))
    for key, value in mine.items():
        if key in theirs and value != theirs[key]:
            raise InputError(f"{name}.{key}", value, f"must be {theirs[key]!r}, as in the state")
