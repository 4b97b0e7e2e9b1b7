"""Depth by its price: runs of known laws, in which the best depth for every budget can be reckoned."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

import pytest

from meristem import Depth, InputError, LoopHeads, Plan
from meristem.gauges import UpdateLoss
from meristem.growth import Decision
from meristem.growth.policies.depth import EARNED, DepthState, best_depth
from meristem.moves import Moves

PLAN = Plan.uniform(layers=16, width=64, heads=4, vocabulary=320, context=128)
SIZES = (1, 2, 4, 8, 16)


def cost(layers: int) -> int:
    return replace(PLAN, layers=PLAN.layers[:layers]).cost.training.causal


@dataclass(frozen=True)
class Law:
    """A loss that falls by a power of the updates; deeper models are ahead, by more the longer they train."""

    ahead: float = 0.016  # share of the loss, per e-fold of the updates, by which two blocks are ahead of one
    power: float = 0.5  # of the updates
    noise: float = 0.0

    def loss(self, blocks: int, updates: float) -> float:
        doublings = sum(2 ** (-number / 2) for number in range(round(math.log2(blocks))))
        share = self.ahead * doublings * math.log(max(updates, 100) / 100)
        return (1.2 + 8 / 1000**0.5 * (1000 / updates) ** self.power) * (1 - share)

    def best(self, steps: int) -> int:
        """The blocks with which a run is best that has the FLOPs of so many updates of one block."""
        return min(SIZES, key=lambda blocks: self.loss(blocks, steps * cost(1) / cost(blocks)))

    def grown(self, steps: int, policy: Depth | None = None, *, saved: bool = False) -> tuple[list[int], float]:
        """The blocks after each growth, and the last loss, of a run in which a deeper model is at once what it is.

        With `saved` the policy's state goes through a file after every decision.
        """
        # In these runs copies earn all of what is promised, where in others it was half.
        policy = policy or Depth(steps, start_layers=1, promise=0.016 / EARNED)
        plan = policy.prepare(PLAN)
        state, left, step, drawn = policy.begin(plan), steps * cost(1), 0, random.Random(1)
        sizes = [len(plan.layers)]
        while left >= plan.cost.training.causal:
            step, left = step + 1, left - plan.cost.training.causal
            if policy.needs(state, step, plan) is None:
                continue
            loss = self.loss(len(plan.layers), step) + drawn.gauss(0, self.noise)
            decision = policy.decide(state, step, plan, {policy.gauge: loss})
            state = decision.state
            for change in decision.changes:
                for edit in change.edits:
                    moves, plan = edit.moves(plan), edit.apply(plan)
                    state = policy.moved(state, step, plan, moves)
                sizes.append(len(plan.layers))
            if saved:
                state = policy.load(json.loads(json.dumps(policy.dump(state))))
        return sizes, self.loss(len(plan.layers), step)


LAWS = {"as promised": Law(), "steep": Law(power=0.6), "flat": Law(power=0.4), "noisy": Law(noise=0.005)}
LENGTHS = (300, 1000, 3000, 10_000, 30_000, 100_000)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("steps", LENGTHS)
def test_the_depth_is_that_of_the_law_within_a_factor_of_two_in_flops(law: Law, steps: int) -> None:
    sizes, _ = law.grown(steps)
    assert law.best(steps // 2) <= sizes[-1] <= law.best(2 * steps)


@pytest.mark.parametrize("law", [*LAWS.values(), Law(ahead=0.011), Law(ahead=0.022)], ids=[*LAWS, "less", "more"])
@pytest.mark.parametrize("steps", LENGTHS)
def test_it_costs_little_not_to_know_the_best_depth_before(law: Law, steps: int) -> None:
    """Also where a doubling brings less than promised, or more."""
    fixed = {blocks: law.loss(blocks, steps * cost(1) / cost(blocks)) for blocks in SIZES}
    _, loss = law.grown(steps)
    assert loss <= min(fixed.values()) + 0.025
    assert loss < max(fixed.values()) - 0.05


def test_a_longer_run_is_never_shallower() -> None:
    found = [Law().grown(steps)[0][-1] for steps in (100, *LENGTHS)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 8)


def test_blocks_are_doubled_up_to_those_of_the_plan() -> None:
    target = replace(PLAN, layers=PLAN.layers[:12])
    policy = Depth(1000, start_layers=3, promise=0.9)
    plan, state = policy.prepare(target), policy.begin(policy.prepare(target))
    sizes = [len(plan.layers)]
    for step in range(policy.every, 600, policy.every):
        if policy.needs(state, step, plan) is None:
            continue
        decision = policy.decide(state, step, plan, {policy.gauge: 3.0})
        state = decision.state
        for change in decision.changes:
            assert change.action == "stack"
            assert change.facts["copies"] == [[new, new - sizes[-1]] for new in range(sizes[-1], 2 * sizes[-1])]
            plan = reduce(lambda had, edit: edit.apply(had), change.edits, plan)
            state = policy.moved(state, step, plan, Moves((0, None)))
            sizes.append(len(plan.layers))
    assert sizes == [3, 6, 12]
    assert plan == target


def test_a_state_from_a_file_decides_alike() -> None:
    law = LAWS["noisy"]
    assert law.grown(10_000, saved=True) == law.grown(10_000)


def outlook(policy: Depth, losses: list[tuple[int, float]], *, left: float = 0.5) -> Decision:
    plan = policy.prepare(PLAN)
    step, budget = losses[-1][0], policy.total_steps * plan.cost.training.causal
    state = DepthState(budget, plan.cost.training.causal, round((1 - left) * budget), step, tuple(losses[:-1]))
    return policy.decide(state, step, plan, {policy.gauge: losses[-1][1]})


def test_price_and_promise_are_those_of_the_formulas() -> None:
    """After half of 1000 updates, a loss that falls by 4 over their root."""
    losses = [(step, 3 + 4 * (step**-0.5 - 500**-0.5)) for step in range(140, 501, 20)]
    facts = outlook(Depth(1000, start_layers=1, promise=0.003), losses).measured
    assert facts is not None
    fewer = 500 * cost(1) / cost(2)
    assert facts["fall"] == pytest.approx(4 * (250**-0.5 - 500**-0.5))
    assert facts["price"] == pytest.approx(4 * ((500 + fewer) ** -0.5 - 1000**-0.5))
    assert facts["promise"] == pytest.approx(EARNED * 0.003 * 3 * math.log((500 + fewer) / 100) * fewer / (500 + fewer))


def test_nothing_is_decided_from_little_nor_near_the_end() -> None:
    flat = [(step, 3.0) for step in range(300, 501, 20)]
    early = [(step, 3.0) for step in range(20, 141, 20)]
    assert outlook(Depth(1000, start_layers=1), flat).changes
    assert not outlook(Depth(1000, start_layers=1), flat[::4]).changes  # too few readings
    assert not outlook(Depth(1000, start_layers=1), early).changes  # the first updates tell nothing
    assert not outlook(Depth(1000, start_layers=1), flat[4:]).changes  # which reach back too little
    assert not outlook(Depth(1000, start_layers=1), flat, left=0.29).changes
    assert outlook(Depth(1000, start_layers=1), [*flat[:-1], (500, math.nan)]).changes  # the others tell


def test_what_copies_would_change_is_forgotten() -> None:
    policy, state = Depth(100), DepthState(10, cost(16), 5, 3, ((2, 1.0), (3, 0.9)))
    assert policy.moved(state, 3, PLAN, Moves((0, None))).losses == ()
    assert policy.moved(state, 3, PLAN, Moves((0, 1), {0: (0, None)})) == state


def test_what_is_spent_is_counted_at_the_cost_of_its_time() -> None:
    """Also where something else grows between two decisions: 19 updates of one block, 1 of two."""
    policy = Depth(1000, start_layers=1)
    plan = policy.prepare(PLAN)
    deeper = replace(plan, layers=plan.target[:2])
    state = policy.moved(policy.begin(plan), 19, deeper, Moves((0, None)))
    found = policy.decide(state, 20, deeper, {policy.gauge: 3.0}).state
    assert found.spent == 19 * cost(1) + cost(2)
    older = replace(policy.begin(plan), each=0)  # as one is loaded that does not know it
    assert policy.decide(older, 20, plan, {policy.gauge: 3.0}).state.spent == 20 * cost(1)
    found = policy.decide(policy.moved(older, 19, deeper, Moves((0, None))), 20, deeper, {policy.gauge: 3.0}).state
    assert found.spent == 20 * cost(2)


def test_it_asks_for_the_loss_only_while_blocks_are_to_come() -> None:
    policy = Depth(500, start_layers=1)
    plan = policy.prepare(PLAN)
    assert (
        policy.needs(policy.begin(plan), 20, plan) == policy.feeding(policy.begin(plan), 7, plan) == (UpdateLoss(10),)
    )
    assert policy.needs(policy.begin(plan), 7, plan) is None
    assert policy.needs(policy.begin(plan), 20, PLAN) is None
    assert policy.feeding(policy.begin(plan), 7, PLAN) == ()


def test_blocks_that_are_trained_already_are_copied_after_the_first_update() -> None:
    """All of them are there from the start, each copy has the shape of its source, and no loss is asked for."""
    own = Plan.prism(layers=3, width=64, heads=4, vocabulary=320, context=128)
    policy = Depth(1000, layers=5)
    plan = policy.prepare(own)
    assert plan.layers == own.layers
    assert plan.target == (*own.layers, *own.layers[:2])
    state = policy.begin(plan)
    assert policy.needs(state, 1, plan) == policy.feeding(state, 1, plan) == ()
    (change,) = policy.decide(state, 1, plan, {}).changes
    assert change.facts["copies"] == [[3, 0], [4, 1]]
    grown = reduce(lambda had, edit: edit.apply(had), change.edits, plan)
    assert (grown.layers, grown.target) == (plan.target, ())
    policy.check(grown)
    assert policy.needs(state, 2, grown) is None


def test_settings_and_plans_that_cannot_be_are_refused() -> None:
    for promise in (0.0, 1.0, math.nan):
        with pytest.raises(InputError, match=r"promise = .*: must be above 0 and below 1"):
            Depth(100, promise=promise)
    with pytest.raises(InputError, match=r"start_layers = 16: must be below the 16 layers"):
        Depth(100, start_layers=16).prepare(PLAN)
    with pytest.raises(InputError, match=r"would not follow copies"):
        Depth(100, start_layers=1).prepare(LoopHeads(1, (0,), 1).apply(PLAN))
    with pytest.raises(InputError, match=r"start_layers = None: must be given; meristem.growth.best_depth"):
        Depth(100).prepare(PLAN)
    with pytest.raises(InputError, match=r"build the model from policy.prepare"):
        Depth(100, start_layers=1).check(replace(PLAN, layers=PLAN.layers[:1]))
    with pytest.raises(InputError, match=r"build the model from policy.prepare"):
        Depth(100, layers=17).check(PLAN)
    with pytest.raises(InputError, match=r"layers = 16: must be above the 16 blocks that are there"):
        Depth(100, layers=16).prepare(PLAN)
    with pytest.raises(InputError, match=r"layers = 4: cannot be given with start_layers"):
        Depth(100, start_layers=2, layers=4)
    prepared = Depth(100, start_layers=1).prepare(PLAN)
    assert Depth(100, start_layers=1).prepare(prepared) == prepared


def test_every_growth_is_a_doubling() -> None:
    assert all(later == 2 * earlier for earlier, later in pairwise(Law().grown(100_000)[0]))


def test_the_best_depths_of_measured_runs() -> None:
    """It is the best of those that were tried, or within 0.01 nats of it (results/2026-11-17-depth)."""
    measured = {
        (309, 1024): (1,), (1238, 1024): (1, 2), (4950, 1024): (2,),  # width 64
        (600, 1024): (1,), (2500, 1024): (2,), (10_000, 1024): (3, 4), (600, 8192): (2,),  # width 96
        (738, 32_768): (2, 3), (1476, 32_768): (3,),  # width 768
    }  # fmt: skip
    assert all(best_depth(*run) in depths for run, depths in measured.items())


def test_numbers_of_which_there_is_no_best_depth_are_refused() -> None:
    for updates in (0, -1, math.inf, math.nan):
        with pytest.raises(InputError, match=r"updates = .*: must be above 0, and finite"):
            best_depth(updates, 1024)
    with pytest.raises(InputError, match="tokens = 0"):
        best_depth(100, 0)
