"""Runs made by hand: a folder with logs that say what a test wants, without any training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meristem.config import build_config
from meristem.growth.head_surgery import with_head
from meristem.plan import Loop, Plan

Line = Mapping[str, Any]


def hand_made(
    folder: Path, plan: Plan, values: Mapping[str, Any] | None = None, *, metrics: Iterable[Line] = (),
    events: Iterable[Line] = (), entropy: Iterable[Line] = (), digest: str = "d1",
) -> Path:  # fmt: skip
    """The folder of a run that began with a plan, with these lines in its logs."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(build_config(values or {}).to_toml(), encoding="utf-8")
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    (folder / "data.json").write_text(json.dumps({"digest": digest}), encoding="utf-8")  # as runs had it at first
    for name, lines in (("metrics", metrics), ("events", events), ("entropy", entropy)):
        if lines := list(lines):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def metric(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl, of 100 tokens and 1000 FLOPs a step, 50 tokens a second."""
    return {
        "step": step, "loss": loss, "gradient_norm": 1.0, "lr": 1e-3, "tokens": 100 * step, "flops": 1000 * step,
        "tokens_per_second": 50.0, "mfu": None, "skipped": 0, **more,
    }  # fmt: skip


START = {"step": 0, "event": "start", "device": "a CPU", "processes": 1, "torch": "2", "meristem": "0"}


def growth(step: int, policy: str, action: str, layer: int | None, rule: str, plan: Plan, **facts: Any) -> Line:
    """A line of events.jsonl about a decision that led to a plan."""
    head = {"step": step, "event": "growth", "version": 1, "policy": policy, "action": action, "layer": layer}
    return {**head, "rule": rule, **facts, "plan": plan.digest}


def demands(plan: Plan, demand: float, threshold: float = 0.03, rule: str = "the demand is small") -> dict[str, Any]:
    """What is measured of heads at a decision, the same in every layer."""
    count = len(plan.layers)
    return {
        "loss": 1.0, "heads": list(plan.heads), "demand": [demand] * count, "noise": [demand / 8] * count,
        "threshold": [threshold] * count, "rules": [rule] * count, "predicted_heads": [{"count": 2}] * count,
    }  # fmt: skip


def born(plan: Plan, layer: int) -> tuple[Plan, dict[str, Any]]:
    """The plan with one head more in a layer, and what moved."""
    heads = plan.heads[layer]
    after = plan.with_layer(layer, with_head(plan.layers[layer]))
    return after, {"heads": {str(layer): [*range(heads), None]}}


def long_run(folder: Path, steps: int = 5000, births: int = 88, loops: int = 12) -> Path:
    """A run of 12 layers that logged every step, with a hundred events and all gauges at work."""
    draw = random.Random(0)
    plan = start = Plan.from_heads([1] * 12, width=768, head_dim=64, vocabulary=50304, context=1024)
    events: list[Line] = [START]
    changes: dict[int, tuple[str, int]] = {}
    for number in range(births):
        changes[200 + 30 * number] = ("birth", number % 12)
    for number in range(loops):
        changes[3000 + 100 * number + 15] = ("add", 11 - number)
    for step in range(50, steps + 1, 5):
        if step in changes:
            kind, layer = changes[step]
            if kind == "birth":
                plan, moves = born(plan, layer)
                facts = {**demands(plan, draw.random(), rule="the demand is certain, large and steady"), "moves": moves}
                events.append(growth(step, "incrt", "birth", layer, "the demand is certain", plan, **facts))
            else:
                plan = plan.with_layer(layer, replace(plan.layers[layer], loop=Loop((0, 1), 1)))
                facts = {"heads": [0, 1], "passes": 1, "shortlist": [layer], "layer_entropy": [draw.random()] * 12}
                events.append(growth(step, "sgt", "add", layer, "deepest layer of the shortlist", plan, **facts))
        elif step % 50 == 0:
            measured = {"step": step, "event": "measured", "version": 1, "policy": "incrt"}
            events.append({**measured, **demands(plan, draw.random()), "plan": plan.digest})
    heads_at = [(0, start.heads)] + [(e["step"], tuple(e["heads"])) for e in events if e.get("action") == "birth"]
    entropy = []
    for step in range(50, steps + 1, 50):
        now = [heads for at, heads in heads_at if at <= step][-1]
        entropy.append({"step": step, "head_entropy": [[draw.random() for _ in range(count)] for count in now]})
    metrics: list[Line] = []
    for step in range(1, steps + 1):
        noisy = {"gradient_norm": draw.lognormvariate(0, 0.4), "tokens_per_second": 4e5 + draw.gauss(0, 1e4)}
        loss = 3 + 8 * math.exp(-step / 600) + draw.gauss(0, 0.2)
        metrics.append(metric(step, loss, lr=6e-4 * draw.random(), **noisy))
        if step % 100 == 0:
            metrics.append({"step": step, "held_out_loss": 3.1 + 8 * math.exp(-step / 600)})
    events.append({"step": steps, "event": "finished"})
    values = {
        "train.steps": steps, "model.layers": 12, "growth.policies": ["observe", "incrt", "sgt"],
        "growth.incrt.start_heads": 1,
    }  # fmt: skip
    return hand_made(folder, start, values, metrics=metrics, events=events, entropy=entropy)
