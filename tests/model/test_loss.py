"""The vocabulary loss against plain cross entropy on all logits."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from meristem.errors import InputError
from meristem.model import linear_cross_entropy

from .helpers import Recorder, needs_gpu, relative_error

LIMITS = [(torch.float32, 1e-5), (torch.float64, 1e-12)]


def problem(
    rows: int, width: int, vocabulary: int, dtype: torch.dtype, ignored: float = 0.3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None, limit: float) -> None:
    """Loss and both gradients, with an upstream gradient that is not 1."""
    found = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    expected = cross_entropy(hidden @ weight.T, targets)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=limit, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(hidden, weight, targets, chunk=chunk), expected, rtol=limit, atol=0
        )
    gradients, references = (torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (found, expected))
    for mine, theirs in zip(gradients, references, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error(mine, theirs) <= limit


@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize("chunk", [None, 1, 7, 16, 48, 49, 1000])
def test_loss_and_gradients(chunk: int | None, dtype: torch.dtype, limit: float) -> None:
    check(*problem(48, 16, 37, dtype), chunk, limit)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 30), vocabulary=st.integers(1, 30), chunk=st.integers(1, 40), seed=st.integers(0, 99))
def test_loss_and_gradients_of_any_size(rows: int, vocabulary: int, chunk: int, seed: int) -> None:
    hidden, weight, targets = problem(rows, 5, vocabulary, torch.float64, seed=seed)
    targets[0] = 0  # at least one to predict; the mean over none is a case of its own below
    found = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    expected = cross_entropy(hidden @ weight.T, targets)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    gradients, references = (torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected))
    for mine, theirs in zip(gradients, references, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("chunk", [None, 5])
def test_nothing_to_predict(chunk: int | None) -> None:
    hidden, weight, targets = problem(12, 8, 20, torch.float32, ignored=2.0)
    assert bool((targets == -100).all())
    loss = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    assert float(loss.detach()) == 0
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("target", [-1, 20])
@pytest.mark.parametrize("chunk", [None, 5])
def test_labels_outside_the_vocabulary_are_refused(target: int, chunk: int | None) -> None:
    hidden, weight, targets = problem(12, 8, 20, torch.float32)
    targets[7] = target
    with pytest.raises(InputError, match=f"targets = {target}"):
        linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    with torch.no_grad(), pytest.raises(InputError, match=f"targets = {target}"):
        linear_cross_entropy(hidden, weight, targets, chunk=chunk)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = problem(12, 8, 20, torch.float32)
    with torch.no_grad():
        hidden *= 1e4
    check(hidden, weight, targets, 5, 1e-5)


def test_only_the_weight_needs_a_gradient() -> None:
    hidden, weight, targets = problem(12, 8, 20, torch.float32)
    expected = torch.autograd.grad(cross_entropy(hidden @ weight.T, targets), weight)[0]
    found = torch.autograd.grad(linear_cross_entropy(hidden.detach(), weight, targets, chunk=5), weight)[0]
    assert relative_error(found, expected) <= 1e-5


@pytest.mark.parametrize("chunk", [None, 7])
def test_under_autocast(chunk: int | None) -> None:
    """Products in bf16, the loss and the gradients in the dtype of the weights."""
    hidden, weight, targets = problem(64, 32, 50, torch.float32)
    with torch.no_grad():
        weight *= 0.2
    expected = cross_entropy(hidden @ weight.T, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    assert found.dtype == torch.float32
    assert float((found - expected).detach().abs()) <= 1e-2
    assert float((found - expected).detach().abs()) > 0  # it did run in bf16
    gradients, references = (torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected))
    for mine, theirs in zip(gradients, references, strict=True):
        assert mine.dtype == torch.float32
        assert relative_error(mine, theirs) <= 1e-2


@pytest.mark.parametrize("autocast", [False, True])
def test_the_logits_of_all_rows_are_never_held(autocast: bool) -> None:
    rows, vocabulary, chunk = 40, 96, 8
    hidden, weight, targets = problem(rows, 6, vocabulary, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Recorder() as recorder:
        linear_cross_entropy(hidden, weight, targets, chunk=chunk).backward()
    largest = max(torch.Size(shape).numel() for shape, _ in recorder.made)
    assert ((chunk, vocabulary), torch.bfloat16 if autocast else torch.float32) in recorder.made
    assert largest == chunk * vocabulary


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 1000])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_loss_and_gradients_on_the_gpu(chunk: int | None, dtype: torch.dtype, limit: float) -> None:
    hidden, weight, targets = problem(2500, 64, 5003, torch.float32)
    with torch.no_grad():
        weight *= 0.1
    wide = hidden.double() @ weight.double().T
    references = torch.autograd.grad(cross_entropy(wide, targets), (hidden, weight))
    expected = cross_entropy(wide, targets)
    leaves = [x.detach().cuda().requires_grad_() for x in (hidden, weight)]
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = linear_cross_entropy(leaves[0], leaves[1], targets.cuda(), chunk=chunk)
    assert relative_error(found.cpu(), expected) <= limit
    for mine, theirs in zip(torch.autograd.grad(found, leaves), references, strict=True):
        assert relative_error(mine.cpu(), theirs) <= limit
