"""How many seeds: by the spread of paired differences, alone or as it is in raw lines.

    python power.py                                     # the table of prereg.md
    python power.py ../2026-11-15-prism-51m/runs.jsonl  # spreads of an earlier study
    python power.py lines.jsonl --arms prism,uniform-4  # of `compare`, without showing any difference

The last one tells the spread only: the number of seeds may be settled by it without having looked at the result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy import stats

from meristem.comparison.verdicts import detectable_difference, seeds_needed

MARGIN = 0.010


def chance_of_equality(difference: float, deviation: float, pairs: int, draws: int = 40_000) -> float:
    """How often two one-sided tests at 5 % put a true difference within the margin."""
    random = np.random.default_rng(0)
    error = deviation * np.sqrt(random.chisquare(pairs - 1, draws) / (pairs - 1) / pairs)
    mean = difference + deviation / math.sqrt(pairs) * random.standard_normal(draws)
    return float(np.mean(np.abs(mean) + stats.t.ppf(0.95, pairs - 1) * error < MARGIN))


def pairs_for_equality(difference: float, deviation: float) -> int | None:
    return next((n for n in range(2, 200) if chance_of_equality(difference, deviation, n) >= 0.8), None)


def table() -> None:
    print(
        "| spread of a pair | seeds for 0.010 | for 0.005 | to show equality, true 0 | true 0.003 | 8 seeds show | 16 |"
    )
    print("|---|---|---|---|---|---|---|")
    for deviation in (0.003, 0.004, 0.005, 0.0065, 0.008, 0.010, 0.012, 0.016):
        shown = [f"{detectable_difference(deviation, pairs):.4f}" for pairs in (8, 16)]
        needed = [seeds_needed(difference, deviation) for difference in (0.010, 0.005)]
        equal = [pairs_for_equality(difference, deviation) for difference in (0.0, 0.003)]
        print("|", " | ".join(map(str, [deviation, *needed, *equal, *shown])), "|")


def spreads(path: Path, arms: list[str]) -> None:
    """The spread of each pair of arms, and of all together (what is left after means of arms and seeds)."""
    found: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    for entry in map(json.loads, path.read_text().splitlines()):
        if "run" in entry:  # of `compare`: runs/ARM/rate-R/seed-N
            _, arm, *rate, seed = Path(entry["run"]).parts
            if "held_out_loss" in entry["result"]["scores"]:
                key = (f"{entry['result']['steps']}", int(seed.removeprefix("seed-")))
                found[arm][(key[0] + "/".join(rate) if key[1] >= 100 else key[0], key[1])] = entry["result"]["scores"][
                    "held_out_loss"
                ]
        else:
            found[entry["arm"]][(str(entry["steps"]), entry["seed"])] = entry["loss"]
    for one, other in itertools.combinations(arms or found, 2):
        common = sorted(found[one].keys() & found[other].keys())
        for length in sorted({length.partition("rate")[0] for length, _ in common}, key=int):
            keys = [key for key in common if key[0].partition("rate")[0] == length]
            if len(keys) > 1:
                deviation = statistics.stdev(found[one][key] - found[other][key] for key in keys)
                needed = f"spread {deviation:.4f}, {seeds_needed(MARGIN, deviation)} seeds for {MARGIN}"
                print(f"{one}, {other}, {length} updates: {len(keys)} pairs, {needed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, nargs="?")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=[])
    given = parser.parse_args()
    if given.lines is None:
        table()
    else:
        spreads(given.lines, given.arms)


if __name__ == "__main__":
    main()
