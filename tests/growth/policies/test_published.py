"""The published rule of births and removals and what it does to a model (incrt.md 2.2, 5.4, D15)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meristem import InputError
from meristem.gauges.energy import EnergyGauge, EnergyReading, HeadReading, Prediction, Projections
from meristem.growth.edits import RemoveHead
from meristem.growth.policies.published import Published, PublishedJudgement, PublishedState
from meristem.plan import Plan

LOUD, QUIET = HeadReading(1.0, 0.7), HeadReading(0.0005, 0.7)
STRONG = EnergyReading(
    lambda_max=0.3, lambda_min=-0.3, energy=0.8, start=1.0, noise=0.02, threshold=0.1,
    dwell=20, grace=40, feeds=20, births=0, predicted=Prediction(2, 1.9), heads=(LOUD,),
)  # fmt: skip
WEAK = replace(STRONG, lambda_max=0.09)


def unseen(layers: int) -> PublishedState:
    """The state at the start, of a model with so many layers."""
    return Published().begin(Plan.from_heads([1] * layers, width=16))


def decided(policy: Published, *readings: EnergyReading, done: int = 500, **view: Any) -> PublishedJudgement:
    return policy.judge(unseen(len(readings)), done, readings, **view)


def test_a_head_is_born_where_energy_is_furthest_above_its_threshold() -> None:
    other = replace(STRONG, lambda_max=0.5, threshold=0.4)
    decision = decided(Published(), WEAK, STRONG, other)
    assert decision.layer == 1
    assert decision.removal is None
    assert [rule.split(" and ")[0] for rule in decision.rules] == [
        "the energy is small", "the energy is large", "the energy is large",
    ]  # fmt: skip
    assert [len(heads) for heads in decision.state.layers] == [1, 2, 1]
    assert decision.state.layers[1][1].since == 500
    shown = decision.relative[2]
    assert (shown.demand, shown.threshold) == pytest.approx((0.5, 0.4))
    assert math.isnan(shown.noise)
    repaired = decided(Published("repaired"), WEAK, STRONG, other).relative[2]
    assert (repaired.demand, repaired.noise, repaired.threshold) == pytest.approx((0.5, 0.02, 0.4))


@pytest.mark.parametrize(
    ("reading", "rule"),
    [
        (WEAK, "the energy is small"), (replace(STRONG, lambda_max=0.1), "the energy is small"),
        (replace(STRONG, feeds=19), "the trackers have not settled since the last birth"),
        (replace(STRONG, lambda_min=0.05), "the smallest eigenvalue is large"),
        (replace(STRONG, threshold=math.inf, start=math.nan), "the start is still being measured"),
        (replace(STRONG, lambda_max=math.nan), "the energy is not finite"),
        (replace(STRONG, lambda_max=math.inf), "the energy is not finite"),
    ],
)  # fmt: skip
def test_what_keeps_a_head_from_being_born(reading: EnergyReading, rule: str) -> None:
    decision = decided(Published(), reading)
    assert (decision.layer, decision.rules) == (None, (rule,))


def test_the_vacuous_clause_is_the_authors_alone() -> None:
    reading = replace(STRONG, lambda_min=0.05)
    assert decided(Published(numerics="author"), reading).layer is None
    assert decided(Published(numerics="repaired"), reading).layer == 0


def test_births_end_in_time_and_spare_full_layers() -> None:
    assert decided(Published(last_birth=500), STRONG).layer == 0
    assert decided(Published(last_birth=499), STRONG).rules == ("the run is near its end",)
    decision = decided(Published(), STRONG, replace(STRONG, lambda_max=0.2), full={0})
    assert decision.layer == 1
    assert decision.rules[0] == "the layer has as many heads as it may have"


@pytest.mark.parametrize("decide_every", [5, 50])
def test_quiet_heads_leave_after_grace_and_patience(decide_every: int) -> None:
    """Grace 40 and patience 100 are feeds, of 5 updates each, however often a decision is taken."""
    policy = Published(decide_every=decide_every)
    state, done = unseen(2), 0
    silent = HeadReading(0.0, 0.7)
    layers = [replace(WEAK, heads=(LOUD, QUIET)), replace(WEAK, heads=(silent, silent))]
    while (decision := policy.judge(state, done := done + decide_every, layers, bare={1})).removal is None:
        state = decision.state
    assert 200 + 500 - decide_every <= done <= 200 + 500
    assert decision.removal == (0, 1)  # others, which have to stay, have less energy
    assert decision.rules[0] == "head 1 has had next to no energy for long"
    plan = Plan.from_heads([2, 2], width=16)
    gone = RemoveHead(0, 1)
    state = policy.moved(decision.state, done, gone.apply(plan), gone.moves(plan))
    assert [len(heads) for heads in state.layers] == [1, 2]
    layers[0] = replace(WEAK, heads=(LOUD,))
    assert policy.judge(state, done + decide_every, layers, bare={0, 1}).removal is None


def test_a_moment_of_energy_starts_the_count_again_and_newborns_have_grace() -> None:
    policy = Published(patience=4)
    state, done, quiet = unseen(1), 200, []
    for energy in (0.0005, 0.0005, 0.0005, 0.0011, 0.0005, math.nan, 0.0005):
        reading = replace(WEAK, heads=(LOUD, HeadReading(energy, 0.7)))
        state = policy.judge(state, done := done + 5, [reading]).state
        quiet.append(state.layers[0][1].quiet)
    assert quiet == [1, 2, 3, 0, 1, 0, 1]
    born = policy.judge(state, 300, [replace(STRONG, heads=(LOUD, QUIET))])
    assert born.layer == 0
    three = replace(WEAK, heads=(LOUD, QUIET, QUIET))
    assert [head.quiet for head in policy.judge(born.state, 305, [three]).state.layers[0]] == [0, 3, 0]
    assert [head.quiet for head in policy.judge(born.state, 500, [three]).state.layers[0]] == [0, 3, 1]


def test_a_birth_comes_before_a_removal_and_pruning_can_be_turned_off() -> None:
    ready = replace(WEAK, grace=0, heads=(LOUD, QUIET))
    policy = Published(patience=1)
    assert decided(policy, ready, STRONG).removal is None
    assert decided(policy, ready, STRONG).layer == 1
    assert decided(policy, ready, WEAK).removal == (0, 1)
    assert decided(replace(policy, prune=False), ready, WEAK).removal is None


def test_the_state_comes_back_from_json() -> None:
    state = decided(Published(), STRONG, replace(WEAK, heads=(LOUD, QUIET)), done=900).state
    assert state != unseen(2)
    assert Published().load(json.loads(json.dumps(Published().dump(state)))) == state


@pytest.mark.parametrize(("numerics", "feeds"), [("author", 1), ("repaired", 10)])
def test_decisions_follow_the_feeds_unless_given(numerics: Any, feeds: int) -> None:
    assert [Published(numerics, feed_every=every).decide_every for every in (1, 20)] == [feeds, 20 * feeds]
    assert Published(numerics, decide_every=15).decide_every == 15


def test_bad_settings_are_named() -> None:
    for changes, message in (
        ({"numerics": "good"}, "numerics = 'good'"), ({"feed_every": 0}, "feed_every = 0"), ({"share": 0}, "share = 0"),
        ({"decide_every": 7}, "decide_every = 7"), ({"patience": 0}, "patience = 0"), ({"accuracy": 1}, "accuracy = 1"),
        ({"complexity": 0}, "complexity = 0"), ({"max_heads": -1}, "max_heads = -1"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            Published(**changes)
    with pytest.raises(InputError, match="decide_every = -5"):
        Published(decide_every=-5)


# --- a model ------------------------------------------------------------------------------------------------------

WIDTH, LENGTH, DIM = 32, 16, 4


class Teacher:
    """Section 5.4: heads of rank one that look, read and write along orthonormal directions, on Gaussian tokens."""

    def __init__(self, heads: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=self.generator))[0]
        self.look, self.seen, self.read, self.write = basis[: 4 * heads].view(4, heads, WIDTH)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, LENGTH, WIDTH, generator=self.generator)
        look, seen, read = ((x @ part.T).mT for part in (self.look, self.seen, self.read))
        mixed = (2.5 * look[..., None] * seen[:, :, None]).softmax(-1) @ read[..., None]
        return x, mixed[..., 0].mT @ self.write


def newborn(generator: torch.Generator) -> list[nn.Parameter]:
    """Queries, keys, values and output of a head, as the author draws them: it is heard from its birth on."""
    scales = (WIDTH, WIDTH, WIDTH, DIM)
    return [nn.Parameter(torch.randn(DIM, WIDTH, generator=generator) / math.sqrt(scale)) for scale in scales]


def grown(numerics: Any, needed: int, updates: int, batch: int = 16) -> tuple[int, float]:
    """Heads that the published rule gives a student of one layer, and its error in the end."""
    teacher = Teacher(needed, seed=0)
    heads = [newborn(teacher.generator)]
    optimizer = torch.optim.Adam(heads[0], lr=1e-2)
    policy = Published(numerics=numerics)
    gauge, state, error = EnergyGauge(1, WIDTH, **asdict(policy.gauge)), unseen(1), 1.0
    for done in range(1, updates + 1):
        x, target = teacher.batch(batch)
        query, key, value, out = (torch.stack(parts) for parts in zip(*heads, strict=True))
        queries, keys, values = (x[:, None] @ part.mT for part in (query, key, value))
        said = (queries @ keys.mT / math.sqrt(DIM)).softmax(-1) @ values @ out
        loss = (said.mean(1) - target).square().mean() / target.square().mean()  # the author's heads are averaged
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        error += 0.05 * (float(loss.detach()) - error)
        if done % policy.feed_every:
            continue
        own = Projections(query.detach(), key.detach())
        gauge.feed(x[None], [own], torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        decision = policy.judge(state, done, gauge.readings())
        state = decision.state
        if decision.layer is not None:
            gauge.born(0)
            heads.append(newborn(teacher.generator))
            optimizer.add_param_group({"params": heads[-1]})
        assert len(heads) == 1 + gauge.births[0] == len(state.layers[0])
        assert decision.removal is None
    return len(heads), error


def test_the_author_rule_runs_away() -> None:
    """One head is needed. There is no stop short of the width; this is only the beginning."""
    heads, _ = grown("author", needed=1, updates=600)
    assert heads >= 5


@pytest.mark.slow
def test_the_author_rule_does_not_see_what_is_needed() -> None:
    """Nearly as many heads as the width, whether the task needs one or four (5.1, 5.4: 33 of at most 33)."""
    for needed in (1, 4):
        heads, _ = grown("author", needed, updates=3000)
        assert 25 <= heads <= WIDTH + 1


@pytest.mark.slow
def test_the_repaired_rule_is_blind_where_tokens_are_isotropic() -> None:
    """Four heads are needed and none is born: the operator is zero there, and noise is no longer taken for it."""
    heads, error = grown("repaired", needed=4, updates=1500, batch=64)
    assert heads == 1
    assert error > 0.5


def test_births_on_a_frozen_operator_are_the_predicted_ones() -> None:
    """Oracle 6 for rule and gauge together, with newborns that bring no energy of their own."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(1, 10, 400, 12, generator=generator) * torch.linspace(0.2, 2, 12)
    own = Projections(*torch.randn(2, 2, 3, 12, generator=generator))
    policy = Published(numerics="repaired", share=0.3)
    gauge, state = EnergyGauge(1, 12, **asdict(policy.gauge)), unseen(1)
    predicted, done, idle = Prediction(0, 0.0), 0, 0
    while idle < 10:
        heads = Projections(*(torch.cat((part, torch.zeros(gauge.births[0], 3, 12))) for part in own))
        for _ in range(10):
            gauge.feed(tokens, [heads], torch.ones(400, 400, dtype=torch.bool))
        (reading,) = gauge.readings()
        decision = policy.judge(state, done := done + 50, [reading])
        state, idle = decision.state, idle + 1
        if reading.births == 0:
            predicted = reading.predicted
        if decision.layer is not None:
            gauge.born(0)
            idle = 0
    assert reading.threshold == pytest.approx(0.3 * reading.start)
    assert gauge.births[0] == predicted.count > 1
    assert predicted.estimate == pytest.approx(predicted.count, abs=1)
    assert reading.predicted.count == 0
