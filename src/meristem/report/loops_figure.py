"""The picture of a run whose loops grew, or that watched its heads: entropies, births, strengths and costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import groupby, pairwise

from meristem.report.drawing.colours import BACKGROUND, GRID, INK, MUTED, ORANGE, PURPLE, shade
from meristem.report.drawing.elements import Box, Point, area, badge, boxes, circle, line, polyline, rect, text
from meristem.report.drawing.frame import (
    EndLabel,
    Frame,
    LegendEntry,
    caption,
    end_labels,
    layer_names,
    row_caption,
    shade_bar,
)
from meristem.report.drawing.panels import Panel, StepLine, stacked, strong_line_key, with_lines
from meristem.report.drawing.scales import Scale
from meristem.report.loop_history import LoopHistory, PassHistory
from meristem.report.structure_figure import looped
from meristem.wording import counted

SHADES, COLUMNS = 32, 175  # of the heat map at most: its columns are then 4 pixels wide
PROBE = 8  # pixels of a column, where entropy is only known at decisions
PALE = "#fbe3d3"  # what is not filled yet of a bar
LANE, LANE_GAP, LAYER_GAP = 11, 3, 4
COST_HEIGHT = 64


def loops_svg(history: LoopHistory, title: str = "") -> str:
    """A heat map of the layers' entropies with the births in it, the strength of every pass, and the extra FLOPs."""
    return stacked(loop_panels(history), history.last_step, title or "Growth", loops_facts(history))


def loop_panels(history: LoopHistory) -> list[Panel]:
    """What the picture is stacked of: entropies, and strengths and costs where there are any."""
    panels = [_entropy_panel(history)]
    if history.passes:
        panels.append(_strength_panel(history))
    if any(extra > 0 for _, extra in history.cost):
        panels.append(_cost_panel(history))
    ended = [] if history.fixed is None else [StepLine(history.fixed, is_strong=True)]
    return with_lines(panels, ended)


def loops_facts(history: LoopHistory) -> str:
    """What a picture says of the loops, in a line."""
    grown = history.state(history.last_step).grown
    facts = [counted(history.last_step, "step")]
    if grown:
        births = sum(len(one.births) for one in grown)
        facts.append(f"{counted(len(grown), 'layer')} grew {counted(births, 'pass', 'es')}")
    if history.fixed is not None:
        facts.append(f"fixed at step {history.fixed:,}")
    if (now := history.cost[-1][1]) > 0:
        share = f" at the end, {history.mean_cost:.1%} over the run" if grown else " from the start"
        facts.append(f"{now:.1%} more FLOPs per token{share}")
    return "; ".join(facts)


# --- entropy and births ---------------------------------------------------------------------------------------------


def _entropy_panel(history: LoopHistory) -> Panel:
    """A row for each layer, the deepest on top, as the stream flows upwards; dark where heads look at many tokens."""
    layers = len(history.plan.layers)
    row = max(13.0, min(30.0, 330 / layers))
    return Panel(
        _entropy_caption(history), layers * row, Scale(0, layers), behind=partial(_heat_map, history),
        front=partial(_births, history), legend=_meanings(history),
    )  # fmt: skip


def _entropy_caption(history: LoopHistory) -> str:
    if not history.entropies:
        return "births of extra passes (no entropy was measured)"
    name = "mean attention entropy of the layer's heads"
    return name if history.observations else f"{name}, measured at decisions only"


def _meanings(history: LoopHistory) -> list[LegendEntry]:
    if not history.decisions:
        return []
    entries = [
        LegendEntry("birth of a layer's extra pass", lambda at: badge(at, 1, 7)),
        LegendEntry("on the shortlist at a decision", lambda at: [_shortlisted(at)]),
    ]
    return entries if history.fixed is None else [*entries, LegendEntry("growth has ended", strong_line_key)]


def _heat_map(history: LoopHistory, frame: Frame) -> list[str]:
    columns, layers = _columns(history, frame), len(history.plan.layers)
    low, high = 0.0, 1.0  # the same for all runs, so that they can be compared
    height = frame.height / layers - 1
    cells: dict[int, list[Box]] = defaultdict(list)
    rows = []
    for layer in range(layers):
        y = frame.y(layer + 1)
        rows.append(rect(frame.left, y, frame.width, height, GRID))
        for level, left, right in _runs([(_level(values[layer], low, high), a, b) for a, b, values in columns]):
            cells[level].append((left, y, right - left, height))
    rows += [boxes(where, shade(level / SHADES)) for level, where in sorted(cells.items())]
    return [*layer_names(frame, layers), *shade_bar(frame, low, high, SHADES), *rows, *_loops(history, frame)]


def _level(value: float, low: float, high: float) -> int | None:
    return round((value - low) / (high - low) * SHADES) if math.isfinite(value) else None


def _runs(cells: Sequence[tuple[int | None, float, float]]) -> list[tuple[int, float, float]]:
    """Cells in a row without those that are not known; neighbours of one shade become one cell."""
    runs: list[tuple[int, float, float]] = []
    for level, left, right in cells:
        if level is None:
            continue
        if runs and runs[-1][0] == level and runs[-1][2] == left:
            left = runs.pop()[1]
        runs.append((level, left, right))
    return runs


