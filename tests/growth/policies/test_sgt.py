"""The SGT policy: the published controller's vectors, its invariants, and its switches (sgt.md 1, 2, 5.2 and 6)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from growth.helpers import VECTORS, Action, Controller, Entropies, adds, decisions, listed, spread, tiny_plan, tokens_of
from meristem.errors import InputError
from meristem.gauges.entropy import EntropyReading
from meristem.gauges.gauge import Gauge
from meristem.growth import AddBlock, AddHead, Change, Grower, LoopHeads, Policy, RemoveHead, Sgt, SgtState
from meristem.growth.apply import apply_edit
from meristem.growth.edits import Edit
from meristem.growth.ema import Ema
from meristem.growth.head_surgery import newborn_head
from meristem.growth.looping import looped
from meristem.growth.policies.sgt import FORGOTTEN, Grown
from meristem.growth.policy import Decision, Readings
from meristem.model import Decoder
from meristem.plan import Gates, Loop, Plan
from meristem.training.growth_from_config import steady_layers

TWELVE = [4] * 12


def vector_policy(**changes: Any) -> Sgt:
    return Sgt(**{"total_steps": 5000, "start": 250, "window": 250, **changes})


# --- O14: vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VECTORS)
def test_sgt_oracle_14_vectors(name: str) -> None:
    levels, passes, expected = VECTORS[name]
    taken = decisions(vector_policy(passes=passes), lambda done: spread(levels(done), TWELVE))
    assert [action for action, _ in taken] == expected
    final = taken[-1][1]
    assert final.phase == "fixed"
    assert [grown.layer for grown in final.grown] == [layer for _, what, layer in expected if what == "add"]
    for grown in final.grown:
        assert grown.births == tuple(a.done for a in expected if a.layer == grown.layer)
        assert grown.heads == (2, 3)  # those of highest entropy


# --- O15: invariants, and the controller of the pseudo-code ----------------------------------------------------------

# Few values, exact in binary, so that there are many ties.
LEVELS = st.integers(0, 8).map(lambda n: n / 8)


@st.composite
def traces(draw: Any) -> tuple[list[int], list[Entropies]]:
    """Head counts of some layers, and their entropies decision by decision."""
    heads = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    layer = st.tuples(*(st.lists(LEVELS, min_size=count, max_size=count) for count in heads)).map(list)
    return heads, draw(st.lists(layer, min_size=1, max_size=14))


@st.composite
def cases(draw: Any) -> tuple[Sgt, list[int], list[Entropies]]:
    """A policy that fits some layers of a trace, in a run that is long enough for all it might do."""
    heads, trace = draw(traces())
    excluded = draw(st.sets(st.integers(0, len(heads) - 1), max_size=len(heads) - 1))
    hints = get_type_hints(Sgt)
    order, choice, birth = (draw(st.sampled_from(get_args(hints[name]))) for name in ("order", "heads", "birth"))
    passes, layers = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    start, window = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    largest = max(count for index, count in enumerate(heads) if index not in excluded)
    policy = Sgt(
        total_steps=start + window * (passes * layers + 1) + 1, passes=passes, max_layers=layers,
        heads_per_layer=draw(st.integers(1, largest)), shortlist=draw(st.integers(1, 5)),
        excluded=tuple(sorted(excluded)), start=start, window=window, order=order, heads=choice,
        birth="gate" if choice == "all" else birth, seed=draw(st.integers(0, 5)),
    )  # fmt: skip
    return policy, heads, trace


def at_decision(policy: Sgt, trace: Sequence[Entropies], done: int) -> Entropies:
    """The entropies of the decision that falls after so many updates; those in between must not matter."""
    number, rest = divmod(done - policy.first_decision, policy.window_steps)
    assert rest == 0, "a decision within a window"
    return trace[number % len(trace)]


@settings(max_examples=150, deadline=None)
@given(cases())
def test_sgt_oracle_15_invariants(case: tuple[Sgt, list[int], list[Entropies]]) -> None:
    policy, heads, trace = case
    taken = decisions(policy, lambda done: at_decision(policy, trace, done))
    before = SgtState()
    for (_, what, layer), state in taken:
        assert [g.heads for g in state.grown[: len(before.grown)]] == [g.heads for g in before.grown]
        layers = [g.layer for g in state.grown]
        assert layers == sorted(set(layers), reverse=policy.order == "deep_first")
        assert not set(layers) & set(policy.excluded)
        assert len(layers) <= policy.max_layers
        for grown in state.grown:
            assert 1 <= len(grown.births) <= policy.passes
            size = heads[grown.layer] if policy.heads == "all" else policy.heads_per_layer
            assert len(set(grown.heads)) == len(grown.heads) == size
            assert set(grown.heads) <= set(range(heads[grown.layer]))
        changed = [g.layer for g in state.grown if g not in before.grown]
        assert changed == ([layer] if what in ("add", "deepen") else [])
        saved = replace(state, average=Ema(policy.beta, (0.25, 0.7), 3))
        assert policy.load(json.loads(json.dumps(policy.dump(saved)))) == saved
        before = state
    times = [action.done for action, _ in taken]
    assert times == [policy.first_decision + number * policy.window_steps for number in range(len(times))]
    births = sorted(birth for grown in before.grown for birth in grown.births)
    assert births == times[:-1]
    assert before.phase == "fixed"
    assert [action.what for action, _ in taken].count("fix") == 1


@settings(max_examples=150, deadline=None)
@given(cases(), st.sets(st.integers(0, 8), max_size=3), st.floats(0, 1))
def test_sgt_oracle_15_equals_the_controller_of_the_pseudo_code(
    case: tuple[Sgt, list[int], list[Entropies]], broken: set[int], part: float
) -> None:
    """In runs that are long enough, where windows are lost by entropies that are not finite, and in parts of them."""
    given_policy, _, trace = case
    fields = ("passes", "max_layers", "heads_per_layer", "shortlist", "excluded", "start", "window")
    enough = given_policy.total_steps + given_policy.window_steps * len(broken)
    total = max(given_policy.first_decision + given_policy.window_steps, round(part * enough))
    policy = Sgt(total_steps=total, **{name: getattr(given_policy, name) for name in fields})

    def entropies(done: int) -> Entropies:
        number = (done - policy.first_decision) // policy.window_steps
        found = [list(layer) for layer in trace[number % len(trace)]]
        if number in broken:
            found[number % len(found)][0] = (math.nan, math.inf, -math.inf)[number % 3]
        return found

    reference = Controller(
        policy.first_decision, policy.window_steps, policy.passes, policy.max_layers, policy.shortlist,
        policy.excluded, policy.heads_per_layer, total,
    )  # fmt: skip
    expected = [reference.step(done, entropies(done)) for done in range(1, policy.total_steps)]
    taken = decisions(policy, entropies)
    assert [action for action, _ in taken] == [action for action in expected if action is not None]
    final = taken[-1][1]
    assert final.phase == reference.phase
    assert final.phase == "fixed" or part < 1
    assert {g.layer: len(g.births) for g in final.grown} == reference.depth
    assert {g.layer: list(g.heads) for g in final.grown} == reference.heads


def test_a_tie_goes_to_the_deeper_layer() -> None:
    """On the shortlist (D13): of five layers that are alike, the deepest three, whatever the order of growth."""
    alike = spread({2: 0.5, 3: 0.5, 5: 0.5, 6: 0.5, 8: 0.5}, TWELVE)
    first = vector_policy().judge(SgtState(), 250, alike)
    assert (first.layer, first.shortlist) == (8, (8, 6, 5))
    mirrored = vector_policy(order="shallow_first").judge(SgtState(), 250, alike)
    assert (mirrored.layer, mirrored.shortlist) == (5, (8, 6, 5))


def test_only_the_shortlist_may_grow() -> None:
    taken = decisions(vector_policy(shortlist=1, max_layers=11), lambda done: spread(listed(7, 4, 2), TWELVE))
    assert [action for action, _ in taken] == adds(7)
    taken = decisions(vector_policy(shortlist=11, max_layers=11), lambda done: spread({}, TWELVE))
    assert [action for action, _ in taken] == adds(*range(11, 0, -1))


def test_a_grown_layer_that_left_the_shortlist_may_deepen_when_it_is_back() -> None:
    levels = {250: listed(9, 3, 2), 500: listed(3, 2, 1), 750: listed(9, 3, 2)}
    taken = decisions(vector_policy(total_steps=1000, passes=2), lambda done: spread(levels[done], TWELVE))
    assert [action for action, _ in taken] == [Action(250, "add", 9), Action(500, "add", 3), Action(750, "deepen", 9)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_entropy_that_is_not_finite_waits_one_window(bad: float) -> None:
    """At the first decision and at a later one; nothing else of the state changes (D13)."""

    def entropies(done: int) -> Entropies:
        found = spread(listed(10, 7, 4), TWELVE)
        if done in (250, 750):
            found[3][1] = bad
        return found

    taken = decisions(vector_policy(max_layers=2), entropies)
    assert [action for action, _ in taken] == [
        Action(250, "wait"), Action(500, "add", 10), Action(750, "wait"), Action(1000, "add", 7), Action(1250, "fix"),
    ]  # fmt: skip
    assert taken[0][1] == SgtState("grow", 500)
    assert taken[2][1].grown == taken[1][1].grown
    waited = vector_policy().judge(SgtState(), 250, entropies(250))
    assert "not finite" in waited.rule
    assert waited.shortlist == ()


# --- switches --------------------------------------------------------------------------------------------------------


def test_shallow_first_is_the_mirror() -> None:
    policy = vector_policy(order="shallow_first")
    taken = decisions(policy, lambda done: spread(listed(10, 7, 4), TWELVE))
    assert [action for action, _ in taken] == adds(4, 7, 10)
    stuck = decisions(policy, lambda done: spread(listed(5, 8, 9) if done < 400 else listed(5, 3, 2), TWELVE))
    assert [action for action, _ in stuck] == adds(5)


@pytest.mark.parametrize(
    ("choice", "count", "expected"),
    [("high", 1, (1,)), ("high", 2, (1, 4)), ("low", 1, (3,)), ("low", 3, (0, 2, 3)), ("all", 1, (0, 1, 2, 3, 4))],
)
def test_heads_of_high_or_low_entropy_or_all(choice: Any, count: int, expected: tuple[int, ...]) -> None:
    policy = Sgt(total_steps=1000, heads=choice, heads_per_layer=count)
    assert policy.chosen_heads(3, [0.4, 0.9, 0.3, 0.1, 0.5]) == expected


def test_random_heads_follow_seed_and_layer_only() -> None:
    def drawn(seed: int, layer: int, entropies: Sequence[float]) -> tuple[int, ...]:
        return Sgt(total_steps=1000, heads="random", heads_per_layer=3, seed=seed).chosen_heads(layer, entropies)

    zeros, ramp = [0.0] * 12, [n / 12 for n in range(12)]
    choices = {(seed, layer): drawn(seed, layer, zeros) for seed in range(6) for layer in range(6)}
    for (seed, layer), heads in choices.items():
        assert drawn(seed, layer, ramp) == heads
        assert len(set(heads)) == 3
        assert set(heads) <= set(range(12))
    assert len({choices[seed, 0] for seed in range(6)}) > 3
    assert len({choices[0, layer] for layer in range(6)}) > 3


@pytest.mark.parametrize(
    ("changes", "gates"),
    [
        ({}, Gates(1, 2, trained=True)),
        ({"passes": 3, "heads_per_layer": 3}, Gates(3, 3, trained=True)),
        ({"train_gates": False}, Gates(1, 2, trained=False)),
        ({"heads": "all", "passes": 2}, Gates(2, 8, trained=True)),
        ({"birth": "paper"}, Gates(1, 8, trained=False)),
        ({"heads": "random"}, Gates(1, 2, trained=True)),
    ],
)
def test_the_prepared_plan_has_room_for_what_will_grow(changes: dict[str, Any], gates: Gates) -> None:
    plan = tiny_plan([2, 4, 8])
    prepared = Sgt(total_steps=1000, **changes).prepare(plan)
    assert prepared.gates == gates
    assert (prepared.layers, plan.gates) == (plan.layers, None)


def test_a_static_structure_has_all_passes_from_the_start() -> None:
    """As many as each loop has, whatever the policy would give, and gates for the largest."""
    loops = {2: Loop((0, 3), 3), 1: Loop((1,), 2)}
    plan = looped(tiny_plan([2, 4, 4]), loops, trained=True)
    assert plan.loops == {1: Loop((1,), 2), 2: Loop((0, 3), 3)}
    assert plan.gates == Gates(3, 2, trained=True)
    assert looped(tiny_plan([2, 4, 4]), loops, trained=False).gates == Gates(3, 2, trained=False)
    with pytest.raises(InputError, match=r"loop\.heads = \(0, 3\): must be distinct heads out of 0\.\.1"):
        looped(tiny_plan([4, 4, 2]), loops, trained=True)
    with pytest.raises(InputError, match=r"layer = 2: must be in 0\.\.1"):
        looped(tiny_plan([4, 4]), loops, trained=True)


def test_layers_with_too_few_heads_never_grow() -> None:
    """A Prism plan: its first layers have the widest heads, and one or two of them."""
    plan = tiny_plan([1, 1, 2, 4, 4])
    policy = Sgt(total_steps=1000, start=100, window=50, heads_per_layer=3, excluded=(), max_layers=5, shortlist=2)
    assert policy.prepare(plan).gates == Gates(1, 3, trained=True)
    levels = {0: 0.9, 1: 0.9, 2: 0.8, 4: 0.3, 3: 0.2}  # those that cannot grow would lead the list
    taken = decisions(policy, lambda done: spread(levels, plan.heads))
    assert [action for action, _ in taken] == [Action(100, "add", 4), Action(150, "add", 3), Action(200, "fix")]
    assert policy.judge(SgtState(), 100, spread(levels, plan.heads)).shortlist == (4, 3)
    assert [g.heads for g in taken[-1][1].grown] == [(1, 2, 3), (1, 2, 3)]
    assert steady_layers(spread(levels, plan.heads), policy) == (4, 3)
    assert [policy.has_enough(heads) for heads in plan.heads] == [False, False, False, True, True]
    everyone = Sgt(total_steps=1000, heads="all", heads_per_layer=3, excluded=(), shortlist=1)
    assert everyone.judge(SgtState(), 50, spread(levels, plan.heads)).layer == 1  # of one head, but that is all


@pytest.mark.parametrize("choice", ["high", "low", "random"])
def test_heads_that_a_layer_has_not_got_are_refused_by_name(choice: Any) -> None:
    policy = Sgt(total_steps=1000, heads=choice, heads_per_layer=3)
    with pytest.raises(InputError, match=r"heads_per_layer = 3: must be at most 2, the heads of layer 7"):
        policy.chosen_heads(7, [0.5, 0.25])


# --- when (D5, D7) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "start", "window", "expected"),
    [
        (5000, 0.05, 0.05, (250, 250)),  # parts of the run
        (1000, 0.05, 0.05, (50, 50)),
        (400, 0.05, 0.05, (20, 50)),  # a window that is a part has at least 50 updates
        (400, 0.25, 0.25, (100, 100)),
        (51, 0.01, 0.05, (1, 50)),
        (5000, 250, 250, (250, 250)),  # updates
        (5000, 1, 1, (1, 1)),
        (400, 30, 8, (30, 8)),  # as many as one says, however few
        (400, 0.5, 12, (200, 12)),
        (400, 12, 0.5, (12, 200)),
    ],
)
def test_start_and_window_are_parts_of_the_run_or_updates(
    total: int, start: float, window: float, expected: tuple[int, int]
) -> None:
    policy = Sgt(total_steps=total, start=start, window=window)
    assert (policy.first_decision, policy.window_steps) == expected


@pytest.mark.parametrize(("passes", "end"), [(1, 0.2), (2, 0.35), (3, 0.5)])
def test_growth_ends_at_a_fifth_of_the_run_with_one_pass_and_at_half_of_it_with_three(passes: int, end: float) -> None:
    taken = decisions(Sgt(total_steps=4000, passes=passes), lambda done: spread(listed(10, 7, 4), TWELVE))
    assert taken[-1][0] == Action(round(end * 4000), "fix")


def test_a_decision_that_the_run_does_not_reach_is_none() -> None:
    policy = Sgt(total_steps=1000, start=500, window=500)
    state = SgtState()
    assert policy.next_decision(state) == 500
    state = policy.judge(state, 500, spread({}, TWELVE)).state
    assert (state.phase, state.window_end) == ("grow", 1000)
    assert policy.next_decision(state) is None  # nothing is trained after it
    assert not policy.probes(state, 999)
    assert not policy.decides(state, 1000)


def test_what_could_not_become_strong_within_the_run_is_not_born() -> None:
    """A pass has settled a window after its birth: with the last update at the latest."""
    entropies = spread(listed(10, 7, 4), TWELVE)
    taken = decisions(vector_policy(total_steps=750, passes=2), lambda done: entropies)
    assert [action for action, _ in taken] == [Action(250, "add", 10), Action(500, "deepen", 10)]
    taken = decisions(vector_policy(total_steps=749, passes=2), lambda done: entropies)
    assert [action for action, _ in taken] == [Action(250, "add", 10), Action(500, "fix")]
    late = vector_policy(total_steps=749).judge(SgtState("grow", 500), 500, entropies)
    assert late.rule == "a new pass would not have settled before the end of the run"
    assert late.state == SgtState("fixed", 500)


def test_entropy_is_wanted_in_the_last_updates_before_a_decision_only() -> None:
    policy = Sgt(total_steps=1000, start=100, window=50)
    state = SgtState()
    assert policy.probed_steps == 16
    assert [done for done in range(1, 101) if policy.probes(state, done)] == list(range(85, 101))
    state = policy.judge(state, 100, spread({}, TWELVE)).state
    assert [done for done in range(101, 151) if policy.probes(state, done)] == list(range(135, 151))
    assert not any(policy.probes(SgtState("fixed", 150), done) for done in range(101, 1000))
    close = Sgt(total_steps=100, start=5, window=3)
    assert [done for done in range(1, 6) if close.probes(SgtState(), done)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("beta", "steps"), [(0.0, 1), (1e-9, 1), (0.1, 5), (0.25, 8), (0.5, 16), (0.75, 39), (0.9, 106), (0.99, 1104)]
)
def test_entropy_is_measured_as_long_as_the_average_remembers(beta: float, steps: int) -> None:
    """What is older would have a weight of 2^-16 at most."""
    policy = Sgt(total_steps=10_000, start=2000, beta=beta)
    assert policy.probed_steps == steps
    assert beta**steps <= FORGOTTEN * (1 + 1e-9)
    assert steps == 1 or beta ** (steps - 1) > FORGOTTEN
    assert [done for done in (2000 - steps, 2001 - steps, 2000) if policy.probes(SgtState(), done)] == [
        2001 - steps,
        2000,
    ]


# --- strengths -------------------------------------------------------------------------------------------------------


def test_sgt_oracle_19_ramps() -> None:
    """From 0 at a pass's own birth, linearly, to 1 a window later, for all its heads."""
    policy = Sgt(total_steps=1000, passes=2, start=100, window=40)
    plan = policy.prepare(tiny_plan([4, 4, 4]))
    state = SgtState("grow", 180, (Grown(2, (0, 3), (100, 140)), Grown(1, (1, 2), (180,))))
    expected: dict[int, dict[int, tuple[float, ...]]] = {
        140: {2: (1, 0)}, 141: {2: (1, 0.025)}, 160: {2: (1, 0.5)}, 180: {2: (1, 1), 1: (0,)},
        200: {2: (1, 1), 1: (0.5,)}, 220: {2: (1, 1), 1: (1,)}, 999: {2: (1, 1), 1: (1,)},
    }  # fmt: skip
    for done, layers in expected.items():
        born = SgtState("grow", 180, state.grown[: len(layers)])
        found = policy.ramps(plan, born, done)
        assert found == {
            layer: [pytest.approx([strength] * 2, abs=1e-6) for strength in strengths]
            for layer, strengths in layers.items()
        }
    assert [done for done in (100, 140, 179, 220, 221) if policy.is_ramping(state, done)] == [100, 140, 179, 220]
    assert not policy.is_ramping(SgtState(), 100)


