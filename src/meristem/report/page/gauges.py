"""What was measured of layers and heads over the run, against the thresholds that decisions go by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meristem.growth.descriptions import MEASURES
from meristem.report.curves import Curve, finite_points
from meristem.report.page.curves import columns, short, with_extremes
from meristem.report.run_growth import RunGrowth
from meristem.report.structure_history import Snapshot

MOST_VALUES = 16_000  # of one gauge, over all layers; a page of a run must stay small
LEAST_POINTS = 60


def gauges(growth: RunGrowth) -> list[dict[str, Any]]:
    """Every gauge that has readings: a curve for each layer, its threshold, and what both mean."""
    found = (_demand(growth), _entropy(growth), _own_share(growth), _strength(growth))
    return [gauge for gauge in found if gauge["layers"]]


def _gauge(
    title: str, note: str, scale: str, layers: Sequence[dict[str, Any]], threshold: dict[str, Any] | None = None
) -> dict[str, Any]:
    known = [layer for layer in layers if layer["steps"]]
    return {"title": title, "note": note, "scale": scale, "layers": known, "threshold": threshold}


def _points(layers: int) -> int:
    return max(LEAST_POINTS, MOST_VALUES // max(1, layers))


def _demand(growth: RunGrowth) -> dict[str, Any]:
    """The demand, or with the published rule the energy, of every layer with its noise."""
    criterion = growth.heads.criterion
    name = MEASURES[criterion]
    layers = []
    for number, readings in enumerate(growth.heads.readings):
        known = [point for point in readings if math.isfinite(point.demand)]
        curve = with_extremes([(point.step, point.demand) for point in known], _points(3 * len(growth.heads.readings)))
        kept = dict.fromkeys(step for step, _ in curve)
        by_step = {point.step: point for point in known}
        points = [by_step[step] for step in kept]
        layers.append(
            {
                "layer": number,
                "steps": [point.step for point in points],
                "values": [short(point.demand, 4) for point in points],
                "noise": [short(point.noise, 3) for point in points] if criterion == "demand" else None,
                "thresholds": [short(point.threshold, 4) for point in points],
            }
        )
    note = {
        "demand": "How fast the loss would fall along the best further head, as a share of the largest so far. A head "
        "can be born in a layer above its threshold, if that is certain, lasts, and the loss has come to rest. What is "
        "below the axis, or below zero, lies on it.",
        "energy": "The largest eigenvalue of what the heads leave over, as a share of that at the start. A head is "
        "born in a layer above its threshold.",
    }[name]
    return _gauge(f"{name.capitalize()} of every layer", note, "log", layers)


def _entropy(growth: RunGrowth) -> dict[str, Any]:
    """The mean entropy of every layer's heads, and the lowest on the shortlist at every decision."""
    loops = growth.loops
    read, count = loops.entropies, growth.numbers.layers
    limits: list[tuple[int, float]] = []
    for decision in loops.decisions:
        entropies, shortlist = decision.facts.get("layer_entropy"), decision.facts.get("shortlist")
        if isinstance(entropies, list) and shortlist:
            known = [entropies[layer] for layer in shortlist if layer < len(entropies)]
            if known and all(type(value) in (int, float) for value in known):
                limits.append((decision.step, min(known)))
    layers = [
        {"layer": layer, **_thinned([(step, of[layer]) for step, of in read if layer < len(of)], count)}
        for layer in range(count)
    ]
    note = "Of attention over the tokens that a head may see, from 0 (all on one) to 1 (spread evenly); a layer's mean."
    threshold = None
    if limits:
        note += " Layers of highest entropy are on the shortlist; a loop grows in the deepest of them that can."
        threshold = {"label": "lowest on the shortlist", **columns(limits)}
    return _gauge("Attention entropy of every layer", note, "linear", layers, threshold)


