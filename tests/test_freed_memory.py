"""Memory that an update frees is kept for the next one, where the C library can be asked to."""

from __future__ import annotations

import platform

import torch

from meristem.devices import keep_freed_memory


def test_the_c_library_takes_what_it_is_asked() -> None:
    """It refuses sizes that it cannot have, such as a threshold above 32 MiB, by its answer."""
    assert keep_freed_memory(torch.device("cpu")) == (platform.libc_ver()[0] == "glibc")
    assert not keep_freed_memory(torch.device("cuda"))
