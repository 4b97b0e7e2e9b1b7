"""What a model cannot be called with is refused in a sentence that names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meristem.decoding import Sampling, generate, stream
from meristem.errors import InputError
from meristem.model import Classifier, Decoder
from meristem.model.inputs import check_classes, check_tokens
from meristem.plan import Plan

SHAPE: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 11, "context": 8}
TOKENS = torch.randint(1, 11, (2, 8), generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 2])


def decoder() -> Decoder:
    return Decoder(Plan.uniform(**SHAPE))


def classifier() -> Classifier:
    return Classifier(Plan.uniform(**SHAPE, classes=3))


WRONG_TOKENS: dict[str, tuple[Any, str]] = {
    "1-D": (TOKENS[0], r"tokens = \(8,\): must be \(B, T\), .*; use tokens\[None\]"),
    "3-D": (TOKENS[None], r"tokens = \(1, 2, 8\): must be \(B, T\), one sequence in each row$"),
    "float": (TOKENS.float(), r"tokens = torch.float32: must be token ids of type torch.int64"),
    "bool": (TOKENS.bool(), r"tokens = torch.bool: must be token ids of type"),
    "a list": (TOKENS.tolist(), r"tokens = 'list': must be a tensor of token ids"),
    "too long": (TOKENS.repeat(1, 2), r"tokens = 16: positions are more than the 8 there are"),
    "too large": (TOKENS + 10 * (TOKENS.max() == TOKENS), r"tokens = \d\d: must be token ids from 0 to 10"),
    "negative": (TOKENS * torch.tensor([1, 1, -1, 1, 1, 1, 1, 1]), r"tokens = -\d+: must be token ids from 0 to 10"),
}


@pytest.mark.parametrize("tokens", WRONG_TOKENS)
def test_wrong_tokens(tokens: str) -> None:
    given, message = WRONG_TOKENS[tokens]
    for model, targets in ((decoder(), TOKENS), (classifier(), CLASSES)):
        with pytest.raises(InputError, match=message):
            model(given)
        if tokens != "too long":  # there the targets would be wrong as well
            with pytest.raises(InputError, match=message):
                model(given, targets)
    with pytest.raises(InputError, match=message):
        decoder().hidden(given)


WRONG_TARGETS: dict[str, tuple[type[Decoder | Classifier], Any, str]] = {
    "one too few": (Decoder, TOKENS[:, :-1], r"targets = \(2, 7\): must have the shape \(2, 8\)"),
    "transposed": (Decoder, TOKENS.T, r"targets = \(8, 2\): must have the shape \(2, 8\): the tokens that follow"),
    "float": (Decoder, TOKENS.float(), r"targets = torch.float32: must be the tokens that follow each position"),
    "a list": (Decoder, TOKENS.tolist(), r"targets = 'list': must be a tensor \(2, 8\)"),
    "out of range": (Decoder, TOKENS + 100, r"targets = 1\d\d: must be from 0 to 10, or -100"),
    "tokens for rows": (Classifier, TOKENS, r"targets = \(2, 8\): must have the shape \(2,\): the class of each row"),
    "float classes": (Classifier, CLASSES.float(), r"targets = torch.float32: must be the class of each row"),
    "no such class": (Classifier, CLASSES + 1, r"targets = 3: must be classes from 0 to 2"),
    "a negative class": (Classifier, CLASSES - 1, r"targets = -1: must be classes from 0 to 2"),
}


@pytest.mark.parametrize("targets", WRONG_TARGETS)
def test_wrong_targets(targets: str) -> None:
    kind, given, message = WRONG_TARGETS[targets]
    model = decoder() if kind is Decoder else classifier()
    with pytest.raises(InputError, match=message):
        model(TOKENS, given)


def test_rows_without_a_class_are_left_out() -> None:
    model = classifier()
    alone, both = (model(TOKENS, torch.tensor(classes)).loss for classes in ([0, -100], [0, 0]))
    assert 0 < float(alone.detach()) < float(both.detach())


@pytest.mark.parametrize("model", [decoder, classifier])
def test_whole_numbers_of_either_size_are_tokens(model: Any) -> None:
    assert torch.equal(model()(TOKENS.int()).logits, model()(TOKENS).logits)


def test_nobody_waits_for_values_on_another_device() -> None:
    """A device that has none would fail if they were looked at."""
    check_tokens((TOKENS + 100).to("meta"), 11)
    check_classes((CLASSES + 100).to("meta"), 3)


@pytest.mark.parametrize("kind", [Decoder, Classifier])
def test_models_are_built_from_plans(kind: Any) -> None:
    with pytest.raises(InputError, match="plan = 'dict': must be a Plan"):
        kind(SHAPE)


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), classifier(), None], ids=["Linear", "Classifier", "None"])
def test_only_a_language_model_continues_a_text(model: Any) -> None:
    with pytest.raises(InputError, match=rf"model = '{type(model).__name__}': must be a Decoder"):
        generate(model, [[1]], max_tokens=2)
    with pytest.raises(InputError, match=rf"model = '{type(model).__name__}': must be a Decoder"):
        stream(model, [[1]], max_tokens=2)


@pytest.mark.parametrize("prompts", ["text", [1, 2], ["text"], None, TOKENS, [[]]], ids=str)
def test_prompts_are_lists_of_token_ids(prompts: Any) -> None:
    with pytest.raises(InputError, match=r"must be one or more prompts, each a list of at least one token id"):
        generate(decoder(), prompts, max_tokens=2)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_tokens": 2.5}, r"max_tokens = 2\.5: must be an integer"),
        ({"sampling": 0.5}, r"sampling = 0\.5: must be a Sampling"),
        ({"vocabulary": "5"}, r"vocabulary = '5': must be from 1 to the model's 11"),
        ({"prompts": [[1.5]]}, r"prompts = 1\.5: must be token ids from 0 to 10"),
    ],
)
def test_what_is_asked_of_generation(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(decoder(), **{"prompts": [[1]], "max_tokens": 2, **asked})


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "hot"), ("top_k", 2.5), ("top_p", "x"), ("seed", 0.5), ("seed", None)]
)
def test_wrong_types_of_sampling(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{field} = {value!r}: must be"):
        Sampling(**{field: value})
