"""Loss and perplexity on held-out windows that never change."""

from __future__ import annotations

import torch

from meristem.data import TokenStream, evaluation_windows
from meristem.devices import autocast
from meristem.errors import InputError, Remedy
from meristem.model import Transformer


def held_out_windows(stream: TokenStream, context: int, windows: int) -> torch.Tensor:
    """The first non-overlapping windows of a stream, (at most `windows`, context + 1) tokens."""
    starts = evaluation_windows(len(stream), context, windows)
    if not len(starts):
        raise InputError(
            "held-out tokens", len(stream),
            f"must be at least {context + 1} for a context of {context}; "
            "prepare the data with a larger share held out, or use a smaller model.context",
            Remedy(("held_out",), "data prepare"),
        )  # fmt: skip
    return torch.from_numpy(stream.windows(starts, context + 1))


@torch.no_grad()
def held_out_loss(model: Transformer, windows: torch.Tensor, *, batch: int, device: torch.device) -> float:
    """Mean cross entropy per token, in nats, over windows (n, context + 1)."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in windows.split(batch):
        tokens = part.to(device)
        with autocast(device):
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        assert loss is not None
        total += loss.double() * len(part)
    return float(total) / len(windows)
