"""The rates that the lines of a study have chosen for its arms; the status is 0 if all chose the one that is named.

python3 chosen.py lines.jsonl 0.004
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
for entry in map(json.loads, Path(sys.argv[1]).read_text().splitlines()):
    result = entry["result"]
    if 100 <= result["seed"] < 10**9:  # tuning seeds
        found[result["arm"]][result["rate"]].append(result["scores"].get("held_out_loss", float("inf")))
best = {}
for arm, rates in found.items():
    means = {rate: statistics.fmean(losses) for rate, losses in sorted(rates.items())}
    best[arm] = min(means, key=means.__getitem__)
    print(arm, *(f"{rate:g}: {mean:.4f} ({len(rates[rate])})" for rate, mean in means.items()), f"-> {best[arm]:g}")
sys.exit(len(sys.argv) > 2 and {*best.values()} != {float(sys.argv[2])})
