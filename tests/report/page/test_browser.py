"""The page in a real browser: it draws without a complaint, and answers slider, pointer and keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Page, chromium
from meristem.plan import Plan
from meristem.report.page.file import report_page
from report.page.helpers import START, hand_made, long_run, metric
from report.page.test_data import grown_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium on this system; `make browser` installs one"),
]

HOSTILE = "</script><img src=x onerror='window.harm = 1'>"
SLIDER = "#time"
PLAN = Plan.from_heads([1, 1], width=32, head_dim=8, vocabulary=50, context=16)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name: of a long run, of one that grew, of one that did not and has odd names, empty, and several."""
    folder = tmp_path_factory.mktemp("pages")
    plain = {"train.steps": 40, "data.path": HOSTILE}
    lines = [metric(step, 3 - step / 40) for step in range(1, 31)]
    runs = {
        "long": long_run(folder / "long"),
        "grown": grown_run(folder / "grown"),
        "plain": hand_made(folder / "odd & <b>", PLAN, plain, metrics=lines, events=[{**START, "device": HOSTILE}]),
        "empty": hand_made(folder / "empty", PLAN),
    }
    written = {name: folder / f"{name}.html" for name in (*runs, "several")}
    for name, run in runs.items():
        written[name].write_text(report_page([run]), encoding="utf-8")
    written["several"].write_text(report_page([runs["grown"], runs["plain"], runs["empty"]]), encoding="utf-8")
    return written


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with Page() as page:
        yield page


@pytest.fixture
def grown(browser: Page, pages: dict[str, Path]) -> Page:
    browser.open(pages["grown"])
    return browser


def heads(page: Page) -> int:
    return page.run("document.querySelectorAll('#structure .head').length")


def text(page: Page, selector: str) -> str:
    return page.run(f"document.querySelector({json.dumps(selector)}).textContent")


def tip(page: Page, figure: str) -> str:
    return page.run(
        f"(() => {{ const t = document.querySelector('{figure} .tip'); return t.hidden ? '' : t.textContent }})()"
    )


@pytest.mark.parametrize("name", ["long", "grown", "plain", "empty", "several"])
def test_pages_draw_without_a_complaint_at_any_width(browser: Page, pages: dict[str, Path], name: str) -> None:
    try:
        for width in (1280, 390):
            browser.resize(width, 800, phone=width < 600)
            browser.open(pages[name])
            assert browser.complaints == []
            assert browser.run("document.documentElement.scrollWidth") <= width  # nothing sticks out
            assert browser.run("document.querySelectorAll('section').length") >= 7
            assert browser.run("window.harm") is None
    finally:
        browser.resize(1280, 900)


def test_the_slider_changes_the_picture(grown: Page) -> None:
    assert heads(grown) == 3
    grown.run(f"document.querySelector('{SLIDER}').focus()")
    grown.press("Home")
    assert heads(grown) == 2
    assert text(grown, "output") == "step 0 of 100"
    assert grown.run("document.querySelectorAll('#structure .loop').length") == 0
    grown.press("End")
    assert heads(grown) == 3
    assert grown.run("document.querySelectorAll('#structure .loop').length") == 1
    grown.press("ArrowLeft")
    assert text(grown, "output") == "step 99 of 100"
    grown.run("document.querySelector('#events button').click()")  # the first event: a birth at step 30
    assert text(grown, "output") == "step 30 of 100"
    assert "a head is born: layer 1 now has 2 heads" in text(grown, ".said")
    assert grown.run("document.querySelector('tr.current').dataset.row") == "0"
    assert grown.complaints == []


def test_the_buttons_stop_at_every_change(browser: Page, pages: dict[str, Path]) -> None:
    """Also at steps that the slider of a long run passes over."""
    browser.open(pages["long"])
    browser.run(f"document.querySelector('{SLIDER}').focus()")
    browser.press("Home")
    seen = []
    for _ in range(3):
        browser.run("document.querySelector('.time button:nth-of-type(2)').click()")
        seen.append(text(browser, "output"))
    assert seen == ["step 200 of 5,000", "step 230 of 5,000", "step 260 of 5,000"]
    browser.run("{ const s = document.getElementById('time'); s.step = 700; s.value = 0; }")  # coarser than the changes
    browser.run("document.querySelector('.time button:nth-of-type(2)').click()")
    assert text(browser, "output") == "step 290 of 5,000"
    browser.run("document.querySelector('.time button').click()")
    assert text(browser, "output") == "step 260 of 5,000"


def test_the_colours_follow_readings_in_time(grown: Page) -> None:
    fills = "[...document.querySelectorAll('#structure .head')].map((one) => one.getAttribute('fill'))"
    by_entropy = grown.run(fills)
    grown.run("document.querySelector('input[name=colour][value=demand]').click()")
    assert grown.run(fills) != by_entropy
    assert "measured at step 30" in text(grown, ".key")
    grown.run(f"{{const s = document.querySelector('{SLIDER}'); s.value = 5; s.dispatchEvent(new Event('input')); }}")
    assert set(grown.run(fills)) == {"var(--absent)"}  # nothing had been measured
    assert "not measured yet" in text(grown, ".key")


