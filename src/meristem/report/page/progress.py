"""How far a run has come, by the last lines of its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meristem.report.curves import finite_points, smoothed
from meristem.report.page.curves import read_curve, short

Entry = Mapping[str, Any]
SECONDS = ("training_seconds", "compilation_seconds", "evaluation_seconds", "saving_seconds")
LAST = ("lr", "tokens_per_second", "mfu", "skipped", "epoch")  # of the last line with a loss
LOSS_DIGITS = 9  # far more than are shown, so that rounding twice is as good as once
MEASURED = {"held_out": "held_out_loss", "accuracy": "accuracy"}  # last on held-out data


def progress(metrics: Sequence[Entry], steps: int) -> dict[str, Any]:
    """The numbers of the last step that was logged, by the names that a display has for them; None if not known.

    `elapsed` are the seconds of the run in all its sessions, `left` those that the steps to come will take by
    themselves, `between` those between two lines in the mean, and `smooth` is the smoothed loss.
    """
    lines = [entry for entry in metrics if "loss" in entry]
    last = lines[-1] if lines else {}
    step, loss = last.get("step", 0), last.get("loss")
    now: dict[str, Any] = {"step": step, "loss": short(loss, LOSS_DIGITS)}
    trend = finite_points(smoothed(read_curve(metrics, "loss")))
    now["smooth"] = short(trend[-1][1], LOSS_DIGITS) if trend else None
    for name, logged in MEASURED.items():
        known = finite_points(read_curve(metrics, logged))
        now[name] = short(known[-1][1], LOSS_DIGITS) if known else None
    for name in LAST:
        now[name] = short(_last(last, name), 6)
    seconds = [_last(last, name) for name in SECONDS]
    now["elapsed"] = None if any(map(math.isnan, seconds)) else short(sum(seconds), 7)
    speed, tokens = _last(last, "tokens_per_second"), _last(last, "tokens")
    left = (steps - step) * tokens / (step * speed) if step > 0 and speed > 0 else math.nan
    now["left"] = short(left, 6)
    now["between"] = None if now["elapsed"] is None else short(now["elapsed"] / len(lines))
    return now


def _last(entry: Entry, name: str) -> float:
    """A number of a line; NaN where it is none."""
    values = read_curve([entry], name) if entry else []
    return values[0][1] if values else math.nan
