"""Small models whose loss depends on attention, and searches on rows that they themselves have written."""

from __future__ import annotations

from typing import Any

import torch

from meristem.gauges.probe import Batch
from meristem.model import Decoder
from meristem.plan import Plan
from meristem.pruning.rows import Rows
from meristem.pruning.search import Search
from meristem.pruning.settings import PruneSettings

CPU = torch.device("cpu")


def strong_model(plan: Plan, seed: int = 0) -> Decoder:
    """A random model whose heads say a lot, and that is sure of what it says."""
    model = Decoder(plan, seed=seed)
    with torch.no_grad():
        for block in model.stack:
            block.attention.qkv.weight.mul_(8)
            block.attention.out.weight.mul_(25)
        model.embedding.weight.mul_(8)
        model.norm.weight.mul_(16)
    return model


def written_rows(model: Decoder, count: int = 24, seed: int = 1) -> Rows:
    """Random tokens, followed by what the model finds most likely: any change of the model makes its loss rise."""

    def batch(start: int) -> Batch:
        generator = torch.Generator().manual_seed(seed + start)
        tokens = torch.randint(model.plan.vocabulary, (count, model.plan.context), generator=generator)
        with torch.no_grad():
            return tokens, model.logits(tokens).argmax(-1)

    return Rows([batch(0)], [batch(100), batch(200)], 2)


def search_of(model: Decoder, rows: Rows | None = None, **settings: Any) -> Search:
    return Search(model, rows or written_rows(model), PruneSettings(**settings), 0, CPU)