def test_paper_birth_runs_all_heads_and_lets_those_not_chosen_fade() -> None:
    policy = Sgt(total_steps=1000, passes=2, start=100, window=40, birth="paper")
    plan = policy.prepare(tiny_plan([4, 4, 4]))
    born = SgtState("grow", 140, (Grown(2, (0, 3), (100,), (1, 2)),))
    assert policy.edits(plan, born, 100) == [LoopHeads(2, (0, 1, 2, 3), 1, fading=(1, 2))]
    for age, rest in ((0, 1.0), (1, 0.975), (20, 0.5), (39, 0.025)):
        assert policy.ramps(plan, born, 100 + age)[2] == [pytest.approx([1.0, rest, rest, 1.0], abs=1e-6)]
        assert policy.edits(plan, born, 100 + age) == [LoopHeads(2, (0, 1, 2, 3), 1, fading=(1, 2))]
    assert policy.edits(plan, born, 140) == [LoopHeads(2, (0, 3), 1)]
    assert policy.ramps(plan, born, 140)[2] == [[1.0, 1.0]]
    deeper = SgtState(
        "grow", 180, (Grown(2, (0, 3), (100, 140), (1, 2)),)
    )  # a later pass has the chosen heads only, at once
    assert policy.edits(plan, deeper, 140) == [LoopHeads(2, (0, 3), 2)]
    assert policy.ramps(plan, deeper, 140)[2] == [[1.0, 1.0], [1.0, 1.0]]


