"""The page of a comparison: one HTML file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from meristem.comparison.analysis import Analysis
from meristem.comparison.charts import curves, forest
from meristem.comparison.file import Comparison
from meristem.comparison.results import Result
from meristem.comparison.tables import MEASURES, Table, tables, word

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --muted: #59636e; --grid: #e4e8ec; --ground: #ffffff;
  --panel: #f6f8fa; --better: #007a5a; --worse: #c44f00; --open: #59636e; --margin: #0072b21f;
  --series-0: #0072b2; --series-1: #d55e00; --series-2: #009e73; --series-3: #aa3377; --series-4: #b8860b;
  --series-5: #56b4e9; --series-6: #6b6b6b; --series-7: #7a5195; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --muted: #9da7b1; --grid: #2d333b; --ground: #0d1117;
  --panel: #161b22; --better: #3fc79a; --worse: #f0883e; --open: #9da7b1; --margin: #56b4e92e;
  --series-0: #4aa8e0; --series-1: #f0883e; --series-2: #3fc79a; --series-3: #e07ab0; --series-4: #e3b341;
  --series-5: #8fd0f5; --series-6: #aaaaaa; --series-7: #b794d6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 24px 16px 64px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 4px; } h2 { font-size: 1.15rem; margin: 36px 0 10px; }
.lead { font-size: 1.1rem; padding: 14px 16px; border-left: 4px solid var(--open); background: var(--panel); }
.lead.better { border-color: var(--better); } .lead.worse { border-color: var(--worse); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; min-width: 860px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: left; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { font-weight: 600; color: var(--muted); } td + td { white-space: nowrap; } td.text { white-space: normal; }
td:first-child { min-width: 10.5em; }
svg { width: 100%; height: auto; min-width: 640px; font-size: 13px; } text { fill: var(--ink); }
.muted { fill: var(--muted); color: var(--muted); } .grid { stroke: var(--grid); }
.zero { stroke: var(--muted); stroke-width: 1.5; } .margin { fill: var(--margin); }
.interval { stroke-width: 2.5; stroke: currentColor; } g circle { fill: currentColor; }
.seed { opacity: 0.55; }
g.better { color: var(--better); } g.worse { color: var(--worse); } g.open { color: var(--open); }
.better-text { fill: var(--better); } .worse-text { fill: var(--worse); } .open-text { fill: var(--muted); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 6px; }
.legend i { display: inline-block; width: 14px; height: 4px; margin-right: 7px; vertical-align: middle; }
@media print { body { max-width: none; } h2 { break-after: avoid; } tr, svg { break-inside: avoid; } }
"""
TEXT = ("final structure", "result")  # columns that may be wrapped


def page(comparison: Comparison, analysis: Analysis, runs: Mapping[str, Mapping[int, Result]]) -> str:
    """The whole page."""
    by_title = {table.title: table for table in tables(comparison, analysis)}
    sections = [
        ("Paired differences", _scrolled(forest(analysis, comparison.margin)) + _sign(comparison)),
        ("Contrasts", _html(by_title["Contrasts"]) + _notes(analysis)),
        ("Results", _html(by_title["Results"])),
        ("Loss curves", _scrolled(curves(runs))),
        ("Cost", _html(by_title["Cost"])),
        ("Where the time went", _html(by_title["Where the time went"])),
        ("Time", _html(by_title["Time"])),
    ]
    body = "".join(f"<section><h2>{escape(title)}</h2>{content}</section>" for title, content in sections)
    title = escape(comparison.name)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{_lead(comparison, analysis)}{body}</body></html>\n"
    )


def _lead(comparison: Comparison, analysis: Analysis) -> str:
    """The primary contrast in a sentence."""
    seeds = f"{len(comparison.arms)} arms, {len(comparison.seeds)} seeds, measured by {MEASURES[comparison.measure]}"
    text = f'<p class="muted">{escape(seeds)}</p>'
    for line in (line for line in analysis.contrasts if line.primary):
        contrast, difference = line.contrast, line.difference
        said = f"<b>{escape(contrast.arm)}</b> against <b>{escape(contrast.baseline)}</b>: <b>{word(line.verdict)}</b>"
        text += (
            f'<p class="lead {line.verdict.word}">{said}. Paired difference {difference.mean:+.4f}, 95 % interval '
            f"{difference.low:+.4f} to {difference.high:+.4f}, {difference.pairs} pairs.</p>"
        )
    return text


def _sign(comparison: Comparison) -> str:
    side = "Left" if comparison.lower_is_better else "Right"
    shaded = "" if comparison.margin is None else "; the margin of equality is shaded"
    words = f"{side} of zero the first arm is better{shaded}. Small dots are seeds; the primary contrast is bold."
    return f'<p class="muted">{words}</p>'


def _notes(analysis: Analysis) -> str:
    return "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in analysis.notes) + "</ul>"


def _scrolled(content: str) -> str:
    return f'<div class="scroll">{content}</div>'


def _html(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = ""
    for row in table.rows:
        cells = zip(table.columns, row, strict=True)
        rows += "<tr>" + "".join(f"<td{_wrapped(column)}>{_cell(cell)}</td>" for column, cell in cells) + "</tr>"
    return _scrolled(f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")


def _wrapped(column: str) -> str:
    return ' class="text"' if column in TEXT else ""


def _cell(text: str) -> str:
    return re.sub(r"\*\*(.*)\*\*", r"<b>\1</b>", escape(text))
