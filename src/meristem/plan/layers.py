"""The parts of a plan: one layer, what of it is run again, the strengths of loops, and rotary positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meristem.errors import InputError
from meristem.limits import MOST_CONTEXT, MOST_HEADS, MOST_PASSES, MOST_WIDTH, check_integer
from meristem.schedules import choices, divisors


@dataclass(frozen=True)
class Loop:
    """Extra attention passes of a layer over a subset of its query heads.

    Those that are `fading` lose their strength and will leave the loop.
    """

    heads: tuple[int, ...]
    passes: int
    fading: tuple[int, ...] = ()

    @property
    def chosen(self) -> tuple[int, ...]:
        """The heads that stay."""
        return tuple(head for head in self.heads if head not in self.fading)


@dataclass(frozen=True)
class Gates:
    """Strengths of loops: one for each of `heads` looped heads in each of `passes` passes, in every layer.

    They are there from the start, so that the set of tensors does not change while loops are born. Those that are
    `trained` have a parameter each, which is added to the strength that a birth sets.
    """

    passes: int
    heads: int
    trained: bool = True

    def __post_init__(self) -> None:
        check_integer("gates.passes", self.passes, 1, MOST_PASSES)
        check_integer("gates.heads", self.heads, 1, MOST_HEADS)
        if type(self.trained) is not bool:
            raise InputError("gates.trained", self.trained, "must be true or false")


@dataclass(frozen=True)
class Rotary:
    """How fast rotary positions turn: pair i of a head of dim e by base^(-2 i / e) in each token.

    For a context longer than a model began with, all pairs are slowed down by a `factor`. With a `band` (low, high)
    that is as in Llama 3: pairs that turn more than `high` times in `context` tokens, those it began with, stay as they
    are, those that turn less than `low` times have all of the factor, and those between a part of it.
    """

    base: float = 10_000.0
    factor: float = 1.0
    band: tuple[float, float] | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("base", "above 1"), ("factor", "1 or above")):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 1 <= value < math.inf or (name == "base" and value == 1):
                raise InputError(f"rotary.{name}", value, f"must be {least}, and finite")
            object.__setattr__(self, name, float(value))  # 10000 and 10000.0 are one plan
        if (self.band is None) != (self.context is None):
            raise InputError("rotary.band", self.band, "goes with the context that it is about, rotary.context")
        if self.band is not None and self.context is not None:
            check_integer("rotary.context", self.context, 1, MOST_CONTEXT)
            pair = self.band if isinstance(self.band, tuple) and len(self.band) == 2 else (0.0, 0.0)
            if not all(type(end) in (int, float) for end in pair) or not 0 < pair[0] < pair[1] < math.inf:
                raise InputError("rotary.band", self.band, "must be two numbers above 0, the lower first")
            object.__setattr__(self, "band", (float(pair[0]), float(pair[1])))

    @property
    def scaled(self) -> bool:
        """Whether any pair is slowed down."""
        return self.factor != 1


@dataclass(frozen=True)
class LayerPlan:
    """One layer: `heads` query heads of `head_dim`, `kv_heads` key/value heads, and what is run again.

    That is some heads of its attention (`loop`), or the whole block `repeats` more times. Where heads grow, `ceiling`
    is the most that the layer may have; None is no limit.

    >>> layer = LayerPlan(heads=4, head_dim=8, kv_heads=2)
    >>> layer.query_width, layer.kv_width
    (32, 16)
    """

    heads: int
    head_dim: int
    kv_heads: int
    loop: Loop | None = None
    repeats: int = 0
    ceiling: int | None = None

    def __post_init__(self) -> None:
        check_integer("heads", self.heads, 1, MOST_HEADS)
        if self.ceiling is not None:
            check_integer("ceiling", self.ceiling, self.heads, MOST_HEADS)
        check_integer("head_dim", self.head_dim, 2, MOST_WIDTH)
        if self.head_dim % 2:
            raise InputError("head_dim", self.head_dim, "must be even, rotary positions rotate pairs of coordinates")
        check_integer("kv_heads", self.kv_heads, 1, MOST_HEADS)
        if self.heads % self.kv_heads:
            allowed = choices(divisors(self.heads))
            raise InputError("kv_heads", self.kv_heads, f"must be one of {allowed}, to divide the heads")
        if self.loop is not None:
            if not isinstance(self.loop, Loop):
                raise InputError("loop", self.loop, "must be a Loop(heads, passes), or None")
            chosen = self.loop.heads
            if not isinstance(chosen, tuple | list):
                raise InputError("loop.heads", chosen, "must be a tuple of heads")
            in_range = all(type(h) is int and 0 <= h < self.heads for h in chosen)
            if not chosen or not in_range or len(set(chosen)) != len(chosen):
                raise InputError("loop.heads", chosen, f"must be distinct heads out of 0..{self.heads - 1}")
            if not set(self.loop.fading) < set(chosen):
                raise InputError("loop.fading", self.loop.fading, f"must be some of the looped heads, {chosen}")
            check_integer("loop.passes", self.loop.passes, 1, MOST_PASSES)
        check_integer("repeats", self.repeats, 0, MOST_PASSES)
        if self.repeats and self.loop is not None:
            raise InputError("repeats", self.repeats, "must be 0 in a layer that has a loop")

    @property
    def run_again(self) -> str:
        """What is run again and how often, such as `h3,h7 x2` or `block x1`; empty if nothing is."""
        if self.loop is not None:
            return f"{','.join(f'h{head}' for head in self.loop.heads)} x{self.loop.passes}"
        return f"block x{self.repeats}" if self.repeats else ""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim
