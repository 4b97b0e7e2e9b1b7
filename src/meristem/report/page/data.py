"""From run folders to one value for JSON, which is all that a page knows of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from meristem import __version__
from meristem.config import Config
from meristem.errors import InputError
from meristem.growth.descriptions import describe_structure
from meristem.plan import Plan
from meristem.report.curves import finite_points, smoothed
from meristem.report.page.curves import (
    RAW_POINTS,
    SMOOTH_POINTS,
    axes,
    columns,
    large_count,
    loss_curves,
    read_curve,
    with_extremes,
)
from meristem.report.page.evaluation import read_evaluation
from meristem.report.page.events import growth_rows, run_rows
from meristem.report.page.gauges import gauges, head_readings
from meristem.report.page.progress import progress
from meristem.report.page.repeat import repeat_command
from meristem.report.page.settings import setting_differences, settings_table
from meristem.report.page.several import data_warning, run_table
from meristem.report.page.stories import policy_stories
from meristem.report.run_growth import RunGrowth
from meristem.report.run_names import distinct_names
from meristem.report.structure_history import Snapshot, snapshots
from meristem.runs.entries import whole_length
from meristem.runs.run_folder import RunFolder
from meristem.schedules import even_divisors
from meristem.wording import counted, describe_time

FORMAT = "meristem-page/1"
Entry = Mapping[str, Any]


def page_data(runs: Sequence[str | Path]) -> dict[str, Any]:
    """What a page shows of one run or several, as plain values for JSON."""
    if not runs:
        raise InputError("runs", [], "must be one run or more")
    return page_of([run_data(Path(run), points_of(len(runs))) for run in runs])


def points_of(runs: int) -> int:
    """How many points a curve may have on a page of so many runs."""
    return max(300, RAW_POINTS // max(1, runs))


def page_of(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a page shows of runs of which each is told by `run_data`; there may be none yet."""
    names = distinct_names([Path(run["path"]) for run in told])
    titles = {0: "No run yet", 1: told[0]["title"] if told else ""}
    return {
        "format": FORMAT,
        "version": __version__,
        "title": titles.get(len(told), f"{counted(len(told), 'run')} side by side"),
        "runs": [{**run, "name": name} for run, name in zip(told, names, strict=True)],
        "differences": setting_differences([run["settings"] for run in told]) if len(told) > 1 else [],
        "table": run_table(told) if len(told) > 1 else [],
        "warning": data_warning(told),
    }


def run_data(run: Path, points: int = RAW_POINTS) -> dict[str, Any]:
    """What a page shows of one run."""
    folder = RunFolder.open(run)
    growth = RunGrowth(folder)
    config, metrics = growth.config, growth.metrics
    entries = list(folder.read(folder.events))
    history = snapshots(growth.start, growth.numbers, growth.newest)
    rows = growth_rows(growth)
    lifetime = run_rows(entries, config.train.steps)
    last_step = max((entry["step"] for entry in (*metrics, *rows, *lifetime)), default=0)
    uniform = uniform_plan(config, history[-1].plan)
    evaluation = read_evaluation(folder, history)
    steps = whole_length(metrics, config.train.steps, config.train.flops)
    now = progress(metrics, steps)
    costs = [_cost(snapshot.step, snapshot.plan) for snapshot in history]
    return {
        "name": run.name,
        "path": str(run),
        "title": _title(config, history[-1].plan),
        "status": _status(folder, lifetime, last_step, steps),
        "last_step": last_step,
        "steps": steps,
        "classifier": growth.start.classes is not None,
        "heads": describe_structure(history[-1].plan),
        "summary": _summary(history[-1].plan, metrics, now),
        "now": now,
        "axes": axes(metrics),
        "loss": loss_curves(metrics, points),
        "curves": _other_curves(metrics, points),
        "structure": _structure(history, growth, rows),
        "readings": head_readings(growth, history),
        "gauges": gauges(growth),
        "events": rows,
        "lifetime": lifetime,
        "stories": policy_stories(growth, rows, last_step),
        "costs": {name: [cost[name] for cost in costs] for name in costs[0]},
        "uniform": None if uniform is None else {**_cost(0, uniform), "text": _uniform_text(uniform)},
        "evaluation": evaluation,
        "settings": settings_table(config),
        "origin": _origin(folder, entries, run),
        "warnings": folder.damages(),
    }


# --- in words -------------------------------------------------------------------------------------------------------


