"""Memory that an update frees is there for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from meristem.devices import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory(torch.device("cpu"))

def update():
    blocks = [torch.ones(2**21) for _ in range(4)]  # 8 MiB each

update()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    update()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
def test_freed_memory_is_not_handed_out_page_by_page() -> None:
    def faults(kept: str) -> int:
        done = subprocess.run([sys.executable, "-c", SCRIPT, kept], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("kept") < max(100, faults("given back") / 5)  # with huge pages there are few in any case
