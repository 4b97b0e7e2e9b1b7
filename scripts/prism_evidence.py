"""First evidence on Prism: uniform, Prism, reverse Prism and uniform with half the heads, paired seeds.

    python scripts/prism_evidence.py run --data DATA --validation VAL --out RESULTS.jsonl --seeds 0,1,2
    python scripts/prism_evidence.py table RESULTS.jsonl

`run` trains every arm with every seed (the same initial weights and data order in all arms) and adds a line per run, so
that it can be split over several calls; `table` puts the results together.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from meristem.comparison import paired_difference
from meristem.data import TokenData
from meristem.evaluation import held_out_loss, held_out_windows
from meristem.gauges import mean_distances
from meristem.training.config import build_config
from meristem.training.loop import train
from meristem.training.run import load_run

ARMS: dict[str, dict[str, Any]] = {
    "uniform": {"model.schedule": "uniform"},
    "prism": {"model.schedule": "prism"},
    "reverse": {"model.schedule": "reverse"},
    "half the heads": {"model.schedule": "uniform", "model.heads": 4},
}


def run_one(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm with one seed and evaluate it on all validation windows."""
    tokens = len(TokenData.open(options.data).split("train"))
    batch_size = 32
    steps = options.steps or (tokens - 1) // (batch_size * 1024)  # one epoch
    values = {
        "model.layers": 8, "model.width": 512, "model.heads": 8, "model.feed_forward": 1376, "model.context": 1024,
        "data.path": str(options.data), "data.seed": seed, "train.seed": seed,
        "train.steps": steps, "train.batch_size": batch_size,
        "optimizer.lr": 1e-3, "optimizer.warmup": 0.05, "eval.every": 0, "log.every": 20, "checkpoint.every": 0,
        **json.loads(options.override), **ARMS[arm],
    }  # fmt: skip
    folder = options.out.with_suffix(".run")
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.perf_counter()
    torch._dynamo.reset()  # every run is a model of its own; compiled forms of earlier ones only fill the limit
    outcome = train(build_config(values), folder)
    if outcome.step < steps:
        raise SystemExit(f"{arm}, seed {seed}: stopped at step {outcome.step} of {steps}; not a result")
    seconds = time.perf_counter() - begin
    loaded = load_run(folder)
    windows = held_out_windows(
        TokenData.open(options.validation).split("train"), loaded.model.plan.context, options.windows
    )
    loss = held_out_loss(loaded.model, windows, batch=16, device=loaded.device)
    distance = mean_distances(loaded.model, windows[:64, :-1], batch=16, device=loaded.device)
    metrics = [entry for entry in loaded.folder.read(loaded.folder.metrics) if "loss" in entry]
    plan = loaded.model.plan
    result = {
        "arm": arm, "seed": seed, "loss": loss, "heads": list(plan.heads), "parameters": plan.parameters,
        "training_flops_per_token": plan.cost.training.causal, "tokens": metrics[-1]["tokens"], "steps": steps,
        "tokens_per_second": metrics[-1]["tokens_per_second"], "seconds": seconds,
        "validation_tokens": windows.numel() - len(windows), "attention_distance": distance.tolist(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "settings": values,
        "curve": [[entry["step"], entry["loss"]] for entry in metrics[:: max(1, len(metrics) // 60)]],
    }  # fmt: skip
    shutil.rmtree(folder)
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Validation loss per arm, and paired differences to uniform and between the two directions."""
    by_arm: dict[str, dict[int, float]] = {}
    for result in results:
        by_arm.setdefault(result["arm"], {})[result["seed"]] = result["loss"]
    lines = [
        "| arm | validation loss, mean | s.d. | per seed | minus uniform, 95 % interval |",
        "|---|---|---|---|---|",
    ]
    for arm, losses in by_arm.items():
        values = [losses[seed] for seed in sorted(losses)]
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        per_seed = " ".join(f"{value:.4f}" for value in values)
        difference = "-" if arm == "uniform" else _difference(losses, by_arm["uniform"])
        lines.append(f"| {arm} | {statistics.fmean(values):.4f} | {spread:.4f} | {per_seed} | {difference} |")
    if {"prism", "reverse"} <= by_arm.keys():
        lines.append(f"\nDirection (reverse minus prism): {_difference(by_arm['reverse'], by_arm['prism'])}")
    return "\n".join(lines)


def _difference(losses: dict[int, float], baseline: dict[int, float]) -> str:
    seeds = sorted(losses.keys() & baseline.keys())
    if len(seeds) < 2:
        return "needs 2 pairs"
    result = paired_difference([losses[s] for s in seeds], [baseline[s] for s in seeds])
    verdict = "" if result.is_effect else ", includes 0"
    return f"{result.mean:+.4f} [{result.low:+.4f}, {result.high:+.4f}]{verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--data", type=Path, required=True)
    run.add_argument("--validation", type=Path, required=True)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--arms", default=",".join(ARMS))
    run.add_argument("--seeds", default="0,1,2")
    run.add_argument("--steps", type=int)
    run.add_argument("--windows", type=int, default=10**9, help="validation windows at most")
    run.add_argument("--override", default="{}", help="JSON with further configuration values")
    show = commands.add_parser("table")
    show.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "table":
        print(table([json.loads(line) for path in options.files for line in path.read_text().splitlines()]))
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in map(int, options.seeds.split(",")):
        for arm in options.arms.split(","):
            result = run_one(arm, seed, options)
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{arm}, seed {seed}: loss {result['loss']:.4f} in {result['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
