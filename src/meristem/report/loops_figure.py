"""The picture of a run that grew, or that watched its heads: entropies, births, strengths and costs over the steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from meristem.report.figures import LABEL_WIDTH, PLOT_LEFT, PLOT_WIDTH, Frame, heading, looped, step_axis
from meristem.report.loop_history import History, PassHistory
from meristem.report.panels import GAP, TOP, badge, caption, shade
from meristem.report.svg import (
    BACKGROUND,
    GRID,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    Box,
    area,
    boxes,
    circle,
    document,
    line,
    nice_ticks,
    polyline,
    rect,
    text,
    tick_labels,
)
from meristem.wording import counted

SHADES, COLUMNS = 32, 175  # of the heat map at most: its columns are then 4 pixels wide
PROBE = 8  # pixels of a column, where entropy is only known at decisions
PALE = "#fbe3d3"  # what is not filled yet of a bar
LANE, LANE_GAP, LAYER_GAP = 11, 3, 4
COST_HEIGHT = 64


def growth_svg(history: History, title: str = "") -> str:
    """A heat map of the layers' entropies with the births in it, the strength of every pass, and the extra FLOPs."""
    layers = len(history.plan.layers)
    row = max(13.0, min(30.0, 330 / layers))
    panels = [Frame(PLOT_LEFT, TOP, PLOT_WIDTH, layers * row, max(1, history.last_step), 0, layers)]
    parts = [*_heat_map(history, panels[0]), *_loops(history, panels[0])]
    if history.passes:
        panels.append(replace(panels[0], top=panels[-1].bottom + GAP, height=_lanes_height(history.passes)))
        parts += _lanes(history, panels[-1])
    most = 100 * max(extra for _, extra in history.cost)
    if most > 0:
        panels.append(replace(panels[0], top=panels[-1].bottom + GAP, height=COST_HEIGHT, high=1.2 * most))
        parts += _cost(history, panels[-1])
    bottom = panels[-1].bottom
    parts += step_axis(panels[-1])
    if history.decisions:
        parts += _legend(history, bottom + 66)
    name, width = title or "Growth", PLOT_LEFT + PLOT_WIDTH + LABEL_WIDTH
    height = bottom + (86 if history.decisions else 58)
    return document(width, height, name, [*heading(name, _facts(history), width), *parts])


def _facts(history: History) -> str:
    grown = history.state(history.last_step).grown
    facts = [f"{history.last_step:,} steps"]
    if grown:
        births = sum(len(one.births) for one in grown)
        facts.append(f"{counted(len(grown), 'layer')} grew {counted(births, 'pass', 'es')}")
    if history.fixed is not None:
        facts.append(f"fixed at step {history.fixed:,}")
    if (now := history.cost[-1][1]) > 0:
        share = f" at the end, {history.mean_cost:.1%} over the run" if grown else " from the start"
        facts.append(f"{now:.1%} more FLOPs per token{share}")
    return "; ".join(facts)


# --- entropy --------------------------------------------------------------------------------------------------------


def _heat_map(history: History, frame: Frame) -> list[str]:
    """A row for each layer, the deepest on top, as the stream flows upwards; dark where heads look at many tokens."""
    columns = _columns(history, frame)
    low, high = 0.0, 1.0  # the same for all runs, so that they can be compared
    row = frame.height / frame.high
    cells: dict[int, list[Box]] = defaultdict(list)
    parts = [caption(frame, "layer", left=True), caption(frame, _entropy_caption(history))]
    for layer in range(len(history.plan.layers)):
        y = frame.y(layer + 1)
        label = (frame.left - 10, y + row / 2)
        parts.append(text(label, f"{layer}", size=min(12, row - 2), colour=MUTED, anchor="end"))
        parts.append(rect(frame.left, y, frame.width, row - 1, GRID))
        for level, left, right in _runs([(_level(values[layer], low, high), a, b) for a, b, values in columns]):
            cells[level].append((left, y, right - left, row - 1))
    parts += [boxes(where, shade(level / SHADES)) for level, where in sorted(cells.items())]
    return parts + _scale(frame, low, high)


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


def _columns(history: History, frame: Frame) -> list[tuple[float, float, list[float]]]:
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


def _entropy_caption(history: History) -> str:
    name = "mean attention entropy of the layer's heads"
    return name if history.observations else f"{name}, measured at decisions only"


def _scale(frame: Frame, low: float, high: float) -> list[str]:
    """Which shade is which entropy."""
    width, y = 96, frame.top - 14
    left, pitch = frame.right - width - 24, width / SHADES
    return [
        text((left - 6, y), f"{low:.1f}", size=11, colour=MUTED, anchor="end"),
        *(boxes([(left + i * pitch, y - 5, pitch, 10)], shade(i / (SHADES - 1))) for i in range(SHADES)),
        text((left + width + 6, y), f"{high:.1f}", size=11, colour=MUTED),
    ]


# --- births ---------------------------------------------------------------------------------------------------------


