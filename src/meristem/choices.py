"""The words that a setting may be, as types: one home for who checks them, and for the command line that lists them.

Nothing heavy is imported here, so that `--help` need not wait for torch.
"""

from __future__ import annotations

from typing import Literal

Schedule = Literal["prism", "linear", "geometric", "cosine", "uniform", "reverse", "bump", "shuffle"]
Pooling = Literal["mean", "first"]  # what a classifier's answer is read from: all tokens alike, or the first one
Attention = Literal["auto", "cudnn", "flash", "efficient", "math"]

OnError = Literal["refuse", "skip"]  # what is done about a bad line, row or file
Quote = Literal["auto", "csv", "none"]
OtherLabels = Literal["count", "refuse"]  # what is done about labels that a run does not know
ClassWeights = Literal["none", "balanced"]

OptimizerKind = Literal["adamw", "muon"]
RateCurve = Literal["cosine", "wsd"]  # after the warm-up: a half cosine, or stable and then a straight decay
Parallel = Literal["ddp", "fsdp"]  # several processes: each has the whole model, or its part of it
OnDivergence = Literal["stop", "rewind"]
BestBy = Literal["held_out_loss", "accuracy", "macro_f1"]  # the number that says which is better
TrackerName = Literal["tensorboard", "trackio", "wandb"]

BenchPolicy = Literal["sgt", "incrt", "stack"]

KnownTaskKind = Literal["teacher", "bag", "noise"]
DemoCriterion = Literal["demand", "published"]

ExportFormat = Literal["hf", "llama", "onnx", "gguf"]

PruneOrder = Literal["measured", "random", "norm"]  # which heads go first: the last two are controls
