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

from meristem.growth.policies.depth import best_depth
from meristem.report.drawing.colours import BACKGROUND, BLUE, GREEN, MUTED, ORANGE
from meristem.report.drawing.elements import circle, document, dot, polyline, text
from meristem.report.drawing.frame import EndLabel, Frame, bottom_axis, caption, end_labels, grid
from meristem.report.drawing.scales import LogScale, Scale, Tick

HERE = Path(__file__).parent
FILES = {"first.jsonl": (768, 0), "cpu-fixed.jsonl": (64, 100), "rule-test.jsonl": (96, 100)}  # width, seed
COLOURS = {768: BLUE, 96: GREEN, 64: ORANGE}
DEPTHS = (1, 2, 3, 4, 6, 8, 12)
MOST = 0.45  # nats


class Depths(LogScale):
    def ticks(self, count: int) -> list[Tick]:
        return [(depth, str(depth)) for depth in DEPTHS]


BUDGETS = (6.75e15, 1.35e16, 1.5e11, 6e11, 2.4e12, 5.67e11, 2.36e12, 9.44e12)  # runs end an update short of theirs


def budget_of(flops: float) -> float:
    return min(BUDGETS, key=lambda budget: abs(math.log(budget / flops)))


def depth_of(line: str) -> int:
    given = re.search(r"--model.layers (\d+)", line)
    return int(given[1]) if given else 12


def losses(file: str, width: int, seed: int) -> dict[tuple[int, float, int], dict[int, float]]:
    """The best loss of every depth, by width, FLOPs and tokens of an update."""
    found: dict[tuple[int, float, int], dict[int, float]] = defaultdict(dict)
    for entry in map(json.loads, (HERE / file).read_text().splitlines()):
        line = entry["line"]
        if "growth.policies" in line or f"--train.seed {seed} " not in f"{line} ":
            continue
        depth = depth_of(line)
        budget = width, budget_of(entry["flops"]), round(entry["tokens"] / entry["steps"])
        found[budget][depth] = min(entry["held_out"], found[budget].get(depth, math.inf))
    return found


def updates_of_one_block() -> dict[tuple[int, float], int]:
    """By width and FLOPs, from the runs of one block, or their names."""
    known = {(96, 9.44e12): 10_000}
    for file, (width, _) in FILES.items():
        for entry in map(json.loads, (HERE / file).read_text().splitlines()):
            if re.search(r"--model.layers 1 ", entry["line"]) and "growth.policies" not in entry["line"]:
                known[width, budget_of(entry["flops"])] = entry["steps"]
    return known


def main() -> None:
    frame = Frame(70, 90, 620, 330, Depths(0.93, 13), Scale(-0.01, MOST))
    parts = [caption(frame, "held-out loss above that of the best depth (nats)"), *grid(frame, 5)]
    labels, updates = [], updates_of_one_block()
    for file, (width, seed) in FILES.items():
        for (_, flops, tokens), found in sorted(losses(file, width, seed).items()):
            points = [(depth, loss - min(found.values())) for depth, loss in sorted(found.items())]
            colour = COLOURS[width]
            places = frame.place(points)
            start = best_depth(updates[width, flops], tokens)
            rings = [
                circle(at, 7, BACKGROUND, colour)
                for at, (depth, _) in zip(places, points, strict=True)
                if depth == start
            ]
            parts.append(frame.clipped(polyline(places, colour, 2), *rings, *(dot(at, 3, colour) for at in places)))
            last = next((y for _, y in reversed(points) if y <= MOST), 0.0)
            labels.append(EndLabel(frame.y(last), f"width {width}, {flops:.3g} FLOPs".replace("e+", "e"), colour))
    parts += end_labels(frame, labels, 11)
    parts += bottom_axis(frame, "blocks")
    parts.append(text((frame.left, frame.bottom + 58), "ring: what `depth` begins with", size=11, colour=MUTED))
    facts = "equal FLOPs on every line, one seed, each depth at the best rate tried"
    svg = document(frame.right + 210, frame.bottom + 80, "Every budget has its best depth", facts, parts)
    (HERE.parents[1] / "docs/images/depth.svg").write_text(svg)


if __name__ == "__main__":
    main()
