"""torch.compile for the parts of a model, so that growth costs few new graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meristem.model.operators import announce_operators
from meristem.model.transformer import Regions

VARIANTS = 64  # of one piece of code; more than any plan needs (kinds of blocks times passes)


def compiled_regions() -> Regions:
    """The parts of the model, compiled: one graph per kind of block and number of loops.

    A whole graph or an error, for every part: falling back to slow Python without a word is not an option.
    """
    announce_operators()
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    # Rows that are no multiple of 128 bytes long would be copied into longer ones, which no product wins back.
    torch._inductor.config.comprehensive_padding = False
    regions = Regions().mapped(partial(torch.compile, dynamic=False, fullgraph=True))
    return replace(regions, enter=partial(_enter_as_between_blocks, regions.enter))


def recomputed(regions: Regions) -> Regions:
    """The parts of the model with blocks of which only the inputs are kept; the backward pass runs them again.

    That saves most of the memory of a step for about a third more work, and the gradients stay what they are. It goes
    around compiled blocks, which need no other graphs for it. There is no dropout, so no random numbers to keep.

        model(tokens, targets, recomputed(compiled_regions())).loss.backward()
    """
    return replace(regions, block=partial(_run_again, regions.block))


def _run_again(run: Callable[..., tuple[Tensor, Tensor]], *parts: Any) -> tuple[Tensor, Tensor]:
    *_, watch = parts
    if watch is not None or not torch.is_grad_enabled():  # whoever watches must see every pass once
        return run(*parts)
    outputs: tuple[Tensor, Tensor] = checkpoint(run, *parts, use_reentrant=False, preserve_rng_state=False)
    return outputs


def _enter_as_between_blocks(enter: Callable[..., tuple[Tensor, Tensor]], *parts: Any) -> tuple[Tensor, Tensor]:
    """The empty branch before the first block, with a gradient as later ones have.

    To the compiler the first block is then one like any other, and needs no graph of its own.
    """
    x, branch = enter(*parts)
    return x, branch.requires_grad_(x.requires_grad)
