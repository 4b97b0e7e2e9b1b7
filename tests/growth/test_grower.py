"""The grower: what it measures and when, what it does to the model, and what that costs (sgt.md 5.2 and 6)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from meristem.config import OptimizerConfig
from meristem.errors import InputError
from meristem.gauges import entropy as entropy_module
from meristem.gauges.entropy import EntropyGauge, HeadReadings, read_heads
from meristem.growth import BlockLoop, Grower, Incrt, LoopHeads, Observe, Sgt
from meristem.growth.apply import apply_edit
from meristem.growth.ema import Ema
from meristem.growth.events import Event
from meristem.model import Classifier, Decoder
from meristem.model.transformer import Regions
from meristem.plan import Loop, Plan
from meristem.training.compilation import compiled_regions
from meristem.training.optimizer import make_optimizer

from .helpers import FOUR, VECTORS, Action, Entropies, listed, scripted, spread, tiny_plan, tokens_of


def said(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Events as lines of a log."""
    return [event.to_dict() for event in events]


def phase(grower: Grower) -> str:
    return str(grower.states["sgt"].phase)


def grown_model(policy: Sgt, heads: list[int] | None = None, seed: int = 0) -> Decoder:
    return Decoder(policy.prepare(tiny_plan(heads or FOUR)), seed)


# --- O8: averages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [1, 2, 5, 16, 40])
def test_sgt_oracle_8_average_of_a_constant(updates: int) -> None:
    average, constant = Ema(0.5), [0.3, 0.9, 1.0]
    for _ in range(updates):
        average = average.plus(constant)
    assert list(average.value) == pytest.approx([value * (1 - 0.5**updates) for value in constant], abs=1e-6)
    assert average.mean == pytest.approx(constant, abs=1e-6)


def averages(values: Tensor, memory: int) -> tuple[Tensor, Tensor]:
    """The average of all values from 0 on, as published, and ours of the last few."""
    full = torch.zeros_like(values[0])
    for value in values:
        full = 0.5 * full + 0.5 * value
    short = Ema(0.5)
    for value in values[-memory:]:
        short = short.plus(value.tolist())
    return full, torch.tensor(short.mean, dtype=values.dtype)


