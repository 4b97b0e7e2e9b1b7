"""What a run is about: its model, its batches, and what is measured on held-out data. The data folder decides."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meristem.config import Config
from meristem.data import (
    LabelledData,
    LabelledRows,
    RowSampler,
    Sampler,
    TokenData,
    batch,
    held_apart,
    padded_length,
    padded_vocabulary,
    row_batch,
)
from meristem.errors import InputError
from meristem.growth import Policy
from meristem.model import Classifier, Decoder, Transformer
from meristem.plan import Plan
from meristem.plan.costs import Flops
from meristem.training.classification import classify, spread_rows
from meristem.training.held_out import held_out_loss, held_out_windows
from meristem.training.starting import Start

Ids = NDArray[np.int64]


class Task(Protocol):
    """What the loop asks of it."""

    tokens_per_step: int
    steps_per_epoch: float  # updates until as much has been seen as there is to train on
    held_back: int  # rows, or windows, that are not trained on, as policies measure with them
    unmeasured: str | None  # why nothing is measured on held-out data

    def model(self, plan: Plan) -> Transformer:
        """A new model."""

    def batch(self, step: int, rank: int, world: int) -> tuple[Ids, Ids]:
        """Tokens (b, T) and targets (b, ...) of a process's share of a step: a function of its arguments alone."""

    def held_back_batch(self, number: int, rank: int, world: int) -> tuple[Ids, Ids]:
        """The same of the rows that are held back, in turn."""

    def measure(self, model: Transformer, device: torch.device) -> dict[str, float]:
        """Numbers about held-out data by their names in metrics.jsonl; `held_out_loss` is among them."""

    def step_flops(self, plan: Plan) -> Flops:
        """Training FLOPs of one update, as counted by the plan's formulas."""


class LanguageTask:
    """The task of predicting the next token: shuffled windows of a stream."""

    def __init__(self, config: Config, plan: Plan, data: TokenData) -> None:
        self.config = config
        self.stream, held_out = data.split("train"), data.split("held_out")
        self.sampler = Sampler(len(self.stream), plan.context, config.train.batch_size, config.data.seed)
        self.tokens_per_step = config.train.batch_size * plan.context
        self.steps_per_epoch = len(self.stream) / self.tokens_per_step
        self.held_back = held_back_rows(config, self.sampler.windows)
        if self.held_back:
            self.measuring, self.sampler = held_apart(self.sampler, self.held_back)
            self.steps_per_epoch *= 1 - self.held_back / self.sampler.windows
        self.windows: Tensor | None = None
        self.unmeasured: str | None = None
        if len(held_out) > plan.context:
            self.windows = held_out_windows(held_out, plan.context, config.eval.windows)
        else:
            self.unmeasured = f"no held-out loss: fewer than context + 1 = {plan.context + 1} tokens are held out"

    def model(self, plan: Plan) -> Decoder:
        return Decoder(plan, seed=self.config.train.seed)

    def batch(self, step: int, rank: int, world: int) -> tuple[Ids, Ids]:
        return batch(self.stream, self.sampler, step, rank, world)

    def held_back_batch(self, number: int, rank: int, world: int) -> tuple[Ids, Ids]:
        return batch(self.stream, self.measuring, number, rank, world)

    def measure(self, model: Transformer, device: torch.device) -> dict[str, float]:
        assert self.windows is not None
        loss = held_out_loss(model, self.windows, batch=self.config.eval.batch, device=device)
        return {"held_out_loss": loss, "perplexity": math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.nan}

    def step_flops(self, plan: Plan) -> Flops:
        return plan.cost.training_of(self.config.train.batch_size, plan.context)


