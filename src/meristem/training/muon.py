"""Muon: momentum whose matrices are made orthogonal, for the matrices of the blocks; AdamW for everything else.

An update of a matrix has all its singular values near 1, so that rare directions learn as fast as frequent ones
(Jordan et al. 2024). Queries, keys and values, and both halves of the feed-forward, are matrices of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meristem.errors import InputError
from meristem.model.operators import use_triton
from meristem.model.transformer import Transformer
from meristem.plan import Plan
from meristem.ranks import own_parts, rank, rows_of_rank, world
from meristem.training.adamw import AdamW

# Five steps of an odd polynomial, each with coefficients of its own, bring singular values from 1e-3..1 to near 1:
# "The Polar Express" (Amsel et al. 2025), for products in bfloat16.
STEPS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
SAFETY = 1.02  # norms are overestimated by this much, as products in bfloat16 round
UPDATE_SIZE = 0.2  # root mean square of AdamW's updates, which those of a matrix are given too


class MatrixRows(NamedTuple):
    """A matrix within a parameter: some of its rows."""

    parameter: int
    begin: int
    end: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """This part of one of the tensors that have the shapes of the parameters."""
        return tensors[self.parameter][self.begin : self.end]

    def within(self, held: slice) -> MatrixRows:
        """What there is of it in a part of the parameter that has these rows, counted from the first of them."""
        begin, end = max(self.begin, held.start), min(self.end, held.stop)
        return MatrixRows(self.parameter, begin - held.start, max(begin, end) - held.start)

    @property
    def height(self) -> int:
        return self.end - self.begin


def orthogonalised(batch: Tensor) -> Tensor:
    """Matrices (N, m, n) with their singular values all brought near 1."""
    x = batch / (batch.norm(dim=(1, 2), keepdim=True) * SAFETY + 1e-6)
    wide = x.shape[1] <= x.shape[2]
    for a, b, c in STEPS:
        gram = x @ x.mT if wide else x.mT @ x  # on the shorter side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a) if wide else torch.baddbmm(x, x, polynomial, beta=a)
    return x


def momentum_(
    directions: Tensor, gradients: Tensor, momenta: Tensor, found_inf: Tensor, grad_scale: Tensor, beta: float
) -> None:
    """Take gradients into the momentum, and write where it leads, as Nesterov looks ahead, into `directions`.

    Where `found_inf` is 1 the momentum stays as it is, whatever the gradients are.
    """
    if use_triton(gradients):
        from meristem.training.triton_muon import momentum_kernel_

        return momentum_kernel_(directions, gradients, momenta, found_inf, grad_scale, beta)
    gradients = torch.where(found_inf > 0, 0.0, gradients / grad_scale)
    momenta.copy_(torch.where(found_inf > 0, momenta, momenta.lerp(gradients, 1 - beta)))
    directions.copy_(gradients.lerp(momenta, beta))
    return None


def update_(parameters: Tensor, updates: Tensor, rate: Tensor, decay: float, scale: float) -> None:
    """Let weights decay, and take `scale` times the updates off them, both times the rate."""
    if use_triton(parameters):
        from meristem.training.triton_muon import update_kernel_

        return update_kernel_(parameters, updates, rate, decay, scale)
    parameters.mul_(1 - rate * decay).sub_(updates * (rate * scale))
    return None


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for the matrices of a model's blocks, AdamW for its embedding, norms and gates.

    Both have the same rate: an update of a matrix is made as large as one of AdamW's. Equal shapes are orthogonalised
    in one product, in bfloat16 on a GPU, and under torch.distributed every process does its part of them. The momentum
    of a matrix is where edits look for it, so heads and blocks may come and go.

    >>> optimizer = Muon(model, lr=2e-3)
    >>> model(tokens, targets=targets).loss.backward()
    >>> optimizer.step()
    """

    def __init__(
        self, model: nn.Module, lr: float, *, momentum: float = 0.95, betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8, weight_decay: float = 0.1,
    ) -> None:  # fmt: skip
        own = model.module if isinstance(model, DistributedDataParallel) else model
        if not isinstance(own, Transformer):
            expected = (
                "must be a Meristem model: it is for the matrices of blocks, not for embeddings, norms and the like"
            )
            raise InputError("model", type(model).__name__, expected)
        self.model = own
        blocks = {id(p) for block in self.model.stack for p in block.parameters() if p.dim() == 2}
        trained = [p for p in own.parameters() if p.requires_grad]
        others = [p for p in trained if id(p) not in blocks]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if id(p) in blocks], "weight_decay": weight_decay, "momentum": momentum},
            {"params": [p for p in others if p.dim() == 2], "weight_decay": weight_decay},
            {"params": [p for p in others if p.dim() != 2], "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": lr})
        self.adamw = AdamW([{"params": []}], lr=lr, betas=betas, eps=eps)
        for group in self.param_groups[1:]:
            group |= {key: value for key, value in self.adamw.defaults.items() if key not in group}
        self._batches: dict[tuple[int, int], list[MatrixRows]] = {}
        self._sorted_for: tuple[Plan, list[int]] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; nothing changes where `found_inf` (a tensor) is 1, and gradients are divided by `grad_scale`.

        A `closure` that makes the gradients anew is called first, and the loss that it returns is handed on.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        # One list of groups and one state, of which AdamW has its part; `load_state_dict` makes both anew.
        self.adamw.param_groups, self.adamw.state = self.param_groups[1:], self.state
        if any(len(group["params"]) for group in self.adamw.param_groups):
            self.adamw.found_inf, self.adamw.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
            self.adamw.step()
        parameters: list[Tensor] = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        if parameters:
            self._update(parameters, found_inf, grad_scale)
        return loss

    def _update(self, parameters: list[Tensor], found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        group = self.param_groups[0]
        weights, sharded = own_parts(parameters)
        like = weights[0]
        skipped = like.new_zeros(()) if found_inf is None else found_inf
        scale = like.new_ones(()) if grad_scale is None else grad_scale
        rate = (1 - skipped) * group["lr"]
        gradients, _ = own_parts([p.grad for p in parameters if p.grad is not None])
        momenta, _ = own_parts([self._momentum(p) for p in parameters])
        dtype = torch.bfloat16 if like.is_cuda else like.dtype
        for (rows, columns), matrices in self._sorted(parameters).items():
            spread = _spread(matrices, parameters) if sharded else [matrices]  # what every process has of them
            heights = [[part.height for part in held] for held in spread]
            mine = rank() if sharded else 0
            directions = like.new_empty(sum(heights[mine]), columns, dtype=dtype)
            for own, part in zip(directions.split(heights[mine]), spread[mine], strict=True):
                if part.height:
                    momentum_(own, part.of(gradients), part.of(momenta), skipped, scale, group["momentum"])
            if sharded:
                updates = _gathered_work(directions, heights)
            else:
                updates = _shared_work(directions.unflatten(0, (-1, rows))).flatten(0, 1)
            size = UPDATE_SIZE * max(rows, columns) ** 0.5
            for own, part in zip(updates.split(heights[mine]), spread[mine], strict=True):
                if part.height:
                    update_(part.of(weights), own, rate, group["weight_decay"], size)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum_buffer"]
        return momentum

    def _sorted(self, parameters: Sequence[Tensor]) -> dict[tuple[int, int], list[MatrixRows]]:
        """The matrices of the blocks by their shapes; looked up anew when the structure has changed."""
        now = self.model.plan, [id(p) for p in parameters]
        if self._sorted_for != now:
            places = {id(p): index for index, p in enumerate(parameters)}
            batches: dict[tuple[int, int], list[MatrixRows]] = defaultdict(list)
            for parameter, heights in _heights(self.model):
                if id(parameter) not in places:
                    continue
                begin = 0
                for height in heights:
                    batches[height, parameter.shape[1]].append(MatrixRows(places[id(parameter)], begin, begin + height))
                    begin += height
            self._batches, self._sorted_for = dict(batches), now
        return self._batches


def _shared_work(batch: Tensor) -> Tensor:
    """Matrices of one shape, orthogonalised, each by one of the processes."""
    if world() == 1:
        return orthogonalised(batch)
    share, mine = -(-len(batch) // world()), batch[rows_of_rank(len(batch))]
    own = batch.new_zeros(share, *batch.shape[1:])
    own[: len(mine)] = orthogonalised(mine) if len(mine) else mine
    everyones = batch.new_empty(share * world(), *batch.shape[1:])
    dist.all_gather_into_tensor(everyones, own)
    return everyones[: len(batch)]


def _spread(matrices: Sequence[MatrixRows], parameters: Sequence[Tensor]) -> list[list[MatrixRows]]:
    """What every process has of matrices whose parameters are shared out over all of them."""
    return [
        [part.within(rows_of_rank(len(parameters[part.parameter]), of)) for part in matrices] for of in range(world())
    ]


def _gathered_work(rows: Tensor, heights: Sequence[Sequence[int]]) -> Tensor:
    """Rows (n, columns) that this process has of matrices of one shape, as they are in the orthogonalised matrices.

    Process p has `heights[p][m]` rows of matrix m. Each matrix is put together by one of the processes, which sends
    the rows of the outcome back to where they belong.
    """
    owned = [range(len(heights[0]))[rows_of_rank(len(heights[0]), of)] for of in range(world())]
    mine = owned[rank()]
    sent = [sum(heights[rank()][m] for m in matrices) for matrices in owned]
    got = [sum(held[m] for m in mine) for held in heights]
    pieces = rows.new_empty(sum(got), rows.shape[1])
    dist.all_to_all_single(pieces, rows, got, sent)
    if mine:
        parts = pieces.split([held[m] for held in heights for m in mine])  # by process, then by matrix
        whole = orthogonalised(torch.stack([torch.cat(parts[number :: len(mine)]) for number in range(len(mine))]))
        split = [matrix.split([held[m] for held in heights]) for matrix, m in zip(whole, mine, strict=True)]
        pieces = torch.cat([part for of_process in zip(*split, strict=True) for part in of_process])
    updates = torch.empty_like(rows)
    dist.all_to_all_single(updates, pieces, sent, got)
    return updates


def _heights(model: Transformer) -> Iterable[tuple[Tensor, tuple[int, ...]]]:
    """The matrices of all blocks with the rows of each that are matrices of their own."""
    for block in model.stack:
        attention, feed_forward = block.attention, block.feed_forward
        layer, hidden = attention.layer, feed_forward.down.in_features
        yield attention.qkv.weight, (layer.query_width, layer.kv_width, layer.kv_width)
        yield attention.out.weight, (attention.out.out_features,)
        yield feed_forward.gate_up.weight, (hidden, hidden)
        yield feed_forward.down.weight, (feed_forward.down.out_features,)
