"""Which attention kernel runs: chosen explicitly, layer by layer, and reported."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from meristem.errors import InputError
from meristem.plan import LayerPlan

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def choose_backends(
    layers: Sequence[LayerPlan],
    device: torch.device,
    dtype: torch.dtype,
    wanted: str = "auto",
    *,
    masked: bool = False,
) -> list[str]:
    """The backend of each layer: the first of the preferred ones that runs its head dim forward and backward.

    `wanted` names one backend for all layers, or "auto": cuDNN first on Hopper and later, where it is the fastest,
    flash first elsewhere. With `masked` it has to take a mask of padding, and is not causal.
    """
    if wanted not in ("auto", *BACKENDS):
        raise InputError("attention", wanted, f"must be auto or one of {', '.join(BACKENDS)}")
    if wanted != "auto":
        order = [wanted]
    elif device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        order = ["cudnn", "flash", "efficient", "math"]
    else:
        order = ["flash", "efficient", "math"]
    chosen = []
    for layer in layers:
        grouped = layer.heads != layer.kv_heads
        name = next((b for b in order if _runs(b, layer.head_dim, grouped, masked, device, dtype)), None)
        if name is None:
            raise InputError(
                "attention",
                wanted,
                f"cannot run head dim {layer.head_dim} in {dtype} on {device.type} here"
                f"{', with a mask of padding' if masked else ''}; use auto",
            )
        chosen.append(name)
    return chosen


@cache
def _runs(backend: str, head_dim: int, grouped: bool, masked: bool, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel runs, by trying it: its published limits change between versions, the kernel does not lie.

    It is tried on ones, not on random numbers: a run's own would then depend on whether this had been tried before. A
    block may be born where nobody asks for gradients; it is trained later.
    """
    query = torch.ones(1, 2, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
    key = torch.ones(1, 1 if grouped else 2, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, 1, 128, dtype=torch.bool, device=device).expand(1, 1, 128, -1) if masked else None
    try:
        with torch.enable_grad(), warnings.catch_warnings(), sdpa_kernel(BACKENDS[backend]):
            warnings.simplefilter("ignore")  # a refusing kernel explains itself at length
            head_outputs = scaled_dot_product_attention(query, key, key, mask, is_causal=not masked, enable_gqa=grouped)
            head_outputs.sum().backward()
    except RuntimeError:
        return False
    return True