class ClassificationTask:
    """The task of telling classes apart: shuffled rows, padded to the longest of a batch, or alike if `fixed`."""

    def __init__(self, config: Config, plan: Plan, data: LabelledData, *, fixed: bool) -> None:
        self.config, self.context, self.fixed = config, plan.context, fixed
        self.rows, self.held_out = data.split("train"), data.split("held_out")
        self.sampler = RowSampler(len(self.rows), config.train.batch_size, config.data.seed)
        self.held_back = held_back_rows(config, len(self.rows))
        if self.held_back:
            self.measuring, self.sampler = held_apart(self.sampler, self.held_back)
        self.chosen = spread_rows(len(self.held_out), config.eval.rows)
        self.unmeasured = None if len(self.chosen) else "nothing is measured: no rows are held out"
        lengths = np.minimum(self.rows.lengths, plan.context)
        self.tokens_per_step = round(config.train.batch_size * float(lengths.mean()))
        self.steps_per_epoch = (len(self.rows) - self.held_back) / config.train.batch_size
        self.weights = class_weights(self.rows, config.data.class_weights, len(data.index.classes))

    def model(self, plan: Plan) -> Classifier:
        return Classifier(plan, seed=self.config.train.seed, class_weights=self.weights)

    def batch(self, step: int, rank: int, world: int) -> tuple[Ids, Ids]:
        return row_batch(self.rows, self.sampler, step, rank, world, self.context, fixed=self.fixed)

    def held_back_batch(self, number: int, rank: int, world: int) -> tuple[Ids, Ids]:
        return row_batch(self.rows, self.measuring, number, rank, world, self.context, fixed=self.fixed)

    def measure(self, model: Transformer, device: torch.device) -> dict[str, float]:
        batch = self.config.eval.batch
        scores = classify(model, self.held_out, batch=batch, device=device, chosen=self.chosen)
        return {"held_out_loss": scores.loss, "accuracy": scores.accuracy, "macro_f1": scores.macro_f1}

    def step_flops(self, plan: Plan) -> Flops:
        """The mean over the batches of the first epoch, with their padding."""
        size, total = self.config.train.batch_size, Flops()
        for length, count in self._lengths.items():
            total += replace(plan, context=length).cost.training_of(size, length) * count
        steps = self._lengths.total()
        return Flops(round(total.full / steps), round(total.causal / steps))

    @cached_property
    def _lengths(self) -> Counter[int]:
        """How many batches of the first epoch have each length."""
        if self.fixed:
            return Counter([self.context])
        steps = range(-(-(len(self.rows) - self.held_back) // self.config.train.batch_size))
        return Counter(padded_length(self.rows.lengths[self.sampler.rows(step)], self.context) for step in steps)


def held_back_rows(config: Config, rows: int) -> int:
    """How many of so many training rows, or windows, a run does without: those of `data.held_back`, or more.

    Births by demand ask for enough of them where a run comes to rows twice; otherwise what comes next is not known to
    the model either. Policies of somebody's own are not asked, as their modules need not be there when a run is looked
    at.
    """
    if config.data.held_back >= rows:
        raise InputError("data.held_back", config.data.held_back, f"must be below {rows}, all there are to train on")
    policy: Policy | None = config.policy("incrt")
    repeats = config.train.steps * config.train.batch_size > rows
    asked = policy.held_back(rows) if policy is not None and (repeats or config.data.held_back) else 0
    return max(config.data.held_back, asked)


def class_weights(rows: LabelledRows, kind: str, classes: int) -> Tensor | None:
    """Weights (classes,) in the loss, 1 on average over the training rows if all classes occur; None if all are 1."""
    if kind == "none":
        return None
    counts = torch.bincount(torch.from_numpy(rows.labels), minlength=classes)
    return len(rows) / (classes * counts.clamp(min=1))


def check_kind(config: Config, data: TokenData | LabelledData) -> None:
    """Refuse settings that are of text alone or of labelled rows alone, where the data are of the other kind."""
    if isinstance(data, TokenData):
        if config.data.class_weights != "none":
            expected = "is of classifiers, and this data has no labels"
            raise InputError("data.class_weights", config.data.class_weights, expected)
        if config.eval.best_by != "held_out_loss":
            raise InputError("eval.best_by", config.eval.best_by, "is of classifiers; take held_out_loss")
    else:
        for name in (name for name in ("sgt", "observe") if config.growth.has(name)):
            raise InputError("growth.policies", name, "is about the entropy of causal attention; a classifier has none")
        for name in (name for name in ("static_loops", "block_loop") if config.growth.has(name)):
            raise InputError("growth.policies", name, "is of language models: classifiers are trained without loops")


def initial_plan(config: Config, data: TokenData | LabelledData) -> Plan:
    """The plan that the configuration describes, or that of the run it starts from, for this data."""
    check_kind(config, data)
    start = Start.of(config)
    if start is not None:
        return start.plan(data)
    if isinstance(data, TokenData):
        return config.model.build(padded_vocabulary(data.index.tokenizer.vocabulary))
    return config.model.build(padded_vocabulary(data.index.ids), len(data.index.classes), data.index.length)


def make_task(config: Config, plan: Plan, data: TokenData | LabelledData, *, fixed: bool) -> Task:
    """The task of a run; with `fixed`, all batches have one shape, as compiled code asks for."""
    if isinstance(data, TokenData):
        return LanguageTask(config, plan, data)
    return ClassificationTask(config, plan, data, fixed=fixed)
