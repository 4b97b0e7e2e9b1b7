"""Settings for all tests."""

from __future__ import annotations

import os

# Parallel test processes share the cores; torch would start a thread per core in each, which then wait for one
# another many times longer than they work. Set before torch is imported.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