def test_dropping_the_heads_that_have_faded_changes_nothing() -> None:
    policy = Sgt(total_steps=1000, start=100, window=40, birth="paper")
    born = SgtState("grow", 140, (Grown(2, (0, 3), (100,), (1, 2)),))
    model = Decoder(policy.prepare(tiny_plan([4, 4, 4])))
    tokens = tokens_of(model.plan, 0)
    assert model.gate_ramp is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)  # attention that is far from an average
        vanilla = model(tokens).logits
        for edit in policy.edits(model.plan, born, 139):
            apply_edit(model, None, edit)
        model.gate_ramp[2, 0] = torch.tensor([1.0, 0.0, 0.0, 1.0])  # where the fading leads
        faded = model(tokens).logits
        for edit in policy.edits(model.plan, born, 140):
            apply_edit(model, None, edit)
        model.gate_ramp.fill_(1.0)
        dropped = model(tokens).logits
    assert model.plan.loops == {2: Loop((0, 3), 1)}
    torch.testing.assert_close(dropped, faded, rtol=1e-5, atol=1e-5)
    assert float((dropped - vanilla).abs().max()) > 1e-2


def test_edits_are_what_is_missing() -> None:
    policy = Sgt(total_steps=1000, passes=2, start=100, window=40)
    state = SgtState("grow", 180, (Grown(2, (0, 3), (100, 140)), Grown(1, (1, 2), (180,))))
    plan = policy.prepare(tiny_plan([4, 4, 4]))
    assert policy.edits(plan, SgtState(), 100) == []
    edits = policy.edits(plan, state, 180)
    assert edits == [LoopHeads(2, (0, 3), 2), LoopHeads(1, (1, 2), 1)]
    for edit in edits:
        plan = edit.apply(plan)
    assert plan.loops == {1: Loop((1, 2), 1), 2: Loop((0, 3), 2)}
    assert policy.edits(plan, state, 200) == []


