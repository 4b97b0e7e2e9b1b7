"""What a comparison writes: comparison.json with the raw lines, comparison.md and comparison.html."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from meristem import __version__
from meristem.comparison.analysis import Analysis, analyse, facts_of, reported
from meristem.comparison.file import Comparison
from meristem.comparison.page import page
from meristem.comparison.planning import Results
from meristem.comparison.running import LAUNCHES
from meristem.comparison.tables import markdown
from meristem.files import read_json, write_atomically

RECORD = "comparison.json"


def show(comparison: Comparison, results: Results, out: Path) -> tuple[Analysis, str]:
    """Analyse what is done, write it down, and return it with its Markdown. That it was looked at is recorded."""
    record = out / RECORD
    shown: list[dict[str, Any]] = read_json(record).get("shown", []) if record.exists() else []
    paths = {str(key.path) for key in results}
    analysis = analyse(comparison, results, shown, _side_by_side(out, paths))
    text, runs = markdown(comparison, analysis), reported(comparison, results)
    if analysis.contrasts:  # before there is a difference there is nothing to see
        shown = [*shown, {"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), **facts_of(comparison)}]
    content = {
        "meristem": __version__, "name": comparison.name, "shown": shown,
        "comparison": {**facts_of(comparison), "rates": list(comparison.rates),
                       "rate_seeds": list(comparison.rate_seeds), "target_loss": comparison.target_loss,
                       "values": dict(comparison.values),
                       "arms": {name: dict(arm.changes) for name, arm in comparison.arms.items()}},
        "analysis": analysis.to_dict(),
        "runs": [{"path": str(key.path), "measuring": key.measuring, **r.to_dict()} for key, r in results.items()],
    }  # fmt: skip
    write_atomically(record, json.dumps(content, indent=1) + "\n")
    write_atomically(out / "comparison.md", text)
    write_atomically(out / "comparison.html", page(comparison, analysis, runs))
    return analysis, text


def _side_by_side(out: Path, paths: set[str]) -> int:
    """The most runs that were allowed to run at a time, of those that are reported."""
    launches = out / LAUNCHES
    lines = launches.read_text(encoding="utf-8").splitlines() if launches.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return max((entry["jobs"] for entry in entries if entry["run"] in paths), default=1)
