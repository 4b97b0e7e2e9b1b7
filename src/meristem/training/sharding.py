"""Fully sharded training (FSDP2): every process has its rows of every weight, gradient and moment, and no others.

A block is made whole before it is called and let go afterwards. Whatever looks at the weights themselves, or changes
the structure, does so in `Sharded.whole`, on a model that is the plain one of a single process.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meristem.devices import compute_dtype
from meristem.model.transformer import Output, Regions, Transformer
from meristem.ranks import rows_of_rank, whole_tensor


class Sharded(nn.Module):
    """A model of which this process holds a part, with the moments that an optimizer keeps of it.

    Products of blocks on a GPU run on bfloat16 copies of their matrices, as autocast would make them, and only these
    travel; embedding, norms and gates, the stream and all sums of gradients are float32. A CPU computes in float32.
    """

    root: _Root

    def __init__(self, model: Transformer, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
        super().__init__()
        # It fears that blocks write to the stream in place, which they never do.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        self.mesh, self.optimizer = mesh, optimizer
        self._shard(model)

    def forward(self, tokens: Tensor, targets: Tensor, regions: Regions) -> Output:
        """The mean loss of this process's tokens (B, T); the gradients will be averaged over processes."""
        return cast("Output", self.root(tokens, targets, regions))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The model with plain, whole weights, on all processes, which must all come here.

        Then, also after an error, it is sharded again. Moments stay where they are: `apply_edit` gathers those of what
        it changes.
        """
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        sharded = dict(self.root.model.named_parameters())
        gathered = self._gathered(sharded)
        try:
            yield
        finally:
            self._shared_out(sharded, gathered)

    @torch.no_grad()
    def _gathered(self, sharded: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Put whole parameters in the place of those that are shared out."""
        gathered = {}
        for name, parameter in sharded.items():
            gathered[name] = nn.Parameter(whole_tensor(parameter), parameter.requires_grad)
            _put(self.root.model, name, gathered[name])
        _hand_over(self.optimizer, sharded, gathered)
        return gathered

    @torch.no_grad()
    def _shared_out(self, sharded: Mapping[str, nn.Parameter], gathered: Mapping[str, nn.Parameter]) -> None:
        """Take up the parts that there were, with the values of today, or make others for another structure."""
        model = self.root.model
        now = dict(model.named_parameters())
        if now.keys() != gathered.keys() or any(now[name] is not gathered[name] for name in now):
            self._shard(model)
            gc.collect()  # shells refer to themselves, and hold on to the parts that there were
            return
        for name, parameter in sharded.items():
            local = cast("DTensor", parameter).to_local()
            local.copy_(gathered[name][rows_of_rank(len(parameter))])  # values may have been set
            _put(model, name, parameter)
        _hand_over(self.optimizer, gathered, sharded)

    def _shard(self, model: Transformer) -> None:
        """Share the weights of a whole model, the same on all processes, and what the optimizer keeps of them."""
        for module in model.modules():  # hooks of an earlier sharding, which would keep it alive
            for hooks in (
                module._state_dict_pre_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks,
            ):  # fmt: skip
                hooks.clear()
        before = dict(model.named_parameters())
        self.root = _Root(model)
        product = compute_dtype(model.embedding.weight.device)
        products = MixedPrecisionPolicy(product, torch.float32, cast_forward_inputs=False)
        for shell in self.root.shells:
            norms = {parameter for parameter in shell.parameters() if parameter.dim() < 2}
            fully_shard(shell, mesh=self.mesh, mp_policy=products, ignored_params=norms)
        matrices: set[nn.Parameter] = {
            parameter for parameter in self.root.shells.parameters() if isinstance(parameter, DTensor)
        }
        fully_shard(
            self.root, mesh=self.mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
            ignored_params=matrices,
        )  # fmt: skip
        for module in model.modules():
            # The compiler may take what is marked for something that never changes. Blocks do, and share their code.
            module._is_fsdp_managed_module = False  # type: ignore[assignment]
        _hand_over(self.optimizer, before, dict(model.named_parameters()))


class _Shell(nn.Module):
    """A block as FSDP sees it. Its hooks are on this shell, outside of what is compiled and of what is edited."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, call: Any, *parts: Any) -> Any:
        return call(self.block, *parts)


class _Root(nn.Module):
    """A model as FSDP sees it, with a shell around every block; what is not in these is whole during the pass."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.shells = nn.ModuleList(_Shell(block) for block in model.blocks)
        self._shell_of = dict(zip(model.blocks, self.shells, strict=True))

    def forward(self, tokens: Tensor, targets: Tensor, regions: Regions) -> Output:
        return cast("Output", self.model(tokens, targets, replace(regions, block=partial(self._block, regions))))

    def _block(self, regions: Regions, block: nn.Module, *parts: Any) -> Any:
        return self._shell_of[block](regions.block, *parts)


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, own = name.rpartition(".")
    setattr(model.get_submodule(path), own, parameter)


def _hand_over(
    optimizer: torch.optim.Optimizer, before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]
) -> None:
    """Exchange an optimizer's parameters for others of the same names, with what it keeps of them.

    Moments that are still whole are shared out where their parameter is.
    """
    exchanged = {id(parameter): now[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [exchanged.get(id(parameter), parameter) for parameter in group["params"]]
    for name, parameter in before.items():
        if parameter in optimizer.state:
            kept = optimizer.state.pop(parameter)
            optimizer.state[now[name]] = {key: _like(value, now[name]) for key, value in kept.items()}


def _like(value: Any, parameter: nn.Parameter) -> Any:
    """A moment as its parameter is, if that is sharded; what is no moment goes along to its device."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    own = value[rows_of_rank(len(value))].to(parameter.device, copy=True)
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False, shape=value.shape, stride=parameter.stride()
    )
