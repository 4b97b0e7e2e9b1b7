"""The contrasts of this study, from its raw lines: `python judge.py final-small.jsonl`.

What is asked stands in `prereg.md`. Names are ARM-SIZE-RATE-SEED, with `-part-SHARE` where a run had only a part of the
second budget; arms are told by what stands before the first dash, seeds are paired.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path

from meristem.comparison.paired import PairedDifference, paired_difference
from meristem.comparison.verdicts import Verdict, detectable_difference, verdicts

MARGIN = 0.010
PRIMARY = ("deeper", "fresh")
OTHERS = (("deeper", "same"), ("deeper", "once"))
NAME = re.compile(r"(?P<arm>[a-z]+).*?(-part-(?P<part>[\d.]+))?-(?P<seed>\d+)")


def losses(path: Path) -> dict[str, dict[int, float]]:
    """Held-out losses by arm (and part of the budget), then by seed."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for entry in map(json.loads, path.read_text().splitlines()):
        name = NAME.fullmatch(entry["name"])
        assert name is not None, entry["name"]
        arm = name["arm"] + (f" {name['part']}" if name["part"] else "")
        assert int(name["seed"]) not in found[arm], f"{entry['name']}: a second run of this arm and seed"
        found[arm][int(name["seed"])] = entry["held_out"]
    return found


def row(contrast: tuple[str, str], found: PairedDifference, verdict: Verdict) -> str:
    shown = f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
    numbers = f"{verdict.p:.4f} | {verdict.p_equal:.4f} | {detectable_difference(found.deviation, found.pairs):.4f}"
    return f"| {' - '.join(contrast)} | {found.pairs} | {shown} | {numbers} | {verdict.word} |"


def share(seeds: dict[str, dict[int, float]]) -> list[float]:
    """Of each seed, the part of the second budget after which the deeper model has the loss of the fresh one."""
    part = next((arm for arm in seeds if arm.startswith("deeper ")), None)
    if part is None:
        return []
    log = math.log(float(part.split()[1]))
    return [
        math.exp(log * (seeds["fresh"][seed] - whole) / (seeds[part][seed] - whole))
        for seed, whole in sorted(seeds["deeper"].items())
        if seed in seeds["fresh"] and seed in seeds[part]
    ]


def main() -> None:
    seeds = losses(Path(sys.argv[1]))

    def difference(arm: str, baseline: str) -> PairedDifference:
        common = sorted(seeds[arm].keys() & seeds[baseline].keys())
        return paired_difference([seeds[arm][seed] for seed in common], [seeds[baseline][seed] for seed in common])

    for arm, values in sorted(seeds.items()):
        told = " ".join(map(str, sorted(values)))
        print(f"{arm}: {sum(values.values()) / len(values):.4f} ({len(values)} seeds: {told})")
    print("\n| contrast | seeds | difference | p (Holm but the first) | p of equality | could be shown | |")
    print("|---|---|---|---|---|---|---|")
    first, others = [difference(*PRIMARY)], [difference(*contrast) for contrast in OTHERS]
    judged = [*verdicts(first, MARGIN), *verdicts(others, MARGIN)]
    for contrast, found, verdict in zip((PRIMARY, *OTHERS), (*first, *others), judged, strict=True):
        print(row(contrast, found, verdict))
    if len(parts := share(seeds)) < 2:
        print("\nno runs with a part of the budget, so what is saved is not known")
        return
    found = paired_difference(parts, [0.0] * len(parts))
    print(f"\nthe loss of fresh after {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}] of its FLOPs")


if __name__ == "__main__":
    main()
