"""The engine: what it asks of policies and gauges, and what it makes of two that want the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.gauges.gauge import Gauge, Instrument
from meristem.gauges.probe import Probe
from meristem.growth import AddBlock, AddHead, Change, Decision, Grower, LoopHeads, Policy, RemoveBlock, prepared
from meristem.growth.events import GrowthEvent, Measurement, event_from_dict
from meristem.growth.grower import ROUNDS
from meristem.growth.head_surgery import newborn_head
from meristem.growth.policy import Readings
from meristem.model import Decoder
from meristem.model.growable import Growable
from meristem.moves import Moves
from meristem.plan import Plan
from meristem.runs.own_loop import restore, save
from meristem.training.train import train

from .helpers import tiny_plan, tokens_of


@dataclass(frozen=True)
class Count:
    """A gauge whose instrument says how often it has been read."""

    name: str = "count"

    def instrument(self, model: Growable) -> Counter:
        return Counter()


@dataclass
class Counter(Instrument):
    reads: int = 0
    fed: list[int] = field(default_factory=list)
    followed: list[Moves] = field(default_factory=list)

    def feed(self, probe: Probe) -> None:
        self.fed.append(len(probe.tokens))

    def read(self, probe: Probe) -> int:
        self.reads += 1
        return self.reads

    def follow(self, moves: Moves, plan: Plan) -> None:
        self.followed.append(moves)

    def state(self) -> dict[str, Any]:
        return {"reads": self.reads, "fed": self.fed}

    def load(self, state: dict[str, Any]) -> None:
        self.reads, self.fed = state["reads"], list(state["fed"])


@dataclass(frozen=True)
class Asks(Policy):
    """Notes what it is told of some gauges, in its state and as a measurement."""

    label: str
    gauges: tuple[Gauge, ...] = (Count(),)
    every: int = 1

    @property
    def title(self) -> str:
        return self.label

    @property
    def settings(self) -> dict[str, Any]:
        return {"every": self.every}

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return self.gauges if step % self.every == 0 else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        return Decision(state, measured={"read": [readings[gauge] for gauge in self.gauges]})


@dataclass(frozen=True)
class Births(Policy):
    """Gives a layer a head at some steps; the state is the births there have been, and how far a head has moved."""

    label: str
    steps: tuple[int, ...]
    layer: int = 0
    patient: bool = False  # tries again at the next step

    @property
    def title(self) -> str:
        return self.label

    def begin(self, plan: Plan) -> Any:
        return {"born": [], "told": 0}

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        due = [at for at in self.steps if at <= step] if self.patient else [at for at in self.steps if at == step]
        return () if len(due) > len(state["born"]) or (due and not self.patient) else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        head = newborn_head(plan.layers[self.layer], plan.width, None, seed=step)
        change = Change("birth", "it is time", (AddHead(self.layer, head),), self.layer, {"heads": [1]})
        return Decision({**state, "born": [*state["born"], step]}, (change,))

    def moved(self, state: Any, step: int, plan: Plan, moves: Moves) -> Any:
        return {**state, "told": state["told"] + 1}


def growing(*policies: Policy, instruments: Mapping[Gauge, Instrument] | None = None) -> Grower:
    model = Decoder(tiny_plan([2, 2]))
    return Grower(model, torch.optim.AdamW(model.parameters()), policies, instruments=instruments)


def tokens() -> Tensor:
    return tokens_of(tiny_plan([2, 2]), 0)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_a_gauge_is_read_once_a_step_however_many_ask() -> None:
    counter = Counter()
    grower = growing(*(Asks(name) for name in "abc"), Asks("rarely", every=3), instruments={Count(): counter})
    events = [event for _ in range(3) for event in grower.step(tokens()).events]
    assert counter.reads == 3
    assert [(event.step, event.policy, event.facts["read"]) for event in events] == [
        *((step, name, [step]) for step in (1, 2) for name in "abc"), *((3, name, [3]) for name in (*"abc", "rarely")),
    ]  # fmt: skip


def test_other_gauges_are_read_by_themselves_and_only_when_asked_for() -> None:
    one, two = Counter(), Counter()
    fakes: dict[Gauge, Instrument] = {Count("one"): one, Count("two"): two}
    grower = growing(Asks("a", (Count("one"),)), Asks("b", (Count("one"), Count("two")), every=2), instruments=fakes)
    for _ in range(5):
        grower.step(tokens())
    assert (one.reads, two.reads) == (5, 2)


def test_after_a_change_gauges_are_read_anew() -> None:
    """What was measured was of the structure before."""
    counter = Counter()
    grower = growing(Asks("before"), Births("births", (2,)), Asks("after"), instruments={Count(): counter})
    found = [
        (event.step, event.policy, event.facts["read"])
        for _ in range(2)
        for event in grower.step(tokens()).events
        if isinstance(event, Measurement)
    ]
    assert found == [(1, "before", [1]), (1, "after", [1]), (2, "before", [2]), (2, "after", [3])]


@dataclass(frozen=True)
class Curious(Policy):
    """Needs one gauge, then for as many rounds another one."""

    rounds: int = 1

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return (Count("0"),)

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        for number in range(self.rounds + 1):
            if Count(str(number)) not in readings:
                return Decision("never kept", needs=(Count(str(number)),))
        return Decision(state, measured={"known": [readings[Count(str(n))] for n in range(self.rounds + 1)]})


def test_a_policy_that_asks_for_more_is_given_it() -> None:
    fakes: dict[Gauge, Instrument] = {Count(str(number)): Counter() for number in range(4)}
    grower = growing(Curious(2), instruments=fakes)
    (event,) = grower.step(tokens()).events
    assert event.facts == {"known": [1, 1, 1]}
    assert grower.states["curious"] is None  # a decision that asks has no consequences
    assert [fake.reads for fake in fakes.values() if isinstance(fake, Counter)] == [1, 1, 1, 0]


def test_a_policy_that_never_decides_is_an_error() -> None:
    with pytest.raises(InputError, match=f"policy = 'curious': must decide after {ROUNDS} rounds of readings"):
        growing(Curious(ROUNDS)).step(tokens())


@dataclass(frozen=True)
class Feeds(Policy):
    """Feeds a gauge at every second step, and never decides."""

    name: ClassVar[str] = "feeds"

    @property
    def remembers(self) -> tuple[Gauge, ...]:
        return (Count(),)

    def feeding(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...]:
        return self.remembers if step % 2 == 0 else ()

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return None


@dataclass(frozen=True)
class FeedsToo(Feeds):
    name: ClassVar[str] = "too"


def test_a_gauge_with_a_memory_is_one_for_all_is_fed_once_and_told_what_moves() -> None:
    counter = Counter()
    grower = growing(Feeds(), FeedsToo(), Births("births", (3,), layer=1), instruments={Count(): counter})
    assert list(grower.instruments.values()) == [counter]
    for _ in range(5):
        grower.step(tokens())
    assert counter.fed == [2, 2]
    assert [dict(moves.heads) for moves in counter.followed] == [{1: (0, 1, None)}]


# --- two that want the same ------------------------------------------------------------------------------------------


def test_of_two_that_want_a_layer_the_first_changes_it_and_the_other_decides_again() -> None:
    grower = growing(Births("first", (2,)), Births("second", (2,), patient=True))
    growths = [grower.step(tokens()) for _ in range(4)]
    told = [
        (event.step, event.policy, event.action, event.layer)
        for growth in growths
        for event in growth.events
        if isinstance(event, GrowthEvent)
    ]
    assert told == [(2, "first", "birth", 0), (2, "second", "postponed", 0), (3, "second", "birth", 0)]
    postponed = growths[1].events[1].to_dict()
    assert postponed["rule"] == "first has just changed layer 0: to be decided again (it is time)"
    assert postponed["plan"] == growths[1].events[0].to_dict()["plan"]
    assert [len(growth.moves) for growth in growths] == [0, 1, 1, 0]
    assert grower.model.plan.heads == (4, 2)
    assert grower.states == {"first": {"born": [2], "told": 2}, "second": {"born": [3], "told": 2}}


def test_the_order_of_the_policies_says_who_is_first() -> None:
    grower = growing(Births("second", (2,), patient=True), Births("first", (2,)))
    growths = [grower.step(tokens()) for _ in range(3)]
    assert [event.to_dict()["action"] for growth in growths for event in growth.events] == ["birth", "postponed"]
    assert [event.policy for event in growths[1].events] == ["second", "first"]
    assert grower.model.plan.heads == (3, 2)


def test_other_layers_are_not_held_up() -> None:
    grower = growing(Births("first", (2,), layer=0), Births("second", (2,), layer=1))
    growths = [grower.step(tokens()) for _ in range(2)]
    assert [event.to_dict()["action"] for event in growths[1].events] == ["birth", "birth"]
    assert grower.model.plan.heads == (3, 3)


@dataclass(frozen=True)
class LoopsOnce(Policy):
    """Loops a head of a layer at its second step."""

    layer: int = 0

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return () if step >= 2 and not plan.loops else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        return Decision(state, (Change("add", "so", (LoopHeads(self.layer, (1,), 1),), self.layer),))


def test_a_change_that_moves_nothing_counts_as_one_too() -> None:
    grower = growing(LoopsOnce(), Births("births", (2,), patient=True))
    growths = [grower.step(tokens()) for _ in range(3)]
    assert [(event.policy, event.to_dict()["action"]) for growth in growths for event in growth.events] == [
        ("loopsonce", "add"), ("births", "postponed"), ("births", "birth"),
    ]  # fmt: skip
    assert [(growth.changed, growth.exchanged) for growth in growths] == [(False, False), (True, False), (True, True)]
    assert grower.states["births"]["told"] == 1  # of its own birth: a loop moves nothing


@dataclass(frozen=True)
class Rebuilds(Policy):
    """Takes out the first block, and gives the one that takes its place a head: two changes that name no layer."""

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return () if step >= 2 and len(plan.layers) == 2 else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        head = newborn_head(plan.layers[1], plan.width, None, seed=step)
        changes = (Change("out", "so", (RemoveBlock(0),)), Change("in", "so too", (AddHead(0, head),)))
        return Decision(state, changes)


@pytest.mark.parametrize("layer", [0, 1])
def test_what_a_change_touches_is_seen_in_its_edits_not_in_what_it_says(layer: int) -> None:
    """By the numbers that layers had before the decision."""
    grower = growing(Births("births", (2,), layer), Rebuilds())
    growths = [grower.step(tokens()) for _ in range(3)]
    assert [(event.policy, event.to_dict()["action"], event.to_dict()["layer"]) for event in growths[1].events] == [
        ("births", "birth", layer), ("rebuilds", "postponed", layer),
    ]  # fmt: skip
    assert [event.to_dict()["action"] for event in growths[2].events] == ["out", "in"]
    assert grower.model.plan.heads == ((3,) if layer == 0 else (4,))


# --- refusals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoPolicy:
    title: str = "no policy"


@pytest.mark.parametrize("given", [NoPolicy(), "sgt", 3, Births])
def test_what_is_no_policy_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match=r"policies = .*: must be policies: objects whose class derives from"):
        growing(given)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="policies = 'feeds': must have different names"):
        growing(Feeds(), Feeds())


def test_a_single_policy_is_not_a_list() -> None:
    model: Any = Decoder(tiny_plan([2, 2]))
    single: Any = Feeds()
    with pytest.raises(InputError, match="policies = 'feeds': must be in a list of policies, if only one"):
        Grower(model, None, single)


def test_a_policy_has_the_name_of_its_class_unless_it_has_another() -> None:
    assert list(growing(Curious(), FeedsToo()).policies) == ["curious", "too"]


# --- state -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drift(Policy):
    """A policy of somebody else: adds up tokens in a tensor, and keeps the dates of decisions."""

    name: ClassVar[str] = "drift"
    rate: float = 0.5

    def begin(self, plan: Plan) -> Any:
        return {"sum": torch.zeros(plan.width), "dates": (), "count": 0}

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return (Count(),)

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        new = self.rate * state["sum"] + torch.arange(plan.width) * readings[Count()]
        state = {"sum": new, "dates": (*state["dates"], step), "count": state["count"] + 1}
        return Decision(state, measured={"sum": float(new.sum())})

    def load(self, data: Any) -> Any:
        return {**data, "dates": tuple(data["dates"])}


def test_a_users_policy_goes_on_from_a_state_with_a_tensor() -> None:
    grower = growing(Drift(), Births("births", (2, 4)), instruments={Count(): Counter()})
    for _ in range(3):
        grower.step(tokens())
    values, tensors = json.loads(json.dumps(grower.state_dict())), grower.tensors()
    assert list(tensors) == ["policies.drift.state.sum"]
    assert values["policies"]["drift"] == {
        "settings": {"rate": 0.5},
        "state": {"sum": {"tensor": "policies.drift.state.sum"}, "dates": [1, 2, 3], "count": 3},
    }
    model = Decoder(grower.model.plan, seed=3)
    again = Grower(model, None, [Drift(), Births("births", (2, 4))], instruments={Count(): Counter(reads=3)})
    again.load_state_dict(values, {name: tensor.clone() for name, tensor in tensors.items()})
    assert again.done == 3
    assert again.states["drift"]["dates"] == (1, 2, 3)
    assert torch.equal(again.states["drift"]["sum"], grower.states["drift"]["sum"])
    whole, resumed = ([event.to_dict() for event in one.step(tokens()).events] for one in (grower, again))
    assert resumed == whole
    assert [event["event"] for event in whole] == ["measured", "growth"]
    assert json.dumps(again.state_dict()) == json.dumps(grower.state_dict())
    other = Grower(Decoder(grower.model.plan), None, [Drift(rate=0.25), Births("births", (2, 4))])
    with pytest.raises(InputError, match=r"drift\.rate = 0\.25: must be 0\.5, as in the state"):
        other.load_state_dict(values, tensors)


@dataclass(frozen=True)
class Place:
    """A state that is no plain value."""

    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Forgets(Policy):
    """Says how its state is written, but not how it is read."""

    def begin(self, plan: Plan) -> Any:
        return Place((1,))

    def needs(self, state: Any, step: int, plan: Plan) -> None:
        return None


@dataclass(frozen=True)
class Fails(Forgets):
    def load(self, data: Any) -> Place:
        return Place(data["stages"])


@dataclass(frozen=True)
class Opaque(Forgets):
    def dump(self, state: Any) -> Any:
        return {1, 2}


@dataclass(frozen=True)
class Keyed(Forgets):
    """JSON knows names only."""

    def begin(self, plan: Plan) -> Any:
        return {10: 1}


@dataclass(frozen=True)
class Right(Forgets):
    def load(self, data: Any) -> Place:
        return Place(tuple(data["steps"]))


@dataclass(frozen=True)
class Callable(Right):
    call: Any = print


@dataclass(frozen=True)
class Becomes(Forgets):
    """A state that is plain at first."""

    def begin(self, plan: Plan) -> Any:
        return None

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:  # type: ignore[override]
        return ()

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        return Decision((step,))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Forgets(), r"forgets.load = .*must be the inverse of `dump` and give Place\(steps=\(1,\)\), but gives \{"),
        (Fails(), r"fails.load = .*must be the inverse of `dump`: KeyError\('stages'\)"),
        (Keyed(), r"keyed.load = .*must be the inverse of `dump`"),
        (Callable(), r"callable.call = .*must be a plain value, as it is saved"),
        (Opaque(), r"opaque.dump = .*must give what JSON can hold"),
    ],
)
def test_a_state_that_would_not_come_back_is_refused_before_the_first_step(policy: Policy, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        growing(policy)
    growing(Right())


def test_a_state_that_would_not_come_back_is_not_saved() -> None:
    grower = growing(Becomes())
    grower.step(tokens())
    with pytest.raises(InputError, match=r"becomes.load = .*give \(1,\), but gives \[1\]"):
        grower.state_dict()


@dataclass(frozen=True)
class Tells(Policy):
    """Decides something that cannot be."""

    decision: str = ""

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...]:
        return ()

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        head = AddHead(0, newborn_head(plan.layers[0], plan.width, None, seed=step))
        change = Change("birth", "so", (head,), 0, {"x": torch.ones(2)} if self.decision == "facts" else {})
        return {
            "facts": Decision(state, (change,)),
            "measured": Decision(state, (change,), measured={"x": torch.ones(2)}),
            "observed": Decision(state, (change,), observed={"x": torch.ones(2)}),
            "step": Decision(state, (change,), observed={"step": 3}),
            "quiet": Decision(state, quiet=(head,)),
        }[self.decision]


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        *((place, r"tells\.facts\.x = .*must be plain values") for place in ("facts", "measured", "observed")),
        ("step", r"tells\.facts\.step = 3: must have another name"),
        ("quiet", r"tells\.quiet = 'AddHead': changes the structure: it must be in a Change"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused_before_anything_changes(decision: str, expected: str) -> None:
    grower = growing(Tells(decision))
    with pytest.raises(InputError, match=expected):
        grower.step(tokens())
    assert grower.model.plan.heads == (2, 2)


@dataclass(frozen=True)
class Watches(Policy):
    """Records something at every step."""

    key: str

    @property
    def title(self) -> str:
        return f"watches {self.key}"

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...]:
        return ()

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        return Decision(state, observed={self.key: step})


def test_what_several_policies_observe_is_one_record() -> None:
    assert growing(Watches("a"), Watches("b")).step(tokens()).observation == {"a": 1, "b": 1}

    @dataclass(frozen=True)
    class Too(Watches):
        name = "too"
        title = "too"

    with pytest.raises(InputError, match=r"too\.observed\.a = 'a': must have another name"):
        growing(Watches("a"), Too("a")).step(tokens())


@dataclass(frozen=True)
class Twice(Policy):
    """Wants a block, and then a head."""

    def begin(self, plan: Plan) -> int:
        return 0

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return () if step == 2 else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        head = AddHead(0, newborn_head(plan.layers[0], plan.width, None, seed=step))
        return Decision(1, (Change("block", "so", (AddBlock(2),)), Change("birth", "so", (head,), 0)))


def test_an_optimizer_that_cannot_follow_a_later_edit_is_refused_before_the_first() -> None:
    model = Decoder(tiny_plan([2, 2]))
    optimizer = torch.optim.Adafactor(model.parameters())
    grower = Grower(model, optimizer, [Twice()])
    loss = model(tokens(), targets=tokens()).loss
    assert loss is not None
    loss.backward()
    optimizer.step()
    grower.step(tokens())
    with pytest.raises(InputError, match="which cannot follow heads that come and go"):
        grower.step(tokens())
    assert len(model.plan.layers) == 2
    assert grower.states == {"twice": 0}


def test_an_event_says_what_moved_in_all() -> None:
    """Two edits as one: the first layer's head is born, then the layer is copied."""
    grower = growing(Twice())
    events = [event for _ in range(2) for event in grower.step(tokens()).events]
    assert [event.to_dict()["moves"] for event in events] == [{"layers": [0, 1, None]}, {"heads": {"0": [0, 1, None]}}]
    assert event_from_dict(json.loads(json.dumps(events[0].to_dict()))) == events[0]


