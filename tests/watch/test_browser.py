"""The page in a real browser: it follows a run by itself, and the reader keeps their place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Page, chromium
from report.page.helpers import long_run
from watch.helpers import FINISHED, append, begun, birth, keep_lines, served, timed

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium on this system; `make browser` installs one"),
]

ASK = "document.dispatchEvent(new Event('visibilitychange'))"  # as when one comes back to it, instead of waiting
SAID = "document.querySelector('.live').innerText"
SLIDER = "document.getElementById('time')"
HEADS = "document.querySelectorAll('#structure .head').length"
OUTPUT = "document.querySelector('output').textContent"


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with Page() as page:
        yield page


def test_the_page_follows_a_run_from_before_it_begins_to_its_end(browser: Page, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with served(run) as server:
        browser.visit(server.url)
        assert "is not there yet" in browser.run(SAID)
        begun(run)
        browser.run(ASK)
        browser.wait_for(f"{HEADS} === 2")
        browser.wait_for(f"{SAID}.includes('At work: step 10 of 100.')")
        assert "epoch 0.05, 0:30 elapsed, 3:00 left" in browser.run(SAID)
        assert browser.run("document.title").startswith("10 % · Language model")
        append(run, "metrics", *map(timed, range(11, 41)))
        append(run, "events", birth(30))
        browser.run(ASK)
        browser.wait_for(f"{HEADS} === 3")
        assert browser.run(OUTPUT) == "step 40 of 100"
        keep_lines(run, "metrics", 20)  # went back
        keep_lines(run, "events", 1)
        browser.run(ASK)
        browser.wait_for(f"{HEADS} === 2")
        append(run, "metrics", timed(100))
        append(run, "events", FINISHED)
        browser.run(ASK)
        browser.wait_for(f"{SAID}.includes('Finished: 100 steps.')")
        shutil.rmtree(run)
        browser.run(ASK)
        browser.wait_for(f"{SAID}.includes('is gone')")
        assert browser.run(HEADS) == 2
        assert browser.complaints == []


def test_the_page_asks_by_itself(browser: Page, tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with served(run) as server:
        browser.visit(server.url)
        append(run, "metrics", timed(11))
        browser.wait_for(f"{SAID}.includes('step 11 of 100')")


def test_the_reader_keeps_their_place(browser: Page, tmp_path: Path) -> None:
    run = begun(tmp_path / "run", 80)
    append(run, "events", birth(30))
    with served(run) as server:
        browser.visit(server.url)
        browser.run(f"{{ const s = {SLIDER}; s.value = 50; s.dispatchEvent(new Event('input')); }}")
        browser.run("document.querySelector('input[name=colour][value=demand]').click()")
        browser.run("document.querySelector('input[name=axis-one][value=tokens]').click()")
        browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        browser.run("document.querySelector('#loss input[type=checkbox]').click()")
        browser.run("document.querySelector('#loss .legend button').click()")  # hides a line
        pick = "document.querySelector('#why select')"
        browser.run(f"{{ const s = {pick}; s.value = '1'; s.dispatchEvent(new Event('change')); s.focus(); }}")
        browser.run("document.getElementById('why').scrollIntoView({ behavior: 'instant' })")
        browser.settle()
        place = "Math.round(document.getElementById('why').getBoundingClientRect().top)"
        before = browser.run(place)
        append(run, "metrics", timed(90))
        browser.run(ASK)
        browser.wait_for("page.runs[0].last_step === 90")
        browser.settle()
        assert browser.run(OUTPUT) == "step 50 of 100"
        assert browser.run(f"{SLIDER}.value") == "50"
        assert browser.run("document.querySelector('input[name=colour]:checked').value") == "demand"
        assert browser.run("document.querySelector('input[name=axis-one]:checked').value") == "tokens"
        assert browser.run("[...document.querySelectorAll('details')].every((one) => one.open)")
        assert browser.run("document.querySelector('#loss input[type=checkbox]').checked")
        assert browser.run("document.querySelector('#loss .legend button').getAttribute('aria-pressed')") == "false"
        assert browser.run(f"{pick}.value") == "1"
        assert browser.run(f"document.activeElement === {pick}")
        assert browser.run(place) == before
        assert browser.run("document.querySelectorAll('#why figure select').length") == browser.run(
            "document.querySelectorAll('#why figure .controls').length"
        )
        browser.run(f"{{ const s = {SLIDER}; s.value = s.max; s.dispatchEvent(new Event('input')); }}")
        append(run, "metrics", timed(100))
        browser.run(ASK)
        browser.wait_for(f"{OUTPUT} === 'step 100 of 100'")  # at the end the slider follows
        assert browser.complaints == []


def test_nothing_moves_while_a_slider_is_held(browser: Page, tmp_path: Path) -> None:
    run = begun(tmp_path / "run", 80)
    append(run, "events", birth(30))
    with served(run) as server:
        browser.visit(server.url)
        browser.run(f"window.held = {SLIDER}; held.dispatchEvent(new PointerEvent('pointerdown', {{ bubbles: true }}))")
        append(run, "metrics", timed(90))
        browser.run(ASK)
        browser.wait_for(f"{SAID}.includes('step 90 of 100')")
        assert browser.run(f"held === {SLIDER}")
        browser.run("held.dispatchEvent(new PointerEvent('pointerup', { bubbles: true }))")
        browser.wait_for(f"held !== {SLIDER}")


def test_a_server_that_ends_leaves_the_page_as_it_is(browser: Page, tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with served(run) as server:
        port = server.server_address[1]
        browser.visit(server.url)
        assert browser.complaints == []
    browser.run(ASK)
    browser.wait_for(f"{SAID}.includes('meristem watch does not answer')")
    assert browser.run(HEADS) == 2
    append(run, "metrics", timed(11))
    with served(run, port=port):
        browser.run(ASK)
        browser.wait_for(f"{SAID}.includes('step 11 of 100')")
        assert "does not answer" not in browser.run(SAID)
    browser.complaints.clear()  # that the server was away


def test_several_runs_are_followed_together(browser: Page, tmp_path: Path) -> None:
    one, two = begun(tmp_path / "one"), tmp_path / "two"
    with served(one, two) as server:
        browser.visit(server.url)
        assert browser.run("document.querySelectorAll('.states li').length") == 2
        begun(two, 20)
        browser.run(ASK)
        browser.wait_for("document.getElementById('which') !== null")
        browser.run(
            "{ const s = document.getElementById('which'); s.value = '1'; s.dispatchEvent(new Event('change')) }"
        )
        append(two, "metrics", timed(21))
        browser.run(ASK)
        browser.wait_for("page.runs[1].last_step === 21")
        assert browser.run("document.getElementById('which').value") == "1"
        assert browser.complaints == []


def test_a_long_run_is_drawn_anew_quickly(browser: Page, tmp_path: Path) -> None:
    run = long_run(tmp_path / "run")
    with served(run) as server:
        browser.visit(server.url)
        browser.run("document.getElementById('loss').scrollIntoView({ behavior: 'instant' })")
        taken = browser.run(
            "(() => { const times = []; for (let i = 0; i < 5; i += 1) { const begin = performance.now();"
            " const back = readersPlace(); redraw(page); back(); document.body.offsetHeight;"
            " times.push(performance.now() - begin); } return times; })()"
        )
        assert min(taken) < 1000, taken  # far above what it takes: tests share the machine