# --- the state as plain values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        SgtState(average=Ema(0.5)),
        SgtState("grow", 500, average=Ema(0.5, (0.1, 0.2), 3), not_before=7),
        SgtState("fixed", 1000, (Grown(10, (3, 7), (250, 500)), Grown(4, (0,), (750,))), Ema(0.5)),
    ],
)
def test_a_state_survives_json(state: SgtState) -> None:
    policy = vector_policy(beta=0.5)
    back = policy.load(json.loads(json.dumps(policy.dump(state))))
    assert back == state
    assert hash(back) == hash(state)  # tuples again, not lists


def test_entropies_follow_their_heads_and_what_is_born_counts_as_the_mean_of_its_layer() -> None:
    """So that however often heads come and go, a decision has its average."""
    policy, plan = vector_policy(beta=0.5), Plan.from_heads([2, 1], width=8)
    state = SgtState("grow", 500, average=Ema(0.5, (0.1, 0.3, 0.5), 9), heads=(2, 1))

    def after(edit: Edit) -> SgtState:
        return policy.moved(state, 495, edit.apply(plan), edit.moves(plan))

    birth = after(AddHead(0, newborn_head(plan.layers[0], 8, None, 0)))
    assert birth.average.value == pytest.approx((0.1, 0.3, 0.2, 0.5))
    assert birth.average.count == 9
    assert birth.heads == (3, 1)
    assert after(RemoveHead(0, 0)).average == Ema(0.5, (0.3, 0.5), 9)
    assert after(AddBlock(1, 0)).average == Ema(0.5, (0.1, 0.3, 0.1, 0.3, 0.5), 9)
    assert after(AddBlock(1)).average.value == pytest.approx((0.1, 0.3, 0.35, 0.35, 0.5))
    assert {policy.next_decision(after(edit)) for edit in (RemoveHead(0, 0), AddBlock(1, 0))} == {500}