def _own_share(growth: RunGrowth) -> dict[str, Any]:
    """The smallest share that a head of the layer has for itself, where heads are looked at to be removed."""
    read = [(event.step, event.facts["own_share"]) for event in growth.heads.decisions if "own_share" in event.facts]

    def least(shares: Sequence[float | None]) -> float:
        known = [share for share in shares if share is not None]
        return min(known) if known and len(shares) > 1 else math.nan

    count = growth.numbers.layers
    layers = [
        {"layer": layer, **_thinned([(step, least(of[layer])) for step, of in read if layer < len(of)], count)}
        for layer in range(count)
    ]
    threshold = None
    if growth.config.growth.has("prune") and read:
        limit, steps = growth.config["growth.prune.redundant"], [read[0][0], read[-1][0]]
        threshold = {"label": "may leave below", "steps": steps, "values": [limit, limit]}
    note = "What the other heads of a layer cannot stand in for, of the head that they can best stand in for."
    return _gauge("Least own share of a head", note, "log", layers, threshold)


def _strength(growth: RunGrowth) -> dict[str, Any]:
    """How strong the passes of loops are."""
    passes = growth.loops.passes
    several = {one.layer for one in passes if one.number > 1}
    layers = [
        {
            "layer": one.layer,
            **({"name": f"layer {one.layer}, pass {one.number}"} if one.layer in several else {}),
            "dash": one.number > 1,
            **_thinned(one.strength, len(passes)),
        }
        for one in passes
    ]
    note = "Mean over the looped heads. A new pass begins at 0, so that nothing jumps, and grows to about 1."
    return _gauge("Strength of loops", note, "linear", layers)


def _thinned(curve: Curve, layers: int) -> dict[str, Any]:
    return columns(with_extremes(finite_points(curve), _points(layers)))


# --- colours of heads -----------------------------------------------------------------------------------------------


def head_readings(growth: RunGrowth, history: Sequence[Snapshot]) -> dict[str, list[dict[str, Any]]]:
    """Readings by which heads are coloured: `at` is the snapshot whose layers and heads the values are of.

    Values are lists by layer, of those of its heads, or one for all of them.
    """
    observed = [(entry["step"], entry["head_entropy"]) for entry in growth.loops.observations]
    decided = [(one.step, one.facts["head_entropy"]) for one in growth.loops.decisions if "head_entropy" in one.facts]
    shares = [(event.step, event.facts["own_share"]) for event in growth.heads.decisions if "own_share" in event.facts]
    entropy = _of_heads(observed or decided, history)
    own_share = _of_heads(shares, history)
    ratios: dict[int, dict[int, float]] = {}
    for layer, readings in enumerate(growth.heads.readings):
        for point in readings:
            if point.threshold > 0 and math.isfinite(point.demand):
                ratios.setdefault(point.step, {})[layer] = point.demand / point.threshold
    demand = [
        {"step": step, "at": at, "values": [short(of.get(number), 3) for number in history[at].numbers]}
        for step, of in sorted(ratios.items())
        for at in [_snapshot_at(history, step)]
    ]
    return {"entropy": _few(entropy, history), "demand": _few(demand, history), "own_share": _few(own_share, history)}


def _of_heads(read: Sequence[tuple[int, Sequence[Any]]], history: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Readings of every head; `read` has them by the numbers at the end. Those that fit no structure are left out."""
    rows = []
    for step, of in read:
        last = _snapshot_at(history, step)
        for at in range(last, -1, -1):
            snapshot = history[at]
            if at < last and history[at + 1].step < step:
                break
            own = [of[number] if number < len(of) else () for number in snapshot.numbers]
            if [len(heads) for heads in own] == list(snapshot.plan.heads):
                rows.append({"step": step, "at": at, "values": [[short(v, 3) for v in heads] for heads in own]})
                break
    return rows


def _snapshot_at(history: Sequence[Snapshot], step: int) -> int:
    """The newest snapshot at a step."""
    return max(index for index, snapshot in enumerate(history) if snapshot.step <= step or not index)


def _few(rows: list[dict[str, Any]], history: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """At most so many readings as a page has room for, evenly chosen, the last one among them."""
    heads = max(sum(snapshot.plan.heads) for snapshot in history)
    most = max(LEAST_POINTS, 2 * MOST_VALUES // max(1, heads))
    if len(rows) <= most:
        return rows
    kept = {round(i * (len(rows) - 1) / (most - 1)) for i in range(most)}
    return [row for index, row in enumerate(rows) if index in kept]
