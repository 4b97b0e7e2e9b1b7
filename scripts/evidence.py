"""Paired comparisons at one size: the arms of a study, each with the same seeds, and a table with intervals.

    python scripts/evidence.py run prism --data DATA --validation VAL --out RESULTS.jsonl --seeds 0,1,2
    python scripts/evidence.py run sgt --data DATA --validation VAL --out RESULTS.jsonl --seeds 0,1,2 --steps 1500
    python scripts/evidence.py run clade --data DATA --out RESULTS.jsonl --seeds 0,1,2,3,4
    python scripts/evidence.py table RESULTS.jsonl MORE.jsonl

`run` trains every arm with every seed (the same initial weights and data order in all arms) and adds a line per run, so
that it can be split over several calls and machines; runs that are there already are passed over. `table` puts the
results together, a table for each study; of a run that is in several files the last one counts.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from meristem.comparison import paired_difference
from meristem.config import Config, build_config, flatten, load_config
from meristem.data import TokenData
from meristem.gauges import mean_distances
from meristem.growth.events import GrowthEvent
from meristem.growth.policies import POLICIES
from meristem.model import Decoder
from meristem.runs.entries import growth_events, predicted_heads
from meristem.runs.run_folder import LoadedRun, load_run
from meristem.training.held_out import held_out_loss, held_out_windows
from meristem.training.loop import train

KEPT = ("step", "action", "layer", "head", "heads", "passes", "shortlist", "layer_entropy")  # of a growth event
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


@dataclass(frozen=True)
class Study:
    """Arms by name, with what they change; each is compared with the baseline, and some with each other."""

    config: str
    baseline: str
    arms: dict[str, dict[str, Any]]
    pairs: tuple[tuple[str, str], ...]


def static(arm: str, policy: str = "static_loops") -> dict[str, Any]:
    """What another arm has grown, from the start."""
    return {"growth.policies": [policy], f"growth.{policy}.like": arm}


def fixed(heads: int) -> dict[str, Any]:
    """So many heads in every layer from first to last."""
    return {"growth.policies": [], "model.heads": heads}


def random_births(births: int | str) -> dict[str, Any]:
    """So many heads, or as many as another arm found, at random times."""
    return {"growth.policies": ["random_births"], "growth.random_births.births": births}


# At the intervals that were published; it would go on to the width and beyond.
PUBLISHED: dict[str, Any] = {
    "growth.policies": ["published"], "growth.published.feed_every": 5, "growth.published.decide_every": 5,
    "growth.published.max_heads": 32,
}  # fmt: skip
# Heads found by the demand of the task, beside other criteria and fixed numbers.
HEADS: dict[str, dict[str, Any]] = {
    "demand": {},
    "author": PUBLISHED,
    "repaired": {**PUBLISHED, "growth.published.numerics": "repaired", "growth.published.decide_every": 50},
    "7 random births": random_births(7),
    **{f"K={heads}": fixed(heads) for heads in (1, 2, 4, 8, 12)},
}
HEAD_PAIRS = (
    ("demand", "K=4"), ("demand", "K=12"), ("demand", "7 random births"), ("demand", "author"),
    ("7 random births", "K=8"),
)  # fmt: skip
# An arm that is "like" another takes the layers and heads that the other grew with the same seed, from the first step;
# one with the "births" of another has as many, and one with its "plan" begins with the heads that the other ended with.
STUDIES = {
    "prism": Study(
        "prism-51m.toml",
        "uniform",
        {
            "uniform": {"model.schedule": "uniform"},
            "prism": {"model.schedule": "prism"},
            "reverse": {"model.schedule": "reverse"},
            "half the heads": {"model.schedule": "uniform", "model.heads": 4},
        },
        (("reverse", "prism"), ("prism", "half the heads")),
    ),
    "sgt": Study(
        "sgt-51m.toml",
        "vanilla",
        {
            "vanilla": {"growth.policies": []},
            "sgt K=1": {"growth.sgt.passes": 1},
            "sgt K=3": {"growth.sgt.passes": 3},
            "block loop": static("sgt K=1", "block_loop"),
            "random heads": {"growth.sgt.heads": "random"},
            "low-entropy heads": {"growth.sgt.heads": "low"},
            "shallow first": {"growth.sgt.order": "shallow_first"},
            "static": static("sgt K=1"),
        },
        (
            ("sgt K=1", "random heads"), ("sgt K=1", "low-entropy heads"), ("sgt K=1", "shallow first"),
            ("sgt K=1", "static"), ("sgt K=1", "block loop"), ("sgt K=3", "sgt K=1"),
        ),
    ),
    "sst2": Study("incrt-sst2.toml", "K=1", HEADS, HEAD_PAIRS),
    "clade": Study("incrt-clade.toml", "K=1", HEADS, HEAD_PAIRS),
    "label": Study("incrt-clade.toml", "K=1", HEADS, HEAD_PAIRS),  # the same sequences, their ten variants
    "sst2-deep": Study("incrt-sst2-deep.toml", "K=1", HEADS, HEAD_PAIRS),
    "clade-deep": Study("incrt-clade-deep.toml", "K=1", HEADS, HEAD_PAIRS),
    "heads": Study(
        "incrt-text.toml",
        "K=8",
        {
            "demand": {}, **{f"K={heads}": fixed(heads) for heads in (8, 1, 2, 3, 4, 5)},
            "same heads": {"growth.policies": [], "model.plan": "demand"},
            "random births": random_births("demand"),
            "half the rate": {"optimizer.lr": 1e-3}, "twice the rate": {"optimizer.lr": 4e-3},
            "half the batch": {"train.batch_size": 16}, "twice the batch": {"train.batch_size": 64},
        },
        tuple(("demand", other) for other in ("K=1", "K=2", "K=3", "K=4", "K=5", "same heads", "random births")),
    ),
}  # fmt: skip


def settings(study: str, arm: str, seed: int, there: list[dict[str, Any]], options: argparse.Namespace) -> Config:
    """The configuration of one run."""
    base = flatten(load_config(CONFIGS / STUDIES[study].config))
    changes = {
        "data.path": str(options.data), "data.seed": seed, "train.seed": seed,
        "eval.every": 0, "log.every": 20, "checkpoint.every": 0,
        **({"train.steps": options.steps} if options.steps else {}),
        **json.loads(options.override), **STUDIES[study].arms[arm],
    }  # fmt: skip
    for key in ("growth.static_loops.like", "growth.block_loop.like", "model.plan"):
        if key in changes:
            changes[key] = str(grown_plan(changes[key], seed, there, options))
    births = changes.get("growth.random_births.births")
    if isinstance(births, str):
        changes["growth.random_births.births"] = births_of(births, seed, there, options)
    if births is not None:  # when, and how many at most, as by demand
        same = ("feed_every", "decide_every", "warm_up", "max_heads")
        changes |= {f"growth.random_births.{name}": base[f"growth.incrt.{name}"] for name in same}
    values = {**base, **changes}
    names = values["growth.policies"]
    values |= {f"growth.{name}.seed": seed for name in names if "seed" in {e.name for e in fields(POLICIES[name])}}
    return build_config({key: v for key, v in values.items() if key.count(".") == 1 or key.split(".")[1] in names})


def run_of(result: dict[str, Any]) -> tuple[str, str, int]:
    """Which run it is of; the oldest files know one study only."""
    return result.get("study", "prism"), result["arm"], result["seed"]


def result_of(arm: str, seed: int, there: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """What another arm found with this seed."""
    for result in there:
        if run_of(result) == (options.study, arm, seed):
            return result
    raise SystemExit(f"{arm}, seed {seed}: not in {options.out} yet; run it first, another arm takes after it")


def grown_plan(arm: str, seed: int, there: list[dict[str, Any]], options: argparse.Namespace) -> Path:
    """A file with the structure that another arm grew with this seed."""
    path: Path = options.out.with_suffix(f".{seed}.plan.json")
    path.write_text(json.dumps(result_of(arm, seed, there, options)["plan"]))
    return path


def births_of(arm: str, seed: int, there: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """How many heads another arm had more at the end than at the start."""
    result = result_of(arm, seed, there, options)
    return sum(result["heads"]) - len(result["heads"]) * result["settings"]["model.heads"]


def run_one(
    study: str, arm: str, seed: int, there: list[dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """Train one arm with one seed and evaluate it on all validation windows."""
    config = settings(study, arm, seed, there, options)
    folder = options.out.with_suffix(".run")
    shutil.rmtree(folder, ignore_errors=True)
    torch._dynamo.reset()  # every run is a model of its own; compiled forms of earlier ones only fill the limit
    begin = time.perf_counter()
    outcome = train(config, folder)
    if outcome.step < config.train.steps:
        raise SystemExit(f"{arm}, seed {seed}: stopped at step {outcome.step} of {config.train.steps}; not a result")
    seconds = time.perf_counter() - begin
    loaded = load_run(folder)
    entries = list(loaded.folder.read(loaded.folder.metrics))
    metrics = [entry for entry in entries if "loss" in entry]
    events = growth_events(loaded.folder.read(loaded.folder.events), config.train.steps)
    growth = [event.to_dict() for event in events if isinstance(event, GrowthEvent)]
    decisions = [event for event in events if "predicted_heads" in event.facts]
    plan = loaded.model.plan
    predicted = predicted_heads(decisions, len(plan.layers))
    result = {
        "study": study, "arm": arm, "seed": seed, "heads": list(plan.heads),
        "plan": plan.to_dict(), "parameters": plan.parameters,
        "training_flops": metrics[-1]["flops"], "tokens": metrics[-1]["tokens"], "steps": config.train.steps,
        "tokens_per_second": metrics[-1]["tokens_per_second"], "seconds": seconds,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "settings": flatten(config),
        "curve": [[entry["step"], entry["loss"]] for entry in metrics[:: max(1, len(metrics) // 60)]],
        "growth": [
            {key: entry.get(key) for key in KEPT} for entry in growth
        ],
        "predicted": predicted if any(predicted) else None,
        "demand": [[event.step, event.facts["demand"]] for event in decisions[:: max(1, len(decisions) // 30)]],
        **measured(loaded, entries, options),
    }  # fmt: skip
    shutil.rmtree(folder)
    return result


def measured(loaded: LoadedRun, entries: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Of a classifier its last measurement, on all held-out rows; of a language model the loss on other text."""
    plan = loaded.model.plan
    if plan.classes is not None:
        last = [entry for entry in entries if "accuracy" in entry][-1]
        return {"loss": last["held_out_loss"], "accuracy": last["accuracy"], "macro_f1": last["macro_f1"]}
    assert isinstance(loaded.model, Decoder)
    windows = held_out_windows(TokenData.open(options.validation).split("train"), plan.context, options.windows)
    loss = held_out_loss(loaded.model, windows, batch=16, device=loaded.device)
    distance = mean_distances(loaded.model, windows[:64, :-1], batch=16, device=loaded.device)
    return {
        "loss": loss, "validation_tokens": windows.numel() - len(windows), "attention_distance": distance.tolist(),
    }  # fmt: skip