def test_hovering_shows_values(grown: Page) -> None:
    grown.hover("#loss figure svg", 0.5)
    shown = tip(grown, "#loss")
    step = int(shown.partition("step ")[2].partition("training")[0])
    assert abs(step - 48) < 6
    assert "training, as logged2.5" in shown  # 3 - step / 100 of the nearest line, at step 50
    grown.hover("#structure .head[data-layer='1']")
    assert "layer 1, head 0" in tip(grown, "#structure")
    assert "entropy 0.25" in tip(grown, "#structure")
    grown.hover("h1")
    assert tip(grown, "#loss") == ""


def test_keys_read_charts_and_reach_tables(grown: Page) -> None:
    grown.run("document.querySelector('#loss figure svg').focus()")
    grown.press("Home")
    assert tip(grown, "#loss").startswith("step 10")
    grown.press("ArrowRight")
    assert tip(grown, "#loss").startswith("step 20")
    assert "training, as logged 2.8" in text(grown, "#loss [aria-live]")
    grown.press("Escape")
    assert tip(grown, "#loss") == ""
    grown.run("document.querySelector('.switch-theme').focus()")
    reached = []
    for _ in range(45):
        grown.press("Tab")
        place = grown.run(
            "(() => { const a = document.activeElement; const s = getComputedStyle(a);"
            "return [a.id || a.getAttribute('aria-label') || a.name || a.tagName, s.outlineStyle] })()"
        )
        reached.append(tuple(place))
    names = [name for name, _ in reached]
    assert {"time", "events of growth", "events of the run", "colour"} <= set(names)
    hidden_inputs = ("colour", "axis-one")  # whose label shows the focus instead
    assert all(style != "none" for name, style in reached if name not in (*hidden_inputs, "BODY"))


def test_the_axis_can_be_steps_tokens_flops_or_seconds(browser: Page, pages: dict[str, Path]) -> None:
    browser.open(pages["several"])
    titles = "[...document.querySelectorAll('figure.chart svg')].map((one) => one.textContent)"
    assert all("steps" in one for one in browser.run(titles))
    assert browser.run(
        "document.querySelector('input[name=axis-all][value=tokens]').disabled"
    )  # the empty run has none
    browser.open(pages["grown"])
    for value, word in (("tokens", "tokens"), ("flops", "training FLOPs"), ("seconds", "seconds of training")):
        browser.run(f"document.querySelector('input[name=axis-one][value={value}]').click()")
        browser.run("new Promise((done) => setTimeout(done, 300))")  # charts that are not in view come later
        assert all(word in one for one in browser.run(titles))
    browser.hover("#loss figure svg", 0.5)
    assert "1" in tip(browser, "#loss")
    assert "s" in tip(browser, "#loss").partition("training")[0]
    assert browser.complaints == []


def test_one_of_several_runs_is_shown_in_detail(browser: Page, pages: dict[str, Path]) -> None:
    browser.open(pages["several"])
    assert heads(browser) == 3
    browser.run("{ const s = document.getElementById('which'); s.value = '1'; s.dispatchEvent(new Event('change')); }")
    assert heads(browser) == 2
    assert "growth.policies is empty" in text(browser, "#why")
    assert "held-out loss" in text(browser, "#compare")
    assert browser.complaints == []


def test_nothing_of_several_runs_is_cut_off_on_a_phone(browser: Page, pages: dict[str, Path]) -> None:
    try:
        browser.resize(390, 800, phone=True)
        browser.open(pages["several"])
        widths = browser.run(
            "[...document.querySelectorAll('#compare .scroll')].map((s) => [s.scrollWidth, s.clientWidth])"
        )
        assert len(widths) == 2
        assert all(inner <= outer for inner, outer in widths)
    finally:
        browser.resize(1280, 900)


def test_light_dark_and_print(grown: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = grown.run(colour)

    def prefer(scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        grown.send("Emulation.setEmulatedMedia", media="", features=features)
        grown.settle()

    prefer("dark")
    dark = grown.run(colour)
    assert dark != light
    switch = "document.querySelector('.switch-theme').click()"
    grown.run(switch)
    assert text(grown, ".switch-theme") == "Colours: light"
    assert grown.run(colour) == light
    prefer("light")
    grown.run(switch)
    assert grown.run(colour) == dark
    grown.run(switch)
    assert text(grown, ".switch-theme") == "Colours: auto"
    grown.send("Emulation.setEmulatedMedia", media="print")
    assert grown.run(colour) == "rgb(255, 255, 255)"
    assert grown.run("getComputedStyle(document.querySelector('.controls')).display") == "none"
    prefer("light")


def test_a_long_run_answers_at_once(browser: Page, pages: dict[str, Path]) -> None:
    """Looser than `make bench-page`, which measures it: tests share the machine."""
    from bench_page import interactions

    browser.open(pages["long"])
    for name, milliseconds in interactions(browser).items():
        assert milliseconds < 500, name