def test_blocks_that_come_before_anything_was_measured_are_seen_for_as_long_as_any_decision_looks_back() -> None:
    policy, plan, edit = vector_policy(beta=0.5), Plan.uniform(layers=3, width=8, heads=2), AddBlock(3, 2)
    moved = policy.moved(SgtState(average=Ema(0.5)), 495, edit.apply(plan), edit.moves(plan))
    assert policy.next_decision(moved) == 495 + policy.probed_steps == 511


def test_a_copy_of_a_looped_layer_is_looped_and_keeps_its_strength() -> None:
    policy = Sgt(total_steps=100, start=10, window=5)
    model = Decoder(policy.prepare(tiny_plan([4, 4])))
    grower = Grower(model, None, [policy, Copies()])
    for _ in range(30):
        grower.step(tokens_of(model.plan, 0))
    assert model.plan.loops.keys() == {1, 2}
    assert model.gate_ramp is not None
    heads = len(model.plan.loops[1].heads)
    assert model.gate_ramp[1:, 0, :heads].tolist() == [[1.0] * heads] * 2
    assert [grown.layer for grown in grower.states["sgt"].grown] == [1, 2]


@dataclass(frozen=True)
class Copies(Policy):
    """Copies the last layer once."""

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return () if step == 20 else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        return Decision(state, (Change("copy", "it is time", (AddBlock(2, 1),)),))


