"""What a comparison writes: comparison.json with the raw lines, and comparison.md."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from meristem import __version__
from meristem.comparison.analysis import Analysis, analyse, facts_of
from meristem.comparison.ended import NO_LINES, Lines
from meristem.comparison.file import Comparison
from meristem.comparison.planning import Results, Waiting, trial_settings, tuning_keys, tuning_score
from meristem.comparison.processes import jobs_of_runs
from meristem.comparison.tables import markdown
from meristem.files import read_json, write_atomically

RECORD = "comparison.json"


def show(comparison: Comparison, results: Results, out: Path, lines: Lines = NO_LINES) -> tuple[Analysis, str]:
    """Analyse what is done, write it down, and return it with its Markdown. That it was looked at is recorded."""
    record = out / RECORD
    shown: list[dict[str, Any]] = read_json(record).get("shown", []) if record.exists() else []
    paths = {str(key.path) for key in results}
    analysis = analyse(comparison, results, shown, _side_by_side(out, paths, lines))
    text = markdown(comparison, analysis)
    if analysis.contrasts:  # before there is a difference there is nothing to see
        ended = sorted({key.seed for key in results} & {*comparison.seeds})
        shown = [*shown, {"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), **facts_of(comparison), "ended": ended}]
    content = {
        "meristem": __version__, "name": comparison.name, "shown": shown,
        "comparison": {**{key: fact for key, fact in facts_of(comparison).items() if not key.startswith("search.")},
                       "search": None if comparison.search is None else asdict(comparison.search),
                       "values": dict(comparison.values),
                       "arms": {name: dict(arm.changes) for name, arm in comparison.arms.items()}},
        "analysis": analysis.to_dict(), "trials": _trials(comparison, results),
        "runs": [{"path": str(key.path), "measuring": key.measuring, **r.to_dict()} for key, r in results.items()],
    }  # fmt: skip
    write_atomically(record, json.dumps(content, indent=1) + "\n")
    write_atomically(out / "comparison.md", text)
    return analysis, text


def _trials(comparison: Comparison, results: Results) -> list[dict[str, Any]]:
    """What the finished trials of a search tried, and what they came to; None if they diverged."""
    found, sign = [], 1 if comparison.lower_is_better else -1
    for key in dict.fromkeys(replace(key, seed=0) for key in tuning_keys(comparison) if key.trial is not None):
        with suppress(Waiting):
            score = tuning_score(comparison, results, key)
            tried = trial_settings(comparison, key.arm, key.trial or 0, results)
            found.append({"arm": key.arm, "trial": key.trial, "settings": tried,
                          comparison.measure: sign * score if math.isfinite(score) else None})  # fmt: skip
    return found


def _side_by_side(out: Path, paths: set[str], lines: Lines) -> int:
    """The most runs that were allowed to run at a time, of those that are reported."""
    return max((jobs for run, jobs in jobs_of_runs(out, lines).items() if run in paths), default=1)
