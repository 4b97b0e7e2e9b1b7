"""How widely each head looks: the entropy of its attention, from 0 (one token) to 1 (all tokens alike).

No attention map is ever formed. A few probe rows need their scores only; for all rows at once there is an identity:
with s the scores of a query and p their softmax, the entropy is lse(s) - sum p s, and because s = scale * q . k, the
sum is scale * q . (sum p k), which is ordinary fused attention with the keys in place of the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from meristem.errors import InputError
from meristem.gauges.gauge import Instrument
from meristem.gauges.probe import Probe
from meristem.model import Decoder
from meristem.model.attention import Attention
from meristem.model.block import Pass
from meristem.model.growable import Growable
from meristem.model.operators import accum_dtype
from meristem.plan import Plan
from meristem.ranks import from_first_rank, mean_over_ranks, some_of, sum_over_ranks
from meristem.records import finite

FORMS = ("rows", "fused")


@dataclass(frozen=True)
class EntropyGauge:
    """How entropy is measured: on `rows` query rows of each sequence, or `fused` on all of its last half.

    One row, the last, is the published choice; 16 rows are steadier for the small batches used here. A reading has a
    number from 0 to 1 for every head of every layer.

    >>> found = EntropyGauge(rows=4).instrument(model).read(probe)
    >>> [len(layer) for layer in found.entropy]
    [4, 4]
    """

    rows: int = 16
    form: str = "rows"
    sequences: int = 8  # of the whole batch, over all processes, that a measurement looks at

    def __post_init__(self) -> None:
        for field in ("rows", "sequences"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 1:
                raise InputError(field, getattr(self, field), "must be an integer of at least 1")
        if self.form not in FORMS:
            raise InputError("form", self.form, f"must be one of {', '.join(FORMS)}")

    def instrument(self, model: Growable) -> EntropyInstrument:
        """What measures the heads of a language model."""
        return EntropyInstrument(self, as_decoder(model))

    def of_heads(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Normalised entropy of each head, (h,), summed over the batch; mean over rows.

        Queries (B, h, T, e) and keys (B, kv heads, T, e) are rotated.
        """
        length = queries.shape[2]
        if self.form == "rows":
            rows = probe_rows(length, self.rows, queries.device)
            entropy = row_entropies(queries, keys, rows)
        else:
            rows = torch.arange(max(1, length // 2), length, device=queries.device)
            entropy = fused_entropies(queries, keys)[..., max(1, length // 2) :]
        return (entropy / torch.log(rows.to(entropy) + 1)).mean(-1).sum(0)


@dataclass(frozen=True)
class HeadReadings:
    """What one pass over a batch measured. Entropies are sums over its sequences, all heads of all layers in a row."""

    entropy: Tensor  # (sum of head counts,)
    updates: dict[tuple[int, int], Tensor]  # for each (layer, pass) of a loop: |update| / |stream|


@dataclass(frozen=True)
class LoopReading:
    """A loop as it was measured: the strength of each head in each pass, where there are gates, and the size of what
    each pass adds to the stream, beside the stream's own."""

    layer: int
    heads: tuple[int, ...]
    passes: int
    gates: tuple[tuple[float, ...], ...] | None
    update: tuple[float, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values for an event, None where one is not finite."""
        gates = None if self.gates is None else [[finite(gate) for gate in number] for number in self.gates]
        update = [finite(size) for size in self.update]
        return {"layer": self.layer, "heads": list(self.heads), "passes": self.passes, "gates": gates, "update": update}


@dataclass(frozen=True)
class EntropyReading:
    """The entropy of every head of every layer, and all loops as they were then."""

    entropy: tuple[tuple[float, ...], ...]
    loops: tuple[LoopReading, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values for an event, None where one is not finite."""
        entropy = [[finite(value) for value in layer] for layer in self.entropy]
        return {"head_entropy": entropy, **({"loops": [loop.facts for loop in self.loops]} if self.loops else {})}


class EntropyInstrument(Instrument):
    """Measures entropies on the same few sequences of the batch, however many processes share it."""

    def __init__(self, gauge: EntropyGauge, model: Decoder) -> None:
        self.gauge, self.model = gauge, model

    def read(self, probe: Probe) -> EntropyReading:
        tokens, model = probe.tokens, self.model
        chosen = tokens[some_of(len(tokens), self.gauge.sequences)]
        readings = read_heads(model, chosen if len(chosen) else tokens[:1], self.gauge)
        entropy = readings.entropy if len(chosen) else torch.zeros_like(readings.entropy)
        total = sum_over_ranks(torch.cat((entropy, torch.full_like(entropy[:1], float(len(chosen))))))
        values = (total[:-1] / total[-1]).tolist()
        sizes = mean_over_ranks(torch.stack([*readings.updates.values()])).tolist() if readings.updates else []
        updates = dict(zip(readings.updates, sizes, strict=True))
        layers = tuple(tuple(values[a:b]) for a, b in pairwise(accumulate(model.plan.heads, initial=0)))
        return from_first_rank(EntropyReading(layers, self._loops(updates)))

    def _loops(self, updates: dict[tuple[int, int], float]) -> tuple[LoopReading, ...]:
        gates = None if self.model.gates is None else self.model.gates.tolist()
        readings = []
        for layer, loop in self.model.plan.loops.items():
            rows = None if gates is None else gates[layer][: loop.passes]
            strengths = None if rows is None else tuple(tuple(row[: len(loop.heads)]) for row in rows)
            update = tuple(updates[layer, number] for number in range(1, loop.passes + 1))
            readings.append(LoopReading(layer, loop.heads, loop.passes, strengths, update))
        return tuple(readings)


def check_causal(plan: Plan) -> None:
    """Refuse the plan of a model whose heads have no such entropy."""
    if plan.classes is not None:
        raise InputError("model", "Classifier", "must be a Decoder: this is the entropy of causal attention")


def as_decoder(model: Growable) -> Decoder:
    """The model as a Decoder, or an error: the heads of others have no such entropy."""
    if not isinstance(model, Decoder):
        raise InputError("model", type(model).__name__, "must be a Decoder: this is the entropy of causal attention")
    return model


@torch.no_grad()
def read_heads(model: Growable, tokens: Tensor, gauge: EntropyGauge) -> HeadReadings:
    """Run the model over tokens (B, T) and measure every head: entropies (all heads of all layers,), summed over B.

    A looped head reports its last pass, the others the normal one; so do those that fade from their loop.

    >>> read_heads(model, tokens, EntropyGauge()).entropy.shape
    torch.Size([8])
    """
    decoder = as_decoder(model)
    if tokens.shape[1] < 2:
        raise InputError("tokens", tokens.shape[1], "positions are too few: entropy needs at least 2")
    entropies: list[Tensor] = []
    updates: dict[tuple[int, int], Tensor] = {}

    def watch(layer: int, number: int, seen: Pass) -> None:
        entropy = gauge.of_heads(seen.queries, seen.keys)
        if number == 0:
            entropies.append(entropy)
            return
        attention = decoder.stack[layer].attention
        if attention.passes:
            chosen = _chosen(attention)
            entropies[layer].index_copy_(0, attention.looped_queries[chosen], entropy[chosen])
            updates[layer, number] = seen.update.float().norm() / seen.stream.float().norm()
        else:  # the whole block again
            entropies[layer] = entropy

    decoder.hidden(tokens, watch=watch)
    return HeadReadings(torch.cat(entropies), updates)


def _chosen(attention: Attention) -> Tensor:
    """The places, among the looped heads of a layer, of those that stay in the loop."""
    loop = attention.layer.loop
    assert loop is not None
    places = [place for place, head in enumerate(loop.heads) if head not in loop.fading]
    return torch.tensor(places, device=attention.looped.device)


def probe_rows(length: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Positions of the probe rows: the last one, or `count` spread over the last half, the last among them."""
    if count == 1:
        return torch.full((1,), length - 1, device=device)
    first = max(1, length // 2)
    count = min(count, length - first)
    return torch.linspace(first, length - 1, count, dtype=torch.float64, device=device).round().long()


@torch.no_grad()
def row_entropies(queries: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Entropy in nats of some query rows, (B, h, rows).

    Queries (B, h, T, e) and keys (B, kv heads, T, e) are rotated; computed in float32 or float64.

    >>> queries = keys = torch.zeros(1, 2, 8, 4)  # so every position looks at all before it alike
    >>> row_entropies(queries, keys, torch.tensor([0, 7])).exp()
    tensor([[[1.0000, 8.0000],
             [1.0000, 8.0000]]])
    """
    queries, keys = _widened(queries.index_select(2, rows), keys)
    with torch.autocast(queries.device.type, enabled=False):
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
    visible = torch.arange(keys.shape[2], device=rows.device) <= rows[:, None]
    logs = scores.masked_fill(~visible, -math.inf).log_softmax(-1)
    return -(logs.exp() * logs).masked_fill(~visible, 0).sum(-1)


@torch.no_grad()
def fused_entropies(queries: Tensor, keys: Tensor) -> Tensor:
    """Entropy in nats of all query rows, (B, h, T), in memory that grows with T only.

    Queries (B, h, T, e) and keys (B, kv heads, T, e) are rotated; computed in float32 or float64.

    >>> queries = keys = torch.zeros(1, 2, 8, 4)  # so every position looks at all before it alike
    >>> fused_entropies(queries, keys)[0, 0, [0, 7]].exp()
    tensor([1., 8.])
    """
    queries, keys = _widened(queries, keys)
    mean_key, total = _attention_with_lse(queries, keys)
    expected = (queries * mean_key).sum(-1) / math.sqrt(queries.shape[-1])
    return (total - expected).clamp(min=0)


def _widened(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    accum = accum_dtype(queries.dtype)
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    return queries.to(accum), keys.to(accum)


def _attention_with_lse(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention with the keys as values, and the log-sum-exp of the scores.

    The operators under scaled_dot_product_attention are called by name because it does not hand out the latter.
    """
    queries, keys = queries.contiguous(), keys.contiguous()
    if queries.is_cuda:
        queries, keys = queries.float(), keys.float()  # there is no fused kernel for more
        head_outputs, total, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            queries, keys, keys, None, True, 0.0, True
        )
        return head_outputs, total[..., : queries.shape[2]]  # it pads the rows
    head_outputs, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, keys, 0.0, True)
    return head_outputs, total
