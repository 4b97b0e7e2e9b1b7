"""One file for a browser: a template with its styles and scripts in place, and the data as JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from meristem.report.page.data import page_data

STYLES = ("theme.css",)  # of every page, with the elements, tables and charts below
SCRIPTS = ("elements.js", "tables.js", "charts.js")
PAGE_FILE = "report.html"


def page_text(
    title: str, data: Mapping[str, Any], styles: Sequence[str] = (), scripts: Sequence[str] = (), *, asks: bool = False,
) -> str:  # fmt: skip
    """A self-contained page: what all pages have, the assets named here, and `data` for the script to read.

    A page that `asks` may fetch what is new from the server that it came from; others load nothing at all.
    Data are JSON in which no character is left that could end the element they stand in.
    """
    plain = json_text(data)
    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
    safe = "".join(escapes.get(letter, letter) for letter in plain)
    parts = {
        "TITLE": html.escape(title),
        "STYLES": _assets((*STYLES, *styles)),
        "SCRIPTS": _assets((*SCRIPTS, *scripts)),
        "DATA": safe,
        "CONNECT": "; connect-src 'self'" if asks else "",
    }
    return re.sub("@(TITLE|STYLES|SCRIPTS|DATA|CONNECT)@", lambda found: parts[found[1]], _assets(("page.html",)))


def json_text(data: Mapping[str, Any]) -> str:
    """Data as compact JSON."""
    plain = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return plain.encode("utf-8", "replace").decode("utf-8")  # a path may hold bytes that are no text


def report_page(runs: Sequence[str | Path]) -> str:
    """The page of one run or several."""
    return page_from(page_data(runs))


def page_from(data: Mapping[str, Any], *, live: bool = False) -> str:
    """The page that shows what `page_data` tells; a `live` one asks its server for what is new."""
    scripts = ("structure.js", "timeline.js", "run_sections.js", "report.js", *(("watch.js",) if live else ()))
    return page_text(data["title"], data, styles=("report.css",), scripts=scripts, asks=live)


def _assets(names: Sequence[str]) -> str:
    folder = files("meristem.report.page") / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