grower_of: Any = Grower
prepared_of: Any = prepared
save_of: Any = save
restore_of: Any = restore
train_of: Any = train


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda m: grower_of(torch.nn.Linear(2, 2)), "model = 'Linear': must be a Meristem model"),
        (lambda m: grower_of(m, [Asks("a")]), "optimizer = 'list': must be an optimizer of torch, or None"),
        (lambda m: grower_of(m, None, None), "policies = None: must be a list of policies"),
        (lambda m: grower_of(m, None, [Asks("a")]).step(tokens()[0]), r"tokens = \(\d+,\): must be \(B, T\)"),
        (lambda m: grower_of(m, None, [Asks("a")]).step([1, 2]), r"tokens = 'list': must be \(B, T\)"),
        (lambda m: prepared_of(m.plan, ["sgt"]), "policies = 'sgt': must be policies"),
        (lambda m: prepared_of(m.plan, Asks("a")), "policies = .*must be in a list"),
        (lambda m: prepared_of("plan", []), "plan = 'str': must be a Plan"),
        (lambda m: save_of("x", torch.nn.Linear(2, 2), None, step=1), "model = 'Linear': must be a Meristem model"),
        (lambda m: save_of("x", m, None, step="1"), "step = '1': must be an integer"),
        (lambda m: train_of("config.toml", "x"), r"config = 'config\.toml': must be a Config"),
        (lambda m: restore_of("x", torch.nn.Linear(2, 2), None), "model = 'Linear': must be a Meristem model"),
    ],
)
def test_what_cannot_be_at_the_edges_is_a_sentence(call: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        call(Decoder(tiny_plan([2, 2])))


def test_a_fake_with_a_memory_has_its_state_saved_as_the_gauge_would() -> None:
    grower = growing(Feeds(), instruments={Count(): Counter(reads=7)})
    for _ in range(4):
        grower.step(tokens())
    state = json.loads(json.dumps(grower.state_dict()))
    assert state["gauges"] == {"Count(name='count')": {"reads": 7, "fed": [2, 2]}}
    again = growing(Feeds(), instruments={Count(): (fresh := Counter())})
    again.load_state_dict(state)
    assert (fresh.reads, fresh.fed) == (7, [2, 2])
