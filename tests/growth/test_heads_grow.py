"""Heads that are born and leave in a small model: what growth does with what it is shown."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.gauges.demand import Demand, DemandGauge, DemandInstrument, DemandReading
from meristem.gauges.energy import EnergyGauge, EnergyReading
from meristem.gauges.probe import Batches, Probe, Seen
from meristem.growth import Grower, Growth, Incrt, Policy, Prune, Published, RandomBirths
from meristem.growth.apply import apply_edit
from meristem.growth.births import birth
from meristem.growth.edits import AddHead
from meristem.growth.head_surgery import newborn_head
from meristem.model import Decoder
from meristem.plan import LayerPlan, Plan
from meristem.synthetic import KnownTask, Student

EAGER: dict[str, Any] = {
    "feed_every": 1, "decide_every": 1, "calibration": 2, "cool_down": 1, "warm_up": 1, "certainty": -math.inf,
    "share": 1e-9, "steady": -math.inf, "plateau": 1.0, "hits": 1, "feeds": 1,
}  # fmt: skip
EAGER_PRUNE: dict[str, Any] = {"decide_every": 1, "cool_down": 1, "patience": 1}
ASKING = DemandReading(certainty=9.0, slope=1.0, feeds=100)


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer always asks for heads."""
    monkeypatch.setattr(DemandGauge, "readings", lambda gauge, rows=0: [ASKING])


def grown(policies: list[Policy], steps: int, heads: int = 1) -> tuple[Student, Grower, list[dict[str, Any]]]:
    task, model = KnownTask(heads=2, width=16, length=6), Student(16, 6, 4, heads)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    growth, events = Grower(model, optimizer, policies), []
    for step in range(steps):
        tokens, targets = task.batch(16, step)
        optimizer.zero_grad()
        model.loss(tokens, targets).backward()
        optimizer.step()
        events += said(growth.step(tokens, targets))
    return model, growth, events


def said(growth: Growth) -> list[dict[str, Any]]:
    """Events as lines of a log."""
    return [event.to_dict() for event in growth.events]


def trials(**settings: Any) -> Prune:
    """Pruning that tries a head at every decision."""
    return Prune(**{**EAGER_PRUNE, "grace": 0, "redundant": 1.0, **settings})


def test_incrt_oracle_13_no_birth_changes_what_a_model_says() -> None:
    model, growth, _ = grown([Incrt(**EAGER, max_heads=6)], 2)
    tokens, _ = KnownTask(heads=2, width=16, length=6).batch(16, 99)
    for step in range(3, 12):
        before, heads = model(tokens), model.plan.heads[0]
        growth.step(*KnownTask(heads=2, width=16, length=6).batch(16, step))
        assert torch.equal(model(tokens), before)
        assert model.plan.heads[0] >= heads
    assert model.plan.heads[0] > 1


@pytest.mark.parametrize(
    ("heads", "dim", "width"),
    [(3, 64, 256), (4, 64, 256), (8, 32, 256), (5, 80, 160), (2, 96, 192), (3, 128, 384), (11, 64, 768)],
)
def test_incrt_oracle_13_a_birth_in_a_larger_layer_changes_no_bit_either(heads: int, dim: int, width: int) -> None:
    """Where a library would add the same terms in another order, had it the choice."""
    layers = (LayerPlan(heads, dim, heads),) * 2
    model, growth = growing(Plan(width=width, vocabulary=32, context=8, feed_forward=64, layers=layers), Incrt())
    demand = growth.instruments[Incrt().gauge].read(Probe(model, *text(9)))
    with torch.no_grad():
        before, loss = model(text(9)[0]).logits, model.loss(*text(9))
        for layer in (0, 1, 1):
            (edit,) = birth(model.plan, 0, layer, 0, ("", ""), {}, demand.directions[layer]).edits
            apply_edit(model, growth.optimizer, edit)
        assert model.plan.heads == (heads + 1, heads + 2)
        after = model(text(9)[0]).logits
        assert before is not None
        assert after is not None
        assert torch.equal(after, before)
        assert torch.equal(model.loss(*text(9)), loss)


