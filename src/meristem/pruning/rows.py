"""Which training rows pruning goes by: some are set aside to measure the loss, others show what heads read.

None of them is one of the held-out rows that evaluations report, and no update of the repair sees those set aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from meristem.data import LabelledData, RowSampler, Sampler, TokenData, held_apart, padded_length
from meristem.data.sampler import AnySampler
from meristem.errors import InputError
from meristem.gauges.probe import TOKENS, Batch
from meristem.pruning.settings import PruneSettings
from meristem.pruning.source import Source
from meristem.runs.divergence import batch_number

SHARE = 4  # at most one in so many rows is set aside
FEW = 16  # rows are enough where there are not more
SHOWN = 64  # tokens for each number in a layer that is regressed on, or `TOKENS`

Picks = NDArray[np.int64]  # where windows begin, or numbers of rows
Order = Callable[[int], Picks]  # of a batch, by its number


@dataclass(frozen=True)
class Rows:
    """Batches that the loss is measured on, and others that show what layers do; `enough` of these for their heads."""

    aside: list[Batch]
    shown: list[Batch]
    enough: int
    trained: int = 0  # of the rows that are set aside, those that the run was trained on


def pruning_rows(source: Source, settings: PruneSettings, device: torch.device) -> Rows:
    """Training rows that the run holds back, then those that follow its updates and its repair, in the run's own order.

    Where less than an epoch was trained on, no update has seen the latter either.
    """
    data, context, rewinds = source.data, source.checkpoint.plan.context, source.folder.rewinds
    held_back, order, count = _orders(source)
    wanted = min(settings.sequences, count // SHARE)
    if len(held_back) >= FEW:  # rather fewer than some that were trained on
        wanted = min(wanted, len(held_back))
    aside = held_back[:wanted]
    others = count - len(held_back)
    if len(aside) < wanted and settings.repair * source.config.train.batch_size >= others:
        raise InputError("repair", settings.repair, f"updates see all of the {others} training rows; take fewer")
    repairs = range(source.step, source.step + settings.repair)
    trained = {int(pick) for step in repairs for pick in order(batch_number(step, rewinds))}
    plan = source.checkpoint.plan
    heads = _sequences(max(layer.query_width for layer in plan.layers), context)
    enough = max(heads, _sequences(plan.feed_forward, context))
    shown: list[int] = []
    first, begin, looked = len(aside), batch_number(repairs.stop, rewinds), 0
    for pick in _once(order, begin, 2 * count):  # from any place on, that is all of them
        looked += 1
        if len(aside) < wanted and pick not in trained:
            aside.append(pick)
        elif len(shown) < enough:
            shown.append(pick)
        elif len(aside) == wanted:
            break
    if len(aside) < min(FEW, wanted) and wanted > 1:
        raise InputError("repair", settings.repair, f"updates see too many of the {count} training rows; take fewer")
    if wanted < 2 or not shown:
        raise InputError("training rows", count, "are too few to set some aside; use more data")
    make, per_look = _maker(data, context, device), max(1, TOKENS // context)
    last = begin * source.config.train.batch_size + looked
    return Rows(
        [make(part) for part in _parts(aside, source.config.eval.batch)],
        [make(part) for part in _parts(shown, per_look)],
        -(-heads // per_look),
        _trained_on(source, order, others, last, {*aside[first:]}),
    )


def _trained_on(source: Source, order: Order, count: int, last: int, drawn: set[int]) -> int:
    """How many of the picks, drawn from `count` up to the `last` one of the run's order, the run was trained on."""
    steps, rewinds = source.trained_steps, source.folder.rewinds
    if not steps or last <= count:  # all within an epoch, which has every pick once
        return 0
    if not rewinds and steps * source.config.train.batch_size >= count:
        return len(drawn)
    left = set(drawn)
    for step in range(steps):
        left -= {int(pick) for pick in order(batch_number(step, rewinds))}
        if not left:
            break
    return len(drawn) - len(left)


def _sequences(numbers: int, context: int) -> int:
    """How many sequences it takes to regress on so many numbers."""
    return max(FEW, max(TOKENS, SHOWN * numbers) // context)


def _orders(source: Source) -> tuple[list[int], Order, int]:
    """The picks that the run holds back, the order of those it trains on, and how many there are in all."""
    data, config = source.data, source.config
    size, seed, held_back = config.train.batch_size, config.data.seed, config.data.held_back
    if isinstance(data, TokenData):
        windows = Sampler(len(data.split("train")), source.checkpoint.plan.context, size, seed)
        return *_parted(windows, Sampler.starts, held_back), windows.windows
    rows = RowSampler(len(data.split("train")), size, seed)
    return *_parted(rows, RowSampler.rows, held_back), rows.count


def _parted(sampler: AnySampler, picks: Callable[[AnySampler, int], Picks], held_back: int) -> tuple[list[int], Order]:
    if not held_back:
        return [], partial(picks, sampler)
    apart, others = held_apart(sampler, held_back)
    return list(_once(partial(picks, apart), 0, held_back)), partial(picks, others)


def _once(order: Order, first: int, most: int) -> Iterator[int]:
    """Different picks, out of `most` from a batch on."""
    seen: set[int] = set()
    number, gone = first, 0
    while gone < most:
        picks = order(number)
        number, gone = number + 1, gone + len(picks)
        for pick in map(int, picks):
            if pick not in seen:
                seen.add(pick)
                yield pick


def _parts(picks: list[int], size: int) -> list[Picks]:
    return [np.array(picks[start : start + size]) for start in range(0, len(picks), size)]


def _maker(data: TokenData | LabelledData, context: int, device: torch.device) -> Callable[[Picks], Batch]:
    """What makes tokens and targets of picks."""
    if isinstance(data, TokenData):
        stream = data.split("train")

        def window_batch(starts: Picks) -> Batch:
            windows = torch.from_numpy(stream.windows(starts, context + 1)).to(device)
            return windows[:, :-1], windows[:, 1:]

        return window_batch
    rows = data.split("train")

    def row_batch(chosen: Picks) -> Batch:
        tokens = rows.padded(chosen, padded_length(rows.lengths[chosen], context))
        return torch.from_numpy(tokens).to(device), torch.from_numpy(rows.labels[chosen]).to(device)

    return row_batch
