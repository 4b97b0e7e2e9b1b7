"""HeadGrowth on a small model: what it does with what it is shown."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from meristem.growth.criteria import Demand, Policy, Seen
from meristem.growth.head_growth import HeadGrowth
from meristem.growth.measuring import Batches, look
from meristem.growth.outcome import Growth
from torch import Tensor

from meristem.errors import InputError
from meristem.gauges.demand import DemandGauge, DemandReading
from meristem.gauges.energy import EnergyGauge, EnergyReading
from meristem.growth import Incrt, Pruning, Published, RandomBirths
from meristem.model import Decoder
from meristem.plan import LayerPlan, Loop, Plan
from meristem.synthetic import KnownTask, Student

EAGER: dict[str, Any] = {
    "feed_every": 1, "decide_every": 1, "calibration": 2, "cool_down": 1, "warm_up": 1, "certainty": -math.inf,
    "share": 1e-9, "steady": -math.inf, "plateau": 1.0, "hits": 1, "feeds": 1,
}  # fmt: skip
ASKING = DemandReading(certainty=9.0, slope=1.0, feeds=100)


def grown(policy: Policy, steps: int, heads: int = 1, **shape: Any) -> tuple[Student, HeadGrowth, list[dict[str, Any]]]:
    task, model = KnownTask(heads=2, width=16, length=6), Student(16, 6, 4, heads, **shape)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    growth, events = HeadGrowth(model, optimizer, policy), []
    for step in range(steps):
        tokens, targets = task.batch(16, step)
        optimizer.zero_grad()
        model.loss(tokens, targets).backward()
        optimizer.step()
        events += growth.step(tokens, targets).events
    return model, growth, events


def test_incrt_oracle_13_no_birth_changes_what_a_model_says() -> None:
    model, growth, _ = grown(Incrt(**EAGER, prune=False, max_heads=6), 2)
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
    with torch.no_grad():
        before, loss = model(text(9)[0]).logits, model.loss(*text(9))
        for layer in (0, 1, 1):
            growth._bear(layer)
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
    trial = Pruning(grace=0, patience=1, redundant=1e-3)
    policy = Incrt(**{**EAGER, "share": 1.0, "certainty": math.inf}, pruning=trial)
    growth = HeadGrowth(model, optimizer, policy)
    before = model(task.batch(64, 5)[0]).detach()
    events = [event for step in range(1, 5) for event in growth.step(*task.batch(64, step)).events]
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
    policy = Incrt(
        **{**EAGER, "certainty": math.inf}, pruning=Pruning(grace=150, patience=1, redundant=1.0, tolerance=0.0)
    )
    model, _, events = grown(policy, 160, heads=2)  # by then both are needed
    spared = [event for event in events if event.get("action") == "spare"]
    assert spared
    assert all(event["loss_without"] > event["loss_with"] for event in spared)
    assert model.plan.heads == (2,)


def on_trial(**settings: Any) -> tuple[Student, HeadGrowth]:
    """A student of two heads, of which its next step tries to do without one."""
    task, model = KnownTask(heads=2, width=16, length=6), Student(16, 6, 4, heads=2)
    trial = Pruning(grace=0, patience=1, redundant=1.0, **settings)
    growth = HeadGrowth(model, None, Incrt(**{**EAGER, "certainty": math.inf}, pruning=trial))
    for step in range(2):
        growth.step(*task.batch(16, step))
    return model, growth


def assert_unchanged(model: Student, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_a_trial_that_fails_leaves_no_trace_in_the_model() -> None:
    model, growth = on_trial()
    before = copy.deepcopy(model.state_dict())
    tokens, _ = KnownTask(heads=2, width=16, length=6).batch(16, 2)
    (event,) = growth.step(tokens, model(tokens).detach()).events  # of which every head writes a part
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
    (event,) = growth.step(*task.batch(16, 2), lambda: given).events
    assert event["action"] == "removal"
    assert event["loss_with"] == pytest.approx(before, rel=1e-5)
    assert event["loss_without"] == pytest.approx(loss(), rel=1e-5)
    assert len(list(given)) == 1


def test_a_trial_is_on_the_present_batch_where_no_other_is_given() -> None:
    batch = KnownTask(heads=2, width=16, length=6).batch(16, 2)
    model, growth = on_trial(tolerance=1.0)
    before = float(model.loss(*batch).detach())
    (event,) = growth.step(*batch).events
    assert event["action"] == "removal"
    assert event["loss_with"] == pytest.approx(before, rel=1e-5)
    assert event["loss_without"] == pytest.approx(float(model.loss(*batch).detach()), rel=1e-5)


def test_a_trial_on_nothing_is_refused() -> None:
    _, growth = on_trial(tolerance=1.0)
    with pytest.raises(InputError, match="fresh = 'no batch'"):
        growth.step(*KnownTask(heads=2, width=16, length=6).batch(16, 2), lambda: iter(()))


def test_the_threshold_doubles_where_a_head_that_was_born_leaves_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Incrt.md D11: a newborn writes least, and is the first that can be done without."""
    monkeypatch.setattr(Demand, "readings", lambda criterion: [ASKING])
    trial = Pruning(grace=0, patience=1, redundant=1.0, tolerance=1.0)
    share = EAGER["share"]
    _, _, events = grown(Incrt(**EAGER, last_birth=4, pruning=trial), 6)
    assert [(event.get("action"), event["threshold"]) for event in events] == [
        (None, [share]), ("birth", [share]), ("removal", [share]), (None, [2 * share]),
    ]  # fmt: skip
    assert events[2]["head"] == 1
    _, _, events = grown(Incrt(**EAGER, last_birth=2, pruning=trial), 4, heads=2)
    assert [(event.get("action"), event["threshold"]) for event in events] == [("removal", [share]), (None, [share])]