@dataclass(frozen=True)
class HeadEvery(Policy):
    """Gives the last layer a head every few steps, without end."""

    def needs(self, state: Any, step: int, plan: Plan) -> tuple[Gauge, ...] | None:
        return () if step % 4 == 0 else None

    def decide(self, state: Any, step: int, plan: Plan, readings: Readings) -> Decision:
        head = newborn_head(plan.layers[-1], plan.width, None, seed=step)
        return Decision(state, (Change("birth", "it is time", (AddHead(len(plan.layers) - 1, head),), 1),))


@pytest.mark.parametrize("change", [{"birth": "paper"}, {"heads": "all"}, {}])
def test_heads_that_are_born_all_the_time_neither_stop_decisions_nor_break_loops(change: dict[str, Any]) -> None:
    """Newborns stay outside of a loop, also where all heads of its time are in it; there are gates for no more."""
    policy = Sgt(total_steps=100, passes=1, start=18, window=10, **change)
    model = Decoder(policy.prepare(tiny_plan([4, 4])))
    grower = Grower(model, None, [HeadEvery(), policy])
    events = [event for _ in range(60) for event in grower.step(tokens_of(model.plan, 0)).events]
    told = [(event.step, event.to_dict()["action"]) for event in events if event.policy == "sgt"]
    assert told[0] == (18, "add")
    assert "fix" in {action for _, action in told}
    assert model.plan.heads == (4, 19)
    assert len(model.plan.loops[1].heads) == (4 if change == {"heads": "all"} else 2)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        *((f, v, "at least 1") for f in ("total_steps", "passes", "max_layers") for v in (0, -1)),
        ("heads_per_layer", 0, "at least 1"),
        ("shortlist", 0, "at least 1"),
        ("shortlist", 1.5, "of type int"),
        ("order", "deep", "deep_first, shallow_first"),
        ("heads", "higher", "high, low, random, all"),
        ("birth", "gates", "gate, paper"),
        *((f, v, "above 0") for f in ("start", "window") for v in (0, -0.5, math.nan, math.inf, -math.inf)),
        *((f, v, "or whole updates") for f in ("start", "window") for v in (1.5, 1.0001, 20.5)),
        *(("beta", v, "from 0 to below 1") for v in (-0.1, 1, 1.5, math.nan)),
        *((f, v, "of type float") for f in ("start", "window", "beta") for v in ("a", True, None)),
        ("start", 1000, "leaves no time to grow: the first decision comes after 1,000 updates, a new pass needs 50"),
        ("start", 951, "to settle, and the run has 1000"),
        ("start", 2e6, "leaves no time to grow"),
        ("start", 0.9999, "leaves no time to grow"),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any, expected: str) -> None:
    with pytest.raises(InputError) as error:
        Sgt(**{"total_steps": 1000, field: value})
    assert error.value.field == field
    assert str(error.value).startswith(f"{field} = {value!r}: ")
    assert expected in str(error.value)


