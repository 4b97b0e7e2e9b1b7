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
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from runs import run_one

Line = dict[str, Any]


class Trainings:
    """The lines of a file, to which those that are missing are added as they are asked for."""

    def __init__(self, base: str, out: Path, limit: float) -> None:
        self.base, self.out, self.end, self.longest = base, out, time.monotonic() + limit, 0.0
        lines = out.read_text().splitlines() if out.exists() else []
        self.known: dict[str, Line] = {line["line"]: line for line in map(json.loads, lines)}

    def loss(self, arm: str, rate: float, steps: int, seed: int) -> float | None:
        """The held-out loss of a training, which is made unless it is there; None if there is no time for it."""
        text = f"{arm} --optimizer.lr {rate:g} --train.steps {steps} --train.seed {seed} --data.seed {seed}"
        if text not in self.known and not self._train(text, rate, steps, seed):
            return None
        loss: float = self.known[text]["held_out"]
        return loss

    def _train(self, text: str, rate: float, steps: int, seed: int) -> bool:
        begin = time.monotonic()
        if begin + self.longest > self.end:
            print("no time is left for", text, flush=True)
            return False
        place = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            line = run_one(self.base, text, place / "run") | {"rate": rate, "length": steps, "seed": seed}
        finally:
            shutil.rmtree(place)
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.known[text] = line
        torch.cuda.empty_cache()
        self.longest = max(self.longest, time.monotonic() - begin)
        print(f"{line['name']:<12} {rate:g} {steps} {seed}: {line['held_out']:.4f} {line['training_seconds']:.1f} s",
              flush=True)  # fmt: skip
        return True


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
    arms = [arm for arm in (text.partition("#")[0].strip() for text in given.arms.read_text().splitlines()) if arm]
    lengths, trainings = numbers(given.lengths), Trainings(given.base, given.out, given.limit)
    chosen = {}
    for arm in arms[part::parts]:
        losses = {rate: mean([trainings.loss(arm, rate, lengths[0], seed) for seed in numbers(given.tune)])
                  for rate in map(float, given.rates.split(","))}  # fmt: skip
        chosen[arm] = best(losses)
    for seed in [*numbers(given.tune), *numbers(given.seeds)]:
        for length in lengths:
            for arm, rate in chosen.items():
                if rate is not None:
                    trainings.loss(arm, rate, length, seed)


if __name__ == "__main__":
    main()
