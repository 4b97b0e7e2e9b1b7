"""Curves as a page holds them: few enough points for a screen, extremes kept, numbers no longer than one can see."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meristem.report.curves import Curve, finite_points, loss_range, smoothed
from meristem.report.drawing.numbers import rounded
from meristem.runs.entries import LARGE

RAW_POINTS, SMOOTH_POINTS, KNOTS = 1600, 500, 400
Entry = Mapping[str, Any]


def short(value: float | None, digits: int = 5) -> float | int | None:
    """A number to so many digits; None where it is none, or not finite."""
    if value is None or not math.isfinite(value):
        return None
    if isinstance(value, int) or value == round(value):
        return int(value) if abs(value) < 2**53 else float(f"{value:.15g}")
    return float(f"{value:.{digits}g}")


def large_count(count: float) -> str:
    """Tokens or FLOPs in few letters."""
    return rounded(int(count)) if count < 1e15 else f"{count:.3g}"


def with_extremes(curve: Curve, most: int) -> list[tuple[int, float]]:
    """At most about so many points of a curve: the first and the last, and the extremes of every stretch of it.

    A stretch with a loss that was not finite keeps a gap.
    """
    if len(curve) <= most:
        return list(curve)
    size, kept = math.ceil(2 * len(curve) / most), {0, len(curve) - 1}
    for begin in range(0, len(curve), size):
        stretch = range(begin, min(begin + size, len(curve)))
        known = [i for i in stretch if math.isfinite(curve[i][1])]
        if known:
            kept |= {min(known, key=lambda i: curve[i][1]), max(known, key=lambda i: curve[i][1])}
        kept |= {*[i for i in stretch if i not in known][:1]}
    return [curve[i] for i in sorted(kept)]


def columns(curve: Curve) -> dict[str, Any]:
    """A curve as two lists, steps and values; None for a value that is not finite."""
    return {"steps": [step for step, _ in curve], "values": [short(value) for _, value in curve]}


def read_curve(entries: Sequence[Entry], name: str) -> list[tuple[int, float]]:
    """What the lines of metrics.jsonl say of one quantity; NaN where it was not finite."""
    values = [(entry["step"], entry[name]) for entry in entries if name in entry]
    return [(step, _number(value)) for step, value in values]


def loss_curves(entries: Sequence[Entry], points: int = RAW_POINTS) -> dict[str, Any]:
    """Training loss, raw and smoothed, what was measured on held-out data, and a range that shows them well."""
    raw = read_curve(entries, "loss")
    smooth = smoothed(raw)
    held_out, average = (read_curve(entries, name) for name in ("held_out_loss", "held_out_loss_average"))
    curves: dict[str, Any] = {
        "raw": columns(with_extremes(raw, points)),
        "smooth": columns(with_extremes(smooth, min(points, SMOOTH_POINTS))),
        "held_out": columns(with_extremes(held_out, points)),
        "average": columns(with_extremes(average, points)),
    }
    measured = [*smooth, *held_out, *average]
    known = finite_points([*raw, *measured])
    curves["range"] = [short(end) for end in loss_range(raw, measured)] if known else None
    return curves


def axes(entries: Sequence[Entry]) -> dict[str, list[float | int | None] | None]:
    """Steps, with the tokens, FLOPs and seconds until then, to draw curves against any of them; None if not known.

    Seconds are those of training steps alone, as the speed that is logged leaves everything else out. Where a line has
    no speed yet, that of the next one is taken.
    """
    lines = [entry for entry in entries if math.isfinite(_number(entry.get("tokens"))) and entry["step"] > 0]
    steps, totals = [0.0], {"tokens": [0.0], "flops": [0.0], "seconds": [0.0]}
    paces = [_number(entry.get("tokens_per_second")) for entry in lines]
    pace = next((known for known in paces if known > 0), math.nan)
    for entry, own in zip(lines, paces, strict=True):
        if entry["step"] <= steps[-1]:
            continue
        pace = own if own > 0 else pace
        done = max(0.0, entry["tokens"] - totals["tokens"][-1])
        steps.append(entry["step"])
        totals["seconds"].append(totals["seconds"][-1] + done / pace)
        totals["tokens"].append(float(entry["tokens"]))
        totals["flops"].append(_number(entry.get("flops")))
    every = max(1, math.ceil(len(steps) / KNOTS))
    kept = sorted({*range(0, len(steps), every), len(steps) - 1})
    result: dict[str, list[float | int | None] | None] = {"steps": [short(steps[i]) for i in kept]}
    for name, values in totals.items():
        whole = len(steps) > 1 and all(map(math.isfinite, values))
        result[name] = [short(values[i], 7) for i in kept] if whole else None
    return result


def _number(value: Any) -> float:
    """A number of a log; NaN for what is none, or beyond what is ever meant."""
    return float(value) if type(value) in (int, float) and abs(value) < LARGE else math.nan
