"""How long the command line takes to answer at all."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time


def help_seconds(rounds: int) -> list[float]:
    """Seconds of each `meristem --help`, from the start of Python to its end."""
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "meristem", "--help"], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
    return seconds


def start_text(seconds: list[float]) -> str:
    return f"help: median {statistics.median(seconds):.3f} s, from {min(seconds):.3f} to {max(seconds):.3f}"
