"""One run whose rate after a growth is another than the curve says: a second warm-up, or a smaller rate from then on.

    python results/2026-11-19-rate-after-birth/after_birth.py LINE --warm-up 100 --factor 1 --out FILE

LINE is one of the lists of `scripts/runs.py`, and the configuration that of the other runs of this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

import meristem.training.loop as loop
from meristem.training.length import Length

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from runs import run_one  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("line")
    parser.add_argument("--warm-up", type=int, default=0, help="updates after a growth in which the rate rises from 0")
    parser.add_argument("--factor", type=float, default=1.0, help="of the curve's rate after the growth")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    class After(Length):
        born: int | None = None

        def restructured(self, step: int, plan: loop.Plan) -> None:
            super().restructured(step, plan)
            self.born = step

        def rate(self, step: int) -> float:
            rate = super().rate(step)
            if self.born is None:
                return rate
            risen = min(1.0, (step + 1 - self.born) / options.warm_up) if options.warm_up else 1.0
            return rate * options.factor * risen

    loop.Length = After  # type: ignore[misc]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        result = run_one("results/2026-11-17-depth/rule-test.toml", options.line, Path(place) / "run")
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result | {"after": [options.warm_up, options.factor]}) + "\n")


if __name__ == "__main__":
    main()