def tables(results: list[dict[str, Any]]) -> str:
    """A table for each study, in the order of the studies."""
    latest = {run_of(result): result for result in results}
    studies = [name for name in STUDIES if any(study == name for study, _, _ in latest)]
    texts = [table(name, [latest[run] for run in latest if run[0] == name]) for name in studies]
    if len(studies) > 1:
        texts = [f"## {name}\n\n{text}" for name, text in zip(studies, texts, strict=True)]
    return "\n\n".join(texts)


def table(name: str, results: list[dict[str, Any]]) -> str:
    """Validation loss and counted FLOPs per arm, and paired differences with intervals."""
    study = STUDIES[name]
    runs: dict[str, dict[int, dict[str, Any]]] = {arm: {} for arm in study.arms}
    for result in sorted(results, key=lambda result: result["seed"]):
        runs.setdefault(result["arm"], {})[result["seed"]] = result
    runs = {arm: by_seed for arm, by_seed in runs.items() if by_seed}
    if study.baseline not in runs:
        raise SystemExit(f"{name}: no runs of {study.baseline}, the baseline; name the file that has them too")
    base = runs[study.baseline]
    classifies = "accuracy" in results[0]
    extra_columns = ("accuracy | macro-F1 | heads | parameters | ", "---|---|---|---|") if classifies else ("", "")
    lines = [
        f"| arm | {extra_columns[0]}validation loss, mean | s.d. | per seed | minus {study.baseline}, 95 % interval "
        "| extra FLOPs | k tokens/s at the end | seconds |",
        f"|---|{extra_columns[1]}---|---|---|---|---|---|---|",
    ]
    for arm, by_seed in runs.items():
        values = [by_seed[seed]["loss"] for seed in sorted(by_seed)]
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        per_seed = " ".join(f"{value:.4f}" for value in values)
        difference = "-" if arm == study.baseline else _difference(by_seed, base)
        extra = statistics.fmean(_flops(by_seed[s]) / _flops(base[s]) - 1 for s in by_seed if s in base)
        speed = statistics.fmean(run["tokens_per_second"] or math.nan for run in by_seed.values()) / 1e3
        seconds = statistics.fmean(run["seconds"] for run in by_seed.values())
        own = _classifier_columns(list(by_seed.values())) if classifies else ""
        lines.append(
            f"| {arm} | {own}{statistics.fmean(values):.4f} | {spread:.4f} | {per_seed} | {difference} "
            f"| {extra:.2%} | {speed:,.0f} | {seconds:.1f} |"
        )
    lines.append("")
    for left, right in study.pairs:
        if {left, right} <= runs.keys():
            lines.append(f"- {left} minus {right}: {_difference(runs[left], runs[right])}")
    return "\n".join(lines)