def test_no_layer_has_more_heads_than_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Demand, "readings", lambda criterion: [ASKING])
    model, _, events = grown(Incrt(**EAGER, prune=False, max_heads=3), 12)
    assert [event.get("action") for event in events] == [None, "birth", "birth", *[None] * 7]
    assert model.plan.heads == (3,)


def test_an_event_has_the_standard_error_of_the_demand() -> None:
    """Relative to the largest demand, as the demand itself is."""
    _, growth, events = grown(Incrt(**EAGER, last_birth=2, prune=False), 20)
    assert isinstance(growth.criterion, Demand)
    (reading,), (layer,) = growth.criterion.readings(), growth.criterion.state.layers
    assert events[-1]["demand"] == [pytest.approx(reading.slope / layer.largest)]
    assert events[-1]["noise"] == [pytest.approx(reading.slope / reading.certainty / layer.largest)]
    assert events[-1]["noise"][0] > 0


@pytest.mark.parametrize("policy", [Incrt(**EAGER, prune=False), Published("repaired", feed_every=1)])
def test_what_is_not_finite_is_not_taken_in(policy: Policy) -> None:
    _, growth, _ = grown(policy, 20)
    tensors = {name: tensor.clone() for name, tensor in growth.tensors().items()}
    tokens, targets = KnownTask(heads=2, width=16, length=6).batch(16, 50)
    growth._feed(tokens, torch.full_like(targets, math.nan))
    for name, tensor in growth.tensors().items():
        assert torch.equal(tensor, tensors[name]), name
    growth._feed(tokens, targets)
    changed = {name for name, tensor in growth.tensors().items() if not torch.equal(tensor, tensors[name])}
    demand = {f"criterion.4.{name}" for name in ("sums", "looks", "moments", "outputs.total", "feeds")}
    assert {"losses"} | (demand if isinstance(policy, Incrt) else {"criterion.second", "criterion.vectors"}) <= changed


def test_random_births_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loss(*arguments: Tensor, **named: Any) -> Tensor:
        raise AssertionError("nothing is to be measured")

    task, model = KnownTask(heads=2, width=16, length=6), Student(16, 6, 4)
    growth = HeadGrowth(model, None, RandomBirths(3, last_birth=30, warm_up=1, decide_every=5))
    monkeypatch.setattr(model, "loss", no_loss)
    for step in range(30):
        growth.step(*task.batch(4, step))
    assert model.plan.heads == (4,)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((LayerPlan(4, 8, 2),), "kv_heads = 2: must be 1 or 4 for heads to come and go"),
        ((LayerPlan(2, 8, 2), LayerPlan(1, 16, 1, Loop((0,), 1))), "has loops; heads come and go in layers that run"),
    ],
)
def test_plans_that_cannot_grow_heads_are_refused(layers: tuple[LayerPlan, ...], message: str) -> None:
    model = Decoder(Plan(width=16, vocabulary=32, context=8, feed_forward=16, layers=layers))
    with pytest.raises(InputError) as caught:
        HeadGrowth(model, None, Incrt())
    assert message in str(caught.value)