def test_incrt_oracle_15_a_duplicate_leaves_and_the_others_stand_in_for_it() -> None:
    """In a living model, weights and moments: what it says stays, the head is gone."""
    task = KnownTask(heads=2, width=16, length=6)
    model = Student(16, 6, 4, heads=3)
    attention = model.stack[0].attention
    with torch.no_grad():  # the last head reads what the first one does, and writes something else
        for part in attention.qkv.weight.unflatten(0, (3, 3, 4)):
            part[2] = part[0]
    optimizer = torch.optim.Adam(model.parameters(), 1e-9)  # a step so that there are moments
    model.loss(*task.batch(16, 0)).backward()
    optimizer.step()
    never = Incrt(**{**EAGER, "share": 1.0, "certainty": 1e300})
    growth = Grower(model, optimizer, [never, trials(grace=3, redundant=1e-3)])
    before = model(task.batch(64, 5)[0]).detach()
    events = [event for step in range(1, 5) for event in said(growth.step(*task.batch(64, step)))]
    (removal,) = [event for event in events if event.get("action") == "removal"]
    assert removal["head"] in (0, 2)
    assert removal["loss_without"] == pytest.approx(removal["loss_with"], rel=1e-4)
    assert model.plan.heads == (2,)
    after = model(task.batch(64, 5)[0]).detach()
    assert float((after - before).norm() / before.norm()) < 1e-4
    for parameter in (attention.qkv.weight, attention.out.weight):
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_a_head_that_is_needed_is_spared() -> None:
    never = Incrt(**{**EAGER, "certainty": 1e300})
    model, _, events = grown([never, trials(grace=150, tolerance=0.0)], 160, heads=2)  # by then both are needed
    spared = [event for event in events if event.get("action") == "spare"]
    assert spared
    assert all(event["loss_without"] > event["loss_with"] for event in spared)
    assert model.plan.heads == (2,)


def on_trial(**settings: Any) -> tuple[Student, Grower]:
    """A student of two heads, of which its next step tries to do without one."""
    task, model = KnownTask(heads=2, width=16, length=6), Student(16, 6, 4, heads=2)
    growth = Grower(model, None, [trials(grace=3, **settings)])
    for step in range(2):
        assert not growth.step(*task.batch(16, step)).events
    return model, growth


