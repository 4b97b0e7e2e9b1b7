"""The rate of each primary arm of Prism's study by its whole runs on the tuning seed, written into its file.

    python settle.py prism-51m-whole-first.toml prism-51m-rates.jsonl NEW.jsonl

Names of runs begin with the arm, such as uniform-4-higher; a run that was made twice counts once, by its first line.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

ARMS = {"uniform-4": '"uniform 4"', "prism": "prism"}


def losses(files: list[Path]) -> dict[str, dict[float, float]]:
    """The held-out losses by arm and rate."""
    found: dict[str, dict[float, float]] = {arm: {} for arm in ARMS}
    for entry in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        arm = next(arm for arm in ARMS if entry["name"].startswith(arm))
        rate = float(re.search(r"--optimizer\.lr (\S+)", entry["line"])[1])  # type: ignore[index]
        found[arm].setdefault(rate, entry["held_out"] if entry["held_out"] is not None else math.inf)
    for arm, rates in found.items():
        assert len(rates) >= 4, f"{arm} has {sorted(rates)} only: the rate at its edge is missing"
    return found


def settled(text: str, rates: dict[str, float]) -> str:
    """The text of the file with these rates."""
    for arm, rate in rates.items():
        text, count = re.subn(rf"(\[arms\.{ARMS[arm]}\]\n(?:.+\n)*?optimizer\.lr = )\S+", rf"\g<1>{rate:g}", text)
        assert count == 1, arm
    return text


if __name__ == "__main__":
    study, *lines = map(Path, sys.argv[1:])
    best = {}
    for arm, found in losses(lines).items():
        best[arm] = min(found, key=found.__getitem__)
        edge = " (at an edge)" if best[arm] in (min(found), max(found)) else ""
        print(arm, *(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(found.items())), f"-> {best[arm]:g}{edge}")
    study.write_text(settled(study.read_text(), best))
