"""What `meristem doctor` tells: versions, the device and its kernels, and what is missing for which extra."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch

from meristem import __version__
from meristem.devices import choose_device, compute_dtype, describe_device, memory_of
from meristem.errors import InputError
from meristem.model.backends import choose_backends
from meristem.model.operators import has_triton
from meristem.plan import LayerPlan

CORE = ("torch", "numpy", "safetensors", "tokenizers", "scipy", "typer", "rich")
HEAD_DIMS = (32, 64, 128, 256, 512)
# A line of a package's metadata, such as: transformers>=5.14; extra == "hf"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)[^;]*;.*extra == ['\"](?P<extra>[\w-]+)['\"]")
GIB = 2**30


@dataclass(frozen=True)
class Checkup:
    """What this machine has for Meristem; `extras` are packages that are missing, by extra."""

    versions: dict[str, str | None]
    system: str
    device: str
    memory_gib: float
    precision: str
    attention: dict[int, str]  # by head dim
    operators: str
    extras: dict[str, list[str]] | None  # None where the package is used without being installed

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        dims: dict[str, list[str]] = {}
        for dim, kernel in self.attention.items():
            dims.setdefault(kernel, []).append(str(dim))
        kernels = "; ".join(f"{kernel} (head dim {', '.join(some)})" for kernel, some in dims.items())
        lines = [
            "  ".join(f"{name} {found or 'is missing'}" for name, found in self.versions.items()),
            self.system,
            f"device: {self.device}, {self.memory_gib:.1f} GiB of memory; trains in {self.precision}",
            f"attention: {kernels}",
            f"other operators: {self.operators}",
        ]
        if self.extras is None:
            return "\n".join([*lines, "extras: not known, as meristem is used without being installed"])
        width = max(map(len, self.extras), default=0)
        for extra, missing in self.extras.items():
            said = f"lacks {', '.join(missing)}: pip install 'meristem[{extra}]'" if missing else "is there"
            lines.append(f"extra {extra:<{width}}  {said}")
        return "\n".join(lines)


def check_up(device: str = "auto") -> Checkup:
    """Look at this machine, and at the device that training would take here."""
    place = choose_device(device)
    dtype = compute_dtype(place)
    versions: dict[str, str | None] = {"meristem": __version__, "python": platform.python_version()}
    return Checkup(
        versions=versions | {name: _version(name) for name in CORE} | {"torch": torch.__version__},  # with its build
        system=f"{platform.platform()}, {os.cpu_count()} cores, OMP_WAIT_POLICY {os.environ.get('OMP_WAIT_POLICY')}",
        device=describe_device(place),
        memory_gib=memory_of(place) / GIB,
        precision=str(dtype).removeprefix("torch."),
        attention={dim: _attention(dim, place, dtype) for dim in HEAD_DIMS},
        operators=_operators(place),
        extras=_extras(),
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _attention(head_dim: int, device: torch.device, dtype: torch.dtype) -> str:
    try:
        return choose_backends([LayerPlan(2, head_dim, 2)], device, dtype)[0]
    except InputError:
        return "none"


def _operators(device: torch.device) -> str:
    if device.type != "cuda":
        return "PyTorch's own"
    return "Triton kernels" if has_triton() else "PyTorch's own, slower, as triton is missing"


def _extras() -> dict[str, list[str]] | None:
    """The packages of every extra that are not installed."""
    try:
        wanted = requires("meristem") or []
    except PackageNotFoundError:
        return None
    extras: dict[str, list[str]] = {}
    for found in filter(None, map(REQUIREMENT.match, wanted)):
        missing = extras.setdefault(found["extra"], [])
        if _version(found["name"]) is None:
            missing.append(found["name"])
    return extras