def assert_unchanged(model: Student, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_a_trial_that_fails_leaves_no_trace_in_the_model() -> None:
    model, growth = on_trial()
    before = copy.deepcopy(model.state_dict())
    tokens, _ = KnownTask(heads=2, width=16, length=6).batch(16, 2)
    (event,) = said(growth.step(tokens, model(tokens).detach()))  # of which every head writes a part
    assert event["action"] == "spare"
    assert event["loss_with"] == 0 < event["loss_without"]
    assert_unchanged(model, before)


def test_a_trial_that_breaks_off_leaves_no_trace_in_the_model() -> None:
    """Also where the head would have gone: by then the others stand in for it."""
    task = KnownTask(heads=2, width=16, length=6)
    model, growth = on_trial(tolerance=1.0)
    before = copy.deepcopy(model.state_dict())

    def broken() -> Batches:
        yield task.batch(16, 3)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        growth.step(*task.batch(16, 2), broken)
    assert_unchanged(model, before)


def test_a_trial_is_on_fresh_batches_and_on_as_many_as_it_needs() -> None:
    task = KnownTask(heads=2, width=16, length=6)
    model, growth = on_trial(tolerance=1.0, sequences=24)
    batches = [task.batch(size, number) for number, size in enumerate((16, 8, 16), 10)]

    def loss() -> float:
        return sum(float(model.loss(*batch).detach()) * len(batch[0]) for batch in batches[:2]) / 24

    given, before = iter(batches), loss()
    (event,) = said(growth.step(*task.batch(16, 2), lambda: given))
    assert event["action"] == "removal"
    assert event["loss_with"] == pytest.approx(before, rel=1e-5)
    assert event["loss_without"] == pytest.approx(loss(), rel=1e-5)
    assert len(list(given)) == 1


def test_a_trial_is_on_the_present_batch_where_no_other_is_given() -> None:
    batch = KnownTask(heads=2, width=16, length=6).batch(16, 2)
    model, growth = on_trial(tolerance=1.0)
    before = float(model.loss(*batch).detach())
    (event,) = said(growth.step(*batch))
    assert event["action"] == "removal"
    assert event["loss_with"] == pytest.approx(before, rel=1e-5)
    assert event["loss_without"] == pytest.approx(float(model.loss(*batch).detach()), rel=1e-5)


def test_a_trial_on_nothing_is_refused() -> None:
    _, growth = on_trial(tolerance=1.0)
    with pytest.raises(InputError, match="fresh = 'no batch'"):
        growth.step(*KnownTask(heads=2, width=16, length=6).batch(16, 2), lambda: iter(()))


@pytest.mark.usefixtures("asking")
def test_the_threshold_doubles_where_a_head_that_was_born_leaves_and_only_there() -> None:
    """Incrt.md D11: a newborn writes least, and is the first that can be done without."""
    share = EAGER["share"]

    def told(events: list[dict[str, Any]]) -> list[tuple[int, str | None, Any]]:
        return [(event["step"], event.get("action"), event.get("threshold")) for event in events]

    _, _, events = grown([Incrt(**EAGER, last_birth=3), trials(tolerance=1.0)], 5)
    assert told(events) == [(3, "birth", [share]), (4, None, [share]), (4, "removal", None), (5, None, [2 * share])]
    assert events[2]["head"] == 1
    _, _, events = grown([Incrt(**EAGER, last_birth=2), trials(grace=3, tolerance=1.0)], 4, heads=2)
    assert told(events) == [(3, None, [share]), (3, "removal", None), (4, None, [share])]


@pytest.mark.usefixtures("asking")
def test_no_layer_has_more_heads_than_it_may_have() -> None:
    model, _, events = grown([Incrt(**EAGER, max_heads=3)], 12)
    assert [event.get("action") for event in events] == ["birth", "birth", *[None] * 8]
    assert model.plan.heads == (3,)


def test_an_event_has_the_standard_error_of_the_demand() -> None:
    """Relative to the largest demand, as the demand itself is."""
    policy = Incrt(**{**EAGER, "warm_up": 100})
    model, growth, events = grown([policy], 20)
    demand = growth.instruments[policy.gauge].read(Probe(model, *KnownTask(heads=2, width=16, length=6).batch(16, 50)))
    (reading,), (layer,) = demand.layers, growth.states["incrt"].layers
    assert events[-1]["demand"] == [pytest.approx(reading.slope / layer.largest)]
    assert events[-1]["noise"] == [pytest.approx(reading.slope / reading.certainty / layer.largest)]
    assert events[-1]["noise"][0] > 0


@pytest.mark.parametrize("policy", [Incrt(**EAGER), Published("repaired", feed_every=1)])
def test_what_is_not_finite_is_not_taken_in(policy: Policy) -> None:
    model, growth, _ = grown([policy], 20)
    tensors = {name: tensor.clone() for name, tensor in growth.tensors().items()}
    tokens, targets = KnownTask(heads=2, width=16, length=6).batch(16, 50)

    def feed(targets: Tensor) -> set[str]:
        """The names, without their gauge, of what has changed."""
        for instrument in growth.instruments.values():
            instrument.feed(Probe(model, tokens, targets))
        names = {name for name, tensor in growth.tensors().items() if not torch.equal(tensor, tensors[name])}
        return {name.partition(").")[2] for name in names}

    assert feed(torch.full_like(targets, math.nan)) == set()
    demand = {f"groups.4.{name}" for name in ("sums", "looks", "moments", "outputs.total", "feeds")}
    assert {"sums"} | (demand if isinstance(policy, Incrt) else {"second", "vectors"}) <= feed(targets)


def test_random_births_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loss(*arguments: Tensor, **named: Any) -> Tensor:
        raise AssertionError("nothing is to be measured")

    task, model = KnownTask(heads=2, width=16, length=6), Student(16, 6, 4)
    growth = Grower(model, None, [RandomBirths(3, last_birth=30, warm_up=1, decide_every=5)])
    monkeypatch.setattr(model, "loss", no_loss)
    for step in range(30):
        growth.step(*task.batch(4, step))
    assert model.plan.heads == (4,)


def test_plans_that_cannot_grow_heads_are_refused() -> None:
    plan = Plan(width=16, vocabulary=32, context=8, feed_forward=16, layers=(LayerPlan(4, 8, 2),))
    with pytest.raises(InputError, match="kv_heads = 2: must be 1 or 4 for heads to come and go"):
        Grower(Decoder(plan), None, [Incrt()])


def test_another_policy_cannot_go_on_from_a_state() -> None:
    _, growth, _ = grown([Incrt(**EAGER)], 3)
    other = Grower(growth.model, None, [Incrt(**{**EAGER, "share": 0.5})])
    with pytest.raises(InputError, match=r"incrt\.share = 0\.5: must be 1e-09"):
        other.load_state_dict(growth.state_dict(), growth.tensors())


def test_a_state_needs_its_heads_and_its_tensors() -> None:
    policy = Incrt(**EAGER)
    _, growth, _ = grown([policy], 3, heads=2)
    tensors, values = growth.tensors(), growth.state_dict()
    heads = growth.model.plan.heads
    other = Grower(Student(16, 6, 4, heads=1), None, [policy])
    with pytest.raises(InputError, match=re.escape(f"model.plan.heads = (1,): must be {heads}, as in the state")):
        other.load_state_dict(values, tensors)
    same = Grower(Student(16, 6, 4, *heads), None, [policy])
    with pytest.raises(InputError, match=r"tensors = 'gauges\..* missing': must be all that"):
        same.load_state_dict(values, {})
    for missing in tensors:
        with pytest.raises(InputError, match=re.escape(f"tensors = '{missing} missing'")):
            same.load_state_dict(values, {name: tensor for name, tensor in tensors.items() if name != missing})
    assert (same.done, other.done) == (0, 0)  # nothing has been taken from it
    same.load_state_dict(values, tensors)
    assert same.done == 3


@pytest.mark.parametrize("policy", [Incrt(), Published(), RandomBirths(1, last_birth=900)])
@pytest.mark.parametrize("name", ["qkv", "out"])
def test_an_optimizer_without_the_attention_is_refused(policy: Policy, name: str) -> None:
    """What is born could not be trained."""
    model = Decoder(two_dims())
    left_out = model.stack[2].attention.get_submodule(name).weight
    rest = [parameter for parameter in model.parameters() if parameter is not left_out]
    with pytest.raises(InputError, match="optimizer = 'attention of layer 2 missing': must hold all parameters"):
        Grower(model, torch.optim.Adam(rest), [policy])
    attention = [parameter for block in model.stack for parameter in block.attention.parameters()]
    Grower(model, torch.optim.Adam(attention), [policy])


# --- when what is looked at, and when heads may leave ---------------------------------------------------------------


def test_calibration_sees_the_model_without_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incrt.md D5: losses and gradients while calibrating are those of a model whose attention writes nothing."""
    task, model = KnownTask(heads=2, width=16, length=6), Student(16, 6, 4, heads=2)
    policy = Incrt(**EAGER)
    growth = Grower(model, None, [policy])
    instrument = growth.instruments[policy.gauge]
    assert isinstance(instrument, DemandInstrument)
    shown: list[Seen] = []
    (group,) = instrument.groups.values()
    monkeypatch.setattr(group, "feed", lambda seen, **how: shown.append(seen))
    monkeypatch.setattr(instrument, "_calibrate", lambda rows: None)
    weights = [parameter.clone() for parameter in model.parameters()]
    for step in range(4):
        growth.step(*task.batch(16, step))
    assert all(torch.equal(new, old) for new, old in zip(model.parameters(), weights, strict=True))
    for step, seen in enumerate(shown):
        tokens, targets = task.batch(16, step)
        written = torch.zeros_like(targets) if step < 2 else model(tokens).detach()
        torch.testing.assert_close(seen.loss, (written - targets).square().sum(-1).mean())
        torch.testing.assert_close(seen.gradients[0], 2 * 16 * (written - targets))  # 16 targets a token
    assert len(shown) == 4


def test_removals_wait_for_the_cool_down() -> None:
    """Incrt.md D11: where every head may go at every decision, one goes per cool-down."""
    never = Incrt(**{**EAGER, "certainty": 1e300, "cool_down": 4})
    model, growth, events = grown([never, trials(cool_down=4, tolerance=1.0)], 12, heads=5)
    assert [(event["step"], event["policy"]) for event in events if event.get("action") == "removal"] == [
        (4, "prune"), (8, "prune"), (12, "prune"),
    ]  # fmt: skip
    assert [event["step"] for event in events if event["policy"] == "incrt"] == list(range(3, 13))
    prune, state = growth.policies["prune"], growth.states["prune"]
    asked = [prune.needs(state, step, model.plan) is not None for step in (13, 15, 16)]
    assert asked == [False, False, True]


@pytest.fixture
def silent_energies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published gauge finds no energy anywhere, so that all heads may leave."""
    measured = EnergyGauge.readings

    def quiet(gauge: EnergyGauge) -> list[EnergyReading]:
        readings = [
            (reading, tuple(replace(head, energy=0.0) for head in reading.heads)) for reading in measured(gauge)
        ]
        return [replace(reading, lambda_max=0.0, threshold=1.0, grace=0, heads=heads) for reading, heads in readings]

    monkeypatch.setattr(EnergyGauge, "readings", quiet)


QUICK = Published(feed_every=1, decide_every=1, patience=1)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.usefixtures("silent_energies")
def test_two_heads_that_share_keys_stay(published: bool) -> None:
    plan = Plan(width=16, vocabulary=32, context=8, feed_forward=16, layers=(LayerPlan(2, 8, 1), LayerPlan(3, 8, 3)))
    never = Incrt(**{**EAGER, "certainty": 1e300})
    model, growth = growing(plan, *([QUICK] if published else [never, trials(tolerance=1.0)]))
    train(model, growth, range(8))
    assert model.plan.heads == (2, 1)  # and do not hold up the other layer's


@pytest.mark.usefixtures("silent_energies")
def test_no_head_leaves_on_what_is_not_finite() -> None:
    """The others' part would be made of it, and stay so."""
    plan = Plan(width=16, vocabulary=32, context=8, feed_forward=16, layers=(LayerPlan(3, 8, 3),))
    model, growth = growing(plan, replace(QUICK, patience=2))
    tokens, targets = text(0)
    embedding = model.embedding.weight
    good, heads = embedding.detach().clone(), []
    for broken in (True, False, True, False):  # at the third decision two are due to leave
        with torch.no_grad():
            embedding.copy_(good)
            embedding[tokens[0, 0]] *= math.nan if broken else 1
        growth.step(tokens, targets)
        assert bool(model.stack[0].attention.out.weight.isfinite().all())
        heads.append(model.plan.heads[0])
    assert heads == [3, 3, 3, 2]


# --- layers whose heads have different dims -------------------------------------------------------------------------


def two_dims() -> Plan:
    layers = (LayerPlan(1, 16, 1), LayerPlan(2, 8, 2), LayerPlan(1, 16, 1), LayerPlan(1, 8, 1))
    return Plan(width=16, vocabulary=32, context=8, feed_forward=16, layers=layers)


def text(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and what the one before each of them was."""
    tokens = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(seed))
    return tokens, tokens.roll(1, 1)


def train(model: Decoder, growth: Grower, steps: range) -> list[dict[str, Any]]:
    optimizer, events = growth.optimizer, []
    assert optimizer is not None
    for step in steps:
        optimizer.zero_grad()
        model.loss(*text(step)).backward()
        optimizer.step()
        events += said(growth.step(*text(step)))
    return events


def growing(plan: Plan, *policies: Policy) -> tuple[Decoder, Grower]:
    model = Decoder(plan)
    return model, Grower(model, torch.optim.Adam(model.parameters(), 1e-2), policies)


def test_heads_of_every_dim_are_born_and_leave() -> None:
    births = Incrt(**{**EAGER, "max_heads": 3, "last_birth": 12})
    model, growth = growing(two_dims(), births, trials(grace=5, tolerance=1.0))
    events = train(model, growth, range(24))
    for action in ("birth", "removal"):
        layers = {event["layer"] for event in events if event.get("action") == action}
        assert {model.plan.head_dims[layer] for layer in layers} == {8, 16}, action
    measured = [event for event in events if event["policy"] == "incrt"]
    assert {event["step"] for event in measured} == set(range(3, 25))  # once, or once for every birth
    assert all(len(event["predicted_heads"]) == len(event["demand"]) == 4 for event in measured)
    assert [len(layer) for layer in growth.states["prune"].since] == list(model.plan.heads)
    assert [len(layer) for layer in growth.states["incrt"].grown] == list(model.plan.heads)


def test_incrt_oracle_24_parameters_follow_the_heads() -> None:
    """Base and 4 d d_k for every head, whatever has been born and has left."""
    births = Incrt(**{**EAGER, "max_heads": 3, "last_birth": 12})
    model, growth = growing(two_dims(), births, trials(grace=5, tolerance=1.0))

    def count() -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    def of_heads() -> int:
        return sum(4 * 16 * layer.head_dim * layer.heads for layer in model.plan.layers)

    base, most, found = count() - of_heads(), count(), set()
    for step in range(24):
        train(model, growth, range(step, step + 1))
        assert count() == model.plan.parameters == base + of_heads()
        assert growth.optimizer is not None
        assert sum(p.numel() for group in growth.optimizer.param_groups for p in group["params"]) == count()
        found.add(count())
    assert max(found) > most
    assert count() < max(found)


def test_layers_of_one_dim_are_measured_as_by_a_gauge_of_their_own() -> None:
    model = Decoder(two_dims())
    instrument = Demand(calibration=100).instrument(model)
    alone = {dim: DemandGauge(2, 16, model.rope(dim), seed=0) for dim in (16, 8)}
    members = {16: [0, 2], 8: [1, 3]}
    for step in range(4):
        probe = Probe(model, *text(step))
        instrument.feed(probe)
        seen = probe.look(silent=True)
        for dim, layers in members.items():
            alone[dim].feed(seen.inputs[layers], seen.gradients[layers], seen.attention_mask, seen.sizes[layers])
    found = instrument.read(probe)
    for dim, layers in members.items():
        terms = probe.targets.shape[1]  # of the loss, in a sequence
        own = [replace(reading, worth=reading.worth / terms) for reading in alone[dim].readings()]
        assert [found.layers[layer] for layer in layers] == own
        for place, layer in enumerate(layers):
            pairs = zip(found.directions[layer], alone[dim].directions(place), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    edit = AddHead(2, newborn_head(model.plan.layers[2], 16, None, 0))
    instrument.follow(edit.moves(model.plan), edit.apply(model.plan))
    assert [reading.feeds for reading in instrument.read(probe).layers] == [4, 4, 0, 4]


@pytest.mark.parametrize("first", [3, 5, 7, 14])
def test_incrt_oracle_23_fifty_decisions_from_a_state(first: int) -> None:
    """From the middle of the calibration, its end, and between births and removals; in layers of two head dims."""
    policies = Incrt(**{**EAGER, "calibration": 5, "max_heads": 3}), trials(grace=5, tolerance=1.0)
    model, growth = growing(two_dims(), *policies)
    train(model, growth, range(first))
    values = json.loads(json.dumps(growth.state_dict()))
    tensors = {name: tensor.clone() for name, tensor in growth.tensors().items()}
    assert growth.optimizer is not None
    weights, moments = copy.deepcopy((model.state_dict(), growth.optimizer.state_dict()))
    other, again = growing(model.plan, *policies)
    other.load_state_dict(weights)
    assert again.optimizer is not None
    again.optimizer.load_state_dict(moments)
    again.load_state_dict(values, tensors)
    steps = range(first, first + 55)
    whole = train(model, growth, steps)
    assert train(other, again, steps) == whole
    assert len({event["step"] for event in whole}) >= 50
    assert {"birth", "removal"} <= {event.get("action") for event in whole}
    assert other.plan == model.plan
    assert again.state_dict() == growth.state_dict()
    for mine, theirs in ((other.state_dict(), model.state_dict()), (again.tensors(), growth.tensors())):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
