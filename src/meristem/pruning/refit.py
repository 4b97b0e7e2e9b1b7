"""What heads that left no longer write, the feed-forward layers write as far as they can, by least squares.

Layer by layer, from the first on, the stream behind a block is held against that of the whole model. What is missing
there is regressed on what the block's feed-forward layer has between its two products. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from meristem.devices import autocast
from meristem.gauges.probe import Batch
from meristem.growth.edits import SetFeedForward
from meristem.model import Transformer

RIDGE = 0.03  # of each diagonal entry of the moments
SAME = 1e-12  # of the stream's energy: less than this is rounding


class Behind(NamedTuple):
    """What a block's feed-forward layer has between its products, (n, f), and the stream behind the block, (n, d)."""

    hidden: Tensor
    stream: Tensor


class _Seen(Exception):
    """The layer was reached that one wanted to see."""


@torch.no_grad()
def refit(model: Transformer, whole: Transformer, batches: Sequence[Batch], device: torch.device) -> SetFeedForward:
    """Change the feed-forward layers of a model so that its stream is nearer to that of the `whole` one.

    Returned is the edit that does the same to a model like it. Blocks that are run again stay as they are.
    """
    changed: dict[int, Tensor] = {}
    for layer, shape in enumerate(model.plan.layers):
        if shape.repeats:
            continue
        gram, cross, energy, missed = _sums(model, whole, layer, batches, device)
        if missed <= SAME * energy:
            continue
        diagonal = gram.diagonal()
        ridge = RIDGE * diagonal + torch.finfo(gram.dtype).eps * diagonal.mean()
        more = torch.linalg.solve(gram.diagonal_scatter(diagonal + ridge), cross).T
        weight = model.stack[layer].feed_forward.down.weight
        if bool(more.isfinite().all()):
            weight += more.to(weight)
            changed[layer] = weight.detach().cpu().clone()
    return SetFeedForward(changed)


def _sums(
    model: Transformer, whole: Transformer, layer: int, batches: Sequence[Batch], device: torch.device
) -> tuple[Tensor, Tensor, float, float]:
    """Moments of what is hidden, (f, f), and of it with what is missing, (f, d); energies of the stream and of that."""
    width, hidden = model.plan.width, model.plan.feed_forward
    place: dict[str, Any] = {"dtype": torch.float64, "device": device}
    gram, cross = torch.zeros(hidden, hidden, **place), torch.zeros(hidden, width, **place)
    energies = torch.zeros(2, **place)
    for tokens, targets in batches:
        ours, theirs = (behind(each, layer, tokens, targets, device) for each in (model, whole))
        missing = theirs.stream - ours.stream
        gram += ours.hidden.mT @ ours.hidden
        cross += ours.hidden.mT @ missing
        energies += torch.stack((theirs.stream.square().sum(), missing.square().sum()))
    energy, missed = energies.tolist()
    return gram, cross, energy, missed


def behind(model: Transformer, layer: int, tokens: Tensor, targets: Tensor, device: torch.device) -> Behind:
    """What is to be seen at the end of a block, of all tokens (B, T) that are not padding; no later block is run."""
    block = model.stack[layer]
    stream: list[Tensor] = []
    found: list[Behind] = []

    def keep(module: object, inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
        stream.append(outputs[0])

    def stop(module: object, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        normed, gain = inputs
        weight = (block.feed_forward.gate_up.weight * gain).float()
        with torch.autocast(device.type, enabled=False):
            gate, up = (normed.float() @ weight.mT).chunk(2, -1)
        real = model.attention_mask(tokens).any(-1).expand(len(tokens), -1)
        found.append(Behind((silu(gate) * up)[real].double(), (stream[0].double() + output.double())[real]))
        raise _Seen

    hooks = [
        block.feed_forward_norm.register_forward_hook(keep), block.feed_forward.register_forward_hook(stop),
    ]  # fmt: skip
    try:
        with autocast(device):
            model.loss(tokens, targets)
    except _Seen:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found[0]