def _columns(history: LoopHistory, frame: Frame) -> list[tuple[float, float, list[float]]]:
    """Left and right ends of the columns of the heat map, and their values."""
    entropies = history.entropies
    if not history.observations:
        return [(max(frame.left, frame.x(step) - PROBE), frame.x(step), values) for step, values in entropies]
    stretch = math.ceil(len(entropies) / COLUMNS)
    chosen = [entropies[i : i + stretch] for i in range(0, len(entropies), stretch)]
    ends = [frame.left, *(frame.x(one[-1][0]) for one in chosen)]
    return [
        (left, right, [sum(values) / len(values) for values in zip(*(values for _, values in one), strict=True)])
        for (left, right), one in zip(pairwise(ends), chosen, strict=True)
    ]


def _loops(history: LoopHistory, frame: Frame) -> list[str]:
    """A line along every layer that is run again, from the first birth on, and the name of what is run again."""
    lines, names = [], []
    for index, layer in enumerate(history.structure(history.last_step).layers):
        if layer.loop is None and not layer.repeats:
            continue
        y, born = frame.y(index + 0.5), _born(history, frame, index)
        start = born[0] if born else frame.left  # what is there from the start was not born
        lines += [line((start, y), (frame.right, y), colour, width) for colour, width in ((BACKGROUND, 4), (ORANGE, 2))]
        size = min(12, frame.height / len(history.plan.layers) - 2)
        names.append(text((frame.end(), y), looped(layer), size=size, colour=ORANGE, bold=True))
    return [*lines, *names, caption(frame, "run again", frame.end())] if names else []


def _born(history: LoopHistory, frame: Frame, layer: int) -> list[float]:
    """Where the passes of a layer were born, from left to right."""
    return [frame.x(one.birth) for one in history.passes if one.layer == layer and one.birth > 0]


def _births(history: LoopHistory, frame: Frame) -> list[str]:
    """Every birth where it happened, with its number, and the layers that were on a shortlist but not chosen."""
    parts = [
        _shortlisted((frame.x(decision.step), frame.y(layer + 0.5)))
        for decision in history.decisions
        for layer in decision.facts.get("shortlist", ())
        if layer != decision.layer
    ]
    layers = len(history.plan.layers)
    for layer in range(layers):
        born = _born(history, frame, layer)
        radius = max(2.5, min(8.0, 0.46 * frame.height / layers, *(0.48 * (b - a) for a, b in pairwise(born))))
        for number, x in enumerate(born, 1):
            parts += badge((x, frame.y(layer + 0.5)), number, radius)
    return parts


def _shortlisted(at: Point) -> str:
    return circle(at, 2.6, BACKGROUND, INK)


# --- strengths and costs --------------------------------------------------------------------------------------------


def _strength_panel(history: LoopHistory) -> Panel:
    """A bar for each pass from its birth on, filled as far as the pass is strong."""
    fading = history.policy is not None and history.policy.birth == "paper"
    name = "strength of each pass (a full bar is 1)" + ("; heads that are not chosen fade first" if fading else "")
    layers = len({one.layer for one in history.passes})
    height = len(history.passes) * (LANE + LANE_GAP) - LANE_GAP + (layers - 1) * LAYER_GAP
    downwards = Scale(height, 0)  # in pixels
    return Panel(name, height, downwards, behind=partial(_lanes, history.passes))


def _lanes(passes: Sequence[PassHistory], frame: Frame) -> list[str]:
    parts = [row_caption(frame, "layer"), caption(frame, "at the end", frame.end())]
    top = 0  # of the next bar
    for layer, group in groupby(passes, key=lambda one: one.layer):
        parts.append(text((frame.left - 22, frame.y(top + LANE / 2)), f"{layer}", size=11, colour=MUTED, anchor="end"))
        for one in group:
            parts += _lane(one, frame, frame.y(top))
            top += LANE + LANE_GAP
        top += LAYER_GAP
    return parts


def _lane(one: PassHistory, frame: Frame, top: float) -> list[str]:
    middle, bottom, birth = top + LANE / 2, top + LANE, frame.x(one.birth)
    points = [(frame.x(step), bottom - LANE * min(1.0, max(0.0, value))) for step, value in one.strength]
    points = list({x // 2: (x, y) for x, y in points}.values())  # one in two pixels is enough
    return [
        line((frame.left, middle), (birth, middle), GRID),
        rect(birth, top, frame.right - birth, LANE, PALE),
        area(points, bottom, ORANGE),
        *badge((birth - 9, middle), one.number, LANE / 2),
        text((frame.end(), middle), f"{one.strength[-1][1]:.2f}", size=10.5),
    ]


def _cost_panel(history: LoopHistory) -> Panel:
    """Extra FLOPs per token, in percent."""
    most = 100 * max(extra for _, extra in history.cost)
    name = "extra FLOPs per token, percent"
    return Panel(name, COST_HEIGHT, Scale(0, 1.2 * most), ticks=3, front=partial(_cost, history))


def _cost(history: LoopHistory, frame: Frame) -> list[str]:
    """A staircase."""
    ends = [step for step, _ in history.cost[1:]] + [history.last_step]
    stairs = [
        (step, 100 * extra) for (start, extra), end in zip(history.cost, ends, strict=True) for step in (start, end)
    ]
    last = stairs[-1][1]
    label = EndLabel(frame.y(last), f"+{last:.1f}%", PURPLE)
    return [polyline(frame.place(stairs), PURPLE, 2), *end_labels(frame, [label])]
