"""How many heads are found on tasks whose right number is known, by every criterion, and how stable that is.

    python scripts/head_counts.py run --out runs.jsonl --criteria demand --seeds 0,1,2,3,4,5,6,7,8,9
    python scripts/head_counts.py run --out runs.jsonl --criteria author,repaired --seeds 0,1,2,3,4
    python scripts/head_counts.py run --out runs.jsonl --tasks teacher-4 --batch 32,128 --rate 0.005,0.02
    python scripts/head_counts.py run --out runs.jsonl --criteria demand-10,demand-20,demand-40
    python scripts/head_counts.py table runs.jsonl

`run` adds a line per run and passes over those that are there; `table` puts them together. One run takes about half a
minute on an idle core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meristem.growth import Incrt, Policy, Prune, Published
from meristem.growth.events import GrowthEvent
from meristem.runs.entries import predicted_heads
from meristem.synthetic import KnownTask, grow
from meristem.synthetic.experiment import BATCH, RATE

TASKS = {
    **{f"teacher-{heads}": KnownTask("teacher", heads) for heads in (1, 2, 4, 6, 8)},
    "bag": KnownTask("bag", 1),
    "noise": KnownTask("noise", 1),
}
POLICIES: dict[str, Incrt | Published] = {
    "demand": Incrt(),  # a feed in 5 updates
    **{f"demand-{every}": Incrt(feed_every=every, decide_every=10 * every) for every in (10, 20, 25, 40)},
    "author": Published("author"),
    "repaired": Published("repaired"),
}
STEPS = 4000
KEY = ("task", "criterion", "seed", "batch", "rate", "steps")


def run_one(name: str, criterion: str, seed: int, batch: int, rate: float) -> dict[str, Any]:
    task, policy = replace(TASKS[name], seed=seed), replace(POLICIES[criterion], seed=seed)
    begin = time.perf_counter()
    pruning: list[Policy] = [Prune(policy.decide_every)] if isinstance(policy, Incrt) else []
    outcome = grow(task, [policy, *pruning], steps=STEPS, seed=seed, batch=batch, rate=rate)
    changes = [event for event in outcome.events if isinstance(event, GrowthEvent)]
    (expected,) = predicted_heads(outcome.events, layers=1)
    return {
        "task": name, "criterion": criterion, "seed": seed, "batch": batch, "rate": rate, "steps": STEPS,
        "heads": outcome.heads, "answer": task.answer, "loss": outcome.loss,
        "predicted": expected,
        "changes": [[event.step, event.action] for event in changes],
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def table(runs: list[dict[str, Any]]) -> str:
    """Final head counts by task and criterion, and by batch size and learning rate."""
    lines = [
        "| task | criterion | batch | rate | runs | heads found (times) | K in {r, r+1} | largest loss | removals |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    order = {name: index for index, name in enumerate(TASKS)}
    groups = sorted({(r["criterion"], order[r["task"]], r["batch"], r["rate"], r["task"]) for r in runs})
    for criterion, _, batch, rate, task in groups:
        mine = [r for r in runs if (r["criterion"], r["task"], r["batch"], r["rate"]) == (criterion, task, batch, rate)]
        counts = Counter(r["heads"] for r in mine)
        found = ", ".join(f"{heads} ({times})" for heads, times in sorted(counts.items()))
        allowed = (0, 1) if task.startswith("teacher") else (0,)
        right = sum(r["heads"] - r["answer"] in allowed for r in mine)
        removals = sum(action == "removal" for r in mine for _, action in r["changes"])
        loss = max(r["loss"] for r in mine)
        lines.append(
            f"| {task} | {criterion} | {batch} | {rate} | {len(mine)} | {found} | {right} of {len(mine)} "
            f"| {loss:.4f} | {removals} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--tasks", default=",".join(TASKS))
    run.add_argument("--criteria", default="demand")
    run.add_argument("--seeds", default="0,1,2,3,4")
    run.add_argument("--batch", default=str(BATCH))
    run.add_argument("--rate", default=str(RATE))
    show = commands.add_parser("table")
    show.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "table":
        print(table([json.loads(line) for path in options.files for line in path.read_text().splitlines()]))
        return
    torch.set_num_threads(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    there = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {tuple(result[key] for key in KEY) for result in there}
    for seed, criterion, task, batch, rate in itertools.product(
        map(int, options.seeds.split(",")), _named(parser, options.criteria, POLICIES),
        _named(parser, options.tasks, TASKS), map(int, options.batch.split(",")), map(float, options.rate.split(",")),
    ):  # fmt: skip
        if (task, criterion, seed, batch, rate, STEPS) in known:
            continue
        result = run_one(task, criterion, seed, batch, rate)
        with options.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(
            f"{task}, {criterion}, seed {seed}, batch {batch}, rate {rate}: {result['heads']} heads, "
            f"loss {result['loss']:.4f}, {result['seconds']:.0f} s",
            flush=True,
        )


def _named(parser: argparse.ArgumentParser, text: str, known: Iterable[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"no {name!r}; there are {', '.join(known)}")
    return names


if __name__ == "__main__":
    main()
