"""Which tokens make up which batch: a pure function of seed, step, rank and number of processes.

An epoch visits every window of a text, or every labelled row, once, in an order given by a keyed bijection that is
evaluated point by point, so nothing is stored and any step can be asked for at once. Only 64-bit integer arithmetic is
used, not a random generator of a library, so the order is the same for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from meristem.data.labelled.labelled_data import LabelledRows
from meristem.data.text.shards import TokenStream
from meristem.errors import InputError

ROUNDS = 8  # four suffice for large domains; more mix small ones better and cost nothing here
GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1

PARTED = WORD  # the epoch whose order says which rows a part of them has: no run gets so far

MULTIPLE = 16  # rows of a batch are padded to a multiple of this, so that there are few different shapes

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Sampler:
    """Shuffled windows of a stream of `tokens` tokens, in global batches of `batch_size` sequences.

    Window w covers tokens w * context to (w + 1) * context inclusive, one more than `context` so that every
    input has its target. Of all windows in one shuffled order, batches have only those of a `part`, if one is given.
    """

    tokens: int
    context: int
    batch_size: int
    seed: int
    part: range | None = None

    def __post_init__(self) -> None:
        if self.context < 1:
            raise InputError("context", self.context, "must be at least 1")
        _check_order(self.batch_size, self.seed)
        if self.tokens < self.context + 1:
            raise InputError(
                "training tokens", self.tokens,
                f"a context of {self.context} needs at least {self.context + 1} tokens; "
                "use more data, or a smaller model.context",
            )  # fmt: skip

    @property
    def windows(self) -> int:
        """Windows in an epoch of the whole stream."""
        return (self.tokens - 1) // self.context

    def starts(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """Where the windows of this rank's share of batch `step` start, shape (batch_size / world,)."""
        return _shuffled(self.windows, self.part, self.batch_size, self.seed, step, rank, world) * self.context


@dataclass(frozen=True)
class RowSampler:
    """Shuffled rows out of `count`, in global batches of `batch_size`; of a `part` of them, if one is given."""

    count: int
    batch_size: int
    seed: int
    part: range | None = None

    def __post_init__(self) -> None:
        _check_order(self.batch_size, self.seed)
        if self.count < 1:
            raise InputError("training rows", self.count, "must be at least 1")

    def rows(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """The rows of this rank's share of batch `step`, shape (batch_size / world,)."""
        return _shuffled(self.count, self.part, self.batch_size, self.seed, step, rank, world)


AnySampler = TypeVar("AnySampler", Sampler, RowSampler)


def held_apart(sampler: AnySampler, held_back: int) -> tuple[AnySampler, AnySampler]:
    """A sampler of so many of the windows or rows, chosen by its seed, and one of all the others."""
    count = sampler.windows if isinstance(sampler, Sampler) else sampler.count
    return replace(sampler, part=range(held_back)), replace(sampler, part=range(held_back, count))


def _check_order(batch_size: int, seed: int) -> None:
    if batch_size < 1:
        raise InputError("batch_size", batch_size, "must be at least 1")
    if not 0 <= seed < 1 << 64:
        raise InputError("seed", seed, "must be in 0..2^64 - 1")


def _shuffled(
    count: int, part: range | None, batch_size: int, seed: int, step: int, rank: int, world: int
) -> NDArray[np.int64]:
    """Which of `count` things, or of a part of them, this rank's share of batch `step` has, (batch_size / world,)."""
    if step < 0:
        raise InputError("step", step, "must be at least 0")
    if world < 1 or batch_size % world:
        raise InputError("world", world, f"must divide the batch size {batch_size}")
    if not 0 <= rank < world:
        raise InputError("rank", rank, f"must be in 0..{world - 1}")
    share = batch_size // world
    first = step * batch_size + rank * share
    sequences = np.arange(first, first + share, dtype=np.uint64)
    size = np.uint64(count if part is None else len(part))
    chosen = permuted(sequences % size, int(size), seed, sequences // size)
    if part is not None:
        places = chosen + np.uint64(part.start)
        chosen = permuted(places, count, seed, np.full_like(places, PARTED))
    return chosen.astype(np.int64)


def batch(
    stream: TokenStream, sampler: Sampler, step: int, rank: int = 0, world: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs and targets of this rank at a step, each of shape (batch_size / world, context)."""
    rows = stream.windows(sampler.starts(step, rank, world), sampler.context + 1)
    return rows[:, :-1], rows[:, 1:]


def row_batch(
    rows: LabelledRows, sampler: RowSampler, step: int, rank: int, world: int, context: int, *, fixed: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens (batch_size / world, T) and labels (batch_size / world,) of this rank at a step.

    Every rank pads to the longest row of the whole batch, or, if `fixed`, to the context.
    """
    length = context if fixed else padded_length(rows.lengths[sampler.rows(step)], context)
    mine = sampler.rows(step, rank, world)
    return rows.padded(mine, length), rows.labels[mine]


def padded_length(lengths: NDArray[np.int64], context: int) -> int:
    """The length that rows of these lengths are padded or cut to in one batch."""
    return min(context, -(-int(lengths.max()) // MULTIPLE) * MULTIPLE)


def evaluation_windows(tokens: int, context: int, limit: int) -> NDArray[np.int64]:
    """Where the first `limit` windows of a stream start, or all if there are fewer or none, shape (windows,)."""
    for field, value in (("context", context), ("limit", limit)):
        if value < 1:
            raise InputError(field, value, "must be at least 1")
    return np.arange(min(limit, max(0, tokens - 1) // context), dtype=np.int64) * context


def permuted(positions: Words, size: int, seed: int, epochs: Words) -> Words:
    """The image of each position under the bijection of 0..size-1 that (seed, epoch) selects.

    A Feistel network shuffles the next power of four; results outside the range are sent through again until
    they fall inside, which keeps it a bijection of the range.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    base = _mixed(_mixed(np.full_like(epochs, seed)) + epochs * np.uint64(GOLDEN))
    keys = [_mixed(base + np.uint64(r * GOLDEN & WORD)) for r in range(ROUNDS)]
    images = _feistel(positions, keys, half)
    while (outside := images >= np.uint64(size)).any():
        images[outside] = _feistel(images[outside], [key[outside] for key in keys], half)
    return images


def _feistel(values: Words, keys: list[Words], half: int) -> Words:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << shift) | right


def _mixed(words: Words) -> Words:
    """The finaliser of splitmix64, element by element."""
    words = words + np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
