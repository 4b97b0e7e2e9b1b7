"""How many heads are found on tasks whose right number is known, by every criterion, and how stable that is.

    python scripts/head_counts.py run --out runs.jsonl --tasks tuning --seeds 1000-1005 --processes 12
    python scripts/head_counts.py run --out runs.jsonl --tasks teacher-4,noise --criteria demand,demand:share=0.05
    python scripts/head_counts.py run --out runs.jsonl --criteria author,repaired,fixed-4 --seeds 0-4
    python scripts/head_counts.py run --out runs.jsonl --tasks teacher-4 --batch 32,128 --rate 0.005,0.02
    python scripts/head_counts.py table runs.jsonl

`run` adds a line per run and passes over those that are there, so that it can be stopped and called again; `--limit`
stops it by itself after so many seconds. `table` puts the lines together. One run takes about half a minute on an idle
core. What the lists are for stands in results/2026-11-17-demand/split.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meristem.growth import Incrt, Policy, Prune, Published
from meristem.growth.events import GrowthEvent
from meristem.runs.entries import predicted_heads
from meristem.synthetic import KnownTask, grow
from meristem.synthetic.experiment import BATCH, RATE

PLAIN = {
    **{f"teacher-{heads}": KnownTask("teacher", heads) for heads in (1, 2, 4, 6, 8)},
    "bag": KnownTask("bag", 1),
    "noise": KnownTask("noise", 1),
}
TUNING = {
    **PLAIN,
    "noise, mean 1": KnownTask("noise", 1, mean=1.0),
    "noise, 512 rows": KnownTask("noise", 1, rows=512),
    "teacher-4, mean 1": KnownTask("teacher", 4, mean=1.0),
    "teacher-4, strengths 1 .3 .1 .03": KnownTask("teacher", 4, strengths=(1.0, 0.3, 0.1, 0.03)),
    "teacher-16, width 64": KnownTask("teacher", 16, width=64),
    "teacher-2, rank 4": KnownTask("teacher", 2, rank=4),
}
TEST = {
    **TUNING,
    "noise, mean 3": KnownTask("noise", 1, mean=3.0),
    "noise, 256 rows": KnownTask("noise", 1, rows=256),
    "noise, 1024 rows": KnownTask("noise", 1, rows=1024),
    "noise, width 64": KnownTask("noise", 1, width=64),
    "noise, heavy tails": KnownTask("noise", 1, heavy_tails=True),
    "teacher-4, mean 3": KnownTask("teacher", 4, mean=3.0),
    "teacher-4, strengths 1 .5 .25 .125": KnownTask("teacher", 4, strengths=(1.0, 0.5, 0.25, 0.125)),
    "teacher-12, width 64": KnownTask("teacher", 12, width=64),
    "teacher-3, rank 2": KnownTask("teacher", 3, rank=2),
    "teacher-3, width 48, 24 tokens": KnownTask("teacher", 3, width=48, length=24),
    "teacher-4, heavy tails": KnownTask("teacher", 4, heavy_tails=True),
}
# What the criterion with births in bulk is tested on: what the issue names, and variants that were never run before.
ISSUE = {
    **PLAIN,
    **{name: TEST[name] for name in (
        "noise, mean 1", "noise, 512 rows", "teacher-4, mean 1", "teacher-4, mean 3",
        "teacher-4, strengths 1 .3 .1 .03", "teacher-16, width 64", "teacher-2, rank 4",
    )},
}  # fmt: skip
NEW = {
    "noise, mean 2": KnownTask("noise", 1, mean=2.0),
    "noise, 384 rows": KnownTask("noise", 1, rows=384),
    "noise, width 48, 24 tokens": KnownTask("noise", 1, width=48, length=24),
    "teacher-4, mean 2": KnownTask("teacher", 4, mean=2.0),
    "teacher-6, mean 3": KnownTask("teacher", 6, mean=3.0),
    "teacher-2, rank 3": KnownTask("teacher", 2, rank=3),
    "teacher-10, width 64": KnownTask("teacher", 10, width=64),
    "teacher-5, width 48": KnownTask("teacher", 5, width=48),
    "teacher-4, strengths 1 .7 .4 .2": KnownTask("teacher", 4, strengths=(1.0, 0.7, 0.4, 0.2)),
}
NEWER = {
    "noise, mean 4": KnownTask("noise", 1, mean=4.0),
    "teacher-3, mean 4": KnownTask("teacher", 3, mean=4.0),
    "teacher-8, mean 2": KnownTask("teacher", 8, mean=2.0),
    "teacher-5, mean 3, width 48": KnownTask("teacher", 5, mean=3.0, width=48),
}
NEWEST = {
    "noise, mean 0.5, 640 rows": KnownTask("noise", 1, mean=0.5, rows=640),
    "teacher-6, mean 2": KnownTask("teacher", 6, mean=2.0),
    "teacher-3, rank 3": KnownTask("teacher", 3, rank=3),
    "teacher-7, width 48": KnownTask("teacher", 7, width=48),
}
ALL = {**TEST, **NEW, **NEWER, **NEWEST}
LISTS = {
    "plain": PLAIN, "tuning": TUNING, "test": TEST, "second-test": {**ISSUE, **NEW}, "third-test": {**NEWER, **ISSUE},
    "fourth-test": {**NEWEST, **ISSUE}, "all": ALL,
}  # fmt: skip
POLICIES: dict[str, Incrt | Published] = {
    "demand": Incrt(),  # a feed in 5 updates
    **{f"demand-{every}": Incrt(feed_every=every, decide_every=10 * every) for every in (10, 20, 25, 40)},
    "author": Published("author"),
    "repaired": Published("repaired"),
}
STEPS = 4000
STRONG = 0.1  # heads weaker than this share of the strongest may be found or not
UNDONE = 400  # updates, two cool-downs of 200: a birth that is undone within these is counted apart
KEY = ("task", "criterion", "seed", "batch", "rate", "steps")


def run_one(name: str, criterion: str, seed: int, batch: int, rate: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    task, begin = replace(ALL[name], seed=seed), time.perf_counter()
    policies, heads = policies_of(criterion, seed)
    outcome = grow(task, policies, heads=heads, steps=STEPS, seed=seed, batch=batch, rate=rate)
    changes = [event for event in outcome.events if isinstance(event, GrowthEvent)]
    (expected,) = predicted_heads(outcome.events, layers=1)
    return {
        "task": name, "criterion": criterion, "seed": seed, "batch": batch, "rate": rate, "steps": STEPS,
        "heads": outcome.heads, "answer": task.answer, "least": strong_heads(task), "loss": outcome.loss,
        "predicted": expected,
        "births": sum(event.action == "birth" for event in changes),
        "undone": undone_births(changes),
        "changes": [[event.step, event.action] for event in changes],
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def policies_of(criterion: str, seed: int) -> tuple[list[Policy], int]:
    """The policies of a criterion and the heads at the start.

    A criterion is a name, perhaps with other settings, demand:share=0.05:hits=3, or so many heads that stay, fixed-4.
    """
    name, *settings = criterion.split(":")
    if name.startswith("fixed-"):
        return [], int(name.removeprefix("fixed-"))
    pairs = dict(setting.split("=") for setting in settings)
    policy = replace(POLICIES[name], seed=seed, **{key: json.loads(value) for key, value in pairs.items()})
    return [policy, *([Prune(policy.decide_every)] if isinstance(policy, Incrt) else [])], 1


def strong_heads(task: KnownTask) -> int:
    """The heads of a task that have to be found."""
    strengths = task.strengths if task.kind == "teacher" else ()
    return sum(one >= STRONG * max(strengths) for one in strengths) if strengths else task.answer


def undone_births(changes: Sequence[GrowthEvent]) -> int:
    """Births whose head has left within two cool-downs; a newborn is the last head of its layer."""
    born: list[int | None] = [None]
    undone = 0
    for event in changes:
        if event.action == "birth":
            born.append(event.step)
        elif event.action == "removal":
            since = born.pop(event.facts["head"])
            undone += since is not None and event.step - since <= UNDONE
    return undone


def is_right(run: dict[str, Any]) -> bool:
    """Whether as many heads were found as are needed, or one more; where nothing is asked for, not one more."""
    most = run["answer"] + (1 if run["task"].startswith("teacher") else 0)
    return bool(run.get("least", run["answer"]) <= run["heads"] <= most)


def table(runs: list[dict[str, Any]]) -> str:
    """Final head counts by task and criterion, and by batch size and learning rate."""
    lines = [
        "| task | criterion | batch | rate | runs | heads found (times) | right | predicted (times) | largest loss "
        "| births undone | removals |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = {name: index for index, name in enumerate(ALL)}
    groups = sorted({(r["criterion"], order[r["task"]], r["batch"], r["rate"], r["task"]) for r in runs})
    for criterion, _, batch, rate, task in groups:
        mine = [r for r in runs if (r["criterion"], r["task"], r["batch"], r["rate"]) == (criterion, task, batch, rate)]
        predicted = [r["predicted"]["count"] for r in mine if r["predicted"]]
        removals = sum(action == "removal" for r in mine for _, action in r["changes"])
        lines.append(
            f"| {task} | {criterion} | {batch} | {rate} | {len(mine)} | {_counts([r['heads'] for r in mine])} "
            f"| {sum(map(is_right, mine))} of {len(mine)} | {_counts(predicted)} | {max(r['loss'] for r in mine):.4f} "
            f"| {sum(r.get('undone', 0) for r in mine)} | {removals} |"
        )
    return "\n".join(lines)


def _counts(values: Sequence[int]) -> str:
    return ", ".join(f"{value} ({times})" for value, times in sorted(Counter(values).items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--tasks", default="plain", help=f"{', '.join(LISTS)}, or names with ; between them")
    run.add_argument("--criteria", default="demand")
    run.add_argument("--seeds", default="0-4")
    run.add_argument("--batch", default=str(BATCH))
    run.add_argument("--rate", default=str(RATE))
    run.add_argument("--processes", type=int, default=1)
    run.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no more runs begin")
    show = commands.add_parser("table")
    show.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "table":
        print(table([json.loads(line) for path in options.files for line in path.read_text().splitlines()]))
        return
    tasks = list(LISTS[options.tasks]) if options.tasks in LISTS else options.tasks.split(";")
    for name in tasks:
        if name not in ALL:
            parser.error(f"no task {name!r}; there are {'; '.join(ALL)}")
    wanted = itertools.product(
        _seeds(options.seeds), options.criteria.split(","), tasks,
        map(int, options.batch.split(",")), map(float, options.rate.split(",")),
    )  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    there = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {tuple(result[key] for key in KEY) for result in there}
    jobs = [
        (task, criterion, seed, batch, rate)
        for seed, criterion, task, batch, rate in wanted
        if (task, criterion, seed, batch, rate, STEPS) not in known
    ]
    run_all(jobs, options.out, options.processes, time.monotonic() + options.limit)


def run_all(jobs: list[tuple[str, str, int, float, float]], out: Path, processes: int, end: float) -> None:
    """Run in so many processes, a line each as it ends; after the `end` no more begin, and what runs is waited for."""
    with ProcessPoolExecutor(processes) as pool, out.open("a") as file:
        running: set[Future[dict[str, Any]]] = set()
        left = iter(jobs)
        while True:
            while len(running) < processes and time.monotonic() < end and (job := next(left, None)) is not None:
                running.add(pool.submit(run_one, *job))  # type: ignore[arg-type]
            if not running:
                return
            done = next(as_completed(running))
            running.remove(done)
            result = done.result()
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(
                f"{result['task']}, {result['criterion']}, seed {result['seed']}, batch {result['batch']}, rate "
                f"{result['rate']}: {result['heads']} heads, loss {result['loss']:.4f}, {result['seconds']:.0f} s",
                flush=True,
            )


def _seeds(text: str) -> list[int]:
    """1000-1003 or 1,5,7."""
    ranges = (part.partition("-") for part in text.split(","))
    return [seed for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]


if __name__ == "__main__":
    main()
