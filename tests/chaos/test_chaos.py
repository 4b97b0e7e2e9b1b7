"""A few attempts of every kind of attack; `make chaos` makes many."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(sys.platform != "linux", reason="the attacks use what only Linux has")
def test_a_few_attacks() -> None:
    """In a process of its own: one that forks must not have threads."""
    command = [sys.executable, "-m", "chaos", "--short"]
    ended = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False, timeout=3000)
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-2000:]