def test_another_policy_cannot_go_on_from_a_state() -> None:
    _, growth, _ = grown(Incrt(**EAGER), 3)
    other = HeadGrowth(growth.model, None, Incrt(**{**EAGER, "share": 0.5}))
    with pytest.raises(InputError, match=r"policy\.share = 0\.5: must be 1e-09"):
        other.load(growth.tensors(), growth.values())


def test_a_state_needs_its_heads_and_its_tensors() -> None:
    policy = Incrt(**EAGER)
    _, growth, _ = grown(policy, 3, heads=2)
    tensors, values = growth.tensors(), growth.values()
    heads = growth.model.plan.heads
    other = HeadGrowth(Student(16, 6, 4, heads=1), None, policy)
    with pytest.raises(InputError, match=re.escape(f"model.plan.heads = (1,): must be {heads}, as in the state")):
        other.load(tensors, values)
    same = HeadGrowth(Student(16, 6, 4, *heads), None, policy)
    with pytest.raises(InputError, match=r"tensors = 'losses, criterion\.4\.sums, .* missing': must be all that"):
        same.load({}, values)
    with pytest.raises(InputError, match=r"tensors = 'criterion\.4\.looks missing'"):
        same.load({name: tensor for name, tensor in tensors.items() if name != "criterion.4.looks"}, values)
    assert (same.done, other.done) == (0, 0)  # nothing has been taken from it
    same.load(tensors, values)


@pytest.mark.parametrize("policy", [Incrt(), Published(), RandomBirths(1, last_birth=900)])
@pytest.mark.parametrize("name", ["qkv", "out"])
def test_an_optimizer_without_the_attention_is_refused(policy: Policy, name: str) -> None:
    """What is born could not be trained."""
    model = Decoder(two_dims())
    left_out = model.stack[2].attention.get_submodule(name).weight
    rest = [parameter for parameter in model.parameters() if parameter is not left_out]
    with pytest.raises(InputError, match="optimizer = 'attention of layer 2 missing': must hold all parameters"):
        HeadGrowth(model, torch.optim.Adam(rest), policy)
    attention = [parameter for block in model.stack for parameter in block.attention.parameters()]
    HeadGrowth(model, torch.optim.Adam(attention), policy)


# --- when what is looked at, and when heads may leave ---------------------------------------------------------------


def test_calibration_sees_the_model_without_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incrt.md D5: losses and gradients while calibrating are those of a model whose attention writes nothing."""
    task, model = KnownTask(heads=2, width=16, length=6), Student(16, 6, 4, heads=2)
    growth = HeadGrowth(model, None, Incrt(**EAGER, prune=False))
    shown: list[Seen] = []
    monkeypatch.setattr(growth.criterion, "feed", shown.append)
    monkeypatch.setattr(growth.criterion, "calibrate", lambda: None)
    monkeypatch.setattr(growth, "_decide", lambda *batch: Growth())
    weights = [parameter.clone() for parameter in model.parameters()]
    for step in range(4):
        growth.step(*task.batch(16, step))
    assert all(torch.equal(new, old) for new, old in zip(model.parameters(), weights, strict=True))
    for step, seen in enumerate(shown):
        tokens, targets = task.batch(16, step)
        written = torch.zeros_like(targets) if step < 2 else model(tokens).detach()
        torch.testing.assert_close(seen.loss, (written - targets).square().sum(-1).mean())
        torch.testing.assert_close(seen.gradients[0], 2 * 16 * (written - targets))  # 16 labels a token
    assert len(shown) == 4


def test_removals_wait_for_the_cool_down() -> None:
    """Incrt.md D11: where every head may go at every decision, one goes per cool-down."""
    trial = Pruning(grace=0, patience=1, redundant=1.0, tolerance=1.0)
    never = {**EAGER, "certainty": math.inf, "cool_down": 4}
    _, growth, events = grown(Incrt(**never, pruning=trial), 12, heads=4)
    assert [event.get("action") for event in events] == [
        None, "removal", None, None, None, "removal", None, None, None, "removal",
    ]  # after updates 3 to 12  # fmt: skip
    assert [growth.criterion.may_prune(done) for done in (13, 15, 16)] == [False, False, True]


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
    trial = Pruning(grace=0, patience=1, redundant=1.0, tolerance=1.0)
    never = Incrt(**{**EAGER, "certainty": math.inf}, pruning=trial)
    model, growth = growing(plan, QUICK if published else never)
    train(model, growth, range(8))
    assert model.plan.heads == (2, 1)  # and do not hold up the other layer's


@pytest.mark.usefixtures("silent_energies")
def test_no_head_leaves_on_what_is_not_finite() -> None:
    """The others' part would be made of it, and stay so."""
    plan = Plan(width=16, vocabulary=32, context=8, feed_forward=16, layers=(LayerPlan(3, 8, 3),))
    model, growth = growing(plan, replace(QUICK, patience=2))
    tokens, labels = text(0)
    embedding = model.embedding.weight
    good, heads = embedding.detach().clone(), []
    for broken in (True, False, True, False):  # at the third decision two are due to leave
        with torch.no_grad():
            embedding.copy_(good)
            embedding[tokens[0, 0]] *= math.nan if broken else 1
        growth.step(tokens, labels)
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


