"""What a plan costs, in closed form: parameters, FLOPs, cache, and the memory of a training step.

The formulas hold for any mix of layers; in particular heads times head dim need not equal the width. Symbols: d width,
f feed-forward size, v vocabulary, t context; q and kv are the widths of a layer's queries and keys. One multiply-add is
two FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

from meristem.choices import OptimizerKind, Parallel
from meristem.errors import InputError
from meristem.limits import MOST_BATCH_TOKENS, MOST_PROCESSES, check_integer
from meristem.settings import of_type

if TYPE_CHECKING:
    from meristem.plan.layers import LayerPlan
    from meristem.plan.plan import Plan

LOSS_CHUNK = 16384 * 50304  # logits that exist at a time during the vocabulary loss: 1.6 GB in bf16
GIB = 2**30


@dataclass(frozen=True)
class Flops:
    """Per token: `full` counts the whole T x T square, `causal` the keys a position may see (averaged).

    In a classifier a position sees all, and both are the same.
    """

    full: int = 0
    causal: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.full + other.full, self.causal + other.causal)

    def __mul__(self, factor: int) -> Flops:
        return Flops(self.full * factor, self.causal * factor)


@dataclass(frozen=True)
class Cost:
    """What a layer, or a whole model, costs.

    FLOPs and bytes are per token; softmax elements, and the FLOPs of a classifier's answer, per sequence.
    """

    parameters: int = 0
    forward: Flops = Flops()
    softmax_elements: int = 0
    kv_bytes_per_token: int = 0
    activation_bytes_per_token: int = 0
    answer: int = 0

    @property
    def training(self) -> Flops:
        """Forward and backward: every product has two gradient products of the same size."""
        return self.forward * 3

    def training_of(self, sequences: int, length: int) -> Flops:
        """Forward and backward of whole sequences, all of the length (the context) that this is the cost of."""
        answers = 3 * self.answer * sequences
        return self.training * (sequences * length) + Flops(answers, answers)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.parameters + other.parameters,
            self.forward + other.forward,
            self.softmax_elements + other.softmax_elements,
            self.kv_bytes_per_token + other.kv_bytes_per_token,
            self.activation_bytes_per_token + other.activation_bytes_per_token,
            self.answer + other.answer,
        )


class TrainingOptions(TypedDict, total=False):
    """What of the way a plan is trained its memory depends on; AdamW in a single process unless said."""

    optimizer: OptimizerKind
    parallel: Parallel
    world: int  # processes that train together
    average: bool  # whether an average of the weights is kept
    recompute: bool  # whether blocks keep only their inputs, and are run again in the backward pass


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of one training process (mixed precision, chunked vocabulary loss).

    `gathered` are the whole weights that a process of a sharded run has, instead of activations, while it evaluates
    and grows.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + max(self.activations + self.loss, self.gathered)


def layer_cost(plan: Plan, layer: LayerPlan) -> Cost:
    """Cost of one layer at a plan's width, feed-forward size and context."""
    d, f, t = plan.width, plan.feed_forward, plan.context
    q, kv = layer.query_width, layer.kv_width
    attention_matrices = d * (q + 2 * kv) + q * d
    feed_forward_matrices = 3 * d * f
    forward = _products(attention_matrices + feed_forward_matrices) + _attention(plan, q)
    softmax, kv_values = layer.heads * t * t, 2 * kv
    # Saved for backward in bf16: two norms, q k v, attention output with its log-sum-exp, gate and up (their product is
    # formed again, and the stream itself is not needed).
    activations = 2 * 2 * d + 2 * (q + 2 * kv) + 2 * q + 4 * layer.heads + 4 * f
    if layer.loop is not None:
        m, passes = len(layer.loop.heads) * layer.head_dim, layer.loop.passes
        forward += (_products(4 * d * m) + _attention(plan, m)) * passes
        softmax += len(layer.loop.heads) * t * t * passes
        kv_values += 2 * m * passes
        activations += (2 * d + 2 * 4 * m + 4 * len(layer.loop.heads)) * passes
        if plan.qk_norm:  # queries and keys of a loop are kept before their norm as well
            activations += (2 * 2 * m + 4 * 2 * len(layer.loop.heads)) * passes
    if plan.qk_norm:  # the factor of each head
        activations += 4 * (layer.heads + layer.kv_heads)
    if plan.qk_gain:  # queries and keys before their gain
        activations += 2 * (q + kv)
    times = 1 + layer.repeats
    return Cost(
        attention_matrices + feed_forward_matrices + _vectors(plan, layer),
        forward * times,
        softmax * times,
        2 * kv_values * times if plan.classes is None else 0,  # nothing is kept: an encoder reads all at once
        activations * times,
    )


def _vectors(plan: Plan, layer: LayerPlan) -> int:
    """Parameters of a layer that are in no matrix: gains of norms, and biases."""
    biases = (layer.query_width + 2 * layer.kv_width) * plan.qkv_bias
    return 2 * plan.width + biases + 2 * layer.head_dim * plan.qk_gain