def test_a_static_structure_without_loops_is_refused() -> None:
    with pytest.raises(InputError, match=r"loops = \{\}: must have at least one layer"):
        looped(tiny_plan([4] * 4), {}, trained=True)


def test_paper_birth_of_all_heads_is_refused() -> None:
    with pytest.raises(InputError, match=r"birth = 'paper': .*heads = 'all' leaves none"):
        Sgt(total_steps=1000, birth="paper", heads="all")


def test_a_run_has_time_for_one_birth_at_least() -> None:
    """A first decision, and a window after it."""
    assert Sgt(total_steps=1000, start=950).first_decision == 950
    taken = decisions(Sgt(total_steps=1000, start=950), lambda done: spread(listed(10, 7, 4), TWELVE))
    assert [action for action, _ in taken] == [Action(950, "add", 10)]
    assert Sgt(total_steps=2, start=1, window=1).window_steps == 1
    for total, start, window in ((1000, 951, 50), (1000, 250, 751), (52, 0.05, 0.05), (1, 1, 1), (1000, 0.5, 0.6)):
        with pytest.raises(InputError, match=r"start = .*: leaves no time to grow: .*, and the run has \d+"):
            Sgt(total_steps=total, start=start, window=window)


def test_the_end_of_growth_says_which_rule_ended_it() -> None:
    policy, entropies = vector_policy(passes=2, max_layers=2), spread(listed(10, 7, 4), TWELVE)
    full = SgtState("grow", 1250, (Grown(10, (2, 3), (250, 500)), Grown(7, (2, 3), (750, 1000))))
    expected = "2 layers have grown, and none of these that is on the shortlist has fewer than 2 passes"
    assert policy.judge(full, 1250, entropies).rule == expected
    stuck = SgtState("grow", 750, (Grown(3, (2, 3), (250,)),))  # could go deeper, but is not on the shortlist
    expected = (
        "no layer of the shortlist is shallower than all grown ones, and none of these that is on the shortlist has "
        "fewer than 2 passes"
    )
    assert policy.judge(stuck, 750, entropies).rule == expected
    none = policy.judge(SgtState(), 250, [[0.5]] * 12)  # no layer has two heads, and nothing has grown
    assert (none.action, none.rule) == ("fix", "no layer of the shortlist is shallower than all grown ones")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads_per_layer": 9}, r"heads_per_layer = 9: must be at most 8, the heads of the layer that has most"),
        ({"heads_per_layer": 5, "excluded": (2,)}, r"heads_per_layer = 5: must be at most 4, .* that has most"),
        ({"excluded": (0, 1, 2)}, r"excluded = \(0, 1, 2\): leaves no layer to grow"),
        ({"excluded": (0, 3)}, r"^excluded = 3: must be in 0\.\.2"),
        ({"excluded": (-1,)}, r"^excluded = -1: must be in 0\.\.2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_plan_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sgt(total_steps=1000, **changes).prepare(tiny_plan([2, 4, 8]))


def test_one_layer_with_enough_heads_is_enough() -> None:
    plan = Plan.from_heads([2, 4, 8], width=16, vocabulary=23, context=8)
    for count in (3, 4, 8):
        gates = Sgt(total_steps=1000, heads_per_layer=count, excluded=()).prepare(plan).gates
        assert gates == Gates(1, count, trained=True)
    assert Sgt(total_steps=1000, heads_per_layer=99, heads="all").prepare(plan).gates == Gates(1, 8, trained=True)


def decided(policy: Sgt, state: SgtState, step: int, plan: Plan, entropies: Entropies) -> Decision:
    return policy.decide(state, step, plan, {policy.gauge: EntropyReading(tuple(map(tuple, entropies)))})


def test_a_model_whose_layers_have_not_got_heads_enough_yet_is_waited_for() -> None:
    """Others may give birth to heads; near the end of the run there is no time left for that."""
    policy = Sgt(total_steps=20, start=4, window=5, beta=0.0)
    plan = Plan.from_heads([1, 1], width=16, vocabulary=11, context=4)
    waited = decided(policy, policy.begin(plan), 4, plan, [[0.5], [0.5]])
    (change,) = waited.changes
    assert (change.action, change.edits) == ("wait", ())
    assert change.rule == "no layer has heads enough: no decision in this window"
    assert policy.next_decision(waited.state) == 9
    grown = Plan.from_heads([1, 2], width=16, vocabulary=11, context=4)
    (change,) = decided(policy, waited.state, 9, replace(grown, gates=Gates(1, 2)), [[0.5], [0.5, 0.4]]).changes
    assert (change.action, change.layer) == ("add", 1)
    (change,) = decided(policy, replace(waited.state, window_end=16), 16, plan, [[0.5], [0.5]]).changes
    assert change.action == "fix"


def test_a_reading_that_is_not_finite_spoils_one_decision_only() -> None:
    """Though windows are shorter than the memory of the average, which goes on from one to the next."""
    policy = Sgt(total_steps=40, start=2, window=3)
    plan = policy.prepare(Plan.from_heads([2, 2], width=16, vocabulary=11, context=4))
    state = decided(policy, policy.begin(plan), 1, plan, [[0.5, 0.5], [math.nan, 0.5]]).state
    spoiled = decided(policy, state, 2, plan, [[0.5, 0.5], [0.5, 0.5]])
    assert [change.action for change in spoiled.changes] == ["wait"]
    state = spoiled.state
    for step in (3, 4):
        state = decided(policy, state, step, plan, [[0.5, 0.5], [0.5, 0.5]]).state
    (change,) = decided(policy, state, 5, plan, [[0.5, 0.5], [0.5, 0.5]]).changes
    assert (change.action, change.layer) == ("add", 1)
