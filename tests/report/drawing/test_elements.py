"""Elements of SVG are what they are asked to be."""

from __future__ import annotations

import math

from meristem.report.drawing.colours import BLUE
from meristem.report.drawing.elements import band, document, fit
from report.helpers import parsed, texts


def test_fit() -> None:
    assert fit("short", 500, 12) == "short"
    assert fit("a" * 100, 116, 10) == "a" * 19 + "…"


def test_a_band_is_interrupted() -> None:
    path = band([(0, 1, 2), (1, 1, 2), (2, math.nan, 2), (3, 1, 2)], BLUE, 0.5)
    assert 'd="M0 1L1 1L1 2L0 2zM3 1L3 2z"' in path


def test_a_document_has_its_title_and_facts_over_it() -> None:
    root = parsed(document(300, 100, "<A & B>", "12 steps", []))
    assert texts(root) == ["<A & B>", "12 steps"]
    assert root[0].text == "<A & B>"
