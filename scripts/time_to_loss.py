"""How long an arm takes to another's final loss, from runs of several lengths that are each decayed to the end.

    python scripts/time_to_loss.py lines.jsonl --baseline full

reads what `scripts/runs.py` wrote. Names are ARM-LENGTH-SEED, where a length is that of the baseline's run beside it;
seeds are paired. For every length the table says how far each arm is from the baseline, and the share of the
baseline's seconds after which the arm has the baseline's loss. That share is read off the arm's own runs of a seed,
where it has all lengths: its loss is taken to be straight in the logarithm of its seconds between two lengths, and
beyond the last.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from meristem.comparison.paired import paired_difference

Run = tuple[float, float]  # seconds, held-out loss


def seconds_to(loss: float, runs: Sequence[Run]) -> float:
    """When an arm has a loss, by the two runs nearest to it."""
    pairs = list(pairwise(runs))
    (early, high), (late, low) = next((pair for pair in pairs if pair[1][1] <= loss), pairs[-1])
    return early * math.exp((high - loss) / (high - low) * math.log(late / early))


def interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else "-"
    found = paired_difference(values, [0.0] * len(values))
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, nargs="+")
    parser.add_argument("--baseline", required=True)
    given = parser.parse_args()
    runs: dict[str, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for line in (line for path in given.lines for line in path.read_text().splitlines()):
        entry = json.loads(line)
        if entry["name"].count("-") == 2:
            arm, length, seed = entry["name"].split("-")
            seconds = entry["training_seconds"] + entry["compilation_seconds"]
            runs[arm][seed][int(length)] = seconds, entry["held_out"]
    base = runs.pop(given.baseline)
    print("| arm | length | share of its seconds | loss minus the baseline's | its share of seconds to that loss |")
    print("|---|---|---|---|---|")
    lengths = sorted({length for seed in base.values() for length in seed})
    for arm, seeds in runs.items():
        for length in lengths:
            shares, differences, times = [], [], []
            for seed in sorted(seed for seed in {*seeds} & {*base} if length in seeds[seed] and length in base[seed]):
                own = [seeds[seed][one] for one in sorted(seeds[seed])]
                seconds, loss = base[seed][length]
                times.append(seeds[seed][length][0] / seconds)
                differences.append(seeds[seed][length][1] - loss)
                if len(own) == len(lengths) > 1:
                    shares.append(seconds_to(loss, own) / seconds)
            if times:
                print(f"| {arm} | {length} | {interval(times)} | {interval(differences)} | {interval(shares)} |")


if __name__ == "__main__":
    main()
