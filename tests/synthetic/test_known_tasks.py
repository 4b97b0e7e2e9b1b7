"""Tasks are what they say: targets against a plain loop in float64, unit size, and the same batches every time."""

from __future__ import annotations

import math
from typing import Any

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
            own = directions[:, (2 + 2 * task.rank) * head :]
            looking, seen, read, written = own[:, 0], own[:, 1], own[:, 2 : 2 + task.rank], own[:, 2 + task.rank :]
            strength = task.strengths[head] if task.strengths else 1.0
            for place, token in enumerate(sequence):
                scores = [SHARPNESS * float(token @ looking) * float(other @ seen) for other in sequence]
                weights = [math.exp(score - max(scores)) for score in scores]
                for number in range(task.rank):
                    values = [float(other @ read[:, number]) for other in sequence]
                    mixed = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
                    target[place] += strength * mixed * written[:, number]
    return targets


VARIANTS = [
    *({"heads": heads} for heads in (1, 3, 8)),
    {"heads": 2, "rank": 4}, {"heads": 3, "strengths": (1.0, 0.3, 0.03)}, {"heads": 2, "mean": 3.0},
    {"heads": 2, "heavy_tails": True, "width": 20, "length": 5}, {"heads": 2, "rows": 7, "rank": 2},
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_teacher_is_attention_with_so_many_heads(variant: dict[str, Any]) -> None:
    task = KnownTask(seed=5, **variant)
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


@pytest.mark.parametrize("kind", ["teacher", "noise"])
def test_tokens_have_the_mean_and_the_tails_that_they_are_said_to(kind: str) -> None:
    plain, shifted, heavy = (
        KnownTask(kind, seed=3, **variant).batch(1024, 0)[0] for variant in ({}, {"mean": 3.0}, {"heavy_tails": True})
    )
    torch.testing.assert_close(shifted, plain + 3)
    assert float(heavy.var()) == pytest.approx(1, abs=0.1)
    kurtosis = [float(tokens.pow(4).mean() / tokens.square().mean() ** 2) for tokens in (plain, heavy)]
    assert kurtosis[0] == pytest.approx(3, abs=0.1)
    assert kurtosis[1] > 6


def test_rows_repeat_in_another_order_every_epoch() -> None:
    """Batches go through a part of them, all of these once before any comes again; other rows never come."""
    task = KnownTask("noise", rows=12, seed=4)
    everything, targets = task._all_rows

    def rows(batches: range, among: range | None = None) -> list[int]:
        found = torch.cat([task.batch(4, number, among)[0] for number in batches])
        return [int((everything == one).flatten(1).all(1).nonzero()) for one in found]

    assert sorted(rows(range(3))) == sorted(rows(range(3, 6))) == list(range(12))
    assert rows(range(3)) != rows(range(3, 6))
    assert sorted(rows(range(2), range(4, 12))) == list(range(4, 12))
    assert sorted(rows(range(1), range(4))) == list(range(4))
    tokens, answers = task.batch(5, 0)  # also where the batch is no part of an epoch
    place = int((everything == tokens[0]).flatten(1).all(1).nonzero())
    assert torch.equal(answers[0], targets[place])
    new, _ = task.without_end.batch(4, 0)
    assert not any(bool((everything == one).flatten(1).all(1).any()) for one in new)


def test_the_answer_is_the_teachers() -> None:
    assert [KnownTask(kind, heads=3).answer for kind in TASKS] == [3, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "riddle"}, "kind = 'riddle': must be one of teacher, bag, noise"),
        ({"heads": 0}, "heads = 0: must be from 1 to 8"),
        ({"heads": 9}, "heads = 9: must be from 1 to 8"),
        ({"heads": 5, "width": 16}, "heads = 5: must be from 1 to 4"),
        ({"heads": 4, "rank": 4}, "heads = 4: must be from 1 to 3: each head has 10 directions of 32"),
        ({"rank": 0}, "rank = 0: must be at least 1"),
        ({"heads": 2, "strengths": (1.0,)}, "strengths = .*: must be 2, one for each head"),
        ({"rows": -1}, "rows = -1: must be at least 1, or 0"),
    ],
)
def test_bad_tasks_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        KnownTask(**options)  # type: ignore[arg-type]
