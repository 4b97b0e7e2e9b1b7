"""The plan: what a model looks like, as an immutable value, and what it costs, in closed form.

Model building, counting, caches, resume and evaluation read the plan and nothing else. All formulas hold for
any mix of layers; in particular heads times head dim need not equal the width.

Shapes and symbols: d width, f feed-forward size, V vocabulary, T context; per layer h heads of dim e, k
key/value heads, loops (extra attention passes over some of the heads) and repeats (extra executions of the
whole block). One multiply-add is two FLOPs. A plan with classes is that of an encoder, whose tokens all see each
other and whose output is one score per class for the whole sequence.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from meristem.choices import Pooling
from meristem.cost import Cost, Flops, Memory
from meristem.errors import InputError, shortened
from meristem.files import parsed_json, read_json
from meristem.limits import (
    MOST_BATCH_TOKENS,
    MOST_CLASSES,
    MOST_CONTEXT,
    MOST_FEED_FORWARD,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_PASSES,
    MOST_PROCESSES,
    MOST_TOKEN_IDS,
    MOST_WIDTH,
    check_integer,
)
from meristem.schedules import (
    PREFERRED_DIMS,
    choices,
    divisors,
    even_divisors,
    head_schedule,
    is_prism_like,
    short_phases,
)
from meristem.wording import listed

FORMAT = "meristem-plan/1"
FLASH_LIMIT = 256  # flash and cuDNN attention kernels stop here
LOSS_CHUNK = 8192 * 50304  # logits that exist at a time during the vocabulary loss: 0.8 GB in bf16
GIB = 2**30
FLASHINFER_DIMS = (64, 128, 256, 512)
PADDING = 0  # the token that fills up the shorter rows of a classifier's batch, on the right
SIZES = {  # of a plan, and their ceilings
    "width": MOST_WIDTH, "vocabulary": MOST_TOKEN_IDS, "context": MOST_CONTEXT, "feed_forward": MOST_FEED_FORWARD,
}  # fmt: skip
POOLINGS: tuple[str, ...] = get_args(Pooling)


def default_feed_forward(width: int) -> int:
    """SwiGLU size 8 d / 3, rounded up to a multiple of 16."""
    return -(-8 * width // (3 * 16)) * 16


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
class LayerPlan:
    """One layer: `heads` query heads of `head_dim`, `kv_heads` key/value heads, and what is run again.

    That is some heads of its attention (`loop`), or the whole block `repeats` more times. Where heads grow, `ceiling`
    is the most that the layer may have; None is no limit.
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


