"""One call saves and one restores, whatever has grown meanwhile; training then goes on to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meristem import Decoder, Grower, Incrt, InputError, Plan, Policy, Prune, Sgt, Stack, parameter_groups, prepared
from meristem import restore as restore_training
from meristem import save as save_training

STEPS = 44
EAGER = Incrt(
    start_heads=1, feed_every=1, decide_every=4, calibration=4, cool_down=4, warm_up=4, certainty=-9.0, share=1e-9,
    steady=-1e9, plateau=1.0, hits=1, feeds=1,
)  # fmt: skip
POLICIES: list[Policy] = [
    Stack(total_steps=STEPS, start_layers=2, at=(10, 20)), EAGER, Prune(decide_every=4),
    Sgt(total_steps=STEPS, start=5, window=6, beta=0.2, excluded=(), heads_per_layer=1),
]  # fmt: skip
TARGET = Plan.from_heads([2, 2, 4, 4, 4, 4, 4, 4], width=32, vocabulary=50, context=16)

Parts = tuple[Decoder, torch.optim.Optimizer, Grower]


def begun() -> Parts:
    model = Decoder(prepared(TARGET, POLICIES), seed=0)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
    return model, optimizer, Grower(model, optimizer, POLICIES)


def train(parts: Parts, steps: range, folder: Path | None = None, every: int = 0) -> list[tuple[int, str, str]]:
    model, optimizer, grower = parts
    events = []
    for step in steps:
        windows = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(step))
        tokens, targets = windows[:, :-1], windows[:, 1:]
        loss = model(tokens, targets).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        events += [(e.step, e.policy, e.to_dict()["event"]) for e in grower.step(tokens, targets).events]
        if folder is not None and (step + 1) % every == 0:
            save_training(folder, model, optimizer, grower, step=step + 1)
    return events


def assert_same(one: Parts, other: Parts) -> None:
    assert one[0].plan == other[0].plan
    torch.testing.assert_close(one[0].state_dict(), other[0].state_dict(), rtol=0, atol=0)
    moments = [
        {name: optimizer.state[parameter] for name, parameter in model.named_parameters() if parameter.requires_grad}
        for model, optimizer, _ in (one, other)
    ]
    torch.testing.assert_close(*moments, rtol=0, atol=0)
    assert one[2].state_dict() == other[2].state_dict()
    torch.testing.assert_close(one[2].tensors(), other[2].tensors(), rtol=0, atol=0)


@pytest.mark.parametrize("saved", [7, 12, 22, 30, 38])
def test_training_goes_on_to_the_bit_from_before_and_after_stacks_births_and_loops(saved: int, tmp_path: Path) -> None:
    whole, first, second = begun(), begun(), begun()
    events = train(whole, range(STEPS))
    assert {policy for _, policy, kind in events if kind == "growth"} >= {"stack", "incrt", "sgt"}
    train(first, range(saved), tmp_path, saved)
    done = restore_training(tmp_path, *second)
    assert done == saved
    assert second[0].plan == first[0].plan
    later = train(second, range(done, STEPS))
    assert later == [event for event in events if event[0] > saved]
    assert_same(second, whole)


def test_nothing_saved_yet_is_the_start_and_a_grower_must_be_there_as_it_was(tmp_path: Path) -> None:
    model, optimizer, grower = begun()
    assert restore_training(tmp_path / "none", model, optimizer, grower) == 0
    save_training(tmp_path, model, optimizer, grower, step=3)
    with pytest.raises(InputError, match="grower = None: must be given"):
        restore_training(tmp_path, model, optimizer)
    save_training(tmp_path, model, optimizer, step=4)
    with pytest.raises(InputError, match=r"grower = .*: must be None"):
        restore_training(tmp_path, model, optimizer, grower)
