"""A few attempts of every kind of attack; `make chaos` makes many."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from .attacks import ATTACKS

TESTS = Path(__file__).resolve().parents[1]
# What a process needs before its first attack takes as long as many attacks: two processes for all.
NAMES = list(ATTACKS)


@pytest.mark.skipif(sys.platform != "linux", reason="the attacks use what only Linux has")
@pytest.mark.parametrize("attacks", [NAMES[:5], NAMES[5:]], ids=" ".join)
def test_a_few_attacks(attacks: Sequence[str]) -> None:
    """In a process of its own: one that forks must not have threads."""
    command = [sys.executable, "-m", "chaos", *attacks, "--short"]
    ended = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False, timeout=3000)
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-2000:]
