"""Memory that an update frees is there for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from meristem.devices import keep_freed_memory
keep_freed_memory(torch.device("cpu"))

def update():
    blocks = [torch.ones(2**21) for _ in range(4)]  # 8 MiB each

for _ in range(50):  # until the heap has found its size
    update()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    update()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
def test_freed_memory_is_not_handed_out_page_by_page() -> None:
    """Without being asked to keep it, the C library has 20,000 of these 80,000 pages mapped anew."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4000
