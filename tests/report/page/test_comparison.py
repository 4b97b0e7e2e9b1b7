"""The page of a comparison: what it is given to draw, and that it is whole and harmless."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Page, chromium
from comparison.helpers import comparison, results, tables
from meristem.comparison.analysis import analyse, reported
from meristem.comparison.file import Comparison
from meristem.report.page.comparison import comparison_data, comparison_page, mean_curve
from report.page.test_page import Read

LOSSES = {"uniform": [3.0, 3.2, 3.1, 3.05], "prism": [2.9, 3.11, 2.99, 2.95], "reverse": [3.01, 3.17, 3.13, 3.04]}
HOSTILE = "</script><img src=x onerror='window.harm = 1'>"


def asked(folder: Path) -> Comparison:
    arms = {**tables()["arms"], "reverse": {"model.schedule": "reverse"}}
    return comparison(folder, arms=arms, seeds=[0, 1, 2, 3], margin=0.1)


def page(found: Comparison, losses: dict[str, list[float]]) -> str:
    known = results(losses)
    return comparison_page(found, analyse(found, known), reported(found, known))


def test_data_are_those_of_the_analysis(tmp_path: Path) -> None:
    found, known = asked(tmp_path), results(LOSSES)
    analysis = analyse(found, known)
    data = comparison_data(found, analysis, reported(found, known))
    assert [line["kind"] for line in data["contrasts"]] == ["better", "open"]
    assert data["contrasts"][0]["seeds"] == [[s, LOSSES["prism"][s] - LOSSES["uniform"][s]] for s in range(4)]
    assert [arm["name"] for arm in data["curves"]["arms"]] == ["uniform", "prism", "reverse"]
    assert data["tables"]["Contrasts"]["rows"][0][5] == "better"  # bold in Markdown
    numbers = [column["title"] for column in data["tables"]["Results"]["columns"] if not column["number"]]
    assert numbers == ["arm", "final structure"]


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    read = Read(page(asked(tmp_path), LOSSES))
    assert read.links == ["data:,"]
    data = json.loads(read.scripts[0])
    assert data["title"] == "question"
    assert data["better"] == "Left"


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    """Names of arms are plain, but values of a grid are anything."""
    found = comparison(tmp_path, sweep={"data.path": [HOSTILE, "b&b"]})
    text = page(found, {arm: [3.0, 3.1] for arm in found.arms})
    assert HOSTILE not in text
    assert any(HOSTILE in line["name"] for line in json.loads(Read(text).scripts[0])["contrasts"])


def test_means_are_of_steps_that_all_curves_have() -> None:
    assert mean_curve([[(0, 1.0), (2, 3.0)], [(0, 3.0), (1, 9.0), (2, 5.0)]]) == [(0, 2.0), (2, 4.0)]
    assert mean_curve([[(1, 4.0)], [(2, 5.0)]]) == [(1, 4.0)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with Page() as page:
        yield page


@pytest.mark.browser
@pytest.mark.skipif(chromium() is None, reason="no Chromium on this system; `make browser` installs one")
class TestInABrowser:
    """What is drawn."""

    @pytest.mark.parametrize("name", ["done", "empty", "hostile"])
    def test_it_draws_without_a_complaint_at_any_width(self, browser: Page, tmp_path: Path, name: str) -> None:
        hostile = comparison(tmp_path, sweep={"data.path": [HOSTILE, "b&b"]})
        losses = {arm: [3.0, 3.1] for arm in hostile.arms}
        texts = {"done": (asked(tmp_path), LOSSES), "empty": (asked(tmp_path), {}), "hostile": (hostile, losses)}
        file = tmp_path / "page.html"
        file.write_text(page(*texts[name]), encoding="utf-8")
        try:
            for width in (1280, 390):
                browser.resize(width, 800, phone=width < 600)
                browser.open(file)
                assert browser.complaints == []
                assert browser.run("document.documentElement.scrollWidth") <= width
                assert browser.run("window.harm") is None
                lines = browser.run("document.querySelectorAll('.differences g').length")
                assert lines == {"done": 2, "empty": 0, "hostile": 2}[name]
        finally:
            browser.resize(1280, 900)

    def test_long_names_keep_both_arms(self, browser: Page, tmp_path: Path) -> None:
        """What does not fit is cut from each name, not from the end of both."""
        arm, other, file = "arm-with-a-long-name-" * 3, "baseline-with-a-long-name-" * 3, tmp_path / "page.html"
        for names in ((arm, "uniform"), ("prism", other), (arm, other)):
            arms = dict(zip(reversed(names), tables()["arms"].values(), strict=True))
            found = comparison(tmp_path, arms=arms, primary=list(names))
            file.write_text(page(found, {names[0]: [2.9, 3.1], names[1]: [3.0, 3.15]}), encoding="utf-8")
            browser.open(file)
            first, second = browser.run("document.querySelector('.differences .label').lastChild.data").split(" minus ")
            assert len(first) + len(second) == 46 - len(" minus ")
            assert browser.run("document.querySelector('.differences .label').getBBox().x") >= 0
            for name, whole in zip((first, second), names, strict=True):
                assert name == whole or (name.endswith("…") and whole.startswith(name[:-1]) and len(name) > 15)

    def test_intervals_lie_where_they_are(self, browser: Page, tmp_path: Path) -> None:
        """Means in the middle of their intervals, and places in proportion to the numbers that the axis names."""
        file = tmp_path / "page.html"
        file.write_text(page(asked(tmp_path), LOSSES), encoding="utf-8")
        browser.open(file)
        drawn = browser.run(
            "[...document.querySelectorAll('.differences g')].map((g) => { const l = g.querySelector('line'),"
            " c = g.querySelector('circle'); return [l, l, c].map((e, i) =>"
            " Number(e.getAttribute(['x1', 'x2', 'cx'][i]))) })"
        )
        ticks = browser.run(
            "[...document.querySelectorAll('.differences text[text-anchor=middle]')].map((t) =>"
            " [t.textContent, Number(t.getAttribute('x'))])"
        )
        (first, left), (last, right) = ((float(text), x) for text, x in (ticks[0], ticks[-1]))
        known = results(LOSSES)
        for (low, high, mean), line in zip(drawn, analyse(asked(tmp_path), known).contrasts, strict=True):
            assert mean == pytest.approx((low + high) / 2, abs=0.01)
            for place, value in ((low, line.difference.low), (high, line.difference.high)):
                share = (value - first) / (last - first)
                assert place == pytest.approx(left + share * (right - left), abs=0.1)

    def test_an_arm_can_be_hidden_with_its_seeds(self, browser: Page, tmp_path: Path) -> None:
        file = tmp_path / "page.html"
        file.write_text(page(asked(tmp_path), LOSSES), encoding="utf-8")
        browser.open(file)
        count = "document.querySelectorAll('#curves path[stroke]').length"
        assert browser.run(count) == 3 * 5
        browser.run("document.querySelector('#curves .legend button').click()")
        assert browser.run(count) == 2 * 5
        names = browser.run("[...document.querySelectorAll('#curves .legend button')].map((b) => b.textContent)")
        assert [re.sub(r"\s", "", name) for name in names] == ["uniform", "prism", "reverse"]
