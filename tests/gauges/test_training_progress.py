"""The loss that policies decide by: an exponential moving average with a memory that is written down."""

from __future__ import annotations

import math

import torch

from meristem.gauges.probe import Probe
from meristem.gauges.training_progress import LossInstrument, StepTime, TrainingLoss
from meristem.moves import Moves
from meristem.synthetic import KnownTask, Student


def test_the_loss_is_averaged_with_a_memory_of_nine_tenths() -> None:
    """After losses a, b, c: (0.81 a + 0.9 b + c) / 2.71; one that is not finite is passed over."""
    task, model = KnownTask(), Student(32, 16, 4)
    instrument = TrainingLoss().instrument(model)
    assert isinstance(instrument, LossInstrument)
    losses = []
    for number in range(3):
        tokens, targets = task.batch(8, number)
        instrument.feed(Probe(model, tokens, targets))
        losses.append(float(model.loss(tokens, targets).detach()))
        if number == 1:
            instrument.feed(Probe(model, tokens, torch.full_like(targets, math.nan)))
    expected = (0.81 * losses[0] + 0.9 * losses[1] + losses[2]) / 2.71
    assert math.isclose(instrument.read(Probe(model, tokens, targets)), expected, rel_tol=1e-5)


def test_nothing_is_known_before_the_first_feed() -> None:
    model = Student(32, 16, 4)
    probe = Probe(model, torch.zeros(1, 16, 32))
    assert math.isnan(TrainingLoss().instrument(model).read(probe))
    assert math.isnan(StepTime().instrument(model).read(probe))


def test_the_time_of_a_step_is_kept_between_feeds_of_one_structure() -> None:
    model = Student(32, 16, 4)
    instrument, probe = StepTime().instrument(model), Probe(model, torch.zeros(1, 16, 32))
    for _ in range(3):
        instrument.feed(probe)
    assert instrument.read(probe) >= 0
    assert len(instrument.state()["recent"]) == 2
    instrument.load({"recent": [1.0, 1.0, 50.0, 3.0, 1.0]})  # a pause moves no median
    assert instrument.read(probe) == 1.0
    again = StepTime().instrument(model)
    again.load(instrument.state())
    assert again.read(probe) == instrument.read(probe)
    instrument.follow(Moves.none(1), model.plan)
    assert math.isnan(instrument.read(probe))
