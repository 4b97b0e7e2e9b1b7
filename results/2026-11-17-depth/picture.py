"""Draws docs/images/depth.svg: how far every fixed depth ends above the best one, for each budget of FLOPs.

    python results/2026-11-17-depth/picture.py

Of several rates the best counts. A ring is the depth that `depth` begins with.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

from meristem.growth.policies.depth import best_depth
from meristem.report.drawing.colours import BACKGROUND, BLUE, GREEN, MUTED, ORANGE
from meristem.report.drawing.elements import circle, document, dot, polyline, text
from meristem.report.drawing.frame import EndLabel, Frame, bottom_axis, caption, end_labels, grid
from meristem.report.drawing.scales import LogScale, Scale, Tick

HERE = Path(__file__).parent
MADE_FROM = {
    "first.jsonl": (768, ("0",)),
    "cpu-fixed.jsonl": (64, ("100",)),
    "rule-test.jsonl": (96, ("100",)),
}  # width, seeds
TESTED_ON = {"rule-test-2.jsonl": (0, ("0", "1", "2"))}  # the width is in the line
LONG = {(96, 9.44e12): 10_000, (128, 1.59e13): 10_000}  # updates of one block, where no such run was made
COLOURS = {768: BLUE, 256: BLUE, 96: GREEN, 128: ORANGE, 64: ORANGE}
DEPTHS = (1, 2, 3, 4, 6, 8, 12)
MOST = 0.45  # nats
# Runs end an update short of theirs.
BUDGETS = (
    6.75e15,
    1.35e16,
    1.5e11,
    6e11,
    2.4e12,
    5.67e11,
    2.36e12,
    9.44e12,
    9.52e11,
    3.97e12,
    1.59e13,
    1.39e13,
    1.89e13,
)

Budget = tuple[int, float, int]  # width, FLOPs, tokens of an update


class Depths(LogScale):
    def ticks(self, count: int) -> list[Tick]:
        return [(depth, str(depth)) for depth in DEPTHS]


def given(line: str, option: str, otherwise: str) -> str:
    found = re.search(rf"--{option} (\S+)", line)
    return found[1] if found else otherwise


def losses(files: dict[str, tuple[int, tuple[str, ...]]]) -> tuple[dict[Budget, dict[int, float]], dict[Budget, int]]:
    """The loss of every depth at its best rate, the mean over its seeds; and the updates of one block."""
    runs: dict[Budget, dict[int, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    updates: dict[Budget, int] = {}
    for file, (usual, seeds) in files.items():
        for entry in map(json.loads, (HERE / file).read_text().splitlines()):
            line, seed = entry["line"], given(entry["line"], "train.seed", ("0",))
            width = int(given(line, "model.width", str(usual)))
            alone = seed == "100" and width != 128  # no other seed was run there
            if "growth.policies" in line or not (seed in seeds or alone):
                continue
            flops = min(BUDGETS, key=lambda budget: abs(math.log(budget / entry["flops"])))
            budget = width, flops, round(entry["tokens"] / entry["steps"])
            depth = int(given(line, "model.layers", "12"))
            runs[budget][depth][given(line, "optimizer.lr", "")].append(entry["held_out"])
            updates[budget] = entry["steps"] if depth == 1 else updates.get(budget, LONG.get((width, flops), 0))
    return {
        budget: {depth: min(map(mean, rates.values())) for depth, rates in sorted(depths.items())}
        for budget, depths in sorted(runs.items())
    }, updates


def panel(frame: Frame, title: str, files: dict[str, tuple[int, tuple[str, ...]]]) -> list[str]:
    parts = [caption(frame, title), *grid(frame, 5)]
    labels = []
    found, updates = losses(files)
    for budget, depths in found.items():
        width, flops, tokens = budget
        points = [(depth, loss - min(depths.values())) for depth, loss in depths.items()]
        colour, places = COLOURS[width], frame.place(points)
        start = best_depth(updates[budget], tokens)
        rings = [
            circle(at, 7, BACKGROUND, colour) for at, (depth, _) in zip(places, points, strict=True) if depth == start
        ]
        parts.append(frame.clipped(polyline(places, colour, 2), *rings, *(dot(at, 3, colour) for at in places)))
        last = next((y for _, y in reversed(points) if y <= MOST), 0.0)
        labels.append(EndLabel(frame.y(last), f"width {width}, {flops:.3g} FLOPs".replace("e+", "e"), colour))
    return [*parts, *end_labels(frame, labels, 11), *bottom_axis(frame, "blocks")]


def main() -> None:
    made = Frame(70, 110, 620, 240, Depths(0.93, 13), Scale(-0.01, MOST))
    tested = Frame(70, 450, 620, 240, Depths(0.93, 13), Scale(-0.01, MOST))
    parts = [
        *panel(
            made, "budgets that the rule was made from: held-out loss above that of the best depth (nats)", MADE_FROM
        ),
        *panel(tested, "budgets that it was tested on afterwards", TESTED_ON),
        text((tested.left, tested.bottom + 58), "ring: what `depth` begins with", size=11, colour=MUTED),
    ]
    facts = "equal FLOPs on every line, each depth at the best rate tried"
    svg = document(made.right + 210, tested.bottom + 80, "Every budget has its best depth", facts, parts)
    (HERE.parents[1] / "docs/images/depth.svg").write_text(svg)


if __name__ == "__main__":
    main()
