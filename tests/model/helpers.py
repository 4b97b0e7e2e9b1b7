"""Small plans and plain reference forms for the tests of the model."""

# Hypothesis is not followed by mypy (pyproject.toml), so its decorators look untyped.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meristem.growth.edits import LoopHeads
from meristem.model import Decoder, Transformer
from meristem.model.fused import project_heads
from meristem.plan import Gates, LayerPlan, Loop, Plan, Rotary

Model = TypeVar("Model", bound=Transformer)

SIZES: dict[str, dict[str, Any]] = {
    "small": {"layers": 12, "width": 768, "heads": 12},
    "medium": {"layers": 24, "width": 1024, "heads": 16},
    "large": {"layers": 24, "width": 1536, "heads": 16},
}
# Reverse and shuffle are the negative controls: what holds for Prism holds in any order of layers.
ARMS = ("prism", "reverse", "shuffle")
SCHEDULES = ("uniform", *ARMS)
DTYPES = (torch.float32, torch.float64)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def small_plan(
    schedule: str = "prism", *, kv_group: int = 1, vocabulary: int = 61, context: int = 32, qk_norm: bool = False
) -> Plan:
    """Six layers; Prism's head counts are 2, 4, 6, 12, 12, 12, so all may share keys in groups of 2."""
    return Plan.scheduled(
        schedule,
        layers=6,
        width=96,
        heads=12,
        dims=(48, 24, 16),
        kv_group=kv_group,
        vocabulary=vocabulary,
        context=context,
        qk_norm=qk_norm,
    )


def looped(plan: Plan, loops: Mapping[int, tuple[tuple[int, ...], int]], gates: Gates | None = None) -> Plan:
    """The plan with these gates, and with loops given as {layer: (heads, passes)}."""
    plan = replace(plan, gates=gates)
    for layer, (heads, passes) in loops.items():
        plan = LoopHeads(layer, heads, passes).apply(plan)
    return plan


def random_tokens(plan: Plan, batch: int = 2, length: int | None = None, seed: int = 0) -> Tensor:
    size = (batch, plan.context if length is None else length)
    return torch.randint(plan.vocabulary, size, generator=torch.Generator().manual_seed(seed))