def outer_cost(plan: Plan) -> Cost:
    """Token embedding, the last norm, the gates of loops, and the output projection.

    That of a language model may be tied with the embedding; a classifier's has a bias.
    """
    d, v, c = plan.width, plan.vocabulary, plan.classes
    gates = plan.gates
    trained = len(plan.layers) * gates.passes * gates.heads if gates is not None and gates.trained else 0
    activations = 2 * d
    if c is None:
        matrices = v * d * (1 if plan.tied else 2)
        return Cost(matrices + d + trained, _products(v * d), activation_bytes_per_token=activations)
    return Cost(v * d + d + trained + (d + 1) * c, activation_bytes_per_token=activations, answer=2 * d * c)


def memory(
    plan: Plan, batch_tokens: int, *, optimizer: OptimizerKind = "adamw", parallel: Parallel = "ddp", world: int = 1,
    average: bool = False, recompute: bool = False,
) -> Memory:  # fmt: skip
    """Estimated memory of a training step on `batch_tokens` tokens at once, in one process."""
    check_integer("batch_tokens", batch_tokens, 1, MOST_BATCH_TOKENS)
    check_integer("world", world, 1, MOST_PROCESSES)
    of_type("optimizer", optimizer, OptimizerKind)
    of_type("parallel", parallel, Parallel)
    matrices = [plan.layer_cost(layer).parameters - _vectors(plan, layer) for layer in plan.layers]
    count = plan.parameters
    activations = batch_tokens * (_recomputed(plan) if recompute else plan.cost.activation_bytes_per_token)
    # Two moments of every parameter in float32, or Muon's one of the blocks' matrices.
    moments = (12 if average else 8) * count - (4 * sum(matrices) if optimizer == "muon" else 0)
    loss = _loss_memory(plan, batch_tokens)
    if world > 1 and parallel == "fsdp":
        # Besides its share a process has what is not in blocks, whole in float32 during the pass; in bf16 the block at
        # work, and the next one, which is there twice while it is unpacked; and the gradient of one block, in bf16 and
        # in float32, in which it is summed over processes.
        share, outer, block = -(-4 * count // world), 4 * (count - sum(matrices)), max(matrices)
        return Memory(
            weights=share + outer + 3 * 2 * block,
            gradients=share + outer + (2 + 4) * block,
            optimizer=-(-moments // world),
            activations=activations,
            loss=loss,
            gathered=4 * count,
        )
    return Memory(
        weights=(4 + 2) * count,  # float32 and the bf16 copy the products read
        gradients=4 * count * (2 if world > 1 else 1),  # with the buckets in which they are sent
        optimizer=moments,
        activations=activations,
        loss=loss,
    )


def _loss_memory(plan: Plan, batch_tokens: int) -> int:
    """Logits that exist at a time, and the vocabulary's weights in bf16 with their gradient."""
    if plan.classes is not None:
        return 4 * -(-batch_tokens // plan.context) * plan.classes
    rows = min(batch_tokens, LOSS_CHUNK // plan.vocabulary)
    return 2 * rows * plan.vocabulary + (4 + 2) * plan.vocabulary * plan.width


def _recomputed(plan: Plan) -> int:
    """Bytes per token of activations where blocks are run again: their inputs, and all of one block at a time."""
    inputs = (2 + 2) * plan.width * sum(1 + layer.repeats for layer in plan.layers)
    passes = [layer_cost(plan, layer).activation_bytes_per_token // (1 + layer.repeats) for layer in plan.layers]
    return inputs + max(passes) + outer_cost(plan).activation_bytes_per_token


def check_memory(
    plan: Plan, batch_tokens: int, batch_size: int, available: int, **options: Unpack[TrainingOptions]
) -> None:
    """Raise unless a training process fits into `available` bytes, naming what is too large.

    A forward pass has `batch_tokens` tokens at once; the ids of all `batch_size` sequences of an update are held.
    """

    def check(field: str, value: int, what: str, size: int) -> None:
        if size > available:
            text = f"needs about {size / GIB:,.1f} GiB {what}, the machine has {available / GIB:,.1f}"
            raise InputError(field, value, text)

    check_integer("batch_size", batch_size, 1)
    batch = 8 * batch_size * (plan.context + 1)
    check("batch_size", batch_size, f"for the ids of so many sequences of {plan.context:,} tokens", batch)
    needed = memory(plan, batch_tokens, **options)
    fixed = needed.weights + needed.gradients + needed.optimizer + needed.gathered
    check("parameters", plan.parameters, "with gradients and optimizer", fixed)
    check("batch_tokens", batch_tokens, "for the whole training step", needed.total + batch)


def _attention(plan: Plan, query_width: int) -> Flops:
    """Scores and weighted sum: 4 T per channel over the square, 2 (T + 1) averaged over causal positions."""
    full = 4 * plan.context * query_width
    return Flops(full, 2 * (plan.context + 1) * query_width if plan.classes is None else full)


def _products(weights: int) -> Flops:
    return Flops(2 * weights, 2 * weights)
