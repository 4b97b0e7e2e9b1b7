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
from meristem.model.transformer import Transformer
from meristem.plan import Plan

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


class Part(NamedTuple):
    """A matrix within a parameter: some of its rows, and whether it is turned to have no more rows than columns."""

    parameter: int
    begin: int
    end: int
    turned: bool

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """This part of one of the tensors that have the shapes of the parameters."""
        rows = tensors[self.parameter][self.begin : self.end]
        return rows.T if self.turned else rows


def orthogonalised(batch: Tensor) -> Tensor:
    """Matrices (N, m, n) of at most as many rows as columns, with their singular values all brought near 1."""
    x = batch / (batch.norm(dim=(1, 2), keepdim=True) * SAFETY + 1e-6)
    for a, b, c in STEPS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for the matrices of a model's blocks, AdamW for its embedding, norms and gates.

    Both have the same rate: an update of a matrix is made as large as one of AdamW's. Equal shapes are orthogonalised
    in one product, in bfloat16 on a GPU, and under torch.distributed every process does its part of them. The momentum
    of a matrix is where edits look for it, so heads and blocks may come and go.

        optimizer = Muon(model, lr=2e-3)
        grower = Grower(model, optimizer, policies)
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
        # One list of groups and one state: AdamW has its part of both.
        self.adamw = torch.optim.AdamW([{"params": []}], lr=lr, betas=betas, eps=eps, fused=True)
        for group in self.param_groups[1:]:
            group |= {key: value for key, value in self.adamw.defaults.items() if key not in group}
        self.adamw.param_groups = self.param_groups[1:]
        self.adamw.state = self.state
        self._batches: dict[tuple[int, int], list[Part]] = {}
        self._sorted_for: tuple[Plan, list[int]] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; nothing changes where `found_inf` (a tensor) is 1, and gradients are divided by `grad_scale`."""
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if any(len(group["params"]) for group in self.adamw.param_groups):
            self.adamw.found_inf, self.adamw.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
            self.adamw.step()
        parameters: list[Tensor] = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        if parameters:
            self._update(parameters, found_inf, grad_scale)

    def _update(self, parameters: list[Tensor], found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        group = self.param_groups[0]
        beta = group["momentum"]
        gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        taken = parameters[0].new_ones(()) if found_inf is None else 1 - found_inf
        if grad_scale is not None:
            gradients = list(torch._foreach_mul(gradients, 1 / grad_scale))
        if found_inf is not None:  # a product with 0 would not do away with what is not finite
            gradients = [torch.where(found_inf > 0, 0.0, gradient) for gradient in gradients]
        momenta = [self._momentum(p) for p in parameters]
        change = torch._foreach_sub(gradients, momenta)
        torch._foreach_mul_(change, taken * (1 - beta))
        torch._foreach_add_(momenta, change)
        directions = torch._foreach_lerp(gradients, momenta, beta)  # as Nesterov looks ahead
        rate = taken * group["lr"]
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        for (rows, columns), parts in self._sorted(parameters).items():
            size = UPDATE_SIZE * max(rows, columns) ** 0.5
            new = self._orthogonal([part.of(directions) for part in parts]) * (-size * rate)
            torch._foreach_add_([part.of(parameters) for part in parts], list(new))

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum_buffer"]
        return momentum

    def _sorted(self, parameters: Sequence[Tensor]) -> dict[tuple[int, int], list[Part]]:
        """The matrices of the blocks by their shapes; looked up anew when the structure has changed."""
        now = self.model.plan, [id(p) for p in parameters]
        if self._sorted_for != now:
            places = {id(p): index for index, p in enumerate(parameters)}
            batches: dict[tuple[int, int], list[Part]] = defaultdict(list)
            for parameter, heights in _heights(self.model):
                if id(parameter) not in places:
                    continue
                begin = 0
                for height in heights:
                    shape = height, parameter.shape[1]
                    turned = shape[0] > shape[1]
                    part = Part(places[id(parameter)], begin, begin + height, turned)
                    batches[min(shape), max(shape)].append(part)
                    begin += height
            self._batches, self._sorted_for = dict(batches), now
        return self._batches

    def _orthogonal(self, matrices: Sequence[Tensor]) -> Tensor:
        """Matrices of one shape, orthogonalised, each by one of the processes."""
        dtype = torch.bfloat16 if matrices[0].is_cuda else matrices[0].dtype
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world == 1:
            return orthogonalised(torch.stack(list(matrices)).to(dtype)).to(matrices[0].dtype)
        share = -(-len(matrices) // world)
        padded = [*matrices, *[matrices[-1]] * (share * world - len(matrices))]
        mine = padded[dist.get_rank() * share : (dist.get_rank() + 1) * share]
        own = orthogonalised(torch.stack(mine).to(dtype)).contiguous()
        everyones = own.new_empty(share * world, *own.shape[1:])
        dist.all_gather_into_tensor(everyones, own)
        return everyones[: len(matrices)].to(matrices[0].dtype)


def _heights(model: Transformer) -> Iterable[tuple[Tensor, tuple[int, ...]]]:
    """The matrices of all blocks with the rows of each that are matrices of their own."""
    for block in model.stack:
        attention, feed_forward = block.attention, block.feed_forward
        layer, hidden = attention.layer, feed_forward.down.in_features
        yield attention.qkv.weight, (layer.query_width, layer.kv_width, layer.kv_width)
        yield attention.out.weight, (attention.out.out_features,)
        yield feed_forward.gate_up.weight, (hidden, hidden)
        yield feed_forward.down.weight, (feed_forward.down.out_features,)
