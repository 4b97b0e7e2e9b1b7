"""The CUDA form of an AdamW update: one kernel for a whole group of weights, which reads and writes everything once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
FIELDS = 6  # of a row of the table


class Table(NamedTuple):
    """Where the tensors of a group lie, on the device; to be used again as long as they lie there, as large as then."""

    fields: tuple[int, ...]  # of all weights, one field after the other
    rows: Tensor  # (weights, FIELDS): addresses of weight, gradient, both moments and count of updates; elements
    blocks: Tensor  # (programs, 2): the row that a program works on, and its first element


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    rows, blocks, found_inf, grad_scale, lr, decay, beta1, beta2, log_beta1, log_beta2, eps,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = rows + tl.load(blocks + 2 * program) * FIELDS
    at = tl.load(blocks + 2 * program + 1) + tl.arange(0, BLOCK)
    inside = at < tl.load(row + 5)
    if tl.load(found_inf) == 0:
        weights = tl.load(row).to(tl.pointer_type(tl.float32)) + at
        means = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + at
        squares = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + at
        step = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32)))
        gradient = tl.load(tl.load(row + 1).to(tl.pointer_type(tl.float32)) + at, mask=inside, other=0.0)
        gradient = gradient / tl.load(grad_scale)
        weight = tl.load(weights, mask=inside, other=0.0)
        mean = tl.load(means, mask=inside, other=0.0)
        square = tl.load(squares, mask=inside, other=0.0)
        mean += (1 - beta1) * (gradient - mean)
        square = beta2 * square + (1 - beta2) * gradient * gradient
        size = lr / (1 - tl.exp2(step * log_beta1))
        root = tl.sqrt(square / (1 - tl.exp2(step * log_beta2)))
        tl.store(weights, weight * (1 - lr * decay) - size * mean / (root + eps), mask=inside)
        tl.store(means, mean, mask=inside)
        tl.store(squares, square, mask=inside)


def adamw_kernel_(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[dict[str, Tensor]],
    group: dict[str, Any], found_inf: Tensor | None, grad_scale: Tensor | None, table: Table | None,
) -> Table:  # fmt: skip
    """Update the weights of a group and their states; returns the table, which may serve the next time too."""
    gradients = [g.contiguous() for g in gradients]
    like, (beta1, beta2) = parameters[0], group["betas"]
    skipped = torch.zeros((), device=like.device) if found_inf is None else found_inf
    scale = torch.ones((), device=like.device) if grad_scale is None else grad_scale
    # Not one tensor for all: the host would wait for it.
    torch._foreach_add_([state["step"] for state in states], [1 - skipped] * len(states))
    columns = parameters, gradients, *([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))
    fields = (*(tensor.data_ptr() for column in columns for tensor in column), *(p.numel() for p in parameters))
    if table is None or table.fields != fields:
        assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for column in columns for tensor in column)
        table = _table(fields, like.device)
    _adamw[(len(table.blocks),)](
        table.rows, table.blocks, skipped, scale, group["lr"], group["weight_decay"], beta1, beta2,
        math.log2(beta1) if beta1 else -math.inf, math.log2(beta2) if beta2 else -math.inf, group["eps"],
        FIELDS=FIELDS, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return table


def _table(fields: tuple[int, ...], device: torch.device) -> Table:
    rows = torch.tensor(fields).view(FIELDS, -1).T.contiguous()
    counts = [-(-size // BLOCK) for size in rows[:, -1].tolist()]
    owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    firsts = torch.cat([torch.arange(count) * BLOCK for count in counts])
    return Table(fields, rows.to(device), torch.stack((owners, firsts), 1).to(device))