@dataclass(frozen=True)
class Plan:
    """The structure of a decoder-only language model, or, with `classes`, of an encoder that tells these apart.

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
    ) -> Plan:
        """A plan whose layers split the width evenly among the given head counts, or have heads of `head_dim`.

        `kv_group` query heads share one key/value head, the same number in every layer, which keeps all
        shapes equal. `force_multi_query` takes one key/value head per layer, which does not.
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
        return cls(width, vocabulary, context, size, layers, classes=classes, pooling=pooling)

    @classmethod
    def scheduled(
        cls,
        schedule: str,
        *,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int = 50304,
        context: int = 1024,
        feed_forward: int | None = None,
        head_dim: int | None = None,
        kv_group: int = 1,
        force_multi_query: bool = False,
        classes: int | None = None,
        pooling: str = "mean",
        dims: Sequence[int] = PREFERRED_DIMS,
        ramp: int | None = None,
        seed: int = 0,
    ) -> Plan:
        """A plan from a named schedule; `dims`, `ramp` and `seed` as in `meristem.schedules.head_schedule`.

        The rest is as in `from_heads`; `head_dim` goes with the uniform schedule only.
        """
        if head_dim is None:
            counts = head_schedule(schedule, layers=layers, width=width, heads=heads, dims=dims, ramp=ramp, seed=seed)
        elif schedule == "uniform":
            check_integer("layers", layers, 1, MOST_LAYERS)
            counts = (heads,) * layers
        else:
            other = f"{shortened(str(schedule))} has dims of its own"
            raise InputError("head_dim", head_dim, f"goes with the uniform schedule or a list of head counts; {other}")
        return cls.from_heads(
            counts,
            width=width,
            vocabulary=vocabulary,
            context=context,
            feed_forward=feed_forward,
            head_dim=head_dim,
            kv_group=kv_group,
            force_multi_query=force_multi_query,
            classes=classes,
            pooling=pooling,
        )

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int = 50304,
        context: int = 1024,
        feed_forward: int | None = None,
        head_dim: int | None = None,
        kv_group: int = 1,
        force_multi_query: bool = False,
        classes: int | None = None,
        pooling: str = "mean",
    ) -> Plan:
        """A plan with the same number of heads in every layer; the rest is as in `from_heads`.

        >>> Plan.uniform(layers=4, width=64, heads=4, vocabulary=256, context=64).head_dims
        (16, 16, 16, 16)
        """
        return cls.scheduled(
            "uniform",
            layers=layers,
            width=width,
            heads=heads,
            vocabulary=vocabulary,
            context=context,
            feed_forward=feed_forward,
            head_dim=head_dim,
            kv_group=kv_group,
            force_multi_query=force_multi_query,
            classes=classes,
            pooling=pooling,
        )

    @classmethod
    def prism(
        cls,
        *,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int = 50304,
        context: int = 1024,
        feed_forward: int | None = None,
        kv_group: int = 1,
        force_multi_query: bool = False,
        classes: int | None = None,
        pooling: str = "mean",
        dims: Sequence[int] = PREFERRED_DIMS,
        ramp: int | None = None,
    ) -> Plan:
        """A plan with few wide heads in early layers and `heads` narrow ones later; parameters as in `scheduled`.

        >>> Plan.prism(layers=12, width=768, heads=12).heads
        (3, 3, 6, 6, 8, 8, 12, 12, 12, 12, 12, 12)
        """
        return cls.scheduled(
            "prism",
            layers=layers,
            width=width,
            heads=heads,
            vocabulary=vocabulary,
            context=context,
            feed_forward=feed_forward,
            kv_group=kv_group,
            force_multi_query=force_multi_query,
            classes=classes,
            pooling=pooling,
            dims=dims,
            ramp=ramp,
        )

    # --- views ----------------------------------------------------------------------------------------------

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(layer.heads for layer in self.layers)

    @property
    def head_dims(self) -> tuple[int, ...]:
        return tuple(layer.head_dim for layer in self.layers)

    @property
    def kv_heads(self) -> tuple[int, ...]:
        return tuple(layer.kv_heads for layer in self.layers)

    @property
    def loops(self) -> dict[int, Loop]:
        """The loop of each layer that has one."""
        return {i: layer.loop for i, layer in enumerate(self.layers) if layer.loop is not None}

    @property
    def is_looped(self) -> bool:
        """Whether anything is run again."""
        return any(layer.loop is not None or layer.repeats for layer in self.layers)

    @property
    def bare(self) -> Plan:
        """The plan with everything run once."""
        return replace(self, layers=tuple(replace(layer, loop=None, repeats=0) for layer in self.layers))

    def layer(self, index: int) -> LayerPlan:
        """One layer, counted from 0."""
        if type(index) is not int or not 0 <= index < len(self.layers):
            raise InputError("layer", index, f"must be in 0..{len(self.layers) - 1}")
        return self.layers[index]

    def with_layer(self, index: int, layer: LayerPlan) -> Plan:
        """The same plan with one layer exchanged."""
        self.layer(index)
        return replace(self, layers=(*self.layers[:index], layer, *self.layers[index + 1 :]))

    # --- costs ----------------------------------------------------------------------------------------------

    def layer_cost(self, layer: LayerPlan) -> Cost:
        """Cost of one layer at this plan's width, feed-forward size and context."""
        d, f, t = self.width, self.feed_forward, self.context
        q, kv = layer.query_width, layer.kv_width
        attention_matrices = d * (q + 2 * kv) + q * d
        feed_forward_matrices = 3 * d * f
        forward = _products(attention_matrices + feed_forward_matrices) + self._attention(q)
        softmax, kv_values = layer.heads * t * t, 2 * kv
        # Saved for backward in bf16, with the residual stream in float32: two residuals, two normed inputs,
        # q k v, attention output with its log-sum-exp, gate and up (their product is formed again).
        activations = 2 * (4 * d + 2 * d) + 2 * (q + 2 * kv) + 2 * q + 4 * layer.heads + 4 * f
        if layer.loop is not None:
            m, passes = len(layer.loop.heads) * layer.head_dim, layer.loop.passes
            forward += (_products(4 * d * m) + self._attention(m)) * passes
            softmax += len(layer.loop.heads) * t * t * passes
            kv_values += 2 * m * passes
            activations += (2 * d + 2 * 4 * m + 4 * len(layer.loop.heads)) * passes
        times = 1 + layer.repeats
        return Cost(
            attention_matrices + feed_forward_matrices + 2 * d,
            forward * times,
            softmax * times,
            2 * kv_values * times if self.classes is None else 0,  # nothing is kept: an encoder reads all at once
            activations * times,
        )

    def _attention(self, query_width: int) -> Flops:
        """Scores and weighted sum: 4 T per channel over the square, 2 (T + 1) averaged over causal positions."""
        full = 4 * self.context * query_width
        return Flops(full, 2 * (self.context + 1) * query_width if self.classes is None else full)

    @property
    def outer_cost(self) -> Cost:
        """Token embedding, the last norm, the gates of loops, and the output projection.

        That of a language model is tied with the embedding; a classifier's has a bias.
        """
        d, v, c = self.width, self.vocabulary, self.classes
        gates = self.gates
        trained = len(self.layers) * gates.passes * gates.heads if gates is not None and gates.trained else 0
        activations = 4 * d + 2 * d
        if c is None:
            return Cost(v * d + d + trained, _products(v * d), activation_bytes_per_token=activations)
        return Cost(v * d + d + trained + (d + 1) * c, activation_bytes_per_token=activations, answer=2 * d * c)

    @property
    def cost(self) -> Cost:
        """Cost of the whole model."""
        return sum((self.layer_cost(layer) for layer in self.layers), self.outer_cost)

    @property
    def parameters(self) -> int:
        return self.cost.parameters

    def memory(self, batch_tokens: int) -> Memory:
        """Estimated memory of a training step on `batch_tokens` tokens at once."""
        check_integer("batch_tokens", batch_tokens, 1, MOST_BATCH_TOKENS)
        cost = self.cost
        rows = min(batch_tokens, LOSS_CHUNK // self.vocabulary)
        logits, weight_gradients = 2 * rows * self.vocabulary, (4 + 2) * self.vocabulary * self.width
        if self.classes is not None:
            logits, weight_gradients = 4 * -(-batch_tokens // self.context) * self.classes, 0
        return Memory(
            weights=(4 + 2) * cost.parameters,  # float32 and the bf16 copy the products read
            gradients=4 * cost.parameters,
            optimizer=8 * cost.parameters,
            activations=batch_tokens * cost.activation_bytes_per_token,
            loss=logits + weight_gradients,
        )

    def check_memory(self, batch_tokens: int, batch_size: int, available: int) -> None:
        """Raise unless a training process fits into `available` bytes, naming what is too large.

        A forward pass has `batch_tokens` tokens at once; the ids of all `batch_size` sequences of an update are held.
        """

        def check(field: str, value: int, what: str, size: int) -> None:
            if size > available:
                text = f"needs about {size / GIB:,.1f} GiB {what}, the machine has {available / GIB:,.1f}"
                raise InputError(field, value, text)

        check_integer("batch_size", batch_size, 1)
        batch = 8 * batch_size * (self.context + 1)
        check("batch_size", batch_size, f"for the ids of so many sequences of {self.context:,} tokens", batch)
        memory = self.memory(batch_tokens)
        fixed = memory.weights + memory.gradients + memory.optimizer
        check("parameters", self.parameters, "with gradients and optimizer", fixed)
        check("batch_tokens", batch_tokens, "for the whole training step", memory.total + batch)

    def warnings(self, tensor_parallel: int = 1) -> list[str]:
        """What will be slow or impossible somewhere, each with its reason."""
        check_integer("tensor_parallel", tensor_parallel, 1, MOST_PROCESSES)
        found: list[str] = []
        for dim, where in _positions(self.head_dims).items():
            if dim > FLASH_LIMIT:
                found.append(
                    f"{where}: head dim {dim} is above {FLASH_LIMIT}, where flash and cuDNN attention stop; "
                    "a several times slower kernel is used"
                )
            if dim % 8:
                found.append(f"{where}: head dim {dim} is not a multiple of 8; fused kernels pad or refuse it")
            if dim == 96:
                found.append(f"{where}: head dim 96 cannot be served by FlashInfer (it takes {FLASHINFER_DIMS})")
        bad = [h for h in sorted(set(self.heads + self.kv_heads)) if h % tensor_parallel]
        if bad:
            found.append(f"tensor-parallel size {tensor_parallel} does not divide the head counts {choices(bad)}")
        if is_prism_like(self.heads) and all(layer.query_width == self.width for layer in self.layers):
            for count, length in short_phases(self.heads):
                found.append(f"the phase of {count} heads lasts {length} layer; Prism keeps at least 2")
        ratios = {layer.heads // layer.kv_heads for layer in self.layers}
        if len(ratios) > 1:
            found.append(
                f"query heads per key/value head differ between layers ({sorted(ratios)}): parameters and "
                "cache are not those of the uniform plan"
            )
        return found

    # --- exchange -------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. What a plan without growth, or a language model, does not have is left out."""
        data = {"format": FORMAT, **asdict(self)}
        if self.gates is None:
            del data["gates"]
        if self.classes is None:
            del data["classes"], data["pooling"]
        if not self.target:
            del data["target"]
        for layer in (*data["layers"], *data.get("target", ())):
            if not layer["repeats"]:
                del layer["repeats"]
            if layer["ceiling"] is None:
                del layer["ceiling"]
            if layer["loop"] is not None and not layer["loop"]["fading"]:
                del layer["loop"]["fading"]
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The inverse of `to_dict`; a missing, unknown or mistyped field is an error that names it."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise InputError("format", found, f"must be {FORMAT!r}")
        rest = {k: v for k, v in data.items() if k != "format"}
        _check_fields("plan", rest, SIZES, ("layers",), ("gates", "classes", "pooling", "target"))
        layers = _layers_from_list("layers", rest["layers"])
        target = _layers_from_list("target", rest["target"]) if "target" in rest else ()
        gates = rest.get("gates")
        if gates is not None:
            if not isinstance(gates, dict):
                raise InputError("gates", gates, "must be an object or null")
            _check_fields("gates", gates, ("passes", "heads"), ("trained",))
            gates = Gates(**gates)
        return cls(**{**rest, "layers": layers, "gates": gates, "target": target})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`."""
        try:
            content = parsed_json(text)
        except ValueError as error:
            raise InputError("plan", text, f"must be JSON ({error})") from error
        return cls.from_dict(content)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file."""
        return cls.from_dict(read_json(Path(path)))

    @property
    def digest(self) -> str:
        """A hash of the content, equal across machines and versions of Python."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def table(self) -> str:
        """A readable table, one line per run of equal layers, and the totals."""
        rows = [("layers", "heads", "head dim", "kv heads", "run again", "parameters", "MFLOP/token", "KV bytes")]
        for first, last, layer in _runs(self.layers):
            cost = self.layer_cost(layer)
            rows.append(
                (
                    f"{first}" if first == last else f"{first}-{last}",
                    f"{layer.heads}",
                    f"{layer.head_dim}",
                    f"{layer.kv_heads}",
                    layer.run_again or "-",
                    f"{cost.parameters:,}",
                    f"{cost.forward.causal / 1e6:.2f}",
                    f"{cost.kv_bytes_per_token:,}",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        cost = self.cost
        causal, full = (f"{flops / 1e6:,.1f}" for flops in (cost.forward.causal, cost.forward.full))
        work = f"{causal} MFLOP/token causal, {full} full square"
        cache, answer = f"; KV cache {cost.kv_bytes_per_token:,} bytes/token", ""
        if self.classes is not None:
            work, cache = f"{full} MFLOP/token, all tokens seeing each other", ""
            answer = f"; {self.classes} classes read from " + ("all tokens" if self.pooling == "mean" else "the first")
        lines += [
            "(each line is one layer's cost, for the layers named)",
            f"width {self.width}, vocabulary {self.vocabulary}, context {self.context}, "
            f"feed-forward {self.feed_forward}{answer}",
            f"parameters {cost.parameters:,} in all; forward {work}; training three times that",
            f"softmax elements {cost.softmax_elements:,} per sequence{cache}",
            *([] if self.gates is None else [f"gates for {self.gates.passes} passes over {self.gates.heads} heads"]),
            *([f"grows to {len(self.target)} layers"] if self.target else []),
            f"plan {self.digest[:12]}",
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def _products(weights: int) -> Flops:
    return Flops(2 * weights, 2 * weights)


def _check_fields(
    name: str, data: dict[str, Any], integers: Iterable[str], others: Iterable[str], optional: Iterable[str] = ()
) -> None:
    integers, expected, known = list(integers), [*integers, *others], [*integers, *others, *optional]
    for field in data:
        if field not in known:
            raise InputError(f"{name}.{field}", data[field], f"unknown field; expected {known}")
    for field in expected:
        if field not in data:
            raise InputError(f"{name}.{field}", None, "is missing")
    for field in integers:
        check_integer(f"{name}.{field}", data[field], 1)


def _layers_from_list(name: str, data: Any) -> tuple[LayerPlan, ...]:
    if not isinstance(data, list):
        raise InputError(name, data, "must be a list")
    check_integer(name, len(data), 1, MOST_LAYERS)
    return tuple(_layer_from_dict(f"{name}[{index}]", entry) for index, entry in enumerate(data))


def _layer_from_dict(name: str, data: Any) -> LayerPlan:
    if not isinstance(data, dict):
        raise InputError(name, data, "must be an object")
    _check_fields(name, data, ("heads", "head_dim", "kv_heads"), ("loop",), ("repeats", "ceiling"))
    loop = data["loop"]
    if loop is not None:
        if not isinstance(loop, dict):
            raise InputError(f"{name}.loop", loop, "must be an object or null")
        _check_fields(f"{name}.loop", loop, ("passes",), ("heads",), ("fading",))
        heads, fading = loop["heads"], loop.get("fading", [])
        for field, value in (("heads", heads), ("fading", fading)):
            if not isinstance(value, list) or not all(type(head) is int for head in value):
                raise InputError(f"{name}.loop.{field}", value, "must be a list of integers")
        loop = Loop(tuple(heads), loop["passes"], tuple(fading))
    again, ceiling = data.get("repeats", 0), data.get("ceiling")
    return LayerPlan(data["heads"], data["head_dim"], data["kv_heads"], loop, again, ceiling)


def _runs(layers: Sequence[LayerPlan]) -> list[tuple[int, int, LayerPlan]]:
    """(first, last, layer) for each run of equal consecutive layers."""
    runs: list[tuple[int, int, LayerPlan]] = []
    for i, layer in enumerate(layers):
        if runs and runs[-1][2] == layer:
            runs[-1] = (runs[-1][0], i, layer)
        else:
            runs.append((i, i, layer))
    return runs


def _positions(values: Sequence[int]) -> dict[int, str]:
    """Each distinct value with the layers that have it, in words."""
    where: dict[int, list[int]] = {}
    for i, value in enumerate(values):
        where.setdefault(value, []).append(i)
    return {v: f"layer{'s' if len(at) > 1 else ''} {listed([str(i) for i in at], 100)}" for v, at in where.items()}
