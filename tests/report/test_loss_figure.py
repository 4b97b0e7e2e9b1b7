"""The picture of the losses shows their course and their ends, and gaps where they are not known."""

from __future__ import annotations

import math
import random
import re

import pytest

from meristem.report.drawing.colours import BLUE, ORANGE
from meristem.report.loss_figure import loss_svg
from report.helpers import SVG, Element, assert_labels_are_inside_and_apart, parsed, texts


def curve(steps: int, noise: float = 0.08) -> list[tuple[int, float]]:
    generator = random.Random(0)
    return [(s, 3.2 + 7.7 * math.exp(-25 * s / steps) + generator.gauss(0, noise)) for s in range(steps)]


def strokes(root: Element, colour: str) -> list[str]:
    return [node.get("d", "") for node in root.iter(f"{SVG}path") if node.get("stroke") == colour]


def test_loss_labels() -> None:
    held_out = [(s, loss + 0.05) for s, loss in curve(1000, noise=0)[::100]] + [(999, 3.251)]
    root = parsed(loss_svg(curve(1000), held_out, "124M", tokens_per_step=2**18))
    assert {"124M", "steps", "tokens", "250M", "held-out 3.251"} <= set(texts(root))
    label = next(content for content in texts(root) if content.startswith("training"))
    assert float(label.split()[1]) == pytest.approx(3.2, abs=0.05)  # smoothed, where single losses scatter by 0.08
    assert_labels_are_inside_and_apart(root)


def test_first_steps_do_not_squash_the_curve() -> None:
    root = parsed(loss_svg(curve(1000), []))
    scale = [float(content) for content in texts(root) if re.fullmatch(r"\d\.\d+", content)]
    assert max(scale) < 5
    assert any("off the scale" in content and "at step 0" in content for content in texts(root))


def test_a_divergence_stays_in_view() -> None:
    train = [(s, 3.0 if s < 800 else 3.0 + (s - 800) / 40) for s in range(1000)]
    root = parsed(loss_svg(train, []))
    assert not any("off the scale" in content for content in texts(root))


def test_gaps_interrupt_the_lines() -> None:
    train = [(s, math.nan if 400 <= s < 450 else 3.0 - s / 1000) for s in range(900)]
    root = parsed(loss_svg(train, [(0, 3.0), (300, math.inf), (600, 2.5), (899, 2.2)]))
    assert [path.count("M") for path in strokes(root, BLUE)] == [2, 2]
    assert [path.count("M") for path in strokes(root, ORANGE)] == [2]
    assert "nan" not in "".join(strokes(root, BLUE) + strokes(root, ORANGE))


def test_long_logs_make_small_files() -> None:
    assert len(loss_svg(curve(100_000), [])) < 60_000


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ([], []),
        ([(0, math.nan)], []),
        ([(0, 5.0)], []),
        ([(3, 0.0)], []),
        ([], [(10, 3.1)]),
        ([(s, 2.0) for s in range(10)], [(0, 2.0), (9, 2.0)]),
        ([(0, 9.0), *((s, math.nan) for s in range(1, 2000))], [(0, math.nan)]),
        ([(1, 1e9), (2, 3.0)], []),
        ([(1, 3.0), (2, 1e9)], [(2, 1e12)]),
    ],
)
def test_few_odd_or_missing_losses(train: list[tuple[int, float]], held_out: list[tuple[int, float]]) -> None:
    for tokens in (None, 1, 2**19):
        root = parsed(loss_svg(train, held_out, tokens_per_step=tokens))
        assert_labels_are_inside_and_apart(root)
        known = any(math.isfinite(loss) for _, loss in [*train, *held_out])
        assert ("no losses yet" in texts(root)) != known
