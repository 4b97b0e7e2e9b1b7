"""Arms at several learning rates with tuning seeds, then each at its best rate: lines for a ranking.

    python scripts/best_rates.py base.toml arms.txt --rates 1e-3,2e-3,4e-3 --lengths 300,600 --out lines.jsonl
    python scripts/best_rates.py table lines.jsonl

A line of `arms.txt` is a name and what it changes, as in `scripts/runs.py`, whose results these lines are. Every arm is
trained at every rate for the first length, with the tuning seeds; its best rate is then taken for the other lengths,
and for all lengths with the seeds that are reported. Lines that are there are passed over. `--part 1/4` makes every
fourth arm from the second on, so that several processes can share a list that each writes to its own file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runs import Lines, listed

Line = dict[str, Any]


def held_out_loss(lines: Lines, arm: str, rate: float, steps: int, seed: int) -> float | None:
    """The held-out loss of a training, which is made unless it is there; None if there is no time for it."""
    text = f"{arm} --optimizer.lr {rate:g} --train.steps {steps} --train.seed {seed} --data.seed {seed}"
    line = lines.known.get(text) or lines.train(text, rate=rate, length=steps, seed=seed)
    return None if line is None else line["held_out"]


def mean(losses: Sequence[float | None]) -> float | None:
    """The mean, if all are known."""
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None


def best(losses: dict[float, float | None]) -> float | None:
    """The rate with the lowest loss, once all are known."""
    known = {rate: loss for rate, loss in losses.items() if loss is not None}
    return min(known, key=lambda rate: known[rate]) if len(known) == len(losses) else None


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Losses by arm, rate and length, the mean of the seeds, with the time of an update and the FLOPs."""
    yield "| arm | rate | updates | seeds | loss | ms an update | PFLOPs |"
    yield "|---|---|---|---|---|---|---|"
    groups = sorted({(line["name"], line["length"], line["rate"]) for line in lines})
    for name, length, rate in groups:
        mine = [x for x in lines if (x["name"], x["length"], x["rate"]) == (name, length, rate)]
        milliseconds, flops = (sum(values) / len(mine) for values in zip(*map(_cost, mine), strict=True))
        loss = sum(line["held_out"] for line in mine) / len(mine)
        seeds = " ".join(str(line["seed"]) for line in mine)
        yield f"| {name} | {rate:g} | {length} | {seeds} | {loss:.4f} | {milliseconds:.2f} | {flops:.3f} |"


def _cost(line: Line) -> tuple[float, float]:
    return 1e3 * line["training_seconds"] / line["steps"], line["flops"] / 1e15


def numbers(text: str) -> list[int]:
    """0-3 or 0,2."""
    ends = (part.partition("-") for part in text.split(",") if part)
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]


def main() -> None:
    if sys.argv[1:2] == ["table"]:
        print("\n".join(table([json.loads(x) for path in sys.argv[2:] for x in Path(path).read_text().splitlines()])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("arms", type=Path)
    parser.add_argument("--rates", required=True)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--tune", default="100")
    parser.add_argument("--seeds", default="")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    lengths, lines = numbers(given.lengths), Lines(given.base, given.out, given.limit)
    chosen = {}
    for arm in listed(given.arms)[part::parts]:
        losses = {
            rate: mean([held_out_loss(lines, arm, rate, lengths[0], seed) for seed in numbers(given.tune)])
            for rate in map(float, given.rates.split(","))
        }
        chosen[arm] = best(losses)
    for seed in [*numbers(given.tune), *numbers(given.seeds)]:
        for length in lengths:
            for arm, rate in chosen.items():
                if rate is not None:
                    held_out_loss(lines, arm, rate, length, seed)


if __name__ == "__main__":
    main()
