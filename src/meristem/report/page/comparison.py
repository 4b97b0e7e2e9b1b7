"""The page of a comparison: what `comparison/` has found out, as plain values for the script that draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meristem import __version__
from meristem.comparison.analysis import Analysis, ContrastLine
from meristem.comparison.file import Comparison
from meristem.comparison.numbers import interval
from meristem.comparison.results import Result
from meristem.comparison.tables import MEASURES, NOTHING, Table, name, tables, word
from meristem.report.curves import Curve, finite_points, loss_range, smoothed
from meristem.report.page.curves import columns, short
from meristem.report.page.file import page_text
from meristem.wording import counted

# Columns that hold words; the first of a table does too.
WORDS = ("tested", "result", "final structure", "what it changes")

Runs = Mapping[str, Mapping[int, Result]]


def comparison_page(comparison: Comparison, analysis: Analysis, runs: Runs) -> str:
    """The page of a comparison: one file that needs nothing else. `runs` are the reported ones, by arm and seed."""
    data = comparison_data(comparison, analysis, runs)
    return page_text(comparison.name, data, styles=("comparison.css",), scripts=("comparison.js",))


def comparison_data(comparison: Comparison, analysis: Analysis, runs: Runs) -> dict[str, Any]:
    """All that the page shows."""
    about = [counted(len(comparison.arms), "arm"), counted(len(comparison.seeds), "seed")]
    return {
        "version": __version__,
        "title": comparison.name,
        "about": f"{', '.join(about)}, measured by {MEASURES[comparison.measure]}",
        "nothing": NOTHING,
        "contrasts": [_contrast(line) for line in analysis.contrasts],
        "margin": comparison.margin,
        "better": "Left" if comparison.lower_is_better else "Right",
        "cautions": analysis.cautions,
        "notes": analysis.notes,
        "tables": {table.title: _table(table) for table in tables(comparison, analysis)},
        "curves": _curves(runs),
    }


def _contrast(line: ContrastLine) -> dict[str, Any]:
    difference = line.difference
    pairs = f" (95 % interval), {counted(difference.pairs, 'pair')}" if difference.has_spread else ""
    return {
        "arm": line.contrast.arm,
        "baseline": line.contrast.baseline,
        "name": name(line.contrast),
        "primary": line.primary,
        "kind": line.verdict.word if line.verdict.word in ("better", "worse") else "open",
        "word": word(line.verdict),
        "text": interval(difference),
        "said": f"{interval(difference)}{pairs}",
        "mean": difference.mean,
        "low": difference.low,
        "high": difference.high,
        "seeds": [[seed, value] for seed, value in line.by_seed.items()],
    }


def _table(table: Table) -> dict[str, Any]:
    titles = [{"title": title, "number": place > 0 and title not in WORDS} for place, title in enumerate(table.columns)]
    rows = [[cell.strip("*") for cell in row] for row in table.rows]  # Markdown's bold
    return {"columns": titles, "rows": rows}


def _curves(runs: Runs) -> dict[str, Any] | None:
    """Training loss by update, smoothed: of every seed, and the mean of each arm."""
    lines = {arm: [smoothed(run.loss) for run in by_seed.values()] for arm, by_seed in runs.items() if by_seed}
    raw = [point for by_seed in runs.values() for run in by_seed.values() for point in run.loss]
    trend = [point for curves in lines.values() for curve in curves for point in curve]
    if not finite_points(raw):
        return None
    return {
        "range": [short(end) for end in loss_range(raw, trend)],
        "arms": [
            {"name": arm, "mean": columns(mean_curve(curves)), "seeds": [columns(curve) for curve in curves]}
            for arm, curves in lines.items()
        ],
    }


def mean_curve(curves: Sequence[Curve]) -> list[tuple[int, float]]:
    """The mean over curves at the steps that all of them have; the first curve if they share none."""
    by_step = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*map(set, by_step)))
    return [(step, sum(one[step] for one in by_step) / len(by_step)) for step in shared] or list(curves[0])
