"""What several runs came to, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meristem.report.page.curves import large_count

NOTHING, MINUS = "\u2013", "\u2212"


def run_table(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What runs came to, a row for each quantity, with what it is more than in the first run."""

    def last(curve: Mapping[str, Any] | None) -> float | None:
        known = [value for value in (curve or {}).get("values", ()) if value is not None]
        return known[-1] if known else None

    def end(run: Mapping[str, Any], name: str) -> float | None:
        return (run["axes"][name] or [None])[-1]

    quantities: dict[str, list[float | None]] = {
        "steps done": [run["last_step"] for run in runs],
        "held-out loss": [last(run["loss"]["held_out"]) for run in runs],
        "training loss, smoothed": [last(run["loss"]["smooth"]) for run in runs],
        "held-out accuracy": [last(run["curves"].get("accuracy")) for run in runs],
        "macro-F1": [last(run["curves"].get("macro_f1")) for run in runs],
        "parameters": [run["costs"]["parameters"][-1] for run in runs],
        "FLOPs per token": [run["costs"]["flops"][-1] for run in runs],
        "KV bytes per token": [run["costs"]["kv_bytes"][-1] for run in runs],
        "tokens seen": [end(run, "tokens") for run in runs],
        "training FLOPs": [end(run, "flops") for run in runs],
        "seconds of steps": [end(run, "seconds") for run in runs],
        "tokens per second, at the end": [last(run["curves"].get("tokens_per_second")) for run in runs],
        "decisions about the structure": [len(run["events"]) for run in runs],
    }
    rows = [{"label": "state", "values": [run["status"]["word"] for run in runs]}]
    for label, values in quantities.items():
        if any(value is not None for value in values):
            first = values[0]
            rows.append({"label": label, "values": [_with_difference(value, first) for value in values]})
    rows.append({"label": "structure at the end", "values": [run["heads"] for run in runs]})
    return rows


def _with_difference(value: float | None, first: float | None) -> str:
    """A number, and in brackets by how much it is more than the first."""
    if value is None:
        return NOTHING

    def plain(number: float) -> str:
        if abs(number) >= 1e9:
            return large_count(abs(number)) if number >= 0 else f"{MINUS}{large_count(-number)}"
        return f"{number:,}" if isinstance(number, int) else f"{number:,.5g}"

    if first is None or value == first:
        return plain(value)
    difference = value - first
    return f"{plain(value)} ({'+' if difference > 0 else MINUS}{plain(abs(difference))})"


def data_warning(runs: Sequence[Mapping[str, Any]]) -> str:
    """A word of warning where losses do not compare; empty if they do."""
    digests = {fact["value"] for run in runs for fact in run["origin"]["facts"] if fact["label"] == "data digest"}
    return "These runs were trained on different data: their losses do not compare." if len(digests) > 1 else ""