def _title(config: Config, plan: Plan) -> str:
    kind = "Language model" if plan.classes is None else f"Classifier of {counted(plan.classes, 'class', 'es')}"
    policies = [name for name in config.growth.policies if name != "observe"]  # which changes nothing
    listed = [", ".join(policies[:-1]), *policies[-1:]] if policies[1:] else policies
    grows = f", growing by {' and '.join(listed)}" if policies else ""
    return f"{kind} with {counted(len(plan.layers), 'layer')} and width {plan.width}{grows}"


def _structure_text(plan: Plan) -> str:
    looped = sum(bool(layer.run_again) for layer in plan.layers)
    heads = f"{counted(sum(plan.heads), 'head')} in {counted(len(plan.layers), 'layer')}"
    return heads + (f", something run again in {looped} of them" if looped else "")


def _status(folder: RunFolder, lifetime: Sequence[Entry], last_step: int, steps: int) -> dict[str, str]:
    """Whether a run has ended, and how, in a word and a sentence."""
    ends = ("start", "resume", "branch", "stopped", "diverged", "finished")
    kinds = [row["kind"] for row in lifetime if row["kind"] in ends]
    back = sum(row["kind"] == "rewind" for row in lifetime)
    again = sum(row["kind"] == "resume" for row in lifetime)
    more = [f"resumed {counted(again, 'time')}"] * (again > 0) + [f"went back {counted(back, 'time')}"] * (back > 0)
    so_far = f"step {last_step:,} of {steps:,}"
    if not kinds:
        return {"word": "not begun", "text": "The run has not begun: there is nothing in its logs."}
    if kinds[-1] == "finished":
        patience = folder.config.eval.patience
        early = f"Finished early, at {so_far}: {counted(patience, 'evaluation')} in a row were not better"
        word, text = "finished", f"Finished: {counted(last_step, 'step')}" if last_step >= steps else early
    elif kinds[-1] == "stopped":
        word, text = "stopped", f"Stopped at {so_far}; `meristem resume` goes on from there"
    elif kinds[-1] == "diverged":
        word, text = "diverged", f"Given up at {so_far}: the run diverged"
    else:
        written = max((log.stat().st_mtime for log in folder.logs if log.is_file()), default=0.0)
        at = datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%d %H:%M UTC")
        word, text = "not finished", f"Not finished: {so_far}, last written at {at} (still at work, or cut off)"
    return {"word": word, "text": ", ".join([text, *more]) + "."}


def _summary(plan: Plan, metrics: Sequence[Entry], now: Entry) -> list[dict[str, str]]:
    """The numbers that one looks for first."""
    facts: list[tuple[str, str]] = []
    loss = finite_points(smoothed(read_curve(metrics, "loss")))
    if loss:
        facts.append(("training loss, smoothed", f"{loss[-1][1]:.4f}"))
    for name, label in (
        ("held_out_loss", "held-out loss"),
        ("accuracy", "held-out accuracy"),
        ("macro_f1", "macro-F1"),
    ):
        measured = finite_points(read_curve(metrics, name))
        if measured:
            facts.append((label, f"{measured[-1][1]:.4f}"))
            if name == "held_out_loss" and plan.classes is None and measured[-1][1] < 50:
                facts.append(("perplexity", f"{math.exp(measured[-1][1]):.2f}"))
    facts.append(("parameters", f"{plan.parameters:,}"))
    facts.append(("heads", f"{sum(plan.heads):,} in {counted(len(plan.layers), 'layer')}"))
    last = axes(metrics)
    for name, label in (("tokens", "tokens seen"), ("flops", "training FLOPs"), ("seconds", "time of steps")):
        values = last[name]
        if values and (total := values[-1]) is not None:
            facts.append((label, describe_time(total) if name == "seconds" else large_count(total)))
    if now["epoch"] is not None:
        facts.append(("epochs", f"{now['epoch']:.3g}"))
    if now["elapsed"] is not None:
        facts.append(("time in all", describe_time(now["elapsed"])))
    return [{"label": label, "value": value} for label, value in facts]


def _origin(folder: RunFolder, entries: Sequence[Entry], run: Path) -> dict[str, Any]:
    """What is needed to repeat a run."""
    begin = next((entry for entry in entries if entry.get("event") == "start"), {})
    processes = begin.get("processes")
    facts = [(name, begin[name]) for name in ("device", "torch", "meristem") if isinstance(begin.get(name), str)]
    digest = folder.data_digest
    facts += [("data digest", digest)] if isinstance(digest, str) else []
    return {
        "command": repeat_command(run, processes if type(processes) is int and processes > 0 else 1),
        "facts": [{"label": label, "value": value} for label, value in facts],
    }