def _loops(history: History, frame: Frame) -> list[str]:
    """Every birth where it happened, with its number, and a line from there to the name of what is run again."""
    row = frame.height / frame.high
    lines, births, names = [], [], []
    for index, layer in enumerate(history.structure(history.last_step).layers):
        if layer.loop is None and not layer.repeats:
            continue
        y = frame.y(index + 0.5)
        born = [frame.x(one.birth) for one in history.passes if one.layer == index and one.birth > 0]
        start = born[0] if born else frame.left  # what is there from the start was not born
        lines += [line((start, y), (frame.right, y), colour, width) for colour, width in ((BACKGROUND, 4), (ORANGE, 2))]
        radius = max(2.5, min(8.0, 0.46 * row, *(0.48 * (b - a) for a, b in pairwise(born))))
        births += [part for number, x in enumerate(born, 1) for part in badge((x, y), number, radius)]
        names.append(text((frame.right + 12, y), looped(layer), size=min(12, row - 2), colour=ORANGE, bold=True))
    if names:
        names.append(caption(frame, "run again", right=True))
    shortlists = [
        circle((frame.x(decision["step"]), frame.y(layer + 0.5)), 2.6, BACKGROUND, INK)
        for decision in history.decisions
        for layer in decision["shortlist"]
        if layer != decision["layer"]
    ]
    return [*lines, *_fixed(history, frame), *shortlists, *births, *names]


def _fixed(history: History, frame: Frame) -> list[str]:
    """A line where growth ended."""
    if history.fixed is None:
        return []
    top, bottom = ((frame.x(history.fixed), y) for y in (frame.top - 4, frame.bottom + 4))
    return [line(top, bottom, BACKGROUND, 3), line(top, bottom, INK, 1.5, dash="5 3")]


def _legend(history: History, y: float) -> list[str]:
    x = PLOT_LEFT + 8
    parts = [
        *badge((x, y), 1, 7),
        text((x + 14, y), "birth of a layer's extra pass", size=11),
        circle((x + 230, y), 2.6, BACKGROUND, INK),
        text((x + 240, y), "on the shortlist at a decision", size=11),
    ]
    if history.fixed is not None:
        parts.append(line((x + 460, y - 8), (x + 460, y + 8), INK, 1.5, dash="5 3"))
        parts.append(text((x + 470, y), "growth has ended", size=11))
    return parts


# --- strengths and costs --------------------------------------------------------------------------------------------


def _lanes_height(passes: Sequence[PassHistory]) -> float:
    layers = len({one.layer for one in passes})
    return len(passes) * (LANE + LANE_GAP) - LANE_GAP + (layers - 1) * LAYER_GAP


def _lanes(history: History, frame: Frame) -> list[str]:
    """A bar for each pass from its birth on, filled as far as the pass is strong."""
    fading = history.policy is not None and history.policy.birth == "paper"
    content = "strength of each pass (a full bar is 1)" + ("; heads that are not chosen fade first" if fading else "")
    parts = [caption(frame, "layer", left=True), caption(frame, content), caption(frame, "at the end", right=True)]
    top = frame.top
    for layer, group in groupby(history.passes, key=lambda one: one.layer):
        parts.append(text((frame.left - 22, top + LANE / 2), f"{layer}", size=11, colour=MUTED, anchor="end"))
        for one in group:
            middle, bottom, birth = top + LANE / 2, top + LANE, frame.x(one.birth)
            points = [(frame.x(step), bottom - LANE * min(1.0, max(0.0, value))) for step, value in one.strength]
            points = list({x // 2: (x, y) for x, y in points}.values())  # one in two pixels is enough
            parts += [
                line((frame.left, middle), (birth, middle), GRID),
                rect(birth, top, frame.right - birth, LANE, PALE),
                area(points, bottom, ORANGE),
                *badge((birth - 9, middle), one.number, LANE / 2),
                text((frame.right + 12, middle), f"{one.strength[-1][1]:.2f}", size=10.5),
            ]
            top += LANE + LANE_GAP
        top += LAYER_GAP
    return parts + _fixed(history, frame)


def _cost(history: History, frame: Frame) -> list[str]:
    """Extra FLOPs per token, in percent, as a staircase."""
    parts = [caption(frame, "extra FLOPs per token, percent")]
    ticks = nice_ticks(0, frame.high, 3)
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        parts.append(line((frame.left, frame.y(tick)), (frame.right, frame.y(tick))))
        parts.append(text((frame.left - 10, frame.y(tick)), label, size=11, colour=MUTED, anchor="end"))
    ends = [step for step, _ in history.cost[1:]] + [history.last_step]
    stairs = [
        (step, 100 * extra) for (start, extra), end in zip(history.cost, ends, strict=True) for step in (start, end)
    ]
    last = stairs[-1][1]
    return [
        *parts,
        *_fixed(history, frame),
        polyline(frame.place(stairs), PURPLE, 2),
        text((frame.right + 12, frame.y(last)), f"+{last:.1f}%", colour=PURPLE, bold=True),
    ]