def lively(plan: Plan, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    """A model whose weights are large enough for attention to be far from uniform, as after training.

    At the initial scale a small model's attention is nearly an average, and many mistakes would go unseen.
    """
    model = Decoder(plan, seed).to(dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise / math.sqrt(parameter.shape[1]))
            else:
                least = -0.5 if name.endswith("bias") else 0.5
                parameter.copy_(least + torch.rand(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def causal_probabilities(queries: Tensor, keys: Tensor) -> Tensor:
    """The explicit map (B, h, T, T); keys may have fewer heads."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1)


def explicit_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    values = values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
    return causal_probabilities(queries, keys) @ values


def turning(rotary: Rotary, dim: int) -> Tensor:
    """The angle of each pair of coordinates in a token, (dim / 2,), one by one, as Llama 3's authors tell it."""
    angles = []
    for pair in range(dim // 2):
        angle = 1 / rotary.base ** (2 * pair / dim)
        if rotary.band is None or rotary.context is None:
            angles.append(angle / rotary.factor)
            continue
        length, (low, high) = 2 * math.pi / angle, rotary.band  # tokens in which it goes round once
        if length > rotary.context / low:
            angle = angle / rotary.factor
        elif length >= rotary.context / high:
            part = (rotary.context / length - low) / (high - low)
            angle = (1 - part) * angle / rotary.factor + part * angle
        angles.append(angle)
    return torch.tensor(angles, dtype=torch.float64)


def complex_rotation(x: Tensor, first: int = 0, rotary: Rotary = Rotary()) -> Tensor:  # noqa: B008  (immutable)
    """Rotary positions as products of complex numbers: x (B, T, heads, dim), pairs (i, i + dim / 2)."""
    dim = x.shape[-1]
    numbers = torch.complex(x[..., : dim // 2].double(), x[..., dim // 2 :].double())
    positions = torch.arange(first, first + x.shape[1], dtype=torch.float64)
    angles = positions[:, None, None] * turning(rotary, dim)
    rotated = numbers * torch.polar(torch.ones_like(angles), angles).to(x.device)
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def normed_heads(x: Tensor, wanted: bool = True, eps: float = 1e-5) -> Tensor:
    """Each head of x (..., heads, dim) over its root mean square, as the plan says it: if it is `wanted`."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() if wanted else x


def with_exact_positions(model: Model) -> Model:
    """The same model in float64, and its tables of positions too, which are made in float32."""
    for dim in set(model.plan.head_dims):
        ones = torch.ones(1, model.plan.context, 1, dim // 2, dtype=torch.float64)
        turned = complex_rotation(torch.cat((ones, 0 * ones), dim=-1), rotary=model.plan.rotary)
        cos, sin = turned[0].chunk(2, dim=-1)
        setattr(model.rotary, f"cos_{dim}", torch.cat((cos, cos), dim=-1))
        setattr(model.rotary, f"sin_{dim}", torch.cat((-sin, sin), dim=-1))
    return model.double()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of the expected values."""
    expected = expected.detach().double()
    return float((actual.detach().double() - expected).norm() / expected.norm())


class Recorder(TorchDispatchMode):
    """Shape and dtype of every tensor that an operation returns while this is on."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += [(tuple(x.shape), x.dtype) for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out


@st.composite
def layer_plans(draw: Any) -> LayerPlan:
    heads = draw(st.integers(1, 4))
    kv_heads = draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0]))
    return LayerPlan(heads, 2 * draw(st.integers(1, 8)), kv_heads)


@st.composite
def variants(draw: Any) -> dict[str, Any]:
    """What of a plan is neither size nor structure, for `replace`."""
    normed = draw(st.booleans())
    scaled = (Rotary(100.0, 3.0), Rotary(50_000.0, 8.0, (1.0, 4.0), 32), Rotary(10_000.0, 2.0, (0.5, 3.0), 6))
    return {
        "qk_norm": normed,
        "qk_gain": normed and draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "tied": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([1e-5, 1e-6, 1e-2])),
        "rotary": draw(st.sampled_from([Rotary(), Rotary(500.0), *scaled])),
    }


@st.composite
def plans(draw: Any, *, min_context: int = 1) -> Plan:
    """Any buildable plan: heads times head dim need not be the width, and layers group keys as they like."""
    layers = tuple(draw(st.lists(layer_plans(), min_size=1, max_size=4)))
    return Plan(
        width=draw(st.integers(2, 24)),
        vocabulary=draw(st.integers(2, 40)),
        context=draw(st.integers(min_context, 16)),
        feed_forward=draw(st.integers(1, 24)),
        layers=layers,
        **draw(variants()),
    )


@st.composite
def grown_plans(draw: Any, *, min_context: int = 1) -> Plan:
    """Any buildable plan in which layers have loops, are repeated or neither, with gates or without."""
    plan = draw(plans(min_context=min_context))
    layers = []
    for layer in plan.layers:
        heads = st.lists(st.integers(0, layer.heads - 1), min_size=1, unique=True).map(tuple)
        loops = st.builds(lambda chosen, passes: {"loop": Loop(chosen, passes)}, heads, st.integers(1, 3))
        repeats = st.integers(0, 2).map(lambda times: {"repeats": times})
        layers.append(replace(layer, **draw(loops | repeats)))
    gates = st.none() | st.builds(Gates, st.integers(3, 4), st.integers(4, 5), st.booleans())
    return replace(plan, layers=tuple(layers), gates=draw(gates))


def split_heads(
    packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`project_heads` with the identity as its weight: what it does to packed (B, T, heads + 2 kv heads, dim)."""
    flat = packed.flatten(2)
    identity = torch.eye(flat.shape[-1], dtype=packed.dtype, device=packed.device)
    return project_heads(flat, identity, torch.ones_like(identity[0]), cos, sin, heads, kv_heads, eps)