# --- curves ---------------------------------------------------------------------------------------------------------


def _other_curves(metrics: Sequence[Entry], points: int) -> dict[str, Any]:
    names = {"lr": points, "gradient_norm": points, "tokens_per_second": points, "accuracy": points, "macro_f1": points}
    curves = {}
    for name, most in names.items():
        curve = read_curve(metrics, name)
        if finite_points(curve):
            curves[name] = columns(with_extremes(curve, most if name == "gradient_norm" else min(most, SMOOTH_POINTS)))
    return curves


# --- structure and cost ---------------------------------------------------------------------------------------------


def _structure(history: Sequence[Snapshot], growth: RunGrowth, rows: Sequence[Entry]) -> dict[str, Any]:
    """Every structure there was: layers as places in a list of different ones, which hardly grows with the events."""
    shapes: dict[str, int] = {}
    known: list[dict[str, Any]] = []
    places = {row["event"]: number for number, row in enumerate(rows)}
    first_seen: dict[int, tuple[int, int | None]] = {}
    told = []
    for snapshot in history:
        layers = []
        for number, layer, heads in zip(snapshot.numbers, snapshot.plan.layers, snapshot.heads, strict=True):
            if number not in first_seen:
                first_seen[number] = (snapshot.step, _source(growth, snapshot, number))
            shape = {
                "layer": number,
                "dim": layer.head_dim,
                "kv": layer.kv_heads,
                "heads": list(heads),
                "loop": None if layer.loop is None else [list(layer.loop.heads), layer.loop.passes],
                "fading": [] if layer.loop is None else list(layer.loop.fading),
                "repeats": layer.repeats,
            }
            key = repr(shape)
            if key not in shapes:
                shapes[key] = len(known)
                known.append(shape)
            layers.append(shapes[key])
        told.append(
            {
                "step": snapshot.step,
                "layers": layers,
                "born": sorted(snapshot.born),
                "checked": snapshot.checked,
                "row": None if snapshot.event is None else places.get(snapshot.event),
                "text": _structure_text(snapshot.plan),
            }
        )
    widest = max(layer.query_width for snapshot in history for layer in snapshot.plan.layers)
    left = {number: step for number, (_, step) in growth.numbers.taken_out.items()}
    return {
        "width": history[-1].plan.width,
        "widest": max(widest, history[-1].plan.width),
        "layers": growth.numbers.layers,
        "all_layers": growth.numbers.all_layers,
        "target": len(history[-1].plan.target),
        "shapes": known,
        "snapshots": told,
        "born": {str(number): {"step": step, "copy_of": copy} for number, (step, copy) in first_seen.items() if step},
        "left": {str(number): step for number, step in left.items()},
    }


def _source(growth: RunGrowth, snapshot: Snapshot, number: int) -> int | None:
    """The layer that a new one is a copy of, both by their numbers at the end."""
    if snapshot.event is None:
        return None
    moves = getattr(growth.numbers.events[snapshot.event], "moves", {})
    return moves.get("copied", {}).get(number)


def _cost(step: int, plan: Plan) -> dict[str, Any]:
    cost = plan.cost
    return {
        "steps": step,
        "parameters": cost.parameters,
        "flops": cost.forward.causal,
        "kv_bytes": cost.kv_bytes_per_token,
    }


def _uniform_text(plan: Plan) -> str:
    return f"{counted(plan.heads[0], 'head')} of {plan.head_dims[0]} in each of {counted(len(plan.layers), 'layer')}"


def uniform_plan(config: Config, plan: Plan) -> Plan | None:
    """The uniform model that a run is held against: as deep and as wide as it ends, every layer of the same heads.

    Their number is that of the configuration, or else the one whose head dim is nearest to the most frequent one.
    """
    layers = plan.target or plan.layers
    dims = sorted(layer.head_dim for layer in layers)
    frequent = max(groupby(dims), key=lambda group: len(list(group[1])))[0]
    wished = [config.model.heads] if config.model.scheduled else []
    for heads in (*wished, *sorted(even_divisors(plan.width), key=lambda heads: abs(plan.width / heads - frequent))):
        for group in dict.fromkeys((config.model.kv_group, 1)):
            try:
                return Plan.from_heads(
                    [heads] * len(layers), width=plan.width, vocabulary=plan.vocabulary, context=plan.context,
                    feed_forward=plan.feed_forward, classes=plan.classes, pooling=plan.pooling, kv_group=group,
                )  # fmt: skip
            except InputError:
                continue
    return None
