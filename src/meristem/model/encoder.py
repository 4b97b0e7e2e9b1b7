"""The encoder that tells classes of sequences apart, built from a plan with `classes`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from meristem.errors import InputError
from meristem.model.attention import View
from meristem.model.block import INIT_STD, Norm, draw_normal
from meristem.model.decoder import Decoder
from meristem.model.inputs import check_classes, check_plan, check_targets, check_tokens
from meristem.model.transformer import Regions, Transformer, Watch
from meristem.plan import PADDING, Plan


def _logits(norm: Norm, classes: nn.Linear, x: Tensor, branch: Tensor, shares: Tensor) -> Tensor:
    """Logits (B, classes) of a stream (B, T, d), each of whose tokens counts with its share (B, T)."""
    return classes((norm(x, branch)[1] * shares[..., None]).sum(1) * norm.weight)


def _class_loss(
    norm: Norm, classes: nn.Linear, x: Tensor, branch: Tensor, shares: Tensor, targets: Tensor, weights: Tensor | None
) -> Tensor:
    return _loss_of(_logits(norm, classes, x, branch, shares), targets, weights)


def _loss_of(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """The mean cross entropy over the rows, each times the weight of its class.

    The weights are not divided out again, as they would be in a weighted mean: the loss of a batch is then the mean of
    the losses of its parts, however many processes and micro-batches share it.
    """
    return cross_entropy(logits, targets, weights, reduction="sum") / len(targets)


class Classifier(Transformer):
    """An encoder with the structure of `plan`, initialised from `seed`.

    Every token sees all others of its row, both ways. Tokens are ids (B, T), with padding (0) on the right and at least
    one real token in each row. With targets (B,), the class of each row, it returns the loss, a scalar; without them
    the logits (B, classes). `class_weights` (classes,) belong to the training loss and not to the model: they are not
    saved with it.

    >>> model = Classifier(Plan.uniform(layers=2, width=32, heads=4, vocabulary=100, context=16, classes=3))
    >>> tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    >>> model(tokens, targets=torch.tensor([2, 0])).loss.backward()
    >>> model(tokens).logits.shape
    torch.Size([2, 3])
    """

    class_weights: Tensor | None

    def __init__(self, plan: Plan, seed: int = 0, class_weights: Tensor | None = None) -> None:
        check_plan(plan)
        if plan.classes is None:
            raise InputError("plan.classes", None, "must be the number of classes; without them a plan is a Decoder's")
        super().__init__(plan)
        self.classes = nn.Linear(plan.width, plan.classes)
        self.register_buffer("class_weights", class_weights, persistent=False)
        self.initialise(seed)

    def draw(self, generator: torch.Generator) -> None:
        super().draw(generator)
        draw_normal(self.classes.weight, INIT_STD, generator)
        nn.init.zeros_(self.classes.bias)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        regions: Regions = Regions(),  # noqa: B008  (immutable)
        watch: Watch | None = None,
    ) -> Tensor:
        """The mean cross entropy, a scalar, of tokens (B, T) whose rows have the classes `targets` (B,).

        >>> classifier = Classifier(Plan.uniform(layers=2, width=32, heads=4, vocabulary=100, context=16, classes=3))
        >>> classifier.loss(tokens, torch.tensor([2, 0])).shape
        torch.Size([])
        """
        check_tokens(tokens, self.plan.vocabulary)
        check_targets(targets, (len(tokens),), "the class of each row", (torch.int64, torch.uint8))
        check_classes(targets, self.classes.out_features)
        stream = self.stream(tokens, self._view(tokens), regions=regions, watch=watch)
        weights = self.class_weights
        loss = regions.leave(_class_loss, self.norm, self.classes, *stream, self.shares(tokens), targets, weights)
        return self.with_idle_gates(loss)

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits (B, classes), for those who want both."""
        return self.with_idle_gates(_loss_of(logits, targets, self.class_weights))

    def logits(
        self,
        tokens: Tensor,
        regions: Regions = Regions(),  # noqa: B008  (immutable)
    ) -> Tensor:
        """Logits of the classes, (B, classes), of tokens (B, T) with padding on the right.

        >>> classifier = Classifier(Plan.uniform(layers=2, width=32, heads=4, vocabulary=100, context=16, classes=3))
        >>> classifier.logits(tokens).shape
        torch.Size([2, 3])
        """
        check_tokens(tokens, self.plan.vocabulary)
        stream = self.stream(tokens, self._view(tokens), regions=regions)
        return _logits(self.norm, self.classes, *stream, self.shares(tokens))

    def attention_mask(self, tokens: Tensor) -> Tensor:
        """Every real token may look at all real tokens of its row, (B, T, T)."""
        real = tokens != PADDING
        return real[:, :, None] & real[:, None, :]

    def shares(self, tokens: Tensor) -> Tensor:
        """How much each token counts in what the answer is read from, (B, T): all real ones alike, or the first."""
        real = (tokens != PADDING).to(self.norm.weight.dtype)
        if self.plan.pooling == "first":
            return (torch.arange(tokens.shape[1], device=tokens.device) == 0).to(real).expand_as(real)
        return real / real.sum(1, keepdim=True)

    def _view(self, tokens: Tensor) -> View:
        """Every token sees the real ones of its row."""
        real = tokens != PADDING
        # To ask a GPU whether there is padding would mean to wait for it: there, the mask is always made.
        masked = tokens.device.type != "cpu" or not bool(real.all())
        return View(causal=False, mask=real[:, None, None, :].expand(-1, 1, tokens.shape[1], -1) if masked else None)


def build_model(plan: Plan, seed: int = 0) -> Transformer:
    """A model of the kind that a plan describes: a Classifier if it has classes, else a Decoder."""
    return Decoder(plan, seed) if plan.classes is None else Classifier(plan, seed)
