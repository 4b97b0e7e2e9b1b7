"""How far back each layer looks: the mean attention distance in tokens (Prism paper, equation 1).

The distance of query t is the mean of t - s under its attention. That is t minus the mean of s, so attending
to the position index in place of the values gives it with an ordinary fused attention call and no T x T map.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meristem.model import Decoder
from meristem.model.block import Pass
from meristem.model.operators import accum_dtype


@torch.no_grad()
def attention_distance(queries: Tensor, keys: Tensor) -> Tensor:
    """Mean distance of one layer, a scalar, from rotated queries (B, h, T, e) and keys (B, kv heads, T, e).

    The mean is over the batch, the heads and the last half of the queries, which have half of the tokens or
    more before them. Computed in float32, or float64 for float64.

    >>> queries = keys = torch.zeros(1, 2, 8, 4)  # so every position looks at all before it alike
    >>> attention_distance(queries, keys)
    tensor(2.7500)
    """
    accum = accum_dtype(queries.dtype)
    heads, length = queries.shape[1:3]
    queries, keys = queries.to(accum), keys.to(accum)
    # Repeated here because the fused float32 kernel of CUDA takes no groups.
    keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
    positions = torch.arange(length, device=queries.device, dtype=accum)
    # As wide as a head and contiguous in it, which fused kernels ask for; all columns are equal.
    values = positions[:, None].repeat(1, queries.shape[3]).expand_as(queries)
    with torch.autocast(queries.device.type, enabled=False):  # bf16 cannot tell position 1022 from 1023
        looked_at = scaled_dot_product_attention(queries, keys, values, is_causal=True)[..., 0]
    half = length // 2
    return (positions[half:] - looked_at[..., half:]).mean()


def mean_distances(model: Decoder, windows: Tensor, *, batch: int, device: torch.device) -> Tensor:
    """`layer_distances` over many sequences, windows (n, T), a batch at a time.

    >>> mean_distances(model, tokens, batch=1, device=torch.device("cpu")).shape
    torch.Size([2])
    """
    parts = [layer_distances(model, part.to(device)) * len(part) for part in windows.split(batch)]
    return torch.stack(parts).sum(0) / len(windows)


@torch.no_grad()
def layer_distances(model: Decoder, tokens: Tensor) -> Tensor:
    """Mean attention distance of every layer, (layers,), over the sequences tokens (B, T).

    >>> layer_distances(model, tokens).shape
    torch.Size([2])
    """
    distances: list[Tensor] = []

    def watch(layer: int, number: int, seen: Pass) -> None:
        if number == 0:  # the normal pass; loops and repeats look again
            distances.append(attention_distance(seen.queries, seen.keys))

    model.hidden(tokens, watch=watch)
    return torch.stack(distances)
