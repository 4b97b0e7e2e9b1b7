"""The student is attention and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meristem.growth.apply import apply_edit
from meristem.growth.edits import AddHead
from meristem.growth.head_surgery import empty_head
from meristem.model.block import Pass
from meristem.synthetic import KnownTask, Student


def plain(student: Student, tokens: Tensor) -> Tensor:
    """The same by its formula."""
    layer, attention = student.plan.layers[0], student.stack[0].attention
    shape = (layer.heads, layer.head_dim)
    queries, keys, values = (
        (tokens @ part.T).unflatten(-1, shape) for part in attention.qkv.weight.split(layer.heads * layer.head_dim)
    )
    scores = torch.einsum("bihe,bjhe->bhij", queries, keys) / layer.head_dim**0.5
    head_outputs = torch.einsum("bhij,bjhe->bihe", scores.softmax(-1), values)
    return head_outputs.flatten(-2) @ attention.out.weight.T


@pytest.mark.parametrize("heads", [1, 3])
def test_what_the_heads_write_is_plain_attention(heads: int) -> None:
    student = Student(32, 16, 4, heads, seed=2).double()
    tokens = KnownTask().batch(5, 0)[0].double()
    torch.testing.assert_close(student(tokens), plain(student, tokens), rtol=1e-10, atol=1e-12)


def test_tokens_have_no_order() -> None:
    student = Student(32, 16, 4, 2).double()
    tokens = KnownTask().batch(2, 0)[0].double()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(student(tokens[:, order]), student(tokens)[:, order], rtol=1e-10, atol=1e-12)
    assert student.attention_mask(tokens).all()
    assert student.attention_mask(tokens).shape == (16, 16)


def test_the_loss_of_an_answer_of_zero_is_the_size_of_the_targets() -> None:
    student = Student(32, 16, 4)
    tokens, targets = KnownTask().batch(6, 0)
    with torch.no_grad():
        student.stack[0].attention.out.weight.zero_()
        loss = float(student.loss(tokens, targets))
    assert loss == pytest.approx(float(targets.square().sum() / (6 * 16)))


def test_the_seed_says_which_student() -> None:
    weights = [Student(32, 16, 4, seed=seed).stack[0].attention.qkv.weight for seed in (3, 3, 4)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_watch_sees_what_is_read_and_written() -> None:
    student = Student(32, 16, 4, 2)
    tokens, targets = KnownTask().batch(3, 0)
    seen: list[Pass] = []
    student.loss(tokens, targets, watch=lambda layer, number, one: seen.append(one))
    (only,) = seen
    assert only.stream is tokens
    torch.testing.assert_close(only.update, student(tokens))


def test_a_birth_changes_nothing_yet() -> None:
    student = Student(32, 16, 4, 2)
    tokens = KnownTask().batch(3, 0)[0]
    before = student(tokens)
    attention = student.stack[0].attention
    blank = empty_head(attention.layer, attention.qkv.weight.detach(), attention.out.weight.detach())
    apply_edit(student, None, AddHead(0, blank))
    assert student.plan.heads == (3,)
    torch.testing.assert_close(student(tokens), before, rtol=1e-6, atol=1e-6)
