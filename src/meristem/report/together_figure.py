"""The picture of a run in which heads or blocks and loops grew: both stories over one axis of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meristem.report.drawing.frame import LegendEntry
from meristem.report.drawing.panels import stacked, strong_line_key, with_lines
from meristem.report.head_history import HeadHistory
from meristem.report.heads_figure import block_lines, head_panels, heads_facts
from meristem.report.loop_history import LoopHistory
from meristem.report.loops_figure import loop_panels, loops_facts


def together_svg(heads: HeadHistory, loops: LoopHistory, title: str = "") -> str:
    """Heads, demand and loss above, entropies, strengths and costs of loops below; blocks come and go at bold lines."""
    depths = block_lines(heads)
    panels = with_lines([*head_panels(heads), *loop_panels(loops)], depths)
    if depths:
        panels = [replace(panel, legend=_meanings(panel.legend)) for panel in panels]
    last_step = max(heads.last_step, loops.last_step)
    facts = f"{heads_facts(heads)}; {loops_facts(loops).partition('; ')[2]}".rstrip("; ")
    return stacked(panels, last_step, title or "Growth", facts)


def _meanings(entries: Sequence[LegendEntry]) -> list[LegendEntry]:
    """The entries of a legend, with one for all lines that go through the picture."""
    others = [entry for entry in entries if entry.mark is not strong_line_key]
    return [*others, LegendEntry("blocks come or go, or loops grow no more", strong_line_key)]
