"""The sections of a configuration but that of growth: frozen dataclasses with their defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from meristem.choices import (
    Attention,
    BestBy,
    ClassWeights,
    OnDivergence,
    OptimizerKind,
    Parallel,
    Pooling,
    RateCurve,
    Schedule,
    TrackerName,
)
from meristem.errors import InputError
from meristem.plan import Plan, Shape
from meristem.schedules import PREFERRED_DIMS
from meristem.settings import of_type

WHOLE = ("model.plan", "model.start_from")  # what brings a whole plan along


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model: a schedule, an explicit list of head counts, a plan file, or that of another run."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    schedule: Schedule = "prism"
    head_list: tuple[int, ...] = ()  # explicit head counts, instead of a schedule
    dims: tuple[int, ...] = PREFERRED_DIMS
    shuffle_seed: int = 0
    kv_group: int = 1
    context: int = 1024
    feed_forward: int | None = None  # 8/3 of the width if not given
    head_dim: int | None = None  # width / heads if not given; for the uniform schedule and lists
    pooling: Pooling = "mean"  # what a classifier's answer is read from: all tokens, or the first
    qk_norm: bool = False  # RMS-norm every query and key, head by head
    plan: str | None = None  # a plan file, instead of all of the above
    start_from: str | None = None  # a run, whose newest plan and weights the model begins with

    @property
    def whole(self) -> str | None:
        """The key that brings a whole plan along, beside which those of its shape have no effect; None without one."""
        return whole_key({f"model.{entry.name}": getattr(self, entry.name) for entry in fields(self)})

    @property
    def scheduled(self) -> bool:
        """Whether heads follow from the schedule, and not from a whole plan or a list."""
        return not (self.whole or self.head_list)

    def build(self, vocabulary: int, classes: int | None = None, longest: int | None = None) -> Plan:
        """The plan for a vocabulary, and, of a classifier, for so many classes of rows up to a length."""
        if self.plan is not None:
            plan = Plan.load(self.plan)
            if plan.vocabulary < vocabulary:
                raise InputError("model.plan", plan.vocabulary, f"vocabulary is smaller than the data's {vocabulary}")
            if plan.classes != classes:
                raise InputError("model.plan", plan.classes, f"classes must be those of the data, {classes}")
            return plan
        shape: Shape = {
            "vocabulary": vocabulary, "context": min(self.context, longest or self.context),
            "feed_forward": self.feed_forward, "kv_group": self.kv_group, "head_dim": self.head_dim,
            "classes": classes, "pooling": self.pooling, "qk_norm": self.qk_norm,
        }  # fmt: skip
        try:
            if self.head_list:
                return Plan.from_heads(self.head_list, width=self.width, **shape)
            return Plan.scheduled(
                self.schedule, layers=self.layers, width=self.width, heads=self.heads, dims=self.dims,
                seed=self.shuffle_seed, **shape,
            )  # fmt: skip
        except InputError as error:
            if error.field in {field.name for field in fields(self)}:
                raise InputError(f"model.{error.field}", error.value, error.expected) from None
            raise


SHAPE = tuple(key for key in (f"model.{entry.name}" for entry in fields(ModelConfig)) if key not in WHOLE)


def whole_key(values: Mapping[str, Any]) -> str | None:
    """The key by which `section.key` values bring a whole plan along, if they do."""
    return next((key for key in WHOLE if values.get(key) is not None), None)


@dataclass(frozen=True)
class DataConfig:
    """A folder made by `meristem data prepare` or `prepare-labelled`, and the order of its windows or rows."""

    path: str = "data"
    seed: int = 0
    held_back: int = 0  # rows, or windows, of the training data that are not trained on; policies measure on them
    class_weights: ClassWeights = "none"  # of a classifier's loss; balanced: classes count alike, whatever their rows


@dataclass(frozen=True)
class TrainConfig:
    """Length and batch of the run, and where it runs."""

    steps: int = 1000
    flops: float | None = None  # what the run may spend, instead of steps: these are then found out
    batch_size: int = 32  # sequences per update, over all processes
    micro_batch: int | None = None  # sequences per forward pass and process; all at once if not given
    seed: int = 0  # initial weights
    device: str = "auto"
    compile: bool = False  # blocks by torch.compile; our own kernels are as fast, and births need no new ones
    attention: Attention = "auto"
    parallel: Parallel = "ddp"  # under torchrun: every process has the whole model, or (fsdp) its part of it
    max_skipped: int = 10  # updates with non-finite loss or gradient in a row that are taken for divergence
    on_divergence: OnDivergence = "stop"  # or rewind: go back to the last good checkpoint and pass over these batches
    max_rewinds: int = 3  # times that is done before the run stops
    branch_from: str | None = None  # RUN@STEP: begin there, at a checkpoint of another run, and let the rate fall
    recompute: bool = False  # blocks in the backward pass, for a third more work and far less memory
    average: float = 0.0  # memory of an average of the weights, such as 0.999; 0 keeps none

    def __post_init__(self) -> None:
        if self.flops is not None and not 0 < self.flops < math.inf:
            raise InputError("train.flops", self.flops, "must be above 0, and finite")
        if not 0 <= self.average < 1:
            expected = "must be below 1, and 0 or above: 0.999 is an average over about the last 1000 updates"
            raise InputError("train.average", self.average, expected)
        if self.branch_from is not None and re.fullmatch(r".+@\d{1,18}", self.branch_from, re.DOTALL) is None:
            expected = "must be RUN@STEP, the folder of a run and a step of which it has a checkpoint"
            raise InputError("train.branch_from", self.branch_from, expected)

    @property
    def branch_run(self) -> str | None:
        """The folder of the run that this one branches off."""
        return None if self.branch_from is None else self.branch_from.rpartition("@")[0]

    @property
    def branch_step(self) -> int | None:
        """The updates that had been done where it branches off."""
        return None if self.branch_from is None else int(self.branch_from.rpartition("@")[2])


RATES: dict[OptimizerKind, float] = {"adamw": 6e-4, "muon": 2e-3}  # peak, where none is given


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or Muon for the matrices of the blocks, and the curve of the learning rate."""

    kind: OptimizerKind = "adamw"
    lr: float | None = None  # that of the kind if not given
    curve: RateCurve = "cosine"
    warmup: float = 0.025  # fraction of the run
    decay: float = 0.2  # of wsd: fraction of the run at its end in which the rate falls; a branch falls from its start
    final: float = 0.1  # last learning rate, as a fraction of lr
    momentum: float = 0.95  # of muon's matrices; the betas are AdamW's
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    clip: float = 1.0  # gradient norm; 0 turns clipping off

    def __post_init__(self) -> None:
        of_type("optimizer.kind", self.kind, OptimizerKind)
        of_type("optimizer.curve", self.curve, RateCurve)
        for name in ("warmup", "decay", "final", "momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"optimizer.{name}", getattr(self, name), "must be from 0 to 1")
        for name in ("momentum", "beta1", "beta2"):
            if getattr(self, name) == 1:
                raise InputError(f"optimizer.{name}", 1.0, "must be below 1, or nothing is ever learned")
        for name in ("lr", "eps", "weight_decay", "clip"):
            value = self.rate if name == "lr" else getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(f"optimizer.{name}", value, "must be 0 or above, and finite")

    @property
    def rate(self) -> float:
        """The peak of the learning rate."""
        return RATES[self.kind] if self.lr is None else self.lr


@dataclass(frozen=True)
class EvalConfig:
    """What is measured during the run, on held-out windows or rows that never change."""

    every: int = 100  # steps; 0 evaluates at the end only
    windows: int = 64
    rows: int = 0  # of a classifier; 0 is all
    batch: int = 16
    best_by: BestBy = "held_out_loss"  # which number says what is best; the others are a classifier's
    patience: int = 0  # evaluations in a row that are not better, after which the run ends; 0 never ends it

    def __post_init__(self) -> None:
        if self.patience and not self.every:
            expected = "needs evaluations to go by, and eval.every = 0 evaluates at the end only"
            raise InputError("eval.patience", self.patience, expected)


@dataclass(frozen=True)
class CheckpointConfig:
    """How often the state is saved, and how many of the newest are kept."""

    every: int = 500  # steps; 0 saves at the end only
    keep: int = 2
    keep_best: bool = False  # also save where eval.best_by is best so far, and keep that checkpoint beside the newest


@dataclass(frozen=True)
class LogConfig:
    """How often metrics are written; trackers besides metrics.jsonl: tensorboard, trackio, wandb."""

    every: int = 10
    trackers: tuple[TrackerName, ...] = ()
