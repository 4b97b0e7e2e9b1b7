"""The file itself: well-formed, small, harmless, and nothing from elsewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from commands import Call
from meristem.plan import Plan
from meristem.report.page.file import page_text, report_page
from report.page.helpers import START, hand_made, long_run, metric

VOID = {"meta", "link", "br", "hr", "img", "input"}
PLAN = Plan.from_heads([1, 1], width=32, head_dim=8, vocabulary=50, context=16)


class Read(HTMLParser):
    """The elements of a page, which must be closed in their order, and the text of those that are scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return report_page([long_run(tmp_path_factory.mktemp("long") / "run")])


def test_a_long_run_has_a_small_page(long_page: str) -> None:
    assert len(long_page.encode()) < 1_000_000
    data = json.loads(Read(long_page).scripts[0])
    (run,) = data["runs"]
    assert len(run["events"]) == 100
    assert run["last_step"] == 5000
    assert all(one["checked"] for one in run["structure"]["snapshots"])


def test_a_page_is_well_formed_and_needs_nothing_from_elsewhere(long_page: str) -> None:
    read = Read(long_page)
    assert read.tags.count("script") == 2
    assert read.links == ["data:,"]
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", long_page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "default-src 'none'" in long_page
    assert "innerHTML" not in long_page


def test_text_of_others_is_harmless(tmp_path: Path) -> None:
    hostile = "</script><script>window.harm = 1</script><img src=x onerror=harm()> & <!-- \u2028"
    run = hand_made(tmp_path / "run", PLAN, {"data.path": hostile}, events=[{**START, "device": hostile}])
    text = report_page([run])
    read = Read(text)
    assert read.tags.count("script") == 2
    assert "img" not in read.tags
    told = json.loads(read.scripts[0])["runs"][0]
    assert hostile in told["lifetime"][0]["text"]
    assert any(json.loads(row["value"]) == hostile for row in told["settings"] if row["key"] == "data.path")
    page = page_text(hostile, {"a": "\udcff@SCRIPTS@"})  # a path need not be text, and may look like a place to fill in
    assert page.encode()
    assert json.loads(Read(page).scripts[0]) == {"a": "?@SCRIPTS@"}


def test_the_command_writes_the_page_and_names_it(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [hand_made(tmp_path / name, PLAN, {"train.steps": 6}, metrics=[metric(6, 3.0)]) for name in "ab"]
    said = call("report", runs[0])
    assert said.code == 0
    assert said.out.splitlines()[-1] == f"page: {runs[0] / 'report.html'}"
    assert (runs[0] / "loss.svg").is_file()
    assert call("report", *runs).out.splitlines()[-1] == "page: report.html"
    assert "2 runs side by side" in (tmp_path / "report.html").read_text(encoding="utf-8")
    alike = [hand_made(tmp_path / arm / "seed-0", PLAN, {"train.steps": 6}) for arm in ("first", "second")]
    told = [block.partition(":")[0] for block in call("report", *alike).out.split("\n\n")]
    assert told == ["first/seed-0", "second/seed-0"]
    said = call("report", runs[1], "--out", tmp_path / "new" / "one.html")
    assert said.out.splitlines()[-1] == f"page: {tmp_path / 'new' / 'one.html'}"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one.html"]
    said = call("report", tmp_path / "nowhere")
    assert said.code != 0
    assert "not a run" in said.err
