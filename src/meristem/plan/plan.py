"""The plan: what a model looks like, as an immutable value.

Model building, counting, caches, resume and evaluation read the plan and nothing else. A plan with classes is that of
an encoder, whose tokens all see each other and whose output is one score per class for the whole sequence.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

from meristem.choices import Pooling
from meristem.errors import InputError, shortened
from meristem.files import parsed_json, read_json
from meristem.limits import MOST_CLASSES, MOST_HEADS, MOST_LAYERS, MOST_WIDTH, check_integer
from meristem.plan import costs
from meristem.plan.as_json import SIZES, VARIANT, plan_fields, plan_to_dict
from meristem.plan.costs import Cost, Memory, TrainingOptions
from meristem.plan.layers import Gates, LayerPlan, Loop, Rotary
from meristem.plan.view import plan_table, plan_warnings
from meristem.schedules import PREFERRED_DIMS, choices, divisors, even_divisors, head_schedule

PADDING = 0  # the token that fills up the shorter rows of a classifier's batch, on the right
POOLINGS: tuple[str, ...] = get_args(Pooling)
NORM_EPS = 1e-5


class Shape(TypedDict, total=False):
    """What all builders take besides the head counts; defaults are those of `Plan.from_heads`."""

    vocabulary: int
    context: int
    feed_forward: int | None
    head_dim: int | None
    kv_group: int
    force_multi_query: bool
    classes: int | None
    pooling: str
    qk_norm: bool


def default_feed_forward(width: int) -> int:
    """SwiGLU size 8 d / 3, rounded up to a multiple of 16."""
    return -(-8 * width // (3 * 16)) * 16


@dataclass(frozen=True)
class Plan:
    """The structure of a decoder-only language model, or, with `classes`, of an encoder that tells these apart.

    Make one with `Plan.uniform`, `Plan.prism`, `Plan.scheduled` or `Plan.from_heads`. It cannot be changed; edits, such
    as `AddHead`, give another one.

    >>> plan = Plan.prism(layers=12, width=768, heads=12)
    >>> plan.heads == (3, 3, 6, 6, 8, 8) + (12,) * 6
    True
    >>> plan.parameters == Plan.uniform(layers=12, width=768, heads=12).parameters
    True
    """

    width: int
    vocabulary: int
    context: int
    feed_forward: int
    layers: tuple[LayerPlan, ...]
    gates: Gates | None = None  # without gates, loops run at full strength
    classes: int | None = None
    pooling: str = "mean"  # of a classifier
    target: tuple[LayerPlan, ...] = ()  # the layers that a model which grows in depth will have; empty when it has them
    qk_norm: bool = False  # whether every query and key, head by head, is RMS-normed before it is rotated
    qk_gain: bool = False  # whether these norms have gains, (head dim,) for the queries of a layer and for its keys
    qkv_bias: bool = False  # whether queries, keys and values have biases
    tied: bool = True  # whether a language model's output has the weights of its embedding
    norm_eps: float = NORM_EPS  # of every RMS norm
    rotary: Rotary = Rotary()  # noqa: RUF009  (immutable)

    def __post_init__(self) -> None:
        for field, most in SIZES.items():
            check_integer(field, getattr(self, field), 1, most)
        if self.classes is not None:
            check_integer("classes", self.classes, 2, MOST_CLASSES)
        if self.pooling not in POOLINGS:
            raise InputError("pooling", self.pooling, f"must be one of {', '.join(POOLINGS)}")
        if self.classes is None and self.pooling != "mean":
            raise InputError("pooling", self.pooling, "is of classifiers only, and this plan has no classes")
        if not isinstance(self.layers, tuple) or not all(isinstance(layer, LayerPlan) for layer in self.layers):
            raise InputError("layers", self.layers, "must be a tuple of LayerPlan")
        check_integer("layers", len(self.layers), 1, MOST_LAYERS)
        if not isinstance(self.target, tuple) or not all(isinstance(layer, LayerPlan) for layer in self.target):
            raise InputError("target", self.target, "must be a tuple of LayerPlan")
        if self.target:
            check_integer("target", len(self.target), len(self.layers) + 1, MOST_LAYERS)
            if any(layer.run_again for layer in self.target):
                raise InputError("target", "layers that are run again", "must run every layer once")
        self._check_variant()
        if self.gates is not None and not isinstance(self.gates, Gates):
            raise InputError("gates", self.gates, "must be Gates(passes, heads), or None")
        for index, layer in enumerate(self.layers):
            if layer.loop is not None and self.gates is not None:
                size, gates = len(layer.loop.heads), self.gates
                if layer.loop.passes > gates.passes:
                    raise InputError(
                        f"layers[{index}].loop.passes",
                        layer.loop.passes,
                        f"must be at most gates.passes, {gates.passes}",
                    )
                if size > gates.heads:
                    raise InputError(f"layers[{index}].loop.heads", size, f"must be at most gates.heads, {gates.heads}")

    def _check_variant(self) -> None:
        for field in ("qk_norm", "qk_gain", "qkv_bias", "tied"):
            if type(getattr(self, field)) is not bool:
                raise InputError(field, getattr(self, field), "must be true or false")
        if self.qk_gain and not self.qk_norm:
            raise InputError("qk_gain", True, "is of norms of queries and keys; set qk_norm too")
        if self.classes is not None and not self.tied:
            raise InputError("tied", False, "is of language models; the output of a classifier is always its own")
        if type(self.norm_eps) is not float or not 0 < self.norm_eps < 1:
            raise InputError("norm_eps", self.norm_eps, "must be a number above 0 and below 1")
        if not isinstance(self.rotary, Rotary):
            raise InputError("rotary", self.rotary, "must be Rotary(base), perhaps with a factor")

    # --- builders -------------------------------------------------------------------------------------------

    @classmethod
    def from_heads(
        cls,
        heads: Sequence[int],
        *,
        width: int,
        vocabulary: int = 50304,
        context: int = 1024,
        feed_forward: int | None = None,
        head_dim: int | None = None,
        kv_group: int = 1,
        force_multi_query: bool = False,
        classes: int | None = None,
        pooling: str = "mean",
        qk_norm: bool = False,
    ) -> Plan:
        """A plan whose layers split the width evenly among the given head counts, or have heads of `head_dim`.

        `kv_group` query heads share one key/value head, the same number in every layer, which keeps all
        shapes equal. `force_multi_query` takes one key/value head per layer, which does not. With `qk_norm` queries and
        keys are RMS-normed head by head, which costs no parameters.

        >>> Plan.from_heads([2, 4, 8], width=64, vocabulary=256, context=64).head_dims
        (32, 16, 8)
        """
        check_integer("width", width, 1, MOST_WIDTH)
        if not isinstance(heads, Sequence):
            raise InputError("heads", heads, "must be a list of head counts, one for each layer")
        check_integer("layers", len(heads), 1, MOST_LAYERS)
        for h in heads:
            if head_dim is None and (type(h) is not int or h < 1 or width % h):
                raise InputError("heads", h, f"must divide width {width}: one of {choices(divisors(width))}")
            check_integer("heads", h, 1, MOST_HEADS)
            if head_dim is None and (width // h) % 2:
                even = choices(even_divisors(width))
                raise InputError("heads", h, f"gives the odd head dim {width // h}; use one of {even}")
        if type(force_multi_query) is not bool:
            raise InputError("force_multi_query", force_multi_query, "must be true or false")
        if force_multi_query:
            kv_heads = [1] * len(heads)
        else:
            check_integer("kv_group", kv_group, 1, MOST_HEADS)
            if any(h % kv_group for h in heads):
                counts, allowed = choices(sorted(set(heads))), choices(divisors(math.gcd(*heads)))
                raise InputError("kv_group", kv_group, f"must divide every head count {counts}: one of {allowed}")
            kv_heads = [h // kv_group for h in heads]
        dims = [width // h if head_dim is None else head_dim for h in heads]
        layers = tuple(LayerPlan(h, e, k) for h, e, k in zip(heads, dims, kv_heads, strict=True))
        size = default_feed_forward(width) if feed_forward is None else feed_forward
        return cls(width, vocabulary, context, size, layers, classes=classes, pooling=pooling, qk_norm=qk_norm)

    @classmethod
    def scheduled(
        cls,
        schedule: str,
        *,
        layers: int,
        width: int,
        heads: int,
        dims: Sequence[int] = PREFERRED_DIMS,
        ramp: int | None = None,
        seed: int = 0,
        **shape: Unpack[Shape],
    ) -> Plan:
        """A plan from a named schedule; `dims`, `ramp` and `seed` as in `meristem.schedules.head_schedule`.

        The rest is as in `from_heads`; `head_dim` goes with the uniform schedule only.

        >>> Plan.scheduled("reverse", layers=4, width=64, heads=8, dims=(32, 16, 8)).heads
        (8, 8, 4, 2)
        """
        head_dim = shape.get("head_dim")
        if head_dim is None:
            counts = head_schedule(schedule, layers=layers, width=width, heads=heads, dims=dims, ramp=ramp, seed=seed)
        elif schedule == "uniform":
            check_integer("layers", layers, 1, MOST_LAYERS)
            counts = (heads,) * layers
        else:
            other = f"{shortened(str(schedule))} has dims of its own"
            raise InputError("head_dim", head_dim, f"goes with the uniform schedule or a list of head counts; {other}")
        return cls.from_heads(counts, width=width, **shape)

    @classmethod
    def uniform(cls, *, layers: int, width: int, heads: int, **shape: Unpack[Shape]) -> Plan:
        """A plan with the same number of heads in every layer; the rest is as in `from_heads`.

        >>> Plan.uniform(layers=4, width=64, heads=4, vocabulary=256, context=64).head_dims
        (16, 16, 16, 16)
        """
        return cls.scheduled("uniform", layers=layers, width=width, heads=heads, **shape)

    @classmethod
    def prism(
        cls,
        *,
        layers: int,
        width: int,
        heads: int,
        dims: Sequence[int] = PREFERRED_DIMS,
        ramp: int | None = None,
        **shape: Unpack[Shape],
    ) -> Plan:
        """A plan with few wide heads in early layers and `heads` narrow ones later; parameters as in `scheduled`.

        >>> Plan.prism(layers=12, width=768, heads=12).heads
        (3, 3, 6, 6, 8, 8, 12, 12, 12, 12, 12, 12)
        """
        return cls.scheduled("prism", layers=layers, width=width, heads=heads, dims=dims, ramp=ramp, **shape)

    # --- views ----------------------------------------------------------------------------------------------

    @property
    def heads(self) -> tuple[int, ...]:
        """The query heads of every layer.

        >>> plan.heads
        (4, 4)
        """
        return tuple(layer.heads for layer in self.layers)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The dim of a head, of every layer.

        >>> plan.head_dims
        (8, 8)
        """
        return tuple(layer.head_dim for layer in self.layers)

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """The key/value heads of every layer.

        >>> Plan.uniform(layers=2, width=32, heads=4, kv_group=2).kv_heads
        (2, 2)
        """
        return tuple(layer.kv_heads for layer in self.layers)

    @property
    def loops(self) -> dict[int, Loop]:
        """The loop of each layer that has one.

        >>> LoopHeads(1, (0, 2), passes=1).apply(plan).loops
        {1: Loop(heads=(0, 2), passes=1, fading=())}
        """
        return {i: layer.loop for i, layer in enumerate(self.layers) if layer.loop is not None}

    @property
    def variant(self) -> dict[str, Any]:
        """What else there is to tell a model's kind by, where it is not as usual; plans can be given it by `replace`.

        >>> from dataclasses import replace
        >>> replace(plan, tied=False).variant
        {'tied': False}
        """
        own = (field for field in fields(self) if field.name in VARIANT)
        return {field.name: value for field in own if (value := getattr(self, field.name)) != field.default}

    @property
    def is_looped(self) -> bool:
        """Whether anything is run again.

        >>> LoopHeads(1, (0, 2), passes=1).apply(plan).is_looped
        True
        """
        return any(layer.loop is not None or layer.repeats for layer in self.layers)

    @property
    def bare(self) -> Plan:
        """The plan with everything run once.

        >>> LoopHeads(1, (0, 2), passes=1).apply(plan).bare == plan
        True
        """
        return replace(self, layers=tuple(replace(layer, loop=None, repeats=0) for layer in self.layers))

    def layer(self, index: int) -> LayerPlan:
        """One layer, counted from 0.

        >>> plan.layer(1).heads
        4
        """
        if type(index) is not int or not 0 <= index < len(self.layers):
            raise InputError("layer", index, f"must be in 0..{len(self.layers) - 1}")
        return self.layers[index]

    def with_layer(self, index: int, layer: LayerPlan) -> Plan:
        """The same plan with one layer exchanged.

        >>> plan.with_layer(1, LayerPlan(heads=8, head_dim=4, kv_heads=8)).heads
        (4, 8)
        """
        self.layer(index)
        return replace(self, layers=(*self.layers[:index], layer, *self.layers[index + 1 :]))

    # --- costs ----------------------------------------------------------------------------------------------

    def layer_cost(self, layer: LayerPlan) -> Cost:
        """Cost of one layer at this plan's width, feed-forward size and context.

        >>> plan.layer_cost(plan.layer(0)).kv_bytes_per_token
        128
        """
        return costs.layer_cost(self, layer)

    @property
    def outer_cost(self) -> Cost:
        """Cost of all that is not a layer: embedding, last norm, gates and output.

        >>> plan.outer_cost.parameters
        3232
        """
        return costs.outer_cost(self)

    @property
    def cost(self) -> Cost:
        """Cost of the whole model.

        >>> plan.cost.parameters, plan.cost.kv_bytes_per_token
        (29984, 256)
        """
        return sum((self.layer_cost(layer) for layer in self.layers), self.outer_cost)

    @property
    def parameters(self) -> int:
        """How many parameters the model has.

        >>> plan.parameters == sum(weight.numel() for weight in Decoder(plan).parameters())
        True
        """
        return self.cost.parameters

    def memory(self, batch_tokens: int, **options: Unpack[TrainingOptions]) -> Memory:
        """Estimated memory of a training step on `batch_tokens` tokens at once, in one process.

        >>> memory = plan.memory(batch_tokens=32)
        >>> memory.weights, memory.optimizer, memory.activations
        (179904, 239872, 52224)
        """
        return costs.memory(self, batch_tokens, **options)

    def check_memory(
        self, batch_tokens: int, batch_size: int, available: int, **options: Unpack[TrainingOptions]
    ) -> None:
        """Raise unless a training process fits into `available` bytes, naming what is too large.

        A forward pass has `batch_tokens` tokens at once; the ids of all `batch_size` sequences of an update are held.

        >>> large = Plan.uniform(layers=12, width=768, heads=12)
        >>> large.check_memory(batch_tokens=32 * 1024, batch_size=32, available=80 * 2**30)
        >>> large.check_memory(batch_tokens=32 * 1024, batch_size=32, available=2 * 2**30)
        Traceback (most recent call last):
            ...
        meristem.errors.InputError: parameters = 123587328: needs about 2.1 GiB with gradients and optimizer...
        """
        costs.check_memory(self, batch_tokens, batch_size, available, **options)

    def warnings(self, tensor_parallel: int = 1) -> list[str]:
        """What will be slow or impossible somewhere, each with its reason.

        >>> [warning] = Plan.uniform(layers=1, width=512, heads=1).warnings()
        >>> warning.partition(",")[0]
        'layer 0: head dim 512 is above 256'
        """
        return plan_warnings(self, tensor_parallel)

    # --- exchange -------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. What a plan without growth, or a language model, does not have is left out."""
        return plan_to_dict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The inverse of `to_dict`; a missing, unknown or mistyped field is an error that names it.

        >>> Plan.from_dict(plan.to_dict()) == plan
        True
        """
        return cls(**plan_fields(data))

    def to_json(self) -> str:
        """The plan as the text of a plan file.

        >>> plan.to_json().splitlines()[:3]
        ['{', ' "format": "meristem-plan/1",', ' "width": 32,']
        """
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`.

        >>> Plan.from_json(plan.to_json()) == plan
        True
        """
        try:
            content = parsed_json(text)
        except ValueError as error:
            raise InputError("plan", text, f"must be JSON ({error})") from error
        return cls.from_dict(content)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        >>> Plan.load("runs/first/plan.json").heads
        (2, 4)
        """
        return cls.from_dict(read_json(Path(path)))

    @property
    def digest(self) -> str:
        """A hash of the content, equal across machines and versions of Python.

        >>> plan.digest == Plan.from_json(plan.to_json()).digest
        True
        """
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def table(self) -> str:
        """A readable table, one line per run of equal layers, and the totals.

        >>> print(plan.table())
        layers  heads  head dim  kv heads  run again  parameters  MFLOP/token  KV bytes
           0-1      4         8         4          -      13,376       0.0277       128
        (each line is one layer's cost, for the layers named)
        width 32, vocabulary 100, context 16, feed-forward 96
        parameters 29,984 in all; forward 0.0618 MFLOP/token causal, 0.0637 full square; training three times that
        softmax elements 2,048 per sequence; KV cache 256 bytes/token
        plan 19b6b62f8d44
        """
        return plan_table(self)

    def __str__(self) -> str:
        return self.table()
