"""When an update is recorded and when it is not, on a CPU with a stand-in for the recording."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meristem.model import Decoder
from meristem.plan import Plan
from meristem.training.cuda_graph import RecordedStep
from meristem.training.gradients import Gradients

from .helpers import CPU

PLAN = Plan.from_heads([2, 2], width=16, vocabulary=23, context=8)


class Tape(RecordedStep):
    """Notes recordings and replays, and computes as usual."""

    REST = 2

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
        self.notes: list[str] = []

    def _record(self, tokens: Tensor, targets: Tensor, weight: float) -> None:
        self.notes.append("record")
        self.recording, self.weight = object(), weight  # type: ignore[assignment]
        self.gradients.backward(tokens, targets, weight)  # so that there are gradients to fill

    def _replay(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.notes.append("replay")
        for parameter in self.gradients.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()  # a replay overwrites
        return self.gradients.backward(tokens, targets, self.weight)


def taped() -> tuple[Gradients, Tape]:
    gradients = Gradients(Decoder(PLAN), compile=False, device=CPU)
    tape = Tape(gradients)
    gradients.graph = tape
    return gradients, tape


def batch(seed: int, micro_batches: int) -> tuple[Tensor, Tensor]:
    windows = torch.randint(23, (micro_batches, 2, 9), generator=torch.Generator().manual_seed(seed))
    return windows[..., :-1], windows[..., 1:]


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_changed_model_is_recorded_soon_unless_changes_follow_each_other(exchanged: bool) -> None:
    gradients, tape = taped()
    seen = []
    for update in range(12):
        if update in (2, 3, 4, 9):  # the second change comes soon after the first, the third while the model rests
            gradients.restructured(Decoder(PLAN, seed=1) if exchanged else None)
            assert tape.recording is None
            assert all(p.grad is None for p in gradients.parameters)
        tape.notes.clear()
        gradients(*batch(update, 1))
        seen.append(" ".join(tape.notes))
    recorded, replayed, plain = "record replay", "replay", ""
    assert seen == [recorded, replayed, *[plain] * 4, recorded, replayed, replayed, plain, recorded, replayed]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_recorded_and_plain_updates_leave_the_same_gradients(micro_batches: int) -> None:
    (recorded, _), plain = taped(), Gradients(Decoder(PLAN), compile=False, device=CPU)
    for update in range(6):
        if update in (1, 4):  # the first model has not stood for long and rests, the second is recorded at once
            recorded.restructured()
        losses = [gradients(*batch(update, micro_batches)) for gradients in (recorded, plain)]
        torch.testing.assert_close(*losses)
        for mine, theirs in zip(recorded.parameters, plain.parameters, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