def train(model: Decoder, growth: HeadGrowth, steps: range) -> list[dict[str, Any]]:
    optimizer, events = growth.optimizer, []
    assert optimizer is not None
    for step in steps:
        optimizer.zero_grad()
        model.loss(*text(step)).backward()
        optimizer.step()
        events += growth.step(*text(step)).events
    return events


def growing(plan: Plan, policy: Policy) -> tuple[Decoder, HeadGrowth]:
    model = Decoder(plan)
    return model, HeadGrowth(model, torch.optim.Adam(model.parameters(), 1e-2), policy)


def test_heads_of_every_dim_are_born_and_leave() -> None:
    trial = Pruning(grace=5, patience=1, redundant=1.0, tolerance=1.0)
    model, growth = growing(two_dims(), Incrt(**{**EAGER, "max_heads": 3, "last_birth": 12}, pruning=trial))
    events = train(model, growth, range(24))
    for action in ("birth", "removal"):
        layers = {event["layer"] for event in events if event.get("action") == action}
        assert {model.plan.head_dims[layer] for layer in layers} == {8, 16}, action
    assert all(len(event["predicted_heads"]) == len(event["demand"]) == 4 for event in events)
    assert [len(layer) for layer in growth.ages.heads] == list(model.plan.heads)


def test_incrt_oracle_24_parameters_follow_the_heads() -> None:
    """Base and 4 d d_k for every head, whatever has been born and has left."""
    trial = Pruning(grace=5, patience=1, redundant=1.0, tolerance=1.0)
    model, growth = growing(two_dims(), Incrt(**{**EAGER, "max_heads": 3, "last_birth": 12}, pruning=trial))

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
    model, growth = growing(two_dims(), Incrt(**EAGER, prune=False))
    criterion = growth.criterion
    assert isinstance(criterion, Demand)
    alone = {dim: DemandGauge(2, 16, model.angles(dim), seed=0) for dim in (16, 8)}
    members = {16: [0, 2], 8: [1, 3]}
    for step in range(4):
        seen = look(model, *text(step))
        criterion.feed(seen)
        for dim, layers in members.items():
            alone[dim].feed(seen.inputs[layers], seen.gradients[layers], seen.allowed, seen.sizes[layers])
    for dim, layers in members.items():
        assert [criterion.readings()[layer] for layer in layers] == alone[dim].readings()
        for place, layer in enumerate(layers):
            pairs = zip(criterion.directions(layer), alone[dim].directions(place), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    criterion.born(2)
    assert [reading.feeds for reading in criterion.readings()] == [4, 4, 0, 4]


@pytest.mark.parametrize("first", [3, 5, 7, 14])
def test_incrt_oracle_23_fifty_decisions_from_a_state(first: int) -> None:
    """From the middle of the calibration, its end, and between births and removals; in layers of two head dims."""
    trial = Pruning(grace=5, patience=1, redundant=1.0, tolerance=1.0)
    policy = Incrt(**{**EAGER, "calibration": 5, "max_heads": 3}, pruning=trial)
    model, growth = growing(two_dims(), policy)
    train(model, growth, range(first))
    values = json.loads(json.dumps(growth.values()))
    tensors = {name: tensor.clone() for name, tensor in growth.tensors().items()}
    weights, moments = copy.deepcopy((model.state_dict(), growth.optimizer.state_dict()))  # type: ignore[union-attr]
    other, again = growing(model.plan, policy)
    other.load_state_dict(weights)
    again.optimizer.load_state_dict(moments)  # type: ignore[union-attr]
    again.load(tensors, values)
    steps = range(first, first + 55)
    whole = train(model, growth, steps)
    assert train(other, again, steps) == whole
    assert len(whole) >= 50
    assert {"birth", "removal"} <= {event.get("action") for event in whole}
    assert other.plan == model.plan
    assert again.values() == growth.values()
    for mine, theirs in ((other.state_dict(), model.state_dict()), (again.tensors(), growth.tensors())):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
