"""Head counts over depth: the Prism families, their controls, and the rules they must keep.

A schedule is a tuple of head counts, one per layer. Prism schedules rise from few wide heads to the base
count over a short ramp at the front; the ladder of allowed counts comes from the head dims that attention
kernels like.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import get_args

from meristem.choices import Schedule
from meristem.errors import InputError, shown
from meristem.limits import LARGEST_COUNT, MOST_HEADS, MOST_LAYERS, MOST_WIDTH, check_integer
from meristem.wording import listed

PREFERRED_DIMS = (256, 128, 96, 64)
MAX_DIM = 256
CURVES = ("linear", "geometric", "cosine")
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def head_schedule(
    name: str,
    *,
    layers: int,
    width: int,
    heads: int,
    dims: Sequence[int] = PREFERRED_DIMS,
    ramp: int | None = None,
    seed: int = 0,
) -> tuple[int, ...]:
    """Head counts over `layers` layers for a named schedule with base count `heads`.

    `reverse`, `bump` and `shuffle` rearrange the `prism` schedule, so that they match it in heads, kernels
    and cost; `seed` chooses the shuffle. `dims` are the allowed head dims besides the base's own, `ramp` the
    number of layers before the base count is reached.
    """
    if name not in SCHEDULES:
        raise InputError("schedule", name, f"must be one of {', '.join(SCHEDULES)}")
    check_integer("layers", layers, 1, MOST_LAYERS)
    check_integer("width", width, 2, MOST_WIDTH)
    check_integer("heads", heads, 1, MOST_HEADS)
    check_integer("seed", seed, -LARGEST_COUNT)
    if width % heads or (width // heads) % 2:
        raise InputError(
            "heads", heads, f"must divide width {width} into even head dims: one of {choices(even_divisors(width))}"
        )
    if name == "uniform":
        return (heads,) * layers

    steps = ladder(width, heads, dims)
    length = default_ramp(layers) if ramp is None else ramp
    check_integer("ramp", length, 0)
    if not 0 <= length <= layers // 2:
        raise InputError("ramp", length, f"must be in 0..{layers // 2}: half of the {layers} layers keep the base")
    if len(steps) < 2:
        raise InputError(
            "heads",
            heads,
            f"leaves no wider head at width {width}: of the head dims {choices(sorted(set(dims)))} none is wider than "
            f"{width // heads} and divides the width; use more heads or other dims",
        )
    if name in CURVES:
        curve = _snapped(name, steps, layers, length)
        check_prism(curve, width)
        return curve
    prism = _staircase(steps, layers, length)
    check_prism(prism, width)
    if name == "prism":
        return prism
    if name == "reverse":
        return prism[::-1]
    if name == "bump":
        before = (layers - length) // 2
        return (heads,) * before + prism[:length] + (heads,) * (layers - length - before)
    return _shuffled(prism, seed)


def divisors(n: int) -> list[int]:
    """All divisors, in rising order."""
    small = [x for x in range(1, math.isqrt(n) + 1) if n % x == 0]
    return small + [n // x for x in reversed(small) if x * x != n]


def even_divisors(width: int) -> list[int]:
    """The head counts that divide a width into even head dims, in rising order."""
    return [h for h in divisors(width) if (width // h) % 2 == 0]


def choices(numbers: Sequence[int]) -> str:
    """Numbers to choose from as messages show them: all, or the first of many."""
    return f"[{listed([str(number) for number in numbers], 20)}]"


def default_ramp(layers: int) -> int:
    """Layers before the base count is reached: 6 at 12 and 24 layers, as published."""
    return min(layers // 2, max(6, round(layers / 4)))


def ladder(width: int, heads: int, dims: Sequence[int] = PREFERRED_DIMS) -> tuple[int, ...]:
    """Allowed head counts in rising order, ending with the base count `heads`."""
    if not isinstance(dims, Sequence):
        raise InputError("dims", dims, "must be a list of head dims")
    for dim in dims:
        if type(dim) is not int or dim > MAX_DIM or dim < 8 or dim % 8:
            raise InputError("dims", dim, f"must be multiples of 8 up to {MAX_DIM}, where fused kernels stop")
    return tuple(sorted({width // dim for dim in dims if width % dim == 0 and width // dim < heads} | {heads}))


def check_prism(schedule: Sequence[int], width: int, *, strict: bool = True) -> None:
    """Raise unless the counts divide the width, never fall, and (if strict) half the layers keep the base."""
    if not schedule:
        raise InputError("layers", 0, "must be at least 1")
    check_integer("width", width, 1, MOST_WIDTH)
    for layer, h in enumerate(schedule):
        if h < 1 or width % h:
            raise InputError(f"heads[{layer}]", h, f"must divide width {width}: one of {choices(divisors(width))}")
        dim = width // h
        if dim % 2 or dim > MAX_DIM:
            raise InputError(f"heads[{layer}]", h, f"gives head dim {dim}, which must be even and at most {MAX_DIM}")
    check_rising(schedule)
    base = sum(h == schedule[-1] for h in schedule)
    if strict and 2 * base < len(schedule):
        raise InputError(
            "heads",
            tuple(schedule),
            f"keeps the base count for {base} of {len(schedule)} layers; half are needed",
        )


def check_rising(schedule: Sequence[int]) -> None:
    """Raise where a head count falls below that of the layer before."""
    for layer, (before, h) in enumerate(pairwise(schedule), start=1):
        if h < before:
            raise InputError(f"heads[{layer}]", h, f"must not fall: at least {shown(before)}, as before it")


def is_prism_like(schedule: Sequence[int]) -> bool:
    """Rising somewhere and falling nowhere."""
    return schedule[0] < schedule[-1] and all(a <= b for a, b in pairwise(schedule))


def short_phases(schedule: Sequence[int]) -> list[tuple[int, int]]:
    """(count, length) of the phases that last fewer than 2 layers."""
    phases = [(count, len(list(group))) for count, group in groupby(schedule)]
    return [(count, length) for count, length in phases if length < 2]


def _staircase(steps: Sequence[int], layers: int, ramp: int) -> tuple[int, ...]:
    phases = len(steps) - 1
    each, extra = divmod(ramp, phases)  # the wider phases, which come first, take the remainder
    counts = [h for i, h in enumerate(steps[:-1]) for _ in range(each + (i < extra))]
    return (*counts, *[steps[-1]] * (layers - ramp))


def _snapped(family: str, steps: Sequence[int], layers: int, ramp: int) -> tuple[int, ...]:
    """A continuous curve over the ramp, snapped to the ladder by log distance, kept from falling."""
    start, base = steps[0], steps[-1]
    counts: list[int] = []
    for layer in range(layers):
        if layer >= ramp:
            counts.append(base)
            continue
        u = layer / ramp
        if family == "linear":
            target = start + (base - start) * u
        elif family == "geometric":
            target = start * (base / start) ** u
        else:
            target = start + (base - start) * (1 - math.cos(math.pi * u)) / 2
        nearest = min(steps, key=lambda h: (round(abs(math.log2(h / target)), 12), h))
        counts.append(max([nearest, *counts[-1:]]))
    return tuple(counts)


def _shuffled(schedule: Sequence[int], seed: int) -> tuple[int, ...]:
    """A fixed random order for each seed, never the original one where another exists."""
    counts, generator = list(schedule), random.Random(f"meristem shuffle {seed}")
    while True:
        generator.shuffle(counts)
        if tuple(counts) != tuple(schedule) or len(set(counts)) == 1:
            return tuple(counts)
