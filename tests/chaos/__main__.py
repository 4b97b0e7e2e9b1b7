"""Attack the software and print one table: `python -m chaos [attacks] [--full] [--seed N] [--out PATH]`.

Ends with status 1 if anything was silent, lost or a traceback, after a list of these cases.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .attacks import ATTACKS, attacked
from .verdicts import table, write_results
from .world import World


def main() -> int:
    parser = argparse.ArgumentParser("chaos", description="Attack the software; see the docstrings of tests/chaos.")
    parser.add_argument("attacks", nargs="*", choices=[[], *ATTACKS], help="which; all if none is named")
    parser.add_argument("--seed", type=int, default=0)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--short", action="store_true", help="a few attempts of each kind")
    size.add_argument("--full", action="store_true", help="as many as are required before a release")
    size.add_argument("--count", type=int, help="so many attempts of each kind")
    size.add_argument("--only", type=int, metavar="NUMBER", help="one attempt again, as a list of cases names it")
    parser.add_argument("--out", type=Path, help="write the table to this path, with .json and .md at the end")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # odd names are printed too
    rows = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        world = World(Path(folder).resolve())
        for name in options.attacks or ATTACKS:
            attack = ATTACKS[name]
            usual = attack.short if options.short else attack.full if options.full else attack.usual
            rows.append(attacked(name, world, options.seed, options.count or usual, options.only))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if options.out is not None:
                write_results(rows, options.out)
    for row in rows:
        for case in row.cases:
            print(f"\n{case}")
    print(f"\n{table(rows)}")
    return int(not all(row.holds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
