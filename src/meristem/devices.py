"""What the hardware is, and how to compute on it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from meristem.errors import InputError
from meristem.limits import LARGEST_COUNT
from meristem.wording import counted

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")

# Dense bf16 FLOP/s from the vendors' data sheets, by a part of the device's name; the longest match counts.
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "GH200": 989e12, "B200": 2250e12,
    "A100": 312e12, "A800": 312e12, "A10G": 70e12, "A10": 125e12, "A40": 150e12, "L40S": 362e12, "L40": 181e12,
    "L4": 121e12, "RTX 5090": 210e12, "RTX 4090": 165e12, "RTX 4080": 97e12, "RTX 3090": 71e12,
}  # fmt: skip

# Bytes/s of the device's memory, from the same sheets and by the same rule.
MEMORY_BANDWIDTH = {
    "H200": 4.8e12, "H100 PCIe": 2.0e12, "H100": 3.35e12, "H800": 3.35e12, "GH200": 4.0e12, "B200": 8.0e12,
    "A100-SXM4-80GB": 2.039e12, "A100 80GB": 1.935e12, "A100": 1.555e12, "A800": 2.039e12, "A10G": 600e9, "A10": 600e9,
    "A40": 696e9, "L40S": 864e9, "L40": 864e9, "L4": 300e9, "RTX 5090": 1792e9, "RTX 4090": 1008e9, "RTX 4080": 717e9,
    "RTX 3090": 936e9,
}  # fmt: skip


def choose_device(name: str) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:1"."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise InputError("device", name, "must be auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError("device", name, f"is not there; torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def keep_freed_memory(device: torch.device) -> bool:
    """On a CPU, keep what an update frees for the next one; whether that could be arranged.

    The C library gives large blocks back to the system, which hands them out anew page by page: 8 % of a small model's
    step. It is asked not to where it can be (glibc), for the whole process.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wanted = ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20))
    return all(mallopt(parameter, size) == 1 for parameter, size in wanted)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a process can have on a device at most."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else []
    with suppress(OSError, ValueError):  # a container's share; "max" if there is no limit
        limits.append(int(CONTAINER_LIMIT.read_text()))
    if resource is not None:
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        limits += [] if soft == resource.RLIM_INFINITY else [soft]
    return min(limits, default=LARGEST_COUNT)


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that this process has held at a time: of tensors on a GPU, else of all; None if not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return None if resource is None else unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def compute_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Mixed precision where it pays: bf16 products on a GPU, nothing on a CPU."""
    return torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')}"


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a known GPU, None for others."""
    return _known(PEAK_FLOPS, device)


def memory_bandwidth(device: torch.device) -> float | None:
    """Bytes/s that a known GPU reads from its memory, None for others."""
    return _known(MEMORY_BANDWIDTH, device)


def _known(table: dict[str, float], device: torch.device) -> float | None:
    name = describe_device(device)
    known = [key for key in table if device.type == "cuda" and key in name]
    return table[max(known, key=len)] if known else None