def test_sgt_oracle_8_sixteen_updates_remember_enough() -> None:
    """About 1e-6 for entropies that move by a tenth (D5); the twelve of the same check are ten times worse."""
    noise = torch.rand(300, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = 0.9 + 0.1 * noise
    full, short = averages(values, 16)
    assert 1e-7 < float((short - full).abs().max()) < 2e-6
    full, shorter = averages(values, 12)
    assert 2e-6 < float((shorter - full).abs().max()) < 3e-5


# --- O14: the vectors again, through a model -------------------------------------------------------------------------


@pytest.mark.parametrize("name", VECTORS)
def test_sgt_oracle_14_vectors_through_the_grower(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    levels, passes, expected = VECTORS[name]
    policy = Sgt(total_steps=2600, start=250, window=250, passes=passes)
    model = grown_model(policy, [4] * 12)
    grower, script = scripted(monkeypatch, model, policy, lambda done: spread(levels(done), [4] * 12))
    tokens = tokens_of(model.plan, 0)
    found, changes = [], []
    for _ in range(policy.total_steps):
        growth = grower.step(tokens)
        found += [Action(grower.done, event["action"], event["layer"]) for event in said(growth.events)]
        changes += [grower.done] if growth.changed else []
    assert found == expected
    assert changes == [action.done for action in expected[:-1]]
    depths = {layer: sum(action.layer == layer for action in expected) for _, what, layer in expected if what == "add"}
    assert model.plan.loops == {layer: Loop((2, 3), depth) for layer, depth in sorted(depths.items()) if layer}
    assert script.asked == [done for action in expected for done in range(action.done - 15, action.done + 1)]


# --- when it measures ------------------------------------------------------------------------------------------------


def test_entropy_is_measured_in_the_sixteen_updates_before_a_decision_only(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Sgt(total_steps=300, start=40, window=30)
    model = grown_model(policy)
    grower, script = scripted(monkeypatch, model, policy, lambda done: spread(listed(3, 2, 1), FOUR))
    tokens = tokens_of(model.plan, 0)
    for _ in range(299):
        grower.step(tokens)
    assert phase(grower) == "fixed"
    assert script.asked == [done for end in (40, 70, 100, 130) for done in range(end - 15, end + 1)]


@pytest.mark.parametrize(("beta", "most"), [(0.0, 1), (0.25, 8), (0.9, 40)])
def test_other_memories_measure_more_or_less(beta: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average of a decision is over what its memory holds: it goes on where that is longer than a window."""
    policy = Sgt(total_steps=300, start=40, window=30, beta=beta, max_layers=1)

    def entropies(done: int) -> Entropies:
        return spread({3: 0.5 + done / 1000}, FOUR)

    model = grown_model(policy)
    grower, script = scripted(monkeypatch, model, policy, entropies)
    events = [event for _ in range(100) for event in said(grower.step(tokens_of(model.plan, 0)).events)]
    spans = [(40, min(most, 40)), (70, min(most, 30))]
    assert script.asked == [done for end, count in spans for done in range(end - count + 1, end + 1)]
    for event, (end, count) in zip(events, spans, strict=True):
        held = end if most > 30 else count  # without a gap between the two there is nothing to begin anew for
        weights = [beta**age for age in range(held)]
        mean = sum(weight * (0.5 + (end - age) / 1000) for age, weight in enumerate(weights)) / sum(weights)
        assert event["layer_entropy"][3] == pytest.approx(mean, abs=1e-6)


def test_observations_add_readings_but_do_not_enter_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Sgt(total_steps=300, start=40, window=30)

    def entropies(done: int) -> Entropies:
        return spread(listed(3, 2, 1) if 24 < done <= 40 else listed(1, 2), FOUR)

    def run(observe_every: int) -> tuple[list[int], list[dict[str, Any]]]:
        model = grown_model(policy)
        grower, script = scripted(monkeypatch, model, policy, entropies, observe_every)
        growths = [grower.step(tokens_of(model.plan, 0)) for _ in range(60)]
        seen = [done for done, growth in enumerate(growths, 1) if growth.observation is not None]
        assert seen == ([5 * n for n in range(1, 13)] if observe_every else [])
        return script.asked, [event for growth in growths for event in said(growth.events)]

    asked, events = run(0)
    also_asked, same_events = run(5)
    probed = [*range(25, 41), *range(55, 61)]
    assert asked == probed
    assert also_asked == sorted({*probed, *range(5, 61, 5)})
    assert same_events == events


def test_without_a_policy_a_grower_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(tiny_plan([2, 4, 4]))
    grower, script = scripted(monkeypatch, model, None, lambda done: spread({1: done / 10}, [2, 4, 4]), 3)
    growths = [grower.step(tokens_of(model.plan, 0)) for _ in range(7)]
    assert script.asked == [3, 6]
    assert all(growth.events == [] and not growth.changed for growth in growths)
    for done, growth in enumerate(growths, 1):
        if done % 3:
            assert growth.observation is None
        else:
            assert growth.observation is not None
            assert set(growth.observation) == {"head_entropy"}  # there are no loops to tell of
            for found, expected in zip(
                growth.observation["head_entropy"], spread({1: done / 10}, [2, 4, 4]), strict=True
            ):
                assert found == pytest.approx(expected, abs=1e-6)
    silent, _ = scripted(monkeypatch, model, None, lambda done: [], 0)
    assert silent.step(tokens_of(model.plan, 0)).observation is None


def test_a_record_that_would_never_be_made_is_refused() -> None:
    with pytest.raises(InputError, match=r"every = 0: must be given where total_steps"):
        Grower(Decoder(tiny_plan([2, 4])), None, [Observe()])


@pytest.mark.parametrize(("batch", "stride"), [(1, 1), (8, 1), (9, 2), (15, 2), (16, 2), (17, 3), (20, 3), (64, 8)])
def test_a_measurement_is_the_mean_over_a_few_sequences(batch: int, stride: int) -> None:
    """Eight at most, spread over the batch."""
    taken = range(0, batch, stride)
    model = Decoder(tiny_plan([2, 4, 4]))
    grower = Grower(model, None, [Observe(1)])
    tokens = tokens_of(model.plan, 5, batch)
    observation = grower.step(tokens).observation
    assert observation is not None
    assert Observe(1).sequences / 2 < len(taken) <= Observe(1).sequences or batch < Observe(1).sequences
    single = [read_heads(model, tokens[i : i + 1], EntropyGauge()).entropy for i in taken]
    found = torch.tensor([e for layer in observation["head_entropy"] for e in layer])
    torch.testing.assert_close(found, torch.stack(single).mean(0), rtol=0, atol=1e-6)
    assert [len(layer) for layer in observation["head_entropy"]] == [2, 4, 4]


def test_repeated_blocks_have_no_strengths_to_tell_of() -> None:
    model = Decoder(BlockLoop((1,), 2).prepare(tiny_plan([2, 4, 4])))
    observation = Grower(model, None, [Observe(1)]).step(tokens_of(model.plan, 5)).observation
    assert observation is not None
    assert observation.keys() == {"head_entropy"}


# --- what it says ----------------------------------------------------------------------------------------------------


def test_an_event_holds_the_readings_the_rule_and_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readings are the average of the window, newest first in weight; the loops are those before the decision."""
    policy = Sgt(total_steps=200, passes=2, start=20, window=20, max_layers=1)

    def entropies(done: int) -> Entropies:
        return spread({3: 0.8, 1: 0.5 + done / 1000}, FOUR)

    model = grown_model(policy)
    assert model.gate_delta is not None
    grower, _ = scripted(monkeypatch, model, policy, entropies)
    events, plans = [], {}
    for done in range(1, 101):
        if done == 21:  # the loop is born, and trained
            torch.nn.init.constant_(model.gate_delta[3, 0], 0.125)
        events += said(grower.step(tokens_of(model.plan, 0)).events)
        plans[done] = model.plan.digest
    assert [event["action"] for event in events] == ["add", "deepen", "fix"]
    weights = [0.5 ** (age + 1) / (1 - 0.5**16) for age in range(16)]
    for event, done in zip(events, (20, 40, 60), strict=True):
        mean = sum(weight * (0.5 + (done - age) / 1000) for age, weight in enumerate(weights))
        expected = [0.1, mean, 0.1, 0.8]
        assert event["layer_entropy"] == pytest.approx(expected, abs=1e-6)
        for found, level in zip(event["head_entropy"], expected, strict=True):
            assert found == pytest.approx([level + 0.01 * (head - 1.5) for head in range(4)], abs=1e-6)
        assert event["shortlist"] == [3, 1, 2]
        assert json.loads(json.dumps(event)) == event
        assert event["plan"] == plans[done]
    first, second, last = ({k: v for k, v in event.items() if "entropy" not in k and k != "plan"} for event in events)
    assert first == {
        "step": 20, "event": "growth", "version": 1, "policy": "sgt",
        "action": "add", "layer": 3, "heads": [2, 3], "passes": 1, "shortlist": [3, 1, 2],
        "birth": "gate", "rule": "deepest layer of the shortlist", "next_decision": 40,
    }  # fmt: skip
    assert second == {
        "step": 40, "event": "growth", "version": 1, "policy": "sgt",
        "action": "deepen", "layer": 3, "heads": [2, 3], "passes": 2, "shortlist": [3, 1, 2],
        "birth": "gate", "next_decision": 60,
        "rule": "first grown layer that is on the shortlist and has fewer passes than allowed",
        "loops": [
            {
                "layer": 3, "heads": [2, 3], "passes": 1, "gates": [pytest.approx([0.95 + 0.125] * 2)],
                "update": [pytest.approx(0.1)],
            }
        ],
    }  # fmt: skip
    assert last["rule"] == "1 layer has grown, and none of these that is on the shortlist has fewer than 2 passes"
    assert last["birth"] == "gate"
    assert (last["layer"], last["heads"], last["passes"], last["next_decision"]) == (None, None, None, None)
    assert last["loops"][0]["update"] == pytest.approx([0.1, 0.2])
    assert last["loops"][0]["gates"] == [pytest.approx([1.125] * 2), pytest.approx([0.95] * 2)]


def test_entropies_that_are_not_finite_wait_and_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Sgt(total_steps=200, start=20, window=20)

    def entropies(done: int) -> Entropies:
        return spread({3: math.nan if done == 12 else 0.8}, FOUR)

    model = grown_model(policy)
    grower, _ = scripted(monkeypatch, model, policy, entropies)
    growths = [grower.step(tokens_of(model.plan, 0)) for _ in range(40)]
    waited, added = (event for growth in growths for event in said(growth.events))
    assert [done for done, growth in enumerate(growths, 1) if growth.changed] == [40]
    assert (waited["action"], waited["layer"], waited["next_decision"]) == ("wait", None, 40)
    assert waited["layer_entropy"][3] is None
    assert (added["action"], added["layer"]) == ("add", 3)


def strict(value: Any) -> Any:
    """The value by way of JSON as others read it, which has no NaN."""
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_strengths_and_updates_that_are_not_finite_are_null(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In decisions and in observations."""
    policy = Sgt(total_steps=200, passes=2, start=20, window=20, max_layers=1)
    model = grown_model(policy)
    grower, script = scripted(monkeypatch, model, policy, lambda done: spread({3: 0.8}, FOUR), 10)
    for _ in range(39):
        grower.step(tokens_of(model.plan, 0))
    assert model.gate_delta is not None
    with torch.no_grad():
        model.gate_delta[3, 0, 1] = bad

    def read(*arguments: Any) -> HeadReadings:
        readings = script.read(*arguments)
        return HeadReadings(readings.entropy, {place: torch.tensor(bad) for place in readings.updates})

    monkeypatch.setattr(entropy_module, "read_heads", read)
    growth = grower.step(tokens_of(model.plan, 0))
    (event,) = said(growth.events)
    assert growth.observation is not None
    for facts in (strict(event), strict(growth.observation)):
        (loop,) = facts["loops"]
        assert loop["gates"] == [[pytest.approx(0.95), None]]
        assert loop["update"] == [None]


# --- strengths in the model ------------------------------------------------------------------------------------------


def test_sgt_oracle_19_ramps_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Sgt(total_steps=200, passes=2, start=20, window=20, max_layers=1)
    model = grown_model(policy)
    grower, _ = scripted(monkeypatch, model, policy, lambda done: spread({3: 0.8}, FOUR))
    found: dict[int, Tensor] = {}
    for done in range(1, 81):
        grower.step(tokens_of(model.plan, 0))
        assert model.gates is not None
        found[done] = model.gates[3].detach().clone()
    for done, first, second in ((20, 0.0, None), (30, 0.5, None), (40, 1.0, 0.0), (50, 1.0, 0.5), (60, 1.0, 1.0)):
        torch.testing.assert_close(found[done][0], torch.full((2,), first), rtol=0, atol=1e-6)
        if second is not None:
            torch.testing.assert_close(found[done][1], torch.full((2,), second), rtol=0, atol=1e-6)
        else:
            assert not found[done][1].any()  # a pass that is not there yet
    assert bool((found[80] == 1).all())
    assert model.gate_ramp is not None
    assert not model.gate_ramp[:3].any()  # of layers that have no loop


def test_paper_birth_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads, then the chosen ones; two structural changes for one decision."""
    policy = Sgt(total_steps=200, start=20, window=10, max_layers=1, birth="paper")
    model = grown_model(policy)
    grower, _ = scripted(monkeypatch, model, policy, lambda done: spread({3: 0.8}, FOUR))
    changed, strengths, events = [], {}, []
    for done in range(1, 60):
        growth = grower.step(tokens_of(model.plan, 0))
        events += [(done, event) for event in said(growth.events)]
        if growth.changed:
            changed.append((done, model.plan.loops))
        if 3 in model.plan.loops and model.gates is not None:
            strengths[done] = model.gates[3, 0, : len(model.plan.loops[3].heads)].tolist()
    assert changed == [(20, {3: Loop((0, 1, 2, 3), 1, fading=(0, 1))}), (30, {3: Loop((2, 3), 1)})]
    for done in range(20, 30):
        rest = 1 - (done - 20) / 10
        assert strengths[done] == pytest.approx([rest, rest, 1.0, 1.0], abs=1e-6)
    assert all(strengths[done] == [1.0, 1.0] for done in range(30, 60))
    assert [(done, event["action"], event["layer"]) for done, event in events] == [
        (20, "add", 3), (30, "fix", None), (30, "fade", 3),
    ]  # fmt: skip
    assert events[0][1]["birth"] == "paper"
    assert events[0][1]["heads"] == [2, 3]  # those that will stay
    assert strict(events[-1][1]) == {
        "step": 30, "event": "growth", "version": 1, "policy": "sgt", "action": "fade", "layer": 3, "heads": [2, 3],
        "passes": 1, "shortlist": [], "rule": "a window has passed since the birth", "plan": model.plan.digest,
    }  # fmt: skip


def test_a_fade_that_ends_with_a_deeper_loop_is_told_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change of the structure is in one event."""
    policy = Sgt(total_steps=200, passes=2, start=20, window=10, max_layers=2, birth="paper")
    model = grown_model(policy)
    grower, _ = scripted(monkeypatch, model, policy, lambda done: spread(listed(3, 2), FOUR))
    found, changed = [], []
    for done in range(1, 80):
        growth = grower.step(tokens_of(model.plan, 0))
        found += [(done, event["action"], event["layer"]) for event in said(growth.events)]
        changed += [done] if growth.changed else []
    assert found == [(20, "add", 3), (30, "deepen", 3), (40, "add", 2), (50, "deepen", 2), (60, "fix", None)]
    assert changed == [20, 30, 40, 50]
    policy = Sgt(total_steps=200, start=20, window=10, max_layers=2, birth="paper")
    model = grown_model(policy)
    grower, _ = scripted(monkeypatch, model, policy, lambda done: spread(listed(3, 2), FOUR))
    found = []
    for done in range(1, 80):
        found += [
            (done, event["action"], event["layer"]) for event in said(grower.step(tokens_of(model.plan, 0)).events)
        ]
    assert found == [(20, "add", 3), (30, "add", 2), (30, "fade", 3), (40, "fix", None), (40, "fade", 2)]


# --- O20: births do not disturb --------------------------------------------------------------------------------------


class Trained(NamedTuple):
    losses: list[float]
    births: list[int]  # updates done


@cache
def chains(plan: Plan, seed: int) -> Tensor:
    """Rows (16, T + 1) of a Markov chain: soon learned, and from then on the loss is steady but for its noise."""
    table = torch.randn(plan.vocabulary, plan.vocabulary, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(plan.vocabulary, (16, 1), generator=generator)
    for _ in range(plan.context):
        following = torch.multinomial(table[rows[:, -1]], 1, generator=generator)
        rows = torch.cat((rows, following), dim=1)
    return rows


def train_tiny(policy: Sgt | None, steps: int) -> Trained:
    plan = tiny_plan(FOUR, width=32, context=24)
    model = Decoder(plan if policy is None else policy.prepare(plan))
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.0))
    grower = None if policy is None else Grower(model, optimizer, [policy])
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    losses, births = [], []
    for step in range(steps):
        rows = chains(plan, step)
        optimizer.zero_grad()
        loss = model(rows[:, :-1], rows[:, 1:]).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if grower is not None and grower.step(rows[:, :-1]).changed:
            births.append(step + 1)
    return Trained(losses, births)


def test_sgt_oracle_20_births_are_not_seen_in_the_loss() -> None:
    """Equal to the ungrown twin up to the first loss after a birth; then no jump beyond 3 sigma of the noise."""
    steps, birth, window = 67, 40, 25
    grown = train_tiny(Sgt(total_steps=steps, start=birth, window=window, max_layers=1), steps)
    twin = train_tiny(None, steps)
    assert grown.births == [birth]
    assert grown.losses[: birth + 1] == twin.losses[: birth + 1]  # at index `birth` is the first loss with the loop
    assert grown.losses[birth + 1] != twin.losses[birth + 1]  # by then the gates have moved
    losses = torch.tensor(grown.losses)
    before, after = losses[birth - window : birth], losses[birth : birth + window]
    sigma = float(before.diff().std())
    assert float(after.max() - before.mean()) < 3 * sigma
    assert float((after - torch.tensor(twin.losses[birth : birth + window])).max()) < 3 * sigma


# --- O16: compilation ------------------------------------------------------------------------------------------------


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The compilers of the regions that a test makes, in the order enter, block, leave; each counts its graphs."""
    made: list[Any] = []
    compile_ = torch.compile

    def counted(function: Callable[..., Any], **options: Any) -> Any:
        made.append(CompileCounterWithBackend("aot_eager"))
        return compile_(function, backend=made[-1], **options)

    monkeypatch.setattr(torch, "compile", counted)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):  # restored at the end
        yield made
    torch._dynamo.reset()


def grow_compiled(
    monkeypatch: pytest.MonkeyPatch, policy: Sgt, heads: list[int], regions: Regions, note: Callable[[bool], None]
) -> Decoder:
    """A whole growth run with forward and backward through the regions; after every step `note` is told of it."""
    model = grown_model(policy, heads)
    optimizer = make_optimizer(model, OptimizerConfig())
    growing = {layer: 0.9 - 0.1 * layer for layer in range(1, len(heads))}
    grower, _ = scripted(monkeypatch, model, policy, lambda done: spread(growing, heads))
    changed = False
    for step in range(policy.total_steps):
        tokens = tokens_of(model.plan, step)
        optimizer.zero_grad()
        model(tokens, tokens.roll(-1, dims=1), regions).loss.backward()
        optimizer.step()
        note(changed)
        changed = grower.step(tokens).changed
    assert phase(grower) == "fixed"
    return model


@pytest.mark.parametrize(
    ("heads", "kinds"), [([4, 4, 4, 4, 4], 1), pytest.param([2, 4, 4, 2, 4], 2, marks=pytest.mark.slow)]
)
def test_sgt_oracle_16_a_growth_run_needs_few_graphs(
    heads: list[int], kinds: int, compilers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, window = 3, 2
    policy = Sgt(total_steps=24, start=2, window=window, passes=passes, shortlist=4)
    graphs: list[int] = []
    changes: list[bool] = []

    def note(changed: bool) -> None:
        graphs.append(compilers[1].frame_count)
        changes.append(changed)

    regions = compiled_regions()
    model = grow_compiled(monkeypatch, policy, heads, regions, note)
    assert sum(loop.passes for loop in model.plan.loops.values()) == 3 * passes == sum(changes)
    enter, block, leave = compilers
    assert (enter.frame_count, leave.frame_count) == (1, 1)
    assert kinds + passes <= block.frame_count <= kinds * (passes + 1)
    for step in range(1, len(graphs)):  # ramps change at every step, but only the first births of a depth compile
        assert changes[step] or graphs[step] == graphs[step - 1]
    assert model.gate_ramp is not None
    for seed in range(2):  # nor do other heads, and the result is that of plain Python
        for layer, loop in model.plan.loops.items():
            other = (seed, (seed + 1) % heads[layer])
            apply_edit(model, None, LoopHeads(layer, other, loop.passes))
        model.gate_ramp.copy_(torch.rand(model.gate_ramp.shape, generator=torch.Generator().manual_seed(seed)))
        tokens = tokens_of(model.plan, seed)
        compiled = model(tokens, tokens.roll(-1, dims=1), regions).loss
        compiled.backward()
        torch.testing.assert_close(compiled, model(tokens, tokens.roll(-1, dims=1)).loss, rtol=0, atol=1e-5)
    assert block.frame_count == graphs[-1]


def test_sgt_oracle_16_too_many_graphs_are_an_error(compilers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No silent return to plain Python."""
    policy = Sgt(total_steps=12, start=2, window=2, passes=2, max_layers=1)
    regions = compiled_regions()
    steps: list[bool] = []
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit),
    ):
        grow_compiled(monkeypatch, policy, FOUR, regions, steps.append)
    assert len(steps) == 2  # up to the first birth, one kind of blocks
    assert compilers[1].frame_count == 1


@pytest.mark.parametrize("mixed", [False, True])
def test_the_first_block_shares_its_graph_with_the_others(compilers: list[Any], mixed: bool) -> None:
    """The branch that it is given is empty, but of the type that later ones have, and with a gradient as they have."""
    model = grown_model(Sgt(total_steps=12, start=2, window=2))
    tokens = tokens_of(model.plan, 0)
    regions = compiled_regions()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        compiled = model(tokens, tokens.roll(-1, dims=1), regions).loss
        plain = model(tokens, tokens.roll(-1, dims=1)).loss
    compiled.backward()
    assert compilers[1].frame_count == 1
    torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-4 if mixed else 1e-5)
    with torch.no_grad():
        model(tokens, tokens.roll(-1, dims=1), regions)
    assert compilers[1].frame_count == 2  # without gradients there is another one, again for all blocks


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"passes": 2}, {"passes": 2, "birth": "paper"}])
def test_a_grower_goes_on_exactly_from_its_state_as_json(changes: dict[str, Any]) -> None:
    """From every update of a run, on real entropies: same events, observations, structure and strengths."""
    policy = Sgt(total_steps=40, start=8, window=6, max_layers=2, **changes)
    model = grown_model(policy)
    grower = Grower(model, None, [Observe(5), policy])
    saved = []
    whole = []
    for step in range(40):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        saved.append((json.dumps(grower.state_dict()), model.plan, weights))
        whole.append(grower.step(tokens_of(model.plan, step)))
    assert phase(grower) == "fixed"
    for first in (0, 3, 7, 8, 9, 11, 14, 15, 20, 26, 39):
        text, plan, weights = saved[first]
        copy = Decoder(plan, seed=1)
        copy.load_state_dict(weights)
        again = Grower(copy, None, [Observe(5), policy])
        again.load_state_dict(json.loads(text))
        assert json.dumps(again.state_dict()) == text
        assert [again.step(tokens_of(plan, step)) for step in range(first, 40)] == whole[first:]
        assert copy.plan == model.plan
        torch.testing.assert_close(copy.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_state_brings_its_structure_to_a_model_that_has_not_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Sgt(total_steps=100, start=10, window=10)
    model = grown_model(policy)
    grower, _ = scripted(monkeypatch, model, policy, lambda done: spread(listed(3, 2, 1), FOUR))
    for _ in range(24):
        grower.step(tokens_of(model.plan, 0))
    fresh = grown_model(policy)
    fresh.load_state_dict(model.state_dict())
    Grower(fresh, None, [policy]).load_state_dict(json.loads(json.dumps(grower.state_dict())))
    assert fresh.plan == model.plan
    assert fresh.gates is not None
    torch.testing.assert_close(fresh.gates, model.gates, rtol=0, atol=0)
    assert fresh.gates[2, 0].tolist() == pytest.approx([0.4, 0.4])


def test_an_earlier_state_takes_back_what_has_grown_since(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Sgt(total_steps=100, start=10, window=10)
    model = grown_model(policy)
    grower, _ = scripted(monkeypatch, model, policy, lambda done: spread(listed(3, 2, 1), FOUR))
    states, plans = [], []
    for _ in range(24):
        states.append(json.dumps(grower.state_dict()))
        plans.append(model.plan)
        grower.step(tokens_of(model.plan, 0))
    assert [len(plan.loops) for plan in plans] == [0] * 10 + [1] * 10 + [2] * 4
    for step in (15, 5, 22):
        grower.load_state_dict(json.loads(states[step]))
        assert model.plan == plans[step]
        assert json.dumps(grower.state_dict()) == states[step]


@pytest.mark.parametrize(
    ("name", "value"),
    [("window", 12), ("passes", 2), ("excluded", (0, 1)), ("birth", "paper"), ("total_steps", 120), ("seed", 3)],
)
def test_a_state_belongs_to_its_policy(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"total_steps": 100, "start": 10, "window": 10}
    policy, other = Sgt(**settings), Sgt(**{**settings, name: value})
    model = grown_model(policy)
    grower, _ = scripted(monkeypatch, model, policy, lambda done: spread(listed(3, 2, 1), FOUR))
    for _ in range(12):
        grower.step(tokens_of(model.plan, 0))
    state = json.loads(json.dumps(grower.state_dict()))
    rule = state["policies"]["sgt"]["settings"]
    assert rule["excluded"] == [0]
    assert rule.keys() == {entry.name for entry in fields(Sgt)}
    fresh = grown_model(other)
    again = Grower(fresh, None, [other])
    was, is_ = rule[name], json.loads(json.dumps(value))
    with pytest.raises(InputError) as error:
        again.load_state_dict(state)
    assert str(error.value) == f"sgt.{name} = {is_!r}: must be {was!r}, as in the state"
    assert (again.done, fresh.plan.loops) == (0, {})  # nothing has been taken from it


def test_a_state_of_growth_is_nothing_for_one_that_observes() -> None:
    policy = Sgt(total_steps=100)
    model = grown_model(policy)
    observer = Grower(model, None, [Observe(5)])
    with pytest.raises(InputError, match=r"policies = \['observe'\]: must be \['sgt'\], as in the state"):
        observer.load_state_dict(Grower(model, None, [policy]).state_dict())
    with pytest.raises(InputError, match=r"policies = \['sgt'\]: must be \['observe'\], as in the state"):
        Grower(model, None, [policy]).load_state_dict(observer.state_dict())


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_model_without_the_gates_of_the_policy_is_refused() -> None:
    policy = Sgt(total_steps=100)
    for plan in (tiny_plan(FOUR), Sgt(total_steps=100, heads_per_layer=1).prepare(tiny_plan(FOUR))):
        with pytest.raises(InputError, match=r"model\.plan\.gates = .*: build the model from policy\.prepare\(plan\)"):
            Grower(Decoder(plan), None, [policy])


def test_a_model_without_entropies_is_refused_before_it_is_measured() -> None:
    plan = replace(tiny_plan(FOUR), classes=3)
    policy = Sgt(total_steps=100)
    message = "model = 'Classifier': must be a Decoder"
    with pytest.raises(InputError, match=message):
        Grower(Classifier(policy.prepare(plan)), None, [policy])
    with pytest.raises(InputError, match=message):
        Grower(Classifier(plan), None, [Observe(5)])
    Grower(Classifier(plan), None, [Incrt()])  # needs no entropy


@pytest.mark.parametrize("name", ["done", "plan", "policies", "gauges"])
def test_a_state_with_a_part_missing_is_refused_by_name(name: str) -> None:
    policy = Sgt(total_steps=100)
    grower = Grower(grown_model(policy), None, [policy])
    whole = grower.state_dict()
    with pytest.raises(InputError, match=rf"state\.{name} = None: is missing"):
        grower.load_state_dict({key: value for key, value in whole.items() if key != name})
    with pytest.raises(InputError, match=r"state\.version = None: is missing"):
        grower.load_state_dict({})


def test_an_optimizer_without_the_gates_is_refused() -> None:
    policy = Sgt(total_steps=100)
    model = grown_model(policy)
    rest = [p for p in model.parameters() if p is not model.gate_delta]
    with pytest.raises(InputError, match="optimizer = 'gate_delta missing'"):
        Grower(model, torch.optim.AdamW(rest), [policy])
    Grower(model, torch.optim.AdamW(model.parameters()), [policy])
    untrained = Sgt(total_steps=100, train_gates=False)
    model = grown_model(untrained)
    Grower(model, torch.optim.AdamW(model.parameters()), [untrained])


def test_an_optimizer_without_the_attention_is_refused_where_heads_grow() -> None:
    model = Decoder(tiny_plan([2, 2]))
    rest = [p for p in model.parameters() if p is not model.stack[1].attention.out.weight]
    with pytest.raises(InputError, match="optimizer = 'attention of layer 1 missing': must hold all parameters"):
        Grower(model, torch.optim.AdamW(rest), [Incrt()])
    Grower(model, torch.optim.AdamW(model.parameters()), [Incrt()])
    Grower(model, None, [Incrt()])  # then the caller sees to it


def test_a_state_of_heads_is_refused_by_what_it_lacks() -> None:
    grower = Grower(Decoder(tiny_plan([2, 2])), None, [Incrt()])
    state, tensors = json.loads(json.dumps(grower.state_dict())), grower.tensors()
    with pytest.raises(InputError, match=r"tensors = 'gauges\.Demand\(.*\.sums missing': must be all that"):
        grower.load_state_dict(state)
    with pytest.raises(InputError, match=r"policies = \['incrt'\]: must be \[\], as in the state"):
        grower.load_state_dict({**state, "policies": {}}, tensors)
    with pytest.raises(InputError, match=r"state\.gauges = \[\]: must have Demand\("):
        grower.load_state_dict({**state, "gauges": {}}, tensors)
    other = Grower(Decoder(tiny_plan([2, 1])), None, [Incrt()])
    with pytest.raises(InputError, match=r"model\.plan\.heads = \(2, 1\): must be \(2, 2\), as in the state"):
        other.load_state_dict(state, tensors)
    grower.load_state_dict(state, tensors)


def test_a_state_of_a_later_version_is_refused() -> None:
    grower = Grower(Decoder(tiny_plan([2, 2])), None, [])
    with pytest.raises(InputError, match=r"state\.version = 2: must be 1"):
        grower.load_state_dict({**grower.state_dict(), "version": 2})
