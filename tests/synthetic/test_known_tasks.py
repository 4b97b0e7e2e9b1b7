"""Tasks are what they say: targets against a plain loop in float64, unit size, and the same batches every time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.synthetic import TASKS, KnownTask
from meristem.synthetic.known_tasks import SHARPNESS


def plain_targets(task: KnownTask, tokens: Tensor) -> Tensor:
    """What the teacher answers, token by token and head by head; before they are scaled."""
    directions = task._directions.double()
    targets = torch.zeros(tokens.shape, dtype=torch.float64)
    for sequence, target in zip(tokens.double(), targets, strict=True):
        for head in range(task.heads):
            looking, seen, read, written = directions[:, 4 * head : 4 * head + 4].unbind(1)
            for place, token in enumerate(sequence):
                scores = [SHARPNESS * float(token @ looking) * float(other @ seen) for other in sequence]
                weights = [math.exp(score - max(scores)) for score in scores]
                mixed = sum(w * float(other @ read) for w, other in zip(weights, sequence, strict=True)) / sum(weights)
                target[place] += mixed * written
    return targets


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_the_teacher_is_attention_with_so_many_heads(heads: int) -> None:
    task = KnownTask(heads=heads, seed=heads)
    tokens, targets = task.batch(3, 5)
    expected = plain_targets(task, tokens)
    torch.testing.assert_close(targets.double() * float(task._size), expected, rtol=1e-4, atol=1e-5)


def test_no_head_of_the_teacher_can_do_the_work_of_two() -> None:
    directions = KnownTask()._directions
    torch.testing.assert_close(directions.T @ directions, torch.eye(32), rtol=0, atol=1e-5)
    _, targets = KnownTask(heads=4).batch(64, 0)
    assert torch.linalg.matrix_rank(targets.flatten(0, 1), rtol=1e-4) == 4  # each head writes along its own


def test_the_teacher_looks_sharply_but_not_at_one_token() -> None:
    """Scores with a standard deviation of 2.5."""
    task = KnownTask(heads=2)
    tokens, _ = task.batch(512, 0)
    looking, seen = task._directions[:, 0], task._directions[:, 1]
    scores = SHARPNESS * (tokens @ looking)[:, :, None] * (tokens @ seen)[:, None, :]
    assert float(scores.std()) == pytest.approx(2.5, rel=0.03)


def test_a_bag_is_even_pooling() -> None:
    task = KnownTask("bag", seed=2)
    tokens, targets = task.batch(7, 3)
    read, written = task._directions[:, 0].double(), task._directions[:, 1].double()
    pooled = tokens.double().mean(1) @ read
    expected = (pooled[:, None, None] * written).expand(7, 16, 32) / float(task._size)
    torch.testing.assert_close(targets.double(), expected, rtol=1e-4, atol=1e-6)


def test_noise_has_nothing_to_do_with_the_tokens() -> None:
    tokens, targets = KnownTask("noise").batch(512, 0)
    x, y = tokens.flatten(0, 1), targets.flatten(0, 1)
    assert float((x.T @ y).abs().max()) / len(x) < 5 * float(y.std()) / len(x) ** 0.5


@pytest.mark.parametrize("kind", TASKS)
def test_targets_have_unit_size(kind: str) -> None:
    """Up to the noise of the two samples; a bag has one number a sequence, so that it has most."""
    _, targets = KnownTask(kind, seed=4).batch(4096, 9)
    assert float(targets.square().sum(-1).mean()) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("kind", TASKS)
def test_batches_are_the_same_whenever_they_are_asked_for(kind: str) -> None:
    task = KnownTask(kind, seed=1)
    first = task.batch(4, 7)
    torch.manual_seed(0)
    task.batch(4, 8)
    for again in (task.batch(4, 7), KnownTask(kind, seed=1).batch(4, 7)):
        torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not any(map(torch.equal, task.batch(4, 8), first))


@pytest.mark.parametrize("kind", TASKS)
def test_seeds_make_other_tasks_and_batches(kind: str) -> None:
    first, other = KnownTask(kind, seed=1), KnownTask(kind, seed=2)
    assert not torch.equal(first._directions, other._directions)
    assert not any(map(torch.equal, first.batch(4, 7), other.batch(4, 7)))


def test_the_answer_is_the_teachers() -> None:
    assert [KnownTask(kind, heads=3).answer for kind in TASKS] == [3, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "riddle"}, "kind = 'riddle': must be one of teacher, bag, noise"),
        ({"heads": 0}, "heads = 0: must be from 1 to 8"),
        ({"heads": 9}, "heads = 9: must be from 1 to 8"),
        ({"heads": 5, "width": 16}, "heads = 5: must be from 1 to 4"),
    ],
)
def test_bad_tasks_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        KnownTask(**options)  # type: ignore[arg-type]