def _classifier_columns(runs: list[dict[str, Any]]) -> str:
    """Accuracy and macro-F1 with a 95 % interval over seeds, heads per layer, and parameters."""
    cells = [_with_interval([100 * run[name] for run in runs]) for name in ("accuracy", "macro_f1")]
    heads = " ".join("-".join(map(str, run["heads"])) for run in runs)
    return f"{cells[0]} | {cells[1]} | {heads} | {statistics.fmean(run['parameters'] for run in runs):,.0f} | "


def _with_interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}"
    result = paired_difference(values, [0.0] * len(values))
    return f"{result.mean:.1f} [{result.low:.1f}, {result.high:.1f}]"


def _flops(run: dict[str, Any]) -> float:
    return run["training_flops"] if "training_flops" in run else run["training_flops_per_token"] * run["tokens"]


def _difference(mine: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> str:
    seeds = sorted(mine.keys() & theirs.keys())
    if len(seeds) < 2:
        return "needs 2 pairs"
    result = paired_difference([mine[s]["loss"] for s in seeds], [theirs[s]["loss"] for s in seeds])
    verdict = "" if result.is_effect else ", includes 0"
    return f"{result.mean:+.4f} [{result.low:+.4f}, {result.high:+.4f}]{verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("study", choices=STUDIES)
    run.add_argument("--data", type=Path, required=True)
    run.add_argument("--validation", type=Path, help="prepared text to measure language models on")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--arms", help="names separated by commas; all if not given")
    run.add_argument("--seeds", default="0,1,2")
    run.add_argument("--steps", type=int, help="updates; one epoch if not given")
    run.add_argument("--windows", type=int, default=10**9, help="validation windows at most")
    run.add_argument("--override", default="{}", help="JSON with further configuration values")
    show = commands.add_parser("table")
    show.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "table":
        print(tables([json.loads(line) for path in options.files for line in path.read_text().splitlines()]))
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    there = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    names = options.arms.split(",") if options.arms else list(STUDIES[options.study].arms)
    for name in names:
        if name not in STUDIES[options.study].arms:
            parser.error(
                f"no arm {name!r} in study {options.study}; there are {', '.join(STUDIES[options.study].arms)}"
            )
    for seed in map(int, options.seeds.split(",")):
        for arm in names:
            if any(run_of(result) == (options.study, arm, seed) for result in there):
                continue
            result = run_one(options.study, arm, seed, there, options)
            there.append(result)
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{arm}, seed {seed}: loss {result['loss']:.4f} in {result['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
