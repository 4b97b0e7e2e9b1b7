"""The policy of births by demand: what makes it wait, and that it cannot run in circles (incrt.md 2.4, D11)."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meristem import InputError
from meristem.gauges.demand import DemandReading
from meristem.gauges.training_progress import StepTime
from meristem.growth.policies.incrt import DemandJudgement, Incrt, IncrtState
from meristem.growth.policy import Ahead
from meristem.plan import Plan

SEEN = 100  # feeds; enough
STEADY = "the demand is certain, large and steady"
STRONG, WEAK, UNSURE = (DemandReading(*reading, SEEN) for reading in ((9.0, 1.0), (9.0, 0.02), (3.0, 1.0)))


def begun(policy: Incrt, layers: int) -> IncrtState:
    """The state at the start, of a model with so many layers."""
    return policy.begin(Plan.from_heads([1] * layers, width=16))


def run(policy: Incrt, *layers: DemandReading, until: int, losses: float = 1.0) -> list[tuple[int, DemandJudgement]]:
    """Decisions with readings that never change."""
    state, decisions = policy.calibrated(begun(policy, len(layers)), [STRONG] * len(layers)), []
    for done in range(policy.decide_every, until + 1, policy.decide_every):
        decision = policy.judge(state, done, layers, losses)
        state = decision.state
        decisions.append((done, decision))
    return decisions


def births(decisions: list[tuple[int, DemandJudgement]]) -> list[tuple[int, int]]:
    return [(done, layer) for done, decision in decisions for layer in decision.layers]


def test_births_come_one_per_cool_down_in_every_layer_that_asks() -> None:
    weaker = DemandReading(9.0, 0.5, SEEN)
    found = births(run(Incrt(cool_down=200), weaker, STRONG, UNSURE, until=900))
    assert found == [(done, layer) for done in (300, 500, 700, 900) for layer in (0, 1)]


def test_layers_cool_down_by_themselves() -> None:
    """A change in one layer does not hold up another (incrt.md D11)."""
    policy = Incrt(cool_down=400)
    state = policy.calibrated(begun(policy, 2), [STRONG] * 2)
    state = policy.removed(state, 500, 0, born_here=False)
    for done in (450, 900):
        state = (decision := policy.judge(state, done, [STRONG] * 2, 1.0)).state
    assert (decision.layers, decision.rules[0]) == ((0, 1), STEADY)
    state = policy.removed(decision.state, 1000, 0, born_here=False)
    for done in (1050, 1300):
        state = (decision := policy.judge(state, done, [STRONG] * 2, 1.0)).state
    assert decision.layers == (1,)
    assert decision.rules[0] == f"{STEADY}; the last change was not long ago"


def decided(
    policy: Incrt, at_first: list[float], slopes: list[float], full: frozenset[int] = frozenset()
) -> DemandJudgement:
    """The decision after layers that asked for so much at first have asked for this long enough."""
    first, now = ([DemandReading(9.0, slope, SEEN) for slope in each] for each in (at_first, slopes))
    state = policy.calibrated(begun(policy, len(first)), first)
    state = policy.judge(state, 300, now, 1.0, full).state
    return policy.judge(state, 500, now, 1.0, full)


def test_a_birth_is_where_enough_is_left_of_what_was_asked_for_at_first() -> None:
    """Incrt.md D13: layers differ in scale, so slopes of two of them are not compared as they are."""
    assert decided(Incrt(share=0.5), [1.0, 10.0], [0.8, 4.0]).layers == (0,)
    assert decided(Incrt(share=0.35), [1.0, 10.0], [0.3, 4.0]).layers == (1,)


def test_layers_that_are_full_are_passed_over() -> None:
    assert decided(Incrt(), [1.0, 1.0], [0.8, 0.9]).layers == (0, 1)
    assert decided(Incrt(), [1.0, 1.0], [0.8, 0.9], frozenset({1})).layers == (0,)
    decision = decided(Incrt(), [1.0, 1.0], [0.8, 0.9], frozenset({0, 1}))
    assert decision.layers == ()
    assert all(rule.endswith("; the layer has as many heads as it may have") for rule in decision.rules)


def test_a_layer_that_asks_and_is_given_nothing_is_told_why() -> None:
    """One that does not ask needs no other reason."""
    full, born, calm = decided(Incrt(), [1.0, 1.0, 1.0], [0.8, 0.9, 0.001], frozenset({0, 2})).rules
    assert full == f"{STEADY}; the layer has as many heads as it may have"
    assert (born, calm) == (STEADY, "the demand is small")


def test_the_largest_demand_so_far_is_what_others_are_measured_by() -> None:
    """Incrt.md D5: also one that came after the calibration, if it was certain."""
    policy = Incrt(share=0.1)
    state = policy.calibrated(begun(policy, 2), [STRONG, STRONG])
    more = policy.judge(state, 50, [DemandReading(9.0, 20.0, SEEN), DemandReading(3.0, 20.0, SEEN)], 1.0)
    assert [layer.largest for layer in more.state.layers] == [20, 1]
    assert [relative.demand for relative in more.relative] == [1, 20]
    later = policy.judge(more.state, 100, [STRONG, STRONG], 1.0)
    assert [relative.demand for relative in later.relative] == [1 / 20, 1]
    assert later.rules[0].startswith("the demand is small")
    assert not later.rules[1].startswith("the demand is small")


def test_noise_is_the_standard_error_of_the_demand() -> None:
    policy = Incrt()
    state = policy.calibrated(begun(policy, 3), [DemandReading(9.0, 2.0, SEEN)] * 3)
    readings = [DemandReading(5.0, 0.4, SEEN), DemandReading(-5.0, -0.4, SEEN), DemandReading(0.0, 0.0, SEEN)]
    known, below, unknown = policy.relative(state, readings)
    assert (known.demand, known.noise) == pytest.approx((0.2, 0.04))
    assert (below.demand, below.noise) == pytest.approx((-0.2, 0.04))
    assert math.isnan(unknown.noise)


@pytest.mark.parametrize(
    ("reading", "rule"),
    [
        (UNSURE, "the demand is not certain"), (WEAK, "the demand is small"),
        (DemandReading(math.nan, 1.0, SEEN), "the demand is not finite"),
        (DemandReading(9.0, math.inf, SEEN), "the demand is not"),
    ],
)  # fmt: skip
def test_what_is_not_asked_for_is_not_born(reading: DemandReading, rule: str) -> None:
    decisions = run(Incrt(), reading, until=2000)
    assert births(decisions) == []
    assert all(decision.rules[0].startswith(rule) for _, decision in decisions)


def test_a_birth_waits_for_the_loss_to_stop_falling() -> None:
    policy = Incrt(cool_down=200)
    state = policy.calibrated(begun(policy, 1), [STRONG])
    born = []
    for done in range(50, 1501, 50):
        loss = 0.9 ** (done / 50) if done <= 1000 else 0.9**20  # 34 % in a cool-down, until it stops
        decision = policy.judge(state, done, [STRONG], loss)
        state = decision.state
        born += [done] if decision.layers else []
        if done == 600:
            assert decision.rules[0].endswith("the loss is still falling")
    assert born[0] == 1100  # half of the last cool-down is flat: 19 %


def test_a_falling_demand_is_left_alone() -> None:
    policy = Incrt()
    state = policy.calibrated(begun(policy, 1), [STRONG])
    for step in range(1, 11):
        reading = DemandReading(9.0, 0.75**step, SEEN)
        state = (decision := policy.judge(state, 50 * step, [reading], 1.0)).state
        assert not decision.layers


def test_births_end_in_time_and_wait_for_feeds() -> None:
    policy = Incrt(last_birth=600, cool_down=200)
    assert births(run(policy, STRONG, until=2000)) == [(300, 0), (500, 0)]
    news = replace(STRONG, feeds=policy.feeds - 1)
    assert births(run(policy, news, WEAK, until=2000)) == []
    decisions = run(policy, news, STRONG, until=2000)
    assert births(decisions) == [(300, 1), (500, 1)]  # what one layer waits for does not hold up others
    assert all(decision.rules[0].startswith("too little has been seen since the last") for _, decision in decisions)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 60), st.integers(1, 500), st.integers(0, 700), st.integers(2, 90),
    st.integers(1, 30), st.integers(1, 3),
)  # fmt: skip
def test_the_first_birth_comes_when_it_is_said_to(
    feed_every: int, more: int, cool_down: int, warm_up: int, calibration: int, feeds: int, hits: int
) -> None:
    """Whatever the intervals are, also where none is a multiple of another.

    That is one that was predicted; others wait longer, and are a cool-down apart.
    """
    policy = Incrt(
        feed_every=feed_every, decide_every=feed_every + more - 1, cool_down=cool_down, warm_up=warm_up,
        calibration=calibration, feeds=feeds, hits=hits,
    )  # fmt: skip
    waiting = warm_up + (hits + 3) * (cool_down + policy.decide_every)

    def born(missing: int | None) -> list[int]:
        state, found = policy.calibrated(begun(policy, 1), [STRONG]), []
        for done in range(policy.decide_every, policy.first_birth + waiting, policy.decide_every):
            if done > calibration:
                seen = done // feed_every - calibration // feed_every
                decision = policy.judge(state, done, [replace(STRONG, feeds=seen)], 1.0, missing=[missing])
                state = decision.state
                found += [done] if decision.layers else []
        return found

    assert born(1)[0] == policy.first_birth
    others = born(None)
    assert len(others) >= 2
    assert others[0] >= max(policy.first_birth, warm_up)
    assert all(later - earlier >= cool_down for earlier, later in itertools.pairwise(others))


def test_predicted_heads_are_born_at_once_and_others_have_to_ask_for_more_and_more() -> None:
    policy = Incrt(share=0.03)
    state = policy.calibrated(begun(policy, 4), [STRONG] * 4)
    falling = DemandReading(9.0, 0.4, SEEN)  # of 1.0
    decision = policy.judge(state, 50, [falling] * 4, 1.0, missing=[3, 1, 0, None])
    assert decision.layers == (0, 1)
    assert [reading.threshold for reading in decision.relative] == pytest.approx([0.03, 0.03, 0.3, 0.03])
    assert "the run has just begun" in decision.rules[2]
    for done in (1000, 1050, 1100):
        decision = policy.judge(state, done, [falling] * 4, 1.0, missing=[0, -1, -2, None])
        state = decision.state
    assert decision.layers == (0, 3)  # 0.4 is above 0.3, and the next one is 1
    assert [reading.threshold for reading in decision.relative] == pytest.approx([0.3, 1.0, 1.0, 0.03])
    unsure = policy.judge(state, 2000, [UNSURE] * 4, 1.0, missing=[3] * 4)
    assert unsure.layers == ()


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("heads=5", [2]), ("heads=6", [0, 2]), ("heads=7", [0, 1, 2]), ("parameters=1.0001", []), (None, [0, 1, 2]),
        ("heads=0.6e1", [0, 2]), ("parameters=1.0e3", []), ("parameters=1e9", [0, 1, 2]),  # amounts
    ],
)  # fmt: skip
def test_a_budget_is_spent_where_a_head_is_worth_most(budget: str | None, expected: list[int]) -> None:
    policy, plan = Incrt(budget=budget), Plan.from_heads([1, 1, 2], width=16)
    readings = [replace(STRONG, worth=worth) for worth in (0.2, 0.1, 0.3)]
    state, layers, _ = policy._afforded(policy.begin(plan), plan, (0, 1, 2), readings, {})
    assert layers == expected
    assert (state.start is None) == (budget is None)


def test_a_layer_that_asks_in_vain_goes_on_asking() -> None:
    """What the budget refuses is no change: neither a cool-down nor new hits are waited for."""
    policy, plan = Incrt(budget="heads=3"), Plan.from_heads([1, 1], width=16)
    readings = [replace(STRONG, worth=worth) for worth in (0.2, 0.1)]
    calibrated = policy.calibrated(policy.begin(plan), [STRONG] * 2)
    judged = policy.judge(calibrated, 500, readings, 1.0, missing=[3, 3])
    state, layers, why_not = policy._afforded(judged.state, plan, judged.layers, readings, {})
    assert (judged.layers, layers, why_not) == ((0, 1), [0], "the budget is spent")
    left = policy._refused(state, calibrated, 1)
    assert [layer.changed for layer in left.layers] == [500, 0]
    assert [layer.hits for layer in left.layers] == [0, policy.hits]


def test_nothing_is_measured_any_more_when_the_budget_is_spent() -> None:
    policy, plan = Incrt(budget="heads=5"), Plan.from_heads([1, 1, 2], width=16)
    state, *_ = policy._afforded(policy.begin(plan), plan, (0,), [STRONG] * 3, {})
    assert policy.feeding(state, 100, plan)
    assert policy.needs(state, 100, plan)
    spent = Plan.from_heads([2, 1, 2], width=16)
    assert policy.feeding(state, 100, spent) == ()
    assert policy.needs(state, 100, spent) is None


def test_a_budget_of_time_is_reckoned_from_what_heads_have_taken_so_far() -> None:
    policy, plan = Incrt(budget="time=1.5"), Plan.from_heads([1, 1], width=16)
    readings = [STRONG] * 2
    state, layers, why_not = policy._afforded(policy.begin(plan), plan, (0, 1), readings, {StepTime(): 1.0})
    assert (layers, why_not) == ([0], "one head is born first, to tell what time it takes")
    unknown = policy._afforded(policy.begin(plan), plan, (0, 1), readings, {StepTime(): math.nan})
    assert unknown == (policy.begin(plan), [], "no update was timed yet since the last change")
    larger = Plan.from_heads([2, 2], width=16)
    for seconds, more in ((1.2, [0, 1]), (1.3, [0]), (1.4, [])):  # 0.1, 0.15 and 0.2 for each
        assert policy._afforded(state, larger, (0, 1), readings, {StepTime(): seconds})[1] == more


@pytest.mark.parametrize("budget", ["", "24", "heads", "heads=1e", "kv=0.5", "time=0.9", "parameters=1.0", "heads=x"])
def test_bad_budgets_are_refused(budget: str) -> None:
    with pytest.raises(InputError, match="budget"):
        Incrt(budget=budget)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.floats(0.01, 1.0), st.lists(st.booleans(), max_size=80), st.booleans())
def test_incrt_oracle_22_cycles_are_bounded(layers: int, share: float, removals: list[bool], alternating: bool) -> None:
    """However the demand comes and goes: at most ceil(log2(1 / share)) births in a layer are undone."""
    policy = Incrt(share=share)
    state, undone = policy.calibrated(begun(policy, layers), [STRONG] * layers), [0] * layers
    done = 0
    for remove in [*removals, *[True] * 80]:
        for number in range(6):
            done += policy.decide_every
            sign = -1 if alternating and number >= 4 else 1  # there for long enough to be born, then the opposite
            readings = [replace(STRONG, certainty=sign * STRONG.certainty, slope=sign * STRONG.slope)] * layers
            decision = policy.judge(state, done, readings, 1.0)
            state = decision.state
            for layer in decision.layers if remove else ():
                undone[layer] += 1
                state = policy.removed(state, done, layer, born_here=True)
    assert all(count <= math.ceil(math.log2(1 / share)) for count in undone)


def test_a_removal_cools_down_too_and_only_newborns_make_stricter() -> None:
    policy = Incrt()
    state = policy.removed(begun(policy, 2), 700, 1, born_here=False)
    assert [layer.changed for layer in state.layers] == [0, 700]
    assert [layer.strictness for layer in state.layers] == [1, 1]
    assert [layer.strictness for layer in policy.removed(state, 900, 1, born_here=True).layers] == [1, 2]


def test_the_state_comes_back_from_json() -> None:
    decisions = run(Incrt(), STRONG, WEAK, until=450)
    state = decisions[-1][1].state
    again = Incrt().load(json.loads(json.dumps(Incrt().dump(state))))
    assert again == state
    assert again != replace(state, losses=())


def test_a_state_of_one_last_change_is_that_of_all_layers() -> None:
    """As older versions wrote it."""
    state = run(Incrt(), STRONG, WEAK, until=450)[-1][1].state
    data = json.loads(json.dumps(Incrt().dump(state)))
    old = {
        **data,
        "last_change": 77,
        "layers": [{k: v for k, v in x.items() if k != "changed"} for x in data["layers"]],
    }
    assert [layer.changed for layer in Incrt().load(old).layers] == [77, 77]


def test_bad_settings_are_named() -> None:
    for changes in ({"max_heads": -1}, {"share": 0.0}, {"hits": 0}, {"calibration": 0}, {"hold_back": 1.0}):
        (name, value), *_ = changes.items()
        with pytest.raises(InputError, match=f"{name} = {value}"):
            Incrt(**changes)


def test_predicted_heads_leave_out_what_is_noise() -> None:
    policy = Incrt(share=0.1)
    assert policy.predicted([2.0, 1.0, 0.3, 0.15, 0.01, -0.05]) == {
        "count": 3,  # 0.15 is above the noise of 0.1, twice the most negative, but not above a tenth of the largest
        "estimate": pytest.approx((2.0 + 1.0 + 0.3 + 0.15) / 2 * math.log(10)),
    }
    assert policy.predicted([1.0, 0.2, -1.1]) == policy.predicted([]) == {"count": 0, "estimate": 0.0}


def test_rows_are_held_back_as_a_share_but_enough_of_them() -> None:
    """A quarter at most, and none where that is asked for."""
    assert [Incrt().held_back(rows) for rows in (100_000, 2560, 1000, 512, 40)] == [5000, 128, 128, 128, 10]
    assert Incrt(hold_back=0.0).held_back(100_000) == 0


def test_births_end_when_a_part_of_the_flops_is_spent() -> None:
    policy = Incrt(total_steps=1000, last_birth=0.7)
    for done, spent in ((100, 1000), (101, 1020), (150, 2000)):  # from anywhere on the way
        assert policy.lasting(Ahead(done, spent, 20, 10_000)).last_birth_step == 100 + (7000 - 1000) // 20
    given = replace(policy, last_birth=500)
    assert given.lasting(Ahead(100, 1000, 20, 10_000)).last_birth_step == 500
