"""What our operators have in common: when they use Triton, in what precision they compute, what the compiler is told.

An operator is something that the compiler does not fuse well by itself. It has a plain PyTorch form, which runs
anywhere and defines the result, and a Triton form for CUDA. The compiler sees it as a single node, which it neither
splits nor reorders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

_operators: list[CustomOpDef] = []


class Operator:
    """A function that the compiler sees as a single node. Without the compiler it is the function alone.

    The way through torch's dispatcher takes 0.2 ms, which in a small model on a CPU is longer than the work.
    """

    def __init__(self, function: Callable[..., Any], node: CustomOpDef) -> None:
        self.function, self.node = function, node
        self.register_fake = node.register_fake

    def __call__(self, *arguments: Any) -> Any:
        return (self.node if torch.compiler.is_compiling() else self.function)(*arguments)


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of a function; `mutates` names the arguments it writes to."""

    def register(function: Callable[..., Any]) -> Operator:
        _operators.append(torch.library.custom_op(f"meristem::{name}", function, mutates_args=mutates))
        return Operator(function, _operators[-1])

    return register


def announce_operators() -> None:
    """Tell the compiler about our operators before it meets them in a deep model.

    Torch before 2.13 describes an operator it does not know with all that leads up to it, in text, for a log line that
    nobody asked for; in a chain of such operators that takes time exponential in the depth.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for known in _operators:
        target = known._opoverload
        if target not in lowerings:
            tag = get_layout_constraint_tag(target, with_default=True)
            make_fallback(target, layout_constraint=tag_to_layout_constraint(tag), warn=False)


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def use_triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and has_triton()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that products of x run in: autocast's if it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def product_in(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product a (m, k) @ b (k, n) in a dtype of its own, to which its sums are not rounded twice on a GPU."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums accumulate in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
